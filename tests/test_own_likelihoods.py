"""Functions that a user gives to `likelihoods.custom` are checked by what they return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax.likelihoods import categorical, custom

Z, Y = np.ones((2, 3), np.float32), np.array([0, 1])


def cross_entropy(z, y):
    return -jax.nn.log_softmax(z)[y]


def squares(z, y):
    return jnp.square(z - y).sum()


@pytest.mark.parametrize(
    ("correct", "words"),
    [
        (lambda z, y: 7, r"returned shape \(\) and dtype int32 .* one boolean"),
        (lambda z, y: z > y, r"returned shape \(3,\) and dtype bool .* one boolean"),
        (lambda z, y: z.sum(), r"returned .*dtype float32 .* one boolean"),
        (lambda z, y: None, "returned a NoneType"),
        (lambda z: True, r"failed on .*arguments in this order"),
    ],
)
def test_what_judges_a_prediction_returns_one_boolean(correct, words):
    likelihood = custom(cross_entropy, correct=correct)
    with pytest.raises(ValueError, match=rf"^correct\(z, y\) {words}"):
        likelihood.correct(Z, Y)
    # Inside the library, too.
    model = fj.Model(lambda params, x: x * params, likelihood)
    with pytest.raises(ValueError, match=rf"^correct\(z, y\) {words}"):
        fj.metrics.accuracy(model, np.float32(1), fj.Examples(Z, Y))


@pytest.mark.parametrize(
    ("like", "sample", "error", "words"),
    [
        (None, lambda key, z: jnp.zeros(2, int), ValueError, r"no target: loss\(z, y\) returned"),
        (None, lambda key, z: 0.5, ValueError, r"no target: loss\(z, y\) failed"),
        (None, lambda key, z: [0], ValueError, r"sample\(key, z\) returned a list"),
        (None, lambda z, key: jax.random.categorical(key, z), ValueError, "in this order"),
        (categorical, lambda key, z: jnp.zeros(2, int), ValueError, "no target: .*one class"),
        (categorical, lambda key, z: 0.5, TypeError, "no target: .*integer class labels"),
    ],
)
def test_what_is_drawn_is_a_target_of_the_loss(key, like, sample, error, words):
    likelihood = custom(cross_entropy, *([like] if like else []), sample=sample)
    with pytest.raises(error, match=words):
        jax.eval_shape(likelihood.sample, key, Z)
    with pytest.raises(error, match=words):
        likelihood.check(Z.shape, Y)


def test_what_is_drawn_is_like_the_targets_of_the_data():
    with pytest.raises(ValueError, match=r"draws targets of shape \(\) .*data have shape \(3,\)"):
        custom(squares, sample=lambda key, z: z[0]).check(Z.shape, Z)
    drawn = custom(squares, sample=lambda key, z: z)
    with pytest.raises(ValueError, match=r"dtype float32, but those of the data .* dtype int"):
        drawn.check(Z.shape, Z.astype(int))
    drawn.check((4, 2, 3), np.ones((4, 2, 3), np.float32))
    # Counts may be stored as floats.
    custom(squares, sample=lambda key, z: z.astype(int)).check(Z.shape, Z)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda z: jnp.ones((0, 3)), r"shape \(0, 3\)"),
        (lambda z: jnp.ones(3), r"shape \(3,\)"),
        (lambda z: jnp.eye(4), r"shape \(4, 4\)"),
        (lambda z: jnp.eye(3, dtype=int), "dtype int32 .*floating-point matrix"),
        (lambda z: jnp.eye(3) * 1j, "dtype complex64 .*floating-point matrix"),
        (lambda z: [[1.0, 0.0, 0.0]], "returned a list"),
        (lambda z, key: z, "failed on"),
    ],
)
def test_a_factor_is_a_matrix_with_rows_as_long_as_the_outputs(factor, words):
    with pytest.raises(ValueError, match=rf"^factor\(z\) .*{words}"):
        jax.eval_shape(custom(cross_entropy, factor=factor).factor, Z)


@pytest.mark.parametrize(("name", "value"), [("factor", np.eye(3)), ("sample", 3), ("correct", "")])
def test_what_is_no_function_is_refused_where_the_likelihood_is_made(name, value):
    with pytest.raises(TypeError, match=rf"^{name} is (.|\n)*expected a function such as lambda"):
        custom(cross_entropy, **{name: value})


def test_least_squares_take_a_loss_that_is_like_the_categorical_one_alone():
    """Another is refused where the method is made, in words that say so."""
    A, words = fj.algorithms, r"likelihoods\.custom\(loss, like=likelihoods\.categorical\)"
    for make in (A.analytic_head, A.natural_gradient, A.ccvr):
        assert make(fj.Model(jnp.matmul, custom(cross_entropy, like=categorical)))
        for options in ({}, {"like": fj.likelihoods.gaussian}, {"like": fj.likelihoods.bernoulli}):
            with pytest.raises(ValueError, match=words):
                make(fj.Model(jnp.matmul, custom(squares, **options)))
