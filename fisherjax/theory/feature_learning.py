"""Simulate how federated averaging learns features: the change of the weights in each round.

Clients take steps of gradient descent on the logistic loss of `signal_noise` and average their
weights. A filter only ever learns multiples of the signals and of the clients' noise patches,

    w_jr = w_jr^(0) + j sum_c gamma_jrc mu_c / ||mu_c||^2 + sum_{k,i} rho_jrki xi_ki / ||xi_ki||^2,

and the coefficients follow a recursion: gamma measures the learned signal, and rho the memorised
noise. Averaging keeps what clients have in common, which is the signal, and divides by M what only
one client has, which is its noise. The mean is a matrix product: row k of `mixing` has the weights
of the models in the start of client k's next round, so that `average`, `alone` and `within_groups`
are one method.

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
from fisherjax.theory._recursion import State, forward, run_round
from fisherjax.theory.signal_noise import Data, signs
from fisherjax.typing import Array, Scalar

__all__ = [
    "History",
    "State",
    "alone",
    "average",
    "begin",
    "performance",
    "reconstruct",
    "train",
    "within_groups",
]


class History(NamedTuple):
    """Losses, accuracies and coefficients of each of M clients in each of R rounds.

    Losses and accuracies are those of the models after averaging.

    Attributes:
        train_loss: [R, M], mean loss on the client's examples, in nats.
        train_accuracy: [R, M], a fraction.
        test_loss: [R, M], in nats.
        test_accuracy: [R, M], a fraction.
        signal: [R, E + 1, M], a client's largest gamma of its own signal, after each of E local
            steps and after averaging.
        noise: [R, E + 1, M], a client's largest rho of its own examples, likewise.
    """

    train_loss: Array
    train_accuracy: Array
    test_loss: Array
    test_accuracy: Array
    signal: Array
    noise: Array


def average(num_clients: int) -> Array:
    """Make the mixing of federated averaging, [M, M] with entries 1/M.

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
    """Make the mixing of Weighted FedAvg, [M, M]: means over clients of the same group only.

    Args:
        groups: Number of the group of each client.

    Raises:
        ValueError: If there are no clients.

    Example:
        >>> print(within_groups([0, 1, 1]))
        [[1.  0.  0. ]
         [0.  0.5 0.5]
         [0.  0.5 0.5]]

    Source: The paper above, weighted FedAvg with known similarities of signals.
    """
    group_of = np.asarray(groups)
    if group_of.ndim != 1 or not group_of.size:
        raise ValueError(
            f"groups is {group_of.tolist()}; expected one group for each client: [0, 1]."
        )
    same = group_of[:, None] == group_of
    return jnp.asarray(same / same.sum(1, keepdims=True), jnp.result_type(float))


