"""Natural-gradient exchanges against the dense formula on all data in one place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, fisher, likelihoods, merging

KEY = jax.random.key(0)
SPLITS = [np.arange(30)], np.split(np.arange(30), [4, 11])


def apply(params, x):
    hidden = jnp.tanh(x @ params["z"]["kernel"] + params["z"]["bias"])
    return jnp.tanh(hidden @ params["b"]) @ params["a"]


def linear(params, x):
    return x @ params


@pytest.fixture
def world(x64):
    source = np.random.default_rng(0)
    params = {
        "z": {"kernel": jnp.asarray(source.normal(size=(3, 5))), "bias": jnp.ones(5) / 3},
        "b": jnp.asarray(source.normal(size=(5, 2))),
        "a": jnp.asarray(source.normal(size=(2, 3))),
    }
    return params, source.normal(size=(30, 3)), source.integers(0, 3, 30).astype(np.int32)


def step(model, params, data, partition, **options):
    federation = fj.clients.federation(data, partition)
    method = algorithms.natural_gradient(model, kind=fisher.true, **options)
    return merging.exchange(method, params, federation, key=KEY)


@pytest.mark.parametrize("partition", SPLITS, ids=len)
@pytest.mark.parametrize(("squared", "cap"), [(True, 1e6), (True, 1e-3), (False, 0.01)])
def test_a_step_is_that_of_all_data_in_one_place(world, partition, squared, cap):
    params, x, labels = world
    model = fj.Model(apply, likelihoods.categorical)
    options = {"squared": squared, "cap": cap, "damping": 0.3}
    merged, _, info = step(model, params, (x, labels), partition, **options)
    y, likelihood = labels, likelihoods.categorical
    if squared:
        y, likelihood = jnp.eye(3)[labels], likelihoods.gaussian
    other = fj.Model(apply, likelihood)

    def loss(params):
        return likelihood.negative_log_likelihood(apply(params, x), y).mean()

    # The largest before the last is the first: 4 x 5 with its bias.
    gradient = jax.grad(loss)(params)["z"]
    gradient = np.concatenate([gradient["kernel"], gradient["bias"][None]])
    factors = fisher.kfac(other, params, fj.Examples(x), kind=fisher.true).factors["z/kernel"]
    curvature = np.kron(factors["input"], factors["output"])
    damped = curvature + 0.3 * np.trace(curvature) / 20 * np.eye(20)
    direction = -np.linalg.solve(damped, gradient.ravel())
    change = direction @ curvature @ direction / 2
    scale = min(1, np.sqrt(cap * loss(params) / change))
    moved = scale * direction.reshape(4, 5)
    np.testing.assert_allclose(merged["z"]["kernel"] - params["z"]["kernel"], moved[:3], rtol=1e-7)
    np.testing.assert_allclose(merged["z"]["bias"] - params["z"]["bias"], moved[3], rtol=1e-7)
    chex.assert_trees_all_equal(merged["a"], params["a"])
    np.testing.assert_allclose(info.loss, loss(params))
    predicted = loss(params) + moved.ravel() @ gradient.ravel() + scale**2 * change
    np.testing.assert_allclose(info.predicted, predicted)
    np.testing.assert_allclose(info.scale, scale)


def test_of_a_linear_model_one_step_is_least_squares(world):
    """The quadratic is the loss itself, so that what is predicted comes true."""
    _, x, _ = world
    y, start = np.cos(x[:, :2]), jnp.ones((3, 2))
    model = fj.Model(linear, likelihoods.gaussian)
    options = {"damping": 0.0, "cap": 1e6, "layer": ""}
    merged, _, info = step(model, start, (x, y), SPLITS[1], **options)
    np.testing.assert_allclose(merged, np.linalg.lstsq(x, y)[0], rtol=1e-8)
    np.testing.assert_allclose(info.predicted, ((x @ merged - y) ** 2).sum(1).mean() / 2)


def test_it_alternates_with_the_analytic_head_to_a_smaller_loss(world):
    params, x, labels = world
    model = fj.Model(apply, likelihoods.categorical)
    federation = fj.clients.federation((x, labels), SPLITS[1])
    exchanges = algorithms.analytic_head(model), algorithms.natural_gradient(model)
    losses = []
    for number in range(6):
        key = jax.random.fold_in(KEY, number)
        method = exchanges[number % 2]
        params, _, info = merging.exchange(method, params, federation, key=key)
        losses += [float(info.loss)] if number % 2 else []
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"damping": -1.0}, "damping is -1.0"),
        ({"cap": 0.0}, "cap is 0.0"),
        ({"kind": 2}, "kind is 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_examples": 0}, "max_examples is 0"),
        ({"layer": "w"}, "There is no layer 'w' to move"),
        ({}, "There is no layer None to move"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        linear_step(**options)


def test_a_slice_of_a_stack_is_refused():
    def stacked(params, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]

    model = fj.Model(stacked, likelihoods.gaussian)
    federation = fj.clients.federation((np.ones((4, 3)), np.ones((4, 3))), [range(4)])
    method = algorithms.natural_gradient(model, layer="[0]")
    with pytest.raises(ValueError, match=r"There is no layer '\[0\]' to move"):
        merging.exchange(method, jnp.ones((2, 3, 3)), federation, key=KEY)


def linear_step(**options):
    data = np.ones((4, 3)), np.ones((4, 2))
    method = algorithms.natural_gradient(fj.Model(linear, likelihoods.gaussian), **options)
    federation = fj.clients.federation(data, [range(4)])
    return merging.exchange(method, jnp.ones((3, 2)), federation, key=KEY)
