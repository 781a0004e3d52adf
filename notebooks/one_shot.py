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
# # One-shot federated learning in pictures
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fisherjax/fisherjax/blob/main/notebooks/one_shot.ipynb)
#
# Five clients hold different data and will not share them. Each trains a network of its own; then,
# in a *single* round of communication, a server must make one network of the five that is good on
# everybody's data. The plain mean of the weights forgets most of what the clients have learned.
# **FedFisher** ([Jhunjhunwala, Wang and Joshi, AISTATS 2024](https://arxiv.org/abs/2403.12329))
# asks every client for one thing more: a compact picture of its *Fisher information*, which says
# in which directions its weights may move and in which they must not. From that the server gets
# its network by solving one linear system, without any data.
#
# Here is the whole idea on 8 × 8 images of digits, every step a pure JAX function of `fisherjax`.
# It runs in one to two minutes on two CPU cores.

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
import dataclasses

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": "medium"})
MERGED, REFERENCE = "#0b5fa5", "#a3a3a3"
CLIENT_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"]  # Okabe and Ito's
CLIENT_LINES = ["--", "-.", ":", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1))]

# %% [markdown]
# ## The data

# %%
train, test = fj.datasets.load("digits")
print(f"{len(train.targets)} images to learn from, {len(test.targets)} to test on")

_, panels = plt.subplots(1, 10, figsize=(8, 1))
for digit, panel in enumerate(panels):
    panel.imshow(train.inputs[train.targets == digit][0, ..., 0], cmap="gray_r")
    panel.axis("off")

# %% [markdown]
# ## Who owns which label
#
# Every client draws its shares of the ten digits from a Dirichlet distribution with concentration
# $\alpha = 0.1$. So small an $\alpha$ makes specialists: most clients never see most of the
# digits.

# %%
partition = fj.partition.dirichlet_of_client(train.targets, num_clients=5, alpha=0.1, seed=0)
federation = fj.clients.federation(train, partition)
counts = fj.partition.label_counts(train.targets, partition)
names = [f"client {client}" for client in range(federation.num_clients)]


def heat_map(panel, values, rows, title):
    """Show one number for each row and digit."""
    panel.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    for (row, digit), value in np.ndenumerate(np.round(values).astype(int)):
        ink = "white" if value > 0.6 * np.max(values) else "black"
        panel.text(digit, row, value or "·", ha="center", va="center", color=ink)
    panel.set(xticks=range(10), xlabel="digit", yticks=range(len(rows)), yticklabels=rows)
    panel.set_title(title)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


_, panel = plt.subplots(figsize=(6.5, 2.6))
heat_map(panel, counts, names, "what each client has seen: number of training images")

# %% [markdown]
# ## Local training
#
# A model is a function `apply(params, inputs)` of a pytree `params`, and what its outputs mean. One
# call trains all clients from a common start, as one compiled program. The recipe is that of
# `make demo`.

# %%
mlp = fj.networks.MLP(features=(64, 64), num_classes=10, use_bias=False)
apply = fj.networks.apply_fn(mlp, fj.datasets.normalizer(train))
model = fj.Model(apply, fj.likelihoods.categorical)
test_examples = fj.Examples(test.inputs, test.targets)
recipe = {"optimizer": optax.sgd(0.05, momentum=0.9), "epochs": 30, "batch_size": 32}

init_key, key = jax.random.split(jax.random.key(0))
start = fj.networks.init(mlp, init_key, train.inputs)
clients = fj.training.train(model, start, federation, key=key, **recipe)


@jax.jit
def test_outputs(params):
    """Compute the network's outputs on the test images [360, 10]."""
    return fj.metrics.logits(model, params, test.inputs)


@jax.jit
def digit_accuracies(outputs):
    """Compute the accuracy on the test images of each digit, in percent [10]."""
    hits = outputs.argmax(-1) == test.targets
    of_digit = jax.nn.one_hot(test.targets, 10)
    return 100 * hits @ of_digit / of_digit.sum(0)


