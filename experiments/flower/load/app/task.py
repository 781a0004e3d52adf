"""The network of a size, which the load replaces the app's task by."""

from typing import Any

import jax
import numpy as np
import optax

import fisherjax as fj

EXAMPLES, SIDE = 256, 8


def features(megabytes: float) -> tuple[int, int]:
    """Return the widths of an MLP of two hidden layers that has so many megabytes of float32."""
    number = megabytes * 1e6 / 4
    linear = SIDE**2 + 10
    width = round((-linear + (linear**2 + 4 * number) ** 0.5) / 2)
    return width, width


def first_params(megabytes: float) -> Any:
    """Draw the params of the network of a size."""
    return fj.networks.init(_module(megabytes), jax.random.key(0), images(1, 0)[0])


def network(megabytes: float) -> tuple[fj.Model, Any]:
    """Return a model of random digits, and its params."""
    params = first_params(megabytes)
    module, likelihood = _module(megabytes), fj.likelihoods.categorical
    return fj.networks.model(module, params, likelihood), params


def _module(megabytes: float) -> Any:
    return fj.networks.MLP(features=features(megabytes), num_classes=10)


def images(number: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the images and labels of a client."""
    random = np.random.default_rng(client)
    pixels = random.normal(size=(number, SIDE, SIDE, 1)).astype(np.float32)
    return pixels, random.integers(10, size=number).astype(np.int32)


def optimizer() -> optax.GradientTransformation:
    """Return the clients' optimiser."""
    return optax.sgd(0.01)


def keep_programs() -> None:
    """Do nothing: the environment of the measurement says where programs are kept."""
