"""The server's side: check an algorithm, and make its strategy and Flower's ServerApp."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fisherjax import leaves
from fisherjax import rounds as rounds_
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape
from fisherjax._stacked import shapes_of_one
from fisherjax._user_data import whole
from fisherjax.algorithms.base import Algorithm, Update, as_sequence
from fisherjax.clients import federation as federation_of
from fisherjax.flower._secure import Secure, check_sums, checked
from fisherjax.flower._state import Report, ServerState, Setup, Terms, check_terms
from fisherjax.flower._strategy import Strategy
from fisherjax.merging._server_half import server_key
from fisherjax.parallel import Layout
from fisherjax.rounds._one_round import train_and_summarize
from fisherjax.typing import Key, Model, Params


def strategy(
    algorithm: Algorithm,
    model: Model,
    params: Params,
    *,
    example: Any,
    num_clients: int,
    key: Key,
    cohort: int | None = None,
    exchanges: Sequence[Any] = (),
    state: ServerState | None = None,
    terms: Terms | None = None,
    secure: Secure | None = None,
) -> Strategy:
    """Make Flower's strategy of an algorithm, for a ServerApp of your own.

    Rounds are those of `rounds.run` with the same key: the same cohorts, and the same minibatches
    on the clients. Clients whose upload does not come in time, is damaged, not finite, or of
    another network are left out of the round, with a warning that names them.

    Args:
        algorithm: Method that merges, wrappers included; the same on the clients.
        model: Model that the clients train.
        params: First model, all leaves. Frozen leaves are not sent: clients need the same.
        example: Some examples like those of the clients, (inputs [n, ...], targets [n, ...]); only
            their shapes are read, by which the server knows what an upload must look like.
        num_clients: Number of clients M, whose nodes have the partition-ids 0 to M - 1.
        key: Random key of the run. An algorithm that adds noise, as `privacy.private`, needs a
            secret one, which is not sent.
        cohort: Number of clients that take part in a round (default all).
        exchanges: Messages without training that follow the last round, such as
            `algorithms.analytic_head(model)` or `algorithms.natural_gradient(model)`.
        state: State of an earlier process, from which the run goes on (default: the first).
        terms: What is accepted of clients (default `Terms()`).
        secure: Terms of secure sums, in which the server learns the sum of the clients' terms only
            (default: clients send their updates). Clients need the same.

    Returns:
        The strategy. Its `state` has the merged model.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, the algorithm cannot run so, the example does not
            fit the model, or the state does not fit params.

    Example:
        >>> from fisherjax import algorithms, flower, likelihoods
        >>> model, average = Model(lambda w, x: x @ w, likelihoods.categorical), algorithms.fedavg()
        >>> params, x, y = np.zeros((2, 2), np.float32), np.eye(2, dtype=np.float32), np.arange(2)
        >>> def load(context):
        ...     rows = [context.node_config["partition-id"]]
        ...     return x[rows], y[rows]
        >>> client = flower.client_app(average, model, optax.sgd(0.1), load, params=params)
        >>> how = {"example": (x, y), "num_clients": 2, "key": jax.random.key(0)}
        >>> server = flower.strategy(average, model, params, **how)
        >>> server.run(flower.InProcess(client, 2), rounds=2)
        >>> server.state.number, bool(server.state.params[0, 0] > 0)
        (2, True)
    """
    # How clients train is theirs: these only give shapes.
    how: dict[str, Any] = {"optimizer": optax.identity(), "epochs": 1, "batch_size": 1}
    experiment = rounds_.federated(model, algorithm, cohort=1, clients_per_chunk=1, **how)
    params = jax.tree.map(jnp.asarray, checks.arrays(params))
    inputs, targets = whole(example, "example")
    one = federation_of((inputs, targets), [[0]])
    num_clients = checks.count("num_clients", num_clients)
    cohort = checks.count("cohort", num_clients if cohort is None else cohort, most=num_clients)
    terms = Terms() if terms is None else terms
    check_terms(terms)
    checks.count("min_replies", terms.min_replies, most=cohort)
    sequences = tuple(map(as_sequence, exchanges))
    if secure is not None:
        checks.count("secure.least", checked(secure).least, 2, most=cohort)
        if secure.verifiers and len(secure.verifiers) < num_clients:
            raise ValueError(
                f"secure has {len(secure.verifiers)} verifiers for {num_clients} clients; expected "
                "the public key of each client, by partition-id"
            )
        for each in (algorithm, *chain(*sequences)):
            check_sums(each)
    for each in (algorithm, *chain(*sequences)):
        key = server_key(each, key)
    first = experiment.init(params, one)
    experiment.check(first, one, key)
    round_of_one = partial(train_and_summarize, experiment, Layout(1))
    result = eval_shape(round_of_one, first, one, jax.random.key(0))
    expected = shapes_of_one(result.update)
    _check_runs(algorithm, expected)
    kept = algorithm.link.init(leaves.trained(model, params), num_clients)
    initial = ServerState(0, params, kept, np.full(num_clients, -1))
    setup = Setup(experiment, one, expected, num_clients, cohort, key, sequences, terms, secure)
    return Strategy(setup, initial if state is None else _checked_state(state, initial))


def _check_runs(algorithm: Algorithm, expected: Update) -> None:
    """Check that an algorithm can run over Flower."""
    if not jax.tree.leaves(expected.values):
        raise ValueError(
            "This method, as single_set, sends nothing, so that there is nothing to merge; "
            "expected one that does, such as fedavg. Train by training.train on each machine."
        )
    if algorithm.link.mix is not None and expected.statistics:
        raise ValueError(
            "This method mixes the running statistics of each client with those of the others on "
            "the server, which is not sent over Flower; expected a network without running "
            "statistics, or rounds.federated."
        )


def _checked_state(state: ServerState, like: ServerState) -> ServerState:
    checks.instance("state", state, ServerState, "flower.ServerState of an earlier process")
    for name in ("params", "algorithm", "accepted"):
        found, wanted = (
            [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(getattr(each, name))]
            for each in (state, like)
        )
        if found != wanted:
            raise ValueError(
                f"state.{name} has leaves {found!s:.300}; expected {wanted!s:.300}, those of these "
                "params, this algorithm and this number of clients."
            )
    return ServerState(
        int(state.number),
        jax.tree.map(jnp.asarray, state.params),
        jax.tree.map(jnp.asarray, state.algorithm),
        np.array(state.accepted),
    )


def server_app(
    algorithm: Algorithm,
    model: Model,
    params: Params,
    *,
    rounds: int = 1,
    after: Callable[[ServerState, Report], None] | None = None,
    **options: Any,
) -> ServerApp:
    """Make Flower's app of a server, which runs rounds and then the exchanges.

    Args:
        algorithm: Method that merges, wrappers included; the same on the clients.
        model: Model that the clients train.
        params: First model.
        rounds: Number of rounds of the whole run, those of an earlier process included.
        after: Function that is called with the state and the record after each round, for example
            to save the state. After an exchange it is not called: see `Strategy.run`.
        **options: Other arguments of `strategy`: `example`, `num_clients` and `key` are required.

    Returns:
        The app. It fails if no round succeeds.

    Raises:
        TypeError: As `strategy`.
        ValueError: As `strategy`.

    Example:
        >>> import fisherjax as fj
        >>> from fisherjax import flower
        >>> model = Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> x, y, params = np.eye(2, dtype=np.float32), np.arange(2), np.zeros((2, 2), np.float32)
        >>> how = {"example": (x, y), "num_clients": 2, "key": jax.random.key(0), "rounds": 5}
        >>> app = flower.server_app(fj.algorithms.fedfisher(model), model, params, **how)
    """
    checks.count("rounds", rounds)
    made = strategy(algorithm, model, params, **options)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        made.run(grid, rounds, after)

    return app
