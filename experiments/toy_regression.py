"""Two clients learn pieces of one curve, y = sin(2 pi x), and are merged in one round.

Every run, a seed of one overlap of the clients' inputs, is independent of the others. One program
trains them all: side by side on an accelerator, and one after the other on a CPU, where that is
faster.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from fisherjax.algorithms import Algorithm
from fisherjax.clients import Federation
from fisherjax.typing import Apply, Array, Key, Model, Params

SUPPORTS = {
    "full": ((-1.0, 1.0), (-1.0, 1.0)),
    "partial": ((-1.0, 0.3), (-0.3, 1.0)),
    "disjoint": ((-1.0, -0.2), (0.2, 1.0)),
}
"""From where to where each of the two clients sees inputs, by how much they overlap."""

METHODS: dict[str, Callable[[Model], Algorithm]] = {
    "fedavg": lambda _: fj.algorithms.fedavg(),
    # The floor is as good as zero: only parameters that no client's function depends on fall back.
    "fedfish": lambda model: fj.algorithms.fisher_merge(model, floor=1e-12),
    "fedfisher_kfac": fj.algorithms.fedfisher,
    "fedfisher_full": functools.partial(fj.algorithms.fedfisher, fisher=fj.fisher.full),
}
"""Ways to merge, made from a model. In one round and with a server step of 1, FedFish is the mean
weighted by the diagonal Fisher; that of the squared loss, mean_n (df/dw)^2, does not need targets
and does not vanish where the fit is perfect.

Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, "Leveraging Function Space Aggregation for
Federated Learning at Scale", TMLR 2024; the toy problem is that of its figure 2, which gives no
numbers.
"""


class Setting(NamedTuple):
    """What is the same in all runs.

    Attributes:
        num_points: of each client.
        noise: standard deviation of the targets around the curve.
        width: of both hidden layers.
        steps: of each client, all its points in each.
        optimizer: "adam" or "sgd".
        learning_rate: of the clients.
        start: of both clients, see `Network`.
    """

    num_points: int = 128
    noise: float = 0.05
    width: int = 64
    steps: int = 2000
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    start: str = "zero_biases"


class Runs(NamedTuple):
    """R independent runs.

    Attributes:
        overlaps: names in `SUPPORTS`, R of them.
        seeds: R of them; the same seed has the same start and the same noise at every overlap.
        federations: two clients each, leaves [R, ...].
        starts: the initial models, leaves [R, ...].
        locals: the clients' models, leaves [R, 2, ...].
    """

    overlaps: tuple[str, ...]
    seeds: tuple[int, ...]
    federations: Federation
    starts: Params
    locals: Params


class Network(flax.linen.Module):
    """Map a number to a number through two hidden layers with tanh, all with biases.

    Args:
        width: of the hidden layers.
        start: "zero_biases", with kernels from LeCun's normal distribution, flax's default: the
            first layer's units are then all odd about x = 0; or "uniform", kernels and biases
            from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default and that of `fj.networks`.
    """

    width: int = 64
    start: str = "zero_biases"

    @flax.linen.compact
    def __call__(self, x: Array) -> Array:
        """Return the outputs [B, 1] of inputs [B, 1]."""
        for name in ("dense1", "dense2"):
            x = jnp.tanh(self._dense(x, self.width, name))
        return self._dense(x, 1, "dense3")

    def _dense(self, x: Array, width: int, name: str) -> Array:
        if self.start == "zero_biases":
            return flax.linen.Dense(width, name=name)(x)
        bound = x.shape[-1] ** -0.5

        def draw(key: Key, shape: tuple[int, ...], dtype: Any = float) -> Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return flax.linen.Dense(width, kernel_init=draw, bias_init=draw, name=name)(x)


@functools.cache
def network(width: int) -> Apply:
    """Return `apply(params, inputs [B, 1]) -> outputs [B, 1]`, one function for each width."""
    return fj.networks.apply_fn(Network(width))


def model(width: int) -> Model:
    """Return the network of a width as the library wants it; equal ones for equal widths."""
    return Model(network(width), fj.likelihoods.gaussian)


@functools.cache
def algorithm(name: str, width: int) -> Algorithm:
    """Return a way to merge networks of a width, one object for each name in `METHODS`."""
    return METHODS[name](model(width))


def draw(key: Key, supports: Array, num_points: int, noise: float) -> Federation:
    """Draw the points of two clients, y = sin(2 pi x) + noise with x uniform on their supports.

    Args:
        key: the same key gives the same noise whatever the supports.
        supports: from where to where, [2, 2].
        num_points: of each client.
        noise: standard deviation.

    Returns:
        The data of both, inputs and targets [2 num_points, 1].
    """
    where, how_far = jax.random.split(key)
    low, high = supports[:, :1], supports[:, 1:]
    x = low + (high - low) * jax.random.uniform(where, (2, num_points))
    y = jnp.sin(2 * jnp.pi * x) + noise * jax.random.normal(how_far, x.shape)
    rows = np.arange(2 * num_points).reshape(2, num_points)
    return fj.clients.federation((x.reshape(-1, 1), y.reshape(-1, 1)), rows)


def train(setting: Setting, seeds: Sequence[int]) -> Runs:
    """Train both clients of every overlap and seed.

    Args:
        setting: what is the same for all.
        seeds: of data and starts.

    Returns:
        One run for each overlap and seed.

    Raises:
        ValueError: if a model is not finite at the end.
    """
    pairs = [(overlap, seed) for overlap in SUPPORTS for seed in seeds]
    overlaps, all_seeds = zip(*pairs, strict=True)
    supports = jnp.array([SUPPORTS[overlap] for overlap in overlaps])
    runs = Runs(overlaps, all_seeds, *_train(setting, jnp.array(all_seeds), supports))
    broken = ~np.isfinite(local_errors(model(setting.width), runs))
    if broken.any():
        overlap, seed = pairs[int(broken.any(1).argmax())]
        raise ValueError(
            f"{int(broken.sum())} of {broken.size} clients diverged, the first with overlap "
            f"{overlap} and seed {seed}: choose a --learning-rate below {setting.learning_rate:g}"
        )
    return runs


def merge(method: Algorithm, runs: Runs) -> Params:
    """Merge the two clients of every run, each of them counting one half.

    Args:
        method: for instance `algorithm("fedfish", width)`.
        runs: with trained clients.

    Returns:
        The merged models, leaves [R, ...].
    """
    return _merge(method, runs.starts, runs.locals, runs.federations)


def local_errors(model: Model, runs: Runs) -> np.ndarray:
    """Compute each client's mean squared error, of its own model on its own points, [R, 2]."""
    return np.asarray(_errors(model, runs.locals, runs.federations, True))


