"""A whole one-shot run in a fresh process, compilation included."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import fisherjax as fj
from experiments import config as one_shot
from experiments import runs
from experiments.benchmark import apart
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Apart, Case, Group, Measurement
from experiments.experiment import prepare

AUTHORS = "the authors' code, recorded"
AUTHORS_SECONDS = 85.0
AUTHORS_PHASES = {
    "training_seconds": 20.8,
    "both_fishers_seconds": 58.6,
    "kfac_server_seconds": 4.4,
    "diagonal_server_seconds": 0.6,
    "regmean_seconds": 2.5,
}
"""The FedFisher authors' PyTorch code on two cores of the same class: MNIST, LeNet, 5 clients, 10
epochs (Jhunjhunwala, Wang, Joshi, AISTATS 2024). RegMean is not among the 85 seconds."""

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing_seconds",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering_seconds",
    "/jax/core/compile/backend_compile_duration": "compiling_seconds",
}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each number of clients: the run without and with a compilation cache.

    Args:
        config: with the suite's values filled in.
        note: told what the reference is.

    Yields:
        Groups; the facts are JAX's own sums of compile times, and the seconds of each phase.

    Raises:
        FileNotFoundError: if the data set is not prepared.
    """
    fj.datasets.load(config.dataset, config.data_dir)
    is_theirs = config.dataset == "mnist" and config.epochs == 10
    if is_theirs:
        note(f"{AUTHORS}: {AUTHORS_SECONDS:g} s on two CPU cores, not measured here")
    note("The first call of the persistent cache fills it; the later ones read it.")
    for num_clients in config.num_clients:
        options = {
            "dataset": config.dataset,
            "num_clients": num_clients,
            "epochs": config.epochs,
            "data_dir": config.data_dir and str(config.data_dir.resolve()),
        }
        with tempfile.TemporaryDirectory() as cache:
            warm = {
                "JAX_ENABLE_COMPILATION_CACHE": "true",
                "JAX_COMPILATION_CACHE_DIR": cache,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            cases = [
                _case("fisherjax, cold", options, JAX_ENABLE_COMPILATION_CACHE="false"),
                _case("fisherjax, persistent compilation cache", options, **warm),
            ]
            reference = AUTHORS if is_theirs and num_clients == 5 else None
            if reference:
                cases.insert(0, Apart(AUTHORS, _recorded))
            title = f"one-shot run, {config.dataset}, M={num_clients}, E={config.epochs}"
            yield Group(title, "runs", reference, cases)


def _case(name: str, options: dict[str, Any], **environment: str) -> Case:
    peaks: list[int] = [0]

    def run() -> dict[str, float]:
        result = apart.call(whole_run, options, **environment)
        peaks.append(result.pop("peak_bytes"))
        return result

    return Case(name, run, facts=dict, peak=lambda: peaks[-1])


def _recorded() -> Measurement:
    case = Case(AUTHORS, _recorded)
    return Measurement(case, AUTHORS_SECONDS, [AUTHORS_SECONDS], None, AUTHORS_PHASES)


def whole_run(
    *, dataset: str, num_clients: int, epochs: int, data_dir: str | None
) -> dict[str, float]:
    """Load, train, summarise, merge in five ways and evaluate, in this process.

    Args:
        dataset: which; its defaults of `experiments.one_shot` are used otherwise.
        num_clients: M.
        epochs: E.
        data_dir: where it is prepared.

    Returns:
        The accuracy of FedFisher (K-FAC), peak memory, seconds by phase and of compilation.
    """
    compiling = dict.fromkeys(_EVENTS.values(), 0.0)

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event in _EVENTS:
            compiling[_EVENTS[event]] += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    asked = dataclasses.replace(
        one_shot.defaults(dataset),
        num_clients=num_clients,
        epochs=epochs,
        partition_seeds=(3,),
        seeds=(0,),
        data_dir=data_dir and Path(data_dir),
    )
    silent = runs.Progress(lambda _: None, lambda _: None)
    rows = runs.run(prepare(asked), (3, 0), silent)
    merged = {row.algorithm: row for row in rows if row.client is None and row.seconds is not None}
    trained = next(row for row in rows if row.algorithm == "local")
    return {
        "accuracy": merged["fedfisher_kfac"].value,
        "all_compilation_seconds": sum(compiling.values()),
        **compiling,
        "training_seconds": trained.seconds,
        **{f"{name}_seconds": row.seconds for name, row in merged.items()},
        "peak_bytes": apart.measure.peak_bytes(),
    }
