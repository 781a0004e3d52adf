"""Sums over many minibatches lose nothing, and shapes are checked once."""

import jax
import jax.numpy as jnp
import pytest

import fisherjax as fj
from fisherjax import Examples, fisher


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_sums_many_minibatches_in_at_least_float32(dtype):
    """Of equal examples, whose Fisher is one: rounded to bfloat16 the sum would stop at 256."""
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    one = jnp.ones((1, 1), dtype)
    found = fisher.vector_product(
        model, one, Examples(jnp.ones((600, 1), dtype)), one, batch_size=1
    )
    assert found.dtype == dtype
    assert found == 1


def test_equal_shapes_are_checked_once():
    traced = []

    def apply(params, inputs):
        traced.append(inputs.shape)
        return inputs @ params

    model = fj.Model(apply, fj.likelihoods.categorical)
    params, examples = jnp.ones((3, 2)), Examples(jnp.ones((4, 3)))
    first = fisher.vector_product(model, params, examples, params)
    count = len(traced)
    assert count > 0
    again = fisher.vector_product(model, 2 * params, examples, params)
    assert len(traced) == count
    assert jax.tree.structure(first) == jax.tree.structure(again)
    with pytest.raises(ValueError, match="apply failed on inputs of shape"):
        fisher.vector_product(model, params, Examples(jnp.ones((4, 5))), params)
