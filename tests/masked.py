"""A network of images with a mask, and every method and wrapper made for it: for laws of leaves.

A network with a mask is compared to the same network whose frozen leaves are constants in `apply`,
and which has no params but the trained ones: what the library never has to tell apart. Names of
methods are collected here and nowhere else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, compression, fisher, merging, privacy, training, tree
from tests.methods import OF_STATISTICS, REPEATS, reads

LAYERS = {"first": (16, 4), "second": (4, 3), "third": (3, 3), "head": (3, 3)}
# A whole layer, a kernel and a bias of others; and the layer that makes the outputs.
FROZEN = {
    "inner": ("first/bias", "first/kernel", "second/kernel", "third/bias"),
    "head": ("head/bias", "head/kernel"),
}
SIZES = (5, 4, 3)
SGD = optax.sgd(0.5, 0.9)
HOW = {"epochs": 2, "batch_size": 3}

ROWS = {name: row for name, row in algorithms.METHODS.items() if "exchange" not in row.laws}
NAMES = list(ROWS)
EXCHANGES = [
    name
    for name, row in algorithms.METHODS.items()
    if "exchange" in row.laws and name not in OF_STATISTICS
]
FEW = algorithms.Distillation(images=8, steps=2, batch_size=4)
# Of those options that a method has.
OPTIONS = {
    "head": "third",
    "where": frozenset({"second/bias"}),
    "shape": (4, 4, 1),
    "epochs": 1,
    "draws": 64,
    "how": FEW,
}


def options(name):
    """Choose a method's options for the network of this file."""
    known = {*algorithms.options(name), *algorithms.required(name)}
    return {option: value for option, value in OPTIONS.items() if option in known}


SERVERS = {"sgd": optax.sgd(3.0), "adam": optax.adam(0.1), "adamw": optax.adamw(0.1)}
CODEC = compression.compose(compression.differences(), compression.quantized(8))


def served(name, model, base="fedavg"):
    return algorithms.with_server_optimizer(algorithms.make(base, model), SERVERS[name])


def private(model, base="fedavg", **how):
    clip = {"fedavg": 1.0}.get(base, {"fisher": 1.0, "product": 1.0, "mean": 1.0})
    return privacy.private(algorithms.make(base, model), clip=clip, noise_multiplier=0.5, **how)


WRAPPERS = {
    "server sgd": lambda m: served("sgd", m),
    "server adam": lambda m: served("adam", m, "fedfisher_kfac"),
    "server adamw": lambda m: served("adamw", m),
    "compressed": lambda m: compression.compressed(algorithms.fedfisher(m), CODEC),
    "private": private,
    "weighted_fedavg by Fisher": lambda m: algorithms.weighted_fedavg(m, fisher=fisher.diagonal),
    "server of private": lambda m: algorithms.with_server_optimizer(
        private(m, "fedfisher_diag"), SERVERS["adam"]
    ),
    "compressed keep_local": lambda m: compression.compressed(
        algorithms.keep_local(algorithms.regmean(m), frozenset({"third/kernel"})), CODEC
    ),
    "keep_local": lambda m: algorithms.keep_local(
        algorithms.fedfisher(m, fisher=fisher.diagonal), frozenset({"third/kernel"})
    ),
}
EVERY = [*NAMES, *WRAPPERS]
# These move units to other places, and what is frozen cannot follow.
REFUSE = {name for name, row in ROWS.items() if "frozen" not in row.laws}
# These draw on the server for long, or give what rounds cannot go on from.
LONG = {name for name in ROWS if "how" in options(name)}
ONCE = LONG | REFUSE | {n for n, row in ROWS.items() if row.gives in ("wider model", "votes")}
# These compare clients by the inputs of the layer that makes the outputs, or solve for it.
OF_THE_HEAD = {
    name
    for name, row in algorithms.METHODS.items()
    if "mean features" in row.sends or "the last layer's inputs" in row.sends
}
SILENT = {name for name, row in ROWS.items() if row.sends == "nothing"}
# Of methods whose programs are nearly another's, or take long to compile, a release asks.
SELDOM = LONG | REPEATS | {n for n in ROWS if "terms" in algorithms.options(n)}
SELDOM |= {"server adamw", "server of private", "compressed keep_local"}


