"""Run FedOV, whose clients train open-set networks and vote, and distil the vote into one model.

Every client starts from its own initial model and trains by Adam, as in the paper. Part of the
training data is held out from these clients; the student learns the vote on it, without labels.
The paper's student learns on the first half of the test images and is tested on the second half;
option `aside` is then "test".
"""

import inspect
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import commands
from experiments.harness.names import STUDENT
from fisherjax.local_update import ClientInputs
from fisherjax.parallel import Layout, chunk_size
from fisherjax.typing import Array, Examples, Key, Model, Params

NAME = "fedov"
_ASIDE = 5000  # number of held-out training rows, at most a tenth of all
_ADAM = optax.chain(optax.add_decayed_weights(1e-5), optax.adam(1e-3))


class Voting(NamedTuple):
    """The networks and options of FedOV; they have C + 1 outputs, the student's has C."""

    names: tuple[str, ...]  # chosen names, FedOV and its student
    model: Model
    init: Callable[[Key], Params]
    normalize: Callable[[Array], Array]
    student: Model
    student_init: Callable[[Key], Params]
    aside: Literal["train", "test"]
    options: commands.Options = ()

    def options_of(self, name: str, function: Callable[..., Any]) -> dict[str, Any]:
        """Select the options of a method that are arguments of a function."""
        known = inspect.signature(function).parameters
        given = {o.removeprefix(f"{name}."): x for o, x in self.options if o.startswith(f"{name}.")}
        return {option: value for option, value in given.items() if option in known}

    @property
    def opened(self) -> Model:
        """The model that clients train."""
        own = self.options_of(NAME, fj.algorithms.open_set)
        return fj.algorithms.open_set(self.model, self.normalize, **own)

    @property
    def vote(self) -> Model:
        """The model whose params are the stacked networks of all clients."""
        return fj.algorithms.voting(self.model, **self.options_of(NAME, fj.algorithms.voting))

    @property
    def learning(self) -> dict[str, int]:
        """The student's epochs and minibatch size."""
        known = inspect.signature(fj.algorithms.distilled).parameters
        usual = {option: known[option].default for option in ("epochs", "batch_size")}
        return usual | self.options_of("student", fj.algorithms.distilled)


def check(voting: Voting, num_clients: int) -> None:
    """Refuse options that the networks, the vote or the student cannot have."""
    _ = voting.opened, voting.vote
    quorum = voting.options_of(NAME, fj.algorithms.voting).get("quorum")
    if quorum is not None and quorum > num_clients:
        raise ValueError(f"--fedov.quorum is {quorum}, expected 1 to the {num_clients} clients")
    for option, value in voting.learning.items():
        if value < 1:
            name = option.replace("_", "-")
            raise ValueError(f"--student.{name} is {value}, expected 1 or more")


class Found(NamedTuple):
    """Accuracy, seconds in all and of the server, and bytes of one client's upload."""

    accuracy: float
    seconds: float
    server: float
    upload_bytes: int


class Ready(NamedTuple):
    """The clients, the student's inputs or None, and the test examples."""

    federation: fj.clients.Federation
    aside: Array | None
    test: Examples


def ready(voting: Voting, federation: fj.clients.Federation, test: Examples, key: Key) -> Ready:
    """Hold out the student's inputs from clients or test examples, if there is a student."""
    if STUDENT not in voting.names:
        return Ready(federation, None, test)
    if voting.aside == "train":
        federation, rows = split(federation, key)
        return Ready(federation, federation.inputs[rows], test)
    half = len(test.targets) // 2
    second = Examples(test.inputs[half:], test.targets[half:])
    return Ready(federation, test.inputs[:half], second)


