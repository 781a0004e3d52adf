"""The lemmas about coefficients of signal and noise, computed in three ways in float64.

The coefficients are read off weights that were trained by gradients of the library's network; they
follow the lemmas' recursion in NumPy, which forms no gradient; and `feature_learning` has them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax.theory import feature_learning, signal_noise

OWNERS = (0, 1, 0, 0)
CLIENTS, WIDTH, EXAMPLES, DIM = len(OWNERS), 3, 5, 40
SECOND = signal_noise.signs(WIDTH)
STEPS, RATE = 4, 0.7
MIXINGS = {
    "average": np.full((CLIENTS, CLIENTS), 1 / CLIENTS),
    "within groups": np.array([[1, 0, 1, 1], [0, 3, 0, 0], [1, 0, 1, 1], [1, 0, 1, 1]]) / 3,
    "uneven": np.random.default_rng(0).dirichlet(np.ones(CLIENTS), CLIENTS),
}


@pytest.fixture(scope="module")
def drawn(wide):
    keys = jax.random.split(jax.random.key(7))
    how = {"num_examples": EXAMPLES, "dim": DIM, "norm": 2.0}
    return signal_noise.draw(keys[0], OWNERS, **how), signal_noise.initial(keys[1], WIDTH, DIM, 0.1)


@jax.jit
def by_gradients(models, data):
    """Train all clients' models [M, d, 2 m] by gradients of the library's loss."""
    model, federation = signal_noise.network(WIDTH), signal_noise.federation(data)
    x, y = federation.inputs[federation.indices], federation.targets[federation.indices]

    def loss(w, x, y):
        nll = model.likelihood.negative_log_likelihood
        return jnp.mean(jax.vmap(nll)(model.apply(w, x), y))

    def step(_, models):
        return models - RATE * jax.vmap(jax.grad(loss))(models, x, y)

    return jax.lax.fori_loop(0, STEPS, step, models)


def read(models, start, data):
    """Read gamma [M, 2 m, S] and rho [M, 2 m, M, n] off the models by least squares."""
    mu, xi = np.asarray(data.signals), np.asarray(data.noise).reshape(-1, DIM)
    known = np.vstack([z / np.sum(z**2, 1, keepdims=True) for z in (mu, xi)])
    assert np.linalg.matrix_rank(known) == len(known)  # the coefficients are unique
    moved = (np.asarray(models) - np.asarray(start)).transpose(1, 0, 2).reshape(DIM, -1)
    found, residual, *_ = np.linalg.lstsq(known.T, moved)
    assert np.max(residual) < 1e-24
    found = found.reshape(len(known), CLIENTS, -1).transpose(1, 2, 0)
    signal, noise = np.split(found, [len(mu)], -1)
    return signal * np.sign(SECOND)[:, None], noise.reshape(*noise.shape[:2], CLIENTS, EXAMPLES)


def by_recursion(signal, noise, start, data):
    """Compute local steps of all clients by the first lemma: from coefficients alone."""
    mu, y, xi = (np.asarray(z) for z in (data.signals, data.labels, data.noise))
    flat, start = xi.reshape(-1, DIM), np.asarray(start)
    signal, noise = signal.copy(), noise.copy()
    for _ in range(STEPS):
        for k, own in enumerate(OWNERS):
            # Inner products with what was learned: signals are orthogonal to all noise.
            on_signal = start.T @ mu[own] + np.sign(SECOND) * signal[k, :, own]
            learned = noise[k].reshape(2 * WIDTH, -1) / np.sum(flat**2, 1)
            on_noise = (start.T + learned @ flat) @ xi[k].T
            for_label = y[k] * on_signal[:, None]
            outputs = SECOND @ (np.maximum(for_label, 0) + np.maximum(on_noise, 0))
            slope = -1 / (1 + np.exp(y[k] * outputs))
            rate = RATE / (EXAMPLES * WIDTH)
            signal[k, :, own] -= rate * np.sum(slope * (for_label > 0), 1) * np.sum(mu[own] ** 2)
            agrees = np.sign(SECOND)[:, None] * y[k]
            noise[k, :, k] -= rate * slope * (on_noise > 0) * np.sum(xi[k] ** 2, 1) * agrees
    return signal, noise


def averaged(mixing, signal, noise):
    """Compute the coefficients after a mean of models by the second lemma."""
    return tuple(np.einsum("kl,l...->k...", mixing, z) for z in (signal, noise))


def run_round(state, data, mixing):
    test = data._replace(labels=data.labels[:1], noise=data.noise[:1])
    how = {"rounds": 1, "local_steps": STEPS, "learning_rate": RATE}
    return feature_learning.train(state, data, test, jnp.asarray(mixing), **how)[0]


def test_local_coefficients_follow_the_recursion_of_the_lemma(drawn):
    """Lemma 5.1, over three rounds of local steps without a mean."""
    data, start = drawn
    models = np.broadcast_to(np.asarray(start), (CLIENTS, *start.shape))
    state, found = feature_learning.begin(start, data), read(models, start, data)
    for _ in range(3):
        models, found = by_gradients(models, data), by_recursion(*found, start, data)
        state = run_round(state, data, np.eye(CLIENTS))
        for own, gradients, library in zip(
            found, read(models, start, data), (state.signal, state.noise), strict=True
        ):
            assert np.allclose(own, gradients, rtol=0, atol=1e-12)
            assert np.allclose(own, library, rtol=0, atol=1e-12)
        # Nothing of another client's signal or noise is learned.
        others = ~np.eye(CLIENTS, dtype=bool)
        assert not found[1].transpose(0, 2, 1, 3)[others].any()
        assert not found[0].transpose(0, 2, 1)[np.array(OWNERS)[:, None] != np.arange(2)].any()
    assert min(found[0].max(), found[1].max()) > 0.1


@pytest.mark.parametrize("mixing", MIXINGS)
def test_the_mean_of_models_has_the_mean_of_the_coefficients(drawn, mixing):
    """Lemma 5.2, over three rounds of local steps and a mean."""
    data, start = drawn
    mean = MIXINGS[mixing]
    models = np.broadcast_to(np.asarray(start), (CLIENTS, *start.shape))
    state, found = feature_learning.begin(start, data), read(models, start, data)
    for _ in range(3):
        models = np.einsum("kl,ldf->kdf", mean, by_gradients(models, data))
        found = averaged(mean, *by_recursion(*found, start, data))
        state = run_round(state, data, mean)
        for own, gradients, library in zip(
            found, read(models, start, data), (state.signal, state.noise), strict=True
        ):
            assert np.allclose(own, gradients, rtol=0, atol=1e-12)
            assert np.allclose(own, library, rtol=0, atol=1e-12)


def test_a_mean_raises_signal_over_noise_by_the_clients_that_share_the_signal(drawn):
    """Both lemmas in one round: noise is divided by M, the signal by M / chi."""
    data, start = drawn
    begun = feature_learning.begin(start, data)
    apart = by_recursion(*map(np.asarray, begun[1:]), start, data)
    state = run_round(begun, data, MIXINGS["average"])
    for k, own in enumerate(OWNERS):
        similar = np.array(OWNERS) == own
        signal = apart[0][similar, :, own].mean(0)
        gained = state.signal[k, :, own], state.noise[k, :, k]
        chi = similar.sum()
        assert np.allclose(gained[0], chi / CLIENTS * signal, rtol=0, atol=1e-12)
        assert np.allclose(gained[1], apart[1][k, :, k] / CLIENTS, rtol=0, atol=1e-12)
        ratio = gained[0].sum() / np.abs(gained[1]).sum()
        alone = signal.sum() / np.abs(apart[1][k, :, k]).sum()
        assert np.isclose(ratio, chi * alone, rtol=1e-10)