local_outputs = jax.vmap(test_outputs)(clients.models)
local = jax.vmap(digit_accuracies)(local_outputs)

_, panel = plt.subplots(figsize=(6.5, 2.6))
heat_map(panel, local, names, "what each client knows: test accuracy, %")

# %% [markdown]
# A client knows what it has seen, if it has seen more than a handful, and nothing else. Together
# the five know every digit.
#
# ## What FedAvg forgets
#
# Federated averaging takes the mean of the weights, $\bar W = \sum_i p_i W_i$, where $p_i$ is the
# client's share of all examples. As every way of merging, it has two halves: `summarize` runs on
# each client, `merge` on the server.


# %%
def one_shot(algorithm):
    """Run both halves; return what the clients send and what the server makes of it."""
    updates = fj.merging.summarize(algorithm, clients, federation, key=key)
    merged, _, _ = fj.merging.merge(algorithm, start, updates, federation.weights)
    return updates.values, merged


_, fedavg = one_shot(fj.algorithms.fedavg())

_, panel = plt.subplots(figsize=(6.5, 2.8))
digits = np.arange(10)
panel.bar(digits - 0.2, local.max(0), 0.38, color=REFERENCE, label="the client that knows it best")
panel.bar(digits + 0.2, digit_accuracies(test_outputs(fedavg)), 0.38, color=MERGED, label="FedAvg")
panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
panel.set(xticks=digits, xlabel="digit", ylabel="test accuracy, %")
panel.tick_params(axis="x", length=0)
panel.margins(x=0.01)

# %% [markdown]
# ## What the Fisher keeps
#
# At its own solution $W_i$ the gradient of client $i$'s loss is about zero, so around it the loss
# is a bowl,
#
# $$L_i(W) \approx L_i(W_i) + \tfrac12\,(W-W_i)^\top F_i\,(W-W_i),$$
#
# in which the Fisher information stands for the Hessian:
#
# $$F_i = \frac1{n_i}\sum_{x}\,\mathbb E_{y\sim p(y\mid x,\,W_i)}\big[g\,g^\top\big],
# \qquad g = \nabla_W \log p(y\mid x,\,W_i).$$
#
# It asks how much the *predictions* change, and needs no labels. Where the bowl is flat the client
# does not care about its weights; where it is steep they must stay. The server minimises the sum
# of the bowls,
#
# $$W^\star = \arg\min_W\; \sum_i p_i\,\tfrac12\,(W-W_i)^\top F_i\,(W-W_i).$$
#
# If all $F_i$ were equal, that would be FedAvg. With as many rows and columns as there are
# weights, $F_i$ is too large to send. Clients send its **diagonal**, or, for the matrix $V$ of
# each layer, two **Kronecker factors** (K-FAC):
#
# $$F_i V \approx A_i\,V\,G_i,$$
#
# where $A_i$ holds the second moments of the layer's inputs, and $G_i$ those of the gradients at
# its outputs.
#
# The diagonal first. The first layer has a weight from every pixel to every hidden unit. The mean
# over hidden units is an image: *which pixels matter to whom*.

# %%
diagonal = fj.algorithms.fedfisher(model, fisher=fj.fisher.diagonal)
diagonal_updates, diagonal_merged = one_shot(diagonal)
entries = diagonal_updates["fisher"].entries["dense1"]["kernel"]  # [clients, pixels, hidden units]

_, panels = plt.subplots(2, 5, figsize=(8, 3.6))
for client, rows in enumerate(partition):
    panels[0, client].imshow(train.inputs[rows, ..., 0].mean(0), cmap="gray_r")
    panels[1, client].imshow(entries[client].mean(-1).reshape(8, 8), cmap="cividis", vmin=0)
    seen = ", ".join(map(str, np.flatnonzero(counts[client] >= 10)))
    panels[0, client].set_title(f"client {client}\n{seen}", fontsize="small", loc="center")
