"""What the Fisher passes and the server cost, beside the gradients of one epoch, in one run.

`python -m experiments.fisher_cost --model lenet` alternates the four and prints medians: a pass of
gradients over a data set (minibatches of 64), the K-FAC and the diagonal pass over the same
examples at 10 classes, and the server's K-FAC solve for five clients with their factors.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import fisherjax as fj
from fisherjax.typing import Apply, Array, Params

MODELS = {"lenet": (fj.models.LeNet, (28, 28, 1)), "cnn": (fj.models.CNN, (32, 32, 3))}
CATEGORICAL = fj.likelihoods.categorical
BATCH_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time; random images, because speed does not depend on them."""

    model: Literal["lenet", "cnn"] = "lenet"
    """The network: LeNet on 28 x 28 x 1 or the CNN on 32 x 32 x 3 images."""
    num_examples: int = 5120
    """Examples of a pass, a multiple of 64."""
    num_clients: int = 5
    """Clients whose factors the server solves with."""
    repeats: int = 5
    """Timed runs of each; one more comes before, to compile."""


def epoch_of_gradients(apply: Apply, inputs: Array, labels: Array) -> Callable[[Params], Params]:
    """Make a compiled pass that adds up the gradients of all minibatches."""

    @jax.jit
    def run(params: Params) -> Params:
        def add(batch: Array, total: Params) -> Params:
            start = batch * BATCH_SIZE
            x = jax.lax.dynamic_slice_in_dim(inputs, start, BATCH_SIZE)
            y = jax.lax.dynamic_slice_in_dim(labels, start, BATCH_SIZE)

            def loss(p: Params) -> Array:
                return CATEGORICAL.negative_log_likelihood(apply(p, x), y).mean()

            return jax.tree.map(jnp.add, total, jax.grad(loss)(params))

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.fori_loop(0, inputs.shape[0] // BATCH_SIZE, add, zeros)

    return run


def server_solve(
    apply: Apply, params: Params, inputs: Array, num_clients: int, seed: int
) -> Callable[[], Any]:
    """Prepare the merge of clients near `params`, each with the factors of its own examples."""
    aggregator = fj.aggregation.fedfisher(apply, CATEGORICAL)
    keys = jax.random.split(jax.random.key(seed), num_clients)
    updates = []
    for key, rows in zip(keys, np.array_split(np.arange(len(inputs)), num_clients), strict=True):
        noise = jax.tree.map(lambda w, k=key: 0.1 * w.std() * jax.random.normal(k, w.shape), params)
        own = jax.tree.map(jnp.add, params, noise)
        examples = fj.clients.examples(inputs[rows], np.zeros(len(rows), np.int32))
        updates.append(aggregator.summarize(key, own, examples, params))
    stacked = fj.tree.stack(updates)
    return lambda: fj.aggregation.merge(aggregator, params, stacked)


def main(config: Config) -> None:
    """Time everything in turn, and print medians and ratios."""
    make, shape = MODELS[config.model]
    random = np.random.default_rng(0)
    size = config.num_examples - config.num_examples % BATCH_SIZE
    inputs = jnp.asarray(random.integers(0, 256, (size, *shape), np.uint8))
    labels = jnp.asarray(random.integers(0, 10, size, np.int32))
    model = make(num_classes=10)
    apply = fj.models.apply_fn(model, lambda x: x / 127.5 - 1)
    params = fj.models.init(model, jax.random.key(0), inputs[:1])
    gradients = epoch_of_gradients(apply, inputs, labels)

    work = {
        "gradients of one epoch": lambda: gradients(params),
        "K-FAC pass": lambda: fj.fisher.kfac(apply, CATEGORICAL, params, inputs),
        "diagonal pass": lambda: fj.fisher.diagonal(apply, CATEGORICAL, params, inputs),
        "server's K-FAC solve": server_solve(apply, params, inputs, config.num_clients, seed=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(config.repeats + 1):
        for name, run in work.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat > 0:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = medians["gradients of one epoch"]
    print(f"{config.model}, {size} examples, {config.num_clients} clients")
    for name, value in medians.items():
        print(f"{name:24} {value:8.3f} s {value / first:8.2f} x gradients")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
