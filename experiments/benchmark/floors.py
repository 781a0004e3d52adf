"""The floors of each phase, what it would take if nothing but its matrix products cost anything.

`python -m experiments.benchmark.floors` measures the rates of this machine, a large product's
FLOP/s and a large copy's bytes/s, then each phase on one minibatch, and prints its time over the
larger of its two floors: FLOPs over the one rate, bytes read and written by its products over the
other.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import fisherjax as fj
from experiments.benchmark import flops
from experiments.benchmark.workloads import CATEGORICAL, OPTIMIZER, SHAPES, normalize, synthetic


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    batch_size: int = 64
    """Examples of the minibatch."""
    num_clients: int = 5
    """Clients whose operators the server's product sums over."""
    repeats: int = 15
    """Timed runs; the median counts."""


def phases(model: Any, shape: tuple[int, ...], config: Config) -> dict[str, tuple]:
    """Make each phase as a function and its arguments.

    Args:
        model: a flax module.
        shape: of an image.
        config: sizes.

    Returns:
        By name of the phase.
    """
    images, labels = map(jnp.asarray, synthetic(shape, config.batch_size))
    params = fj.networks.init(model, jax.random.key(0), images)
    apply = fj.networks.apply_fn(model, normalize)
    classifier, examples = fj.Model(apply, CATEGORICAL), fj.Examples(images)
    state = OPTIMIZER.init(params)

    def step(params: Any, state: Any) -> Any:
        def loss(w: Any) -> Any:
            return CATEGORICAL.negative_log_likelihood(apply(w, images), labels).mean()

        updates, new = OPTIMIZER.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), new

    def kfac(params: Any) -> Any:
        return fj.fisher.kfac(classifier, params, examples, batch_size=len(images))

    def diagonal(params: Any) -> Any:
        return fj.fisher.diagonal(classifier, params, examples, batch_size=len(images))

    stacked = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (config.num_clients, *x.shape)), (kfac(params), params)
    )
    weights = jnp.full(config.num_clients, 1 / config.num_clients)
    problem = fj.quadratic.quadratic(*stacked, weights, 1.0)
    return {
        "training step": (step, params, state),
        "K-FAC minibatch": (kfac, params),
        "diagonal minibatch": (diagonal, params),
        "server's product": (lambda problem, x: problem.matvec(x), problem, problem.init),
    }


def main(config: Config) -> None:
    """Measure everything and print the table."""
    square = jnp.ones((2048, 2048))
    rate = 2 * 2048**3 / _seconds(jax.jit(jnp.matmul), config.repeats, square, square)
    long = jnp.ones(2**26)
    bandwidth = 2 * long.nbytes / _seconds(jax.jit(lambda x: x + 1), config.repeats, long)
    print(f"{rate / 1e9:.0f} GFLOP/s of a product, {bandwidth / 1e9:.1f} GB/s of a copy\n")
    print("| phase | FLOPs, ms | bytes, ms | measured, ms | over the larger floor |")
    print("| --- | ---: | ---: | ---: | ---: |")
    models = {"LeNet": (fj.networks.LeNet(), "lenet"), "CNN": (fj.networks.CNN(), "cnn")}
    for name, (model, shape) in models.items():
        for phase, (function, *arguments) in phases(model, SHAPES[shape], config).items():
            floors = (
                flops.count(function, *arguments) / rate,
                flops.traffic(function, *arguments) / bandwidth,
            )
            measured = _seconds(jax.jit(function), config.repeats, *arguments)
            columns = [f"{1e3 * x:.2f}" for x in (*floors, measured)]
            over = f"{measured / max(floors):.1f}"
            print("|", " | ".join([f"{phase}, {name}", *columns, over]), "|", flush=True)


def _seconds(function: Callable[..., Any], repeats: int, *arguments: Any) -> float:
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