panels[0, 0].set_ylabel("mean image")
panels[1, 0].set_ylabel("Fisher\n(bright: matters)")
for panel in panels.flat:
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)

# %% [markdown]
# Then two of the Kronecker factors: $A$ of the first layer, pixel by pixel, and $G$ of the last,
# digit by digit.

# %%
kfac = fj.algorithms.fedfisher(model, fisher=fj.fisher.kfac)
kfac_updates, kfac_merged = one_shot(kfac)
factors = kfac_updates["fisher"].factors

num_weights = sum(leaf.size for leaf in jax.tree.leaves(start))
num_factors = sum(leaf[0].size for leaf in jax.tree.leaves(factors))
print(f"One client: {num_weights:,} weights, {num_factors:,} numbers in Kronecker factors,")
print(f"and {num_weights**2:,} in the full Fisher information, which nobody computes.")

spectra = jnp.linalg.eigvalsh(factors["dense1/kernel"]["output"])  # ascending
shares = 100 * spectra[:, -10:].sum(1) / spectra.sum(1)
print(f"Ten of 64 eigenvalues make up at least {shares.min():.0f} % of the first layer's G.")

_, panels = plt.subplots(2, 5, figsize=(8, 3.6))
for client in range(federation.num_clients):
    A, G = factors["dense1/kernel"]["input"][client], factors["dense3/kernel"]["output"][client]
    panels[0, client].imshow(A, cmap="cividis", vmin=0)
    panels[1, client].imshow(G, cmap="RdBu_r", vmin=-jnp.abs(G).max(), vmax=jnp.abs(G).max())
    panels[0, client].set_title(names[client], fontsize="small", loc="center")
    panels[0, client].set(xticks=[], yticks=[])
    panels[1, client].set(xticks=range(10), yticks=range(10) if client == 0 else [])
    panels[1, client].tick_params(length=0, labelsize="x-small")
panels[0, 0].set_ylabel("$A$, first layer\n(pixels)")
panels[1, 0].set_ylabel("$G$, last layer\n(digits)")
for panel in panels.flat:
    panel.spines[:].set_visible(False)

# %% [markdown]
# $A$ knows which pixels light up together. $G$ (red positive, blue negative, white zero) knows
# which digits are hard for the client to keep apart, most of all those of which it has seen only a
# few. About digits that it has never seen it is nearly silent: their probability is close to zero,
# and stays there if the weights move a little. In the hidden layers too $G$ guards a few
# directions only, those that the client's own outputs depend on. Keep that in mind.
#
# ## Merging
#
# The same five clients, merged in every way:
#
# * **FedAvg**, the mean.
# * **FisherMerge**, the mean of each weight on its own, weighted by the clients' diagonals. That
#   is the minimum above for diagonal $F_i$, in closed form, so **FedFisher** with the diagonal
#   should agree, but for weights with next to no curvature.
# * **FedFisher with K-FAC**, by conjugate gradients on
#   $\sum_i p_i A_i V G_i = \sum_i p_i A_i W_i G_i$, layer by layer.
# * **RegMean**, which asks every dense layer to give the clients' outputs on the clients' own
#   inputs. It is the same system with $G_i = I$ and a shrunken $A_i$.
#
# In grey what merging is compared with: the best single client, the ensemble that averages the
# outputs of all five (five networks, not one), and one network trained on all the data, the
# ceiling.

# %%
_, fisher_merged = one_shot(fj.algorithms.fisher_merge(model))
_, regmean_merged = one_shot(fj.algorithms.regmean(model))
everything = fj.clients.federation(train, fj.partition.central(train.targets))
central = fj.training.train(model, start, everything, key=key, **recipe)

local_accuracies = fj.metrics.accuracy(model, clients.models, test_examples, stacked=True)
outputs = {
    "best client": local_outputs[local_accuracies.argmax()],
    "ensemble": fj.tree.weighted_sum(local_outputs, federation.weights),
    "trained on all data": test_outputs(jax.tree.map(lambda leaf: leaf[0], central.models)),
    "FedAvg": test_outputs(fedavg),
    "FisherMerge": test_outputs(fisher_merged),
    "FedFisher, diagonal": test_outputs(diagonal_merged),
    "FedFisher, K-FAC": test_outputs(kfac_merged),
    "RegMean": test_outputs(regmean_merged),
}