def begin(start: Array, data: Data) -> State:
    """Make the state before training: every client has the start W_0 [d, 2 m].

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
        raise ValueError(f"start has shape {jnp.shape(start)}; expected ({dim}, 2 width).")
    filters = start.shape[1]
    weights = jnp.broadcast_to(start, (num_clients, *start.shape))
    signal = jnp.zeros((num_clients, filters, len(data.signals)), start.dtype)
    return State(weights, signal, jnp.zeros((*signal.shape[:2], num_clients, num_examples)))


def train(
    start: Array | State,
    data: Data,
    test: Data,
    mixing: Array,
    *,
    rounds: int = 100,
    local_steps: int = 5,
    learning_rate: float = 1.0,
) -> tuple[State, History]:
    """Train for R rounds of local descent and averaging, in one compiled program.

    Args:
        start: W_0 [d, 2 m], the start of all clients; or the state after earlier rounds.
        data: The clients' examples.
        test: Test examples of `draw_test`.
        mixing: [M, M], rows that sum to one: `average`, `alone` or `within_groups`.
        rounds: Number of rounds R (default 100).
        local_steps: Number of local steps E in a round, each with all examples (default 5).
        learning_rate: Step size eta (default 1).

    Returns:
        The state after the last round, and the history.

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

    Source: The paper above, its algorithm, its synthetic experiments, and the lemma of the
        coefficients' recursion. Deviation: the paper has a coefficient of the signal for each pair
        of clients, this one for each client and signal, so that equal signals are counted once.
    """
    state = start if isinstance(start, State) else begin(start, data)
    _check(state.weights, data, mixing, local_steps, learning_rate)
    return _train(
        state, data, test, mixing, checks.count("rounds", rounds), local_steps, learning_rate
    )


def performance(weights: Array, data: Data) -> tuple[Array, Array]:
    """Compute the mean logistic loss [M] and the accuracy [M] of each client's model [M, d, 2 m].

    A margin y f of exactly zero counts as wrong. If the data have the examples of one client only,
    as those of `draw_test`, each model is tested on these with its own client's signal.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 0], num_examples=5, dim=50)
        >>> loss, accuracy = performance(jnp.zeros((2, 50, 6)), data)
        >>> print(loss.round(3), accuracy)
        [0.693 0.693] [0. 0.]
    """
    signals = data.signals[data.owners]
    # All clients share the examples of a test set, which are not copied for each client.
    rows = jnp.arange(len(signals)) % len(data.labels)

    def one(client: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        w, mu, row = client
        y = data.labels[row]
        margin = y * forward(w, mu, y, data.noise[row])[0]
        return jnp.mean(jax.nn.softplus(-margin)), jnp.mean(margin > 0)

    chunk = parallel.chunk_size(None, len(signals))
    return parallel.map_clients(one, (weights, signals, rows), clients_per_chunk=chunk)


def reconstruct(start: Array, state: State, data: Data) -> Array:
    """Compute the weights [M, d, 2 m] from the start W_0 [d, 2 m] and the coefficients.

    Example:
        >>> from fisherjax.theory.signal_noise import draw, draw_test, initial
        >>> data = draw(jax.random.key(0), owners=[0, 0], num_examples=5, dim=50)
        >>> start = initial(jax.random.key(1), width=3, dim=50)
        >>> state, _ = train(start, data, draw_test(jax.random.key(2), data), average(2), rounds=1)
        >>> bool(jnp.allclose(reconstruct(start, state, data), state.weights, atol=1e-5))
        True

    Source: The paper above, its decomposition. Its main text omits the sign j of the signal, which
        its appendix has.
    """
    labels = jnp.sign(jnp.asarray(signs(start.shape[1] // 2), start.dtype))
    mu, xi = (z / jnp.square(z).sum(-1, keepdims=True) for z in (data.signals, data.noise))
    learned = jnp.einsum("kfs,sd,f->kdf", state.signal, mu, labels, precision="highest")
    memorised = jnp.einsum("kfli,lid->kdf", state.noise, xi, precision="highest")
    return start + learned + memorised


@partial(jit, static_argnums=(4, 5), autotune=True)
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
        state, path = run_round(state, data, mixing, local_steps, learning_rate)
        train_loss, train_accuracy = performance(state.weights, data)
        test_loss, test_accuracy = performance(state.weights, test)
        return state, History(train_loss, train_accuracy, test_loss, test_accuracy, *path)

    return jax.lax.scan(one, state, None, rounds)


def _check(
    weights: Array, data: Data, mixing: Array, local_steps: int, learning_rate: float
) -> None:
    num_clients = len(data.owners)
    if jnp.shape(mixing) != (num_clients, num_clients):
        raise ValueError(
            f"mixing has shape {jnp.shape(mixing)}; expected ({num_clients}, {num_clients}), such "
            f"as that of average({num_clients})."
        )
    if not checks.is_traced(mixing) and not np.allclose(np.sum(mixing, 1), 1, atol=1e-5):
        raise ValueError("Rows of mixing do not sum to one; expected means, such as average(M).")
    checks.count("local_steps", local_steps)
    checks.positive("learning_rate", learning_rate)
    checks.stacked(weights, num_clients, "weights")
