"""Iso-C: replace the singular values of the clients' summed change of each matrix by their mean.

Marczak, Magistri, Cygert, Twardowski, Bagdanov, van de Weijer, No task left behind: isotropic model
merging with common and task-specific subspaces, ICML 2025, section 4.
"""

import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms._changes import adding_changes
from fisherjax.algorithms.base import Algorithm
from fisherjax.typing import Array, Scalar


@cached
def iso_c(*, scaling: Scalar = 1.0) -> Algorithm[tuple[()]]:
    """Make Iso-C, which lets every direction of a matrix's summed change be equally long.

        D = M sum_i p_i (W_i - W_0) = U diag(s) V^T,   W_0 + scaling mean(s) U V^T

    for each matrix, with M the number of clients with a weight; all other leaves become the
    weighted mean. A leaf of two axes is a matrix, and so is a convolution's kernel, of four axes or
    more, as [all axes but the last, outputs]. The merge has no derivatives.

    Args:
        scaling: The factor alpha (default 1). The paper's authors choose it on validation data.

    Returns:
        The algorithm. Updates are {"params": W_i}, those of `fedavg`; the server needs only sums
        and the start.

    Raises:
        ValueError: If scaling is negative.

    Example:
        >>> import numpy as np, fisherjax as fj
        >>> models = {"params": {"w": jnp.array([[[3.0, 0.0], [0.0, 0.0]], np.eye(2)])}}
        >>> updates = fj.algorithms.Update(models, "params")
        >>> merged = fj.merging.merge(iso_c(), {"w": jnp.zeros((2, 2))}, updates)[0]
        >>> print(merged["w"].round(3))
        [[2.5 0. ]
         [0.  2.5]]

    Source: the paper above, whose networks have no convolutions. Deviations: clients count by their
        weights; kernels of convolutions are merged as matrices; singular values that are zero up to
        rounding, as one is in every softmax head, are left out of the mean and of U V^T, because
        the changes do not determine their directions.
    """
    checks.number("scaling", scaling)

    def merged(mean: Array, count: Array) -> Array:
        is_matrix = mean.size > 0 and (mean.ndim == 2 or mean.ndim > 3)
        return scaling * _isotropic(count * mean) if is_matrix else mean

    return adding_changes(merged, kind="params")


@jit
def _isotropic(change: Array) -> Array:
    matrix = change.reshape(-1, change.shape[-1])
    u, values, v = linalg.svd(matrix)
    # Differences of weights are rounded, so that the limit is above that of a computed rank.
    kept = values > 8 * max(matrix.shape) * jnp.finfo(values.dtype).eps * values[0]
    mean = jnp.sum(values, where=kept) / jnp.maximum(kept.sum(), 1)
    return mean * jnp.matmul(u * kept, v, precision="highest").reshape(change.shape)
