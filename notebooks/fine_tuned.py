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
# Two clients fine-tune the same sentence encoder, MiniLM with 22.7 million numbers, each on
# sentences of its own: reviews of films, and newspaper editorials. The server has neither. It
# merges two **checkpoints** and then two **LoRA adapters**, and each merge says what it did.
#
# It runs in two to four minutes on two CPU cores. Where the weights or the sentences are missing,
# small stand-ins take their place: then the same code runs in about a minute, and its numbers mean
# nothing. The weights come with `python -m experiments.pretrained --prepare`.

# %%
import sys

from IPython import get_ipython

if "google.colab" in sys.modules:  # elsewhere: `pip install -e '.[experiments,pretrained]'`
    get_ipython().system("git clone --quiet --depth 1 https://github.com/fisherjax/fisherjax clone")
    get_ipython().run_line_magic("pip", "install --quiet './clone[experiments,pretrained]'")
    sys.path.append("clone")
    from experiments.pretrained import prepare, weights

    prepare.prepare(weights.folder(), None, print)

# %%
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import fisherjax as fj
from experiments.pretrained import minilm, sentences, text_clients, weights

# For this notebook's own programs on jaxlib 0.10.2 to 0.11.2; on others it does nothing.
fj.devices.disable_faulty_fusion()

plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": "medium"})
BLUE, ORANGE, GREY = "#0b5fa5", "#e69f00", "#a3a3a3"

task = text_clients.Task(domains=("film", "nyt"), examples=300, tested=300)
key = jax.random.key(0)

# %% [markdown]
# ## Weights and sentences
#
# Without the four domains of VADER's authors (Hutto and Gilbert, ICWSM 2014) sentences are made of
# a few words; some words praise a film and blame a government.


# %%
def made_of_words(subjects, praise, blame, seed):
    """Make labelled sentences, each a document of its own."""
    source = np.random.default_rng(seed)
    labels = source.integers(2, size=600).astype(np.int32)
    texts = [
        f"the {source.choice(subjects)} was {source.choice(source.permutation((blame, praise)[y]))}"
        f" and {source.choice((blame, praise)[y])} , said {source.choice(['ann', 'bob', 'cho'])}"
        for y in labels
    ]
    return sentences.Sentences(tuple(texts), labels, np.arange(600))


EXAMPLES = (
    made_of_words(
        ["plot", "film", "cast"],
        ["good", "funny", "moving", "dark", "shocking", "unpredictable"],
        ["bad", "dull", "slow", "safe", "sober", "familiar"],
        seed=0,
    ),
    made_of_words(
        ["law", "vote", "speech"],
        ["good", "fair", "wise", "safe", "sober", "familiar"],
        ["bad", "unjust", "corrupt", "dark", "shocking", "unpredictable"],
        seed=1,
    ),
)
try:
    checkpoint = weights.path("minilm/model.safetensors").parent
except FileNotFoundError as error:
    checkpoint = None
    print(f"A small random network stands in for MiniLM: {error}")
folder = Path(os.environ.get("TFDS_DATA_DIR", "../../shared/data")) / "vader"
has_domains = checkpoint is not None and folder.is_dir()
if not has_domains:
    print("Sentences made of a few words stand in for film reviews and editorials.")


def tokens_of(texts):
    """Return tokens [N, 16], by MiniLM's vocabulary or by the places of a few words."""
    if checkpoint is not None:
        return sentences.tokens(checkpoint / "tokenizer.json", texts, task.length)[0]
    words = sorted(
        {word for example in EXAMPLES for text in example.texts for word in text.split()}
    )
    rows = [[1 + words.index(word) for word in text.split()] for text in texts]
    return np.array([row + [0] * (task.length - len(row)) for row in rows])


def split(example):
    """Return the examples to train on and to test on."""
    tokens = tokens_of(example.texts).astype(np.int32)
    rows = sentences.split(example.documents, task.tested, task.examples, seed=0)
    return [fj.Examples(tokens[part], example.labels[part]) for part in rows]


if has_domains:
    data = text_clients.data(task, folder, checkpoint / "tokenizer.json", seed=0)
else:
    train, test = zip(*map(split, EXAMPLES), strict=True)
    both = [np.concatenate([getattr(x, part) for x in train]) for part in ("inputs", "targets")]
    rows = np.split(np.arange(len(both[1])), [len(train[0].targets)])
    data = text_clients.Data(fj.clients.federation(tuple(both), rows), list(test))

if checkpoint is None:
    pretrained = minilm.init(width=48, inner=96, words=60, positions=task.length, blocks=2)
else:
    pretrained = minilm.load(checkpoint)
print(f"{sum(x.size for x in pretrained.values()):,} numbers")

