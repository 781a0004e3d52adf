"""Pytree algebra is linear algebra."""

import chex
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


@pytest.mark.long
@few
@given(LEAVES, st.integers(1, 4))
def test_weighted_sum_of_a_stack_is_the_sum_of_its_clients(shapes, clients):
    models = [draw(shapes, seed) for seed in range(clients)]
    weights = np.linspace(0.5, 1, clients, dtype=np.float32)
    total = tree.weighted_sum(tree.stack(models), weights)
    expected = jax.tree.map(lambda *xs: sum(map(np.multiply, weights, xs)), *models)
    chex.assert_trees_all_close(total, expected, rtol=1e-6, atol=1e-5)
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


@pytest.mark.parametrize(
    "params",
    [
        {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(3)},
        {"a": [jnp.ones(2)], "a/0": jnp.ones(3)},
        {"x": jnp.ones(1), "a/b": {"c": jnp.ones(2)}, "a": {"b/c": jnp.ones(3)}},
    ],
)
def test_names_that_collide_are_refused(params):
    with pytest.raises(ValueError, match=r"Two leaves .* called 'a/(b|0|b/c)'.*contains a slash"):
        tree.names(params)


def test_a_slash_that_collides_with_nothing_is_a_name():
    assert tree.names({"a/b": 1.0, "a": {"c": 2.0}}) == ("a/c", "a/b")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_weighted_sums_are_at_least_float32(x64, dtype):
    stacked = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones(3, jnp.float32)}
    for weights in (jnp.ones(3, jnp.float16), jnp.ones(3, jnp.float64), jnp.ones(3, int)):
        total = tree.weighted_sum(stacked, weights)
        assert total["w"].dtype == jnp.promote_types(dtype, jnp.float32)
        assert total["b"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equal_clients_have_themselves_as_mean_in_any_dtype(dtype):
    model = {"w": jnp.linspace(-3, 3, 50, dtype=dtype)}
    for clients in (3, 7):
        weights = jnp.full(clients, 1 / clients)
        mean = tree.weighted_sum(tree.stack([model] * clients), weights)["w"]
        assert mean.dtype == jnp.float32
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


def test_one_client_is_kept_or_replaced_and_finite_says_which():
    stacked = {"w": jnp.array([[1.0, 2.0], [jnp.nan, 4.0], [5.0, jnp.inf]]), "b": jnp.ones(3)}
    np.testing.assert_array_equal(
        tree.finite_by_client(stacked), [[True] * 3, [True, False, False]]
    )
    kept = tree.finite_by_client(stacked).all(0)
    zeroed = tree.where(kept, stacked)
    chex.assert_trees_all_equal(
        zeroed, {"w": jnp.array([[1.0, 2.0], [0, 0], [0, 0]]), "b": jnp.array([1.0, 0, 0])}
    )
    other = jax.tree.map(lambda x: jnp.full_like(x, 7), stacked)
    chex.assert_trees_all_equal(
        tree.where(kept, stacked, other),
        {"w": jnp.array([[1.0, 2.0], [7, 7], [7, 7]]), "b": jnp.array([1.0, 7, 7])},
    )
