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
# # The Fisher information of your own model
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fisherjax/fisherjax/blob/main/notebooks/your_model.ipynb)
#
# The Fisher information of a model says how much its predictions change when its weights do,
#
# $$F = \frac1n\sum_{x}\,\mathbb E_{y\sim p(y\mid x,\,W)}\big[g\,g^\top\big],
# \qquad g = \nabla_W \log p(y\mid x,\,W).$$
#
# Here it is computed for a stock equinox network and for a small vision transformer in flax, on
# 8 × 8 images of digits, without any clients; and then two transformers that were trained apart
# and written to two files become one. It runs in one to two minutes on two CPU cores.

# %%
# On Colab this installs fisherjax beside Colab's own jax; elsewhere it installs nothing.
import sys
from importlib.metadata import version

from IPython import get_ipython

if "google.colab" in sys.modules:
    source = "fisherjax[experiments] @ git+https://github.com/fisherjax/fisherjax"
    get_ipython().run_line_magic("pip", f"install --quiet '{source}' equinox jax=={version('jax')}")

import jax

import fisherjax as fj

# For this notebook's own programs on jaxlib 0.10.2 to 0.11.2; on others it does nothing.
fj.devices.disable_faulty_fusion()
print(f"fisherjax {fj.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}")
print(*fj.devices.self_check() or ["This machine computes correctly."], sep="\n")

# %%
import tempfile
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": "medium"})
BLUE, ORANGE, GREY = "#0b5fa5", "#e69f00", "#a3a3a3"

train, test = fj.datasets.load("digits")
normalize = fj.datasets.normalizer(train)
examples = fj.Examples(normalize(train.inputs), train.targets)
held_out = fj.Examples(normalize(test.inputs), test.targets)
everything = fj.clients.federation(
    (examples.inputs, examples.targets), fj.partition.central(train.targets)
)


def fit(model, params, federation, epochs):
    """Train on each client's examples; stacked models come back."""
    optimizer = optax.adam(3e-3)
    how = {"optimizer": optimizer, "epochs": epochs, "batch_size": 32, "key": jax.random.key(1)}
    return fj.training.train(model, params, federation, **how)


# %% [markdown]
# ## An equinox network
#
# For this library a model is a function of params and a batch of inputs. An equinox module is
# partitioned into its arrays and the rest, and mapped over the batch.

# %%
module = eqx.nn.MLP(64, 10, 32, depth=1, key=jax.random.key(0))
start, static = eqx.partition(module, eqx.is_inexact_array)


def apply(params, images):
    """Classify images [B, 8, 8, 1]."""
    return jax.vmap(eqx.combine(params, static))(images.reshape(len(images), -1))


mlp = fj.Model(apply, fj.likelihoods.categorical)
stacked = fit(mlp, start, everything, epochs=10).models
params = jax.tree.map(lambda leaf: leaf[0], stacked)
print(f"test accuracy {fj.metrics.accuracy(mlp, params, held_out):.3f}")

# %% [markdown]
# ## Three pictures of one matrix
#
# The **diagonal** has a number for each weight. **K-FAC** has two small matrices for each layer,
# with $F V \approx A V G$ for the layer's matrix $V$: $A$ of its inputs, $G$ of the gradients at
# its outputs. The **full** matrix, with a row for each of the weights, is for small networks
# only. All three are operators on params: `mv`, `diagonal()`, `trace()`.

# %%
diagonal = fj.fisher.diagonal(mlp, params, examples)
kfac = fj.fisher.kfac(mlp, params, examples)
print(f"K-FAC covers {kfac.coverage:.0%} of the weights")

