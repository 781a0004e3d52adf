"""The analytic head: the last layer solved anew, by ridge regression on everybody's features.

He, Chen, Yang, Zhang, Sun, Lin, Lin, AFL: a single-round analytic approach for federated learning
with pre-trained models, CVPR 2025. Clients run the network they are given, without training, and
send second moments of the inputs of its last layer and their products with the targets. These add
up, so that the solution is that of all data in one place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax._layers.layer import unpack
from fisherjax.algorithms.base import Algorithm, WeightedSum
from fisherjax.algorithms.exchanges._head_sums import HeadSums, head_mean, head_summary
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.typing import Array, Key, Model, Params, Scalar

_TURNS = 50  # of the fixed point


class Ridge(NamedTuple):
    """How the ridge was chosen.

    Attributes:
        ridge: lambda, in units of the mean eigenvalue of the second moment.
        determined: How many parameters of each output the data determine.
    """

    ridge: Array
    determined: Array


@cached
def analytic_head(
    model: Model,
    *,
    ridge: Scalar | None = None,
    batch_size: int = 64,
    max_examples: int | None = None,
) -> Algorithm[Ridge]:
    """Make the exchange that solves the last dense layer V by ridge regression.

        V = (A + lambda m(A) I)^-1 B,   A = E[a a^T],   B = E[a y^T],

    with a the inputs of that layer at the model that clients are given, a trailing 1 where it has a
    bias, and m the mean eigenvalue. Targets y are one-hot for the categorical likelihood, -1 and 1
    for bits, and as they are for the Gaussian; the outputs of the solved layer are means of y, not
    logits. All other leaves stay those of the model given, so that this works after any merge: see
    `merging.exchange`. Means over clients are weighted; with weights in proportion to numbers of
    examples the result does not depend on how examples are split over clients.

    Args:
        model: The network, whose outputs are those of a dense layer, and what they mean.
        ridge: lambda; None is the one of largest evidence (MacKay's fixed point), which needs no
            more than what is sent.
        batch_size: Examples of a minibatch.
        max_examples: Of how many of a client's examples its sums are at most, drawn by the key of
            `summarize`; None is all.

    Returns:
        The algorithm. Updates are {"head": HeadSums}, which add up over clients; it reports a
        `Ridge`.

    Raises:
        ValueError: If ridge is negative; on summarize, if the outputs are not those of a dense
            layer as they are (a link, a skip or a de-normalisation follows, or its kernel is used
            elsewhere too), the model's mask leaves that layer out, or the likelihood is another
            than those.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> x = jnp.arange(12.0).reshape(6, 2) % 5
        >>> data, start = (x, x @ jnp.array([[1.0], [2.0]])), {"w": jnp.zeros((2, 1))}
        >>> federation = fj.clients.federation(data, [[0, 1], [2, 3, 4, 5]])
        >>> method = analytic_head(model, ridge=0.0)
        >>> fj.merging.exchange(method, start, federation, key=jax.random.key(0))[0]["w"].round(3)
        Array([[1.],
               [2.]], dtype=float32)

    Source: the paper above. Deviations: moments are sent in place of each
        client's own solution, which gives the same sum without the paper's correction for the
        regularisation; the ridge is chosen by the evidence (MacKay, Bayesian interpolation, Neural
        Computation 1992), where the paper fixes it and removes it again; the features are those of
        a merged network, not of a pre-trained one.
    """
    if ridge is not None:
        checks.number("ridge", ridge)

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        found, info = _solved(head_mean(sums), ridge)
        template = Template.of(params)
        leaves = template.by_name(params) | unpack(sums.total.layer, found)
        return template.restore(leaves), state, info

    return head_summary(model, aggregate, batch_size, max_examples)


@jit
def _solved(sums: HeadSums, ridge: Scalar | None) -> tuple[Array, Ridge]:
    inputs, mean = sums.inputs, jnp.trace(sums.inputs) / len(sums.inputs)
    eigenvalues, vectors = jax.lax.stop_gradient(linalg.eigh(inputs))
    eigenvalues = jnp.maximum(eigenvalues, 0)
    if ridge is None:
        # How the ridge is chosen has no derivative.
        shift = _of_largest_evidence(eigenvalues, vectors, jax.lax.stop_gradient(sums))
    else:
        shift = ridge * mean
    # Not below what rounding does to a sum of squares.
    shift = jnp.maximum(shift, jnp.finfo(inputs.dtype).eps * jnp.trace(inputs))
    found = linalg.solve_definite(inputs + shift * jnp.eye(len(inputs)), sums.products)
    determined = (eigenvalues / (eigenvalues + shift)).sum()
    return found, Ridge(shift / mean, determined)


def _of_largest_evidence(eigenvalues: Array, vectors: Array, sums: HeadSums) -> Array:
    """Find the ridge at which prior and noise have the precisions that the data suggest.

    With gamma = sum_j s_j / (s_j + r) parameters that are determined, r <- (R / (1 - gamma / n)) /
    (n |V|^2 / gamma), R the mean squared residual, n the number of target vectors.
    """
    squares = jnp.square(jnp.matmul(vectors.T, sums.products, precision=PRECISION)).sum(1)
    count = jnp.maximum(sums.count, 1)

    def turn(_: Array, shift: Array) -> Array:
        inverse = 1 / (eigenvalues + shift)
        determined = (eigenvalues * inverse).sum()
        size = (squares * inverse**2).sum()
        explained = (squares * inverse * (2 - eigenvalues * inverse)).sum()
        # What is left of |y|^2; a difference of sums, which rounding may take below zero.
        residual = jnp.maximum(sums.squares - explained, 0)
        free = jnp.maximum(count - determined, 1)
        new = determined * residual / jnp.where(size > 0, size * free, 1)
        return jnp.maximum(new, smallest)

    smallest = jnp.finfo(eigenvalues.dtype).eps * eigenvalues.sum()
    start = jnp.maximum(1e-3 * eigenvalues.mean(), smallest)
    return jax.lax.fori_loop(0, _TURNS, turn, start)
