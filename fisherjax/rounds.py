"""Federated rounds: broadcast, sample a cohort, train, summarize, aggregate, again.

A round is one compiled program. `run` is a generator, so that research code can stop, log or
branch: a `State` is plain data, and going on from an old one repeats what followed it.

Letters: M clients, K of them in a cohort, E local epochs.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fisherjax import tree
from fisherjax.aggregation import Aggregator
from fisherjax.clients import COHORT, Federation, LocalModels, needs_squares, summarize_client
from fisherjax.likelihoods import Likelihood
from fisherjax.local import (
    Recipe,
    Restraint,
    check_count,
    check_data,
    check_key,
    check_optimizer,
    count_steps,
    make_recipe,
    select,
    start_state,
    train_client,
)
from fisherjax.mapping import chunk_size, map_clients, replicate
from fisherjax.typing import Apply, Array, Key, Params


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
        diverged: [K] True for a client whose update was not finite and was left out.
        info: what the aggregator reports.
    """

    number: Array
    cohort: Array
    start: Params
    models: LocalModels
    diverged: Array
    info: Any

    @property
    def loss(self) -> Array:
        """The mean loss in nats of an example in the last local epoch, over clients that count."""
        counted = jnp.where(self.diverged, 0, self.models.steps)
        losses = jnp.where(counted > 0, self.models.loss[:, -1], 0)
        return (counted * losses).sum() / jnp.maximum(counted.sum(), 1)


class Traffic(NamedTuple):
    """Bytes of one client in one round, as they are in memory.

    Attributes:
        down: from the server: the model and what corrects its steps.
        up: to the server: the update.
    """

    down: int
    up: int


class Federated(NamedTuple):
    """A federated algorithm as pure functions.

    Attributes:
        init: `params -> State`.
        check: `(state, federation, key) -> None`, raises ValueError or TypeError where they do not
            fit.
        round: `(state, federation, key) -> (State, Round)`, compiled once for the shapes.
        traffic: `(params, federation) -> Traffic`.
    """

    init: Callable[[Params], State]
    check: Callable[[State, Federation, Key], None]
    round: Callable[[State, Federation, Key], tuple[State, Round]]
    traffic: Callable[[Params, Federation], Traffic]


def federated(
    apply: Apply,
    likelihood: Likelihood,
    aggregator: Aggregator,
    *,
    cohort: int,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    server_optimizer: optax.GradientTransformation | None = None,
    proximal: float = 0.0,
    clients_per_chunk: int | None = None,
    **training: Any,
) -> Federated:
    r"""Make a federated algorithm of any aggregator.

    A round draws K clients without replacement, trains each from W for E epochs, merges what they
    send to W', and gives the server's optimiser the pseudo-gradient

    .. math:: g = W - W', \qquad W \leftarrow W + \mathrm{update}(g).

    Descent at rate 1 replaces W by W', and so does no optimiser at all. A client whose update is
    not finite is left out; where nobody is left, the round changes nothing but the number.

    Args:
        apply: `apply(params, inputs [B, ...]) -> outputs`.
        likelihood: whose negative log-likelihood clients minimise.
        aggregator: how updates are merged.
        cohort: K, from 1 to M.
        optimizer: of the clients, any of optax; starts afresh in every round.
        epochs: E, at least 1.
        batch_size: of the clients' minibatches.
        server_optimizer: any of optax, on the pseudo-gradient; None takes the merged model. Leaves
            that the mask leaves out always take the merged value.
        proximal: mu >= 0 of FedProx.
        clients_per_chunk: side by side on a device, up to K; None chooses 1 on a CPU and K
            elsewhere.
        **training: `mask`, `augment` and `apply_train` of `training.train`.

    Returns:
        The algorithm.

    Raises:
        TypeError: if an argument has the wrong kind.
        ValueError: if a number is out of range.

    Example:
        >>> import jax, optax, numpy as np, fisherjax as fj
        >>> data = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
        >>> federation = fj.clients.federation(data, [np.array([0, 2]), np.array([1, 3])])
        >>> method = fj.rounds.federated(
        ...     lambda w, x: x @ w,
        ...     fj.likelihoods.categorical,
        ...     fj.aggregation.fedavg(),
        ...     cohort=1,
        ...     optimizer=optax.sgd(1.0),
        ...     epochs=2,
        ...     batch_size=2,
        ... )
        >>> state = method.init(np.zeros((4, 2), np.float32))
        >>> key = jax.random.key(0)
        >>> for state, done in fj.rounds.run(method, state, federation, key=key, rounds=3):
        ...     print(done.number, done.cohort.shape, done.loss < 0.7)
        0 (1,) True
        1 (1,) True
        2 (1,) True

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, Adaptive federated
        optimization, ICLR 2021, algorithm 1 (FedOpt), for any way to merge.
    """
    for name, value in (("cohort", cohort), ("epochs", epochs), ("batch_size", batch_size)):
        check_count(name, value)
    check_optimizer("optimizer", optimizer)
    if server_optimizer is not None:
        check_optimizer("server_optimizer", server_optimizer)
    if not 0 <= proximal < math.inf:
        raise ValueError(f"proximal is {proximal}; expected a finite number, zero or more.")
    chunk = chunk_size(clients_per_chunk, cohort)
    options = {"optimizer": optimizer, "batch_size": batch_size, **training}
    options["squared_gradients"] = needs_squares(aggregator)
    mu = proximal if proximal > 0 else None

    def how(params: Params, federation: Federation) -> _How:
        recipe = make_recipe(apply, likelihood, params, federation, **options)
        return _How(recipe, aggregator, server_optimizer, cohort, epochs, chunk, federation.mesh)

    def init(params: Params) -> State:
        tree.check_floating(params)
        params = jax.tree.map(jnp.asarray, params)
        server = () if server_optimizer is None else server_optimizer.init(params)
        state = State(jnp.asarray(0, jnp.int32), params, server, aggregator.init(params))
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)

    def check(state: State, federation: Federation, key: Key) -> None:
        check_key(key)
        tree.check_floating(state.params)
        check_data(apply, likelihood, state.params, federation)
        how(state.params, federation)
        if cohort > federation.num_clients:
            raise ValueError(
                f"cohort is {cohort}, but the federation has {federation.num_clients} clients; "
                "expected at most all of them."
            )
        _check_fits(state, jax.eval_shape(init, state.params))

    def round(state: State, federation: Federation, key: Key) -> tuple[State, Round]:
        state, key = replicate((state, key), federation.mesh)
        return _round(how(state.params, federation), state, federation, key, mu)

    def traffic(params: Params, federation: Federation) -> Traffic:
        return _traffic(how(params, federation), params, federation)

    return Federated(init, check, round, traffic)


