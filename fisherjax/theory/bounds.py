r"""Compute the quantities of FedFisher's theorem: H^inf, lambda_0, the radii, and its two terms.

In the limit of infinite width the Gram matrix of the gradients at the start is

    H^inf_kj = x_k^T x_j P(w^T x_k > 0, w^T x_j > 0) = x_k^T x_j (pi - angle(x_k, x_j)) / (2 pi),

and lambda_0 > 0 is its smallest eigenvalue. If no unit of a client has moved farther than R_0 from
the start, and no unit of the merged network farther than R_1, then

    loss <= (sqrt(local term) + sqrt(Laplace term) + sqrt(server))^2:

the first term says what clients have not fitted after K steps, which needs a width that grows with
1 / lambda_0. The second says how far the network is from linear between the clients and the merged
model; it falls with the width, because R_0 and R_1 do.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, its theorem and proof; Du, Zhai, Poczos,
    Singh, Gradient descent provably optimizes over-parameterized neural networks, ICLR 2019, whose
    constants stand here.
"""

from typing import NamedTuple

import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax.clients import Federation
from fisherjax.theory.two_layer import by_client, check_params, network
from fisherjax.typing import Array, Scalar


class Terms(NamedTuple):
    """Quantities of the theorem for one merged model.

    Attributes:
        lambda_0: Smallest eigenvalue of H^inf of all N examples.
        r_0: Largest distance of a client's unit from the start, max_{i,r} ||w_ir - w_0r||.
        r_0_allowed: The bound of r_0 by lambda_0, 4 n sqrt(2 L) / (sqrt(m) lambda_0), where L is
            the largest loss of a client at the start.
        r_1: Largest distance of a unit of the merged model from the start.
        local_term: Bound (1 - eta lambda_0 / (2 n))^K L of the clients' own losses.
        laplace_term: Bound of the error of the Laplace approximation by r_0 and r_1.
    """

    lambda_0: Array
    r_0: Array
    r_0_allowed: Array
    r_1: Array
    local_term: Array
    laplace_term: Array


def infinite_width(federation: Federation) -> Array:
    """Compute H^inf [N, N] of all examples, in the order of clients.

    Raises:
        ValueError: If clients differ in size.

    Example:
        >>> from fisherjax import clients
        >>> right_angle = jnp.eye(2), jnp.zeros((2, 1))
        >>> print(infinite_width(clients.federation(right_angle, [[0], [1]])))
        [[0.5 0. ]
         [0.  0.5]]

    Source: FedFisher, definition before its theorem.
    """
    x = by_client(federation)[0]
    x = x.reshape(-1, x.shape[-1])
    products = jnp.matmul(x, x.T, precision="highest")
    norms = jnp.linalg.norm(x, axis=1)
    lengths = jnp.outer(norms, norms)
    cosines = jnp.clip(products / jnp.where(lengths > 0, lengths, 1), -1, 1)
    # The arccosine of numbers near one has half of their digits; the chord has them all.
    unit = x / jnp.where(norms > 0, norms, 1)[:, None]
    chords = jnp.linalg.norm(unit[:, None] - unit, axis=-1)
    angles = jnp.where(cosines > 0.5, 2 * jnp.arcsin(chords / 2), jnp.arccos(cosines))
    return products * (jnp.pi - angles) / (2 * jnp.pi)


def terms(
    params: Array,
    start: Array,
    models: Array,
    federation: Federation,
    *,
    steps: Scalar,
    learning_rate: Scalar,
    lambda_0: Array | None = None,
) -> Terms:
    """Compute the theorem's quantities for a merged model W.

    The proof of `laplace_term`: a unit adds to f(x, W) - phi_i(x)^T W only where its sign in W is
    not that in W_i. Then |w_0r^T x| <= max(r_0, r_1) ||x||, and it adds at most
    (r_0 + r_1) ||x|| / sqrt(m). The units with such a start are counted.

    Args:
        params: The merged model W [D, m].
        start: The clients' start W_0 [D, m].
        models: The clients' models W_i [M, D, m].
        federation: The clients' data.
        steps: Number of local steps K.
        learning_rate: Step size eta of the clients.
        lambda_0: Smallest eigenvalue of `infinite_width`; None (default) computes it.

    Raises:
        ValueError: If clients differ in size, or a shape does not fit.

    Example:
        >>> import jax
        >>> from fisherjax.theory import laplace, two_layer
        >>> key = jax.random.key(0)
        >>> clients, start = two_layer.draw(key, num_examples=3), two_layer.initial(key, width=64)
        >>> [models] = two_layer.descend(start, clients, steps=[10])
        >>> quadratic = laplace.gram(models, clients)
        >>> best = laplace.optimum(quadratic)
        >>> found = terms(best, start, models, clients, steps=10, learning_rate=0.1)
        >>> error = laplace.decompose(best, start, models, quadratic, clients).laplace
        >>> bool(error <= found.laplace_term)
        True

    Source: FedFisher, its theorem and proof. Deviations: the radii are measured, where the theorem
        bounds them by lambda_0; units are counted, where it bounds their number by the density of
        the start. A client's loss is a mean over its n examples, hence n beside lambda_0.
    """
    x, y = by_client(federation)
    for name, value in {"params": params, "start": start}.items():
        check_params(value, x, name)
    checks.stacked(models, len(x), "models")
    size, width = x.shape[1], start.shape[1]
    known = lambda_0 is not None
    smallest = jnp.asarray(lambda_0) if known else linalg.eigh(infinite_width(federation))[0][0]
    begun = network(width).apply(start, x.reshape(-1, x.shape[-1])).reshape(y.shape)
    loss = jnp.max(jnp.mean(jnp.square(begun - y), 1)) / 2
    r_0 = jnp.sqrt(jnp.square(models - start).sum(1).max())
    r_1 = jnp.sqrt(jnp.square(params - start).sum(0).max())
    norms = jnp.linalg.norm(x, axis=-1)
    near = jnp.abs(x @ start) <= jnp.maximum(r_0, r_1) * norms[..., None]
    errors = near.sum(-1) * (r_0 + r_1) * norms / jnp.sqrt(width)
    return Terms(
        smallest,
        r_0,
        4 * size * jnp.sqrt(2 * loss) / (jnp.sqrt(width) * smallest),
        r_1,
        loss * (1 - learning_rate * smallest / (2 * size)) ** steps,
        jnp.mean(jnp.square(errors)) / 2,
    )
