"""Time a whole one-shot run in a new process, including compilation."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter

import jax

import fisherjax as fj
from experiments.benchmark import measure, programs
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Apart, Case, Group, Measurement
from experiments.harness import one_round, tasks
from experiments.harness.config import one_shot

_SECONDS = 85.0
_PHASES = {
    "training_seconds": 20.8,
    "both_fishers_seconds": 58.6,
    "kfac_server_seconds": 4.4,
    "diagonal_server_seconds": 0.6,
    "regmean_seconds": 2.5,
}
_AUTHORS = Measurement("the authors' code, recorded", _SECONDS, [_SECONDS], None, _PHASES)
"""The FedFisher authors' PyTorch code on two cores of the same class: MNIST, LeNet, 5 clients, 10
epochs (Jhunjhunwala, Wang, Joshi, AISTATS 2024). RegMean is not among the 85 seconds."""

_EVENTS = {event: f"{phase}_seconds" for event, phase in programs.PHASES.items()}
_WARM = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Yield a group for each number of clients: the run without and with a compilation cache.

    The facts are the accuracy of FedFisher (K-FAC), JAX's sums of compile times, and the seconds of
    each phase.
    """
    fj.datasets.load(config.dataset, config.data_dir)  # raises here if the data are not prepared
    is_theirs = config.dataset == "mnist" and config.epochs == 10
    if is_theirs:
        note(f"{_AUTHORS.name}: {_SECONDS:g} s on two CPU cores, not measured here")
    note("The first call of the persistent cache fills it; the later ones read it.")
    for num_clients in config.num_clients:
        run = partial(measure.in_own_process, _whole_run, config, num_clients)
        both = {"facts": itemgetter(0), "peak": itemgetter(1)}
        compared = is_theirs and num_clients == 5
        recorded = [Apart(_AUTHORS.name, lambda: _AUTHORS)] if compared else []
        title = f"one-shot run, {config.dataset}, M={num_clients}, E={config.epochs}"
        with tempfile.TemporaryDirectory() as cache:
            cold = partial(run, JAX_ENABLE_COMPILATION_CACHE="false")
            warm = partial(run, JAX_COMPILATION_CACHE_DIR=cache, **_WARM)
            cases = [
                *recorded,
                Case("fisherjax, cold", cold, **both),
                Case("fisherjax, persistent compilation cache", warm, **both),
            ]
            yield Group(title, "runs", _AUTHORS.name if compared else None, cases)


def _whole_run(config: Config, num_clients: int) -> tuple[dict[str, float], int]:
    """Run once what `experiments.one_shot` runs; return the facts and the peak memory."""
    compiling = dict.fromkeys(_EVENTS.values(), 0.0)

    def listen(event: str, seconds: float, **_: object) -> None:
        if event in _EVENTS:
            compiling[_EVENTS[event]] += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    default = one_shot(config.dataset)
    data = dataclasses.replace(default.data, num_clients=num_clients, data_dir=config.data_dir)
    once = {"epochs": config.epochs, "partition_seeds": (3,), "seeds": (0,)}
    task = tasks.one_round(dataclasses.replace(default, data=data, **once))
    rows = one_round.run(task, (3, 0))
    merged = {row.algorithm: row for row in rows if row.client is None and row.seconds is not None}
    facts = {
        "accuracy": merged["fedfisher_kfac"].value,
        "all_compilation_seconds": sum(compiling.values()),
        **compiling,
        "training_seconds": next(row for row in rows if row.algorithm == "local").seconds,
        **{f"{name}_seconds": row.seconds for name, row in merged.items()},
    }
    return facts, measure.peak_bytes()
