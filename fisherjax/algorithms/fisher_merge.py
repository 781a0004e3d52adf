"""Fisher merging: the coordinate-wise Fisher-weighted mean.

Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022, equation 5.
"""

from fisherjax import solvers
from fisherjax._core.caching import cached
from fisherjax.algorithms._fisher_updates import fisher_summary, fisher_sums, solve_sums
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm
from fisherjax.fisher import automatic, diagonal
from fisherjax.fisher.kinds import Kind
from fisherjax.solvers import Info
from fisherjax.typing import Model, Scalar


@cached
def fisher_merge(
    model: Model,
    *,
    kind: Kind = automatic,
    floor: Scalar = 1e-6,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[Info]:
    """Make Fisher merging, the mean of the clients' params weighted by their diagonal Fishers.

        W_j = sum_i p_i F_ij W_ij / sum_i p_i F_ij   where the denominator exceeds a floor,

    and the weighted mean sum_i p_i W_ij elsewhere.

    Args:
        model: The network and the likelihood of its outputs.
        kind: `fisher.true`; `fisher.curvature_propagation`, as accurate in one backward pass;
            `fisher.sampled`; or `fisher.empirical`. The default, `fisher.automatic`, is
            `fisher.true`, or curvature propagation if outputs are sequences.
        floor: Floor of the denominator, in units of its mean over a leaf.
        batch_size: Minibatch size of the Fisher pass.
        max_examples: Largest number of a client's examples in its Fisher pass, drawn anew by the
            key of `summarize`; None uses all.

    Returns:
        The algorithm. Updates are {"params": W_i, "fisher": Diagonal}, of which the server
        needs only sums.

    Raises:
        ValueError: If the floor is negative.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> method = fisher_merge(fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian))
        >>> fishers = fj.fisher.Diagonal(jnp.array([[1.0], [3.0]]))
        >>> values = {"params": jnp.array([[0.0], [4.0]]), "fisher": fishers}
        >>> updates = fj.algorithms.Update(values, method.kind)
        >>> print(fj.merging.merge(method, jnp.zeros(1), updates)[0])
        [3.]

    Source: the paper above, as run by Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024: weights
        p_i, Fishers not normalised, the mean where the denominator is small. Deviations: uploads
        are not quantised, and the floor is relative, where theirs of 1e-6 is absolute. On their
        MNIST clients, floors from 0 to 0.01 make no difference.
    """
    summarize, sent = fisher_summary(model, diagonal, kind, batch_size, max_examples)
    # Without damping, as in the paper: below the floor the solver keeps its start, the mean.
    aggregate = solve_sums(solvers.closed_form(floor))
    return Algorithm(summarize, aggregate, fisher_sums, kind=sent, model=model)
