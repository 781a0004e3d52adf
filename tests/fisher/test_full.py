"""The full Fisher against its definitions, each computed another way."""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fisherjax import Examples, Model, fisher, likelihoods


@pytest.fixture
def network(request):
    return request.getfixturevalue(request.param)


def networks(*pairs):
    """Cross networks with likelihoods, by names."""
    return pytest.mark.parametrize(("network", "name"), pairs, indirect=["network"])


@networks(
    ("mlp", "categorical"),
    ("mlp", "bernoulli"),
    ("sequence", "categorical"),
    ("sequence", "gaussian"),
)
def test_true_fisher_is_the_gauss_newton_matrix(network, jacobian, targets_for, name):
    apply, params, x = network
    likelihood = getattr(likelihoods, name)
    z = jax.jit(apply)(params, x)

    def loss(flat, z, y):  # of one example; its Hessian in z does not depend on y
        return likelihood.negative_log_likelihood(flat.reshape(1, *z.shape), y[None])[0]

    y = targets_for(name, z)
    hessian = jax.jit(jax.vmap(jax.hessian(loss)))(z.reshape(len(z), -1), z, y)
    j = jacobian(apply, params, x)
    gauss_newton = np.einsum("nod,noc,nce->de", j, hessian, j, optimize=True) / len(x)
    arguments = Model(apply, likelihood), params, Examples(x)
    matrix = fisher.full(*arguments, kind=fisher.true, batch_size=4).matrix
    np.testing.assert_allclose(matrix, gauss_newton, rtol=1e-10, atol=1e-12)


@networks(("mlp", "categorical"), pytest.param("sequence", "categorical", marks=pytest.mark.long))
def test_the_jacobian_kind_is_the_mean_square_of_the_jacobian(network, jacobian, name):
    """Whatever the likelihood; of sequences it is a mean over random signs."""
    apply, params, x = network
    j = jacobian(apply, params, x)
    expected = np.einsum("nod,noe->de", j, j, optimize=True) / len(x)
    arguments = Model(apply, getattr(likelihoods, name)), params, Examples(x)
    how = {"kind": fisher.jacobian, "batch_size": 4, "key": jax.random.key(0)}
    found = fisher.full(*arguments, **how).matrix
    if jax.eval_shape(apply, params, x).ndim == 2:
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    else:
        assert 0.5 < np.trace(found) / np.trace(expected) < 2


@networks(("mlp", "categorical"), ("sequence", "categorical"), ("mlp", "bernoulli"))
def test_true_fisher_is_the_mean_over_all_labels_of_squared_gradients(network, targets_for, name):
    apply, params, x = network
    x = x[:3]
    likelihood = getattr(likelihoods, name)
    z = jax.jit(apply)(params, x)
    shape = targets_for(name, z).shape[1:]
    # A class for each vector of outputs, or a bit for each output.
    values = 2 if shape == z.shape[1:] else z.shape[-1]
    labels = [
        np.reshape(y, shape)
        for y in itertools.product(range(values), repeat=np.prod(shape, dtype=int))
    ]
    flat, restore = ravel_pytree(params)

    def loss(flat, example, y):
        return likelihood.negative_log_likelihood(apply(restore(flat), example[None]), y[None])[0]

    gradients = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0, None)))
    total, mass = 0, 0
    for y in labels:
        value, gradient = gradients(flat, x, y)
        probability = np.exp(-value)
        total += np.einsum("n,nd,ne->de", probability, gradient, gradient) / len(x)
        mass += probability
    np.testing.assert_allclose(mass, 1, rtol=1e-10, atol=1e-12)
    arguments = Model(apply, likelihood), params, Examples(x)
    matrix = fisher.full(*arguments, kind=fisher.true).matrix
    np.testing.assert_allclose(matrix, total, rtol=1e-10, atol=1e-12)


def test_true_fisher_of_a_linear_softmax_is_the_hessian_of_the_loss(mlp, targets_for):
    x = mlp.inputs
    params = {"kernel": mlp.params["second"]["kernel"][:4], "bias": jnp.ones(3)}
    flat, restore = ravel_pytree(params)

    def apply(params, x):
        return x @ params["kernel"] + params["bias"]

    y = targets_for("categorical", jax.jit(apply)(params, x))

    def loss(flat):
        z = apply(restore(flat), x)
        return likelihoods.categorical.negative_log_likelihood(z, y).mean()

    matrix = fisher.full(Model(apply, likelihoods.categorical), params, Examples(x)).matrix
    np.testing.assert_allclose(matrix, jax.jit(jax.hessian(loss))(flat), rtol=1e-10, atol=1e-12)


