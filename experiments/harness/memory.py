"""Predict the memory of a run from its compiled programs, and compare it with the device's."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import fisherjax as fj
from experiments.harness import after_merge, steps, tasks, votes

_FEWER = "Not even one client at a time would fit; use fewer clients or a smaller network"


class Need(NamedTuple):
    """The step that needs the most memory.

    `resident` are bytes that stay, `scratch` bytes of the clients that are computed side by side.
    """

    step: str
    resident: int
    scratch: int
    side_by_side: int
    devices: int = 1
    idle: float = 0.0  # share of the training time in which devices wait for each other


def predict(task: tasks.OneRound, threads: int | None = None) -> Need:
    """Find the step of the clients that needs the most, by compiling the run's programs.

    They are compiled side by side, by half as many threads as there are cores if no number is
    given: the compiler of a CPU keeps two cores busy by itself.
    """
    federation = next(iter(task.federations.values()))
    params, key = steps.start(task, task.config.seeds[0])
    options = steps.training_options(task, federation)
    chunk = options["clients_per_chunk"]
    asked: dict[str, Callable[[], fj.devices.Memory]] = {}
    training = partial(fj.training.train_memory, task.model, params, federation, key=key)
    for optimizer, methods in steps.by_training(task).items():
        own = "" if optimizer == task.optimizer else f" for {' and '.join(methods)}"
        how = {"optimizer": optimizer, "progress": True, **options}
        asked[f"training{own}"] = partial(training, **how)
    if task.voting is not None:
        given = task.voting, federation, (key, key)
        asked[f"training for {votes.NAME}"] = partial(votes.memory, *given, **options)
    how = {"key": key, "clients_per_chunk": chunk}
    # Methods with equal uploads share a summary, which the first of them computes.
    first = {method.sent: name for name, method in reversed(task.methods.items())}
    for name in first.values():
        given = task.methods[name].clients, params, federation
        asked[f"the clients' summaries for {name}"] = partial(
            fj.merging.summarize_memory, *given, **how
        )
    # Exchanges are the same programs after every merge.
    plans = after_merge.exchanges(task.config).values()
    for name in dict.fromkeys(step for plan in plans for step in plan):
        given = fj.algorithms.make(name, task.model), params, federation
        asked[f"the exchange of {name}"] = partial(_of_exchange, *given, **how)
    with ThreadPoolExecutor(threads or max((os.cpu_count() or 1) // 2, 1)) as pool:
        needs = dict(zip(asked, pool.map(lambda ask: ask(), asked.values()), strict=True))
    step = max(needs, key=lambda name: sum(needs[name]))
    side_by_side = fj.parallel.chunk_size(chunk, federation.num_clients)
    found = of(step, needs[step], side_by_side, federation.mesh)
    batches = fj.clients.num_batches(np.asarray(federation.sizes), options["batch_size"])
    return found._replace(idle=fj.parallel.idle_share(batches, side_by_side, found.devices))


def _of_exchange(*given: Any, **how: Any) -> fj.devices.Memory:
    return max(fj.merging.exchange_memory(*given, **how), key=sum)


def of(step: str, need: fj.devices.Memory, side_by_side: int, mesh: Mesh | None) -> Need:
    """Return the need of a step on all devices of a mesh, given its memory on one."""
    number = mesh.size if mesh else 1
    # Devices that share a memory need it for all of them.
    together = number if fj.devices.share_memory(mesh) else 1
    return Need(step, together * need.resident, together * need.scratch, side_by_side, number)


def available() -> int | None:
    """Return the bytes of the device, or of the machine for a CPU; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def check(need: Need, limit: int | None) -> str:
    """Describe the need of a run; raise if it exceeds the limit in bytes, which may be None."""
    total = need.resident + need.scratch
    where = f" on each of {need.devices} devices" if need.devices > 1 else ""
    text = f"about {total / 1e9:.3g} GB ({need.step}, {need.side_by_side} side by side{where})"
    text += "" if limit is None else f" of {limit / 1e9:.3g} GB"
    if limit is None or total <= limit:
        waits = f" Devices wait for each other {100 * need.idle:.0f} % of the training's time."
        return f"Needs {text}.{waits if need.devices > 1 else ''}"
    fitting = int((limit - need.resident) * need.side_by_side / max(need.scratch, 1))
    advice = f"Use --clients-per-chunk {fitting}" if fitting >= 1 else _FEWER
    raise ValueError(f"This run needs {text}. {advice}")
