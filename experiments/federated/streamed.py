"""Run rounds and measure clients that train, whether they are in memory or stay on disk."""

import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.federated.tasks import Rounds
from fisherjax.clients import Federation
from fisherjax.metrics import Performance
from fisherjax.rounds import Round, State
from fisherjax.typing import Key, Params

MOST_MEASURED = 1000
"""Largest number of clients on disk that the last model is measured on."""


def init(task: Rounds, method: fj.rounds.Federated, params: Params) -> State:
    """Return the state before the first round."""
    in_memory = isinstance(task.train, Federation)
    return method.init(params, task.train if in_memory else task.train.num_clients)


def rounds(
    task: Rounds,
    method: fj.rounds.Federated,
    state: State,
    key: Key,
    number: int,
    warn: Callable[[str], None],
    save: Callable[[], None],
) -> Iterator[tuple[State, Round]]:
    """Run rounds; if a client on disk cannot be read, call `save` before the error is raised."""
    given, how = (method, state, task.train), {"key": key, "rounds": number}
    if isinstance(task.train, Federation):
        yield from fj.rounds.run(*given, **how)
        return
    devices = jax.devices() if jax.device_count() > 1 else None
    how |= {"most": task.config.data.client_examples, "devices": devices}
    try:
        going = fj.rounds.run_stream(*given, **how)
        for _ in range(number):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", UserWarning)
                found = next(going)
            for one in heard:
                warn(str(one.message))
            yield found
    except (OSError, ValueError):
        save()
        raise


def cohort(task: Rounds, done: Round, key: Key) -> Federation:
    """Return the data of a round's cohort, with the key of all rounds."""
    if isinstance(task.train, Federation):
        return fj.clients.select(task.train, done.cohort)
    return _read(task, np.asarray(done.cohort), jax.random.fold_in(key, done.number))


def performance(task: Rounds, params: Params) -> Performance:
    """Measure a model on the clients that train, of many on disk on a fixed draw of them."""
    if isinstance(task.train, Federation):
        return fj.metrics.performance(task.model, params, task.train)
    number, seed = task.train.num_clients, task.config.partition_seed
    places = np.arange(number)
    if number > MOST_MEASURED:
        places = np.random.default_rng(seed).choice(number, MOST_MEASURED, replace=False)
    found = [
        fj.metrics.performance(task.model, params, _read(task, own, jax.random.key(seed)))
        for own in np.split(places, np.arange(task.config.cohort, len(places), task.config.cohort))
    ]
    return Performance(*map(jnp.concatenate, zip(*found, strict=True)))


def _read(task: Rounds, places: np.ndarray, key: Key) -> Federation:
    most = task.config.data.client_examples
    return fj.rounds.read_cohort(task.train, places, most=most, key=key)