_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(1.6, 1), sharey=True)
by_digit = jnp.stack([digit_accuracies(output) for output in outputs.values()])
heat_map(left, by_digit, list(outputs), "test accuracy by digit, %")
for place, output in enumerate(outputs.values()):
    accuracy = 100 * np.mean(output.argmax(-1) == test.targets)
    right.barh(place, accuracy, color=REFERENCE if place < 3 else MERGED)
    right.text(accuracy + 1, place, f"{accuracy:.1f}", va="center")
right.set(xlim=(0, 110), xticks=[], title="of all test images, %")
right.spines[:].set_visible(False)
right.tick_params(length=0)

# %% [markdown]
# One solve on the server, and much of what the mean forgot is there again. One run is an anecdote:
# `make demo` repeats it for four partitions and three seeds. RegMean comes first in these too, for
# a reason that we shall see; on the papers' convolutional networks FedFisher with K-FAC does, on
# average ([tables](https://github.com/fisherjax/fisherjax/blob/main/docs/results/accuracy.md)).
#
# ## Along the line
#
# What does the server know about the losses that it cannot measure? Walk in a straight line from
# the FedAvg mean through the FedFisher solution and beyond. On the left the true losses of the
# five clients, on the right their bowls, which are all that the server sees.

# %%
owner = jnp.stack([jnp.zeros(len(train.targets)).at[rows].set(1) for rows in partition], axis=1)


def point(t):
    """Go from FedAvg (t = 0) to FedFisher with K-FAC (t = 1)."""
    return jax.tree.map(lambda a, b: (1 - t) * a + t * b, fedavg, kfac_merged)


def losses(params):
    """Compute the mean loss on each client's data, in nats [clients]."""
    z = fj.metrics.logits(model, params, train.inputs)
    return model.likelihood.negative_log_likelihood(z, train.targets) @ owner / owner.sum(0)


def bowl(update, params):
    """Compute 1/2 (W - W_i)^T F_i (W - W_i)."""
    difference = jax.tree.map(jnp.subtract, params, update["params"])
    return fj.tree.inner(difference, update["fisher"].mv(difference)) / 2


line = jnp.linspace(-0.4, 1.8, 45)
true = jax.lax.map(lambda t: losses(point(t)), line)
bowls = jax.vmap(lambda t: jax.vmap(bowl, (0, None))(kfac_updates, point(t)))(line)

figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4))
curves = {"what is true: the losses": true, "what the server sees: the bowls": bowls}
for panel, (title, values) in zip(panels, curves.items(), strict=True):
    everybody = values @ federation.weights
    print(f"{title}, lowest for everybody at {line[everybody.argmin()]:.2f} of the way")
    for client, name in enumerate(names):
        look = {"color": CLIENT_COLOURS[client], "linestyle": CLIENT_LINES[client]}
        panel.plot(line, values[:, client], **look, label=name)
    panel.plot(line, everybody, color="black", linewidth=3, label="everybody")
    panel.set(xticks=(0, 1), xticklabels=("FedAvg", "FedFisher"), title=title)
    panel.set(ylabel="nats", ylim=(0, None))
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
for panel in panels:
    panel.grid(axis="x")

