"""FedOV: clients train networks of their own kind, and vote; and one model that learns their vote.

Every client begins from an initial model of its own and trains by Adam, as in the paper. Of the
training data a part is held aside from these clients: without its labels a student learns from it
what the vote is. The paper's student learns from the first half of the test images, and only the
second half judges: `aside` is test.
"""

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import commands
from experiments.harness.names import STUDENT, is_vote
from fisherjax.clients import Federation
from fisherjax.devices import Memory
from fisherjax.local_update import ClientInputs
from fisherjax.parallel import Layout, chunk_size
from fisherjax.training import Cohort, Trained
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
    options: commands.Options = ()

    def told(self, name: str, function: Callable[..., Any]) -> dict[str, Any]:
        """Select what a function was told, by the options of a method."""
        known = inspect.signature(function).parameters
        own = ((option.split("."), value) for option, value in self.options)
        return {o: value for (method, o), value in own if method == name and o in known}

    @property
    def opened(self) -> Model:
        """What clients train."""
        own = self.told(NAME, fj.algorithms.open_set)
        return fj.algorithms.open_set(self.model, self.normalize, **own)

    @property
    def vote(self) -> Model:
        """What all of their networks are together."""
        return fj.algorithms.voting(self.model, **self.told(NAME, fj.algorithms.voting))

    @property
    def learning(self) -> dict[str, int]:
        """How the student learns: epochs and the size of a minibatch."""
        known = inspect.signature(fj.algorithms.distilled).parameters
        usual = {option: known[option].default for option in ("epochs", "batch_size")}
        return usual | self.told("student", fj.algorithms.distilled)


def check(voting: Voting, num_clients: int) -> None:
    """Refuse what the networks, the vote and the student cannot be told."""
    _ = voting.opened, voting.vote
    quorum = voting.told(NAME, fj.algorithms.voting).get("quorum")
    if quorum is not None and quorum > num_clients:
        raise ValueError(f"--fedov.quorum is {quorum}, expected 1 to the {num_clients} clients")
    for option, value in voting.learning.items():
        if value < 1:
            told = option.replace("_", "-")
            raise ValueError(f"--student.{told} is {value}, expected a whole number from 1 up")


def names(algorithms: Sequence[str]) -> tuple[str, ...]:
    """Select what is FedOV among algorithms."""
    return tuple(filter(is_vote, algorithms))


class Found(NamedTuple):
    """Accuracy, and seconds: of the clients, and of the server; bytes of one client's models."""

    accuracy: float
    seconds: float
    server: float
    upload_bytes: int


class Ready(NamedTuple):
    """The clients, the inputs that a student learns from, if any does, and what judges."""

    federation: Federation
    aside: Array | None
    test: Examples


def ready(voting: Voting, federation: Federation, test: Examples, key: Key) -> Ready:
    """Take away from clients or judges what a student learns from, if there is one."""
    if STUDENT not in voting.names:
        return Ready(federation, None, test)
    if voting.aside == "train":
        federation, rows = split(federation, key)
        return Ready(federation, federation.inputs[rows], test)
    half = len(test.targets) // 2
    judges = Examples(test.inputs[half:], test.targets[half:])
    return Ready(federation, test.inputs[:half], judges)


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
    made = fj.clients.federation((federation.inputs, federation.targets), left)
    # In the shape that it had: whatever is held aside, the same program trains.
    more = federation.indices.shape[1] - made.indices.shape[1]
    made = made._replace(indices=jnp.pad(made.indices, ((0, 0), (0, more))))
    mesh = federation.mesh
    return (fj.clients.shard(made, list(mesh.devices.flat)) if mesh else made), aside


def trained(
    voting: Voting, federation: Federation, keys: tuple[Key, Key], **options: int | None
) -> Trained:
    """Train the clients, each from an initial model of its own; the keys are of those and of it.

    The options are epochs, batch_size and clients_per_chunk.
    """
    cohort = _cohort(voting, federation, keys, **options)
    return jax.block_until_ready(fj.training.train_cohort(cohort))


def memory(
    voting: Voting, federation: Federation, keys: tuple[Key, Key], **options: int | None
) -> Memory:
    """Predict the bytes that `trained` needs on each device."""
    return fj.training.cohort_memory(_cohort(voting, federation, keys, **options))


def _cohort(
    voting: Voting,
    federation: Federation,
    keys: tuple[Key, Key],
    *,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None,
) -> Cohort:
    """Give each client an initial model of its own; all leaves are trained, as `open_set` wants."""
    start_key, train_key = keys
    starts = jax.vmap(voting.init)(jax.random.split(start_key, federation.num_clients))
    start = jax.tree.map(lambda leaf: leaf[0], starts)
    local = fj.training.check(
        voting.opened, start, federation, train_key, _ADAM, epochs, batch_size
    )
    layout = Layout(chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    given = ClientInputs(None, (), None, None), ClientInputs(starts, None, None, None)
    return Cohort(local, layout, given, federation, train_key, epochs)


def taught(voting: Voting, stacked: Params, inputs: Array, key: Key, **changes: int) -> Params:
    """Teach a student the vote of networks on inputs without labels; changes are of how."""
    given = voting.vote, stacked, voting.student, voting.student_init(key), inputs
    params, _ = fj.algorithms.distilled(*given, key=key, **voting.learning | changes)
    return jax.block_until_ready(params)


def run(
    voting: Voting,
    federation: Federation,
    test: Examples,
    *,
    key: Key,
    progress: Callable[[str], None],
    **options: Any,
) -> dict[str, Found]:
    """Train the clients, let them vote, and teach a student if it is among the names.

    The options are those of `trained`.
    """
    split_key, start_key, train_key, student_key = jax.random.split(key, 4)
    federation, aside, test = ready(voting, federation, test, split_key)
    progress(f"{NAME}: the clients learn")
    begun = time.perf_counter()
    learned = trained(voting, federation, (start_key, train_key), **options)
    stacked, weights = fj.merging.check_updates(learned.params, federation.weights, "raise")
    learnt = time.perf_counter() - begun
    sent = sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))
    method, vote = fj.algorithms.fedov(voting.model), voting.vote
    updates = fj.algorithms.Update({"params": stacked}, method.kind)
    start = jax.tree.map(lambda leaf: leaf[0], stacked)
    stacked, _, _ = fj.merging.merge(method, start, updates, weights)
    found = {NAME: Found(float(fj.metrics.accuracy(vote, stacked, test)), learnt, 0.0, sent)}
    if aside is not None:
        progress(f"{STUDENT}: it learns the vote")
        begun = time.perf_counter()
        params = taught(voting, stacked, aside, student_key)
        took = time.perf_counter() - begun
        judged = float(fj.metrics.accuracy(voting.student, params, test))
        found[STUDENT] = Found(judged, learnt + took, took, sent)
    return {name: found[name] for name in voting.names}
