"""FedDyn: clients add linear terms to their losses, so that their minima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated learning based on dynamic
regularization, ICLR 2021, algorithm 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Link, WeightedSum, weighted_sum
from fisherjax.local_update import penalised
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params, Scalar


class Dynamics(NamedTuple):
    """The server's state of FedDyn.

    Attributes:
        gradient: h, the mean of g_i over all clients with the sign of the paper, shaped as params.
        num_clients: M, the number of all clients.
    """

    gradient: Params
    num_clients: Array


@cached
def feddyn(alpha: Scalar = 0.01) -> Algorithm[tuple[()]]:
    r"""Make FedDyn, which adds to each client's loss a linear term with a gradient g_i.

        client i minimises  loss(w) - <g_i, w> + alpha / 2 ||w - W||^2  from W, which gives W_i,
        g_i <- g_i - alpha (W_i - W),
        h <- h - (alpha / M) sum_{i in cohort} (W_i - W),
        W <- mean_{i in cohort} W_i - h / alpha,

    where g_i, which the client keeps, and h start at zero. At a fixed point of the rounds, g_i is
    the gradient of client i at W, and the g_i sum to zero: W is a stationary point of the mean loss
    of all M clients, however many steps clients take. If all clients participate in the first
    round, it moves W twice as far as averaging would, so that a single merge is no average.

    Args:
        alpha: Weight of the proximal term, above zero (default 0.01). The server moves by the sum
            of the gradients over alpha: a smaller value is faster, but less stable.

    Returns:
        The algorithm. Its `optimizer` adds -g_i + alpha (w - W) to the gradients before the user's
        optimiser; the loss that training returns includes neither term. g_i is the local state.
        Updates are {"params": W_i}, of which the server needs only sums.

    Raises:
        ValueError: If alpha is not positive; on summarize, if the initial model of a client is
            unknown.

    Example:
        >>> optimizer, w = feddyn(alpha=0.5).optimizer(optax.sgd(1.0)), jnp.array(3.0)
        >>> arguments = {"start": jnp.array(1.0), "extras": jnp.array(0.25)}
        >>> step, _ = optimizer.update(0 * w, optimizer.init(w), w, **arguments)
        >>> print(step)
        -0.75

    Source: the paper above. As in its algorithm, all clients count equally, whatever their numbers
        of examples, because a fixed point needs the plain mean of g_i; a weight only says whether a
        client participates. Deviations: clients without examples, or that diverged, send nothing,
        but count among the M; clients minimise by the user's optimiser for a number of epochs that
        the user chooses. The authors' code also divides alpha by the client's share of examples.
    """
    checks.positive("alpha", alpha)

    def penalty(params: Params, *, start: Params, extras: Any) -> Array:
        # A single round has no stored gradients: all g_i are zero.
        gradient = extras if jax.tree.leaves(extras) else optax.tree.zeros_like(params)

        def leaf(w: Array, centre: Array, g: Array) -> Array:
            return (alpha / 2 * jnp.square(w - centre) - g * w).sum()

        return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(leaf, params, start, gradient))))

    def init(params: Params, num_clients: int) -> Dynamics:
        return Dynamics(optax.tree.zeros_like(params), jnp.asarray(num_clients, jnp.int32))

    def receive(start: Params, local: Params) -> tuple[Params, Params]:
        return start, local

    def summarize(key: Key, trained: Trained, examples: Examples, local: Params) -> tuple:
        del key, examples
        if trained.start is None:
            raise ValueError(
                "FedDyn needs the model that each client started from: train them with "
                "training.train(..., optimizer=algorithm.optimizer(base))."
            )

        def moved(g: Array, end: Array, start: Array) -> Array:
            return g - jnp.asarray(alpha, g.dtype) * (end - start)

        return {"params": trained.params}, jax.tree.map(moved, local, trained.params, trained.start)

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        # Each client counts once, however many examples it has; a client left out has weight zero.
        return weighted_sum(updates["params"], (weights > 0).astype(weights.dtype))

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Dynamics, cohort: Array):
        del key, cohort
        mean = sums.mean()

        def drifted(h: Array, end: Array, start: Array) -> Array:
            share = (sums.weight / state.num_clients).astype(end.dtype)
            return h - alpha * share * (end - start)

        gradient = jax.tree.map(drifted, state.gradient, mean, params)
        merged = jax.tree.map(lambda end, h: end - h / alpha, mean, gradient)
        stored = jax.tree.map(lambda new, old: new.astype(old.dtype), gradient, state.gradient)
        return merged, state._replace(gradient=stored), ()

    link = Link(init=init, init_client=optax.tree.zeros_like, receive=receive)
    return Algorithm(
        summarize, aggregate, reduce, optimizer=penalised(penalty), kind="params", link=link
    )
