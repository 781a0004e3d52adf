"""Rounds of clients whose examples stay on disk, with those of one cohort in memory."""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import clients, tree
from fisherjax._core import checks, output_checks
from fisherjax._core.compiler import eval_shape
from fisherjax._user_data import client_by_client
from fisherjax.algorithms.base import Report
from fisherjax.clients import Federation
from fisherjax.datasets import ByClient
from fisherjax.rounds._one_round import Round, State, draw_cohort
from fisherjax.rounds.experiment import Federated
from fisherjax.typing import Device, Key, Model, Params


def run_stream(
    experiment: Federated[Report],
    state: State,
    source: ByClient,
    *,
    key: Key,
    rounds: int,
    most: int,
    devices: Sequence[Device] | None = None,
) -> Iterator[tuple[State, Round[Report]]]:
    """Run rounds as `run` does, and read the examples of each cohort when its round begins.

    Of each client in the cohort at most `most` examples are read, drawn anew in every round. Arrays
    have the shapes of K clients with `most` examples, so that all rounds share a program and
    memory does not depend on the number M of clients. If no client has more than `most` examples,
    the rounds are those of `run` with all data in memory: cohorts, minibatches and models.

    If a file is missing or damaged, the error names it; if targets do not fit the outputs, it names
    the client. A run then continues from the last state that was yielded, and equals the
    uninterrupted run.

    Args:
        experiment: Result of `federated`.
        state: `experiment.init(params, source.num_clients)`, or a state that was yielded.
        source: Clients on disk, such as `datasets.emnist(...)`.
        key: Random key, folded by round, purpose and client.
        rounds: Number of rounds, at least 1.
        most: Largest number of a client's examples in a round.
        devices: Devices over which each cohort is spread, see `clients.shard`; None is one.

    Yields:
        The state after each round, and the record of the round, whose cohort has places in source.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: As `run`, if the algorithm keeps something for each client, which would be in
            memory, or if the experiment has an availability. Arguments are checked by the call
            itself.

    Warns:
        UserWarning: If clients of a cohort have no example; they have no weight in the round.

    Example:
        >>> import optax, fisherjax as fj
        >>> rows = np.eye(4, dtype=np.float32)
        >>> read = lambda k, most=None, seed=None: (rows[k:][:most], np.arange(4)[k:][:most] % 2)
        >>> source = fj.datasets.ByClient(np.array([4, 3, 2]), str, read)
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> how = {"cohort": 2, "optimizer": optax.sgd(1.0), "epochs": 2, "batch_size": 2}
        >>> experiment = fj.rounds.federated(model, fj.algorithms.fedavg(), **how)
        >>> state = experiment.init(np.zeros((4, 2), np.float32), source.num_clients)
        >>> going = run_stream(experiment, state, source, key=jax.random.key(0), rounds=2, most=3)
        >>> [done.cohort.shape for _, done in going]
        [(2,), (2,)]

    Source: the cap is that of Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function
    space aggregation for federated learning at scale, TMLR 2024, Table 2.
    """
    for name, value in (("rounds", rounds), ("most", most)):
        checks.count(name, value)
    checks.instance("experiment", experiment, Federated, "rounds.federated(...)")
    checks.instance("source", source, ByClient, "datasets.emnist(...)")
    checks.key(key)
    if experiment.availability is not None:
        raise ValueError(
            "The experiment has an availability; expected none, as cohorts of clients on disk are "
            "drawn alike. Use rounds.run with a federation in memory."
        )
    if experiment.cohort > source.num_clients:
        raise ValueError(
            f"cohort is {experiment.cohort}, but the source has {source.num_clients} clients; "
            "expected at most all of them."
        )
    refuse_memory(experiment, state.params, source.num_clients)

    def read(number: int) -> tuple[np.ndarray, Federation]:
        folded = jax.random.fold_in(key, number)
        places = np.asarray(draw_cohort(folded, source.num_clients, experiment.cohort))
        cohort = read_cohort(source, places, most=most, key=folded)
        return places, cohort if devices is None else clients.shard(cohort, devices)

    first = int(state.number)
    begin = read(first)[1]
    experiment.check(state, begin, key)
    outputs = output_checks.outputs(experiment.model, state.params, begin.inputs)

    def generate(state: State) -> Iterator[tuple[State, Round[Report]]]:
        for number in range(first, first + rounds):
            places, cohort = read(number)
            _check_targets(experiment.model, outputs.shape[1:], source, places, cohort)
            state, done = experiment.round(state, cohort, key)
            if empty := [source.name(int(k)) for k in places[np.asarray(cohort.sizes) == 0]]:
                warnings.warn(f"round {number}: clients without an example: {empty}", stacklevel=2)
            yield state, done._replace(number=number, cohort=jnp.asarray(places))

    return generate(state)


