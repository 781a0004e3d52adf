"""Compare the time of each phase with its floors, the least time that its matrix products take.

`python -m experiments.benchmark.floors` measures the FLOP/s of a large product and the bytes/s of a
large copy on this machine, and then each phase on one minibatch. The floors of a phase are its
FLOPs over the first rate, and the bytes that its products read and write over the second. It
prints the time over the larger floor.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import fisherjax as fj
from experiments.benchmark import config, flops, workloads
from experiments.benchmark.measure import Case, alone
from experiments.harness import commands, limits, tables

PROGRAM = "experiments.benchmark.floors"
_HEADINGS = ("phase", "FLOPs, ms", "bytes, ms", "measured, ms", "over the larger floor")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and repetitions of the measurements."""

    batch_size: int = 64
    """Examples of the minibatch."""
    num_clients: int = 5
    """Number of clients whose operators the server's product sums."""
    repeats: int = 15
    """Number of timed runs, of which the median counts."""


@commands.command(PROGRAM, __doc__, Config, limits.check_options, continues=False, cached=False)
def main(asked: Config, console: Console) -> None:
    square, long = jnp.ones((2048, 2048)), jnp.ones(2**26)
    rate = 2 * 2048**3 / _seconds(asked, jnp.matmul, square, square)
    bandwidth = 2 * long.nbytes / _seconds(asked, lambda x: x + 1, long)
    console.print(f"{rate / 1e9:.0f} GFLOP/s of a product, {bandwidth / 1e9:.1f} GB/s of a copy\n")
    lines = []
    made_up = config.Config("train", Path(), data="synthetic")
    for name, title in {"lenet": "LeNet", "cnn": "CNN"}.items():
        work = workloads.workload(made_up, name, asked.batch_size)
        for phase, program in phases(work, asked.num_clients).items():
            needed, measured = flops.products(*program), _seconds(asked, *program)
            floors = needed.flops / rate, needed.bytes / bandwidth
            times = [f"{1e3 * seconds:.2f}" for seconds in (*floors, measured)]
            lines.append((f"{phase}, {title}", *times, f"{measured / max(floors):.1f}"))
    console.print(tables.markdown(tables.Table("", _HEADINGS, lines)), soft_wrap=True)


def phases(work: workloads.Workload, num_clients: int) -> dict[str, tuple]:
    """Return each phase on one minibatch, as a function and its arguments."""
    images, labels, params = jnp.asarray(work.images), jnp.asarray(work.labels), work.params

    def step(params: Any, state: Any) -> Any:
        gradients = workloads.gradient(work.model)(params, images, labels)
        updates, new = workloads.OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), new

    def fisher(kind: Callable[..., Any], params: Any) -> Any:
        return kind(work.model, params, fj.Examples(images), batch_size=len(images))

    one = fisher(fj.fisher.kfac, params), params
    clients = jax.tree.map(lambda x: jnp.stack([x] * num_clients), one)
    problem = fj.quadratic.quadratic(*clients, jnp.full(num_clients, 1 / num_clients), 1.0)
    return {
        "training step": (step, params, workloads.OPTIMIZER.init(params)),
        "K-FAC minibatch": (partial(fisher, fj.fisher.kfac), params),
        "diagonal minibatch": (partial(fisher, fj.fisher.diagonal), params),
        "server's product": (lambda problem, x: problem.matvec(x), problem, problem.init),
    }


def _seconds(asked: Config, function: Callable[..., Any], *arguments: Any) -> float:
    return alone(Case("", partial(jax.jit(function), *arguments)), asked.repeats).median


if __name__ == "__main__":
    raise SystemExit(main())
