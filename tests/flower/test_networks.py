"""Exchanges without training, frozen leaves and running statistics, as in simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import adapters, algorithms, merging
from tests.flower.conftest import CLIENTS, KEY, MODEL, distance, simulated, warned

AVERAGE = algorithms.fedavg()
EXCHANGES = {
    "analytic_head": (algorithms.analytic_head(MODEL), 1e-6),
    "ccvr": (algorithms.ccvr(MODEL), 1e-6),
    # Its directions are those of a nearly singular system.
    "natural_gradient": (algorithms.natural_gradient(MODEL), 1e-4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_after_a_round_is_that_of_simulation(world, over_flower, name):
    exchange, tolerance = EXCHANGES[name]
    how = {"exchanges": [exchange]}
    found = over_flower(world, AVERAGE, client=how, **how).state.params
    start, key = simulated(world, AVERAGE).params, jax.random.fold_in(KEY, 1)
    expected, _, _ = merging.exchange(exchange, start, world.federation, key=key)
    assert distance(found, expected) < tolerance
    assert distance(expected, start) > 1e-3


@pytest.mark.long
def test_a_round_of_adapters_is_that_of_simulation(flower, world, over_flower):
    """The base is frozen: it is not sent, and a client with another one is left out."""
    model, params = adapters.attach(
        MODEL, world.params, ["first/kernel"], rank=2, key=jax.random.key(5)
    )
    own = world._replace(model=model, params=params)
    for algorithm in (AVERAGE, algorithms.fedfisher(model, fisher=fj.fisher.diagonal)):
        found = over_flower(own, algorithm).state
        assert distance(found.params, simulated(own, algorithm).params) < 1e-6
    other = own._replace(params=jax.tree.map(lambda x: x + 1, params))
    app = flower.client_app(AVERAGE, model, optax.sgd(0.1), own.load, params=other.params)
    how = {"example": own.example, "num_clients": CLIENTS, "key": KEY}
    server = flower.strategy(AVERAGE, model, params, **how)
    with (
        warned("frozen leaves of this client's params differ"),
        pytest.raises(RuntimeError, match="No round of 1 succeeded"),
    ):
        server.run(flower.InProcess(app, CLIENTS))


def normalized(params, x):
    moments = params["moments"]
    scale = jax.lax.rsqrt(moments["second_moment"] - moments["mean"] ** 2 + 0.1)
    return ((x - moments["mean"]) * scale * params["norm"]["scale"]) @ params["kernel"]


def train_normalized(params, x, key, weights):
    shares = weights / weights.sum()
    seen = {"mean": shares @ x, "second_moment": shares @ x**2}
    moved = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, params["moments"], seen)
    return normalized(params, x), params | {"moments": moved}


@pytest.mark.long
@pytest.mark.parametrize("is_kept", [False, True])
def test_running_statistics_are_averaged_or_stay_with_their_client(world, over_flower, is_kept):
    params = {
        "kernel": jnp.asarray(np.random.default_rng(2).normal(size=(5, 3)), "float32"),
        "moments": {"mean": jnp.zeros(5), "second_moment": jnp.ones(5)},
        "norm": {"scale": jnp.ones(5)},
    }
    mask = {
        "kernel": True,
        "moments": {"mean": False, "second_moment": False},
        "norm": {"scale": True},
    }
    model = fj.Model(normalized, fj.likelihoods.categorical, train_normalized, mask)
    own = world._replace(model=model, params=params)
    where = frozenset(["moments/mean", "moments/second_moment", "norm/scale"])
    algorithm = algorithms.fedbn(where=where) if is_kept else AVERAGE
    found = over_flower(own, algorithm, 3).state.params
    expected = simulated(own, algorithm, 3).params
    assert distance(found, expected) < 1e-6
    is_moved = distance(found["moments"], params["moments"]) > 0
    assert is_moved is not is_kept
