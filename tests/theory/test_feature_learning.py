"""Signal learned and noise memorised: the decomposition holds, and training is its rounds.

The lemmas about the coefficients are in `test_coefficients`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.theory import feature_learning, signal_noise

OWNERS = (0, 0, 1, 0)
DIM, WIDTH, EXAMPLES = 60, 3, 6


def draw(seed=0, owners=OWNERS, **options):
    keys = jax.random.split(jax.random.key(seed), 3)
    how = {"num_examples": EXAMPLES, "dim": DIM, "norm": 3.0} | options
    data = signal_noise.draw(keys[0], owners, **how)
    test = signal_noise.draw_test(keys[1], data, 50)
    return data, test, signal_noise.initial(keys[2], WIDTH, how["dim"], 0.1)


def run_rounds(start, data, mixing, steps, rate=0.5, rounds=1):
    """Train without a look at the test examples; return the state, and the coefficients' path."""
    how = {"rounds": rounds, "local_steps": steps, "learning_rate": rate}
    test = data._replace(labels=data.labels[:1], noise=data.noise[:1])
    state, history = feature_learning.train(start, data, test, mixing, **how)
    return state, (history.signal[-1], history.noise[-1])


MIXINGS = {
    "average": feature_learning.average(4),
    "alone": feature_learning.alone(4),
    "within_groups": feature_learning.within_groups(OWNERS),
}


@pytest.mark.long
def test_signals_are_orthogonal_to_each_other_and_to_all_noise():
    data, test, _ = draw(norm=2.5)
    assert np.allclose(data.signals @ data.signals.T, 2.5**2 * np.eye(2))
    for seen in (data, test):
        assert np.array_equal(seen.noise @ data.signals.T, np.zeros((*seen.labels.shape, 2)))
        assert set(np.unique(seen.labels)) <= {-1.0, 1.0}


@pytest.mark.parametrize("mixing", MIXINGS)
def test_coefficients_and_descent_are_two_ways_to_the_same_weights(mixing):
    data, _, start = draw()
    state = start
    for _ in range(12):
        state, _ = run_rounds(state, data, MIXINGS[mixing], 4)
        found = feature_learning.reconstruct(start, state, data)
        assert np.max(np.abs(found - state.weights)) < 1e-5 * np.max(np.abs(state.weights))
    assert np.max(np.abs(state.weights - start)) > 0.5


@pytest.mark.long
def test_local_steps_are_full_batch_descent_of_the_library(x64):
    data, _, start = draw()
    mixing = feature_learning.alone(4)
    state, _ = run_rounds(start, data, mixing, 7)
    how = {"optimizer": optax.sgd(0.5), "epochs": 7, "batch_size": EXAMPLES}
    model, federation = signal_noise.network(WIDTH), signal_noise.federation(data)
    trained = fj.training.train(model, start, federation, key=jax.random.key(0), **how)
    assert np.allclose(trained.params, state.weights, atol=1e-12)
    loss, accuracy = feature_learning.performance(state.weights, data)
    by_library = fj.metrics.performance(model, state.weights, federation, stacked=True)
    assert np.allclose(by_library.loss, loss)
    for client, w in enumerate(state.weights):
        own = fj.clients.view(federation, client)
        right = (model.apply(w, own.inputs[own.indices]) > 0) == (own.targets[own.indices] > 0.5)
        assert np.isclose(np.mean(right), accuracy[client])


def test_signal_only_grows_and_noise_keeps_the_sign_of_its_label():
    data, _, start = draw()
    state, mixing = feature_learning.begin(start, data), MIXINGS["average"]
    signs = np.sign(signal_noise.signs(WIDTH))
    for _ in range(8):
        before = state
        # Of a client by itself: the mean divides, and is no step.
        state, _ = run_rounds(before, data, MIXINGS["alone"], 1)
        assert np.all(state.signal >= before.signal)
        agrees = signs[None, :, None, None] * np.asarray(data.labels)[None, None]
        assert np.all((state.noise - before.noise) * agrees >= 0)
        assert np.all(state.noise * agrees >= 0)
        state, _ = run_rounds(before, data, mixing, 1)


@pytest.mark.long
def test_within_groups_every_group_is_a_federation_of_its_own():
    data, test, start = draw()
    state, _ = feature_learning.train(start, data, test, MIXINGS["within_groups"], rounds=5)
    some = np.array([0, 1, 3])
    group = signal_noise.Data(data.signals, data.owners[some], data.labels[some], data.noise[some])
    theirs, average = test._replace(owners=group.owners), feature_learning.average(3)
    alone, _ = feature_learning.train(start, group, theirs, average, rounds=5)
    assert np.allclose(state.weights[some], alone.weights, atol=1e-5)


