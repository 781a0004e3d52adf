"""The client's half of a round: compute the updates of trained clients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import clients, devices, leaves, parallel, tree
from fisherjax._core import checks, output_checks
from fisherjax._core.compiler import eval_shape, jit
from fisherjax._device_division import Division, divide
from fisherjax._stacked import shapes_of_one
from fisherjax._upload_checks import check_precision
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm, nothing
from fisherjax.clients import Federation
from fisherjax.devices import Memory, replicate
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.training import Trained
from fisherjax.typing import Key, Model, Params


def summarize(
    algorithm: Algorithm,
    trained: Trained | Sequence[Params],
    federation: Federation,
    *,
    key: Key,
    clients_per_chunk: int | None = None,
) -> Update:
    """Compute the updates that clients send to the server, stacked.

    The program is compiled once for equal shapes and equal functions `algorithm.summarize`, which
    methods share that send the same, such as `fedfisher` of any damping and `fedfisher_sequential`.
    State that an algorithm keeps on clients starts afresh, as in a first round; `rounds` keeps it
    from round to round.

    Args:
        algorithm: Method whose `summarize` runs on each client.
        trained: Result of `training.train`, or M models that were trained elsewhere, as a list or
            as `Trained(stacked params)`.
        federation: Data of the clients.
        key: Random key, folded by client.
        clients_per_chunk: Number of clients side by side on a device; None chooses, and is 1 on a
            CPU.

    Returns:
        The updates, with values [M, ...].

    Raises:
        ValueError: If the number of models is not that of the clients, the algorithm needs what
            their training did not record, or the targets do not fit the outputs.
        TypeError: If params are not floating, or an argument has the wrong type.

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
    check_algorithm(algorithm)
    clients.check(federation)
    trained = _split_leaves(algorithm, _with_arrays(_as_trained(trained)), federation)
    _check_summary(algorithm, trained, federation, key)
    layout = Layout(parallel.chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    common = key, trained.start, trained.steps, trained.frozen
    key, start, steps, frozen = replicate(common, layout.mesh)
    local = _first_local(algorithm, trained.params)
    # Losses [M, epochs] would compile another program for another number of epochs.
    trained = trained._replace(start=start, steps=steps, loss=None, frozen=frozen)
    return summarize_cohort(algorithm, layout, trained, local, federation, key)[0]


def summarize_memory(
    algorithm: Algorithm,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    start: Any = None,
    clients_per_chunk: int | None = None,
) -> Memory:
    """Predict the bytes that `summarize` needs on each device, including all models and updates.

    Args:
        algorithm: As in `summarize`.
        params: Params of one client, or their shapes. For a method without a network, such as
            FedAvg, and a model with a mask, pass `leaves.trained(model, params)`.
        federation: As in `summarize`.
        key: As in `summarize`.
        start: What clients of an exchange without training receive, or its shapes; None if clients
            train.
        clients_per_chunk: As in `summarize`.

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
    params = checks.arrays(params)
    num_clients, mesh = federation.num_clients, federation.mesh
    layout = Layout(parallel.chunk_size(clients_per_chunk, num_clients), mesh)
    extras, steps = (), None
    # With the structure that training returns, so that the run compiles the same program.
    parts = leaves.split_by_kind((leaves.TRAINED,) * len(tree.names(params)), params)
    if algorithm.model is not None:
        parts = leaves.split(algorithm.model, params, federation.inputs)
        if start is not None:  # Without training, statistics do not change either.
            trained, others = leaves.split_trained(algorithm.model, params)
            parts = leaves.Leaves(trained, None, others)
    if start is None:
        extras = eval_shape(lambda w: _extras(algorithm, w), parts.trained)
        start, steps = parts.trained, np.zeros(num_clients, np.int32)
    key, start, steps, frozen = replicate((key, start, steps, parts.frozen), mesh)
    local = eval_shape(algorithm.link.init_client, parts.trained)
    # Shapes only: nothing is stacked [M, ...] before its memory is predicted.
    several = parts.trained, parts.statistics, local, extras
    stacked, statistics, local, extras = devices.stacked_shapes(several, num_clients, mesh)
    trained = Trained(stacked, start, steps, None, extras, statistics, frozen)
    division = divide(federation.sizes, *layout)
    given = trained, local, federation, key, division
    return devices.memory(_summarize, algorithm.summarize, layout, *given)


def summarize_cohort(
    algorithm: Algorithm,
    layout: Layout,
    trained: Trained,
    local: Any,
    federation: Federation,
    key: Key,
) -> tuple[Update, Any]:
    """Compute stacked updates without checks.

    Returns:
        The updates, and the new `local`: what each client keeps for the algorithm, [K, ...].
    """
    division = divide(federation.sizes, *layout)
    found = _summarize(algorithm.summarize, layout, trained, local, federation, key, division)
    values, kept = in_order(found, layout.mesh)
    # A method may compute statistics of its own, in place of those that training left.
    statistics = tree.by_name(trained.statistics) | values.pop("statistics", {})
    kept_names = set(algorithm.link.keeps(trained.statistics)) if statistics else set()
    statistics = {name: x for name, x in statistics.items() if name not in kept_names}
    if statistics and algorithm.link.draws:
        raise ValueError(
            f"This method hides what clients send, but their running statistics {list(statistics)} "
            "would be sent in the clear; expected a network without running statistics, or a "
            "method such as algorithms.fedbn, under which clients keep theirs."
        )
    others = [name for name in tree.names(trained.frozen) if name not in statistics]
    frozen = (*others, *sorted(kept_names))
    return Update(values, algorithm.kind, statistics, frozen), kept


@partial(jit, static_argnums=(0, 1))
def _summarize(
    summarize: Callable[..., tuple[dict[str, Any], Any]],
    layout: Layout,
    trained: Trained,
    local: Any,
    federation: Federation,
    key: Key,
    division: Division | None,
) -> Spread:
    # The start is one model for all clients, or stacked like params.
    is_common = _rank(trained.start) < _rank(trained.params)
    common = (trained.start if is_common else None), trained.frozen
    own_start = None if is_common else trained.start

    def one(own: Any, common: tuple, federation: Federation, key: Key) -> Any:
        (place, mine, local), (start, frozen) = own, common
        # Common arrays are arguments of their own: stacked, they would take M times the memory.
        mine = mine._replace(start=mine.start if start is None else start, frozen=frozen)
        # The key is folded by id, so that a client draws the same in a cohort as among all clients.
        client = clients.client_key(key, clients.SUMMARIZE, clients.ids(federation)[place])
        return summarize(client, mine, clients.view(federation, place), local)

    return parallel.spread_clients(
        one,
        (jnp.arange(federation.num_clients), trained._replace(start=own_start, frozen=None), local),
        common,
        federation,
        key,
        sizes=federation.sizes,
        division=division,
        **layout._asdict(),
    )


def _rank(params: Params | None) -> int:
    # Stacked params have one axis more, so the first leaf is enough.
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


def _with_arrays(trained: Trained) -> Trained:
    # In exchanges without training, a start may be any pytree.
    start = tree.as_arrays(trained.start)
    return trained._replace(params=checks.arrays(trained.params), start=start)


def _split_leaves(algorithm: Algorithm, trained: Trained, federation: Federation) -> Trained:
    """Split models trained elsewhere into trained leaves, statistics and frozen leaves."""
    checks.stacked(trained.params, federation.num_clients)
    kinds, start = _kinds(algorithm.model, trained.params, federation), trained.start
    if set(kinds) == {leaves.TRAINED}:  # `training.train` has split them already.
        return trained
    parts = leaves.split_by_kind(kinds, trained.params)
    if jax.tree.structure(start) == jax.tree.structure(trained.params):
        start = leaves.split_by_kind(kinds, start).trained
    for name, leaf in tree.by_name(parts.frozen).items():
        alike = checks.is_traced(leaf) or np.array_equal(
            leaf, np.broadcast_to(leaf[:1], leaf.shape), equal_nan=True
        )
        if not alike:
            raise ValueError(
                f"Leaf '{name}' is not trained, but differs between clients; expected the same "
                "array for all clients. Train it, or use one for all."
            )
    frozen = jax.tree.map(lambda x: x[0], parts.frozen)
    return trained._replace(
        params=parts.trained, statistics=parts.statistics, frozen=frozen, start=start
    )


def _kinds(model: Model | None, stacked: Params, federation: Federation) -> tuple[str, ...]:
    """Return the kind of each leaf: by the mask, or without a network by the names of moments."""
    names = tree.names(stacked)
    if model is not None and [name for name, _ in model.mask or ()] == [*names]:
        return leaves.kinds(model, shapes_of_one(stacked), federation.inputs)
    if model is None and leaves.has_moments(stacked):
        return tuple(map(leaves.kind_of_moment, names))
    return (leaves.TRAINED,) * len(names)


def _check_summary(
    algorithm: Algorithm, trained: Trained, federation: Federation, key: Key
) -> None:
    checks.key(key)
    check_precision("the trained params", trained.params)
    if algorithm.model is not None:
        checks.model(algorithm.model)
        output_checks.gradients_stay_apart(trained.params, federation)
        one = leaves.join(*shapes_of_one((trained.params, trained.statistics)), trained.frozen)
        output_checks.outputs(algorithm.model, one, federation.inputs, federation.targets)


def _first_local(algorithm: Algorithm, stacked: Params) -> Any:
    # Most methods keep nothing: no program has to be compiled for that.
    return () if algorithm.link.init_client is nothing else _first_states(algorithm, stacked)


@partial(jit, static_argnums=0)
def _first_states(algorithm: Algorithm, stacked: Params) -> Any:
    return jax.vmap(algorithm.link.init_client)(stacked)


def _extras(algorithm: Algorithm, params: Params) -> Any:
    """Return the initial extras of an algorithm's optimiser, for any optimiser that it wraps."""
    state = algorithm.optimizer(optax.identity()).init(params)
    return getattr(state, "own", ())