# %% [markdown]
# The bowls are far too shallow (mind the scales): they were measured at the clients' solutions,
# where confident networks hardly react, and the merged network lies far from those. Yet both black
# curves have their lowest point in the same region: a factor in front of the loss would not move
# it.
#
# ## Damping
#
# Far from the clients the bowls cannot be trusted, and in some directions they have no curvature
# at all. `fedfisher` therefore adds a gentle pull towards the mean,
# $\tfrac{\lambda}{2}\lVert V - \bar V\rVert^2$ for each layer, with $\lambda$ equal to $\delta$
# times the mean eigenvalue of that layer's $\sum_i p_i F_i$. Being relative, one $\delta$ serves
# every layer and network: the default is 1 for K-FAC and 0 for the diagonal, on every data set. It
# was chosen by looking at the test accuracy of a few settings, of digits among them
# ([which](../docs/results/constants.md)).
#
# The server's half is `quadratic`, the problem, and `solvers`, its solution. Both are pure, so one
# `vmap` solves for all $\delta$ at once. The third curve replaces $G_i$ by the identity, as
# RegMean does.


# %%
def with_identity(factor):
    """Replace the clients' G [clients, outputs, outputs] by the identity."""
    G = factor["output"]
    return {"input": factor["input"], "output": jnp.broadcast_to(jnp.eye(G.shape[-1]), G.shape)}


identities = {name: with_identity(factor) for name, factor in factors.items()}
fishers = {
    "K-FAC": (kfac_updates["fisher"], "-", MERGED),
    "K-FAC with $G = I$": (
        dataclasses.replace(kfac_updates["fisher"], factors=identities),
        "--",
        "#d55e00",
    ),
    "diagonal": (diagonal_updates["fisher"], ":", "#009e73"),
}


@jax.jit
def accuracies(fisher, dampings):
    """Merge with every damping; return the test accuracies in percent."""

    def accuracy(damping):
        problem = fj.quadratic.quadratic(fisher, clients.params, federation.weights, damping)
        params = fj.solvers.conjugate_gradients()(problem).params
        return 100 * fj.metrics.accuracy(model, params, test_examples)

    return jax.vmap(accuracy)(dampings)


dampings = jnp.geomspace(0.01, 30, 36)

figure, panel = plt.subplots(figsize=(7.5, 3.2))
for name, (fisher, style, colour) in fishers.items():
    panel.semilogx(dampings, accuracies(fisher, dampings), style, color=colour, label=name)
panel.axvline(1, color=REFERENCE, linewidth=1)
panel.annotate("K-FAC's default", (1, 97), xytext=(4, 0), textcoords="offset points")
panel.set(xlabel=r"damping $\delta$", ylabel="test accuracy, %", ylim=(0, 100))
figure.legend(loc="outside right center")
panel.grid(axis="y", color="#e4e4e4")

# %% [markdown]
# K-FAC cares little about its damping over a wide range. The dashed curve, with little damping,
# shows why RegMean wins here: where $G = I$ a client guards *all* its hidden units, and not just
# the few directions that its own outputs depend on. The layers above belong to everybody after the
# merge, and read the other directions too. That is no rule: for LeNet on MNIST $G = I$ is much the
# worse choice. And to choose $\delta$ or $G$ by this picture would be to choose on test data.
#
# ## Layer by layer
#
# So the layers should be solved in the order of the forward pass, each told what the layers before
# it have done to its inputs, and each guarding, beside what its own client's outputs depend on,
# as much of the other directions as the layers behind it are going to change.
# `fedfisher_sequential` does that with the very upload that K-FAC has made.
#
# ## Exchanges without training
#
# And why stop after one round? The merged network can go back to the clients, who need not train:
# they *look*, and answer with sums.
#
# * **The analytic head.** Second moments of the last layer's inputs and their products with the
#   labels: the server solves the ridge regression of everybody's data.
# * **Natural gradients.** The gradient of everybody's loss, with Kronecker factors that are now of
#   everybody's data, at one and the same network. How far to go along the K-FAC directions is
#   chosen on examples that the clients hold aside.
#
# Beside them FedAvg's way to go on: a round of local training, and the mean, again and again.

# %%
sequential = fj.algorithms.fedfisher_sequential(model)
_, layer_by_layer = one_shot(sequential)
head, step = fj.algorithms.analytic_head(model), fj.algorithms.natural_gradient(model)


def test_accuracy(params):
    """Compute the accuracy on all test images, in percent."""
    return 100 * float(fj.metrics.accuracy(model, params, test_examples))


