"""Likelihoods: normalised, differentiable, and with an output factor that is their Fisher."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import likelihoods

NAMES = ("categorical", "gaussian", "bernoulli")
SHAPES = [(5, 3), (4, 2, 3)]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def likelihood(name):
    return getattr(likelihoods, name)


def outputs(shape, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(0).normal(size=shape))


def targets(name, z, key):
    return jax.jit(getattr(likelihoods, name).sample)(key, z)


@pytest.mark.parametrize("shape", SHAPES)
def test_factor_squares_to_the_hessian_of_the_loss(x64, key, written_out, name, likelihood, shape):
    """All three have a Hessian that does not depend on the target: it is the Fisher."""
    z = outputs(shape)
    y = targets(name, z, key)

    def loss(flat, y):
        return likelihood.negative_log_likelihood(flat.reshape(1, *shape[1:]), y[None])[0]

    hessian = jax.jit(jax.vmap(jax.hessian(loss)))(z.reshape(len(z), -1), y)
    factor = written_out(jax.jit(likelihood.factor)(z))
    assert factor.shape[1:] == shape
    columns = np.reshape(factor, (*factor.shape[:2], -1))
    squares = np.einsum("kni,knj->nij", columns, columns)
    np.testing.assert_allclose(squares, hessian, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_combination_is_the_factors_columns_times_numbers(x64, likelihood, shape, scale):
    """Where probabilities are 1 and 1e-80 too."""
    z = outputs(shape, scale)
    factor = jax.jit(likelihood.factor)(z)
    columns = getattr(factor, "factors", factor)
    r = np.random.default_rng(1).normal(size=columns.shape[:-1])
    expected = np.einsum("k...,k...c->...c", r, columns)
    found = jax.jit(likelihood.combine)(z, np.moveaxis(r, 0, -1))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_have_mean_zero_and_the_factors_covariance(
    x64, key, written_out, name, likelihood, shape
):
    z = outputs(shape)
    draws = 4000
    score = jax.grad(lambda z, y: likelihood.negative_log_likelihood(z, y).sum())

    @jax.jit
    @jax.vmap
    def sampled_score(key):
        return score(z, likelihood.sample(key, z))

    g = np.reshape(sampled_score(jax.random.split(key, draws)), (draws, len(z), -1))
    assert np.abs(g.mean(0) / (g.std(0) / np.sqrt(draws))).max() < 5
    products = np.einsum("sni,snj->snij", g, g)
    factor = written_out(jax.jit(likelihood.factor)(z))
    columns = np.reshape(factor, (*factor.shape[:2], -1))
    expected = np.einsum("kni,knj->nij", columns, columns)
    error = np.abs(products.mean(0) - expected)
    assert (error <= 5 * products.std(0) / np.sqrt(draws) + 1e-9).all()


def test_probabilities_of_all_labels_add_up_to_one(x64):
    z = outputs((4, 3))
    loss = jax.jit(likelihoods.categorical.negative_log_likelihood)
    classes = [loss(z, np.full(4, c)) for c in range(3)]
    np.testing.assert_allclose(np.exp(-np.stack(classes)).sum(0), 1, rtol=1e-10, atol=1e-12)
    bits = [np.broadcast_to(b, z.shape) for b in itertools.product((0, 1), repeat=3)]
    loss = jax.jit(likelihoods.bernoulli.negative_log_likelihood)
    losses = [loss(z, y) for y in bits]
    np.testing.assert_allclose(np.exp(-np.stack(losses)).sum(0), 1, rtol=1e-10, atol=1e-12)


def test_the_gaussian_has_unit_variance_and_nats(x64):
    z, y = outputs((5, 3)), outputs((5, 3), 2.0)
    loss = likelihoods.gaussian.negative_log_likelihood(z, y)
    expected = 0.5 * (np.subtract(z, y) ** 2).sum(1)
    np.testing.assert_allclose(loss, expected, rtol=1e-10, atol=1e-12)


def test_positions_of_an_example_add_up(x64, key, name, likelihood):
    z = outputs((4, 2, 3))
    y = targets(name, z, key)
    loss = jax.jit(likelihood.negative_log_likelihood)
    positions = [loss(np.asarray(z)[:, i], np.asarray(y)[:, i]) for i in range(2)]
    whole = loss(z, y)
    assert whole.shape == (4,)
    np.testing.assert_allclose(whole, sum(positions), rtol=1e-10, atol=1e-12)


def test_extreme_outputs_stay_finite(key, name, likelihood):
    z = jnp.array([[1e4, -1e4, 0.0], [-88.0, 88.0, 90.0]])
    y = targets(name, z, key)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda z: likelihood.negative_log_likelihood(z, y).sum())
    )(z)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert np.isfinite(jax.jit(likelihood.factor)(z)).all()


def test_what_a_likelihood_samples_it_accepts(key, name, likelihood):
    z = outputs((4, 2, 3)).astype(jnp.float32)
    y = likelihood.sample(key, z)
    likelihood.check(z.shape, y)
    likelihood.check(z.shape, np.asarray(y))
    jax.jit(lambda y: likelihood.check(z.shape, y))(y)  # shapes only: values are unknown
    jax.jit(lambda z: likelihood.check(z.shape, y))(z)  # known, though something else is traced


BAD = {
    "categorical shape": ("categorical", np.zeros((5, 3), int), ValueError, r"\(5,\).*\(5, 3\)"),
    "categorical dtype": ("categorical", np.zeros(5), TypeError, "astype"),
    "label too large": ("categorical", np.full(5, 3), ValueError, "3 outputs between 0 and 2"),
    "label negative": ("categorical", np.full(5, -1), ValueError, "from -1"),
    "gaussian shape": ("gaussian", np.zeros(5), ValueError, r"\(5, 3\).*got \(5,\)"),
    "gaussian dtype": ("gaussian", np.zeros((5, 3), int), TypeError, "floating-point"),
    "bernoulli shape": ("bernoulli", np.zeros(5), ValueError, r"\(5, 3\).*got \(5,\)"),
    "bernoulli range": ("bernoulli", np.full((5, 3), 2.0), ValueError, "between 0 and 1"),
    "bernoulli NaN": ("bernoulli", np.full((5, 3), np.nan), ValueError, "between 0 and 1"),
}


@pytest.mark.parametrize("fault", BAD)
def test_targets_that_do_not_fit_are_refused(fault):
    name, y, error, words = BAD[fault]
    with pytest.raises(error, match=words):
        getattr(likelihoods, name).check((5, 3), y)


def test_smoothed_labels_want_probabilities_that_are_never_zero(x64):
    """The least of the loss is where the probabilities are the smoothed labels themselves."""
    likelihood, y, z = likelihoods.smoothed(0.2), np.array([1, 0]), outputs((2, 4))
    wanted = 0.8 * np.eye(4)[y] + 0.2 / 4
    smooth, plain = (
        jax.jit(x.negative_log_likelihood) for x in (likelihood, likelihoods.categorical)
    )
    gradient = jax.jit(jax.grad(lambda z: likelihood.negative_log_likelihood(z, y).sum()))
    np.testing.assert_allclose(gradient(np.log(wanted)), 0, atol=1e-12)
    every = [plain(z, np.full(2, c)) for c in range(4)]
    own = np.asarray(plain(z, y))
    np.testing.assert_allclose(smooth(z, y), 0.8 * own + 0.2 * np.mean(every, 0))


def test_smoothing_changes_nothing_but_the_loss():
    smooth, plain = likelihoods.smoothed(0.1), likelihoods.categorical
    assert smooth[1:] == plain[1:]
    assert likelihoods.smoothed(0.1) is smooth
    z, y = outputs((5, 3)), np.array([0, 1, 2, 0, 1])
    loss, expected = (
        jax.jit(x.negative_log_likelihood)(z, y) for x in (likelihoods.smoothed(0.0), plain)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    targets = likelihoods.regression_targets(smooth, y, 3)
    np.testing.assert_array_equal(targets, np.eye(3)[y])


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), "0.1"])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises((ValueError, TypeError), match="share is"):
        likelihoods.smoothed(share)


def test_the_categorical_loss_and_its_gradient_are_optaxs(x64, key):
    z, y = outputs((6, 5), scale=30.0), jnp.array([0, 4, 2, 2, 1, 3])
    ours = likelihoods.categorical.negative_log_likelihood
    theirs = optax.softmax_cross_entropy_with_integer_labels
    np.testing.assert_allclose(ours(z, y), theirs(z, y), rtol=1e-12, atol=1e-12)
    gradients = (jax.grad(lambda z, f=f: f(z, y).sum())(z) for f in (ours, theirs))
    np.testing.assert_allclose(*gradients, rtol=1e-12, atol=1e-12)


def test_the_loss_of_a_class_that_is_not_there_is_nan():
    z, y = jnp.zeros((2, 3)), jnp.array([3, 1])
    loss = likelihoods.categorical.negative_log_likelihood(z, y)
    assert jnp.isnan(loss[0])
    assert jnp.isclose(loss[1], jnp.log(3.0))


def test_a_class_of_probability_zero_costs_the_others_nothing():
    z, y = jnp.array([[-jnp.inf, 0.0, 0.0]]), jnp.array([1])
    loss, gradient = jax.value_and_grad(
        lambda z: likelihoods.categorical.negative_log_likelihood(z, y)[0]
    )(z)
    assert jnp.isclose(loss, jnp.log(2.0))
    assert jnp.allclose(gradient, jnp.array([[0.0, -0.5, 0.5]]))


# Losses of one's own.


def label_smoothing(z, y):
    log_p = jax.nn.log_softmax(z)
    return -0.9 * log_p[y] - 0.1 * log_p.mean()


def poisson_loss(z, y):
    return (jnp.exp(z) - y * z).sum()


def as_many(z, y):
    return (jnp.round(jnp.exp(z)) == y).all()


POISSON = likelihoods.custom(
    poisson_loss,
    sample=lambda key, z: jax.random.poisson(key, jnp.exp(z)),
    factor=lambda z: jnp.diag(jnp.exp(z / 2)),
    correct=as_many,
)
ALONE = likelihoods.custom(poisson_loss)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_label_smoothing_of_ones_own_is_that_of_the_library(x64, shape):
    own = likelihoods.custom(label_smoothing, like=likelihoods.categorical)
    assert own is likelihoods.custom(label_smoothing, like=likelihoods.categorical)
    z, y = outputs(shape, 3.0), np.random.default_rng(1).integers(0, 3, shape[:-1])

    @jax.jit
    def both(z):
        losses = [x.negative_log_likelihood for x in (own, likelihoods.smoothed(0.1))]
        return [jax.value_and_grad(lambda z, f=f: f(z, y).sum())(z) for f in losses]

    for left, right in zip(*both(z), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)
    # Everything else is that of classes.
    assert likelihoods.is_categorical(own)
    assert own.sample is likelihoods.categorical.sample
    assert own.correct is likelihoods.categorical.correct
    with pytest.raises(ValueError, match="between 0 and 2, got values from 3"):
        own.check(shape, y + 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_factor_of_one_output_vector_is_mapped_over_examples_and_positions(
    x64, written_out, shape
):
    """Of a Poisson likelihood the expected Hessian is diag(exp(z)), in closed form."""
    z = outputs(shape)
    columns = np.asarray(written_out(POISSON.factor(z))).reshape(-1, len(z), z[0].size)
    found = np.einsum("kni,knj->nij", columns, columns)
    expected = [np.diag(np.exp(one.ravel())) for one in np.asarray(z)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    y = np.random.default_rng(2).poisson(1.0, shape)
    loss = (np.exp(z) - y * z).reshape(len(z), -1).sum(1)
    np.testing.assert_allclose(POISSON.negative_log_likelihood(z, y), loss, rtol=1e-12)
    right = (np.round(np.exp(z)) == y).all(-1)
    np.testing.assert_array_equal(POISSON.correct(z, y), right)


def test_each_output_vector_draws_its_own_target(key):
    drawn = POISSON.sample(key, jnp.full((200, 3), 1.0))
    assert drawn.shape == (200, 3)
    assert len(np.unique(drawn[:, 0])) > 3
    np.testing.assert_allclose(drawn.mean(), np.e, atol=5 * np.sqrt(np.e / 600))


LINEAR = fj.Model(lambda params, x: x @ params, ALONE)
COUNTED = fj.Examples(np.eye(3, dtype=np.float32), np.arange(6).reshape(3, 2))


def test_the_empirical_fisher_of_a_loss_is_that_of_its_gradients():
    """At outputs of zero the gradient of example n by row n of the weights is 1 - y_n."""
    w = np.zeros((3, 2), np.float32)
    found = fj.fisher.diagonal(LINEAR, w, COUNTED, kind=fj.fisher.empirical).entries
    np.testing.assert_allclose(np.reshape(found, (3, 2)), (1 - COUNTED.targets) ** 2 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (fj.fisher.automatic, "factor"),
        (fj.fisher.true, "factor"),
        (partial(fj.fisher.curvature_propagation, num_samples=2), "factor"),
        (fj.fisher.sampled, "sample"),
    ],
)
def test_what_a_loss_lacks_is_refused_where_a_method_is_made(key, kind, field):
    words = rf"has no {field}.*kind=fisher.empirical, or likelihoods.custom\(loss, {field}="
    for make in (fj.algorithms.fedfisher, fj.algorithms.fisher_merge, fj.algorithms.fedlpa):
        with pytest.raises(ValueError, match=words):
            make(LINEAR, kind=kind)
    with pytest.raises(ValueError, match=words):
        fj.fisher.kfac(LINEAR, np.zeros((3, 2), np.float32), COUNTED, kind=kind, key=key)
    # With it, and with the data's targets, nothing is missing.
    assert fj.algorithms.fedfisher(LINEAR._replace(likelihood=POISSON), kind=kind)
    assert fj.algorithms.fedfisher(LINEAR, kind=fj.fisher.empirical)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda z, y: z - y,
            r"returned shape \(3,\) and dtype float32 .*one floating-point number",
        ),
        (lambda z, y: 1, "returned .*int.*expected one floating-point number"),
        (lambda z, y: None, "returned a NoneType for arguments of shape"),
        (
            lambda z, y: z @ y[0],
            r"failed on arguments of shape \(3,\) and dtype float32 and shape \(\)",
        ),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        likelihoods.custom(loss).check((5, 3), np.zeros(5, np.float32))


def test_targets_that_are_not_one_for_each_output_vector_are_refused():
    with pytest.raises(
        ValueError, match=r"shape \(5, 2, 3\) and the targets \(5,\).*\[5, 2, \.\.\.\]"
    ):
        ALONE.check((5, 2, 3), np.zeros(5))
    with pytest.raises(TypeError, match="loss is 3; expected a function"):
        likelihoods.custom(3)
    with pytest.raises(TypeError, match="like is a str; expected one such as likelihoods"):
        likelihoods.custom(poisson_loss, like="poisson")
