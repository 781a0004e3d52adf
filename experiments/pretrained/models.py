"""Make models of networks for images, and read and write their params as PyTorch's state dicts.

BatchNorm's running statistics are kept as moments, whose means over clients are those of all
examples, see `fisherjax.networks`. Training normalises by the minibatch, whose variance is divided
by n, where PyTorch's running variance is divided by n - 1. Scales and shifts are trained.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.pretrained.networks import Layers, Network
from fisherjax.typing import AnyArray, Array, Key, Params

_RUNNING = "mean", "var"
# Share of a minibatch in running statistics, PyTorch's default. EfficientNet's own is 0.01, so that
# a client of 150 images would keep a third of ImageNet's statistics after twenty epochs.
_SHARE = 0.1
# As one program each: a network has many shapes.
_to_moments, _from_moments = jax.jit(fj.networks.to_moments), jax.jit(fj.networks.from_moments)


def model(network: Network, params: Params) -> fj.Model:
    """Make the model of a network for classes; its inputs are pixels, uint8 [B, H, W, C].

    Equal networks give equal models, so that nothing compiles again.
    """
    mask = {kind: jax.tree.map(lambda _, k=kind: k == "params", x) for kind, x in params.items()}
    apply, train = _functions(network)
    likelihood = fj.likelihoods.categorical
    return fj.Model(apply, likelihood, train if params["moments"] else None, mask)


@functools.cache
def _functions(network: Network) -> tuple[Callable[..., Array], Callable[..., Any]]:
    def run(params: Params, inputs: Array, normalize: Callable[[Array, str], Array]) -> Array:
        leaves = params["params"]
        mean, std = np.float32(network.mean), np.float32(network.std)
        x = (jnp.asarray(inputs, jnp.float32) / 255 - mean) / std
        layers = Layers(lambda name, _: leaves[name], normalize)
        return network.outputs(layers, x, len(leaves[f"{network.head}.bias"]))

    def scaled(x: Array, mean: Array, var: Array) -> Array:
        return (x - mean) / jnp.sqrt(var + network.epsilon)

    def apply(params: Params, inputs: Array) -> Array:
        statistics = fj.networks.from_moments(params["moments"])
        return run(params, inputs, lambda x, name: scaled(x, **statistics[name]))

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, Any]:
        del key  # there is no dropout
        statistics = fj.networks.from_moments(params["moments"])
        new = {}

        def normalize(x: Array, name: str) -> Array:
            # Rows that fill up a short minibatch count for nothing.
            rows = jnp.broadcast_to((weights > 0)[:, None, None, None], (*x.shape[:3], 1))
            batch = {"mean": x.mean((0, 1, 2), where=rows), "var": x.var((0, 1, 2), where=rows)}
            old = statistics[name]
            new[name] = {k: (1 - _SHARE) * old[k] + _SHARE * batch[k] for k in batch}
            return scaled(x, **batch)

        outputs = run(params, inputs, normalize)
        return outputs, params | {"moments": fj.networks.to_moments(new)}

    return apply, apply_train


def from_state(network: Network, state: Mapping[str, AnyArray]) -> Params:
    """Return the params of a network, {"params", "moments"}, from its state dict in PyTorch.

    Raises:
        ValueError: If the state dict has other names or shapes than the network. The number of
            classes is that of its last layer.
    """
    found = {name: x for name, x in state.items() if not name.endswith("num_batches_tracked")}
    bias = found.get(f"{network.head}.bias", np.zeros(0))
    leaves, norms = shapes(network, len(bias))
    expected = leaves | {f"{name}.running_{x}": (n,) for name, n in norms.items() for x in _RUNNING}
    kinds = {name: tuple(x.shape) for name, x in found.items()}
    if kinds != expected:
        other = sorted(dict(kinds.items() ^ expected.items()))
        raise ValueError(
            f"the state dict is not that of this network: {other[:5]} differ in name or shape, "
            f"{len(other)} in all"
        )
    statistics = {name: {x: found[f"{name}.running_{x}"] for x in _RUNNING} for name in norms}
    params = {name: jnp.asarray(found[name]) for name in leaves}
    return {"params": params, "moments": _to_moments(statistics)}


def load(network: Network, path: Path) -> Params:
    """Read the params of a network from its state dict, a .safetensors file or one of PyTorch.

    Raises:
        ValueError: If the file is damaged, or is of another network.
        FileNotFoundError: If there is no such file.
    """
    is_plain = path.suffix == ".safetensors"
    return from_state(network, (fj.files.load_arrays if is_plain else fj.files.load_torch)(path))


def to_state(params: Params) -> dict[str, np.ndarray]:
    """Return the state dict of params, with running means and variances in place of moments."""
    running = _from_moments(params["moments"])
    state = params["params"] | {
        f"{name}.running_{x}": value for name, own in running.items() for x, value in own.items()
    }
    return {name: np.asarray(x) for name, x in state.items()}


@functools.partial(jax.jit, static_argnums=(0, 2))
def init(network: Network, key: Key, num_classes: int) -> Params:
    """Draw the params of a network that has learned nothing.

    Kernels are normal with variance 2 / (inputs), biases are zero, as are means; scales and
    variances are one.

    Source: He, Zhang, Ren, Sun, Delving deep into rectifiers, ICCV 2015.
    """
    leaves, norms = shapes(network, num_classes)
    keys = jax.random.split(key, len(leaves))
    params = {}
    for (name, shape), own in zip(leaves.items(), keys, strict=True):
        is_scale = name.endswith("weight") and len(shape) == 1
        params[name] = jnp.full(shape, float(is_scale))
        if len(shape) > 1:
            params[name] = jax.random.normal(own, shape) * np.sqrt(2 / np.prod(shape[1:]))
    statistics = {name: {"mean": jnp.zeros(n), "var": jnp.ones(n)} for name, n in norms.items()}
    return {"params": params, "moments": _to_moments(statistics)}


def with_new_head(network: Network, params: Params, key: Key, num_classes: int) -> Params:
    """Return params whose last layer is that of a new network, for any number of classes."""
    new = init(network, key, num_classes)["params"]
    head = {name: new[name] for name in (f"{network.head}.weight", f"{network.head}.bias")}
    return params | {"params": params["params"] | head}


def shapes(network: Network, num_classes: int) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the shapes of a network's leaves, and the channels of its BatchNorms, by name."""
    leaves: dict[str, tuple[int, ...]] = {}
    norms: dict[str, int] = {}

    def take(name: str, shape: tuple[int, ...]) -> Array:
        leaves[name] = shape
        return jnp.zeros(shape)

    def normalize(x: Array, name: str) -> Array:
        norms[name] = x.shape[-1]
        return x

    images = jax.ShapeDtypeStruct((1, *network.shape), jnp.float32)
    jax.eval_shape(lambda x: network.outputs(Layers(take, normalize), x, num_classes), images)
    return leaves, norms
