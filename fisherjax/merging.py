"""Summarize and merge: what clients send, whether it can be trusted, and the model made of it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import checks, clients, devices, parallel, tree
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm
from fisherjax.clients import Federation
from fisherjax.devices import Memory, mesh_of, replicate
from fisherjax.fisher import passes
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.solvers import Info, Status
from fisherjax.training import Trained, untrained
from fisherjax.typing import Array, Key, Params
from fisherjax.updates import check_updates, check_weights, screen, shares, stacked_values, suspect


def summarize(
    algorithm: Algorithm,
    trained: Trained | Sequence[Params],
    federation: Federation,
    *,
    key: Key,
    clients_per_chunk: int | None = None,
) -> Update:
    """Compute every client's update, stacked: what it sends to the server.

    Compiled once for equal algorithms and shapes. What an algorithm keeps on the clients is fresh
    here, as in a first round; `rounds` carries it on.

    Args:
        algorithm: Its `summarize` runs for each client.
        trained: What `training.train` returned; or M models that were trained elsewhere, as a list
            or as `Trained(stacked params)`.
        federation: The clients' data.
        key: Folded by client.
        clients_per_chunk: Side by side on a device; None chooses, 1 on a CPU.

    Raises:
        ValueError: If the models are not as many as the clients, or lack what the algorithm needs
            of their training, or the targets do not fit the outputs.
        TypeError: If params are not floating, or an argument has the wrong kind.

    Example:
        >>> import fisherjax as fj
        >>> federation = fj.clients.federation(
        ...     (np.zeros((3, 8)), np.array([0, 1, 1])), [[2], [0, 1]]
        ... )
        >>> models, key = [{"w": np.zeros(2)}, {"w": np.ones(2)}], jax.random.key(0)
        >>> sent = summarize(fj.algorithms.fedavg(), models, federation, key=key)
        >>> sent.kind, sent.values["params"]["w"].shape
        ('params', (2, 2))
    """
    trained = _as_trained(trained)
    _check_summary(algorithm, trained, federation, key)
    layout = Layout(parallel.chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    key, start, steps = replicate((key, trained.start, trained.steps), layout.mesh)
    private = _first_private(algorithm, trained.params)
    # Losses [M, epochs] would compile another program for another number of epochs.
    trained = trained._replace(start=start, steps=steps, loss=None)
    return summarize_cohort(algorithm, layout, trained, private, federation, key)[0]


def summarize_memory(
    algorithm: Algorithm,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    clients_per_chunk: int | None = None,
) -> Memory:
    """Predict the bytes that `summarize` needs on each device, all models and updates among them.

    `params` are one client's, or their shapes; the other arguments are those of `summarize`.

    Example:
        >>> import fisherjax as fj
        >>> federation = fj.clients.federation(
        ...     (np.zeros((3, 8)), np.array([0, 1, 1])), [[2], [0, 1]]
        ... )
        >>> average, models = fj.algorithms.fedavg(), [{"w": np.zeros(n)} for n in (1, 1001)]
        >>> need = [summarize_memory(average, w, federation, key=jax.random.key(0)) for w in models]
        >>> need[1].resident - need[0].resident  # two models in, two models out
        16000
    """
    num_clients, mesh = federation.num_clients, federation.mesh
    layout = Layout(parallel.chunk_size(clients_per_chunk, num_clients), mesh)
    steps = np.zeros(num_clients, np.int32)
    key, start, steps = replicate((key, params, steps), mesh)
    extras = jax.eval_shape(lambda w: _extras(algorithm, w), params)
    private = jax.eval_shape(algorithm.init_client, params)
    # Shapes only: the compiler is asked before any stack [M, ...] is made.
    stacked, own, extras = devices.stacked_shapes((params, private, extras), num_clients, mesh)
    trained = Trained(stacked, start, steps, None, extras)
    return devices.memory(_summarize, algorithm, layout, trained, own, federation, key)


def merge(
    algorithm: Algorithm,
    params: Params,
    updates: Update | Sequence[Update],
    weights: Array | None = None,
    *,
    state: Any = None,
    cohort: Array | None = None,
    key: Key | None = None,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any, Any]:
    """Merge client updates to one model: the server's half of a round.

    Args:
        algorithm: The method.
        params: The model that clients started from; the result has its structure and dtypes.
        updates: Stacked, as `summarize` gives them, or a list of M as they were loaded from files.
        weights: [M], non-negative, for instance numbers of examples; equal if None. Scaled to sum
            one.
        state: What the algorithm kept of the last merge; None starts afresh.
        cohort: [M] places of these clients among all; all of them in order if None.
        key: For algorithms that draw on the server.
        on_nonfinite: "raise" or "drop", what to do about a client that diverged.

    Returns:
        The merged params, the algorithm's state, and what it reports, a solver's info for instance.

    Raises:
        ValueError: If updates do not fit together or to the algorithm, the weights do not fit, or a
            client's update or the merged model is not finite; it names clients and leaves.
        TypeError: If params are not floating, or updates are something else.

    Example:
        >>> import fisherjax as fj
        >>> updates = [fj.algorithms.Update({"params": {"w": w}}, "params") for w in jnp.eye(2)]
        >>> merged, _, _ = merge(fj.algorithms.fedavg(), {"w": jnp.zeros(2)}, updates, [1, 3])
        >>> print(merged["w"])
        [0.25 0.75]
    """
    checks.floating(params)
    values = stacked_values(algorithm, updates)
    num_clients = jax.tree.leaves(values)[0].shape[0]
    weights = check_weights(weights, num_clients)
    if not checks.is_traced(weights) and not weights.sum() > 0:
        raise ValueError(
            "Every weight is zero; expected some clients to count, for instance "
            "federation.weights or numbers of examples."
        )
    mesh = mesh_of(values)
    # Updates may be spread over a mesh: what is merged with them must be there too. Weights are
    # scaled before they are rounded to float32, in which their sum may overflow.
    params, weights = replicate((params, jnp.asarray(shares(weights), float)), mesh)
    values, weights = check_updates(values, weights, on_nonfinite)
    state = algorithm.init(params, num_clients) if state is None else state
    cohort = jnp.arange(num_clients) if cohort is None else cohort
    key = jax.random.key(0) if key is None else key
    checks.key(key)
    # The server's half of a round: add up if the method can, and solve.
    received = (values, weights)
    if algorithm.reduce is not None:
        received = _reduce(algorithm.reduce, values, weights)
    result = _aggregated(algorithm, key, received, params, state, cohort)
    _check_finite(result[0], values, weights)
    _warn(algorithm, params, result[2])
    return result


class Message(NamedTuple):
    """One message of an exchange: what each client is given, what all of them say, what follows."""

    received: Any
    sent: Update
    params: Params
    state: Any
    info: Any


def exchange(
    algorithm: Algorithm,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    state: Any = None,
    clients_per_chunk: int | None = None,
) -> tuple[Params, Any, Any]:
    """Send a model to all clients, let them summarize it without training, and merge what they say.

    Methods that need no training, such as `algorithms.analytic_head`: one round of communication,
    or more short ones where a method has several messages, as `algorithms.natural_gradient`. The
    arguments, what is returned and what is refused are those of `summarize` and `merge`; weights
    are the federation's.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> data = np.eye(2, dtype="float32"), np.ones((2, 1), "float32")
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> head, start = fj.algorithms.analytic_head(model), {"w": jnp.zeros((2, 1))}
        >>> exchange(head, start, federation, key=jax.random.key(0))[0]["w"].shape
        (2, 1)
    """
    how = {"key": key, "state": state, "clients_per_chunk": clients_per_chunk}
    *_, last = messages(algorithm, params, federation, **how)
    return last.params, last.state, last.info


def messages(
    algorithm: Algorithm,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    state: Any = None,
    clients_per_chunk: int | None = None,
) -> Iterator[Message]:
    """Play an `exchange`, with the same arguments, and yield each of its messages.

    Example: see `exchange`.
    """
    clients.check(federation)
    following: Algorithm | None = algorithm
    while following is not None:
        check_algorithm(following)
        if following.personal:
            raise ValueError(
                "This method keeps a model for each client, as weighted_fedavg does; expected one "
                "that sends the same to all. Play it in rounds.federated."
            )
        state = following.init(params, federation.num_clients) if state is None else state
        sent_down = following.broadcast(params, state, None)
        start, _ = following.receive(sent_down, following.init_client(params))
        same = untrained(params, federation.num_clients)._replace(start=start)
        chunk = clients_per_chunk
        sent = summarize(following, same, federation, key=key, clients_per_chunk=chunk)
        weights = federation.weights
        params, state, info = merge(following, params, sent, weights, state=state, key=key)
        yield Message(start, sent, params, state, info)
        following = following.then


def merge_stream(
    algorithm: Algorithm,
    params: Params,
    chunks: Iterable[tuple[Any, Array | None]],
    *,
    state: Any = None,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any, Any]:
    """Merge client updates that arrive a chunk at a time, and hold one chunk and the sums only.

    The same as `merge` of all clients at once, to rounding, for an algorithm whose updates add up,
    that is with a `reduce`, such as fedavg or regmean. Chunks are pairs (updates, weights [m]) of
    some clients each; None is a weight of one each, and weights are scaled to sum one over all.
    Compiled once for each shape of a chunk: let all chunks but the last be equally long. The other
    arguments, what is returned and what is refused are those of `merge`.

    Raises:
        ValueError: Also if there are no chunks, or they do not fit together.

    Example:
        >>> import fisherjax as fj
        >>> models = (Update({"params": {"w": jnp.full((2, 1), x)}}, "params") for x in (1.0, 3.0))
        >>> chunks = ((updates, None) for updates in models)
        >>> print(merge_stream(fj.algorithms.fedavg(), {"w": jnp.zeros(1)}, chunks)[0]["w"])
        [2.]
    """
    checks.floating(params)
    check_algorithm(algorithm)
    if algorithm.reduce is None:
        raise ValueError(
            "This method needs every client's update at once (its reduce is None), as FedFisher "
            "with K-FAC does: Kronecker factors do not add up. Use merge, or a method that adds up "
            "such as fedavg, fisher_merge, regmean or fedfisher(model, fisher=fisher.diagonal)."
        )
    totals, weight, seen, first, scale = None, 0.0, 0, None, 0.0
    for number, chunk in enumerate(chunks):
        values, weights = _chunk(algorithm, chunk, number)
        # Without the client axis: chunks may differ in length.
        shapes = jax.tree.map(lambda x: x.shape[1:], values)
        first = shapes if first is None else first
        if shapes != first:
            raise ValueError(
                f"Chunk {number} holds leaves of shapes {shapes} for each client, but chunk 0 "
                f"{first}. All clients must have trained the same network."
            )
        num_clients = weights.shape[0]
        scale = scale or weights.max(initial=0.0)  # on the host: whatever the size of the weights
        weights = replicate(jnp.asarray(weights / (scale or 1.0), float), mesh_of(values))
        values, weights = screen(values, weights, on_nonfinite, first=seen)
        # Not normalised: the total weight is known after the last chunk only.
        sums = _reduce(algorithm.reduce, values, weights)
        totals = sums if totals is None else _add(totals, sums)
        weight, seen = weight + float(weights.sum()), seen + num_clients
    if totals is None:
        raise ValueError("There are no chunks to merge: expected at least one pair of updates.")
    if not weight > 0:
        raise ValueError(f"None of the {seen} clients has weight: every weight is zero.")
    # Chunks, and so the sums, may be spread over a mesh: it is known only now.
    params = replicate(params, mesh_of(totals))
    state = algorithm.init(params, seen) if state is None else state
    result = _aggregated(algorithm, jax.random.key(0), totals, params, state, jnp.arange(seen))
    _check_finite(result[0])
    _warn(algorithm, params, result[2])
    return result


def summarize_cohort(
    algorithm: Algorithm,
    layout: Layout,
    trained: Trained,
    private: Any,
    federation: Federation,
    key: Key,
) -> tuple[Update, Any]:
    """Compute the stacked updates, and what each client keeps, given what it kept; unchecked."""
    found = _summarize(algorithm, layout, trained, private, federation, key)
    values, kept = in_order(found, layout.mesh)
    return Update(values, algorithm.kind), kept


@partial(jax.jit, static_argnums=(0, 1))
def _summarize(
    algorithm: Algorithm,
    layout: Layout,
    trained: Trained,
    private: Any,
    federation: Federation,
    key: Key,
) -> Spread:
    # The start is one model for all, or stacked like the params.
    is_common = _rank(trained.start) < _rank(trained.params)
    common = trained.start if is_common else None
    own_start = None if is_common else trained.start

    def one(own: Any, start: Params | None, federation: Federation, key: Key) -> Any:
        place, mine, private = own
        # A common start comes in once and is not stacked: M copies would be in memory.
        mine = mine._replace(start=mine.start if start is None else start)
        # By id, not by place: in a cohort a client draws what it would draw among all.
        client = clients.client_key(key, clients.SUMMARIZE, clients.ids(federation)[place])
        return algorithm.summarize(client, mine, clients.view(federation, place), private)

    return parallel.spread_clients(
        one,
        (jnp.arange(federation.num_clients), trained._replace(start=own_start), private),
        common,
        federation,
        key,
        sizes=federation.sizes,
        **layout._asdict(),
    )


def _rank(params: Params | None) -> int:
    # The first leaf tells: what is stacked has one axis more.
    leaves = jax.tree.leaves(params)
    return jnp.ndim(leaves[0]) if leaves else 0


def _as_trained(trained: Any) -> Trained:
    if isinstance(trained, Trained):
        return trained
    if isinstance(trained, (list, tuple)):
        return Trained(tree.stack(list(trained)))
    raise TypeError(
        f"trained is a {type(trained).__name__}; expected what training.train returned, a list of "
        "one params pytree for each client, or training.Trained(stacked params)."
    )


def _check_summary(
    algorithm: Algorithm, trained: Trained, federation: Federation, key: Key
) -> None:
    check_algorithm(algorithm)
    clients.check(federation)
    checks.key(key)
    checks.floating(trained.params)
    checks.stacked(trained.params, federation.num_clients)
    if algorithm.model is not None:
        checks.model(algorithm.model)
        # One client's shapes: the network does not know the client axis.
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trained.params)
        checks.outputs(algorithm.model, one, federation.inputs, federation.targets)


@partial(jax.jit, static_argnums=0)
def _first_private(algorithm: Algorithm, stacked: Params) -> Any:
    return jax.vmap(algorithm.init_client)(stacked)


def _extras(algorithm: Algorithm, params: Params) -> Any:
    """Make what an algorithm's optimiser keeps, whatever it is wrapped around."""
    state = algorithm.optimizer(optax.identity()).init(params)
    return getattr(state, "own", ())


