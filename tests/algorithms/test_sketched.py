"""Sketches add up to the very operator, whatever the clients' factors and whatever the layer."""

from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, fisher, merging, secure_aggregation, solvers
from fisherjax.algorithms.wrappers import sketched

EXACT = solvers.conjugate_gradients(tolerance=1e-8, max_iterations=1000)
KEY = jax.random.key(0)


def apply(params, x):
    """An embedding, a scale with its shift, a dense layer with a bias, and a leaf of no layer."""
    hidden = params["table"][x].mean(1)
    hidden = jnp.tanh(hidden * params["scale"] + params["shift"])
    z = hidden @ params["kernel"] + params["bias"]
    return z + jnp.sin(z * params["rest"] * params["rest"])


MODEL = fj.Model(apply, fj.likelihoods.categorical)
OPEN = algorithms.fedfisher(
    MODEL, fisher=partial(fisher.kfac, fallback=fisher.diagonal), solver=EXACT
)
make = partial(
    algorithms.fedfisher_sketched,
    MODEL,
    fisher=partial(fisher.kfac, fallback=fisher.diagonal),
    solver=EXACT,
)


@pytest.fixture(scope="module")
def world():
    """Four clients in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    source = np.random.default_rng(0)
    data = source.integers(0, 6, (40, 3)), source.integers(0, 4, 40)
    federation = fj.clients.federation(data, np.split(source.permutation(40), [7, 20, 29]))
    shapes = {"table": (6, 5), "scale": 5, "shift": 5, "kernel": (5, 4), "bias": 4, "rest": 4}
    first = {name: source.normal(size=shape) for name, shape in shapes.items()}
    # Near to one another, as the solver's tolerance is of the first residual too.
    models = [
        {name: jnp.asarray(x + 0.2 * source.normal(size=x.shape)) for name, x in first.items()}
        for _ in range(4)
    ]
    updates, weights = merging.summarize(OPEN, models, federation, key=KEY), federation.weights
    each = jax.jit(jax.vmap(fisher.Kronecker.dense))(updates.values["fisher"])
    merged, *_ = merging.merge(OPEN, models[0], updates, weights)
    yield SimpleNamespace(
        updates=updates,
        weights=weights,
        start=models[0],
        exact=np.tensordot(weights, each, 1),
        merged=merged,
    )
    jax.config.update("jax_enable_x64", before)


dense = jax.jit(fisher.KroneckerSum.dense)


def operator(world, terms, seed=0):
    """What the server recovers of the sums, as a matrix."""
    sums = make(terms=terms, seed=seed).reduce(world.updates.values, world.weights)
    return np.asarray(dense(sketched._recovered(seed, sums).fisher))


@pytest.mark.long
@pytest.mark.parametrize("terms", [4, 7])
def test_as_many_terms_as_clients_give_the_very_operator_and_the_open_merge(world, terms):
    """Of matrices, of the diagonal of an embedding, of blocks of scales, of what has no layer."""
    fishers = world.updates.values["fisher"]
    assert fishers.factors["table"]["input"].ndim == 2
    assert {"scale", "rest"} <= set(fishers.entries)
    found, exact = operator(world, terms), world.exact
    np.testing.assert_allclose(found, exact, atol=1e-11 * np.abs(exact).max())
    if terms == 4:
        merged, *_ = merging.merge(make(terms=4), world.start, world.updates, world.weights)
        chex.assert_trees_all_close(merged, world.merged, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_fewer_terms_keep_the_trace_and_what_rank_they_can(world):
    errors = []
    for terms in (2, 4):
        found, exact = operator(world, terms), world.exact
        np.testing.assert_allclose(np.trace(found), np.trace(exact), rtol=1e-9)
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert errors[0] > 1e-3
    assert errors[1] < 1e-11


@pytest.mark.long
def test_the_seed_is_that_of_the_sketches_and_not_of_what_they_give(world):
    first, second = (
        make(terms=4, seed=seed).reduce(world.updates.values, world.weights) for seed in (0, 1)
    )
    assert not np.allclose(first.rows["kernel"], second.rows["kernel"])
    found, exact = operator(world, 4, seed=1), world.exact
    np.testing.assert_allclose(found, exact, atol=1e-11 * np.abs(exact).max())


def test_the_first_term_is_the_nearest_kronecker_product(world):
    """Of two definite factors, on which the preconditioner relies."""
    sums = make(terms=4).reduce(world.updates.values, world.weights)
    terms = sketched._recovered(0, sums).fisher.terms.factors["kernel"]
    fishers = world.updates.values["fisher"].factors["kernel"]
    u, v = (np.asarray(fishers[side]).reshape(4, -1) for side in ("input", "output"))
    values = np.linalg.svd((u * np.asarray(world.weights)[:, None]).T @ v, compute_uv=False)
    norms = [np.linalg.norm(np.asarray(terms[s]).reshape(4, -1), axis=1) for s in terms]
    np.testing.assert_allclose(norms[0] * norms[1], values[:4], rtol=1e-8)
    for side in terms:
        assert np.linalg.eigvalsh(np.asarray(terms[side][0])).min() > -1e-9 * norms[0][0]


packed, unpacked = jax.jit(sketched._packed), jax.jit(sketched._unpacked, static_argnums=1)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 11])
def test_triangles_keep_inner_products_and_come_back(size):
    source = np.random.default_rng(size)
    matrices = source.normal(size=(2, size, size)).astype("f4")
    matrices = matrices + matrices.transpose(0, 2, 1)
    first, second = map(packed, matrices)
    assert first.shape == (size * (size + 1) // 2,)
    np.testing.assert_allclose(np.dot(first, second), np.vdot(*matrices), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(unpacked(first, size), matrices[0], rtol=1e-5)
    np.testing.assert_array_equal(packed(matrices[0, 0]), matrices[0, 0])


@pytest.mark.long
def test_masked_with_a_client_lost_it_is_the_open_merge_of_the_others(world):
    method, weights = make(terms=4), world.weights
    given = (method, world.start, world.updates, weights)
    own = secure_aggregation.contributions(*given)
    own = map(jax.device_get, own)
    bound = jax.tree.map(lambda *x: 2 * max(float(np.abs(y).max()) for y in x) or 1.0, *own)
    how = {"entropy": np.random.default_rng(0).bytes, "absent": {"mask": [2]}}
    masked, *_ = secure_aggregation.secure_merge(*given, bound=bound, bits=64, **how)
    merged, *_ = merging.merge(OPEN, world.start, world.updates, np.array(weights) * [1, 1, 0, 1])
    chex.assert_trees_all_close(masked, merged, rtol=1e-5, atol=1e-5)


def test_tiny_fishers_merge_as_others(world):
    """Of clients that are sure: squares of their entries are zero even in float64."""
    tiny = jax.tree.map(lambda x: np.asarray(x) * 1e-90, world.updates.values["fisher"])
    updates = fj.algorithms.Update(world.updates.values | {"fisher": tiny}, OPEN.kind)
    merged, *_ = merging.merge(make(terms=4), world.start, updates, world.weights)
    chex.assert_trees_all_close(merged, world.merged, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"terms": 0}, "terms is 0"),
        ({"terms": 2.5}, "terms is 2.5"),
        ({"seed": "0"}, "seed is a str"),
        ({"damping": -1.0}, "damping is -1"),
        ({"solver": "cg"}, "solver is 'cg'"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        algorithms.fedfisher_sketched(MODEL, **options)


def test_fishers_without_factors_are_refused(world):
    params = world.updates.values["params"]
    values = {"params": params, "fisher": fisher.Diagonal(params)}
    with pytest.raises(TypeError, match="the Fisher information is a Diagonal; expected that of"):
        make(terms=2).reduce(values, world.weights)
