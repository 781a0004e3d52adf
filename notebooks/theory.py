# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why curvature merges, and why averaging learns
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fisherjax/fisherjax/blob/main/notebooks/theory.ipynb)
#
# Two papers prove things about small networks that were trained apart. Both are here to run: the
# networks are small enough to compute every quantity of the proofs, exactly, in seconds.
#
# * **FedFisher** ([Jhunjhunwala, Wang and Joshi, AISTATS 2024](https://arxiv.org/abs/2403.12329)):
#   merge wide networks with the full Fisher information, once, and the error has two sources.
# * **Feature learning** ([Huang, Shi, Cai and Suzuki, ICLR 2024](https://openreview.net/forum?id=EcetCr4trp)):
#   averaging keeps what clients have in common and divides what each has memorised alone.
#
# It runs in about two minutes on two CPU cores.

# %%
# On Colab this installs fisherjax beside Colab's own jax; elsewhere it installs nothing.
import sys
from importlib.metadata import version

from IPython import get_ipython

if "google.colab" in sys.modules:
    source = "fisherjax[experiments] @ git+https://github.com/fisherjax/fisherjax"
    get_ipython().run_line_magic("pip", f"install --quiet '{source}' jax=={version('jax')}")

import jax

import fisherjax as fj

# For this notebook's own programs on jaxlib 0.10.2 to 0.11.2; on others it does nothing.
fj.devices.disable_faulty_fusion()
print(f"fisherjax {fj.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}")
print(*fj.devices.self_check() or ["This machine computes correctly."], sep="\n")

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from fisherjax.theory import feature_learning, laplace, signal_noise, two_layer

jax.config.update("jax_enable_x64", True)  # inputs on a circle: Gram matrices close to singular
plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": "medium"})
BLUE, ORANGE, PURPLE, GREY = "#0b5fa5", "#d98200", "#8b1e6b", "#a3a3a3"

# %% [markdown]
# ## One round with the full Fisher information
#
# Two clients hold points on the unit circle, each on a piece of its own, and each with a linear
# target of its own. A network with one hidden layer must fit both.

# %%
federation = two_layer.draw(jax.random.key(1))
x, y = (np.asarray(z)[np.asarray(federation.indices)] for z in federation[:2])
figure, axes = plt.subplots(figsize=(4.2, 3.4))
for client, marker in enumerate("o^"):
    shown = axes.scatter(*x[client].T, c=y[client], marker=marker, vmin=y.min(), vmax=y.max())
    shown.set_label(f"client {client + 1}")
axes.set(aspect="equal", title="inputs, coloured by their targets")
axes.legend(loc="center")
figure.colorbar(shown)
plt.show()

# %% [markdown]
# Each client descends from the same start $W_0$ to its own $W_i$. The server never sees the data.
# It sees, around each $W_i$, a *linear* network $\varphi_n^\top W$, and solves
# $\min_W \sum_i p_i \tfrac12 (W - W_i)^\top F_i (W - W_i)$, which asks for
# $\varphi_n^\top W = f(x_n, W_i)$ at every example of every client. So the error at an example is
# a sum of three,
#
# $$f(x_n, W) - y_n = \underbrace{f(x_n, W) - \varphi_n^\top W}_{\text{not linear (Laplace)}}
#   + \underbrace{\varphi_n^\top W - f(x_n, W_i)}_{\text{server not done}}
#   + \underbrace{f(x_n, W_i) - y_n}_{\text{client not done}}$$
#
# **The theorem in words:** the wider the network, the less its units have to move, the fewer
# switch on or off between the clients and the merge, and the smaller the first term. Training
# longer makes the last term small, and the first one larger. `laplace.decompose` measures them.


# %%
def accounts(width, steps, seeds=12):
    """Merge clients of a width after so many local steps; medians over seeds."""

    def one(key):
        federation = two_layer.draw(key)
        start = two_layer.initial(jax.random.fold_in(key, 1), width)
        [models] = two_layer.descend(start, federation, [steps])
        quadratic = laplace.gram(models, federation)
        merged = laplace.descent(quadratic, steps=1e5, learning_rate=0.002)
        mean = laplace.decompose(quadratic.mean, start, models, quadratic, federation)
        return laplace.decompose(merged, start, models, quadratic, federation), mean.loss

    keys = jax.random.split(jax.random.key(0), seeds)
    found = jax.jit(lambda keys: fj.parallel.map_clients(one, keys))(keys)
    return jax.tree.map(lambda x: float(np.median(x)), found)


# %% [markdown]
# Three widths, and then three numbers of local steps:

# %%
settings = {f"width {width}": (width, 2048) for width in (32, 256, 2048)}
settings |= {f"{steps} local steps": (512, steps) for steps in (32, 512, 8192)}
found = {name: accounts(*setting) for name, setting in settings.items()}
figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
terms = {"laplace": PURPLE, "server": BLUE, "local": ORANGE}
for axes, names in zip(panels, (list(found)[:3], list(found)[3:]), strict=True):
    for number, (term, colour) in enumerate(terms.items()):
        values = [getattr(found[name][0], term) for name in names]
        axes.bar(np.arange(3) + 0.25 * (number - 1), values, 0.23, color=colour, label=term)
    axes.plot(range(3), [found[name][0].loss for name in names], "ks", label="loss")
    axes.plot(range(3), [found[name][1] for name in names], "D", color=GREY, label="loss of FedAvg")
    axes.set_xticks(range(3), names)
    axes.set_yscale("log")
