"""Derivatives of a merge by damping, weights and models are those of the formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import fisherjax as fj
from fisherjax import algorithms, fisher, merging

MODEL = fj.Model(
    lambda w, x: jnp.tanh(x @ w["a"]["kernel"] + w["a"]["bias"]) @ w["b"],
    fj.likelihoods.categorical,
)
EXACT = {"solver": fj.solvers.conjugate_gradients(1e-13, 500)}
METHODS = {
    "K-FAC": partial(algorithms.fedfisher, MODEL, **EXACT),
    "diagonal": partial(algorithms.fedfisher, MODEL, fisher=fisher.diagonal, **EXACT),
    "closed form": partial(
        algorithms.fedfisher, MODEL, fisher=fisher.diagonal, solver=fj.solvers.closed_form()
    ),
    "full": partial(algorithms.fedfisher, MODEL, fisher=fisher.full, **EXACT),
    "sequential": partial(algorithms.fedfisher_sequential, MODEL, **EXACT),
    "RegMean": lambda damping: algorithms.regmean(MODEL),
    "FedLPA": partial(algorithms.fedlpa, MODEL, **EXACT),
}


@pytest.fixture
def world(x64):
    source = np.random.default_rng(0)
    start = {
        "a": {"kernel": jnp.asarray(source.normal(size=(3, 4))), "bias": jnp.asarray(np.zeros(4))},
        "b": jnp.asarray(source.normal(size=(4, 2))),
    }
    data = source.normal(size=(30, 3)), source.integers(0, 2, 30).astype(np.int32)
    federation = fj.clients.federation(data, [range(10), range(10, 22), range(22, 30)])
    models = [
        jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + source.normal(size=x.shape) / 5), start)
        for _ in range(3)
    ]
    return start, federation, models


# Each takes ten seconds to compile: of the solves by conjugate gradients one is enough every time.
SELDOM = {"diagonal", "full", "sequential", "FedLPA"}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SELDOM else n for n in METHODS]
)
def test_derivatives_agree_with_finite_differences(world, name):
    start, federation, models = world
    method = METHODS[name](damping=0.3)
    updates = merging.summarize(method, models, federation, key=jax.random.key(0))

    def merged(damping, weights, params):
        sent = algorithms.Update(updates.values | {"params": params}, updates.kind)
        result = merging.merge(METHODS[name](damping=damping), start, sent, weights)[0]
        return jax.tree.map(jnp.sin, result)

    at = np.float64(0.3), np.array([0.2, 0.5, 0.3]), updates.values["params"]
    check_grads(jax.jit(merged), at, order=1, modes=("fwd", "rev"), rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(METHODS["K-FAC"], marks=pytest.mark.slow, id="K-FAC"),
        pytest.param(partial(algorithms.regmean, MODEL), id="RegMean"),
    ],
)
def test_derivatives_by_the_start_agree_with_finite_differences(world, make):
    start, federation, models = world
    method = make(centre="sum")
    updates = merging.summarize(method, models, federation, key=jax.random.key(0))

    def merged(start):
        return jax.tree.map(jnp.sin, merging.merge(method, start, updates)[0])

    check_grads(jax.jit(merged), (start,), order=1, modes=("fwd", "rev"), rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_merges_are_mapped_over_damping(world):
    start, federation, models = world
    make = METHODS["K-FAC"]
    updates = merging.summarize(make(damping=1.0), models, federation, key=jax.random.key(0))
    values = [0.0, 0.1, 1.0]

    def merged(damping):
        return merging.merge(make(damping=damping), start, updates)

    together, _, info = jax.jit(jax.vmap(merged))(jnp.array(values))
    for place, damping in enumerate(values):
        alone, _, alone_info = merged(damping)
        for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[place], y, atol=1e-9)
        # A traced damping keeps the preconditioner, which saves a fifth of the steps at 0.1; zero
        # leaves it out, and rounding alone decides the last few of more steps than unknowns.
        for x, y in zip(
            jax.tree.leaves(info.iterations), jax.tree.leaves(alone_info.iterations), strict=True
        ):
            assert abs(int(x[place]) - int(y)) <= max(1, int(y) // 8)