@pytest.mark.long
def test_training_is_its_rounds_and_its_history_what_they_say():
    data, test, start = draw()
    mixing, state = MIXINGS["average"], None
    end, history = feature_learning.train(start, data, test, mixing, rounds=3, local_steps=2)
    state = feature_learning.begin(start, data)
    for number in range(3):
        state, path = run_rounds(state, data, mixing, 2, rate=1.0)
        judged = feature_learning.performance(state.weights, test)
        assert np.allclose(history.test_loss[number], judged[0], atol=1e-5)
        assert np.allclose(history.signal[number], path[0], atol=1e-5)
        assert np.allclose(history.noise[number], path[1], atol=1e-5)
    assert np.allclose(end.weights, state.weights, atol=1e-5)
    assert history.noise.shape == (3, 3, 4)


@pytest.mark.long
def test_averaging_learns_what_a_client_alone_cannot():
    """The theorem: more clients with the same signal, more signal to noise."""
    data, test, start = draw(owners=[0] * 10, dim=400, num_examples=20, norm=2.0)
    together, alone = (
        feature_learning.train(start, data, test, mixing, rounds=30)[1]
        for mixing in (feature_learning.average(10), feature_learning.alone(10))
    )
    assert together.test_accuracy[-1].mean() > alone.test_accuracy[-1].mean() + 0.05
    ratio = [
        history.signal[-1, -1].mean() / history.noise[-1, -1].mean()
        for history in (together, alone)
    ]
    assert ratio[0] > 3 * ratio[1]
    assert together.train_accuracy[-1].min() == alone.train_accuracy[-1].min() == 1


def test_what_the_theorem_asks_for_counts_similar_clients_only():
    snr = 3 / 400**0.5
    whole = signal_noise.strength(20, 10, 10, snr, 400)
    assert np.isclose(whole, 20 * 10**2 * 3**4 / (10 * 400))
    assert np.isclose(signal_noise.strength(20, 5, 10, snr, 400), whole / 4)
    assert np.isclose(signal_noise.strength(20, 1, 1, snr, 400), whole / 10)


def test_equal_shapes_compile_once(compilations):
    _, test, start = draw()
    others = [draw(seed=seed)[0] for seed in (3, 4)]
    counts = []
    for rate, other in zip((0.3, 0.4), others, strict=True):
        with compilations() as count:
            feature_learning.train(
                start, other, test, MIXINGS["average"], rounds=2, learning_rate=rate
            )
        counts.append(count())
    assert counts[1] == 0


def refused():
    key = jax.random.key(0)
    data, test, start = draw()
    mixing = MIXINGS["average"]
    train = feature_learning.train
    return {
        r"owners is \[\]; expected a signal": lambda: signal_noise.draw(key, []),
        r"owners is \[-1\]; expected numbers": lambda: signal_noise.draw(key, [-1]),
        r"owners is \[0.5\]; expected numbers": lambda: signal_noise.draw(key, [0.5]),
        "There are 3 signals in 3 dimensions": lambda: signal_noise.draw(key, [0, 2], dim=3),
        "dim is 0; expected": lambda: signal_noise.draw(key, [0], dim=0),
        "norm is 0; expected": lambda: signal_noise.draw(key, [0], norm=0),
        "noise_std is -1; expected": lambda: signal_noise.draw(key, [0], noise_std=-1),
        "num_examples is 0; expected": lambda: signal_noise.draw_test(key, data, 0),
        "width is 0; expected": lambda: signal_noise.initial(key, 0, 5),
        "scale is 0; expected": lambda: signal_noise.initial(key, 2, 5, scale=0),
        "width is True; expected": lambda: signal_noise.network(True),
        "num_clients is 0; expected": lambda: feature_learning.average(0),
        r"groups is \[\]; expected": lambda: feature_learning.within_groups([]),
        r"start has shape \(60, 5\); expected": lambda: feature_learning.begin(start[:, 1:], data),
        r"mixing has shape \(3, 3\)": lambda: train(start, data, test, feature_learning.average(3)),
        "do not sum to one": lambda: train(start, data, test, 2 * mixing),
        "rounds is 0; expected": lambda: train(start, data, test, mixing, rounds=0),
        "local_steps is 0; expected": lambda: run_rounds(start, data, mixing, 0),
        "learning_rate is nan; expected": lambda: run_rounds(start, data, mixing, 1, jnp.nan),
    }


@pytest.mark.parametrize("said", refused())
def test_bad_input_is_refused_by_name(said):
    with pytest.raises((ValueError, TypeError), match=said):
        refused()[said]()
