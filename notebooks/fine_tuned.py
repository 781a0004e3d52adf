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
# # Merge fine-tuned networks
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fisherjax/fisherjax/blob/main/notebooks/fine_tuned.ipynb)
#
# Two clients fine-tune the same network, each on data of its own, and the server has neither. It
# merges two **checkpoints** and then two **LoRA adapters**, and each merge says what it did. The
# network is MiniLM, a sentence encoder of 22.7 million numbers; one client has reviews of films,
# the other newspaper editorials.
#
# It runs in two to four minutes on two CPU cores. Where MiniLM or the sentences are missing, as on
# Colab, handwritten digits take their place, five of the ten for each client: the same code then
# runs in about a minute on two CPU cores. In a checkout the weights come with
# `python -m experiments.pretrained --prepare`.

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
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": "medium"})
BLUE, ORANGE, GREY = "#0b5fa5", "#e69f00", "#a3a3a3"

key = jax.random.key(0)

# %% [markdown]
# ## One start for all
#
# Changes of a network can be added up only if they begin at one point, its head included. So for
# MiniLM the clients first send sums, from which the server fits a common head by ridge regression;
# nobody trains for that. The sentences are of VADER's authors (Hutto and Gilbert, ICWSM 2014).
#
# A task is here the names of the clients, their federation, their test examples, the start, the
# network, whose mask trains the last two blocks, and the matrices that will have adapters.


# %%
def last_two(params):
    """Return the beginnings of the names of the last two blocks."""
    blocks = sorted({name.split(".")[2] for name in params if name.startswith("encoder")})
    return tuple(f"encoder.layer.{block}." for block in blocks[-2:])


def sentences():
    """Return MiniLM on film reviews and editorials, where a checkout has them."""
    from experiments.pretrained import minilm, text_clients, weights

    checkpoint = weights.path("minilm/model.safetensors").parent
    folder = Path(os.environ.get("TFDS_DATA_DIR", "../../shared/data")) / "vader"
    if not folder.is_dir():
        raise FileNotFoundError(f"no sentences in {folder}")
    task = text_clients.Task(domains=("film", "nyt"), examples=300, tested=300)
    data = text_clients.data(task, folder, checkpoint / "tokenizer.json", seed=0)
    start = text_clients.with_head(minilm.load(checkpoint), data)
    last = last_two(start)
    model = minilm.model(start)._replace(mask={name: name.startswith(last) for name in start})
    parts = [f"attention.self.{part}.weight" for part in ("query", "value")]
    return ("films", "editorials"), data.train, data.test, start, model, parts


def digits():
    """Return a small network that 200 digits have trained, for clients of five digits each."""
    train, test = fj.datasets.load("digits")
    normalize = fj.datasets.normalizer(train)
    images, tested = (np.asarray(normalize(x.inputs)).reshape(-1, 64) for x in (train, test))

    def apply(params, x):
        for block in range(3):
            weights = params[f"encoder.layer.{block}.weight"]
            x = jnp.tanh(x @ weights.T + params[f"encoder.layer.{block}.bias"])
        return x @ params["head.weight"].T

    source = np.random.default_rng(0)
    shapes = {f"encoder.layer.{block}.weight": (64, 64) for block in range(3)}
    shapes["head.weight"] = (10, 64)
    start = {name: source.normal(size=s).astype(np.float32) / 8 for name, s in shapes.items()}
    start |= {f"encoder.layer.{block}.bias": np.zeros(64, np.float32) for block in range(3)}
    model = fj.Model(apply, fj.likelihoods.categorical)
    few = fj.clients.federation([(images[:200], train.targets[:200])])
    how = {"epochs": 10, "batch_size": 16, "key": key}
    first = fj.training.train(model, start, few, optimizer=optax.adam(1e-3), **how)
    start = jax.tree.map(lambda x: x[0], first.models)
    halves = [np.flatnonzero((train.targets < 5) == low) for low in (True, False)]
    tests = [(test.targets < 5) == low for low in (True, False)]
    mask = {name: name.startswith(last_two(start)) for name in start}
    federation = fj.clients.federation((images, train.targets), halves)
    examples = [fj.Examples(tested[rows], test.targets[rows]) for rows in tests]
    return ("0 to 4", "5 to 9"), federation, examples, start, model._replace(mask=mask), ["weight"]


try:
    names, federation, tests, start, model, parts = sentences()
except (ImportError, FileNotFoundError) as error:
    print(f"Digits take the place of sentences: {error}")
    names, federation, tests, start, model, parts = digits()
print(f"{sum(x.size for x in start.values()):,} numbers")

# %% [markdown]
# Each client trains the last two blocks, for two epochs.

# %%
how = {"epochs": 2, "batch_size": 16, "key": key}
trained = fj.training.train(model, start, federation, optimizer=optax.adam(1e-4), **how)

# %% [markdown]
# ## Two checkpoints
#
# With its checkpoint a client sends Kronecker factors, which tell how much the outputs of each
# layer depend on its weights. `info` says what became of the merge:
#
# * `covered`: the share of the trained weights that K-FAC knows; the rest would be averaged.
# * `status`: one for each layer. `CONVERGED` is what one wants; `NO_CURVATURE` would mean that no
#   client's outputs depend on that layer, which then is averaged.

# %%
averaging = fj.algorithms.fedavg()
kfac = fj.algorithms.fedfisher(model, max_examples=100, damping=0.1, kind=fj.fisher.jacobian)


def merged_by(method, start, trained):
    """Let clients summarize what they have, and merge on the server."""
    sent = fj.merging.summarize(method, trained, federation, key=key)
    merged, _, info = fj.merging.merge(method, start, sent, federation.weights)
    return merged, info


