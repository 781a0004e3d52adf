"""Train two clients on pieces of one curve, y = sin(2 pi x), and merge them in one round.

One program trains all runs: side by side on an accelerator, one by one on a CPU.

Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, "Leveraging Function Space Aggregation for
    Federated Learning at Scale", TMLR 2024, figure 2, which gives no numbers and draws FedFish.
    Fisher merging is drawn beside it, weighted by mean_n (df/dw)^2: FedFish's squared gradients of
    the loss vanish where a client fits its points, these do not.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from fisherjax.typing import Array, Key, Model, Params

SUPPORTS = {
    "full": ((-1.0, 1.0), (-1.0, 1.0)),
    "partial": ((-1.0, 0.3), (-0.3, 1.0)),
    "disjoint": ((-1.0, -0.2), (0.2, 1.0)),
}
"""Intervals of the inputs of both clients, by their overlap."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings that all runs share."""

    num_points: int = 128
    """Number of points of each client."""
    noise: float = 0.05
    """Standard deviation of the targets around the curve."""
    width: int = 64
    """Units of each of the two hidden layers."""
    steps: int = 2000
    """Number of full-batch steps of each client."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimiser of the clients."""
    learning_rate: float = 1e-3
    """Step size of the clients."""
    fedfish_batch: int = 128
    """Points of a minibatch, whose mean gradient FedFish squares."""
    start: Literal["zero_biases", "uniform"] = "zero_biases"
    """Initial model: LeCun's normal kernels and no biases, or PyTorch's uniform ones and biases."""


class Runs(NamedTuple):
    """R independent runs, all seeds with the first overlap, then with the next; leaves [R, ...].

    A seed has one start and one noise at every overlap. Local models are the clients', [R, 2, ...].
    """

    seeds: Array
    federations: fj.clients.Federation
    starts: Params
    locals: Params


class Network(flax.linen.Module):
    """Map a number to a number through two hidden layers with tanh, all with biases."""

    width: int = 64
    start: str = "zero_biases"

    @flax.linen.compact
    def __call__(self, x: Array) -> Array:
        """Return the outputs [B, 1] of inputs [B, 1]."""
        for name, width in {"dense1": self.width, "dense2": self.width, "dense3": 1}.items():
            bound = x.shape[-1] ** -0.5
            draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
            # With flax's default all units of the first layer start as odd functions.
            drawn = {"kernel_init": draw, "bias_init": draw} if self.start == "uniform" else {}
            x = flax.linen.Dense(width, name=name, **drawn)(x)
            x = x if name == "dense3" else jnp.tanh(x)
        return x


def model(width: int) -> Model:
    """Return the model of a network of a width."""
    return Model(fj.networks.apply_fn(Network(width)), fj.likelihoods.gaussian)


def algorithm(name: str, setting: Setting) -> fj.algorithms.Algorithm:
    """Return a way to merge the networks of a setting."""
    known, options = fj.algorithms.options(name), {}
    if "floor" in known:
        # The floor is so small that it affects only parameters that no function depends on.
        options["floor"] = 1e-12
    if "last_epoch" in known:  # squares are of minibatches
        options["batch_size"] = setting.fedfish_batch
    return fj.algorithms.make(name, model(setting.width), **options)


def draw(key: Key, supports: Array, num_points: int, noise: float) -> fj.clients.Federation:
    """Draw the points of two clients, x uniform on their supports [2, 2]; a key has one noise."""
    where, how_far = jax.random.split(key)
    low, high = supports[:, :1], supports[:, 1:]
    x = low + (high - low) * jax.random.uniform(where, (2, num_points))
    y = jnp.sin(2 * jnp.pi * x) + noise * jax.random.normal(how_far, x.shape)
    rows = np.arange(2 * num_points).reshape(2, num_points)
    return fj.clients.federation((x.reshape(-1, 1), y.reshape(-1, 1)), rows)


def train(setting: Setting, seeds: Sequence[int]) -> Runs:
    """Train both clients of every overlap and seed; a ValueError says if some diverged."""
    supports = jnp.repeat(jnp.array(list(SUPPORTS.values())), len(seeds), axis=0)
    runs = _train(setting, jnp.tile(jnp.array(seeds), len(SUPPORTS)), supports)
    broken = ~np.isfinite(errors(model(setting.width), runs.locals, runs, stacked=True))
    if broken.any():
        overlap, seed = cells(runs)[broken.any(1).argmax()]
        raise ValueError(
            f"{broken.sum()} of {broken.size} clients diverged, the first with overlap {overlap} "
            f"and seed {seed}: choose a --learning-rate below {setting.learning_rate:g}"
        )
    return runs


def cells(runs: Runs) -> list[tuple[str, int]]:
    """Return the overlap and the seed of each run."""
    seeds = np.asarray(runs.seeds).tolist()
    return list(zip(np.repeat(list(SUPPORTS), len(seeds) // len(SUPPORTS)), seeds, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def merge(method: fj.algorithms.Algorithm, runs: Runs) -> Params:
    """Merge the two clients of every run, each counting one half; leaves [R, ...]."""

    def one(run: Runs) -> Params:
        # Only FedFish draws, the order of the points.
        trained, key = fj.training.Trained(run.locals), jax.random.key(0)
        updates = fj.merging.summarize(method, trained, run.federations, key=key)
        return fj.merging.merge(method, run.starts, updates)[0]

    # Runs are merged one by one, because all full Fisher matrices would fill the memory.
    return jax.lax.map(one, runs)


@functools.partial(jax.jit, static_argnames=("model", "stacked"))
def errors(model: Model, models: Params, runs: Runs, *, stacked: bool = False) -> Array:
    """Compute mean squared errors [R, 2] on clients' points; `stacked` has a model a client."""

    def one(run: tuple[Params, fj.clients.Federation]) -> Array:
        # The loss of the Gaussian likelihood is half of the squared error.
        return 2 * fj.metrics.performance(model, *run, stacked=stacked).loss

    return jax.lax.map(one, (models, runs.federations))


@functools.partial(jax.jit, static_argnums=0)
def _train(setting: Setting, seeds: Array, supports: Array) -> Runs:
    how = {"epochs": setting.steps, "batch_size": setting.num_points}
    how["optimizer"] = getattr(optax, setting.optimizer)(setting.learning_rate)

    def one(run: tuple[Array, Array]) -> Runs:
        seed, supports = run
        data_key, start_key, train_key = jax.random.split(jax.random.key(seed), 3)
        federation = draw(data_key, supports, setting.num_points, setting.noise)
        network = Network(setting.width, setting.start)
        start = fj.networks.init(network, start_key, federation.inputs)
        trained = fj.training.train(model(setting.width), start, federation, key=train_key, **how)
        return Runs(seed, federation, start, trained.params)

    chunk = fj.parallel.chunk_size(None, len(seeds))
    return fj.parallel.map_clients(one, (seeds, supports), clients_per_chunk=chunk)
