"""Updates of models with Fisher information: how clients make them and the server merges them."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp

from fisherjax import _stacked, quadratic, solvers
from fisherjax._core import checks
from fisherjax._core.caching import by_value, name_of
from fisherjax._core.compiler import jit
from fisherjax.algorithms._layer_solves import solve_about_mean
from fisherjax.algorithms.base import FISHER_EXAMPLES, Link, WeightedSum
from fisherjax.fisher import Kronecker, Operator, automatic, kinds, true
from fisherjax.fisher.kinds import Kind
from fisherjax.solvers import Solver
from fisherjax.training import Trained
from fisherjax.typing import Array, Centre, Examples, Key, Model, Params, Scalar


def fisher_summary(
    model: Model,
    fisher: Callable[..., Operator],
    kind: Kind,
    batch_size: int,
    max_examples: int | None = FISHER_EXAMPLES,
    equal_traces: bool = False,
) -> tuple[Callable, str]:
    """Make `summarize` of {"params": W_i, "fisher": F_i}, and its kind; see `fedfisher`.

    For equal arguments it is equal, so that methods that merge the same updates share them.
    """
    # Checked here, before any client trains, rather than in the first Fisher pass after training.
    checks.model(model)
    checks.function("fisher", fisher, "fisher.kfac")
    checks.function("kind", kind, "fisher.true")
    kinds.check(kind, model.likelihood)
    checks.count("batch_size", batch_size)
    how: dict[str, Any] = {"kind": kind, "batch_size": batch_size}
    if max_examples is not None:
        how["max_examples"] = checks.count("max_examples", max_examples)
    checks.instance("equal_traces", equal_traces, bool, "True or False")
    name = f"{name_of(fisher)} Fisher"
    if equal_traces:
        fisher, name = by_value(partial(_at_mean_one, fisher)), f"{name} of one trace"
    # The automatic kind estimates the true Fisher, exactly or by random draws: updates of both can
    # be merged.
    kind_name = name_of(true if kind is automatic else kind)
    summarize = by_value(partial(_summarize, model, fisher, **how))
    return summarize, f"params, {kind_name} {name}"


def _at_mean_one(fisher: Callable[..., Operator], *given: Any, **how: Any) -> Operator:
    """Compute the Fisher information, divided by its mean eigenvalue; zero stays zero."""
    found = fisher(*given, **how)
    size = sum(x.size for x in jax.tree.leaves(found.diagonal()))
    mean = found.trace() / size
    # Its inverse is finite for any mean.
    return found.times(1 / jnp.maximum(mean, jnp.finfo(mean.dtype).tiny))


def _summarize(
    model: Model,
    fisher: Callable[..., Operator],
    key: Key,
    trained: Trained,
    examples: Examples,
    local: Any,
    **how: Any,
) -> tuple[dict[str, Any], Any]:
    # At the client's own model, around which the server's quadratic expands its loss.
    computed = fisher(model, trained.whole, examples, key=key, **how)
    return {"params": trained.params, "fisher": computed}, local


def kfac_direction(fisher: Kronecker, gradient: Params, damping: Scalar) -> Params:
    """Return -(F + lambda)^-1 g, lambda the damping in units of each block's mean eigenvalue.

    The inverse is `Kronecker.inverse`. A block without curvature has the direction zero.
    """
    means = fisher.block_means()
    shifts = {name: damping * mean for name, mean in means.items()}
    found = fisher.blocks(fisher.inverse(shifts).mv(gradient))
    # The inverse of a block without curvature is the identity.
    return fisher.restore({name: jnp.where(means[name] > 0, -x, 0) for name, x in found.items()})


def link_of(centre: Centre) -> Link:
    """Return the link of a method with this centre, after a check of its name."""
    checks.one_of("centre", centre, get_args(Centre))
    return Link(reads_start=centre != "mean")


def centre_point(centre: Centre, start: Params, plain: Callable[[], WeightedSum]) -> Params:
    """Return the point that damping pulls to, or None for the weighted mean.

    Args:
        centre: One of `Centre`.
        start: The model that clients started from.
        plain: Function that returns the sum of the models, in which each client with a weight
            counts once.
    """
    if centre == "mean":
        return None
    if centre == "start":
        return start
    total, count = plain()
    return jax.tree.map(lambda x, w: x + (1 - count).astype(x.dtype) * w, total, start)


def plain_sum(params: Params, weights: Array) -> WeightedSum:
    """Return the sum of stacked params over the clients with a weight, and the number of these."""
    present = (weights > 0).astype(weights.dtype)
    return WeightedSum(_stacked.plain_sum(params, present), present.sum())


def about_centre(problem: quadratic.Quadratic) -> quadratic.Quadratic:
    """Return a diagonal system with differences from its centre as unknowns, as `about_mean`.

    Each entry is exact up to its own rounding. A matrix would mix the rounding of all entries of
    whole weights into small differences.
    """
    rhs, init = _differences(problem.matvec, problem.rhs, problem.init)
    return problem._replace(rhs=rhs, init=init, origin=problem.init)


@jit
def _differences(matvec: Callable, rhs: Any, centre: Any) -> tuple[Any, Any]:
    product = matvec(centre)
    return jax.tree.map(jnp.subtract, rhs, product), jax.tree.map(jnp.zeros_like, centre)


def fisher_sums(updates: dict[str, Any], weights: Array, plain: bool = False) -> quadratic.Sums:
    """Sum stacked updates {"params": W_i, "fisher": F_i}; a `reduce` for operators that add up."""
    return quadratic.sums(updates["fisher"], updates["params"], weights, plain)


def solve_sums(solver: Solver | None, damping: Scalar = 0.0, centre: Centre = "mean") -> Callable:
    """Make the `aggregate` that solves the quadratic of `fisher_sums`, or of (updates, weights).

    The solver, by default conjugate gradients, starts from the centre, which damping pulls to; its
    report is returned.
    """
    solve = solvers.conjugate_gradients() if solver is None else solver
    checks.function("solver", solve, "solvers.conjugate_gradients()")

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        point = partial(centre_point, centre, params)
        if isinstance(received, quadratic.Sums):
            problem = quadratic.from_sums(received, damping, point(partial(_models, received)))
            solution = solve(about_centre(problem) if problem.is_diagonal else problem)
            return solution.params, state, solution.report(received.fisher.coverage)
        updates, weights = received
        fishers, models = updates["fisher"], updates["params"]
        pulled_to = point(partial(plain_sum, models, weights))
        solution = solve_about_mean(solve, fishers, models, weights, damping, pulled_to)
        return solution.params, state, solution.report(fishers.coverage)

    return aggregate


def _models(sums: quadratic.Sums) -> WeightedSum:
    assert sums.count is not None, "the sums were made without `plain`"
    return WeightedSum(sums.fisher.restore(sums.mean), sums.count)
