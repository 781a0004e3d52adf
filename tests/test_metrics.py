"""Metrics are counts of right answers, whatever the minibatch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import Examples, metrics

CATEGORICAL = fj.likelihoods.categorical


def apply(params, x):
    return jnp.tanh(x @ params["w"])


MODEL = fj.Model(apply, CATEGORICAL)


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
    outputs = metrics.logits(MODEL, params, x, batch_size=batch_size)
    np.testing.assert_allclose(outputs, np.tanh(x @ params["w"]), atol=1e-5)


def test_accuracies_are_shares_of_right_answers(world):
    models, x, y = world
    outputs, examples = [np.tanh(x @ w) for w in models["w"]], Examples(x, y)
    for w, own in zip(models["w"], outputs, strict=True):
        found = metrics.accuracy(MODEL, {"w": w}, examples, batch_size=5)
        assert found == pytest.approx(by_hand(own, y))
    local = metrics.accuracy(MODEL, models, examples, batch_size=5, stacked=True)
    np.testing.assert_allclose(local, [by_hand(own, y) for own in outputs], rtol=1e-6)
    weights = jnp.array([0.5, 0.2, 0.3])
    ensemble = metrics.ensemble_accuracy(MODEL, models, weights, examples, batch_size=5)
    mean = sum(p * own for p, own in zip(np.asarray(weights), outputs, strict=True))
    assert ensemble == pytest.approx(by_hand(mean, y))


@pytest.mark.long
def test_rows_in_use_count_by_their_weights(world):
    models, x, y = world
    one = {"w": models["w"][0]}
    right = np.argmax(x @ one["w"], -1) == y
    rows, weights = jnp.array([3, 0, 0, 11]), jnp.array([1.0, 0.5, 0.5, 3.0])
    expected = np.average(right[np.asarray(rows)], weights=weights)
    examples = Examples(jnp.asarray(x), jnp.asarray(y), rows, weights)
    assert metrics.accuracy(MODEL, one, examples) == pytest.approx(expected)
    assert metrics.accuracy(MODEL, models, examples, stacked=True)[0] == pytest.approx(expected)
    found = metrics.ensemble_accuracy(MODEL, models, np.eye(3)[0], examples)
    assert found == pytest.approx(expected)


def test_an_ensemble_of_one_model_is_that_model(world):
    models, x, y = world
    for client, weights in enumerate(np.eye(3)):
        single = metrics.accuracy(MODEL, {"w": models["w"][client]}, Examples(x, y))
        assert metrics.ensemble_accuracy(MODEL, models, weights, Examples(x, y)) == single


def test_positions_of_a_sequence_all_count():
    copy = fj.Model(lambda params, x: x * params, CATEGORICAL)
    x = jax.nn.one_hot(jnp.array([[0, 1], [2, 2]]), 3)
    examples = Examples(x, jnp.array([[0, 1], [2, 0]]))
    assert metrics.accuracy(copy, jnp.ones(()), examples) == 0.75


def test_a_model_that_answers_nan_has_no_accuracy(world, shared_out):
    models, x, y = world
    spoiled = {"w": models["w"].copy()}
    spoiled["w"][1, 0, 0] = np.nan  # only the outputs of class 0 are NaN
    broken, examples = {"w": spoiled["w"][1]}, Examples(x, y)
    assert np.isnan(metrics.accuracy(MODEL, broken, examples))
    np.testing.assert_array_equal(
        np.isnan(metrics.accuracy(MODEL, spoiled, examples, stacked=True)), [False, True, False]
    )
    assert np.isnan(metrics.ensemble_accuracy(MODEL, spoiled, np.full(3, 1 / 3), examples))
    found = metrics.performance(MODEL, broken, shared_out)
    for values in (found.loss, found.accuracy):
        np.testing.assert_array_equal(np.isnan(values), [True, False, True])
    assert np.isnan(found.mean().accuracy)
    own = metrics.performance(MODEL, spoiled, shared_out, stacked=True)
    assert not np.isnan(own.accuracy).any()  # client 1 has no examples


def test_second_calls_compile_nothing(world, compilations):
    models, x, y = world
    one, weights, examples = {"w": models["w"][0]}, jnp.ones(3) / 3, Examples(x, y)
    others = {"w": models["w"][::-1].copy()}

    def everything(model, one, models):
        metrics.accuracy(model, one, examples)
        metrics.accuracy(model, models, examples, stacked=True)
        metrics.ensemble_accuracy(model, models, weights, examples)

    everything(MODEL, one, models)
    with compilations() as count:
        everything(MODEL, {"w": models["w"][1]}, others)
        # How a model trains makes no difference to what it says.
        trained = MODEL._replace(apply_train=lambda params, x, key, weights: (apply(params, x), 0))
        everything(fj.Model(*trained[:3], mask={"w": True}), one, models)
    assert count() == 0


BAD = {
    "column of targets": (
        dict(targets=np.zeros((17, 1), int)),
        r"shape \(17,\) .*, got \(17, 1\)",
    ),
    "one-hot targets": (dict(targets=np.zeros((17, 5))), "one class index for each output vector"),
    "number of targets": (dict(targets=np.zeros(16, int)), "16 targets for 17 inputs"),
    "no targets": (dict(targets=None), "targets are None"),
    "no inputs": (dict(inputs=np.ones((0, 4)), targets=np.zeros(0, int)), "data set is empty"),
    "batch size": (dict(batch_size=0), "batch_size is 0"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused(world, fault):
    models, x, y = world
    change, words = BAD[fault]
    arguments = {"inputs": x, "targets": y, "batch_size": 500} | change
    examples = Examples(arguments["inputs"], arguments["targets"])
    size = {"batch_size": arguments["batch_size"]}
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(MODEL, {"w": models["w"][0]}, examples, **size)
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(MODEL, models, examples, **size, stacked=True)
    with pytest.raises(ValueError, match=words):
        metrics.ensemble_accuracy(MODEL, models, np.ones(3) / 3, examples, **size)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda y: y + 3, ValueError, "between 0 and 4, got values from"),
        (lambda y: y - 1, ValueError, "between 0 and 4, got values from -1"),
        (lambda y: y / 1, TypeError, "dtype float"),
    ],
)
def test_labels_that_are_none_of_the_outputs_are_refused(world, shared_out, wrong, error, words):
    models, x, y = world
    examples, one = Examples(x, wrong(y)), {"w": models["w"][0]}
    with pytest.raises(error, match=words):
        metrics.accuracy(MODEL, one, examples)
    with pytest.raises(error, match=words):
        metrics.accuracy(MODEL, models, examples, stacked=True)
    with pytest.raises(error, match=words):
        metrics.ensemble_accuracy(MODEL, models, np.full(3, 1 / 3), examples)
    federation = shared_out._replace(targets=jnp.asarray(wrong(y)))
    with pytest.raises(error, match=words):
        metrics.performance(MODEL, one, federation)
    with pytest.raises(error, match=words):
        metrics.client_server_barrier(MODEL, one, models, federation)


def test_an_ensemble_needs_one_weight_a_model(world):
    models, x, y = world
    with pytest.raises(ValueError, match=r"weights has shape \(2,\); expected \(3,\)"):
        metrics.ensemble_accuracy(MODEL, models, np.ones(2), Examples(x, y))


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
    found = metrics.performance(MODEL, params, shared_out, stacked=stacked, batch_size=batch_size)
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
    everybody = metrics.performance(MODEL, params, shared_out)
    some = metrics.performance(MODEL, params, fj.clients.select(shared_out, [2, 0]))
    np.testing.assert_array_equal(some.loss, everybody.loss[np.array([2, 0])])


def test_the_barrier_is_what_merging_costs_on_the_clients_data(world, shared_out):
    models, _, _ = world
    merged = {"w": models["w"].mean(0)}
    barrier = metrics.client_server_barrier(MODEL, merged, models, shared_out)
    own = metrics.performance(MODEL, models, shared_out, stacked=True)
    common = metrics.performance(MODEL, merged, shared_out)
    assert barrier.loss == pytest.approx((common.loss - own.loss)[np.array([0, 2])].mean())
    assert barrier.accuracy == pytest.approx(
        (own.accuracy - common.accuracy)[np.array([0, 2])].mean()
    )
    same = {"w": np.broadcast_to(merged["w"], models["w"].shape)}
    none = metrics.client_server_barrier(MODEL, merged, same, shared_out)
    assert tuple(none) == (0.0, 0.0)


@pytest.mark.long
def test_a_client_that_diverged_does_not_count_in_the_barrier(world, shared_out):
    models, _, _ = world
    merged = {"w": models["w"].mean(0)}
    spoiled = {"w": models["w"] * np.array([1.0, 1.0, np.nan], np.float32)[:, None, None]}
    alone = fj.clients.select(shared_out, [0])
    found = metrics.client_server_barrier(MODEL, merged, spoiled, shared_out)
    first = {"w": models["w"][:1]}
    expected = metrics.client_server_barrier(MODEL, merged, first, alone)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_accuracy_of_numbers_is_not_defined_and_of_sequences_counts_positions(world):
    models, x, _ = world
    params = {"w": models["w"][0]}
    numbers = fj.clients.federation((x, x @ params["w"]), [np.arange(17)])
    found = metrics.performance(fj.Model(regress, fj.likelihoods.gaussian), params, numbers)
    assert np.isnan(found.accuracy[0])
    assert found.loss[0] == pytest.approx(0.0, abs=1e-9)
    sequences = np.random.default_rng(2).normal(size=(6, 3, 4)).astype(np.float32)
    labels = np.argmax(sequences @ params["w"], -1).astype(np.int32)
    labels[:, 0] = (labels[:, 0] + 1) % 5
    said = fj.clients.federation((sequences, labels), [np.arange(6)])
    found = metrics.performance(fj.Model(regress, CATEGORICAL), params, said)
    assert found.accuracy[0] == pytest.approx(2 / 3)


BITS = fj.Model(regress, fj.likelihoods.bernoulli)


@pytest.mark.parametrize("kind", [np.int32, np.float32, bool])
def test_accuracy_of_bits_is_the_share_of_right_ones(world, kind):
    """As scikit-learn's of all bits in a row."""
    sklearn = pytest.importorskip("sklearn.metrics")
    models, x, _ = world
    bits = (np.random.default_rng(3).random((17, 5)) < 0.4).astype(kind)
    outputs = np.stack([x @ w for w in models["w"]])
    examples = Examples(x, bits)

    def expected(z, weights=None):
        weights = None if weights is None else np.repeat(weights, 5)
        return sklearn.accuracy_score(bits.ravel(), (z > 0).ravel(), sample_weight=weights)

    first = {"w": models["w"][0]}
    assert metrics.accuracy(BITS, first, examples) == pytest.approx(expected(outputs[0]))
    found = metrics.accuracy(BITS, models, examples, stacked=True, batch_size=4)
    np.testing.assert_allclose(found, [expected(z) for z in outputs], rtol=1e-6)
    weights = np.array([0.5, 0.2, 0.3], np.float32)
    found = metrics.ensemble_accuracy(BITS, models, weights, examples)
    assert found == pytest.approx(expected(np.tensordot(weights, outputs, 1)))
    rows = np.random.default_rng(4).random(17).astype(np.float32)
    weighted = examples._replace(weights=jnp.asarray(rows))
    found = metrics.accuracy(BITS, first, weighted)
    assert found == pytest.approx(expected(outputs[0], rows))
    parts = fj.clients.federation((x, bits), [np.arange(5), [], np.arange(5, 17)])
    found = metrics.performance(BITS, first, parts).accuracy
    right = (outputs[0] > 0) == (bits > 0)
    np.testing.assert_allclose(found[np.array([0, 2])], [right[:5].mean(), right[5:].mean()])


