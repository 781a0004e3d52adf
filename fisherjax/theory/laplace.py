"""Compute the merge of FedFisher's theorem: networks that are linear around W_i, in one round.

Let phi_n = df(x_n, W_i)/dW for the client i that owns x_n. A network with one hidden layer of relu
has the outputs phi_n^T W_i =: t_n at its own examples, and for all N examples

    min_W 1/(2 N) sum_n (phi_n^T W - t_n)^2    is    min_W sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i),

where F_i is the full Fisher information of the Gaussian likelihood. Among the solutions, the
theorem takes the one nearest to the mean, by means of the N x N Gram matrix of the phi_n. The error
of the merged model W has three sources,

    f(x_n, W) - y_n = [f(x_n, W) - phi_n^T W] + [phi_n^T W - t_n] + [t_n - y_n]:

the network is not linear (the Laplace approximation), the server has not minimised its quadratic,
and clients have not fitted their data. Wide networks move little, which makes the first term small;
longer local training makes the last term small and the first term large.

Results have the dtype of the params. Use float64 (`jax_enable_x64`) where the Gram matrix is close
to singular, as it is for inputs on a circle.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, its theorem and figure 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax.clients import Federation
from fisherjax.theory.two_layer import by_client, check_params, signs
from fisherjax.typing import Array

RCOND = 1e-10
"""Eigenvalues of the Gram matrix below this fraction of the largest count as zero."""


class Gram(NamedTuple):
    """The server's quadratic, by the Gram matrix K = Phi Phi^T / N of all N examples.

    Attributes:
        inputs: [N, D], the examples of client 0, then of client 1, and so on.
        gates: [N, m], a_r where unit r of the client that owns the example is active, else 0. The
            gradient phi_n is the outer product of an input and its gates.
        mean: [D, m], the clients' mean model, where the server starts.
        residuals: [N], t_n - phi_n^T mean.
        eigenvalues: [N], eigenvalues of K in ascending order. Those that are not zero are the
            nonzero eigenvalues of sum_i p_i F_i.
        eigenvectors: [N, N], eigenvectors of K in columns.
    """

    inputs: Array
    gates: Array
    mean: Array
    residuals: Array
    eigenvalues: Array
    eigenvectors: Array


class Decomposition(NamedTuple):
    """The loss of a merged model W and its three sources, and quantities of the theorem.

    sqrt(loss) <= sqrt(laplace) + sqrt(server) + sqrt(local).

    Attributes:
        loss: Mean of 1/2 (f - y)^2 over all examples.
        laplace: Mean of 1/2 (f - phi^T W)^2: the network is not linear between the clients and W.
        server: Mean of 1/2 (phi^T W - t)^2: the minimum of the quadratic is not zero or not found.
        local: Mean of 1/2 (t - y)^2: clients have not fitted their own data.
        smallest: Smallest eigenvalue of the start's Gram matrix, by which the theorem divides.
        rank: Number of its N eigenvalues that are not zero.
        distance: Root mean square of ||W_i - W_0|| over clients.
        furthest: Largest distance of a unit, max_{i,r} ||w_ir - w_0r||.
        moved: Distance of the merged model from the mean, ||W - mean||.
        switched: Fraction of pairs (example, unit) for which the unit is active in only one of W
            and W_i.
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
    """Compute the server's quadratic for clients' models W_i [M, D, m].

        K = Phi Phi^T / N,    K_nk = x_n^T x_k sum_r gate_nr gate_kr / N.

    The full Fisher information, with (D m)^2 entries, is never formed.

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
            f"models have shape {jnp.shape(models)}; expected (clients, inputs, width), stacked "
            "models such as those of two_layer.descend."
        )
    checks.stacked(models, len(x), "models")
    check_params(models[0], x)
    gates = _gates(models, x)
    targets = _linear(models, x, gates)
    mean = models.mean(0)
    flat = x.reshape(-1, x.shape[-1]), gates.reshape(-1, gates.shape[-1])
    residuals = (targets - _linear(jnp.broadcast_to(mean, models.shape), x, gates)).ravel()
    return Gram(*flat, mean, residuals, *linalg.eigh(_kernel(*flat)))


def optimum(quadratic: Gram, rcond: float = RCOND) -> Array:
    """Minimise the server's quadratic; of all minimisers W [D, m], return that nearest to the mean.

        W* = mean + Phi^+ (t - Phi mean) = mean + Phi^T (Phi Phi^T)^+ (t - Phi mean).

    Args:
        quadratic: The quadratic of `gram`.
        rcond: Eigenvalues below this fraction of the largest count as zero (default 1e-10).

    Raises:
        ValueError: If `rcond` is negative.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients = two_layer.draw(key, num_examples=3)
        >>> [models] = two_layer.descend(two_layer.initial(key, width=64), clients, steps=[10])
        >>> optimum(gram(models, clients)).shape
        (2, 64)

    Source: FedFisher, equation 7 and its Lemma 1.
    """
    checks.number("rcond", rcond)
    values = quadratic.eigenvalues
    counts = _counts(values, rcond)
    return _solution(quadratic, jnp.where(counts, 1 / jnp.where(counts, values, 1), 0))


def descent(quadratic: Gram, steps: float, learning_rate: float) -> Array:
    """Compute the result W_T [D, m] of T steps of gradient descent from the mean, in closed form.

        W_T = mean + Phi^T/N g(K) (t - Phi mean),    g(k) = (1 - (1 - eta k)^T) / k.

    A million steps cost as much as one; `optimum` is the limit. The paper's quadratic is a sum over
    M clients, this one a mean: a learning rate of the paper is eta / M here.

    Args:
        quadratic: The quadratic of `gram`.
        steps: Number of steps T >= 0.
        learning_rate: Step size eta, at most one over the largest eigenvalue.

    Raises:
        ValueError: If the learning rate is not positive or too large, or the steps are negative.

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
    checks.number("steps", steps)
    checks.positive("learning_rate", learning_rate)
    largest = quadratic.eigenvalues[-1]
    if not checks.is_traced(largest, learning_rate) and learning_rate * largest > 1:
        raise ValueError(
            f"learning_rate is {learning_rate}; expected at most {1 / float(largest):.3g}, one "
            "over the largest eigenvalue: with larger steps, descent may diverge."
        )
    values = jnp.maximum(quadratic.eigenvalues, 0)
    eps = jnp.finfo(values.dtype).eps
    # log(1 - eta k), finite even where one step is exact.
    log_left = jnp.log1p(-jnp.minimum(learning_rate * values, 1 - eps))
    # The limit of g(k) for k to 0 is T eta.
    is_zero = learning_rate * values * (steps + 1) < eps
    reached = -jnp.expm1(steps * log_left) / jnp.where(is_zero, 1, values)
    return _solution(quadratic, jnp.where(is_zero, steps * learning_rate, reached))


