"""The server's half of a round, the same for merges, rounds, streams, sums and files.

Its steps are:

1. decode the updates and leave out clients that diverged,
2. scale the weights to sum one,
3. merge the trained leaves by the method,
4. average the running statistics,
5. convert to the dtypes of params, and check the merged model.

An update names the leaves that are not trained. Statistics become their weighted mean, whatever the
method; frozen leaves stay as they are, bit for bit.
"""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import clients, leaves, tree
from fisherjax._core import checks, secrecy
from fisherjax._core.compiler import jit
from fisherjax._finite_uploads import Diverged, finite_leaves, probable_cause, screen
from fisherjax._upload_checks import check_any_left, check_precision
from fisherjax.algorithms.base import Algorithm, Update, as_sent, keeps_shapes
from fisherjax.clients import shares
from fisherjax.leaves import Leaves, join
from fisherjax.merging._running_statistics import average_statistics, compiled
from fisherjax.solvers import Info, Status
from fisherjax.typing import Array, Key, Params


class Merged(NamedTuple):
    """Result of the server's half.

    Attributes:
        params: Merged model, all leaves.
        state: What the algorithm keeps for the next merge.
        info: What the algorithm reports.
        weights: [K] weights of the clients with sum one; zero for those that were left out.
        diverged: Clients that were left out, and the leaf that is not finite.
        values: Decoded values of the updates, with zeros for clients that were left out.
    """

    params: Params
    state: Any
    info: Any
    weights: Array
    diverged: Diverged
    values: Any


def server_half(
    algorithm: Algorithm,
    params: Params,
    update: Update,
    weights: Array,
    *,
    state: Any,
    cohort: Array,
    key: Key,
    on_nonfinite: str,
    others: Any = None,
) -> Merged:
    """Run the server's half of a round for stacked updates [K, ...] and weights [K] of any sum.

    Under tracing there are neither errors nor warnings that depend on values.
    """
    parts = split_params(params, update)
    found = decode_and_screen(algorithm, parts, update, weights, on_nonfinite, others)
    values, statistics = found.values
    check_any_left(found.weights)
    # If no client was left out, the weights are the same object, and keep their bits.
    weights = weights if found.weights is weights else shares(found.weights)
    received: Any = (values, weights)
    if algorithm.reduce is not None:
        received = compiled(algorithm.reduce, values, weights)
    mean = average_statistics(statistics, weights)
    merged = finish(algorithm, received, mean, parts, state, cohort, key, (values, weights))
    return Merged(*merged, weights, found.diverged, values)


def split_params(params: Params, update: Update, before: int = 0) -> Leaves:
    """Split params into trained leaves, statistics and frozen leaves.

    The stacked update names the leaves that are not trained; `before` is the number of clients in
    earlier updates.

    Raises:
        ValueError: If params have no leaf of a name, or running variances of several clients would
            be averaged.
    """
    if before + max((len(x) for x in update.statistics.values()), default=0) > 1:
        leaves.check_moments(tuple(update.statistics))
    return leaves.split_by_name(params, tuple(update.statistics), update.frozen)


def decode_and_screen(
    algorithm: Algorithm,
    parts: Leaves,
    update: Update,
    weights: Array,
    on_nonfinite: str,
    others: Any = None,
    first: int = 0,
) -> Any:
    """Decode an update and screen it, for `Screened` values that are (values, statistics)."""
    check_precision("params", parts.trained)
    values, packed = update.values, ()
    if algorithm.decode is not as_sent:
        values, packed = compiled(algorithm.decode, values, parts.trained), values
        # Under tracing, codes are screened too, as decoding may hide that they are not finite.
        packed = packed if checks.is_traced(packed) else ()
    every = values | {"statistics": update.statistics} if update.statistics else values
    check_precision("the updates", every)
    others = {"kept": others, "sent": packed}
    found = screen(every, weights, on_nonfinite, first=first, others=others)
    values = {name: found.values[name] for name in values}
    return found._replace(values=(values, found.values.get("statistics", {})))


