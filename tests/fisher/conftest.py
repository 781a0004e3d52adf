"""Slow and obvious computations that every structure of the Fisher is compared with."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree


class Network(NamedTuple):
    """A network with params and a few inputs."""

    apply: Callable
    params: dict
    inputs: jax.Array


def _mlp(params, x):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"]


def _sequence(params, x):
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"])
    return hidden + hidden[:, ::-1] ** 2  # positions interact


@pytest.fixture
def mlp(x64) -> Network:
    """Two dense layers, one with a bias; 11 examples, 3 outputs."""
    draw = np.random.default_rng(0).normal
    params = {
        "first": {"kernel": draw(size=(4, 5)) / 2, "bias": draw(size=5)},
        "second": {"kernel": draw(size=(5, 3))},
    }
    return Network(_mlp, jax.tree.map(jnp.asarray, params), jnp.asarray(draw(size=(11, 4))))


@pytest.fixture
def sequence(x64) -> Network:
    """An example is a sequence of 2 positions with 3 outputs each."""
    draw = np.random.default_rng(1).normal
    params = {"kernel": jnp.asarray(draw(size=(4, 3))), "bias": jnp.asarray(draw(size=3))}
    return Network(_sequence, params, jnp.asarray(draw(size=(5, 2, 4))))


@pytest.fixture
def targets_for() -> Callable:
    """Valid targets: `targets_for(likelihood_name, outputs)`."""

    draws = {
        "categorical": lambda draw, z: draw.integers(0, z.shape[-1], z.shape[:-1]),
        "bernoulli": lambda draw, z: draw.integers(0, 2, z.shape),
        "gaussian": lambda draw, z: draw.normal(size=z.shape),
    }

    def targets(name: str, z: jax.Array) -> jax.Array:
        return jnp.asarray(draws[name](np.random.default_rng(2), z))

    return targets


@partial(jax.jit, static_argnums=0)
def _jacobian(apply: Callable, params: dict, inputs: jax.Array) -> jax.Array:
    flat, restore = ravel_pytree(params)

    def outputs(flat: jax.Array, example: jax.Array) -> jax.Array:
        return apply(restore(flat), example[None])[0].ravel()

    return jax.vmap(jax.jacrev(outputs), (None, 0))(flat, inputs)


@pytest.fixture
def jacobian() -> Callable:
    """J_n = dz_n/dparams of each example: `jacobian(apply, params, inputs)` -> [N, outputs, d]."""
    return lambda *arguments: np.asarray(_jacobian(*arguments))


@pytest.fixture
def oracle(jacobian, written_out) -> Callable:
    """`oracle(apply, params, inputs, columns)`: mean_n sum_k (J_n^T s_nk)(J_n^T s_nk)^T [d, d]."""

    def compute(apply: Callable, params: dict, inputs: jax.Array, columns: Any) -> np.ndarray:
        columns = np.asarray(written_out(columns))
        columns = columns.reshape(*columns.shape[:2], -1)
        gradients = np.einsum("nod,kno->knd", jacobian(apply, params, inputs), columns)
        flat = gradients.reshape(-1, gradients.shape[-1])
        return flat.T @ flat / len(inputs)

    return compute