# %% [markdown]
# ## One start for all
#
# Changes of a network can be added up only if they begin at one point, its head included. So the
# clients first send sums, from which the server fits a common head by ridge regression; nobody
# trains for that. Then each client trains the last two blocks, for two epochs.

# %%
start = text_clients.with_head(pretrained, data)
blocks = sorted({name.split(".")[2] for name in start if name.startswith("encoder")})[-2:]
last = tuple(f"encoder.layer.{block}." for block in blocks)
model = minilm.model(start)._replace(mask={name: name.startswith(last) for name in start})
how = {"epochs": 2, "batch_size": 16, "key": key}
trained = fj.training.train(model, start, data.train, optimizer=optax.adam(1e-4), **how)

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
    sent = fj.merging.summarize(method, trained, data.train, key=key)
    merged, _, info = fj.merging.merge(method, start, sent, data.train.weights)
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
targets = [f"{block}attention.self.{part}.weight" for block in last for part in ("query", "value")]
adapted, begin = fj.adapters.attach(
    model, start, targets, rank=4, alpha=8, transposed=True, key=key
)
tuned = fj.training.train(adapted, begin, data.train, optimizer=optax.adam(2e-3), **how)

place = Path(tempfile.mkdtemp())
about = {"base_model_name_or_path": "all-MiniLM-L6-v2", "task_type": "FEATURE_EXTRACTION"}
own = []
for client, name in enumerate(task.domains):
    adapters = {
        leaf: jax.tree.map(lambda x, client=client: x[client], adapter)._replace(
            scale=begin["adapters"][leaf].scale
        )
        for leaf, adapter in tuned.params["adapters"].items()
    }
    own.append({"base": start, "adapters": adapters})
    modules = {leaf.removesuffix(".weight^T"): x for leaf, x in adapters.items()}
    fj.files.save_adapter(place / name, modules, config=about)
print(sorted(path.name for path in (place / task.domains[0]).iterdir()))

# %% [markdown]
# The mean of the changes has rank 8, the sum of both: that merge is exact. Cut to rank 4 it loses
# something, and `lost` says which part of the mean change, in the ordinary norm. If clients also
# send their factors, the merge and the cut weigh what matters to the outputs. That merge leaves the
# mean on purpose, so that the same number says how far it went.

# %%
folders = [place / name for name in task.domains]
dense = fj.adapters.dense(model, begin)
factors = []
for client, params in enumerate(own):
    rows = data.train.indices[client][:100]
    examples = fj.Examples(data.train.inputs[rows], data.train.targets[rows])
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
# Accuracy on 300 test sentences of each domain; a difference of two points is chance.


# %%
def accuracies(params):
    """Compute the accuracy on each domain, in percent."""
    return [100 * float(fj.metrics.accuracy(model, params, test)) for test in data.test]


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
        "client of films": first,
        "client of editorials": second,
        "average": average,
        "K-FAC": merged,
    },
    "adapters": {
        "the start": start,
        "client of films": fj.adapters.merged(own[0]),
        "client of editorials": fj.adapters.merged(own[1]),
        "exact mean": with_adapter("exact"),
        "mean, rank 4": with_adapter("small"),
        "K-FAC, rank 4": with_adapter("weighed"),
    },
}
_, panels = plt.subplots(1, 2, figsize=(8.5, 3), sharex=True)
for panel, (title, models) in zip(panels, tested.items(), strict=True):
    found = np.array([accuracies(params) for params in models.values()])
    places = np.arange(len(models))
    for number, (label, colour) in enumerate(
        zip(("films", "editorials"), (BLUE, ORANGE), strict=True)
    ):
        bars = panel.barh(places + 0.38 * number, found[:, number], 0.36, color=colour, label=label)
        panel.bar_label(bars, fmt="%.1f", padding=2, fontsize="x-small")
    panel.set_yticks(places + 0.19, list(models))
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.set(title=title, xlabel="test accuracy, %", xlim=(40, 105))
    print(title, {name: round(float(x.mean()), 1) for name, x in zip(models, found, strict=True)})
panels[0].legend(loc="upper right", fontsize="x-small")

# %% [markdown]
# The clients start from a head that fits both domains, and a few hundred sentences teach them
# little beside it: whole networks lose more than they gain, and a merge gives a part of that back;
# adapters change little. Which merge is the best cannot be seen in so few sentences:
# [Merge fine-tuned models](https://github.com/fisherjax/fisherjax/blob/main/docs/how_to/fine_tuned.md)
# says what decides it, with larger measurements, and which method to take when.
#
# The merged adapter is a folder that peft loads, and the merged network has the names and layouts
# of the checkpoint: `fj.files.save_arrays("merged.safetensors", merged)`.
