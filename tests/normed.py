"""A network with running statistics that is written by hand, for laws of statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj

LAYERS = {"first": (16, 4), "second": (4, 3), "third": (3, 3), "head": (3, 3)}
MOMENTS = ("moments/mean", "moments/second_moment")
SIZES = (6, 4, 2)
SGD = optax.sgd(0.3, 0.9)
HOW = {"epochs": 2, "batch_size": 3}


@functools.cache
def start():
    draw = np.random.default_rng(0).normal
    dense = {
        name: {"bias": draw(size=o) / 3, "kernel": draw(size=(i, o)) / i**0.5}
        for name, (i, o) in LAYERS.items()
    }
    norm = {"scale": np.ones(4), "shift": np.zeros(4)}
    moments = {"mean": np.zeros(4), "second_moment": np.ones(4)}
    return dense | {"norm": norm, "moments": moments}


@functools.cache
def federation():
    """Clients whose inputs lie far from one another's."""
    source = np.random.default_rng(1)
    apart = np.repeat([0.0, 1.0, 4.0], SIZES)[:, None, None, None]
    data = apart + source.uniform(size=(sum(SIZES), 4, 4, 1)), source.integers(0, 2, sum(SIZES))
    return fj.clients.federation(data, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def run(params, x, weights=None):
    """Give outputs and new moments; without weights by the running ones."""
    x = x.reshape(len(x), -1) @ params["first"]["kernel"] + params["first"]["bias"]
    mean, second = params["moments"]["mean"], params["moments"]["second_moment"]
    new = None
    if weights is not None:
        shares = weights / weights.sum()
        new = {"mean": shares @ x, "second_moment": shares @ x**2}
        mean, second = new["mean"], new["second_moment"]
        new = jax.tree.map(lambda old, own: (old + own) / 2, params["moments"], new)
    x = (x - mean) / jnp.sqrt(second - mean**2 + 1e-3)
    x = jnp.tanh(x * params["norm"]["scale"] + params["norm"]["shift"])
    for name in ("second", "third"):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"], new


def apply(params, x):
    return run(params, x)[0]


def apply_train(params, x, key, weights):
    del key
    z, new = run(params, x, weights)
    return z, params | {"moments": new}


MASK = {
    name: dict.fromkeys(["mean", "second_moment"], False)
    if name == "moments"
    else dict.fromkeys(["scale", "shift"] if name == "norm" else ["bias", "kernel"], True)
    for name in (*LAYERS, "norm", "moments")
}
MODEL = fj.Model(apply, fj.likelihoods.categorical, apply_train, MASK)
