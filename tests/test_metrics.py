"""Metrics are counts of right answers, whatever the minibatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import metrics

CATEGORICAL = fj.likelihoods.categorical


def apply(params, x):
    return jnp.tanh(x @ params["w"])


@pytest.fixture(scope="module")
def world():
    source = np.random.default_rng(0)
    models = {"w": source.normal(size=(3, 4, 5)).astype(np.float32)}
    return models, source.normal(size=(17, 4)).astype(np.float32), source.integers(0, 5, 17)


def by_hand(outputs, y):
    return float(np.mean(np.argmax(outputs, -1) == y))


@pytest.mark.parametrize("batch_size", [1, 5, 17, 500])
def test_logits_are_those_of_the_network_for_any_minibatch(world, batch_size):
    models, x, _ = world
    params = {"w": models["w"][0]}
    outputs = metrics.logits(apply, params, x, batch_size=batch_size)
    np.testing.assert_allclose(outputs, np.tanh(x @ params["w"]), atol=1e-5)


def test_accuracies_are_shares_of_right_answers(world):
    models, x, y = world
    outputs = [np.tanh(x @ w) for w in models["w"]]
    for w, own in zip(models["w"], outputs, strict=True):
        assert metrics.accuracy(apply, {"w": w}, x, y, batch_size=5) == pytest.approx(
            by_hand(own, y)
        )
    local = metrics.local_accuracies(apply, models, x, y, batch_size=5)
    np.testing.assert_allclose(local, [by_hand(own, y) for own in outputs], rtol=1e-6)
    weights = jnp.array([0.5, 0.2, 0.3])
    ensemble = metrics.ensemble_accuracy(apply, models, weights, x, y, batch_size=5)
    mean = sum(p * own for p, own in zip(np.asarray(weights), outputs, strict=True))
    assert ensemble == pytest.approx(by_hand(mean, y))


def test_an_ensemble_of_one_model_is_that_model(world):
    models, x, y = world
    for client, weights in enumerate(np.eye(3)):
        single = metrics.accuracy(apply, {"w": models["w"][client]}, x, y)
        assert metrics.ensemble_accuracy(apply, models, weights, x, y) == single


def test_positions_of_a_sequence_all_count():
    def copy(params, x):
        return x * params

    x = jax.nn.one_hot(jnp.array([[0, 1], [2, 2]]), 3)
    assert metrics.accuracy(copy, jnp.ones(()), x, jnp.array([[0, 1], [2, 0]])) == 0.75


def test_second_calls_compile_nothing(world, compilations):
    models, x, y = world
    one, weights = {"w": models["w"][0]}, jnp.ones(3) / 3
    others = {"w": models["w"][::-1].copy()}

    def everything(one, models):
        metrics.accuracy(apply, one, x, y)
        metrics.local_accuracies(apply, models, x, y)
        metrics.ensemble_accuracy(apply, models, weights, x, y)

    everything(one, models)
    with compilations() as count:
        everything({"w": models["w"][1]}, others)
    assert count() == 0


BAD = {
    "column of targets": (
        dict(targets=np.zeros((17, 1), int)),
        r"\(17, 1\) and the outputs \(17, 5\)",
    ),
    "one-hot targets": (dict(targets=np.zeros((17, 5))), "one class label"),
    "number of targets": (dict(targets=np.zeros(16, int)), r"\(16,\)"),
    "no inputs": (dict(inputs=np.ones((0, 4)), targets=np.zeros(0, int)), "no inputs"),
    "batch size": (dict(batch_size=0), "batch_size is 0"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused(world, fault):
    models, x, y = world
    change, words = BAD[fault]
    arguments = {"inputs": x, "targets": y} | change
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(apply, {"w": models["w"][0]}, **arguments)
    with pytest.raises(ValueError, match=words):
        metrics.local_accuracies(apply, models, **arguments)


def test_an_ensemble_needs_one_weight_a_model(world):
    models, x, y = world
    with pytest.raises(ValueError, match=r"weights has shape \(2,\); expected \(3,\)"):
        metrics.ensemble_accuracy(apply, models, np.ones(2), x, y)


def regress(params, x):
    return x @ params["w"]


@pytest.fixture(scope="module")
def shared_out(world):
    """Clients of 5, 0 and 12 examples."""
    _, x, y = world
    rows = np.random.default_rng(1).permutation(17)
    return fj.clients.federation((x, y), [rows[:5], [], rows[5:]])


def losses_by_hand(outputs, y):
    shifted = outputs - outputs.max(-1, keepdims=True)
    return np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(y)), y]


@pytest.mark.parametrize("batch_size", [1, 5, 500])
@pytest.mark.parametrize("stacked", [False, True])
def test_performance_is_the_mean_over_each_clients_examples(world, shared_out, batch_size, stacked):
    models, x, y = world
    params = models if stacked else {"w": models["w"][0]}
    found = metrics.performance(
        apply, CATEGORICAL, params, shared_out, stacked=stacked, batch_size=batch_size
    )
    assert found.sizes.tolist() == [5, 0, 12]
    for client in (0, 2):
        rows = np.asarray(shared_out.indices[client, : shared_out.sizes[client]])
        outputs = np.tanh(x[rows] @ models["w"][client if stacked else 0])
        assert found.accuracy[client] == pytest.approx(by_hand(outputs, y[rows]))
        expected = losses_by_hand(outputs, y[rows]).mean()
        assert found.loss[client] == pytest.approx(expected, rel=1e-5)
    mean = found.mean()
    assert mean.accuracy == pytest.approx((found.accuracy[0] + found.accuracy[2]) / 2)
    assert mean.loss == pytest.approx((found.loss[0] + found.loss[2]) / 2)


def test_performance_of_some_clients_is_theirs(world, shared_out):
    models, _, _ = world
    params = {"w": models["w"][0]}
    everybody = metrics.performance(apply, CATEGORICAL, params, shared_out)
    some = metrics.performance(apply, CATEGORICAL, params, shared_out, clients=[2, 0])
    np.testing.assert_array_equal(some.loss, everybody.loss[np.array([2, 0])])


def test_the_barrier_is_what_merging_costs_on_the_clients_data(world, shared_out):
    models, _, _ = world
    merged = {"w": models["w"].mean(0)}
    barrier = metrics.client_server_barrier(apply, CATEGORICAL, merged, models, shared_out)
    own = metrics.performance(apply, CATEGORICAL, models, shared_out, stacked=True)
    common = metrics.performance(apply, CATEGORICAL, merged, shared_out)
    assert barrier.loss == pytest.approx((common.loss - own.loss)[np.array([0, 2])].mean())
    assert barrier.accuracy == pytest.approx(
        (own.accuracy - common.accuracy)[np.array([0, 2])].mean()
    )
    same = {"w": np.broadcast_to(merged["w"], models["w"].shape)}
    none = metrics.client_server_barrier(apply, CATEGORICAL, merged, same, shared_out)
    assert tuple(none) == (0.0, 0.0)


def test_a_client_that_diverged_does_not_count_in_the_barrier(world, shared_out):
    models, _, _ = world
    merged = {"w": models["w"].mean(0)}
    spoiled = {"w": models["w"] * np.array([1.0, 1.0, np.nan], np.float32)[:, None, None]}
    alone = fj.clients.select(shared_out, [0])
    found = metrics.client_server_barrier(apply, CATEGORICAL, merged, spoiled, shared_out)
    first = {"w": models["w"][:1]}
    expected = metrics.client_server_barrier(apply, CATEGORICAL, merged, first, alone)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_accuracy_of_numbers_is_not_defined_and_of_sequences_counts_positions(world):
    models, x, _ = world
    params = {"w": models["w"][0]}
    numbers = fj.clients.federation((x, x @ params["w"]), [np.arange(17)])
    found = metrics.performance(regress, fj.likelihoods.gaussian, params, numbers)
    assert np.isnan(found.accuracy[0])
    assert found.loss[0] == pytest.approx(0.0, abs=1e-9)
    sequences = np.random.default_rng(2).normal(size=(6, 3, 4)).astype(np.float32)
    labels = np.argmax(sequences @ params["w"], -1).astype(np.int32)
    labels[:, 0] = (labels[:, 0] + 1) % 5
    said = fj.clients.federation((sequences, labels), [np.arange(6)])
    found = metrics.performance(regress, CATEGORICAL, params, said)
    assert found.accuracy[0] == pytest.approx(2 / 3)


def test_stacked_models_that_are_not_as_many_as_the_clients_are_refused(world, shared_out):
    models, _, _ = world
    with pytest.raises(ValueError, match="leading axis of the 2 clients"):
        metrics.performance(apply, CATEGORICAL, models, shared_out, stacked=True, clients=[0, 1])
