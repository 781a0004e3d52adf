"""Train the clients of FedFisher's theorem: wide networks with one hidden layer.

    f(x, W) = sum_r a_r relu(w_r^T x),    a_r = +-1 / sqrt(m) fixed,    L_i = mean_n 1/2 (f - y)^2.

From the common start W_0, client i descends to its own W_i; `laplace` merges the W_i.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, its theorem and figure 1.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import clients, likelihoods, parallel
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.clients import Federation
from fisherjax.typing import Array, Key, Model


def draw(key: Key, num_clients: int = 2, num_examples: int = 100) -> Federation:
    """Draw clients that differ: each has its own arc of the circle and its own linear target.

        w~_i, b~_i ~ N(0, 1);  w_i ~ N(w~_i 1, I);  b_i ~ N(b~_i 1, I);
        x = z / ||z||,  z ~ N(b_i, diag(1, 2^-1.2));    y = w_i^T x.

    Args:
        key: Random key.
        num_clients: Number M of clients (default 2).
        num_examples: Number n of examples of each client (default 100).

    Returns:
        Federation with inputs [M n, 2] and targets [M n, 1], in the order of clients.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> draw(jax.random.key(0), num_examples=3).inputs.shape
        (6, 2)

    Source: FedFisher, section 5.1 of its experiments, figure 1.
    """
    num_clients = checks.count("num_clients", num_clients)
    num_examples = checks.count("num_examples", num_examples)
    checks.key(key)
    names = ["w~", "b~", "w", "b", "z"]
    of = dict(zip(names, jax.random.split(key, 5), strict=True))
    centres = {
        name: jax.random.normal(of[f"{name}~"], (num_clients, 1))
        + jax.random.normal(of[name], (num_clients, 2))
        for name in "wb"
    }
    z = jax.random.normal(of["z"], (num_clients, num_examples, 2)) * jnp.array([1, 2**-0.6])
    z += centres["b"][:, None]
    x = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    y = jnp.einsum("ind,id->in", x, centres["w"])
    rows = np.arange(num_clients * num_examples).reshape(num_clients, num_examples)
    return clients.federation((x.reshape(-1, 2), y.reshape(-1, 1)), rows)


@cached
def network(width: int) -> Model:
    """Make the network with m hidden units, apply(W [D, m], x [B, D]) -> [B, 1].

    Units with even numbers have a_r = 1 / sqrt(m), units with odd numbers -1 / sqrt(m). Because
    units are exchangeable, this is equivalent to random signs with equal counts.

    Raises:
        ValueError: If the width is not a positive integer.

    Example:
        >>> print(network(4).apply(jnp.ones((2, 4)), jnp.ones((1, 2))))
        [[0.]]
    """
    second = signs(checks.count("width", width))

    def apply(params: Array, x: Array) -> Array:
        # One matrix product: f = relu(x W) a.
        return jax.nn.relu(x @ params) @ jnp.asarray(second, params.dtype)[:, None]

    return Model(apply, likelihoods.gaussian)


def initial(key: Key, width: int, *, num_inputs: int = 2, variance: float = 0.5) -> Array:
    """Draw the common start W_0 [D, m] from N(0, variance).

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> initial(jax.random.key(0), width=4).shape
        (2, 4)
    """
    shape = checks.count("num_inputs", num_inputs), checks.count("width", width)
    checks.key(key)
    checks.positive("variance", variance)
    return jnp.sqrt(variance) * jax.random.normal(key, shape)


def descend(
    params: Array, federation: Federation, steps: Sequence[int], learning_rate: float = 0.1
) -> Array:
    """Train every client by gradient descent with all its examples: W_i <- W_i - eta grad L_i.

    Args:
        params: The common start W_0 [D, m].
        federation: Clients with equal numbers of examples, as those of `draw`.
        steps: Numbers of steps after which models are returned, ascending.
        learning_rate: Step size eta (default 0.1).

    Returns:
        The clients' models after each number of steps, [len(steps), M, D, m].

    Raises:
        ValueError: If steps are not ascending positive integers, clients differ in size, or a shape
            does not fit.

    Example:
        >>> key = jax.random.key(0)
        >>> descend(initial(key, width=8), draw(key), steps=[10, 20]).shape
        (2, 2, 2, 8)

    Source: FedFisher, equation of the local step; Du et al., Gradient descent provably optimizes
        over-parameterized neural networks, ICLR 2019.
    """
    x, y = by_client(federation)
    check_params(params, x)
    steps = [checks.count("steps", number) for number in steps]
    if not steps or sorted(set(steps)) != steps:
        raise ValueError(f"steps is {steps}; expected ascending integers such as [16, 32].")
    checks.positive("learning_rate", learning_rate)
    apply = network(params.shape[1]).apply

    def train_one(client: tuple[Array, Array]) -> Array:
        def loss(w: Array) -> Array:
            return 0.5 * jnp.mean(jnp.square(apply(w, client[0])[:, 0] - client[1]))

        def step(_: Array, w: Array) -> Array:
            return w - learning_rate * jax.grad(loss)(w)

        kept, w = [], params
        for begin, end in zip([0, *steps], steps, strict=False):
            w = jax.lax.fori_loop(begin, end, step, w)
            kept.append(w)
        return jnp.stack(kept)

    chunk = parallel.chunk_size(None, len(x))
    models = parallel.map_clients(train_one, (x, y), clients_per_chunk=chunk)
    return jnp.swapaxes(models, 0, 1)


def signs(width: int) -> np.ndarray:
    """Return the fixed second layer a [m]."""
    return (1 - 2 * (np.arange(width) % 2)) / np.sqrt(width)


def by_client(federation: Federation) -> tuple[Array, Array]:
    """Return inputs [M, n, D] and targets [M, n]; raise if clients differ in size."""
    clients.check(federation)
    sizes, most = federation.sizes, federation.indices.shape[1]
    if not checks.is_traced(sizes) and (np.asarray(sizes) != most).any():
        raise ValueError(
            f"Clients have {np.asarray(sizes).tolist()} examples; expected equal numbers, as those "
            "of theory.two_layer.draw."
        )
    x, y = federation.inputs[federation.indices], federation.targets[federation.indices]
    if x.ndim != 3 or y.size != x.shape[0] * x.shape[1]:
        raise ValueError(
            f"A client has inputs of shape {x.shape[1:]} and targets of shape {y.shape[1:]}; "
            "expected [n, D] and [n, 1]."
        )
    return x, y.reshape(x.shape[:2])


def check_params(params: Array, x: Array, name: str = "params") -> None:
    """Check that params fit inputs [..., D]."""
    checks.floating(params, name)
    if jnp.ndim(params) != 2 or params.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name} has shape {jnp.shape(params)}; expected ({x.shape[-1]}, width) for inputs "
            f"with {x.shape[-1]} numbers."
        )