panels[0].set_title("wider: the network is more nearly linear")
panels[1].set_title("longer: clients fit, and the networks part")
figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
plt.show()

# %% [markdown]
# The purple bar is what the theorem is about: it falls by two orders of magnitude from left to
# right on the left, and grows with local training on the right, while the orange one falls. The
# blue one is the price of stopping the server's descent: without it the nearest exact solution
# would leave the linear region along directions that no example tells apart. How much units move:

# %%
for name, (account, _) in found.items():
    print(f"{name:>18}: furthest {account.furthest:.3f}, gates switched {account.switched:.3f}")

# %% [markdown]
# ## Rounds of averaging, on signal and noise
#
# An example of the second paper is two patches: the *signal* of its client, times the label
# $y = \pm 1$, and noise. A small convolutional network can learn the signal, which generalises, or
# memorise the noise, which does not. What its filters have learned is multiples of the signals
# ($\gamma$) and of the clients' noise patches ($\rho$), and these coefficients follow a recursion
# that is computed beside the weights:

# %%
jax.config.update("jax_enable_x64", False)
keys = jax.random.split(jax.random.key(0), 3)


def learn(owners, mixing, norm=2.0, rounds=40):
    """Train clients with these signals; 400 dimensions, 20 examples each."""
    data = signal_noise.draw(keys[0], owners, num_examples=20, dim=400, norm=norm)
    test = signal_noise.draw_test(keys[1], data, 500)
    start = signal_noise.initial(keys[2], 20, 400)
    return (start, data, *feature_learning.train(start, data, test, mixing, rounds=rounds))


start, data, state, history = learn([0, 0], feature_learning.average(2))
error = jnp.abs(feature_learning.reconstruct(start, state, data) - state.weights).max()
print(f"weights put together from their coefficients: off by {float(error):.1e}")

# %% [markdown]
# **The theorem in words:** a mean over clients keeps the signal that they share and divides the
# noise that each has memorised alone by their number, at every round. So with enough clients the
# signal wins. Three numbers of clients, all with one signal:

# %%
figure, panels = plt.subplots(1, 3, figsize=(11, 3.4))
looks = {1: {"color": GREY, "ls": ":"}, 4: {"color": ORANGE, "ls": "--"}, 16: {"color": BLUE}}
for number, look in looks.items():
    *_, history = learn(number * [0], feature_learning.average(number))
    for axes, values in zip(panels, (history.signal, history.noise), strict=False):
        axes.plot(values[:, 1:, 0].ravel(), **look, label=f"{number} clients")
    panels[2].plot(history.test_accuracy.mean(-1), **look)
titles = "signal learned, gamma", "noise memorised, rho", "test accuracy"
for axes, title in zip(panels, titles, strict=True):
    axes.set(title=title, xlabel="round" if title == "test accuracy" else "local step")
panels[0].legend()
plt.show()

# %% [markdown]
# ## When clients have different signals
#
# Twelve clients; some share a signal, the others have one each. The theorem counts only those that
# share: FedAvg over everybody divides the signal too. Averaging within the group does not. And one
# merge by curvature, of clients that trained alone, in place of 40 rounds?


# %%
def compare(sharing, norm=1.6):
    """Give the accuracy of a client that shares its signal with so many, in five ways."""
    owners = sharing * [0] + list(range(1, 13 - sharing))
    mixings = {
        "alone": feature_learning.alone(12),
        "FedAvg": feature_learning.average(12),
        "within the group": feature_learning.within_groups(owners),
    }
    accuracies = {}
    for way, mixing in mixings.items():
        _, data, state, history = learn(owners, mixing, norm)
        accuracies[way] = float(history.test_accuracy[-1, 0])
        if way == "alone":
            apart, clients = state.weights, data
    model, federation = signal_noise.network(20), signal_noise.federation(clients)
    test = signal_noise.draw_test(keys[1], clients, 500)
    for name in ("fedavg", "fedfisher_kfac"):
        method = fj.algorithms.make(name, model)
        trained = fj.training.Trained(apart)
        updates = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
        merged, *_ = fj.merging.merge(method, start, updates)
        judged = test._replace(owners=clients.owners[:1])
        _, accuracy = feature_learning.performance(merged[None], judged)
        accuracies[f"one merge, {fj.algorithms.METHODS[name].label}"] = float(accuracy[0])
    return accuracies


figure, axes = plt.subplots(figsize=(9, 3.4))
for place, sharing in enumerate((1, 4, 12)):
    values = compare(sharing)
    for number, (way, colour) in enumerate(
        zip(values, (GREY, ORANGE, BLUE, "#1a1a1a", PURPLE), strict=True)
    ):
        where = place + 0.16 * (number - 2)
        axes.bar(where, values[way], 0.15, color=colour, label=way if not place else None)
axes.set_xticks(range(3), [f"{sharing} of 12 share the signal" for sharing in (1, 4, 12)])
axes.set(ylim=(0.45, 1.02), title="test accuracy of a client that shares")
figure.legend(loc="outside lower center", ncols=5)
plt.show()

# %% [markdown]
# The whole picture, accuracy over the number of clients and the signal-to-noise ratio with the
# theorem's boundary drawn in, is `python -m experiments.theory --figure phase`; the papers' own
# figures are there too ([what came out](../docs/methods/theory.md)).
