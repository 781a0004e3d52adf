"""A round of local descent and averaging: weights by gradients, coefficients by a recursion."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import parallel
from fisherjax._core.compiler import jit
from fisherjax.theory.signal_noise import Data, signs
from fisherjax.typing import Array


class State(NamedTuple):
    """What each client starts a round from: its weights, and what they consist of.

    Attributes:
        weights: [M, d, 2 m], filters of label +1, then of -1.
        signal: gamma [M, 2 m, S].
        noise: rho [M, 2 m, M, n], the first axis whose weights, the third whose example.
    """

    weights: Array
    signal: Array
    noise: Array


def _chunk(num_clients: int) -> int:
    return parallel.chunk_size(None, num_clients)


def _forward(w: Array, mu: Array, y: Array, xi: Array) -> tuple[Array, Array, Array]:
    """Give outputs [n] and what the filters see of the signal and of the noise, [n, 2 m]."""
    signal, noise = y[:, None] * (mu @ w), xi @ w
    second = jnp.asarray(signs(w.shape[1] // 2), w.dtype)
    return (jax.nn.relu(signal) + jax.nn.relu(noise)) @ second, signal, noise


def _descend(
    client: tuple[Array, ...], local_steps: int, learning_rate: Array
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    """Descend on one client's loss; weights by their gradient, coefficients by their recursion."""
    *first, mu, y, xi = client
    second = jnp.asarray(signs(first[0].shape[1] // 2), y.dtype)

    def loss(w: Array) -> Array:
        return jnp.mean(jax.nn.softplus(-y * _forward(w, mu, y, xi)[0]))

    def step(carry: tuple, _: None) -> tuple[tuple, tuple[Array, Array]]:
        w, signal, noise = carry
        outputs, sees_signal, sees_noise = _forward(w, mu, y, xi)
        # -l'(y f) eta / (n m), [n, 1], of those that a filter sees; relu has no slope at 0.
        pull = (learning_rate / len(y) * jax.nn.sigmoid(-y * outputs))[:, None]
        gained = jnp.sum(pull * (sees_signal > 0), 0) * jnp.abs(second) * jnp.sum(mu**2)
        own = (y[:, None] * pull * (sees_noise > 0) * second) * jnp.sum(xi**2, -1)[:, None]
        carry = w - learning_rate * jax.grad(loss)(w), signal + gained, noise + own.T
        return carry, (carry[1].max(), carry[2].max())

    return jax.lax.scan(step, tuple(first), None, local_steps)


@partial(jit, static_argnums=3)
def _round(
    state: State, data: Data, mixing: Array, local_steps: int, learning_rate: Array
) -> tuple[State, tuple[Array, Array]]:
    numbers = jnp.arange(len(data.owners))
    own_signal = state.signal[numbers, :, data.owners]
    own_noise = state.noise[numbers, :, numbers]
    stacked = (state.weights, own_signal, own_noise, data.signals[data.owners], *data[2:])
    found, path = parallel.map_clients(
        lambda client: _descend(client, local_steps, learning_rate),
        stacked,
        clients_per_chunk=_chunk(len(numbers)),
    )
    weights, own_signal, own_noise = found
    # Others' coefficients stay as they were while a client trains.
    learned = State(
        weights,
        state.signal.at[numbers, :, data.owners].set(own_signal),
        state.noise.at[numbers, :, numbers].set(own_noise),
    )
    state = jax.tree.map(partial(_mixed, mixing), learned)
    after = (
        state.signal[numbers, :, data.owners].max(-1),
        state.noise[numbers, :, numbers].max((1, 2)),
    )
    return state, jax.tree.map(lambda own, last: jnp.vstack([own.T, last]), path, after)


def _mixed(mixing: Array, leaf: Array) -> Array:
    return jnp.tensordot(mixing.astype(leaf.dtype), leaf, axes=1, precision="highest")
