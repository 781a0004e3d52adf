"""Pytree algebra is linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherjax import tree

LEAVES = st.recursive(
    st.sampled_from([(), (1,), (2,), (3, 2)]),
    lambda nodes: (
        st.lists(nodes, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), nodes, min_size=1)
    ),
    max_leaves=5,
)
few = settings(max_examples=20, deadline=None, derandomize=True)


def draw(shapes, seed, prefix=()):
    source = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: source.normal(size=prefix + shape).astype(np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@few
@given(LEAVES)
def test_inner_is_bilinear_and_positive(shapes):
    u, v, w = (draw(shapes, seed) for seed in range(3))
    np.testing.assert_allclose(tree.inner(u, v), tree.inner(v, u), atol=1e-5)
    total = jax.tree.map(lambda a, b: 2 * a + b, v, w)
    expected = 2 * tree.inner(u, v) + tree.inner(u, w)
    np.testing.assert_allclose(tree.inner(u, total), expected, atol=1e-5)
    assert tree.inner(u, u) > 0


@few
@given(LEAVES, st.integers(1, 4))
def test_weighted_sum_of_a_stack_is_the_sum_of_its_clients(shapes, clients):
    models = [draw(shapes, seed) for seed in range(clients)]
    weights = jnp.linspace(0.5, 1, clients)
    total = tree.weighted_sum(tree.stack(models), weights)
    expected = jax.tree.map(lambda *xs: sum(map(np.multiply, weights, xs)), *models)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), total, expected)
    assert jax.tree.map(jnp.shape, total) == jax.tree.map(np.shape, models[0])


@few
@given(LEAVES)
def test_names_are_as_many_as_leaves_in_their_order(shapes):
    params = draw(shapes, 0)
    names = tree.names(params)
    assert len(set(names)) == len(names) == len(jax.tree.leaves(params))
    named = jax.tree.unflatten(jax.tree.structure(params), names)
    for path, name in jax.tree_util.tree_leaves_with_path(named):
        assert name == "/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equal_clients_have_themselves_as_mean_in_any_dtype(dtype):
    model = {"w": jnp.linspace(-3, 3, 50, dtype=dtype)}
    for clients in (3, 7):
        weights = jnp.full(clients, 1 / clients)
        mean = tree.weighted_sum(tree.stack([model] * clients), weights)["w"]
        assert mean.dtype == model["w"].dtype
        np.testing.assert_allclose(mean.astype(float), model["w"].astype(float), rtol=1e-6)


def test_weights_are_not_rounded_to_the_dtype_of_the_models():
    stacked = {"w": jnp.array([0.0, 1.0, -1.0], jnp.bfloat16)}
    weights = jnp.array([0.5, 0.25 + 2**-10, 0.25 - 2**-10])
    assert tree.weighted_sum(stacked, weights)["w"] == 2**-9


def test_clients_of_weight_zero_have_no_influence():
    stacked = {"w": jnp.array([[1.0], [1e30], [3.0]])}
    total = tree.weighted_sum(stacked, jnp.array([0.5, 0.0, 0.5]))
    assert total["w"] == 2


MODEL = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}
BAD = {
    "nothing": ([], "empty list"),
    "structure": ([MODEL, {"a": MODEL["a"]}], r"Client 1 .*\['a'\], expected \['a', 'b'\]"),
    "shape": ([MODEL, MODEL, MODEL | {"b": jnp.ones(2)}], r"'b' of client 2 has shape \(2,\)"),
    "dtype": ([MODEL, MODEL | {"a": jnp.ones(2, int)}], "'a' of client 1 .*dtype int32"),
}


@pytest.mark.parametrize("fault", BAD)
def test_stack_names_the_client_and_the_leaf_that_differ(fault):
    clients, words = BAD[fault]
    with pytest.raises(ValueError, match=words):
        tree.stack(clients)


def test_check_floating_names_the_leaf():
    tree.check_floating(MODEL)
    with pytest.raises(TypeError, match="'count' of params has dtype int32"):
        tree.check_floating(MODEL | {"count": jnp.ones((), int)})
    with pytest.raises(ValueError, match="no leaves"):
        tree.check_floating({})
