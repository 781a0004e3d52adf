"""Updates of models with Fisher information: how clients make them and the server merges them."""

from collections.abc import Callable
from typing import Any

from fisherjax import quadratic
from fisherjax._core import checks
from fisherjax._core.caching import name_of
from fisherjax.algorithms.base import ENOUGH
from fisherjax.fisher import Operator, automatic, true
from fisherjax.fisher.kinds import Kind
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


def fisher_summary(
    model: Model,
    fisher: Callable[..., Operator],
    kind: Kind,
    batch_size: int,
    max_examples: int | None = ENOUGH,
) -> tuple[Callable, str]:
    """Make `summarize` of {"params": W_i, "fisher": F_i} and its kind; arguments as `fedfisher`."""
    # Here, before any client trains, and not in the first Fisher pass after it.
    checks.model(model)
    checks.function("fisher", fisher, "fisher.kfac")
    checks.function("kind", kind, "fisher.true")
    checks.count("batch_size", batch_size)
    how: dict[str, Any] = {"kind": kind, "batch_size": batch_size}
    if max_examples is not None:
        how["max_examples"] = checks.count("max_examples", max_examples)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        params = trained.params
        # At the client's own model, around which the server's quadratic expands its loss.
        own = fisher(model, trained.whole, examples, key=key, **how)
        return {"params": params, "fisher": own}, local

    # Exact or drawn, the automatic kind is of the true Fisher: updates of both merge.
    named = name_of(true if kind is automatic else kind)
    return summarize, f"params, {named} {name_of(fisher)} Fisher"


def fisher_sums(updates: dict[str, Any], weights: Array) -> quadratic.Sums:
    """Add up stacked updates {"params": W_i, "fisher": F_i}, where operators add up: a `reduce`."""
    return quadratic.sums(updates["fisher"], updates["params"], weights)


def solve_sums(solve: Callable[[quadratic.Quadratic], Any], damping: float = 0.0) -> Callable:
    """Make the `aggregate` that solves the quadratic of `fisher_sums`, or of (updates, weights).

    It starts from the clients' mean, not from the global model, and reports what the solver does.
    """

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, params, cohort
        if isinstance(received, quadratic.Sums):
            solution = solve(quadratic.from_sums(received, damping))
            return solution.params, state, solution.info
        updates, weights = received
        fishers = updates["fisher"]
        solution = solve(quadratic.quadratic(fishers, updates["params"], weights, damping))
        return solution.params, state, solution.report(fishers.coverage)

    return aggregate