average, _ = merged_by(averaging, start, trained)
merged, info = merged_by(kfac, start, trained)
statuses = {fj.solvers.Status(int(x)).name for x in jax.tree.leaves(info.status)}
print(f"K-FAC covers {info.covered:.1%} of the trained weights; layers: {statuses}")

# %% [markdown]
# On the command line, with Fisher files from `python -m fisherjax fisher`, that is
#
#     python -m fisherjax merge merged/ film/ nyt/ --fisher film.safetensors nyt.safetensors
#
# ## Two adapters
#
# An adapter changes a layer's matrix $W$ by $\tfrac{\alpha}{r} B A$, with two thin factors. Both
# clients start from the same base; their ranks may differ. They write folders as peft does.

# %%
targets = [f"{block}{part}" for block in last_two(start) for part in parts]
adapted, begin = fj.adapters.attach(
    model, start, targets, rank=4, alpha=8, transposed=True, key=key
)
tuned = fj.training.train(adapted, begin, federation, optimizer=optax.adam(2e-3), **how)

place = Path(tempfile.mkdtemp())
about = {"base_model_name_or_path": "the start", "task_type": "FEATURE_EXTRACTION"}
own = []
for client, name in enumerate(names):
    adapters = {
        leaf: jax.tree.map(lambda x, client=client: x[client], adapter)._replace(
            scale=begin["adapters"][leaf].scale
        )
        for leaf, adapter in tuned.params["adapters"].items()
    }
    own.append({"base": start, "adapters": adapters})
    modules = {leaf.removesuffix(".weight^T"): x for leaf, x in adapters.items()}
    fj.files.save_adapter(place / name, modules, config=about)
print(sorted(path.name for path in (place / names[0]).iterdir()))

# %% [markdown]
# The mean of the changes has rank 8, the sum of both: that merge is exact. Cut to rank 4 it loses
# something, and `lost` says which part of the mean change, in the ordinary norm. If clients also
# send their factors, the merge and the cut weigh what matters to the outputs. That merge leaves the
# mean on purpose, so that the same number says how far it went.

# %%
folders = [place / name for name in names]
dense = fj.adapters.dense(model, begin)
factors = []
for client, params in enumerate(own):
    rows = federation.indices[client][:100]
    examples = fj.Examples(federation.inputs[rows], federation.targets[rows])
    changed = fj.adapters.merged(params)
    found = fj.fisher.kfac(dense, changed, examples, kind=fj.fisher.jacobian).factors
    factors.append({leaf.removesuffix(".weight"): x for leaf, x in found.items()})

exact = fj.files.merge_adapters(place / "exact", folders)
small = fj.files.merge_adapters(place / "small", folders, rank=4)
metric = {"factors": factors, "in_span": True}
weighed = fj.files.merge_adapters(place / "weighed", folders, rank=4, **metric)
for module, lost in small.lost.items():
    ranks = f"rank {exact.ranks[module]} to {small.ranks[module]}"
    print(f"{module}: {ranks} loses {lost:.2f}; K-FAC is {weighed.lost[module]:.2f} away")

# %% [markdown]
# ## What the merges know
#
# Accuracy on the test examples of each client, 300 sentences; two points of difference are chance.


# %%
def accuracies(params):
    """Compute the accuracy on each domain, in percent."""
    return [100 * float(fj.metrics.accuracy(model, params, test)) for test in tests]


def with_adapter(name):
    """Return the network with the adapter in a folder."""
    adapters = fj.files.load_adapter(place / name).adapters
    return fj.adapters.merged(
        {"base": start, "adapters": {f"{module}.weight^T": x for module, x in adapters.items()}}
    )


first, second = (jax.tree.map(lambda x, i=i: x[i], trained.models) for i in range(2))
tested = {
    "checkpoints": {
        "the start": start,
        f"client of {names[0]}": first,
        f"client of {names[1]}": second,
        "average": average,
        "K-FAC": merged,
    },
    "adapters": {
        "the start": start,
        f"client of {names[0]}": fj.adapters.merged(own[0]),
        f"client of {names[1]}": fj.adapters.merged(own[1]),
        "exact mean": with_adapter("exact"),
        "mean, rank 4": with_adapter("small"),
        "K-FAC, rank 4": with_adapter("weighed"),
    },
}
_, panels = plt.subplots(1, 2, figsize=(8.5, 3), sharex=True)
for panel, (title, models) in zip(panels, tested.items(), strict=True):
    found = np.array([accuracies(params) for params in models.values()])
    places = np.arange(len(models))
    for number, (label, colour) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
        bars = panel.barh(places + 0.38 * number, found[:, number], 0.36, color=colour, label=label)
        panel.bar_label(bars, fmt="%.1f", padding=2, fontsize="x-small")
    panel.set_yticks(places + 0.19, list(models))
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.set(title=title, xlabel="test accuracy, %", xlim=(40, 105))
    print(title, {name: round(float(x.mean()), 1) for name, x in zip(models, found, strict=True)})
panels[0].legend(loc="upper right", fontsize="x-small")

# %% [markdown]
# With sentences, the clients start from a head that fits both domains, and a few hundred sentences
# teach them little beside it: whole networks lose more than they gain, and a merge gives a part of
# that back; adapters change little. Which merge is the best cannot be seen in so few sentences:
# [Merge fine-tuned models](https://github.com/fisherjax/fisherjax/blob/main/docs/how_to/fine_tuned.md)
# says what decides it, with larger measurements, and which method to take when.
#
# The merged adapter is a folder that peft loads, and the merged network has the names and layouts
# of the checkpoint: `fj.files.save_arrays("merged.safetensors", merged)`.