def merged_errors(model: Model, merged: Params, runs: Runs) -> np.ndarray:
    """Compute the mean squared errors of merged models on each client's points.

    Args:
        model: the network.
        merged: one model a run, leaves [R, ...].
        runs: whose points.

    Returns:
        Errors [R, 2]; less those of the local models they are the barriers of the clients, whose
        mean is the client-server barrier.
    """
    return np.asarray(_errors(model, merged, runs.federations, False))


@functools.partial(jax.jit, static_argnums=0)
def _train(setting: Setting, seeds: Array, supports: Array) -> tuple[Federation, Params, Params]:
    optimizers = {"adam": optax.adam, "sgd": optax.sgd}
    optimizer = optimizers[setting.optimizer](setting.learning_rate)

    def one(run: tuple[Array, Array]) -> tuple[Federation, Params, Params]:
        seed, supports = run
        data_key, start_key, train_key = jax.random.split(jax.random.key(seed), 3)
        federation = draw(data_key, supports, setting.num_points, setting.noise)
        start = fj.networks.init(
            Network(setting.width, setting.start), start_key, federation.inputs
        )
        trained = fj.training.train(
            model(setting.width),
            start,
            federation,
            key=train_key,
            optimizer=optimizer,
            epochs=setting.steps,
            batch_size=setting.num_points,
        )
        return federation, start, trained.params

    chunk = fj.parallel.chunk_size(None, len(seeds))
    return fj.parallel.map_clients(one, (seeds, supports), clients_per_chunk=chunk)


@functools.partial(jax.jit, static_argnums=0)
def _merge(method: Algorithm, starts: Params, locals_: Params, federations: Federation) -> Params:
    def one(run: tuple[Any, Any, Federation]) -> Params:
        start, models, federation = run
        # No method here draws anything.
        trained = fj.training.Trained(models)
        updates = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
        return fj.merging.merge(method, start, updates)[0]

    # In turn: the full Fisher information of every run at once would fill the memory.
    return jax.lax.map(one, (starts, locals_, federations))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _errors(model: Model, models: Params, federations: Federation, stacked: bool) -> Array:
    def one(run: tuple[Params, Federation]) -> Array:
        # The loss of the Gaussian likelihood is half of the squared error.
        return 2 * fj.metrics.performance(model, *run, stacked=stacked).loss

    return jax.lax.map(one, (models, federations))