def _chunk(algorithm: Algorithm, chunk: Any, number: int) -> tuple[dict[str, Any], np.ndarray]:
    if not (isinstance(chunk, tuple) and len(chunk) == 2):
        raise ValueError(
            f"Chunk {number} is a {type(chunk).__name__}; expected a pair (updates, weights), "
            "where weights may be None."
        )
    values = stacked_values(algorithm, chunk[0])
    return values, check_weights(chunk[1], jax.tree.leaves(values)[0].shape[0])


_finite_leaves = jax.jit(tree.finite_leaves)


# Compiled once for an algorithm: factories give the same function for equal arguments.
@partial(jax.jit, static_argnums=0)
def _reduce(reduce: Callable[[Any, Array], Any], values: Any, weights: Array) -> Any:
    return reduce(values, weights)


# The old totals are donated: a stream holds its sums once.
@partial(jax.jit, donate_argnums=0)
def _add(totals: Any, sums: Any) -> Any:
    return jax.tree.map(jnp.add, totals, sums)


def _aggregated(
    algorithm: Algorithm, key: Key, received: Any, params: Params, state: Any, cohort: Array
) -> tuple[Params, Any, Any]:
    """Aggregate, and refuse a model that does not fit."""
    key = jax.random.fold_in(key, clients.AGGREGATE)
    merged, state, info = algorithm.aggregate(key, received, params, state, cohort)
    _check_shapes(merged, params)
    # Sums and solutions are in at least float32: rounded to the model's dtype once, here.
    merged = jax.tree.map(lambda leaf, start: leaf.astype(jnp.result_type(start)), merged, params)
    return merged, state, info


