"""FedDyn: clients' losses are tilted until their minima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated learning based on dynamic
regularization, ICLR 2021, algorithm 1.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Link, WeightedSum, weighted_sum
from fisherjax.local_update import penalised
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params, Scalar

_zeros = functools.partial(jax.tree.map, jnp.zeros_like)


class Dynamics(NamedTuple):
    """The server's state of FedDyn.

    Attributes:
        gradient: h, like params: the mean of g_i over all clients, with the sign of the paper.
        num_clients: M, all of them.
    """

    gradient: Params
    num_clients: Array


@cached
def feddyn(alpha: Scalar = 0.01) -> Algorithm[tuple[()]]:
    r"""Make FedDyn, which tilts each client's loss by a gradient g_i that the client keeps.

        client i minimises  loss(w) - <g_i, w> + alpha / 2 ||w - W||^2  from W, which gives W_i,
        g_i <- g_i - alpha (W_i - W),
        h <- h - (alpha / M) sum_{i in cohort} (W_i - W),
        W <- mean_{i in cohort} W_i - h / alpha,

    where g_i and h start at zero. Where rounds come to rest, g_i is the gradient of client i at W,
    and these sum to zero: W is a stationary point of the mean of all M clients' losses, however
    many steps clients take. The first round moves W twice as far as the clients' mean if all of
    them take part, so that a single merge is no average.

    Args:
        alpha: Weight of the pull to W, above zero (default 0.01). The server moves by the sum of
            the gradients over alpha: smaller is faster, and less stable.

    Returns:
        The algorithm. Its `optimizer` adds -g_i + alpha (w - W) to the gradients that the user's
        optimiser sees; the loss that training returns leaves both out. g_i is local. Updates are
        {"params": W_i}, and add up.

    Raises:
        ValueError: If alpha is not positive; on summarize, of models whose start is not known.

    Example:
        >>> import optax
        >>> optimizer, w = feddyn(alpha=0.5).optimizer(optax.sgd(1.0)), jnp.array(3.0)
        >>> told = {"start": jnp.array(1.0), "extras": jnp.array(0.25)}
        >>> step, _ = optimizer.update(0 * w, optimizer.init(w), w, **told)
        >>> print(step)
        -0.75

    Source: the paper above. As in its algorithm, clients count the same whatever their numbers of
        examples, for the mean that comes to rest is that of g_i, which knows no weights; weights
        only say who is left out. Deviations: clients without examples, or that diverged, send
        nothing, though they are among the M; clients minimise by the user's optimiser, for as long
        as the user says. The authors' code also divides alpha by the client's share of examples.
    """
    checks.positive("alpha", alpha)

    def tilt(params: Params, *, start: Params, extras: Any) -> Array:
        # Without gradients, as in a single round, all are zero.
        own = extras if jax.tree.leaves(extras) else _zeros(params)

        def leaf(w: Array, centre: Array, g: Array) -> Array:
            return (alpha / 2 * jnp.square(w - centre) - g * w).sum()

        return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(leaf, params, start, own))))

    def init(params: Params, num_clients: int) -> Dynamics:
        return Dynamics(_zeros(params), jnp.asarray(num_clients, jnp.int32))

    def receive(start: Params, local: Params) -> tuple[Params, Params]:
        return start, local

    def summarize(key: Key, trained: Trained, examples: Examples, local: Params) -> tuple:
        del key, examples
        if trained.start is None:
            raise ValueError(
                "FedDyn needs what clients started from: train them with training.train(..., "
                "optimizer=algorithm.optimizer(base))."
            )

        def moved(g: Array, end: Array, start: Array) -> Array:
            return g - jnp.asarray(alpha, g.dtype) * (end - start)

        own = jax.tree.map(moved, local, trained.params, trained.start)
        return {"params": trained.params}, own

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        # Each client counts once, however large; one that was left out has weight zero.
        return weighted_sum(updates["params"], (weights > 0).astype(weights.dtype))

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Dynamics, cohort: Array):
        del key, cohort
        mean = sums.mean()

        def drifted(h: Array, end: Array, start: Array) -> Array:
            share = (sums.weight / state.num_clients).astype(end.dtype)
            return h - alpha * share * (end - start)

        gradient = jax.tree.map(drifted, state.gradient, mean, params)
        merged = jax.tree.map(lambda end, h: end - h / alpha, mean, gradient)
        kept = jax.tree.map(lambda new, old: new.astype(old.dtype), gradient, state.gradient)
        return merged, state._replace(gradient=kept), ()

    link = Link(init=init, init_client=_zeros, receive=receive)
    return Algorithm(
        summarize, aggregate, reduce, optimizer=penalised(tilt), kind="params", link=link
    )