def refuse_memory(experiment: Federated, params: Params, num_clients: int) -> None:
    """Refuse algorithms that keep something for each client: shapes that depend on M."""
    kept = [
        tree.shapes(eval_shape(partial(experiment.init, clients=number), params))
        for number in (num_clients, num_clients + 1)
    ]
    if depends := sorted(name for name, shape in kept[0].items() if shape != kept[1][name]):
        raise ValueError(
            f"The algorithm keeps {', '.join(depends)} for each of the {num_clients} clients; "
            "expected one without a memory of clients, such as fedavg or fedfish. Use rounds.run "
            "with a federation in memory."
        )


def _check_targets(
    model: Model, outputs: tuple[int, ...], source: ByClient, places: np.ndarray, cohort: Federation
) -> None:
    """Check that the targets of each client fit outputs of this shape for one example."""
    targets, rows, sizes = map(np.asarray, (cohort.targets, cohort.indices, cohort.sizes))
    for place, own, size in zip(places, rows, sizes, strict=True):
        shape, known = (int(size), *outputs), targets[own[:size]]
        try:
            model.likelihood.check(shape, output_checks.replace_ignored(model, shape, known))
        except ValueError as error:
            raise ValueError(f"Client {source.name(int(place))!r}: {error}") from error


def read_cohort(
    source: ByClient, places: Sequence[int] | np.ndarray, *, most: int, key: Key
) -> Federation:
    """Read clients on disk into a federation whose shapes depend on K and `most` alone.

    Args:
        source: Clients on disk, such as `datasets.emnist(...)`.
        places: [K] places of the clients in the source, which become their ids.
        most: Largest number of a client's examples.
        key: Random key, folded by client, with which the examples of a client with more are drawn.
            `run_stream` reads the cohort of round n with `jax.random.fold_in(key, n)`.

    Returns:
        The clients in this order; inputs and targets have K times `most` rows.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, or a client is read with more than `most` examples.

    Example:
        >>> source = ByClient(np.array([3, 1]), str, lambda k, most, seed: (np.ones((1, 2)), [0]))
        >>> cohort = read_cohort(source, [1], most=3, key=jax.random.key(0))
        >>> cohort.inputs.shape, cohort.sizes.tolist(), cohort.ids.tolist()
        ((3, 2), [1], [1])
    """
    places, seed = np.asarray(places), jax.random.key_data(key).tolist()
    read = [source.read(int(k), most, (*seed, int(k))) for k in places]
    inputs, targets, rows = client_by_client(read)
    for place, own in zip(places, rows, strict=True):
        if len(own) > most:
            raise ValueError(
                f"source.read returned {len(own)} examples of client {source.name(int(place))!r}; "
                f"expected at most {most}, its argument `most`."
            )

    def padded(x: Any) -> Any:
        more = len(places) * most - len(x)
        return jax.device_put(np.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)))

    indices = np.stack([np.pad(own, (0, most - len(own))) for own in rows])
    sizes = np.array([len(own) for own in rows], np.int32)
    data = jax.tree.map(padded, (inputs, targets))
    return Federation(*data, *jax.device_put((indices, sizes, places.astype(np.int32))))
