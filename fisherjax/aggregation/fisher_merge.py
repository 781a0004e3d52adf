"""Fisher merging: the coordinate-wise Fisher-weighted mean.

Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022, equation 5.
"""

from collections.abc import Callable
from typing import Any

from fisherjax import quadratic, solvers
from fisherjax.aggregation.base import Aggregator, fisher_summary, fisher_sums, no_state
from fisherjax.fisher import diagonal, true
from fisherjax.likelihoods import Likelihood
from fisherjax.typing import Apply, Array, Params


def fisher_merge(
    apply: Apply,
    likelihood: Likelihood,
    *,
    kind: Callable[..., Array] = true,
    floor: float = 1e-6,
    batch_size: int = 64,
) -> Aggregator:
    """Make Fisher merging, the mean of the clients' params weighted by their diagonal Fishers.

        W_j = sum_i p_i F_ij W_ij / sum_i p_i F_ij   where the denominator is at least `floor`,

    and the weighted mean sum_i p_i W_ij elsewhere.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: What the outputs mean.
        kind: `fisher.true`, `fisher.sampled` or `fisher.empirical`.
        floor: Smallest summed Fisher information, per example, that counts.
        batch_size: Examples of a minibatch in the Fisher pass.

    Returns:
        The aggregator. Updates are {"params": W_i, "fisher": Diagonal}, and add up over clients.

    Raises:
        ValueError: If the floor is negative.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> method = fisher_merge(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> fishers = fj.fisher.Diagonal({"w": jnp.array([[1.0], [3.0]])})
        >>> updates = {"params": {"w": jnp.array([[0.0], [4.0]])}, "fisher": fishers}
        >>> print(fj.aggregation.merge(method, {"w": jnp.zeros(1)}, updates)[0]["w"])
        [3.]

    Source: the paper above, as run by Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024: weights
        p_i, no normalisation of the Fishers, the mean as fallback. Their quantisation of uploads is
        not here.
    """
    solve = solvers.closed_form(floor)

    def finish(sums: quadratic.Sums, global_params: Params, state: Any) -> tuple[Params, Any, Any]:
        del global_params
        solution = solve(*quadratic.from_sums(sums, damping=0.0))
        return solution.params, state, solution.info

    summarize = fisher_summary(apply, likelihood, diagonal, kind, batch_size)
    return Aggregator(no_state, summarize, fisher_sums, finish)
