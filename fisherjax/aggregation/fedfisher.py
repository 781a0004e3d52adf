"""FedFisher: one model from the clients' models and Fisher information, in one round.

Jhunjhunwala, Wang, Joshi, FedFisher: leveraging Fisher information for one-shot federated learning,
AISTATS 2024, equations 6 to 8 and algorithm 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fisherjax import quadratic, solvers
from fisherjax.aggregation.base import Aggregator, fisher_summary, fisher_sums, no_state
from fisherjax.fisher import Operator, diagonal, full, kfac, true
from fisherjax.likelihoods import Likelihood
from fisherjax.typing import Apply, Array, Params


def fedfisher(
    apply: Apply,
    likelihood: Likelihood,
    *,
    fisher: Callable[..., Operator] = kfac,
    kind: Callable[..., Array] = true,
    damping: float | None = None,
    solver: solvers.Solver | None = None,
    batch_size: int = 64,
) -> Aggregator:
    """Make FedFisher, which minimises the clients' Fisher-weighted quadratic on the server.

        W = argmin sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i) + damping towards sum_i p_i W_i.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: What the outputs mean.
        fisher: The structure: `fisher.kfac`, `fisher.diagonal`, `fisher.full`, or a
            `functools.partial` of one, such as `partial(fisher.kfac, otherwise=fisher.diagonal)`.
        kind: `fisher.true`, `fisher.sampled` or `fisher.empirical`.
        damping: In units of each block's mean eigenvalue. None is 1 for K-FAC and 0 for the others.
        solver: Of the server's system; None is `solvers.conjugate_gradients()`.
        batch_size: Examples of a minibatch in the Fisher pass.

    Returns:
        The aggregator. Updates are {"params": W_i, "fisher": F_i}; diagonal and full Fishers add up
        over clients, Kronecker factors do not, so `reduce` is None for those.

    Raises:
        ValueError: If damping is negative or not finite.

    Example:
        >>> import jax, jax.numpy as jnp, fisherjax as fj
        >>> apply, gaussian = lambda params, x: x @ params["w"], fj.likelihoods.gaussian
        >>> method = fedfisher(apply, gaussian, fisher=fj.fisher.full)
        >>> w = [{"w": jnp.zeros((2, 1))}, {"w": jnp.ones((2, 1))}]
        >>> data = [fj.clients.examples(jnp.eye(2)[i : i + 1], jnp.zeros((1, 1))) for i in range(2)]
        >>> updates = [method.summarize(None, w[i], data[i], None) for i in range(2)]
        >>> print(fj.aggregation.merge(method, w[0], updates)[0]["w"].T)
        [[0. 1.]]

    Source: the paper above. Deviations: the paper has no damping and takes 2000 Adam steps with the
        step chosen by validation (`solvers.paper_adam`), weights clients equally in the text (by
        p_i in the code, as here), and compresses uploads to the size of FedAvg's.
    """
    structure = fisher.func if isinstance(fisher, partial) else fisher
    damping = (1.0 if structure is kfac else 0.0) if damping is None else damping
    if not isinstance(damping, jax.core.Tracer) and not 0 <= damping < float("inf"):
        raise ValueError(f"damping is {damping}; expected a finite number, zero or more.")
    solve = solvers.conjugate_gradients() if solver is None else solver
    adds_up = structure in (diagonal, full)

    def finish(received: Any, global_params: Params, state: Any) -> tuple[Params, Any, Any]:
        del global_params
        if adds_up:
            problem = quadratic.from_sums(received, damping)
        else:
            updates, weights = received
            problem = quadratic.quadratic(updates["fisher"], updates["params"], weights, damping)
        solution = solve(*problem)
        return solution.params, state, solution.info

    summarize = fisher_summary(apply, likelihood, fisher, kind, batch_size)
    return Aggregator(no_state, summarize, fisher_sums if adds_up else None, finish)
