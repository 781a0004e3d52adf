"""Sums over clients that hide every client: bounded terms, noise, and what is made of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import quadratic, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._upload_checks import stacked
from fisherjax.algorithms.base import (
    Algorithm,
    Update,
    WeightedSum,
    as_sent,
    check_algorithm,
)
from fisherjax.algorithms.wrappers.sketched import Sketches
from fisherjax.privacy._repair import repaired
from fisherjax.privacy.accounting import Ledger, noisy
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params

ALL = "all"
"""The one group of a clip that is a number."""

_SUMS = (WeightedSum, quadratic.Sums)


class State(NamedTuple):
    """What the wrapped algorithm keeps, and how many rounds were released."""

    algorithm: Any
    rounds: Array


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


def private(
    algorithm: Algorithm,
    *,
    clip: float | Mapping[str, float | None],
    noise_multiplier: float | Mapping[str, float],
    damping: float = 2.0,
) -> Algorithm[Ledger]:
    """Clip what each client adds to the sums, and add noise to them: client-level privacy.

        S = sum_i min(1, C / |c_i|) c_i + sigma C N(0, I)    for each group of the sums,

    with c_i what client i alone would give, all weights one, and its params as differences from
    what it started from. The number of clients is public, and is what sums are divided by: who
    diverged, or has no examples, adds zeros and is counted. The server is trusted with the sums,
    and draws the noise by the key of the merge, which has to be secret and used once. What the
    server makes of noisy sums costs nothing more: a noisy Fisher, or second moment, becomes the
    nearest that is positive semi-definite and is damped by the size of its own noise, which pulls
    to the clients' noisy mean.

    Args:
        algorithm: One with a `reduce`, such as fedavg,
            fedfisher(model, fisher=fisher.diagonal) or analytic_head(model, ridge=0.01).
        clip: C, a number for all sums together; or by group, a beginning of the names that
            `tree.names` gives the leaves of the sums: {"total": C} for averages, "fisher",
            "product" and "mean" for Fishers, "total/inputs" and so on for heads. None withholds a
            group: it is zero, and costs nothing.
        noise_multiplier: sigma, a number for each group or the same for all; 0 is not private.
        damping: Of a noisy Fisher or second moment, in units of the spectral norm of its noise:
            below it there is nothing but noise. That is sqrt(2 a) deviations for a matrix [a, a],
            and sqrt(2 log d) for a diagonal of d entries.

    Returns:
        The algorithm. Updates are those of the wrapped one, params as differences; it reports a
        `Ledger`.

    Raises:
        ValueError: If a clip is not positive, a multiplier negative, or the algorithm has no
            `reduce` or a wrapper's `decode`; on merge, if groups are not those of the sums; on
            summarize, of params without a start.
        TypeError: If an argument has the wrong kind.

    Example:
        >>> import fisherjax as fj
        >>> method = private(fj.algorithms.fedavg(), clip=1.0, noise_multiplier=0.0)
        >>> updates = fj.algorithms.Update({"params": jnp.array([[0.5], [9.0]])}, method.kind)
        >>> params, key = jnp.array([2.0]), jax.random.key(0)
        >>> merged, _, ledger = fj.merging.merge(method, params, updates, key=key)
        >>> print(merged, int(ledger.rounds))
        [2.75] 1

    Source: McMahan, Ramage, Talwar, Zhang, Learning differentially private recurrent language
        models, ICLR 2018, algorithm 1 with the fixed denominator; clients have equal weights, as
        their numbers of examples are private. Damping by the noise: Wang, Revisiting differentially
        private linear regression, UAI 2018.
    """
    check_algorithm(algorithm)
    if algorithm.reduce is None or algorithm.link.personal:
        raise ValueError(
            "This method needs every client's update (its reduce is None), and only sums over "
            "clients can be made private; expected one that adds up, such as fedavg, fisher_merge "
            "or fedfisher(model, fisher=fisher.diagonal)."
        )
    if algorithm.decode is not as_sent:
        raise ValueError(
            "This method's updates are encoded on the clients; expected what is to be summed. Wrap "
            "the other way round: compress the private algorithm."
        )
    clips = clip if isinstance(clip, Mapping) else {ALL: clip}
    for name, bound in clips.items():
        if bound is not None:
            checks.positive(f"clip of '{name}'", bound)
    noisy = [name for name, bound in clips.items() if bound is not None]
    if not noisy:
        raise ValueError(f"clip is {clip!r}; expected a bound for at least one group.")
    is_one = not isinstance(noise_multiplier, Mapping)
    multipliers = dict.fromkeys(noisy, noise_multiplier) if is_one else noise_multiplier
    if set(multipliers) != set(noisy):
        raise ValueError(
            f"noise_multiplier has groups {sorted(multipliers)}; expected those that are clipped, "
            f"{sorted(noisy)}."
        )
    for name, sigma in multipliers.items():
        checks.number(f"noise_multiplier of '{name}'", sigma)
    checks.number("damping", damping)
    return _private(algorithm, tuple(clips.items()), tuple(multipliers.items()), damping)


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
            own, bound = [leaves[place] for place in places], bounds[name]
            if bound is not None:
                found, _ = optax.per_example_global_norm_clip(own, bound)
            else:
                found = [jnp.zeros_like(leaf[0]) for leaf in own]
            for place, leaf in zip(places, jax.tree.leaves(found), strict=True):
                total[place] = leaf
        return Clipped(jax.tree.unflatten(structure, total), "params" in values)

    return reduce


@cached
def _private(
    algorithm: Algorithm,
    clip: tuple[tuple[str, float | None], ...],
    noise_multiplier: tuple[tuple[str, float], ...],
    damping: float,
) -> Algorithm:
    clips, multipliers = dict(clip), dict(noise_multiplier)
    sensitivity = {name: bound for name, bound in clips.items() if bound is not None}
    deviation = {name: multipliers[name] * bound for name, bound in sensitivity.items()}

    def init(params: Params, num_clients: int) -> State:
        return State(algorithm.link.init(params, num_clients), jnp.asarray(0, jnp.int32))

    def broadcast(params: Params, state: State, place: Array | None) -> Any:
        return algorithm.link.broadcast(params, state.algorithm, place)

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        values, kept = algorithm.summarize(key, trained, examples, private)
        if "params" in values:
            values = values | {"params": _difference(values["params"], trained.start)}
        return values, kept

    def aggregate(
        key: Key, received: Clipped, params: Params, state: State, cohort: Array
    ) -> tuple[Params, State, Ledger]:
        own, key = jax.random.split(key)
        leaves, structure = jax.tree.flatten(received.sums)
        deviations = [0.0] * len(leaves)
        for name, places in _groups(received.sums, tuple(clips)).items():
            for place in places:
                deviations[place] = deviation.get(name, 0.0)
        sums = jax.tree.unflatten(structure, noisy(own, leaves, deviations))
        sums = repaired(sums, jax.tree.unflatten(structure, deviations), damping)
        # Differences are merged as models near zero: what is merged moves with all of them.
        start = jax.tree.map(jnp.zeros_like, params) if received.centred else params
        merged, kept, info = algorithm.aggregate(key, sums, start, state.algorithm, cohort)
        if received.centred:
            merged = jax.tree.map(jnp.add, params, merged)
        ledger = Ledger(state.rounds + 1, sensitivity, deviation, multipliers, info)
        return merged, State(kept, state.rounds + 1), ledger

    return algorithm._replace(
        summarize=summarize,
        reduce=_bounded(algorithm, clip),
        aggregate=aggregate,
        kind=f"{algorithm.kind}, to be clipped",
        link=algorithm.link._replace(init=init, broadcast=broadcast, draws=True),
    )


def _difference(params: Params, start: Params | None) -> Params:
    if jax.tree.structure(params) != jax.tree.structure(start):
        raise ValueError(
            "Clients are clipped by how far they went from what they started from, and that is not "
            "known, or of other leaves than their update. Pass what training.train returned, or "
            "training.Trained(stacked params, start); keep_local goes around private."
        )
    return jax.tree.map(jnp.subtract, params, start)


def _each(algorithm: Algorithm, values: dict[str, Any]) -> Any:
    """Give what each client would add to the sums, leaves [K, ...], with a weight of one."""
    reduce = algorithm.reduce
    if reduce is None:
        raise ValueError(
            "This method needs each client's update (its reduce is None), so that there are no "
            "sums; expected one with a reduce, such as algorithms.fedavg()."
        )

    def alone(update: dict[str, Any]) -> Any:
        return reduce(jax.tree.map(lambda leaf: leaf[None], update), jnp.ones(1))

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