def split(federation: fj.clients.Federation, key: Key) -> tuple[fj.clients.Federation, np.ndarray]:
    """Hold out training rows; return the clients' data without them, and the rows."""
    pairs = zip(federation.indices, federation.sizes, strict=True)
    rows = [np.asarray(indices[:size]) for indices, size in pairs]
    owned = np.concatenate(rows)
    number = min(_ASIDE, len(owned) // 10)
    aside = np.asarray(jax.random.permutation(key, jnp.asarray(owned)))[:number]
    left = [own[~np.isin(own, aside)] for own in rows]
    made = fj.clients.federation((federation.inputs, federation.targets), left)
    # The shape stays the same, so that the same program trains whatever is held out.
    more = federation.indices.shape[1] - made.indices.shape[1]
    made = made._replace(indices=jnp.pad(made.indices, ((0, 0), (0, more))))
    mesh = federation.mesh
    return (fj.clients.shard(made, list(mesh.devices.flat)) if mesh else made), aside


def trained(
    voting: Voting, federation: fj.clients.Federation, keys: tuple[Key, Key], **options: int | None
) -> fj.training.Trained:
    """Train the clients, each from its own initial model.

    The keys are of the initial models and of training; the options are epochs, batch_size and
    clients_per_chunk.
    """
    cohort = _cohort(voting, federation, keys, **options)
    return jax.block_until_ready(fj.training.train_cohort(cohort))


def memory(
    voting: Voting, federation: fj.clients.Federation, keys: tuple[Key, Key], **options: int | None
) -> fj.devices.Memory:
    """Predict the bytes that `trained` needs on each device."""
    return fj.training.cohort_memory(_cohort(voting, federation, keys, **options))


def _cohort(
    voting: Voting,
    federation: fj.clients.Federation,
    keys: tuple[Key, Key],
    *,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None,
) -> fj.training.Cohort:
    """Draw an initial model for each client; all leaves are trained, as `open_set` requires."""
    start_key, train_key = keys
    starts = jax.vmap(voting.init)(jax.random.split(start_key, federation.num_clients))
    start = jax.tree.map(lambda leaf: leaf[0], starts)
    local = fj.training.check(
        voting.opened, start, federation, train_key, _ADAM, epochs, batch_size
    )
    layout = Layout(chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    given = ClientInputs(None, (), None, None), ClientInputs(starts, None, None, None)
    return fj.training.Cohort(local, layout, given, federation, train_key, epochs)


def distil(voting: Voting, stacked: Params, inputs: Array, key: Key, **changes: int) -> Params:
    """Distil the vote of networks into a student, on inputs without labels; changes are options."""
    given = voting.vote, stacked, voting.student, voting.student_init(key), inputs
    params, _ = fj.algorithms.distilled(*given, key=key, **voting.learning | changes)
    return jax.block_until_ready(params)


def run(
    voting: Voting,
    federation: fj.clients.Federation,
    test: Examples,
    *,
    key: Key,
    progress: Callable[[str], None],
    **options: Any,
) -> dict[str, Found]:
    """Train the clients, compute their vote, and distil it if the student is chosen.

    The options are those of `trained`.
    """
    split_key, start_key, train_key, student_key = jax.random.split(key, 4)
    federation, aside, test = ready(voting, federation, test, split_key)
    progress(f"{NAME}: the clients learn")
    start = time.perf_counter()
    found = trained(voting, federation, (start_key, train_key), **options)
    stacked, weights = fj.merging.check_updates(found.params, federation.weights, "raise")
    training = time.perf_counter() - start
    sent = sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))
    method, vote = fj.algorithms.fedov(voting.model), voting.vote
    updates = fj.algorithms.Update({"params": stacked}, method.kind)
    first = jax.tree.map(lambda leaf: leaf[0], stacked)
    stacked, _, _ = fj.merging.merge(method, first, updates, weights)
    results = {NAME: Found(float(fj.metrics.accuracy(vote, stacked, test)), training, 0.0, sent)}
    if aside is not None:
        progress(f"{STUDENT}: it learns the vote")
        start = time.perf_counter()
        params = distil(voting, stacked, aside, student_key)
        seconds = time.perf_counter() - start
        accuracy = float(fj.metrics.accuracy(voting.student, params, test))
        results[STUDENT] = Found(accuracy, training + seconds, seconds, sent)
    return {name: results[name] for name in voting.names}
