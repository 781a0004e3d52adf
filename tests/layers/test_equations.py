"""Tests of the flat list of equations of a network."""

import jax
import jax.numpy as jnp

from fisherjax import nn
from fisherjax._layers import equations

LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


@jax.jit
def convolve(kernel, images):
    return nn.conv_general_dilated(images, kernel, (1, 1), "SAME", **LAYOUT)


def test_a_convolution_that_was_compiled_before_is_read_as_a_convolution():
    """JAX's caches must not return the trace with patches, as `flatten` explains."""
    kernel, images = jnp.ones((3, 3, 1, 2)), jnp.ones((4, 5, 5, 1))
    convolve(kernel, images)
    found = equations.flatten(convolve, kernel, images).equations
    assert [equation.primitive.name for equation in found] == ["conv_general_dilated"]