def finish(
    algorithm: Algorithm,
    received: Any,
    statistics: dict[str, Array],
    parts: Leaves,
    state: Any,
    cohort: Array,
    key: Key,
    blame: tuple[Any, Array] | None = None,
) -> tuple[Params, Any, Any]:
    """Merge the trained leaves, join them with mean statistics and frozen leaves, and check.

    Args:
        algorithm: Method that merges.
        received: Result of `reduce`, or (values, weights) for a method without it.
        statistics: Mean running statistics by name.
        parts: Params that clients started from, split by `split_params`.
        state: What the algorithm kept, or None.
        cohort: [K] places of the clients.
        key: Random key of the merge.
        blame: Values and weights, with which an error can name a client.

    Returns:
        The merged params, the algorithm's state and its info. Blocks that a solver did not solve
        cause a warning.

    Raises:
        ValueError: If the merged model does not fit params or is not finite.
    """
    key = _aggregation_key(key)
    trained = parts.trained
    state = algorithm.link.init(trained, len(cohort)) if state is None else state
    given = join(*parts) if algorithm.link.whole else trained
    merged, state, info = algorithm.aggregate(key, received, given, state, cohort)
    if not keeps_shapes(algorithm):
        _check_finite(merged, *(blame or ()))
        return merged, state, info
    _check_shapes(merged, given)
    averaged = leaves.replace(parts.statistics, statistics)
    # Frozen leaves stay the same, even if a method that runs the network changed its copy. Trained
    # leaves are joined by name, because values from files have another tree structure than params.
    whole = join(leaves.replace(trained, tree.by_name(merged)), averaged, parts.frozen)
    # Sums and solutions have at least float32. They are rounded to the model's dtype once, here.
    whole = jax.tree.map(
        lambda leaf, start: jnp.asarray(leaf, jnp.result_type(start)), whole, join(*parts)
    )
    _check_finite(whole, *(blame or ()))
    _warn(info)
    return whole, state, info


@jit
def _aggregation_key(key: Key) -> Key:
    return jax.random.fold_in(key, clients.AGGREGATE)


def server_key(algorithm: Algorithm, key: Key | None) -> Key:
    """Return `key`, or a fixed key for algorithms that draw no noise.

    A key of noise that a number made causes a warning.

    Raises:
        ValueError: If the algorithm draws noise and no key was given.
    """
    if key is None and algorithm.link.draws:
        raise ValueError(
            "key is None, but this algorithm adds noise that must stay secret; expected a secret "
            "key, another one for each merge, such as privacy.system_key()."
        )
    key = jax.random.key(0) if key is None else key
    (secrecy.secret_key if algorithm.link.draws else checks.key)(key)
    return key


def _check_finite(merged: Params, values: Any = None, weights: Array | None = None) -> None:
    """Raise ValueError for a merged model that is not finite, with the leaf and probable cause."""
    if checks.is_traced(merged):
        return
    finite = finite_leaves(merged)
    if not finite.all():
        leaf, cause = tree.names(merged)[finite.argmin()], probable_cause(values, weights)
        raise ValueError(f"Leaf '{leaf}' of the merged model is not finite. {cause}")


def _warn(info: Any) -> None:
    """Warn of blocks that a solver left unsolved."""
    if not isinstance(info, Info) or checks.is_traced(info):
        return
    status = tree.by_name(jax.tree.map(int, info.status))
    for ending, meaning in _UNSOLVED.items():
        names = [name for name, status in status.items() if status == ending]
        if names:
            warnings.warn(f"Blocks {names}: {meaning}", stacklevel=5)


_UNSOLVED = {
    Status.NO_CURVATURE: (
        "no client has any curvature, and they keep the centre, by default the weighted mean. The "
        "Fisher information is zero if a model predicts all examples with certainty, and under "
        "fallback=fisher.zero."
    ),
    Status.BROKE_DOWN: (
        "the solver found a direction without curvature before it converged; use more damping, "
        "which makes the system definite."
    ),
    Status.OUT_OF_ITERATIONS: (
        "the solver took all its steps, and the residual, which is in the returned info, is above "
        "the tolerance; allow more iterations or use more damping."
    ),
}


def _check_shapes(merged: Params, params: Params) -> None:
    if tree.shapes(merged) != tree.shapes(params):
        raise ValueError(
            f"The merged model has leaves of shapes {tree.shapes(merged)}, but params has "
            f"{tree.shapes(params)}. Pass the params of the network that the clients trained."
        )