exchanged, model_now = [test_accuracy(layer_by_layer)], layer_by_layer
for number, method in enumerate([head, step, step, step, step]):
    own_key = jax.random.fold_in(key, number)
    model_now, _, _ = fj.merging.exchange(method, model_now, federation, key=own_key)
    exchanged.append(test_accuracy(model_now))

averaged = {
    "FedAvg, and rounds of averaging": fedavg,
    "layer by layer, and the same": layer_by_layer,
}
one_epoch = recipe | {"epochs": 1}
for name, params in averaged.items():
    averaged[name] = [test_accuracy(params)]
    for number in range(5):
        own_key = jax.random.fold_in(key, number)
        trained = fj.training.train(model, params, federation, key=own_key, **one_epoch)
        params = fj.tree.weighted_sum(trained.models, federation.weights)
        averaged[name].append(test_accuracy(params))

figure, panel = plt.subplots(figsize=(7.5, 3.2))
rounds = range(1, 7)
panel.plot(rounds, exchanged, "-o", color=MERGED, label="layer by layer, then no training")
for (name, values), style in zip(averaged.items(), ("--", ":"), strict=True):
    panel.plot(rounds, values, style, marker="o", color=REFERENCE, label=name)
central_accuracy = test_accuracy(jax.tree.map(lambda leaf: leaf[0], central.models))
panel.axhline(central_accuracy, color="black", linewidth=1)
where = {"xytext": (0, 3), "textcoords": "offset points"}
panel.annotate("trained on all data", (1, central_accuracy), **where)
panel.set(xlabel="round of communication", ylabel="test accuracy, %", xticks=rounds, ylim=(0, 104))
figure.legend(loc="outside lower center", ncols=3)
panel.grid(axis="y", color="#e4e4e4")
print("layer by layer, then no training:", *(f"{value:.1f}" for value in exchanged))

# %% [markdown]
# Here one exchange of sums, without a single local step, is worth more than five rounds of training
# and averaging: what is missing is not training, but that it is everybody's. On LeNet and MNIST the
# tables in docs/results/accuracy.md say the same.
#
# ## Your own network
#
# Nothing here needs the library's networks, or flax. Any pytree and any function will do; K-FAC
# finds the dense and convolution layers by itself, and says so if a parameter belongs to none.


# %%
def network(params, x):
    """Map images to outputs; the image's scale is part of the network."""
    hidden = jnp.tanh(x.reshape(len(x), 64) / 16 @ params["kernel"] + params["bias"])
    return hidden @ params["readout"]


shapes = {"kernel": (64, 32), "bias": (32,), "readout": (32, 10)}
params = {name: 0.1 * jax.random.normal(jax.random.key(1), shape) for name, shape in shapes.items()}
own = fj.Model(network, fj.likelihoods.categorical)
trained = fj.training.train(own, params, federation, key=key, **recipe)

methods = {"FedAvg": fj.algorithms.fedavg(), "FedFisher": fj.algorithms.fedfisher(own)}
for name, method in methods.items():
    updates = fj.merging.summarize(method, trained, federation, key=key)
    merged, _, _ = fj.merging.merge(method, params, updates, federation.weights)
    accuracy = 100 * fj.metrics.accuracy(own, merged, test_examples)
    print(f"{name}: {accuracy:.1f} %")

# %% [markdown]
# For models that were trained elsewhere, give `summarize` a list with the params of each client in
# place of `trained`.
#
# ## Where to go on
#
# * `python -m experiments.one_shot --help`: MNIST, CIFAR-10 and more, convolutional networks,
#   other partitions, methods and solvers, with tables of means and deviations.
# * `fj.fisher`: the full Fisher information and the matrix-free product, of the true, sampled or
#   empirical kind, for one model and one data set, no clients needed.
# * `fj.algorithms.Algorithm`: a few pure functions, most with defaults. A new method is one such
#   tuple, and `fj.rounds` runs it for many rounds.
