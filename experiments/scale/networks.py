"""Networks whose rounds are computed: LeNet, and a transformer as large as MiniLM-L6."""

from typing import NamedTuple

import jax
import numpy as np

import fisherjax as fj
from fisherjax.typing import Model, Params


class Network(NamedTuple):
    """A network and examples of a client, whose number matters for no upload."""

    name: str
    model: Model
    params: Params
    inputs: np.ndarray


def lenet() -> Network:
    """Make LeNet for images of 28 x 28 pixels in ten classes."""
    inputs = np.zeros((2, 28, 28, 1), np.float32)
    network = fj.networks.LeNet(num_classes=10)
    params = fj.networks.init(network, jax.random.key(0), inputs)
    model = fj.networks.model(network, params, fj.likelihoods.categorical)
    return Network("LeNet", model, params, inputs)


def transformer() -> Network:
    """Make a transformer of MiniLM-L6's sizes, of which the words' output layer is frozen."""
    network = fj.networks.Transformer(30_522, width=384, num_layers=6, num_heads=12, context=512)
    tokens = np.ones((1, 32), np.int32)
    params = fj.networks.init(network, jax.random.key(0), tokens)
    mask = {n: jax.tree.map(lambda _, n=n: n != "head", part) for n, part in params.items()}
    apply = fj.networks.apply_fn(network)
    model = fj.Model(apply, fj.likelihoods.categorical, mask=mask)
    return Network("Transformer as MiniLM-L6", model, params, tokens)