def run(
    method: Federated, state: State, federation: Federation, *, key: Key, rounds: int
) -> Iterator[tuple[State, Round]]:
    """Run rounds one after another, and yield after each.

    Cohorts and minibatches depend on the key, the round's number and the client only: two
    algorithms with the same key see the same ones, and a run that goes on from an old state is the
    run that was not interrupted, bit for bit.

    Args:
        method: what `federated` made.
        state: `method.init(params)`, or one that was yielded.
        federation: the clients' data.
        key: of everything random, folded by round, purpose and client.
        rounds: how many, at least 1.

    Yields:
        The state after each round, and what happened in it. Arrays are on their way: reading one
        waits for it.

    Raises:
        TypeError: if an argument has the wrong kind.
        ValueError: if there are no rounds, the cohort is larger than the federation, or the data or
            the state do not fit; at once, not at the first round.

    Example: see `federated`.
    """
    check_count("rounds", rounds)
    method.check(state, federation, key)

    def going(state: State) -> Iterator[tuple[State, Round]]:
        for _ in range(rounds):
            state, done = method.round(state, federation, key)
            yield state, done

    return going(state)


class _How(NamedTuple):
    """What a round is compiled for."""

    recipe: Recipe
    aggregator: Aggregator
    server_optimizer: optax.GradientTransformation | None
    cohort: int
    epochs: int
    clients_per_chunk: int
    mesh: Mesh | None


@partial(jax.jit, static_argnums=0)
def _round(
    how: _How, state: State, federation: Federation, key: Key, mu: Array | None
) -> tuple[State, Round]:
    key = jax.random.fold_in(key, state.number)
    cohort = _draw_cohort(key, federation.num_clients, how.cohort)
    models, updates = _clients(how, state, federation, key, mu, cohort)

    finite = jnp.stack([_is_finite(leaf) for leaf in jax.tree.leaves(updates)]).all(0)
    updates = jax.tree.map(lambda x: jnp.where(_along(finite, x), x, jnp.zeros_like(x)), updates)
    sizes = jnp.where(finite, federation.sizes[cohort], 0)
    weights = sizes / jnp.maximum(sizes.sum(), 1)
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
    return after, Round(state.number, cohort, state.params, models, ~finite, info)


def _draw_cohort(key: Key, num_clients: int, cohort: int) -> Array:
    """Draw clients without replacement, in ascending order."""
    if cohort == num_clients:
        return jnp.arange(num_clients)
    drawn = jax.random.permutation(jax.random.fold_in(key, COHORT), num_clients)
    return jnp.sort(drawn[:cohort])


def _clients(
    how: _How, state: State, federation: Federation, key: Key, mu: Array | None, cohort: Array
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


def _serve(how: _How, merged: Params, state: State) -> tuple[Params, Any]:
    """Take the server's step along the pseudo-gradient."""
    if how.server_optimizer is None:
        return merged, state.optimizer
    gradient = jax.tree.map(lambda w, m: w - m.astype(w.dtype), state.params, merged)
    updates, server = how.server_optimizer.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return select(how.recipe.mask, params, merged), server


def _is_finite(leaf: Array) -> Array:
    return jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1)


def _along(flags: Array, leaf: Array) -> Array:
    return flags.reshape(-1, *(1,) * (leaf.ndim - 1))


def _traffic(how: _How, params: Params, federation: Federation) -> Traffic:
    def update(params: Params, federation: Federation) -> Any:
        squares = params if how.recipe.squared_gradients else None
        client, key = jnp.asarray(0), jax.random.key(0)
        function = how.aggregator.summarize
        return summarize_client(function, federation, client, key, (params, squares), params)

    up = _bytes(jax.eval_shape(update, params, federation))
    down = _bytes(jax.eval_shape(lambda x: x, params))
    return Traffic(down if how.aggregator.correction is None else 2 * down, up)


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _check_fits(state: State, expected: State) -> None:
    for field in ("optimizer", "aggregator"):
        given, wanted = (_described(getattr(x, field)) for x in (state, expected))
        if given != wanted:
            raise ValueError(
                f"state.{field} has leaves {given}; expected {wanted} for these params. Start with "
                "init(params) of this algorithm, or go on with a state that it yielded."
            )


def _described(values: Any) -> dict[str, str]:
    described = [f"{x.dtype}{list(jnp.shape(x))}" for x in jax.tree.leaves(values)]
    return dict(zip(tree.names(values), described, strict=True))
