"""What each client adds to the sums, by group, and its clip."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import quadratic, tree
from fisherjax._core.caching import cached
from fisherjax._upload_checks import stacked
from fisherjax.algorithms.base import Algorithm, Update, WeightedSum
from fisherjax.algorithms.wrappers.sketched import Sketches
from fisherjax.typing import Array, Params

ALL = "all"
"""The one group of a clip that is a number."""


_SUMS = (WeightedSum, quadratic.Sums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clipped:
    """Sums over clients of bounded norm.

    Attributes:
        sums: What the wrapped `reduce` gives, with every weight one.
        centred: Static, whether params are differences from the start.
    """

    sums: Any
    centred: bool = dataclasses.field(metadata={"static": True})


def norms(
    algorithm: Algorithm,
    updates: Update,
    params: Params,
    *,
    groups: Sequence[str] = (ALL,),
) -> dict[str, Array]:
    """Measure what each client would add to each group of the sums, L2 norms [K].

    For choosing clips on public data or simulated clients: norms of real clients are private.

    Args:
        algorithm: Not wrapped yet.
        updates: Stacked, of that algorithm.
        params: What clients started from.
        groups: Those of a clip of `private`.

    Raises:
        ValueError: If the updates are another algorithm's, or groups are not those of the sums.

    Example:
        >>> import fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": jnp.array([[4.0, 5.0]])}, "params")
        >>> norms(fj.algorithms.fedavg(), updates, jnp.ones(2), groups=["total"])
        {'total': Array([5.], dtype=float32)}
    """
    values = stacked(algorithm, updates).values
    if "params" in values:
        values = values | {"params": jax.tree.map(jnp.subtract, values["params"], params)}
    each = _each(algorithm, values)
    leaves = jax.tree.leaves(each)

    def norm(places: list[int]) -> Array:
        own = [leaves[place] for place in places]
        return jax.vmap(lambda x: jnp.sqrt(tree.inner(x, x)))(own)

    return {name: norm(places) for name, places in _groups(each, tuple(groups)).items()}


# By itself, so that another noise does not compile the sums again.
@cached
def _bounded(algorithm: Algorithm, clip: tuple[tuple[str, float | None], ...]) -> Callable:
    """Make the `reduce` that clips every client."""
    bounds = dict(clip)

    def reduce(values: dict[str, Any], weights: Array) -> Clipped:
        each = _each(algorithm, values)
        groups = _groups(each, tuple(bounds))
        leaves, structure = jax.tree.flatten(each)
        # One whose update is not finite, or who is left out, counts with zeros.
        counts = (weights > 0) & tree.finite(leaves).all(0)
        leaves = tree.keep(counts, leaves)
        # What is in no group is a weight, which is public: everybody's is one.
        total = [jnp.full(leaf.shape[1:], len(weights), leaf.dtype) for leaf in leaves]
        for name, places in groups.items():
            own = [leaves[place] for place in places]
            if bounds[name] is not None:
                found, _ = optax.per_example_global_norm_clip(own, bounds[name])
            else:
                found = [jnp.zeros_like(leaf[0]) for leaf in own]
            for place, leaf in zip(places, found, strict=True):
                total[place] = leaf
        return Clipped(jax.tree.unflatten(structure, total), "params" in values)

    return reduce


def _each(algorithm: Algorithm, values: dict[str, Any]) -> Any:
    """Give what each client would add to the sums, leaves [K, ...], with a weight of one."""

    def alone(update: dict[str, Any]) -> Any:
        return algorithm.reduce(jax.tree.map(lambda leaf: leaf[None], update), jnp.ones(1))

    sums = jax.vmap(alone)(values)
    if isinstance(sums, Sketches):
        raise ValueError(
            "Factors are recovered from their sketches only if these are exact, and noise makes "
            "them anything; expected sums that noise moves a little, such as "
            "fedfisher(model, fisher=fisher.diagonal)."
        )
    return sums


def _groups(sums: Any, groups: Sequence[str]) -> dict[str, list[int]]:
    """Say which leaves belong to each group; weights to none."""

    def mark(x: Any) -> Any:
        public = jax.tree.map(lambda _: False, x)
        return public._replace(weight=True) if isinstance(x, _SUMS) else public

    public = jax.tree.leaves(jax.tree.map(mark, sums, is_leaf=lambda x: isinstance(x, _SUMS)))
    secret = {i: n for i, n in enumerate(tree.names(sums)) if not public[i]}

    def belongs(name: str, group: str) -> bool:
        return group == ALL or name == group or name.startswith(f"{group}/")

    found = {g: [i for i, name in secret.items() if belongs(name, g)] for g in groups}
    once = sorted(place for places in found.values() for place in places) == list(secret)
    if not all(found.values()) or not once:
        raise ValueError(
            f"The groups are {list(groups)}, but the sums {list(secret.values())}; expected "
            "beginnings of those names, such that each belongs to one group. A clip of None "
            "withholds what no method needs."
        )
    return found
