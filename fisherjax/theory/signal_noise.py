"""Signal and noise: data of which a network can learn the signal, or memorise the noise.

An example of client k is two patches of d numbers, the signal of that client and noise,

    x = [y mu_k; xi],    y = +-1,    xi ~ N(0, sigma^2 I) without its parts along all signals,

and the network has 2 m filters, m for each label j = +-1, and a fixed second layer:

    f(x) = F_{+1} - F_{-1},    F_j = 1/m sum_r [relu(w_jr^T x_1) + relu(w_jr^T x_2)].

What is learned by whom is in `feature_learning`.

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
    """What clients hold.

    Attributes:
        signals: [S, d], orthogonal.
        owners: [M], which signal each client has.
        labels: [M, n], +1 or -1.
        noise: [M, n, d], the second patches, orthogonal to all signals.
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
    """Draw the clients' data.

    Signals are `norm` times the first unit vectors. Noise and initial weights look alike from every
    side, so that this is no restriction for descent, averages, and whatever turns with the data; a
    diagonal Fisher information does not: rotate the data where that matters.

    Args:
        key: Of labels and noise.
        owners: For each client the number of its signal, from 0.
        num_examples: n of every client.
        dim: d, numbers in a patch.
        norm: ||mu||.
        noise_std: sigma.

    Raises:
        ValueError: If there are no clients, more signals than dimensions, or a number is not
            positive.

    Example:
        >>> draw(jax.random.key(0), owners=[0, 0, 1], num_examples=5, dim=50).noise.shape
        (3, 5, 50)

    Source: the paper above, definition of its data model.
    """
    own = np.asarray(owners)
    if own.ndim != 1 or not own.size:
        raise ValueError(f"owners is {own.tolist()}; expected a signal for each client: [0, 0].")
    if not np.issubdtype(own.dtype, np.integer) or own.min() < 0:
        raise ValueError(f"owners is {own.tolist()}; expected numbers of signals, from 0.")
    num_signals = int(own.max()) + 1
    num_examples, dim = checks.count("num_examples", num_examples), checks.count("dim", dim)
    if num_signals >= dim:
        raise ValueError(
            f"There are {num_signals} signals in {dim} dimensions; expected fewer signals than "
            "dimensions: they are orthogonal, and the noise is orthogonal to all of them."
        )
    checks.positive("norm", norm)
    checks.positive("noise_std", noise_std)
    labels, noise = _draw(key, (len(own), num_examples), dim, num_signals, noise_std)
    signals = norm * jnp.eye(num_signals, dim)
    return Data(signals, jnp.asarray(own), labels, noise)


def draw_test(key: Key, data: Data, num_examples: int = 2000, noise_std: float = 1.0) -> Data:
    """Draw examples to test on; each client's are the same noise beside its own signal.

    Returns:
        Data of one client, of labels [1, n] and noise [1, n, d].

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
    """Draw the common start W_0 [d, 2 m] from N(0, scale^2), m the width.

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
    """Make the network apply(W [d, 2 m], x [B, 2, d]) -> [B, 1], for the rest of the library.

    Raises:
        ValueError: If the width is not a positive integer.

    Example:
        >>> network(3).apply(jnp.ones((50, 6)), jnp.ones((4, 2, 50))).shape
        (4, 1)
    """
    second = signs(checks.count("width", width))

    def apply(params: Array, x: Array) -> Array:
        # Every filter looks at both patches: a convolution.
        seen = jax.nn.relu(x @ params).sum(1)
        return seen @ jnp.asarray(second, params.dtype)[:, None]

    return Model(apply, likelihoods.bernoulli)


def federation(data: Data) -> Federation:
    """Write the data as the rest of the library takes it: inputs [N, 2, d], targets 0 or 1.

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
    """Compute what the theorem asks to be large for the test error to vanish.

        n chi^2 ||mu||^4 / (M sigma^4 d) = n chi^2 SNR^4 d / M,    SNR = ||mu|| / (sigma sqrt(d)),

    chi the number of clients that have the client's signal: M when all have, and then it grows with
    M; a client alone has chi = M = 1.

    Example:
        >>> round(strength(100, 20, 20, 2 / 1000**0.5, 1000), 3)
        32.0
        >>> round(strength(100, 1, 1, 2 / 1000**0.5, 1000), 3)
        1.6

    Source: the paper above, the conditions of its theorems.
    """
    return num_examples * num_similar**2 * snr**4 * dim / num_clients


def signs(width: int) -> np.ndarray:
    """Give the fixed second layer [2 m]: +1/m for the filters of label +1, then -1/m."""
    return np.repeat([1.0, -1.0], width) / width


def _draw(
    key: Key, shape: tuple[int, int], dim: int, num_signals: int, noise_std: float
) -> tuple[Array, Array]:
    checks.key(key)
    for_labels, for_noise = jax.random.split(key)
    labels = jax.random.rademacher(for_labels, shape, jnp.result_type(float))
    noise = noise_std * jax.random.normal(for_noise, (*shape, dim))
    # Along the first unit vectors, the signals, there is none.
    return labels, noise.at[..., :num_signals].set(0)
