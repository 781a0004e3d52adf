"""The patch convolution is lax's convolution; pooling is lax's reduction over windows."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from fisherjax import nn

NHWC = ("NHWC", "HWIO", "NHWC")
# XLA itself crashes in the derivative of lax's convolution for ((1, 2), (0, 1)), a kernel of 2 x 3
# and strides as large.
PADDINGS = st.sampled_from(["VALID", "SAME", "SAME_LOWER", ((2, 1), (0, 1)), ((-1, 0), (2, -1))])
SIDES = st.integers(1, 3)


def arrays(*shapes):
    draw = np.random.default_rng(0).normal
    return [jnp.asarray(draw(size=shape)) for shape in shapes]


def both(**arguments):
    """Our convolution and lax's, as functions of images and kernel."""

    def bind(convolve):
        return lambda x, kernel: convolve(x, kernel, **arguments)

    return bind(nn.conv_general_dilated), bind(lax.conv_general_dilated)


def assert_close(ours, theirs, tolerance=1e-12):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), ours, theirs
    )


@pytest.mark.long
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kernel=st.tuples(SIDES, SIDES),
    strides=st.tuples(SIDES, SIDES),
    padding=PADDINGS,
    channels=st.tuples(st.sampled_from([1, 3, 48]), SIDES),  # wide ones are added up by rows
    batch=SIDES,
)
def test_patches_are_the_convolution_with_all_its_derivatives(
    x64, kernel, strides, padding, channels, batch
):
    x, kernel, dx, dkernel = arrays(*2 * ((batch, 6, 7, channels[0]), (*kernel, *channels)))

    def everything(convolve):
        y, tangent = jax.jvp(convolve, (x, kernel), (dx, dkernel))
        return y, tangent, jax.vjp(convolve, x, kernel)[1](jnp.sin(y))

    ours, theirs = both(window_strides=strides, padding=padding, dimension_numbers=NHWC)
    assert_close(*jax.jit(lambda: (everything(ours), everything(theirs)))())


@pytest.mark.long
@pytest.mark.parametrize(
    ("groups", "channels", "kernel", "strides", "padding"),
    [
        (4, 4, (3, 3, 1, 4), (1, 1), "SAME"),  # depthwise
        (4, 4, (3, 2, 1, 8), (2, 1), ((2, 1), (-1, 2))),  # two outputs for each channel
        (3, 6, (1, 3, 2, 9), (1, 2), "VALID"),
        (2, 34, (3, 3, 17, 4), (1, 1), "SAME_LOWER"),  # wide, and so added up by rows
    ],
)
def test_groups_are_those_of_the_convolution(x64, groups, channels, kernel, strides, padding):
    arguments = {"window_strides": strides, "padding": padding, "dimension_numbers": NHWC}
    ours, theirs = both(**arguments, feature_group_count=groups)
    x, kernel = arrays((2, 6, 7, channels), kernel)

    def everything(convolve):
        y, pull = jax.vjp(convolve, x, kernel)
        clients = jax.vmap(convolve)(jnp.stack([x, 2 * x]), jnp.stack([kernel, kernel**2]))
        return y, pull(jnp.sin(y)), clients

    observed = []
    with nn.observe_convolutions(lambda y, lhs, rhs, **settings: observed.append(settings) or y):
        ours(x, kernel)
    assert [settings["feature_group_count"] for settings in observed] == [groups]
    assert_close(*jax.jit(lambda: (everything(ours), everything(theirs)))())


@pytest.mark.parametrize("use_bias", [False, True])
def test_a_flax_layer_keeps_its_parameters_and_outputs(x64, key, use_bias):
    [x] = arrays((2, 8, 8, 3))
    settings = {"features": 4, "kernel_size": (3, 3), "strides": 2, "use_bias": use_bias}
    plain = flax.linen.Conv(**settings)
    fast = flax.linen.Conv(**settings, conv_general_dilated=nn.conv_general_dilated)
    shapes = jax.eval_shape(plain.init, key, x)
    assert jax.eval_shape(fast.init, key, x) == shapes
    params = jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size)).reshape(leaf.shape), shapes)
    assert_close(*jax.jit(lambda params: (fast.apply(params, x), plain.apply(params, x)))(params))


