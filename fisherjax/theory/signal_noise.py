"""Data of signal and noise: a network can learn the signals, or memorise the noise.

An example of client k has two patches of d numbers, the signal of that client and noise,

    x = [y mu_k; xi],    y = +-1,    xi ~ N(0, sigma^2 I) without its parts along all signals.

The network has 2 m filters, m for each label j = +-1, and a fixed second layer:

    f(x) = F_{+1} - F_{-1},    F_j = 1/m sum_r [relu(w_jr^T x_1) + relu(w_jr^T x_2)].

`feature_learning` trains it, and computes what each client learns.

Source: Huang, Shi, Cai, Suzuki, Understanding convergence and generalization in federated learning
    through feature learning theory, ICLR 2024.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import clients, likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.clients import Federation
from fisherjax.typing import Array, Key, Model


class Data(NamedTuple):
    """Examples of all clients.

    Attributes:
        signals: [S, d], orthogonal signals mu.
        owners: [M], number of each client's signal.
        labels: [M, n], +1 or -1.
        noise: [M, n, d], second patches xi, orthogonal to all signals.
    """

    signals: Array
    owners: Array
    labels: Array
    noise: Array


def draw(
    key: Key,
    owners: Sequence[int],
    *,
    num_examples: int = 100,
    dim: int = 1000,
    norm: float = 2.0,
    noise_std: float = 1.0,
) -> Data:
    """Draw the clients' examples.

    The signals are the first unit vectors times `norm`. The distributions of noise and of initial
    weights are invariant to rotations. So this is no restriction for methods that are equivariant
    to rotations, such as descent and averages. Diagonal Fisher information is not equivariant:
    rotate the data for such methods.

    Args:
        key: Random key for labels and noise.
        owners: Number of each client's signal, from 0.
        num_examples: Number n of examples of each client (default 100).
        dim: Dimension d of a patch (default 1000).
        norm: Norm ||mu|| of each signal (default 2).
        noise_std: Standard deviation sigma of the noise (default 1).

    Raises:
        ValueError: If there are no clients, more signals than dimensions, or a number is not
            positive.

    Example:
        >>> draw(jax.random.key(0), owners=[0, 0, 1], num_examples=5, dim=50).noise.shape
        (3, 5, 50)

    Source: The paper above, definition of its data model.
    """
    signal_of = np.asarray(owners)
    if signal_of.ndim != 1 or not signal_of.size:
        raise ValueError(
            f"owners is {signal_of.tolist()}; expected a signal for each client: [0, 1]."
        )
    if not np.issubdtype(signal_of.dtype, np.integer) or signal_of.min() < 0:
        raise ValueError(f"owners is {signal_of.tolist()}; expected numbers of signals, from 0.")
    num_signals = int(signal_of.max()) + 1
    num_examples, dim = checks.count("num_examples", num_examples), checks.count("dim", dim)
    if num_signals >= dim:
        raise ValueError(
            f"There are {num_signals} signals in {dim} dimensions; expected fewer signals than "
            "dimensions, because signals are orthogonal, and noise is orthogonal to all signals."
        )
    checks.positive("norm", norm)
    checks.positive("noise_std", noise_std)
    labels, noise = _draw(key, (len(signal_of), num_examples), dim, num_signals, noise_std)
    signals = norm * jnp.eye(num_signals, dim)
    return Data(signals, jnp.asarray(signal_of), labels, noise)


def draw_test(key: Key, data: Data, num_examples: int = 2000, noise_std: float = 1.0) -> Data:
    """Draw test examples: all clients share labels and noise, and each has its own signal.

    Returns:
        Data with labels [1, n] and noise [1, n, d].

    Example:
        >>> data = draw(jax.random.key(0), owners=[0, 1], num_examples=5, dim=50)
        >>> draw_test(jax.random.key(1), data, num_examples=7).noise.shape
        (1, 7, 50)
    """
    num_signals, dim = data.signals.shape
    shape = (1, checks.count("num_examples", num_examples))
    checks.positive("noise_std", noise_std)
    labels, noise = _draw(key, shape, dim, num_signals, noise_std)
    return Data(data.signals, data.owners, labels, noise)


def initial(key: Key, width: int, dim: int, scale: float = 0.01) -> Array:
    """Draw the common start W_0 [d, 2 m] from N(0, scale^2), where m is the width.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> initial(jax.random.key(0), width=3, dim=50).shape
        (50, 6)
    """
    width, dim = checks.count("width", width), checks.count("dim", dim)
    checks.positive("scale", scale)
    checks.key(key)
    return scale * jax.random.normal(key, (dim, 2 * width))


@cached
def network(width: int) -> Model:
    """Make the network apply(W [d, 2 m], x [B, 2, d]) -> [B, 1] as a `Model`.

    Raises:
        ValueError: If the width is not a positive integer.

    Example:
        >>> network(3).apply(jnp.ones((50, 6)), jnp.ones((4, 2, 50))).shape
        (4, 1)
    """
    second = signs(checks.count("width", width))

    def apply(params: Array, x: Array) -> Array:
        # A convolution: every filter is applied to both patches.
        features = jax.nn.relu(x @ params).sum(1)
        return features @ jnp.asarray(second, params.dtype)[:, None]

    return Model(apply, likelihoods.bernoulli)


def federation(data: Data) -> Federation:
    """Make a `Federation` of the data, with inputs [N, 2, d] and targets 0 or 1.

    Example:
        >>> data = draw(jax.random.key(0), owners=[0, 1], num_examples=5, dim=50)
        >>> federation(data).inputs.shape
        (10, 2, 50)
    """
    num_clients, num_examples = data.labels.shape
    signal = data.labels[..., None] * data.signals[data.owners][:, None]
    x = jnp.stack([signal, data.noise], axis=2)
    rows = np.arange(num_clients * num_examples).reshape(num_clients, num_examples)
    targets = (data.labels > 0).astype(x.dtype).reshape(-1, 1)
    return clients.federation((x.reshape(-1, *x.shape[2:]), targets), rows)


def strength(
    num_examples: int, num_similar: Array, num_clients: int, snr: Array, dim: int
) -> Array:
    """Compute the signal strength of the theorem: the test error vanishes where it is large.

        n chi^2 ||mu||^4 / (M sigma^4 d) = n chi^2 SNR^4 d / M,    SNR = ||mu|| / (sigma sqrt(d)),

    where chi is the number of clients that have the client's signal. If all have it, chi = M, and
    the strength grows with M. For a client that trains alone, chi = M = 1.

    Args:
        num_examples: Number n of examples of each client.
        num_similar: Number chi of clients with the same signal.
        num_clients: Number M of clients.
        snr: Signal-to-noise ratio SNR.
        dim: Dimension d of a patch.

    Example:
        >>> round(strength(100, 20, 20, 2 / 1000**0.5, 1000), 3)
        32.0
        >>> round(strength(100, 1, 1, 2 / 1000**0.5, 1000), 3)
        1.6

    Source: The paper above, the conditions of its theorems.
    """
    return num_examples * num_similar**2 * snr**4 * dim / num_clients


def signs(width: int) -> np.ndarray:
    """Return the fixed second layer [2 m]: +1/m for the filters of label +1, then -1/m."""
    return np.repeat([1.0, -1.0], width) / width


def _draw(
    key: Key, shape: tuple[int, int], dim: int, num_signals: int, noise_std: float
) -> tuple[Array, Array]:
    checks.key(key)
    for_labels, for_noise = jax.random.split(key)
    labels = jax.random.rademacher(for_labels, shape, jnp.result_type(float))
    noise = noise_std * jax.random.normal(for_noise, (*shape, dim))
    # The noise has no component along the signals, which are the first unit vectors.
    return labels, noise.at[..., :num_signals].set(0)
