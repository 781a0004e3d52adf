"""Contributions: what each client adds to the sums, its norms by group, and its clipping."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import quadratic, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._upload_checks import stacked
from fisherjax.algorithms._changes import CountedSum
from fisherjax.algorithms.base import Algorithm, Update, WeightedSum
from fisherjax.algorithms.wrappers.sketched import Sketches
from fisherjax.typing import Array, Params

ALL = "all"
"""Name of the only group if `clip` is one number."""

# Their fields `weight` and `count`, the number of clients, are public and need no noise.
_SUMS = (WeightedSum, CountedSum, quadratic.Sums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clipped:
    """Sums of clipped contributions of clients.

    Attributes:
        sums: Sums like those that the wrapped algorithm's `reduce` returns, all weights one.
        centred: Whether params in `sums` are differences from the start (static).
    """

    sums: Any
    centred: bool = dataclasses.field(metadata={"static": True})


def norms(
    algorithm: Algorithm, updates: Update, params: Params, *, groups: Sequence[str] = (ALL,)
) -> dict[str, Array]:
    """Compute the L2 norm of each client's contribution to each group of the sums.

    Use it to choose clips on public data or simulated clients: the norms of real clients are not
    protected by differential privacy.

    Args:
        algorithm: The algorithm, not wrapped by `private`.
        updates: Stacked updates of K clients for that algorithm.
        params: The params that clients started from.
        groups: Names of groups, as in the clip of `private`.

    Returns:
        Norms [K] by group.

    Raises:
        ValueError: If the updates are for another algorithm, or the groups do not match the sums.

    Example:
        >>> import fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": jnp.array([[4.0, 5.0]])}, "params")
        >>> norms(fj.algorithms.fedavg(), updates, jnp.ones(2), groups=["total"])
        {'total': Array([5.], dtype=float32)}
    """
    values = stacked(algorithm, updates).values
    if "params" in values:
        params = checks.arrays(params)
        shapes = {name: shape[1:] for name, shape in tree.shapes(values["params"]).items()}
        if shapes != tree.shapes(params):
            raise ValueError(
                f"params have leaves {tree.shapes(params)}, but each client's update {shapes}; "
                "expected the params that the clients started from."
            )
        values = values | {"params": jax.tree.map(jnp.subtract, values["params"], params)}
    each = _contributions(algorithm, values)
    leaves = jax.tree.leaves(each)

    def norm(places: list[int]) -> Array:
        group = [leaves[place] for place in places]
        # One norm over all leaves of a group, because they are clipped together.
        return jax.vmap(lambda x: jnp.sqrt(tree.inner(x, x)))(group)

    return {name: norm(places) for name, places in leaves_by_group(each, tuple(groups)).items()}


# Cached apart from the noise, so that a new noise multiplier does not compile the sums again.
@cached
def clipping_reduce(algorithm: Algorithm, clip: tuple[tuple[str, float | None], ...]) -> Callable:
    """Make the `reduce` that clips every client's contribution before it adds them."""
    bounds = dict(clip)

    def reduce(values: dict[str, Any], weights: Array) -> Clipped:
        each = _contributions(algorithm, values)
        groups = leaves_by_group(each, tuple(bounds))
        leaves, structure = jax.tree.flatten(each)
        # A client that is left out, or whose update is not finite, contributes zeros.
        counts = (weights > 0) & tree.finite_by_client(leaves).all(0)
        leaves = tree.where(counts, leaves)
        # Only the public weights are in no group; the weight of every client is one.
        total = [jnp.full(leaf.shape[1:], len(weights), leaf.dtype) for leaf in leaves]
        for name, places in groups.items():
            group, bound = [leaves[place] for place in places], bounds[name]
            if bound is not None:
                # The clients are the examples here: each contribution is scaled to the bound, and
                # only then added.
                clipped, _ = optax.per_example_global_norm_clip(group, bound)
            else:
                # A group that is not released must not reach the merge in any form.
                clipped = [jnp.zeros_like(leaf[0]) for leaf in group]
            for place, leaf in zip(places, jax.tree.leaves(clipped), strict=True):
                total[place] = leaf
        return Clipped(jax.tree.unflatten(structure, total), "params" in values)

    return reduce


def _contributions(algorithm: Algorithm, values: dict[str, Any]) -> Any:
    """Compute what each client adds to the sums with weight one, leaves [K, ...]."""
    reduce = algorithm.reduce
    if reduce is None:
        raise ValueError(
            "This method needs each client's update (its reduce is None), so it has no sums; "
            "expected a method with a reduce, such as algorithms.fedavg()."
        )

    def alone(update: dict[str, Any]) -> Any:
        # Its weight is one, because a weight by the number of examples would reveal this number.
        return reduce(jax.tree.map(lambda leaf: leaf[None], update), jnp.ones(1))

    sums = jax.vmap(alone)(values)
    # They have the type of sums, so that nothing later would notice.
    if isinstance(sums, Sketches):
        raise ValueError(
            "This method sends sketches. Factors are recovered from their sketches only if these "
            "are exact, and noise destroys them; expected a method whose sums stay useful with "
            "noise, such as fedfisher(model, fisher=fisher.diagonal)."
        )
    return sums


def leaves_by_group(sums: Any, groups: Sequence[str]) -> dict[str, list[int]]:
    """Find the numbers of the leaves that belong to each group; weights belong to none.

    Raises:
        ValueError: If a group has no leaves, or a leaf does not belong to exactly one group.
    """

    def mark(x: Any) -> Any:
        public = jax.tree.map(lambda _: False, x)
        if not isinstance(x, _SUMS):
            return public
        # A count that is None is no leaf, and has no mark. (Every tuple has a method `count`.)
        counted = "count" in x._fields and x.count is not None
        return public._replace(weight=True, **({"count": True} if counted else {}))

    # Weights are found by type, because a leaf of the model may have the same name.
    public = jax.tree.leaves(jax.tree.map(mark, sums, is_leaf=lambda x: isinstance(x, _SUMS)))
    names = {i: name for i, name in enumerate(tree.names(sums)) if not public[i]}

    def belongs(name: str, group: str) -> bool:
        return group == ALL or name == group or name.startswith(f"{group}/")

    found = {g: [i for i, name in names.items() if belongs(name, g)] for g in groups}
    # A leaf in no group would be released without noise; one in two groups would be counted twice.
    once = sorted(place for places in found.values() for place in places) == list(names)
    if not all(found.values()) or not once:
        raise ValueError(
            f"The groups are {list(groups)}, but the sums {list(names.values())}; expected "
            "beginnings of these names, such that each name belongs to exactly one group. Use a "
            "clip of None for a group that is not to be released."
        )
    return found