@pytest.mark.parametrize(
    ("shape", "kernel", "arguments"),
    [
        ((2, 9, 9, 2), (3, 3, 2, 4), {"rhs_dilation": (2, 2), "dimension_numbers": NHWC}),
        ((2, 5, 5, 2), (3, 3, 2, 4), {"lhs_dilation": (2, 1), "dimension_numbers": NHWC}),
        ((4, 9, 9, 2), (3, 3, 2, 4), {"batch_group_count": 2, "dimension_numbers": NHWC}),
        ((2, 2, 9, 9), (4, 2, 3, 3), {}),
        ((2, 2, 2, 3), (3, 3, 3, 4), {"dimension_numbers": NHWC}),
    ],
    ids=["kernel dilated", "input dilated", "batch groups", "NCHW", "no output"],
)
def test_what_patches_do_not_cover_goes_to_lax_unobserved(x64, shape, kernel, arguments):
    x, kernel = arrays(shape, kernel)
    ours, theirs = both(window_strides=(1, 1), padding=((0, 0), (0, 0)), **arguments)
    with nn.observe_convolutions(lambda y, lhs, rhs, **settings: pytest.fail("observed")):
        assert_close(ours(x, kernel), theirs(x, kernel))


def test_one_dimensional_convolutions_go_to_lax(x64):
    x, kernel = arrays((2, 9, 3), (3, 3, 4))
    ours, theirs = both(
        window_strides=(2,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    assert_close(ours(x, kernel), theirs(x, kernel))


def test_mismatching_channels_are_an_error():
    x, kernel = arrays((2, 9, 9, 3), (3, 3, 2, 4))
    with pytest.raises((TypeError, ValueError), match="feature"):
        nn.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC)


def test_no_images_give_no_outputs():
    x, kernel = jnp.zeros((0, 9, 9, 3)), jnp.zeros((3, 3, 3, 4))
    y = nn.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC)
    assert nn.max_pool(y, 2).shape == (0, 3, 3, 4)


def test_patches_times_the_kernel_are_the_convolution(x64):
    x, kernel = arrays((2, 8, 7, 3), (3, 2, 3, 4))
    cut = nn.patches(x, (3, 2), (2, 1), "SAME")
    convolved = lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=NHWC)
    assert_close(cut @ kernel.reshape(-1, 4), convolved)


def test_the_observer_sees_a_convolution_and_replaces_its_output(x64):
    x, kernel = arrays((2, 8, 8, 3), (3, 3, 3, 4))
    seen = []

    def observe(y, lhs, rhs, **settings):
        seen.append((lhs, rhs))
        # The settings are complete: lax computes the same output from them.
        assert_close(y, lax.conv_general_dilated(lhs, rhs, **settings))
        return 2 * y

    ours, _ = both(window_strides=(2, 1), padding="SAME", dimension_numbers=NHWC)
    with nn.observe_convolutions(observe):
        doubled = ours(x, kernel)
    assert len(seen) == 1
    assert seen[0][0] is x
    assert seen[0][1] is kernel
    assert_close(doubled, 2 * ours(x, kernel))


def test_observers_nest_and_end_with_their_context():
    x, kernel = arrays((1, 4, 4, 1), (3, 3, 1, 1))
    ours, _ = both(window_strides=(1, 1), padding="VALID", dimension_numbers=NHWC)

    def constant(value):
        return lambda y, lhs, rhs, **settings: jnp.full_like(y, value)

    def fail(y, lhs, rhs, **settings):
        raise RuntimeError

    with nn.observe_convolutions(constant(1)):
        with nn.observe_convolutions(constant(2)):
            assert ours(x, kernel)[0, 0, 0, 0] == 2
        with pytest.raises(RuntimeError), nn.observe_convolutions(fail):
            ours(x, kernel)
        assert ours(x, kernel)[0, 0, 0, 0] == 1
    assert ours(x, kernel)[0, 0, 0, 0] not in (1, 2)


@pytest.mark.parametrize("shape", [(2, 6, 8, 3), (2, 7, 9, 3)], ids=["divides", "cropped"])
@pytest.mark.parametrize("window", [2, (3, 2), 1])
def test_pooling_is_the_maximum_over_windows_and_ties_go_to_the_first(x64, shape, window):
    # Few distinct values, so that most windows have ties.
    x = np.random.default_rng(0).integers(0, 3, shape).astype(float)
    height, width = (window, window) if isinstance(window, int) else window
    window_shape = (1, height, width, 1)

    def reference(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window_shape, window_shape, "VALID")

    @jax.jit
    def both_ways(x):
        y, pullback = jax.vjp(lambda x: nn.max_pool(x, window), x)
        expected, expected_pullback = jax.vjp(reference, x)
        cotangent = jnp.sin(jnp.arange(y.size, dtype=float)).reshape(y.shape)
        return (y, pullback(cotangent)), (expected, expected_pullback(cotangent))

    assert_close(*both_ways(x), 0)


def test_settings_that_lax_does_not_have_are_refused_by_lax():
    x, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
    for convolve in (nn.conv_general_dilated, lax.conv_general_dilated):
        with pytest.raises(TypeError, match="precison"):
            convolve(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC, precison=None)
