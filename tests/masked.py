"""Every method and wrapper, made for a network of images, for laws of leaves that have a mask.

Names are collected here and nowhere else.
"""

import optax
import pytest

from fisherjax import algorithms, compression, fisher, privacy

TABLES = (algorithms.TABLE, algorithms.PERSONAL, algorithms.WIDER, algorithms.DISTILLED)
NAMES = [name for table in (*TABLES, algorithms.VOTES) for name in table]
FEW = algorithms.Distillation(images=8, steps=2, batch_size=4)
OPTIONS = {
    "fedper": {"head": "third"},
    "fedbn": {"where": frozenset({"second/bias"})},
    "weighted_fedbn": {"where": frozenset({"second/bias"})},
    "dense": {"shape": (4, 4, 1), "epochs": 1, "how": FEW},
}
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
    "compressed keep_private": lambda m: compression.compressed(
        algorithms.keep_private(algorithms.regmean(m), frozenset({"third/kernel"})), CODEC
    ),
    "keep_private": lambda m: algorithms.keep_private(
        algorithms.fedfisher(m, fisher=fisher.diagonal), frozenset({"third/kernel"})
    ),
}
EVERY = [*NAMES, *WRAPPERS]
# These move units to other places, and what is frozen cannot follow.
REFUSE = {"otfusion", "pfnm"}
# These give what rounds cannot go on from, or draw on the server for long.
ONCE = {*algorithms.WIDER, *algorithms.VOTES, *algorithms.DISTILLED, *REFUSE}
# These read the inputs of the layer that makes the outputs.
OF_THE_HEAD = {"weighted_fedavg", "weighted_fedbn"}


# Of methods whose programs are nearly another's, or take long to compile, a release asks.
SELDOM = {
    *("dense", "fedfisher_sketched", "fedfisher_full", "fedlpa_ea", "fedlpa_gd", "fedfish"),
    *("fedprox", "fisher_merge", "server adamw", "server of private", "compressed keep_private"),
}


def priced(names, fast=()):
    """Mark names by how long a law of them takes."""

    def marks(name):
        cost = pytest.mark.slow if name in SELDOM else pytest.mark.long
        return () if name in fast else cost

    return [pytest.param(name, marks=marks(name)) for name in names]


def method(name, own):
    if name in WRAPPERS:
        return WRAPPERS[name](own)
    return algorithms.make(name, own, **OPTIONS.get(name, {}))
