"""The server of FedFisher's theorem: clients' networks, linear around W_i, merged in one round.

With phi_n = df(x_n, W_i)/dW of the client i that owns x_n, a network with one hidden layer of relu
is phi_n^T W_i =: t_n at its own examples, and of all N examples

    min_W 1/(2 N) sum_n (phi_n^T W - t_n)^2    is    min_W sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i),

F_i the full Fisher information of the Gaussian likelihood. Among its solutions the theorem takes
the one nearest to the mean, through the N x N Gram matrix of the phi_n. The error of what the
server finds has three sources,

    f(x_n, W) - y_n = [f(x_n, W) - phi_n^T W] + [phi_n^T W - t_n] + [t_n - y_n]:

that the network is not linear (the Laplace approximation), that the server has not solved its
quadratic, and that clients have not fitted their data. Wide networks move little, which makes the
first small; clients that train for longer make the last small and the first large.

Numbers are in the dtype of the params. Ask for float64, by `jax_enable_x64`, where the Gram matrix
is close to singular, as it is for inputs on a circle.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, its theorem and figure 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax.clients import Federation
from fisherjax.theory.two_layer import by_client, check_params, signs
from fisherjax.typing import Array, Scalar

CUT = 1e-10
"""Eigenvalues of the Gram matrix below this share of the largest count as zero."""


class Gram(NamedTuple):
    """The server's quadratic through the Gram matrix K = Phi Phi^T / N of all N examples.

    Attributes:
        inputs: [N, D], clients' examples one after another.
        gates: [N, m], a_r where unit r of the client that owns the example is active, else 0: phi_n
            is the outer product of an input and its gates.
        mean: [D, m], the clients' mean model, where the server starts.
        residuals: [N], t_n - phi_n^T mean, what it has to explain.
        eigenvalues: [N], of K, ascending; those that are not zero are those of sum_i p_i F_i.
        eigenvectors: [N, N], in columns.
    """

    inputs: Array
    gates: Array
    mean: Array
    residuals: Array
    eigenvalues: Array
    eigenvectors: Array


class Account(NamedTuple):
    """Where the loss of a merged model comes from: sqrt(loss) <= sum of the terms' square roots.

    Attributes:
        loss: Mean of 1/2 (f - y)^2 over all examples.
        laplace: Of 1/2 (f - phi^T W)^2: the network is not linear between the clients and W.
        server: Of 1/2 (phi^T W - t)^2: the quadratic is not solved, or cannot be.
        local: Of 1/2 (t - y)^2: clients have not fitted their own data.
        smallest: The smallest eigenvalue of the start's Gram matrix, which the theorem divides by.
        rank: How many of its N eigenvalues are not zero.
        distance: How far clients went, root of the mean of ||W_i - W_0||^2.
        furthest: How far their units went at most, max_{i,r} ||w_ir - w_0r||.
        moved: How far the server went from the mean, ||W - mean||.
        switched: Share of pairs of an example and a unit that is active in one of W and W_i only.
    """

    loss: Array
    laplace: Array
    server: Array
    local: Array
    smallest: Array
    rank: Array
    distance: Array
    furthest: Array
    moved: Array
    switched: Array


def gram(models: Array, federation: Federation) -> Gram:
    """Set the server's quadratic up for clients' models W_i [M, D, m].

        K = Phi Phi^T / N,    K_nk = x_n^T x_k sum_r gate_nr gate_kr / N.

    The full Fisher information, of (D m)^2 numbers, is never formed.

    Raises:
        ValueError: If clients differ in size, or a shape does not fit.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients = two_layer.draw(key, num_examples=3)
        >>> [models] = two_layer.descend(two_layer.initial(key, width=64), clients, steps=[10])
        >>> gram(models, clients).eigenvalues.shape
        (6,)

    Source: FedFisher, proof of its theorem.
    """
    x, _ = by_client(federation)
    if jnp.ndim(models) != 3:
        raise ValueError(
            f"models have shape {jnp.shape(models)}; expected [clients, inputs, width]."
        )
    checks.stacked(models, len(x), "models")
    check_params(models[0], x)
    gates = _gates(models, x)
    targets = _linear(models, x, gates)
    mean = models.mean(0)
    flat = x.reshape(-1, x.shape[-1]), gates.reshape(-1, gates.shape[-1])
    residuals = (targets - _linear(jnp.broadcast_to(mean, models.shape), x, gates)).ravel()
    return Gram(*flat, mean, residuals, *linalg.eigh(_kernel(*flat)))


def optimum(quadratic: Gram, cut: float = CUT) -> Array:
    """Solve the server's quadratic: of all solutions W [D, m] the one nearest to the mean.

        W* = mean + Phi^+ (t - Phi mean) = mean + Phi^T (Phi Phi^T)^+ (t - Phi mean).

    Args:
        quadratic: What `gram` gives.
        cut: Eigenvalues below this share of the largest count as zero.

    Raises:
        ValueError: If the cut is negative.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients = two_layer.draw(key, num_examples=3)
        >>> [models] = two_layer.descend(two_layer.initial(key, width=64), clients, steps=[10])
        >>> optimum(gram(models, clients)).shape
        (2, 64)

    Source: FedFisher, equation 7 and its Lemma 1.
    """
    checks.number("cut", cut)
    values = quadratic.eigenvalues
    counts = _counts(values, cut)
    return _moved(quadratic, jnp.where(counts, 1 / jnp.where(counts, values, 1), 0))


def descent(quadratic: Gram, steps: float, learning_rate: float) -> Array:
    """Give what gradient descent from the mean reaches after so many steps, W_T [D, m].

        W_T = mean + Phi^T/N g(K) (t - Phi mean),    g(k) = (1 - (1 - eta k)^T) / k.

    In closed form, so that a million steps cost as much as one; `optimum` is its limit. The paper's
    quadratic is a sum over clients: its rate is eta / M of this one's.

    Args:
        quadratic: What `gram` gives.
        steps: T >= 0.
        learning_rate: eta, at most 1 / the largest eigenvalue.

    Raises:
        ValueError: If the rate is not positive or too large, or the steps are negative.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients = two_layer.draw(key, num_examples=3)
        >>> [models] = two_layer.descend(two_layer.initial(key, width=64), clients, steps=[10])
        >>> quadratic = gram(models, clients)
        >>> bool(jnp.allclose(descent(quadratic, 0, 1e-3), quadratic.mean))
        True

    Source: FedFisher, equation 8.
    """
    _check_descent(quadratic, steps, learning_rate)
    values = jnp.maximum(quadratic.eigenvalues, 0)
    gone = -jnp.expm1(steps * _log_left(values, learning_rate))
    # In the limit of k = 0 it is T eta.
    is_zero = learning_rate * values * (steps + 1) < jnp.finfo(values.dtype).eps
    share = jnp.where(is_zero, steps * learning_rate, gone / jnp.where(is_zero, 1, values))
    return _moved(quadratic, share)


def descent_bound(quadratic: Gram, steps: float, learning_rate: float, cut: float = CUT) -> Array:
    """Bound what gradient descent has left after so many steps.

        ||Phi (W_T - W*)||^2 / (2 N) <= (1 - eta k)^(2 T) ||Phi (mean - W*)||^2 / (2 N),

    k the smallest eigenvalue that is not zero: the server's error, in the units of the loss. The
    arguments are those of `descent` and `optimum`.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients = two_layer.draw(key, num_examples=3)
        >>> [models] = two_layer.descend(two_layer.initial(key, width=64), clients, steps=[10])
        >>> start, later = (descent_bound(gram(models, clients), t, 0.1) for t in (0, 100))
        >>> bool(start > later > 0)
        True

    Source: FedFisher, proof of its theorem.
    """
    _check_descent(quadratic, steps, learning_rate)
    checks.number("cut", cut)
    values = quadratic.eigenvalues
    counts = _counts(values, cut)
    smallest = jnp.min(jnp.where(counts, values, jnp.inf))
    # Phi (mean - W*) is the residuals' part in the range of K.
    start = jnp.where(counts, quadratic.eigenvectors.T @ quadratic.residuals, 0)
    left = jnp.exp(2 * steps * _log_left(smallest, learning_rate))
    return left * jnp.mean(jnp.square(start)) / 2


def account(
    params: Array, start: Array, models: Array, quadratic: Gram, federation: Federation
) -> Account:
    """Say where the loss of a merged model W comes from.

    Args:
        params: W [D, m], what the server found.
        start: W_0 [D, m].
        models: The clients' W_i [M, D, m].
        quadratic: What `gram` gives for them.
        federation: Their data.

    Raises:
        ValueError: If clients differ in size, or a shape does not fit.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients, start = two_layer.draw(key, num_examples=3), two_layer.initial(key, width=64)
        >>> [models] = two_layer.descend(start, clients, steps=[10])
        >>> quadratic = gram(models, clients)
        >>> found = account(optimum(quadratic), start, models, quadratic, clients)
        >>> terms = jnp.stack([found.laplace, found.server, found.local])
        >>> bool(jnp.sqrt(found.loss) <= jnp.sqrt(terms).sum() + 1e-6)
        True

    Source: FedFisher, its theorem and the remark on the two sources of error.
    """
    x, y = by_client(federation)
    for name, given in {"params": params, "start": start}.items():
        check_params(given, x, name)
    inputs, gates, mean, residuals, *_ = quadratic
    outputs = jax.nn.relu(inputs @ params) @ jnp.asarray(signs(params.shape[1]), params.dtype)
    linear = jnp.einsum("nd,dr,nr->n", inputs, params, gates, precision="highest")
    targets = jnp.einsum("nd,dr,nr->n", inputs, mean, gates, precision="highest") + residuals
    first = _gates(jnp.broadcast_to(start, models.shape), x).reshape(gates.shape)
    spectrum = linalg.eigh(_kernel(inputs, first))[0]
    travelled = jnp.square(models - start)
    return Account(
        loss=_half_square(outputs - y.ravel()),
        laplace=_half_square(outputs - linear),
        server=_half_square(linear - targets),
        local=_half_square(targets - y.ravel()),
        smallest=spectrum[0],
        rank=_counts(spectrum, CUT).sum(),
        distance=jnp.sqrt(travelled.sum((1, 2)).mean()),
        furthest=jnp.sqrt(travelled.sum(1).max()),
        moved=jnp.linalg.norm(params - mean),
        switched=jnp.mean((inputs @ params > 0) != (gates != 0)),
    )


def _gates(models: Array, x: Array) -> Array:
    # Of each client's own model at its own examples, [M, n, m]; relu has no slope at 0.
    active = jnp.matmul(x, models) > 0
    return jnp.where(active, jnp.asarray(signs(models.shape[-1]), models.dtype), 0)


def _linear(models: Array, x: Array, gates: Array) -> Array:
    # phi_n^T W, [M, n]; at W = W_i it is the network itself, whose relu is positively homogeneous.
    return jnp.einsum("ind,idr,inr->in", x, models, gates, precision="highest")


def _kernel(inputs: Array, gates: Array) -> Array:
    products = [jnp.matmul(z, z.T, precision="highest") for z in (inputs, gates)]
    return products[0] * products[1] / len(inputs)


def _counts(values: Array, cut: float) -> Array:
    return values > cut * values[-1]


def _log_left(values: Array, learning_rate: Scalar) -> Array:
    # log(1 - eta k), finite even where a step solves exactly.
    return jnp.log1p(-jnp.minimum(learning_rate * values, 1 - jnp.finfo(values.dtype).eps))


def _moved(quadratic: Gram, share: Array) -> Array:
    vectors, number = quadratic.eigenvectors, len(quadratic.inputs)
    along = share * jnp.matmul(vectors.T, quadratic.residuals, precision="highest")
    weights = jnp.matmul(vectors, along, precision="highest") / number
    change = jnp.einsum("nd,nr,n->dr", quadratic.inputs, quadratic.gates, weights)
    return quadratic.mean + change


def _half_square(error: Array) -> Array:
    return jnp.mean(jnp.square(error)) / 2


def _check_descent(quadratic: Gram, steps: Any, learning_rate: Any) -> None:
    checks.number("steps", steps)
    checks.positive("learning_rate", learning_rate)
    largest = quadratic.eigenvalues[-1]
    if not checks.is_traced(largest, learning_rate) and learning_rate * largest > 1:
        raise ValueError(
            f"learning_rate is {learning_rate}; expected at most {1 / float(largest):.3g}, one "
            "over the largest eigenvalue: beyond it descent may diverge."
        )
