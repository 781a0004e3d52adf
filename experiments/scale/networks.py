"""Networks whose rounds are computed: LeNet, and a sentence encoder as large as MiniLM-L6."""

from typing import NamedTuple

import jax
import numpy as np

import fisherjax as fj
from experiments.pretrained import minilm
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


def encoder() -> Network:
    """Make an encoder of MiniLM-L6's shapes, whose head of four classes is frozen."""
    params = minilm.init(width=384, inner=1536, words=30_522, positions=512, blocks=6)
    params |= {"head.weight": np.zeros((4, 384), np.float32), "head.bias": np.zeros(4, np.float32)}
    return Network("MiniLM-L6", minilm.model(params), params, np.ones((2, 32), np.int32))
