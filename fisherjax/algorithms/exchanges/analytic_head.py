"""The analytic head: solve the last layer by ridge regression on the features of all clients.

He, Chen, Yang, Zhang, Sun, Lin, Lin, AFL: a single-round analytic approach for federated learning
with pre-trained models, CVPR 2025. Clients evaluate the network that they receive, without
training, and send second moments of the inputs of its last layer and products with the targets.
The server adds these up, so that the solution is the same as if all data were in one place.
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

_ITERATIONS = 50  # of the fixed point


class AnalyticHeadReport(NamedTuple):
    """Report of the ridge regression.

    Attributes:
        ridge: lambda, in units of the mean eigenvalue of the second moment.
        determined: Number of parameters of each output that the data determine.
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
) -> Algorithm[AnalyticHeadReport]:
    """Make the exchange that solves the last dense layer V by ridge regression.

        V = (A + lambda m(A) I)^-1 B,   A = E[a a^T],   B = E[a y^T],

    where a are the inputs of that layer at the model that clients receive, with a trailing 1 if it
    has a bias, and m is the mean eigenvalue. Targets y are one-hot for the categorical likelihood,
    -1 and 1 for bits, and unchanged for the Gaussian; the outputs of the solved layer estimate the
    mean of y and are not logits. All other leaves stay the same, so that the exchange can follow
    any merge: see `merging.exchange`. Means over clients are weighted; if weights are proportional
    to numbers of examples, the result does not depend on how examples are split over clients.

    Args:
        model: The network, whose outputs are those of a dense layer, and their likelihood.
        ridge: lambda; the default maximises the evidence (MacKay's fixed point), which needs only
            the same sums.
        batch_size: Minibatch size.
        max_examples: Largest number of a client's examples in its sums, drawn by the key of
            `summarize`; None (default) uses all.

    Returns:
        The algorithm. Updates are {"head": HeadSums}, of which the server needs only sums; it
        reports `AnalyticHeadReport`.

    Raises:
        ValueError: If ridge is negative, or the likelihood is not one of those above; on summarize,
            if the outputs are not exactly those of a dense layer (a link, a skip or a
            de-normalisation follows, or its kernel is used elsewhere too), or if the model's mask
            leaves that layer out.

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

    Source: the paper above. Deviations: clients send moments instead of their own solutions, which
        leads to the same sum without the paper's correction for the regularisation; the ridge
        maximises the evidence (MacKay, Bayesian interpolation, Neural Computation 1992), where the
        paper fixes it and removes it again; the features are those of a merged network, not of a
        pre-trained one.
    """
    if ridge is not None:
        checks.number("ridge", ridge)

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        own, info = _solved(sums, ridge)
        template = Template.of(params)
        return template.restore(template.by_name(params) | own), state, info

    return head_summary(model, aggregate, batch_size, max_examples)


@jit
def _solved(
    total: WeightedSum, ridge: Scalar | None
) -> tuple[dict[str, Array], AnalyticHeadReport]:
    sums = head_mean(total)
    inputs, mean = sums.inputs, jnp.trace(sums.inputs) / len(sums.inputs)
    eigenvalues, vectors = jax.lax.stop_gradient(linalg.eigh(inputs))
    eigenvalues = jnp.maximum(eigenvalues, 0)
    if ridge is None:
        # The selection of the ridge is not differentiated.
        shift = _ridge_of_largest_evidence(eigenvalues, vectors, jax.lax.stop_gradient(sums))
    else:
        shift = ridge * mean
    # At least the rounding error of a sum of squares.
    shift = jnp.maximum(shift, jnp.finfo(inputs.dtype).eps * jnp.trace(inputs))
    found = linalg.solve_definite(inputs + shift * jnp.eye(len(inputs)), sums.products)
    determined = (eigenvalues / (eigenvalues + shift)).sum()
    return unpack(sums.layer, found), AnalyticHeadReport(shift / mean, determined)


def _ridge_of_largest_evidence(eigenvalues: Array, vectors: Array, sums: HeadSums) -> Array:
    """Compute the ridge that maximises the evidence, by a fixed-point iteration.

    With gamma = sum_j s_j / (s_j + r), the number of parameters that the data determine,
    r <- (R / (1 - gamma / n)) / (n |V|^2 / gamma), where R is the mean squared residual and n the
    number of target vectors.
    """
    squares = jnp.square(jnp.matmul(vectors.T, sums.products, precision=PRECISION)).sum(1)
    count = jnp.maximum(sums.count, 1)

    def iterate(_: Array, shift: Array) -> Array:
        inverse = 1 / (eigenvalues + shift)
        determined = (eigenvalues * inverse).sum()
        size = (squares * inverse**2).sum()
        explained = (squares * inverse * (2 - eigenvalues * inverse)).sum()
        # A difference of sums, which rounding errors may make negative.
        residual = jnp.maximum(sums.squares - explained, 0)
        free = jnp.maximum(count - determined, 1)
        new = determined * residual / jnp.where(size > 0, size * free, 1)
        return jnp.maximum(new, smallest)

    smallest = jnp.finfo(eigenvalues.dtype).eps * eigenvalues.sum()
    start = jnp.maximum(1e-3 * eigenvalues.mean(), smallest)
    return jax.lax.fori_loop(0, _ITERATIONS, iterate, start)