def priced(names, fast=(), seldom=frozenset()):
    """Mark names by how long a law of them takes, and those that are seldom asked for."""

    def marks(name):
        cost = pytest.mark.slow if name in SELDOM | seldom else pytest.mark.long
        return () if name in fast else cost

    return [pytest.param(name, marks=marks(name)) for name in names]


def method(name, own):
    if name in WRAPPERS:
        return WRAPPERS[name](own)
    return algorithms.make(name, own, **options(name))


@functools.cache
def start():
    source = np.random.default_rng(0)
    return {
        name: {"bias": source.normal(size=o) / 3, "kernel": source.normal(size=(i, o)) / i**0.5}
        for name, (i, o) in LAYERS.items()
    }


@functools.cache
def federation():
    source = np.random.default_rng(1)
    data = source.uniform(size=(sum(SIZES), 4, 4, 1)), source.integers(0, 2, sum(SIZES))
    return fj.clients.federation(data, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def network(params, x):
    x = x.reshape(len(x), -1)
    for name in LAYERS:
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x if name == "head" else jnp.tanh(x)
    return x


def chosen(where, change):
    """Change leaves by name, by hand."""
    return {
        layer: {leaf: change(f"{layer}/{leaf}" in FROZEN[where], x) for leaf, x in own.items()}
        for layer, own in start().items()
    }


@functools.cache
def model(where, closed):
    """The network with a mask, or with constants in it."""
    if not closed:
        mask = chosen(where, lambda frozen, _: not frozen)
        return fj.Model(network, fj.likelihoods.categorical, mask=mask)

    def apply(params, x):
        whole = {
            layer: {leaf: start()[layer][leaf] if x is None else x for leaf, x in own.items()}
            for layer, own in params.items()
        }
        return network(whole, x)

    return fj.Model(apply, fj.likelihoods.categorical)


def keeps_nothing(name):
    """Return whether neither the server nor a client of a method has a state between rounds."""
    link = method(name, model("inner", closed=False)).link
    return link[:2] == algorithms.Link()[:2]


# Rounds are made of the same pieces: there averaging stands for whatever keeps nothing between
# them, for those that files merge too, and two wrappers for what they wrap.
BESIDES = {"compressed", "server adam"} | {
    name for name in set(ROWS) - ONCE - {"fedavg"} if reads(name) or keeps_nothing(name)
}


def params(where, closed):
    return chosen(where, lambda frozen, x: None if frozen else x) if closed else start()


@functools.cache
def trained(where, closed, optimizer, changed):
    how = {"key": jax.random.key(0), "optimizer": optimizer, **HOW}
    own = changed(model(where, closed))
    return training.train(own, params(where, closed), federation(), **how)


def summarized(name, where, closed, changed=lambda own: own):
    own = method(name, model(where, closed))
    found = trained(where, closed, own.optimizer(SGD), changed)
    return own, found, merging.summarize(own, found, federation(), key=jax.random.key(1))


def merged(name, where, closed):
    own, found, sent = summarized(name, where, closed)
    given, weights = params(where, closed), federation().weights
    return found, sent, merging.merge(own, given, sent, weights, key=jax.random.key(2))


def assert_same(found, expected):
    """Numbers, and names of leaves: what is frozen has none."""
    found, expected = map(tree.by_name, (found, expected))
    assert list(found) == list(expected)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-9, atol=1e-11, err_msg=name)


def assert_frozen(found, where):
    """Bit for bit as they came."""
    before, after = map(tree.by_name, (start(), found))
    for name in FROZEN[where]:
        assert np.asarray(after[name]).tobytes() == before[name].tobytes(), name


def of_trained(whole, where):
    return {n: x for n, x in tree.by_name(whole).items() if n not in FROZEN[where]}
