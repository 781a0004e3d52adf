"""The fixtures keep their promises; a counter stuck at zero would let every other test pass."""

import jax
import jax.numpy as jnp
import numpy as np


def test_compilations_counts_a_first_call_and_not_a_second(compilations):
    function = jax.jit(lambda x: x * 3)
    inputs, wider = np.ones(3, np.float32), np.ones(4, np.float32)
    with compilations() as first:
        function(inputs)
    with compilations() as second:
        function(inputs)
    with compilations() as other_shape:
        function(wider)
    assert first() == 1
    assert second() == 0
    assert other_shape() == 1


def test_x64_gives_float64(x64):
    assert jnp.ones(()).dtype == jnp.float64


def test_float32_is_the_default_again():
    assert jnp.ones(()).dtype == jnp.float32
