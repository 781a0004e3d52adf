"""Federated rounds: broadcast, sample a cohort, train, summarize, aggregate, again.

A round is one compiled program. `run` is a generator, so that research code can stop, log or
branch: a `State` is plain data, and going on from an old one repeats what followed it.

Letters: M clients, K of them in a cohort, E local epochs.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import tree
from fisherjax.aggregation import Aggregator
from fisherjax.clients import Federation, needs_squares, summarize_client
from fisherjax.cohort import How, Round, State, play
from fisherjax.likelihoods import Likelihood
from fisherjax.local import check_count, check_data, check_key, check_optimizer, make_recipe
from fisherjax.mapping import chunk_size, replicate
from fisherjax.typing import Apply, Key, Params

__all__ = ["Federated", "Round", "State", "Traffic", "federated", "run"]


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

    def how(params: Params, federation: Federation) -> How:
        recipe = make_recipe(apply, likelihood, params, federation, **options)
        return How(recipe, aggregator, server_optimizer, cohort, epochs, chunk, federation.mesh)

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
        return play(how(state.params, federation), state, federation, key, mu)

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


def _traffic(how: How, params: Params, federation: Federation) -> Traffic:
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
