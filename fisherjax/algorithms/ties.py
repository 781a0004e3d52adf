"""TIES: average the largest entries of clients' changes, among those that agree in sign.

Yadav, Tam, Choshen, Raffel, Bansal, TIES-merging: resolving interference when merging models,
NeurIPS 2023, section 4 and algorithm 1.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import by_value, cached
from fisherjax.algorithms._changes import change_of
from fisherjax.algorithms.base import Algorithm, Link
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


class Direction(NamedTuple):
    """Sums over the clients that move an entry in one direction, shaped as params.

    Attributes:
        total: Sum of their weighted changes.
        weight: Sum of their weights.
    """

    total: Params
    weight: Params


@cached
def ties(density: float = 0.2, scaling: float = 1.0) -> Algorithm[tuple[()]]:
    r"""Make TIES, which trims the changes of the global model W, elects signs and averages.

        t_i = W_i - W with all entries zero except the largest, a share `density` of them,
        s = sign(sum_i p_i t_i),
        W + scaling sum_{i in A} p_i t_i / sum_{i in A} p_i,   A = {i: sign(t_i) = s},

    entry by entry. An entry that no client keeps, or whose sum is zero, keeps its value in W; a sum
    that is zero up to rounding has the sign of the rounding error. The share is that of all trained
    leaves of a client together.

    Args:
        density: Share of entries that each client keeps, above 0 and at most 1 (default 0.2).
        scaling: Factor of the merged change (default 1).

    Returns:
        The algorithm. Updates are {"change": t_i, shaped as params}; the server needs only the sums
        of positive changes, of negative ones, and of the weights of both.

    Raises:
        ValueError: If density or scaling is out of range; on summarize, if the initial model of a
            client is unknown.

    Example:
        >>> import fisherjax as fj
        >>> method, start = ties(density=0.5), jnp.zeros(2)
        >>> models = jnp.array([[3.0, 1.0], [5.0, -1.0], [-6.0, 2.0]])
        >>> federation = fj.clients.federation((jnp.eye(3), jnp.zeros(3)), [[0], [1], [2]])
        >>> trained = fj.training.Trained(models, start)
        >>> sent = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
        >>> print(fj.merging.merge(method, start, sent)[0])
        [4. 0.]

    Source: the paper above. Deviations: clients count by their weights, in the election of signs
        and in the mean; the paper has no weights, which is the case of equal ones. Each client
        keeps the nearest integer to `density` times the number of its entries, at least one, and
        all entries as large as the smallest of these; the authors' code keeps one more. Entries
        whose sum is zero keep their value, as in the paper's equation; the code gives them the sign
        of the majority of entries.
    """
    checks.positive("density", density)
    checks.number("density", density)
    if density > 1:
        raise ValueError(f"density is {density}; expected a number above 0 and at most 1.")
    checks.number("scaling", scaling)

    def reduce(updates: dict[str, Any], weights: Array) -> dict[str, Direction]:
        def direction(part: Any) -> Direction:
            change = jax.tree.map(lambda x: part(x, 0), updates["change"])
            moved = jax.tree.map(lambda x: (x != 0).astype(x.dtype), change)
            return Direction(tree.weighted_sum(change, weights), tree.weighted_sum(moved, weights))

        return {"up": direction(jnp.maximum), "down": direction(jnp.minimum)}

    def aggregate(
        key: Key, sums: dict[str, Direction], params: Params, state: Any, cohort: Any
    ) -> tuple:
        del key, cohort
        merged = jax.tree.map(partial(_elected, scaling), params, *sums["up"], *sums["down"])
        return merged, state, ()

    link, summarize = Link(reads_start=True), by_value(partial(_summarize, density))
    return Algorithm(summarize, aggregate, reduce, kind="trimmed changes", link=link)


def _summarize(
    density: float, key: Key, trained: Trained, examples: Examples, local: Any
) -> tuple[dict[str, Any], Any]:
    del key, examples
    change = change_of(trained, "TIES trims the changes of clients")
    # Files have a piece of the model at a time, and know its smallest magnitude already.
    smallest = _smallest(density, change) if isinstance(local, tuple) else local
    return {"change": _trimmed(change, smallest)}, local


def _smallest(density: float, change: Params) -> Array:
    """Return the smallest of the magnitudes that are kept, over all leaves."""
    size = sum(leaf.size for leaf in jax.tree.leaves(change))
    kept = max(1, round(density * size))
    wide = jnp.result_type(jnp.float32, *jax.tree.leaves(change))
    magnitudes = [jnp.abs(leaf).astype(wide).ravel() for leaf in jax.tree.leaves(change)]
    return jnp.sort(jnp.concatenate(magnitudes))[size - kept]


def _trimmed(change: Params, smallest: Array) -> Params:
    """Set all entries to zero except those that are as large as the smallest one to keep."""
    # Not `>=`: an entry that is NaN must not be trimmed, so that the server sees it.
    return jax.tree.map(
        lambda x: jnp.where(jnp.abs(x).astype(smallest.dtype) < smallest, 0, x), change
    )


def _elected(
    scaling: float, start: Array, up: Array, of_up: Array, down: Array, of_down: Array
) -> Array:
    """Move each entry by the mean over the clients whose change has the elected sign."""
    upwards = up + down > 0
    total, weight = jnp.where(upwards, up, down), jnp.where(upwards, of_up, of_down)
    mean = total / jnp.where(weight > 0, weight, 1)
    return start + scaling * jnp.where(up + down == 0, 0, mean)