def decompose(
    params: Array, start: Array, models: Array, quadratic: Gram, federation: Federation
) -> Decomposition:
    """Compute the loss of a merged model W and its three sources.

    Args:
        params: The merged model W [D, m].
        start: The clients' start W_0 [D, m].
        models: The clients' models W_i [M, D, m].
        quadratic: The quadratic of `gram` for these models.
        federation: The clients' data.

    Raises:
        ValueError: If clients differ in size, or a shape does not fit.

    Example:
        >>> from fisherjax.theory import two_layer
        >>> key = jax.random.key(0)
        >>> clients, start = two_layer.draw(key, num_examples=3), two_layer.initial(key, width=64)
        >>> [models] = two_layer.descend(start, clients, steps=[10])
        >>> quadratic = gram(models, clients)
        >>> found = decompose(optimum(quadratic), start, models, quadratic, clients)
        >>> terms = jnp.stack([found.laplace, found.server, found.local])
        >>> bool(jnp.sqrt(found.loss) <= jnp.sqrt(terms).sum() + 1e-6)
        True

    Source: FedFisher, its theorem and the remark on two sources of error.
    """
    x, y = by_client(federation)
    check_params(params, x, "params")
    check_params(start, x, "start")
    inputs, gates, mean, residuals, *_ = quadratic
    outputs = jax.nn.relu(inputs @ params) @ jnp.asarray(signs(params.shape[1]), params.dtype)
    linear = jnp.einsum("nd,dr,nr->n", inputs, params, gates, precision="highest")
    targets = jnp.einsum("nd,dr,nr->n", inputs, mean, gates, precision="highest") + residuals
    start_gates = _gates(jnp.broadcast_to(start, models.shape), x).reshape(gates.shape)
    spectrum = linalg.eigh(_kernel(inputs, start_gates))[0]
    travelled = jnp.square(models - start)
    return Decomposition(
        loss=_half_square(outputs - y.ravel()),
        laplace=_half_square(outputs - linear),
        server=_half_square(linear - targets),
        local=_half_square(targets - y.ravel()),
        smallest=spectrum[0],
        rank=_counts(spectrum, RCOND).sum(),
        distance=jnp.sqrt(travelled.sum((1, 2)).mean()),
        furthest=jnp.sqrt(travelled.sum(1).max()),
        moved=jnp.linalg.norm(params - mean),
        switched=jnp.mean((inputs @ params > 0) != (gates != 0)),
    )


def _gates(models: Array, x: Array) -> Array:
    # The gates of each client's model at its own examples, [M, n, m]; relu has no slope at 0.
    active = jnp.matmul(x, models) > 0
    return jnp.where(active, jnp.asarray(signs(models.shape[-1]), models.dtype), 0)


def _linear(models: Array, x: Array, gates: Array) -> Array:
    # phi_n^T W, [M, n]. At W = W_i it is the network's output, because relu is homogeneous.
    return jnp.einsum("ind,idr,inr->in", x, models, gates, precision="highest")


def _kernel(inputs: Array, gates: Array) -> Array:
    # phi_n is an outer product, so that K is the entrywise product of two smaller Gram matrices.
    products = [jnp.matmul(z, z.T, precision="highest") for z in (inputs, gates)]
    return products[0] * products[1] / len(inputs)


def _counts(values: Array, rcond: float) -> Array:
    return values > rcond * values[-1]


def _solution(quadratic: Gram, factors: Array) -> Array:
    """Compute mean + Phi^T/N g(K) residuals, with g(k) of each eigenvalue k in `factors`."""
    vectors, number = quadratic.eigenvectors, len(quadratic.inputs)
    along = factors * jnp.matmul(vectors.T, quadratic.residuals, precision="highest")
    weights = jnp.matmul(vectors, along, precision="highest") / number
    change = jnp.einsum("nd,nr,n->dr", quadratic.inputs, quadratic.gates, weights)
    return quadratic.mean + change


def _half_square(error: Array) -> Array:
    return jnp.mean(jnp.square(error)) / 2
