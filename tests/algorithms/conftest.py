"""The small world of the methods that train: a linear regression over four clients, one empty."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import clients, training


def _apply(params, x):
    return x @ params["w"] + params["b"]


def _draw(seed: int) -> dict:
    source = np.random.default_rng(seed)
    return {"w": jnp.asarray(source.normal(size=(3, 2))), "b": jnp.asarray(source.normal(size=2))}


def _loss(params, x, y):
    return fj.likelihoods.gaussian.negative_log_likelihood(_apply(params, x), y).mean()


class Regression(NamedTuple):
    """The network, the clients, and what they do; `_replace` makes another world of it."""

    federation: clients.Federation
    sizes: tuple[int, ...] = (7, 3, 0, 12)
    model: fj.Model = fj.Model(_apply, fj.likelihoods.gaussian)
    loss_and_gradient: Callable = jax.jit(jax.value_and_grad(_loss))

    def own(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Give the inputs and targets of one client."""
        rows = np.asarray(self.federation.indices)[client, : self.sizes[client]]
        return tuple(np.asarray(x)[rows] for x in (self.federation.inputs, self.federation.targets))

    def train(self, start: Any, optimizer: Any, **changes: Any) -> training.Trained:
        """Train all clients, by default for two epochs of minibatches of two."""
        options = {"key": jax.random.key(0), "epochs": 2, "batch_size": 2} | changes
        return training.train(self.model, start, self.federation, optimizer=optimizer, **options)


@pytest.fixture
def draw() -> Callable:
    """Params of the regression, `draw(seed)`."""
    return _draw


@pytest.fixture
def regression(x64) -> Regression:
    """The clients in float64."""
    source = np.random.default_rng(0)
    data = source.normal(size=(22, 3)), source.normal(size=(22, 2))
    return Regression(clients.federation(data, np.split(np.arange(22), [7, 10, 10])))