def _check_finite(merged: Params, values: Any = None, weights: Array | None = None) -> None:
    """Refuse a merged model that is not finite; name the leaf, and who is to blame if at hand."""
    if checks.is_traced(merged):
        return
    finite = np.asarray(_finite_leaves(merged))
    if not finite.all():
        leaf, blame = tree.names(merged)[finite.argmin()], suspect(values, weights)
        raise ValueError(f"Leaf '{leaf}' of the merged model is not finite. {blame}")


def _warn(algorithm: Algorithm, params: Params, info: Any) -> None:
    """Say which blocks a solver left unsolved, but for leaves that nobody trained."""
    if not isinstance(info, Info) or checks.is_traced(info):
        return
    model = algorithm.model
    still = () if model is None else passes.untrained(model, params)
    status = dict(zip(tree.names(info.status), map(int, jax.tree.leaves(info.status)), strict=True))
    for ending, meaning in _UNSOLVED.items():
        found = [name for name, status in status.items() if status == ending]
        # They have no curvature, as they should.
        names = [name for name in found if name not in still]
        if names:
            warnings.warn(f"Blocks {names}: {meaning}", stacklevel=3)


_UNSOLVED = {
    Status.NO_CURVATURE: (
        "no client has any curvature, and they keep the weighted mean. Models that are certain of "
        "all their examples have none, nor have leaves under fallback=fisher.zero."
    ),
    Status.BROKE_DOWN: (
        "the solver met a direction without curvature before it converged; more damping makes the "
        "system definite."
    ),
    Status.OUT_OF_ITERATIONS: (
        "the solver took all its steps and its residual, which the returned info has, is above the "
        "tolerance; allow more iterations or more damping."
    ),
}


def _check_shapes(merged: Params, params: Params) -> None:
    same = jax.tree.structure(merged) == jax.tree.structure(params)
    if not same or tree.shapes(merged) != tree.shapes(params):
        raise ValueError(
            f"The merged model has leaves of shapes {tree.shapes(merged)}, but params has "
            f"{tree.shapes(params)}. Pass the params of the network that the clients trained."
        )