pixels = diagonal.entries.layers[0].weight.mean(0).reshape(8, 8)  # kernels are [outputs, inputs]
hidden, last = kfac.factors.values()
peak = jnp.abs(last["output"]).max()
_, panels = plt.subplots(1, 4, figsize=(9, 2.5))
panels[0].imshow(examples.inputs.mean(0)[..., 0], cmap="gray_r")
panels[0].set_title("mean image")
panels[1].imshow(pixels, cmap="cividis", vmin=0)
panels[1].set_title("diagonal: which\npixels matter")
panels[2].imshow(hidden["input"][:64, :64], cmap="cividis")
panels[2].set_title("K-FAC: $A$, first layer")
panels[3].imshow(last["output"], cmap="RdBu_r", vmin=-peak, vmax=peak)
panels[3].set_title("K-FAC: $G$, last layer")
for panel in panels:
    panel.set(xticks=[], yticks=[])

# %% [markdown]
# How good are the approximations? Products $F v$ with the exact matrix need no matrix at all:
# `fisher.vector_product` is one forward and one backward derivative. Here is $v^\top F v$ of each,
# along random directions $v$ and along the gradients of single examples, all of length one.


# %%
@jax.jit
@jax.vmap
def curvatures(direction):
    """Compute v^T F v by the exact matrix, by K-FAC and by the diagonal."""
    size = jnp.sqrt(fj.tree.inner(direction, direction))
    v = jax.tree.map(lambda leaf: leaf / size, direction)
    exact = fj.fisher.vector_product(mlp, params, examples, v)
    return [fj.tree.inner(v, product) for product in (exact, kfac.mv(v), diagonal.mv(v))]


@jax.vmap
def gradient(image, digit):
    """Differentiate the loss of one example."""
    loss = mlp.likelihood.negative_log_likelihood
    return jax.grad(lambda p: loss(mlp.apply(p, image[None]), digit[None])[0])(params)


source = np.random.default_rng(0)
noise = jax.tree.map(lambda leaf: source.normal(size=(15, *leaf.shape)).astype("f4"), params)
directions = {
    "random directions": noise,
    "gradients of test images": gradient(held_out.inputs[:15], held_out.targets[:15]),
}
_, panel = plt.subplots(figsize=(6, 3.4))
for (name, vectors), marker in zip(directions.items(), "os", strict=True):
    exact, by_kfac, by_diagonal = curvatures(vectors)
    panel.loglog(exact, by_kfac, marker, ms=4, color=BLUE, label=f"K-FAC, {name}")
    panel.loglog(exact, by_diagonal, marker, ms=4, color=ORANGE, label=f"diagonal, {name}")
panel.axline((0.01, 0.01), (1, 1), color=GREY, lw=1, zorder=0)
panel.set(xlabel="exact $v^\\top F v$", ylabel="approximation")
panel.legend(fontsize="small")

# %% [markdown]
# Along random directions both have the right size. Along directions that matter to the
# predictions the diagonal falls far short: it does not know which weights go together.
#
# ## A small vision transformer
#
# Patches of 2 × 2 pixels, learned positions, one block of attention, in plain flax. K-FAC finds
# its layers in the program: kernels of attention with three axes, positions, the scales and shifts
# of LayerNorm (as exact 2 × 2 blocks).


