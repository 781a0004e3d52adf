"""Why federated averaging learns features: what each round adds to the weights, and why.

Clients take steps of gradient descent on the logistic loss of `signal_noise` and average their
weights. All that a filter ever learns is multiples of the signals and of clients' noise patches,

    w_jr = w_jr^(0) + j sum_c gamma_jrc mu_c / ||mu_c||^2 + sum_{k,i} rho_jrki xi_ki / ||xi_ki||^2,

and its coefficients follow a recursion of their own: gamma, signal learned, and rho, noise that was
memorised. An average keeps what its clients have in common, the signal, and divides what each knows
alone, its noise. The mean is taken by a matrix: row k says of whose models client k starts the next
round, so that `average`, `alone` and `within_groups` are one method.

Source: Huang, Shi, Cai, Suzuki, Understanding convergence and generalization in federated learning
    through feature learning theory, ICLR 2024.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import parallel
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.theory.signal_noise import Data, signs
from fisherjax.typing import Array, Scalar


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


class History(NamedTuple):
    """What happens, for each of R rounds and each client; coefficients after each of E steps too.

    Attributes:
        train_loss: [R, M], of the models that clients start the next round from, in nats.
        train_accuracy: [R, M], a fraction.
        test_loss: [R, M].
        test_accuracy: [R, M].
        signal: [R, E + 1, M], a client's largest gamma of its own signal; last after averaging.
        noise: [R, E + 1, M], the largest rho of its own examples, likewise.
    """

    train_loss: Array
    train_accuracy: Array
    test_loss: Array
    test_accuracy: Array
    signal: Array
    noise: Array


def average(num_clients: int) -> Array:
    """Make the mixing of federated averaging, 1/M everywhere, [M, M].

    Example:
        >>> print(average(2))
        [[0.5 0.5]
         [0.5 0.5]]
    """
    return within_groups([0] * checks.count("num_clients", num_clients))


def alone(num_clients: int) -> Array:
    """Make the mixing of clients that never communicate, the identity [M, M].

    Example:
        >>> print(alone(2))
        [[1. 0.]
         [0. 1.]]
    """
    return within_groups(range(checks.count("num_clients", num_clients)))


def within_groups(groups: Sequence[int]) -> Array:
    """Make the mixing of Weighted FedAvg: means over those of the same group only, [M, M].

    Raises:
        ValueError: If there are no clients.

    Example:
        >>> print(within_groups([0, 1, 1]))
        [[1.  0.  0. ]
         [0.  0.5 0.5]
         [0.  0.5 0.5]]

    Source: the paper above, its weighted FedAvg with the similarity of signals known.
    """
    own = np.asarray(groups)
    if own.ndim != 1 or not own.size:
        raise ValueError(f"groups is {own.tolist()}; expected a number for each client.")
    same = own[:, None] == own
    return jnp.asarray(same / same.sum(1, keepdims=True), jnp.result_type(float))


def begin(start: Array, data: Data) -> State:
    """Give every client the start W_0 [d, 2 m], nothing of which is learned.

    Raises:
        ValueError: If the start does not fit the data.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 1], num_examples=5, dim=50)
        >>> state = begin(initial(jax.random.key(1), width=3, dim=50), data)
        >>> state.signal.shape, state.noise.shape
        ((2, 6, 2), (2, 6, 2, 5))
    """
    num_clients, num_examples, dim = data.noise.shape
    if jnp.ndim(start) != 2 or start.shape[0] != dim or start.shape[1] % 2:
        raise ValueError(f"start has shape {jnp.shape(start)}; expected [{dim}, 2 width].")
    filters = start.shape[1]
    weights = jnp.broadcast_to(start, (num_clients, *start.shape))
    signal = jnp.zeros((num_clients, filters, len(data.signals)), start.dtype)
    return State(weights, signal, jnp.zeros((*signal.shape[:2], num_clients, num_examples)))


def round_of(
    state: State, data: Data, mixing: Array, local_steps: int = 5, learning_rate: float = 1.0
) -> tuple[State, tuple[Array, Array]]:
    """Compute one round: local descent of every client, then a mean of the models.

    Args:
        state: What `begin` or the last round gave.
        data: The clients' examples, all of which are in every step.
        mixing: [M, M], rows that sum to one; `average`, `alone` or `within_groups`.
        local_steps: E.
        learning_rate: eta.

    Returns:
        The next state, and the largest coefficients of each client's own signal and examples, after
        each step and after the mean, [E + 1, M].

    Raises:
        ValueError: If the mixing is not [M, M], or a number is not positive.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 0], num_examples=5, dim=50)
        >>> state = begin(initial(jax.random.key(1), width=3, dim=50), data)
        >>> state, (signal, noise) = round_of(state, data, average(2))
        >>> bool(signal[-1, 0] > 0), bool(noise[-1, 0] < noise[-2, 0])
        (True, True)

    Source: the paper above, its algorithm and the lemma of the coefficients' recursion. There a
        client pair has a coefficient of the signal; here a client and a signal, so that equal
        signals are not counted twice.
    """
    _check(state.weights, data, mixing, local_steps, learning_rate)
    return _round(state, data, mixing, local_steps, learning_rate)


def train(
    start: Array,
    data: Data,
    test: Data,
    mixing: Array,
    *,
    rounds: int = 100,
    local_steps: int = 5,
    learning_rate: float = 1.0,
) -> tuple[State, History]:
    """Train for so many rounds, in one compiled program, and say what was learned.

    Args:
        start: W_0 [d, 2 m], of all clients.
        data: The clients' examples.
        test: What `draw_test` gives.
        mixing: [M, M], rows that sum to one; `average`, `alone` or `within_groups`.
        rounds: R.
        local_steps: E, all examples a step.
        learning_rate: eta.

    Raises:
        ValueError: If a shape does not fit, or a number is not positive.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 0], num_examples=5, dim=50, norm=5.0)
        >>> test = draw_test(jax.random.key(1), data, num_examples=20)
        >>> start = initial(jax.random.key(2), width=3, dim=50)
        >>> _, history = train(start, data, test, average(2), rounds=20)
        >>> print(history.test_accuracy[-1])
        [1. 1.]

    Source: the paper above, its algorithm and synthetic experiments.
    """
    state = begin(start, data)
    _check(state.weights, data, mixing, local_steps, learning_rate)
    return _train(
        state, data, test, mixing, checks.count("rounds", rounds), local_steps, learning_rate
    )


def performance(weights: Array, data: Data) -> tuple[Array, Array]:
    """Compute the mean logistic loss and the accuracy of each client's model [M, d, 2 m], [M].

    On data of one client, as `draw_test` makes them, each model meets its own client's signal.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 0], num_examples=5, dim=50)
        >>> loss, accuracy = performance(jnp.zeros((2, 50, 6)), data)
        >>> print(loss.round(3), accuracy)
        [0.693 0.693] [0. 0.]

    A margin y f of exactly zero counts as wrong.
    """
    signals = data.signals[data.owners]
    # The examples of a test are everybody's: one copy, not one a client.
    rows = jnp.arange(len(signals)) % len(data.labels)

    def one(client: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        w, mu, row = client
        y = data.labels[row]
        margin = y * _forward(w, mu, y, data.noise[row])[0]
        return jnp.mean(jax.nn.softplus(-margin)), jnp.mean(margin > 0)

    stacked = (weights, signals, rows)
    return parallel.map_clients(one, stacked, clients_per_chunk=_chunk(len(signals)))


def reconstruct(start: Array, state: State, data: Data) -> Array:
    """Put the weights [M, d, 2 m] together from the start and the coefficients.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 0], num_examples=5, dim=50)
        >>> start = initial(jax.random.key(1), width=3, dim=50)
        >>> state, _ = round_of(begin(start, data), data, average(2))
        >>> bool(jnp.allclose(reconstruct(start, state, data), state.weights, atol=1e-5))
        True

    Source: the paper above, its decomposition; it drops the sign j of the signal, which its
        appendix has.
    """
    labels = jnp.sign(jnp.asarray(signs(start.shape[1] // 2), start.dtype))
    mu, xi = (z / jnp.square(z).sum(-1, keepdims=True) for z in (data.signals, data.noise))
    learned = jnp.einsum("kfs,sd,f->kdf", state.signal, mu, labels, precision="highest")
    memorised = jnp.einsum("kfli,lid->kdf", state.noise, xi, precision="highest")
    return start + learned + memorised


def _chunk(num_clients: int) -> int:
    return parallel.chunk_size(None, num_clients)


def _forward(w: Array, mu: Array, y: Array, xi: Array) -> tuple[Array, Array, Array]:
    """Give outputs [n] and what the filters see of the signal and of the noise, [n, 2 m]."""
    signal, noise = y[:, None] * (mu @ w), xi @ w
    second = jnp.asarray(signs(w.shape[1] // 2), w.dtype)
    return (jax.nn.relu(signal) + jax.nn.relu(noise)) @ second, signal, noise


def _descend(
    client: tuple[Array, ...], local_steps: int, learning_rate: Scalar
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    """Descend on one client's loss; weights by their gradient, coefficients by their recursion."""
    weights, signal, noise, mu, y, xi = client
    second = jnp.asarray(signs(weights.shape[1] // 2), y.dtype)

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

    return jax.lax.scan(step, (weights, signal, noise), None, local_steps)


@partial(jit, static_argnums=3)
def _round(
    state: State, data: Data, mixing: Array, local_steps: int, learning_rate: Scalar
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


@partial(jit, static_argnums=(4, 5))
def _train(
    state: State,
    data: Data,
    test: Data,
    mixing: Array,
    rounds: int,
    local_steps: int,
    learning_rate: Scalar,
) -> tuple[State, History]:
    def one(state: State, _: None) -> tuple[State, History]:
        state, path = _round(state, data, mixing, local_steps, learning_rate)
        train_loss, train_accuracy = performance(state.weights, data)
        test_loss, test_accuracy = performance(state.weights, test)
        judged = train_loss, train_accuracy, test_loss, test_accuracy
        return state, History(*judged, *path)

    return jax.lax.scan(one, state, None, rounds)


def _check(
    weights: Array, data: Data, mixing: Array, local_steps: int, learning_rate: float
) -> None:
    num_clients = len(data.owners)
    if jnp.shape(mixing) != (num_clients, num_clients):
        raise ValueError(
            f"mixing has shape {jnp.shape(mixing)}; expected ({num_clients}, {num_clients}), for "
            f"instance average({num_clients})."
        )
    if not checks.is_traced(mixing) and not np.allclose(np.sum(mixing, 1), 1, atol=1e-5):
        raise ValueError("Rows of mixing do not sum to one; expected means, such as average gives.")
    checks.count("local_steps", local_steps)
    checks.positive("learning_rate", learning_rate)
    checks.stacked(weights, num_clients, "weights")
