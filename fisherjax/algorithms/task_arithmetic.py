"""Task arithmetic: add the clients' changes to the model that they started from.

Ilharco, Ribeiro, Wortsman, Gururangan, Schmidt, Hajishirzi, Farhadi, Editing models with task
arithmetic, ICLR 2023, section 2.
"""

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms._changes import adding_changes
from fisherjax.algorithms.base import Algorithm
from fisherjax.typing import Scalar


@cached
def task_arithmetic(*, scaling: Scalar = 0.3) -> Algorithm[tuple[()]]:
    """Make task arithmetic, which adds the scaled sum of all changes to the start W_0.

        W_0 + scaling M sum_i p_i (W_i - W_0),

    with M the number of clients with a weight. With equal weights that is the sum of the changes
    times `scaling`; with scaling 1 / M, the weighted mean of the models.

    Args:
        scaling: The factor lambda of the sum (default 0.3, which the paper's authors chose on
            validation data for eight tasks; the best one depends on the number of clients).

    Returns:
        The algorithm. Updates are {"params": W_i}, those of `fedavg`; the server needs only sums
        and the start.

    Raises:
        ValueError: If scaling is negative.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": jnp.array([[1.0], [5.0]])}, "params")
        >>> print(fj.merging.merge(task_arithmetic(scaling=1.0), jnp.ones(1), updates)[0])
        [5.]

    Source: the paper above. Deviation: clients count by their weights; the paper has none, which is
        the case of equal ones.
    """
    checks.number("scaling", scaling)
    return adding_changes(lambda mean, count: scaling * count * mean, kind="params")
