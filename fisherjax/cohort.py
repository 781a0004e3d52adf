"""One federated round, as one compiled program."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fisherjax import tree
from fisherjax.aggregation import Aggregator
from fisherjax.clients import COHORT, Federation, LocalModels, summarize_client
from fisherjax.local import Recipe, Restraint, count_steps, select, start_state, train_client
from fisherjax.mapping import map_clients
from fisherjax.typing import Array, Key, Params


class How(NamedTuple):
    """What a round is compiled for."""

    recipe: Recipe
    aggregator: Aggregator
    server_optimizer: optax.GradientTransformation | None
    cohort: int
    epochs: int
    clients_per_chunk: int
    mesh: Mesh | None


class State(NamedTuple):
    """What goes from round to round.

    Attributes:
        number: of the next round, from 0.
        params: the global model.
        optimizer: the state of the server's optimiser, () without one.
        aggregator: what the method keeps, for instance SCAFFOLD's controls.
    """

    number: Array
    params: Params
    optimizer: Any
    aggregator: Any


class Round(NamedTuple):
    """What happened in one round.

    Attributes:
        number: from 0.
        cohort: [K] which clients took part.
        start: the model that was sent to them.
        models: what they trained; leaves of `models.params` are [K, ...].
        loss: mean training loss in nats of an example in the last local epoch, of the clients that
            were not left out.
        diverged: [K] True for a client whose update was not finite and was left out.
        info: what the aggregator reports.
    """

    number: Array
    cohort: Array
    start: Params
    models: LocalModels
    loss: Array
    diverged: Array
    info: Any


@partial(jax.jit, static_argnums=0)
def play(
    how: How, state: State, federation: Federation, key: Key, mu: Array | None
) -> tuple[State, Round]:
    """Play one round.

    Args:
        how: what it is compiled for.
        state: before the round.
        federation: the clients' data.
        key: folded by round, purpose and client.
        mu: of the proximal term; None leaves it out.

    Returns:
        The state after the round, and what happened in it.
    """
    key = jax.random.fold_in(key, state.number)
    cohort = _draw_cohort(key, federation.num_clients, how.cohort)
    models, updates = _clients(how, state, federation, key, mu, cohort)

    finite = tree.finite(updates).all(0)
    updates = tree.keep(finite, updates)
    sizes = jnp.where(finite, federation.sizes[cohort], 0)
    weights = sizes / jnp.maximum(sizes.sum(), 1)
    loss = (weights * jnp.where(sizes > 0, models.loss[:, -1], 0)).sum()
    if how.aggregator.correction is not None:
        updates, weights = jax.tree.map(
            lambda x: jnp.zeros((federation.num_clients, *x.shape[1:]), x.dtype).at[cohort].set(x),
            (updates, weights),
        )

    received = (updates, weights)
    if how.aggregator.reduce is not None:
        received = how.aggregator.reduce(updates, weights)
    merged, kept, info = how.aggregator.finish(received, state.params, state.aggregator)
    params, server = _serve(how, merged, state)
    after = State(state.number + 1, params, server, kept)
    after = jax.tree.map(
        lambda new, old: jnp.where(sizes.sum() > 0, new, old).astype(old.dtype), after, state
    )
    after = after._replace(number=state.number + 1)
    return after, Round(state.number, cohort, state.params, models, loss, ~finite, info)


def _draw_cohort(key: Key, num_clients: int, cohort: int) -> Array:
    """Draw clients without replacement, in ascending order."""
    if cohort == num_clients:
        return jnp.arange(num_clients)
    drawn = jax.random.permutation(jax.random.fold_in(key, COHORT), num_clients)
    return jnp.sort(drawn[:cohort])


def _clients(
    how: How, state: State, federation: Federation, key: Key, mu: Array | None, cohort: Array
) -> tuple[LocalModels, Any]:
    """Train and summarize the clients of a cohort."""

    def one(
        own: tuple[Array, Params | None],
        start: Params,
        key: Key,
        mu: Array | None,
        federation: Federation,
    ) -> tuple[LocalModels, Any]:
        client, correction = own
        restraint = Restraint(None if mu is None else (mu, start), correction)
        first, numbers = start_state(how.recipe, start), jnp.arange(how.epochs)
        ready = (how.recipe, federation, client, key)
        end, losses = train_client(*ready, first, restraint, numbers)
        trained = end.params, end.squared_gradients
        summarize = how.aggregator.summarize
        update = summarize_client(summarize, federation, client, key, trained, start)
        steps = how.epochs * count_steps(federation.sizes[client], how.recipe.batch_size)
        return LocalModels(end.params, losses, steps), update

    correction = None
    if how.aggregator.correction is not None:
        every = how.aggregator.correction(state.aggregator)
        correction = jax.tree.map(lambda x: x[cohort], every)
    return map_clients(
        one,
        (cohort, correction),
        state.params,
        key,
        mu,
        federation,
        sizes=federation.sizes[cohort],
        clients_per_chunk=how.clients_per_chunk,
        mesh=how.mesh,
    )


def _serve(how: How, merged: Params, state: State) -> tuple[Params, Any]:
    """Take the server's step along the pseudo-gradient."""
    if how.server_optimizer is None:
        return merged, state.optimizer
    gradient = jax.tree.map(lambda w, m: w - m.astype(w.dtype), state.params, merged)
    updates, server = how.server_optimizer.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return select(how.recipe.mask, params, merged), server