# %%
class ViT(nn.Module):
    """One block of attention over 16 patches of an image [B, 8, 8, 1]."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(24, (2, 2), (2, 2), name="patches")(images).reshape(len(images), 16, 24)
        x = x + self.param("positions", nn.initializers.normal(0.02), (16, 24))
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm1")(x))
        inner = nn.gelu(nn.Dense(48, name="up")(nn.LayerNorm(name="norm2")(x)))
        x = x + nn.Dense(24, name="down")(inner)
        return nn.Dense(10, name="head")(x.mean(1))


network = ViT()
vit = fj.Model(lambda p, x: network.apply({"params": p}, x), fj.likelihoods.categorical)
vit_start = network.init(jax.random.key(3), examples.inputs[:1])["params"]
base = jax.tree.map(lambda leaf: leaf[0], fit(vit, vit_start, everything, epochs=10).models)
print(f"test accuracy {fj.metrics.accuracy(vit, base, held_out):.3f}")

# %% [markdown]
# The 16 positions share each layer's weights. `fisher.expand`, the default, counts each position
# like an example; with `sharing=fisher.reduce` those of an example count together.

# %%
curvature = fj.fisher.kfac(vit, base, examples, max_examples=500, key=jax.random.key(4))
print(f"K-FAC covers {curvature.coverage:.0%} of the weights")

by_name = dict(zip(fj.tree.names(base), jax.tree.leaves(curvature.diagonal()), strict=True))
kernels = {name: entries.mean() for name, entries in by_name.items() if name.endswith("kernel")}
_, panel = plt.subplots(figsize=(8, 2.6))
labels = [name.removesuffix("/kernel").replace("/", "\n") for name in kernels]
panel.bar(labels, list(kernels.values()), color=BLUE)
panel.set(yscale="log", ylabel="Fisher of a weight")
panel.set_title("which layers of the transformer matter: mean over their weights")

# %% [markdown]
# ## Two files
#
# Two clients continue from this model, each with its own digits, and send their params in half
# precision and, in a second file, their Fisher. One of them joins names by dots, as PyTorch does.
# The server has no data.

# %%
partition = fj.partition.dirichlet_of_client(train.targets, 2, alpha=0.1, seed=0)
clients = fj.clients.federation((examples.inputs, examples.targets), partition)
trained = fit(vit, base, clients, epochs=5)
fedfisher = fj.algorithms.fedfisher(vit, max_examples=500)
sent = fj.merging.summarize(fedfisher, trained, clients, key=jax.random.key(5)).values

folder = Path(tempfile.mkdtemp())


def dotted(name):
    """Name a leaf as PyTorch would."""
    return name.replace("/", ".")


names = {"first": None, "second": dotted}
for client, (name, mapping) in enumerate(names.items()):
    own = jax.tree.map(lambda leaf, client=client: leaf[client], sent)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), own["params"])
    fj.files.save_arrays(folder / f"{name}.safetensors", half, mapping=mapping)
    fj.files.save_arrays(folder / f"{name}_fisher.safetensors", own["fisher"])
for path in sorted(folder.iterdir()):
    print(f"{path.name:27} {path.stat().st_size / 1e3:6.0f} kB")

# %%
received = [
    fj.algorithms.Update(
        {
            "params": fj.files.load_arrays(
                folder / f"{name}.safetensors", base, mapping=mapping, cast=True
            ),
            "fisher": fj.files.load_arrays(folder / f"{name}_fisher.safetensors", curvature),
        },
        fedfisher.kind,
    )
    for name, mapping in names.items()
]
merged, _, info = fj.merging.merge(fedfisher, base, received, clients.weights)
models = [update.values["params"] for update in received]
mean = fj.tree.weighted_sum(fj.tree.stack(models), clients.weights)

found = fj.tree.stack([*models, mean, merged])
accuracies = 100 * fj.metrics.accuracy(vit, found, held_out, stacked=True)
labels = ["first client", "second client", "weighted mean", "merged by K-FAC"]
_, panel = plt.subplots(figsize=(6, 2))
bars = panel.barh(labels, accuracies, color=[GREY, GREY, ORANGE, BLUE])
panel.bar_label(bars, fmt="%.1f", padding=3)
panel.invert_yaxis()
panel.set(xlabel="test accuracy, %", xlim=(0, 105))
panel.tick_params(axis="y", length=0)

# %% [markdown]
# Each client has forgotten much of what the other knows; the merged model has most of both. How
# much merging by the Fisher gains depends on the clients:
# [how well it merges](https://github.com/fisherjax/fisherjax/blob/main/docs/results/accuracy.md).
#
# [The Fisher of your own model](https://github.com/fisherjax/fisherjax/blob/main/docs/how_to/your_model.md)
# has a section for each framework, and how a server learns the clients' weights by descent.
