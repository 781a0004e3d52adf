"""Fine-tune MiniLM or its adapters on four domains, a client each, and on all of them together."""

import dataclasses
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.pretrained import minilm, sentences
from fisherjax._core.caching import cached
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Examples, Model, Params

OF_SPLIT = ("num_clients", "label_alpha")
"""Options that only a domain that is split has."""
SHORTEST = 16
"""Sentences with fewer tokens are left out."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What clients train on, and how."""

    domains: tuple[str, ...] = sentences.DOMAINS
    """Domains of sentences, one for each client; each a federation of its own if --num-clients."""
    num_clients: int | None = None
    """Clients over which each domain is split by label; None makes every domain one client."""
    label_alpha: float = 0.1
    """Parameter of the Dirichlet shares of labels of each client, with --num-clients."""
    examples: int = 600
    """Largest number of training sentences of a client."""
    tested: int = 300
    """Largest number of test sentences of a domain."""
    length: int = 16
    """Number of tokens that sentences are cut to, or padded to."""
    epochs: int = 3
    """Epochs of fine-tuning."""
    batch_size: int = 16
    """Sentences of a minibatch."""
    learning_rate: float = 3e-5
    """Step size of Adam."""


class Data(NamedTuple):
    """Sentences of the clients, and the test sentences of each domain."""

    train: Federation
    test: list[Examples]


class Clients(NamedTuple):
    """A start with its head, and networks that were fine-tuned from it.

    Attributes:
        base: The network whose params are those of MiniLM and a head, which is frozen.
        model: The network that was trained: the base, or the base with adapters.
        start: Params of `model` before fine-tuning.
        trained: The clients, one for each domain or for each part of the one that they share.
        joint: One network that was fine-tuned on all sentences, as a single client.
        seconds: Seconds of the clients' training, and of the joint one, when they were trained.
    """

    base: Model
    model: Model
    start: Params
    trained: Trained
    joint: Trained
    seconds: tuple[float, ...]


# Equal options give the same object, so that nothing compiles again.
_adam = cached(optax.adam)


def data(task: Task, folder: Path, tokenizer: Path, seed: int) -> Data:
    """Read the domains in `folder`, and split each by document, and one also over clients."""
    inputs, targets, rows, test = [], [], [], []
    for name in task.domains:
        read = sentences.read(folder / f"{name}.tsv")
        tokens, lengths = sentences.tokens(tokenizer, read.texts, task.length)
        kept = lengths >= SHORTEST
        tokens, labels = tokens[kept].astype(np.int32), read.labels[kept]
        train, held = sentences.split(read.documents[kept], task.tested, task.examples, seed)
        rows.append(np.arange(len(train)) + sum(map(len, rows)))
        inputs.append(tokens[train])
        targets.append(labels[train])
        test.append(Examples(tokens[held], labels[held]))
    both = np.concatenate(inputs), np.concatenate(targets)
    if task.num_clients:
        split = task.num_clients, task.label_alpha, seed
        rows = fj.partition.dirichlet_of_client(both[1], *split)
    return Data(fj.clients.federation(both, rows), test)


def clients(
    task: Task,
    found: Data,
    checkpoint: Path,
    seed: int,
    cache: Path,
    *,
    rank: int = 0,
    alpha: float = 16.0,
) -> Clients:
    """Fine-tune all networks of a seed, or read them from `cache` if they were trained before.

    With a rank, the kernels of all blocks get adapters of this rank, which alone are trained; alpha
    is the numerator of their scale.
    """
    about = digest(task, seed, *([rank, alpha] if rank else []))
    path = cache / f"text-seed{seed}-{about}.safetensors"
    kept = fj.files.load_arrays(path) if path.is_file() else {}
    start = minilm.load(checkpoint)
    if kept:
        head = {name: kept[f"start/{name}"] for name in _zero_head(start)}
        start = jax.tree.map(jnp.asarray, start | head)
    else:
        start = with_head(start, found)
        head = {name: start[name] for name in _zero_head(start)}
    base = model = minilm.model(start)
    if rank:
        how = {"rank": rank, "alpha": alpha, "transposed": True, "key": jax.random.key(seed)}
        model, start = fj.adapters.attach(base, start, is_kernel, **how)
    if not kept:
        several, seconds = [], []
        both = found.train.inputs, found.train.targets
        together = fj.clients.federation(both, fj.partition.central(len(both[1])))
        for federation in (found.train, together):
            begun = time.perf_counter()
            trained = fj.training.train(
                *(model, start, federation),
                key=jax.random.key(seed),
                optimizer=_adam(task.learning_rate),
                epochs=task.epochs,
                batch_size=task.batch_size,
            )
            several.append(fj.tree.by_name(jax.block_until_ready(trained.params)))
            seconds.append(time.perf_counter() - begun)
        parts = {"start": head, "clients": several[0], "joint": several[1]}
        kept = {f"{part}/{name}": x for part, own in parts.items() for name, x in own.items()}
        kept["seconds"] = np.array(seconds)
        cache.mkdir(parents=True, exist_ok=True)
        fj.files.save_arrays(path, kept)
    trained, joint = (_as_trained(model, start, kept, part) for part in ("clients", "joint"))
    return Clients(base, model, start, trained, joint, (*map(float, kept["seconds"]),))


def digest(task: Task, seed: int, *more: float) -> str:
    """Return a name of everything that clients depend on."""
    # The options of merging, which a task may have too, do not change what is trained.
    options = {field.name: getattr(task, field.name) for field in dataclasses.fields(Task)}
    if task.num_clients is None:  # as clients were kept before domains could be split
        options = {name: x for name, x in options.items() if name not in OF_SPLIT}
    about = json.dumps([options, seed, *more], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def is_kernel(name: str) -> bool:
    """Return whether a leaf is a matrix of a block: of its attention, or dense."""
    return bool(re.fullmatch(r"encoder\..*(query|key|value|dense)\.weight", name))


def with_head(params: Params, found: Data) -> Params:
    """Add the head that all clients share: ridge regression on the embeddings of all sentences.

    Clients send sums only (`analytic_head`). Its outputs estimate probabilities; as logits they are
    scaled by the number for which the mean training loss is least.
    """
    head = _zero_head(params)
    params = jax.tree.map(jnp.asarray, params | head)
    # Every leaf is free here, because the exchange refuses to solve a frozen head.
    free = minilm.model(params)._replace(mask=None)
    key, method = jax.random.key(0), fj.algorithms.analytic_head(free)
    params, _, _ = fj.merging.exchange(method, params, found.train, key=key)
    outputs = fj.metrics.logits(free, params, found.train.inputs)
    scale = _scale(outputs, jnp.asarray(found.train.targets))
    return params | {name: scale * params[name] for name in head}


def _scale(outputs: Any, labels: Any) -> float:
    """Return the factor of logits for which the mean loss is least, to 5 %."""
    factors = np.geomspace(0.5, 100, 110)
    loss = optax.softmax_cross_entropy_with_integer_labels
    return float(min(factors, key=lambda factor: float(loss(factor * outputs, labels).mean())))


def _zero_head(params: Params) -> dict[str, np.ndarray]:
    width = len(params["embeddings.LayerNorm.bias"])
    return {"head.weight": np.zeros((2, width), "f"), "head.bias": np.zeros(2, "f")}


def _as_trained(model: Model, start: Params, kept: dict[str, Any], part: str) -> Trained:
    own, frozen = fj.leaves.split_trained(model, start)
    params = {name: kept[f"{part}/{name}"] for name in fj.tree.names(own)}
    return Trained(fj.leaves.replace(own, params), own, frozen=frozen)
