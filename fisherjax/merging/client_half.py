"""What clients send: computed for all of them, on what they were trained to."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import clients, devices, leaves, parallel, tree
from fisherjax._core import checks, output_checks
from fisherjax._core.compiler import eval_shape, jit
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm
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
    check_algorithm(algorithm)
    clients.check(federation)
    trained = _told_apart(algorithm, _with_arrays(_as_trained(trained)), federation)
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
    """Predict the bytes that `summarize` needs on each device, all models and updates among them.

    A method without a network, such as FedAvg, does not know what a mask freezes: pass
    `leaves.trained(model, params)` then.

    `params` are one client's, or their shapes, and `start` what clients are given that do not
    train, or its shapes; the other arguments are those of `summarize`.

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
    own = leaves.Leaves(params, None, None)
    if algorithm.model is not None:
        own = leaves.split(algorithm.model, params, federation.inputs)
        if start is not None:  # nothing trains, and all others stay as they are
            mine, others = leaves.split_trained(algorithm.model, params)
            own = leaves.Leaves(mine, None, others)
    if start is None:
        extras = eval_shape(lambda w: _extras(algorithm, w), own.trained)
        start, steps = own.trained, np.zeros(num_clients, np.int32)
    key, start, steps, frozen = replicate((key, start, steps, own.frozen), mesh)
    local = eval_shape(algorithm.link.init_client, own.trained)
    # Shapes only: the compiler is asked before any stack [M, ...] is made.
    several = own.trained, own.statistics, local, extras
    stacked, statistics, local, extras = devices.stacked_shapes(several, num_clients, mesh)
    trained = Trained(stacked, start, steps, None, extras, statistics, frozen)
    return devices.memory(_summarize, algorithm, layout, trained, local, federation, key)


def summarize_cohort(
    algorithm: Algorithm,
    layout: Layout,
    trained: Trained,
    local: Any,
    federation: Federation,
    key: Key,
) -> tuple[Update, Any]:
    """Compute the stacked updates, and what each client keeps, given what it kept; unchecked."""
    found = _summarize(algorithm, layout, trained, local, federation, key)
    values, kept = in_order(found, layout.mesh)
    statistics = tree.by_name(trained.statistics)
    own = set(algorithm.link.keeps(trained.statistics)) if statistics else set()
    statistics = {name: x for name, x in statistics.items() if name not in own}
    if statistics and algorithm.link.draws:
        raise ValueError(
            f"This method hides what clients send, and the running statistics {list(statistics)} "
            "would be sent as they are; expected a network without any, or clients that keep "
            "theirs, as algorithms.fedbn lets them."
        )
    frozen = (*tree.names(trained.frozen), *sorted(own))
    return Update(values, algorithm.kind, statistics, frozen), kept


@partial(jit, static_argnums=(0, 1))
def _summarize(
    algorithm: Algorithm,
    layout: Layout,
    trained: Trained,
    local: Any,
    federation: Federation,
    key: Key,
) -> Spread:
    # The start is one model for all, or stacked like the params.
    is_common = _rank(trained.start) < _rank(trained.params)
    common = (trained.start if is_common else None), trained.frozen
    own_start = None if is_common else trained.start

    def one(own: Any, common: tuple, federation: Federation, key: Key) -> Any:
        (place, mine, local), (start, frozen) = own, common
        # What is common comes in once and is not stacked: M copies would be in memory.
        mine = mine._replace(start=mine.start if start is None else start, frozen=frozen)
        # By id, not by place: in a cohort a client draws what it would draw among all.
        client = clients.client_key(key, clients.SUMMARIZE, clients.ids(federation)[place])
        return algorithm.summarize(client, mine, clients.view(federation, place), local)

    return parallel.spread_clients(
        one,
        (
            jnp.arange(federation.num_clients),
            trained._replace(start=own_start, frozen=None),
            local,
        ),
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


def _with_arrays(trained: Trained) -> Trained:
    # A start may be anything that clients were given.
    start = tree.as_arrays(trained.start)
    return trained._replace(params=checks.arrays(trained.params), start=start)


def _told_apart(algorithm: Algorithm, trained: Trained, federation: Federation) -> Trained:
    """Tell the leaves of models apart that were trained elsewhere."""
    checks.stacked(trained.params, federation.num_clients)
    kinds, start = _kinds(algorithm.model, trained.params, federation), trained.start
    if set(kinds) == {leaves.TRAINED}:  # what `train` gave is told apart already
        return trained
    own = leaves.split_by_kind(kinds, trained.params)
    if jax.tree.structure(start) == jax.tree.structure(trained.params):
        start = leaves.split_by_kind(kinds, start).trained
    for name, leaf in tree.by_name(own.frozen).items():
        alike = checks.is_traced(leaf) or np.array_equal(
            leaf, np.broadcast_to(leaf[:1], leaf.shape), equal_nan=True
        )
        if not alike:
            raise ValueError(
                f"Leaf '{name}' is not trained, and yet differs between the "
                "clients; expected the same for all. Train it, or give all clients one."
            )
    frozen = jax.tree.map(lambda x: x[0], own.frozen)
    return trained._replace(
        params=own.trained, statistics=own.statistics, frozen=frozen, start=start
    )


def _kinds(model: Model | None, stacked: Params, federation: Federation) -> tuple[str, ...]:
    """Say of each leaf which kind it is: by the mask, or without a network by names of moments."""
    names = tree.names(stacked)
    if model is not None and [name for name, _ in model.mask or ()] == [*names]:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
        return leaves.kinds(model, one, federation.inputs)
    if model is None and leaves.has_moments(stacked):
        return tuple(map(leaves.kind_of_moment, names))
    return (leaves.TRAINED,) * len(names)


def _check_summary(
    algorithm: Algorithm, trained: Trained, federation: Federation, key: Key
) -> None:
    checks.key(key)
    checks.stacked(trained.params, federation.num_clients)
    if algorithm.model is not None:
        checks.model(algorithm.model)
        # One client's shapes: the network does not know the client axis.
        several = trained.params, trained.statistics
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), several)
        one = leaves.join(*one, trained.frozen)
        output_checks.outputs(algorithm.model, one, federation.inputs, federation.targets)


@partial(jit, static_argnums=0)
def _first_local(algorithm: Algorithm, stacked: Params) -> Any:
    return jax.vmap(algorithm.link.init_client)(stacked)


def _extras(algorithm: Algorithm, params: Params) -> Any:
    """Make what an algorithm's optimiser keeps, whatever it is wrapped around."""
    state = algorithm.optimizer(optax.identity()).init(params)
    return getattr(state, "own", ())
