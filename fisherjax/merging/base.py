"""The server's half of a round, and what can be wrong with what comes out of it."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import checks, clients, tree
from fisherjax.algorithms.base import Algorithm, as_sent, keeps_shapes
from fisherjax.compiler import jit
from fisherjax.fisher import passes
from fisherjax.solvers import Info, Status
from fisherjax.typing import Array, Key, Params
from fisherjax.updates import suspect


def decoded(algorithm: Algorithm, values: Any, params: Params) -> Any:
    """Undo what a wrapper did on the clients, such as compression."""
    return values if algorithm.decode is as_sent else _decode(algorithm.decode, values, params)


@partial(jit, static_argnums=0)
def _decode(decode: Callable[[Any, Params], Any], values: Any, params: Params) -> Any:
    return decode(values, params)


# Compiled once for an algorithm: factories give the same function for equal arguments.
@partial(jit, static_argnums=0)
def reduced(reduce: Callable[[Any, Array], Any], values: Any, weights: Array) -> Any:
    """Add up stacked updates."""
    return reduce(values, weights)


def finished(
    algorithm: Algorithm,
    received: Any,
    params: Params,
    state: Any,
    cohort: Array,
    key: Key,
    blame: tuple[Any, Array] | None = None,
) -> tuple[Params, Any, Any]:
    """Play the server's half of a round; `blame` are values and weights, to name a client by.

    Refuses a model that does not fit or is not finite, and warns of blocks that were not solved.
    """
    state = algorithm.link.init(params, len(cohort)) if state is None else state
    key = jax.random.fold_in(key, clients.AGGREGATE)
    merged, state, info = algorithm.aggregate(key, received, params, state, cohort)
    if keeps_shapes(algorithm):
        _check_shapes(merged, params)
    # Sums and solutions are in at least float32: rounded to the model's dtype once, here.
    merged = jax.tree.map(lambda leaf, start: leaf.astype(jnp.result_type(start)), merged, params)
    _check_finite(merged, *(blame or ()))
    _warn(algorithm, params, info)
    return merged, state, info


def server_key(algorithm: Algorithm, key: Key | None) -> Key:
    """Give a key where none is needed; refuse none where noise is drawn."""
    if key is None and algorithm.link.draws:
        raise ValueError(
            "key is None, but this algorithm adds noise that nobody may know; expected a secret "
            "key, another one for each merge."
        )
    key = jax.random.key(0) if key is None else key
    checks.key(key)
    return key


_finite_leaves = jit(tree.finite_leaves)


def _check_finite(merged: Params, values: Any = None, weights: Array | None = None) -> None:
    """Refuse a merged model that is not finite; name the leaf, and who is to blame if at hand."""
    if checks.is_traced(merged):
        return
    finite = np.asarray(_finite_leaves(merged))
    if not finite.all():
        leaf, blame = tree.names(merged)[finite.argmin()], suspect(values, weights)
        raise ValueError(f"Leaf '{leaf}' of the merged model is not finite. {blame}")


def _warn(algorithm: Algorithm, params: Params, info: Any) -> None:
    """Say which blocks a solver left unsolved, but for leaves that nobody trained."""
    if not isinstance(info, Info) or checks.is_traced(info):
        return
    model = algorithm.model
    still = () if model is None else passes.untrained(model, params)
    status = tree.by_name(jax.tree.map(int, info.status))
    for ending, meaning in _UNSOLVED.items():
        found = [name for name, status in status.items() if status == ending]
        # They have no curvature, as they should.
        names = [name for name in found if name not in still]
        if names:
            warnings.warn(f"Blocks {names}: {meaning}", stacklevel=4)


_UNSOLVED = {
    Status.NO_CURVATURE: (
        "no client has any curvature, and they keep the weighted mean. Models that are certain of "
        "all their examples have none, nor have leaves under fallback=fisher.zero."
    ),
    Status.BROKE_DOWN: (
        "the solver met a direction without curvature before it converged; more damping makes the "
        "system definite."
    ),
    Status.OUT_OF_ITERATIONS: (
        "the solver took all its steps and its residual, which the returned info has, is above the "
        "tolerance; allow more iterations or more damping."
    ),
}


def _check_shapes(merged: Params, params: Params) -> None:
    same = jax.tree.structure(merged) == jax.tree.structure(params)
    if not same or tree.shapes(merged) != tree.shapes(params):
        raise ValueError(
            f"The merged model has leaves of shapes {tree.shapes(merged)}, but params has "
            f"{tree.shapes(params)}. Pass the params of the network that the clients trained."
        )
