"""Compute rounds of local descent: weights by gradients, coefficients by their recursion."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import parallel
from fisherjax._core.compiler import jit
from fisherjax.theory.signal_noise import Data, signs
from fisherjax.typing import Array, Scalar


class State(NamedTuple):
    """The clients' models at the start of a round, and the coefficients of their weights.

    Attributes:
        weights: [M, d, 2 m], the filters of label +1 before those of label -1.
        signal: gamma [M, 2 m, S], coefficients of the signals.
        noise: rho [M, 2 m, M, n], coefficients of the noise patches: axis 0 is the client whose
            weights they are, axis 2 the client whose example it is.
    """

    weights: Array
    signal: Array
    noise: Array


def forward(w: Array, mu: Array, y: Array, xi: Array) -> tuple[Array, Array, Array]:
    """Compute outputs [n], and the filters' preactivations for signal and for noise, [n, 2 m]."""
    signal, noise = y[:, None] * (mu @ w), xi @ w
    second = jnp.asarray(signs(w.shape[1] // 2), w.dtype)
    return (jax.nn.relu(signal) + jax.nn.relu(noise)) @ second, signal, noise


def _descend(
    client: tuple[Array, ...], local_steps: int, learning_rate: Scalar
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    """Compute local steps of one client: weights by the gradient, coefficients by the recursion."""
    weights, signal, noise, mu, y, xi = client
    second = jnp.asarray(signs(weights.shape[1] // 2), y.dtype)

    def loss(w: Array) -> Array:
        return jnp.mean(jax.nn.softplus(-y * forward(w, mu, y, xi)[0]))

    def step(carry: tuple, _: None) -> tuple[tuple, tuple[Array, Array]]:
        w, signal, noise = carry
        outputs, on_signal, on_noise = forward(w, mu, y, xi)
        # -l'(y f) eta / n, [n, 1]. It counts where a filter is active; relu has no slope at 0.
        rate = (learning_rate / len(y) * jax.nn.sigmoid(-y * outputs))[:, None]
        gained = jnp.sum(rate * (on_signal > 0), 0) * jnp.abs(second) * jnp.sum(mu**2)
        memorised = (y[:, None] * rate * (on_noise > 0) * second) * jnp.sum(xi**2, -1)[:, None]
        carry = w - learning_rate * jax.grad(loss)(w), signal + gained, noise + memorised.T
        return carry, (carry[1].max(), carry[2].max())

    return jax.lax.scan(step, (weights, signal, noise), None, local_steps)


@partial(jit, static_argnums=3, autotune=True)
def run_round(
    state: State, data: Data, mixing: Array, local_steps: int, learning_rate: Scalar
) -> tuple[State, tuple[Array, Array]]:
    """Compute one round: local descent of every client, then a mean of the models by `mixing`.

    Returns:
        The next state, and the largest coefficients of each client's own signal and of its own
        examples, after each local step and after the mean, [E + 1, M].
    """
    numbers = jnp.arange(len(data.owners))
    own_signal = state.signal[numbers, :, data.owners]
    own_noise = state.noise[numbers, :, numbers]
    stacked = (state.weights, own_signal, own_noise, data.signals[data.owners], *data[2:])
    found, path = parallel.map_clients(
        lambda client: _descend(client, local_steps, learning_rate),
        stacked,
        clients_per_chunk=parallel.chunk_size(None, len(numbers)),
    )
    weights, own_signal, own_noise = found
    # A client's coefficients for other clients' signals and examples do not change in training.
    learned = State(
        weights,
        state.signal.at[numbers, :, data.owners].set(own_signal),
        state.noise.at[numbers, :, numbers].set(own_noise),
    )
    state = jax.tree.map(
        lambda x: jnp.tensordot(mixing.astype(x.dtype), x, axes=1, precision="highest"), learned
    )
    after = (
        state.signal[numbers, :, data.owners].max(-1),
        state.noise[numbers, :, numbers].max((1, 2)),
    )
    return state, jax.tree.map(lambda own, last: jnp.vstack([own.T, last]), path, after)