def test_accuracy_of_bits_with_a_loss_of_ones_own_and_with_nan(world):
    models, x, _ = world
    bits = np.ones((17, 5), np.float32)
    own = fj.likelihoods.bernoulli._replace(negative_log_likelihood=lambda z, y: (z - y).sum(1))
    examples, first = Examples(x, bits), {"w": models["w"][0]}
    found = metrics.accuracy(fj.Model(regress, own), first, examples)
    assert found == metrics.accuracy(BITS, first, examples)
    broken = {"w": first["w"] * np.array([1, 1, np.nan, 1, 1], np.float32)}
    assert np.isnan(metrics.accuracy(BITS, broken, examples))


def test_accuracy_of_numbers_is_refused_with_what_to_use(world):
    models, x, _ = world
    numbers = fj.Model(regress, fj.likelihoods.gaussian)
    examples, first = Examples(x, x @ models["w"][0]), {"w": models["w"][0]}
    words = r"means of a Gaussian.*performance\(\.\.\.\)\.loss"
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(numbers, first, examples)
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(numbers, models, examples, stacked=True)
    with pytest.raises(ValueError, match=words):
        metrics.ensemble_accuracy(numbers, models, np.ones(3) / 3, examples)


def test_only_what_says_so_has_correct_predictions(world, shared_out):
    """Counts are integers too: their largest output is no prediction of theirs."""
    models, x, y = world
    first = {"w": models["w"][0]}

    def square(z, y):
        return jnp.square(z - y).sum()

    def is_near(z, y):
        return jnp.abs(z[0] - y) < 1

    plain, judged = (
        fj.Model(regress, fj.likelihoods.custom(square, correct=f)) for f in (None, is_near)
    )
    found = metrics.performance(plain, first, shared_out)
    assert np.isnan(found.accuracy[np.asarray(found.sizes) > 0]).all()
    with pytest.raises(ValueError, match=r"a loss of your own.*custom\(loss, correct=\.\.\.\)"):
        metrics.accuracy(plain, first, Examples(x, y))
    z = np.asarray(metrics.logits(judged, first, x))
    expected = np.mean(np.abs(z[:, 0] - y) < 1)
    assert metrics.accuracy(judged, first, Examples(x, y)) == pytest.approx(expected)
    found = metrics.performance(judged, first, shared_out)
    loss = ((z - y[:, None]) ** 2).sum(1)
    for client in np.flatnonzero(found.sizes):
        rows = np.asarray(shared_out.indices[client, : shared_out.sizes[client]])
        assert found.accuracy[client] == pytest.approx(np.mean(np.abs(z[rows, 0] - y[rows]) < 1))
        assert found.loss[client] == pytest.approx(loss[rows].mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (np.zeros(17, int), r"bernoulli likelihood expected targets of shape \(17, 5\)"),
        (np.full((17, 5), 2), "Bernoulli targets between 0 and 1"),
        (None, "one bit for each output"),
    ],
)
def test_targets_that_are_no_bits_are_refused(world, targets, words):
    models, x, _ = world
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(BITS, {"w": models["w"][0]}, Examples(x, targets))


def test_stacked_models_that_are_not_as_many_as_the_clients_are_refused(world, shared_out):
    models, _, _ = world
    two = fj.clients.select(shared_out, [0, 1])
    with pytest.raises(ValueError, match="leading axis of 2 clients"):
        metrics.performance(MODEL, models, two, stacked=True)
