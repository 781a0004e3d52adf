"""FedOV: clients train networks of their own kind, and vote; and one model that learns their vote.

Every client begins from an initial model of its own and trains by Adam, as in the paper. Of the
training data a part is held aside from these clients: without its labels a student learns from it
what the vote is. The paper's student learns from the first half of the test images, and only the
second half judges: `aside` is test.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.harness.config import STUDENT
from fisherjax.clients import Federation
from fisherjax.parallel import Layout, chunk_size
from fisherjax.typing import Array, Examples, Key, Model, Params

NAME = "fedov"
_ASIDE = 5000  # training rows, or a tenth of fewer
_ADAM = optax.chain(optax.add_decayed_weights(1e-5), optax.adam(1e-3))


class Voting(NamedTuple):
    """What FedOV needs besides the data: networks of C + 1 outputs and of C, on stored images."""

    names: tuple[str, ...]  # of those that were asked for
    model: Model
    init: Callable[[Key], Params]
    normalize: Callable[[Array], Array]
    student: Model
    student_init: Callable[[Key], Params]
    aside: Literal["train", "test"]


def names(algorithms: Sequence[str]) -> tuple[str, ...]:
    """Select what is FedOV among algorithms."""
    return tuple(name for name in algorithms if name in (NAME, STUDENT))


class Found(NamedTuple):
    """Accuracy, and seconds: of the clients, and of the server; bytes of one client's models."""

    accuracy: float
    seconds: float
    server: float
    upload_bytes: int


def split(federation: Federation, key: Key) -> tuple[Federation, np.ndarray]:
    """Hold training rows aside: the clients' data without them, and the rows."""
    rows = [
        np.asarray(own[:size])
        for own, size in zip(federation.indices, federation.sizes, strict=True)
    ]
    owned = np.concatenate(rows)
    number = min(_ASIDE, len(owned) // 10)
    aside = np.asarray(jax.random.permutation(key, jnp.asarray(owned)))[:number]
    left = [own[~np.isin(own, aside)] for own in rows]
    return fj.clients.federation((federation.inputs, federation.targets), left), aside


def run(
    voting: Voting,
    federation: Federation,
    test: Examples,
    *,
    key: Key,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None,
    progress: Callable[[str], None],
) -> dict[str, Found]:
    """Train the clients, let them vote, and teach a student if it is among the names."""
    split_key, start_key, train_key, student_key = jax.random.split(key, 4)
    aside = None
    if STUDENT in voting.names and voting.aside == "train":
        federation, rows = split(federation, split_key)
        aside = federation.inputs[rows]
    elif STUDENT in voting.names:
        half = len(test.targets) // 2
        aside, test = test.inputs[:half], Examples(test.inputs[half:], test.targets[half:])
    progress(f"{NAME}: the clients learn")
    begun = time.perf_counter()
    opened = fj.algorithms.open_set(voting.model, voting.normalize)
    starts = jax.vmap(voting.init)(jax.random.split(start_key, federation.num_clients))
    start = jax.tree.map(lambda leaf: leaf[0], starts)
    local = fj.training.check(opened, start, federation, key, _ADAM, epochs, batch_size)
    layout = Layout(chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    given = (None, starts), (None, ()), federation, train_key, epochs
    trained = jax.block_until_ready(fj.training.train_cohort(local, layout, *given))
    stacked, weights = fj.merging.check_updates(trained.params, federation.weights, "raise")
    learnt = time.perf_counter() - begun
    sent = sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))
    method, vote = fj.algorithms.fedov(voting.model), fj.algorithms.voting(voting.model)
    updates = fj.algorithms.Update({"params": stacked}, method.kind)
    stacked, _, _ = fj.merging.merge(method, start, updates, weights)
    found = {NAME: Found(float(fj.metrics.accuracy(vote, stacked, test)), learnt, 0.0, sent)}
    if aside is not None:
        progress(f"{STUDENT}: it learns the vote")
        begun = time.perf_counter()
        first = voting.student_init(student_key)
        given = vote, stacked, voting.student, first, aside
        params, _ = fj.algorithms.distilled(*given, key=student_key)
        jax.block_until_ready(params)
        took = time.perf_counter() - begun
        judged = float(fj.metrics.accuracy(voting.student, params, test))
        found[STUDENT] = Found(judged, learnt + took, took, sent)
    return {name: found[name] for name in voting.names}