@networks(("mlp", "categorical"), ("sequence", "bernoulli"), ("sequence", "gaussian"))
def test_empirical_fisher_is_the_mean_of_outer_products_of_gradients(network, targets_for, name):
    apply, params, x = network
    likelihood = getattr(likelihoods, name)
    y = targets_for(name, jax.jit(apply)(params, x))
    flat, restore = ravel_pytree(params)

    def loss(flat, example, y):
        return likelihood.negative_log_likelihood(apply(restore(flat), example[None]), y[None])[0]

    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(flat, x, y)
    matrix = fisher.full(
        Model(apply, likelihood), params, Examples(x, y), kind=fisher.empirical, batch_size=3
    ).matrix
    expected = np.transpose(gradients) @ np.asarray(gradients) / len(x)
    np.testing.assert_allclose(matrix, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("network", "structure", "name", "num_samples"),
    [
        pytest.param("mlp", fisher.full, "categorical", 1, marks=pytest.mark.slow),
        ("mlp", fisher.full, "categorical", 3),
        ("mlp", fisher.full, "bernoulli", 1),
        # Of a sequence one label a position: products of two positions have mean zero.
        ("sequence", fisher.full, "categorical", 1),
        pytest.param("sequence", fisher.diagonal, "categorical", 1, marks=pytest.mark.slow),
        pytest.param("sequence", fisher.kfac, "categorical", 1, marks=pytest.mark.slow),
        ("sequence", partial(fisher.kfac, sharing=fisher.reduce), "gaussian", 1),
    ],
    indirect=["network"],
)
@pytest.mark.parametrize("drawn", [fisher.sampled, fisher.curvature_propagation])
def test_what_is_drawn_is_the_true_fisher_on_average(
    network, key, structure, name, num_samples, drawn
):
    apply, params, x = network
    arguments, draws = (Model(apply, getattr(likelihoods, name)), params, Examples(x)), 800
    kind = partial(drawn, num_samples=num_samples)

    @jax.jit
    def entries(key):
        return ravel_pytree(structure(*arguments, kind=kind, key=key, batch_size=4))[0]

    samples = np.asarray(jax.vmap(entries)(jax.random.split(key, draws)))
    standard_error = samples.std(0) / np.sqrt(draws)
    error = samples.mean(0) - ravel_pytree(structure(*arguments, kind=fisher.true))[0]
    # 820 different entries: the largest of so many normal deviates stays below 5. The factors of
    # the inputs do not depend on labels.
    assert (np.abs(error) <= 5 * standard_error + 1e-12).all()
    assert standard_error.max() < 0.1 * samples.mean(0).max()


@pytest.mark.long
def test_one_column_is_the_true_fisher_whatever_its_sign(mlp, key):
    """Of two classes, or one output, there is nothing to draw, however sure the model is."""
    apply, params, x = mlp
    for outputs, likelihood in ((2, likelihoods.categorical), (1, likelihoods.gaussian)):
        model = Model(lambda p, x, n=outputs: 9 * apply(p, x)[:, :n], likelihood)
        found, exact = (
            fisher.full(model, params, Examples(x), kind=kind, key=key).matrix
            for kind in (fisher.curvature_propagation, fisher.true)
        )
        np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-12)


def test_columns_that_cannot_be_combined_are_written_out(sequence, key):
    apply, params, x = sequence
    whole = likelihoods.categorical._replace(combine=None)
    found, expected = (
        fisher.full(
            Model(apply, own), params, Examples(x), kind=fisher.curvature_propagation, key=key
        ).matrix
        for own in (whole, likelihoods.categorical)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_no_random_sum_is_far_from_the_curvature(key):
    """|sum_k r_k S_k|^2 <= K tr S S^T for every draw; a drawn label can be 1 / p of it."""
    z = np.linspace(0, 30, 16)[:, None] * np.cos(np.arange(80.0)).reshape(16, 5)
    columns = jax.jit(likelihoods.categorical.factor)(z)
    traces = np.square(columns).sum((0, 2))

    def squares(kind):
        draw = jax.vmap(lambda key: kind(likelihoods.categorical, jnp.asarray(z), key=key))
        return np.square(jax.jit(draw)(jax.random.split(key, 400))).sum((1, 3))

    bound = len(columns) * traces * (1 + 1e-9)
    assert (squares(fisher.curvature_propagation) <= bound).all()
    assert not (squares(fisher.sampled) <= bound).all()


@pytest.mark.parametrize("kind", [fisher.sampled, fisher.curvature_propagation])
def test_minibatches_draw_independently(mlp, key, kind):
    apply, params, x = mlp
    model = Model(apply, likelihoods.categorical)
    options = {"kind": kind, "key": key, "batch_size": 11}
    once, twice = (
        fisher.full(model, params, Examples(inputs), **options).matrix
        for inputs in (x, np.concatenate([x, x]))
    )
    assert np.abs(np.subtract(once, twice)).max() > 1e-3


@pytest.mark.parametrize(
    "kind", [fisher.true, fisher.sampled, fisher.empirical, fisher.curvature_propagation]
)
def test_vector_product_is_the_matrix_times_the_vector(sequence, targets_for, key, kind):
    apply, params, x = sequence
    y = targets_for("categorical", jax.jit(apply)(params, x))
    vector = jax.tree.map(np.cos, params)
    examples = Examples(x, y, weights=np.linspace(0, 2, len(x)))
    arguments = Model(apply, likelihoods.categorical), params, examples
    options = {"kind": kind, "key": key, "batch_size": 3}
    dense = fisher.full(*arguments, **options)
    product = fisher.vector_product(*arguments, vector, **options)
    expected = np.asarray(dense.matrix) @ ravel_pytree(vector)[0]
    np.testing.assert_allclose(ravel_pytree(product)[0], expected, rtol=1e-10, atol=1e-12)
    chex.assert_trees_all_equal_shapes(product, vector)


def test_vector_product_refuses_a_vector_of_another_shape(mlp):
    apply, params, x = mlp
    with pytest.raises(ValueError, match="vector has leaves of shapes"):
        fisher.vector_product(
            Model(apply, likelihoods.gaussian), params, Examples(x), params["first"]
        )
