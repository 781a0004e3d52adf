"""Updates of models with Fisher information: how clients make them and the server merges them."""

from collections.abc import Callable
from typing import Any

from fisherjax import quadratic
from fisherjax._core import checks
from fisherjax._core.caching import name_of
from fisherjax.algorithms.base import FISHER_EXAMPLES
from fisherjax.fisher import Operator, automatic, kinds, true
from fisherjax.fisher.kinds import Kind
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params, Scalar


def fisher_summary(
    model: Model,
    fisher: Callable[..., Operator],
    kind: Kind,
    batch_size: int,
    max_examples: int | None = FISHER_EXAMPLES,
) -> tuple[Callable, str]:
    """Make `summarize` of {"params": W_i, "fisher": F_i}, and its kind; see `fedfisher`."""
    # Checked here, before any client trains, rather than in the first Fisher pass after training.
    checks.model(model)
    checks.function("fisher", fisher, "fisher.kfac")
    checks.function("kind", kind, "fisher.true")
    kinds.check(kind, model.likelihood)
    checks.count("batch_size", batch_size)
    how: dict[str, Any] = {"kind": kind, "batch_size": batch_size}
    if max_examples is not None:
        how["max_examples"] = checks.count("max_examples", max_examples)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        params = trained.params
        # At the client's own model, around which the server's quadratic expands its loss.
        computed = fisher(model, trained.whole, examples, key=key, **how)
        return {"params": params, "fisher": computed}, local

    # The automatic kind estimates the true Fisher, exactly or by random draws: updates of both can
    # be merged.
    kind_name = name_of(true if kind is automatic else kind)
    return summarize, f"params, {kind_name} {name_of(fisher)} Fisher"


def fisher_sums(updates: dict[str, Any], weights: Array) -> quadratic.Sums:
    """Sum stacked updates {"params": W_i, "fisher": F_i}; a `reduce` for operators that add up."""
    return quadratic.sums(updates["fisher"], updates["params"], weights)


def solve_sums(solve: Callable[[quadratic.Quadratic], Any], damping: Scalar = 0.0) -> Callable:
    """Make the `aggregate` that solves the quadratic of `fisher_sums`, or of (updates, weights).

    The solver starts from the clients' mean, not from the global model; its report is returned.
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
