"""FedFish: clients count where their gradients are large, round by round.

Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for federated
learning at scale, TMLR 2024, algorithm 1.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import quadratic, solvers
from fisherjax.aggregation.base import Aggregator, fisher_sums, no_state
from fisherjax.clients import Examples
from fisherjax.fisher import Diagonal
from fisherjax.likelihoods import Likelihood
from fisherjax.local import add_squares, count_steps, shuffle, zero_squares
from fisherjax.typing import Apply, Array, Key, Params


def fedfish(
    apply: Apply,
    likelihood: Likelihood,
    *,
    batch_size: int,
    last_epoch: bool = False,
    average: bool = False,
    floor: float = 1e-12,
) -> Aggregator:
    r"""Make FedFish, the coordinate-wise mean of the models weighted by squared batch gradients.

        F_i = sum_b (gradient of the mean loss of minibatch b)^2,
        W_j = sum_i p_i F_ij W_ij / sum_i p_i F_ij   where the denominator is at least `floor`,

    and the weighted mean sum_i p_i W_ij elsewhere: parameters that no client used. In rounds with a
    server optimiser, `rounds.federated`, the pseudo-gradient is sum_i p_i F_i (W - W_i) over
    sum_i p_i F_i.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: What is minimised on the clients.
        batch_size: B, as in training; the last short minibatch counts as one.
        last_epoch: Take the squares that training added up during its last epoch, at no cost, while
            the weights still moved (`training.train(..., squared_gradients=True)`). Otherwise they
            are computed at the final weights, in a pass of its own over the shuffled data.
        average: Divide by the number of minibatches. The sum grows with the client's data, which
            p_i then counts twice, as in the paper.
        floor: Smallest weighted sum of squares that counts.

    Returns:
        The aggregator. Updates are {"params": W_i, "fisher": Diagonal}, and add up over clients.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import fisherjax as fj
        >>> apply, gaussian = lambda params, x: x @ params["w"], fj.likelihoods.gaussian
        >>> method = fedfish(apply, gaussian, batch_size=1)
        >>> data = fj.clients.examples(jnp.array([[1.0, 0.0], [2.0, 0.0]]), jnp.ones((2, 1)))
        >>> update = method.summarize(jax.random.key(0), {"w": jnp.zeros((2, 1))}, data, None)
        >>> print(update["fisher"].entries["w"].T)
        [[5. 0.]]

    Source: the paper above, which leaves open what happens where no client has any Fisher
        information; the last epoch's squares are its appendix A.5.1. Squares are kept in at least
        float32.
    """
    if not batch_size >= 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more.")
    solve = solvers.closed_form(floor)

    def gradient(params: Params, inputs: Array, targets: Array, valid: Array) -> Params:
        def loss(params: Params) -> Array:
            losses = likelihood.negative_log_likelihood(apply(params, inputs), targets)
            return jnp.where(valid, losses, 0).sum() / valid.sum()

        return jax.grad(loss)(params)

    def squares(key: Key, params: Params, examples: Examples) -> Params:
        size = jnp.count_nonzero(examples.weights)
        length = min(batch_size, examples.indices.shape[0])
        rows, position = shuffle(key, examples.indices, size), jnp.arange(length)

        def body(step: Array, total: Params) -> Params:
            count = jnp.minimum(size - step * length, length)
            batch = rows[step * length + position % count]
            data = examples.inputs[batch], examples.targets[batch], position < count
            return add_squares(total, gradient(params, *data))

        return jax.lax.fori_loop(0, count_steps(size, length), body, zero_squares(params))

    def summarize(
        key: Key, params: Params, examples: Examples, global_params: Params, *trained: Params
    ) -> Any:
        del global_params
        total = trained[0] if last_epoch else squares(key, params, examples)
        if average:
            steps = count_steps(jnp.count_nonzero(examples.weights), batch_size)
            total = jax.tree.map(lambda x: x / jnp.maximum(steps, 1).astype(x.dtype), total)
        return {"params": params, "fisher": Diagonal(total)}

    def finish(sums: quadratic.Sums, global_params: Params, state: Any) -> tuple[Params, Any, Any]:
        del global_params
        solution = solve(*quadratic.from_sums(sums, damping=0.0))
        return solution.params, state, solution.info

    return Aggregator(no_state, summarize, fisher_sums, finish, squared_gradients=last_epoch)
