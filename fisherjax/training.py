"""Local training: every client runs its own optimiser on its own examples, from a common start.

One compiled program trains all clients. Client i takes ceil(n_i / B) steps an epoch: its examples
are shuffled, the last short batch is kept and averaged over its own examples. Minibatches are
gathered from the one copy of the data.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fisherjax.clients import Federation, LocalModels
from fisherjax.likelihoods import Likelihood
from fisherjax.local import (
    ApplyTrain,
    Augment,
    Recipe,
    Restraint,
    State,
    check_count,
    check_data,
    check_key,
    count_steps,
    make_recipe,
    start_state,
    train_client,
)
from fisherjax.mapping import (
    Memory,
    chunk_size,
    map_clients,
    memory,
    replicate,
    stacked_shapes,
)
from fisherjax.typing import Apply, Array, Key, Params


def train(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None = None,
    mask: Any = None,
    augment: Augment | None = None,
    apply_train: ApplyTrain | None = None,
    proximal: float = 0.0,
    correction: Params | None = None,
    squared_gradients: bool = False,
    progress: Callable[[int, Array], None] | None = None,
) -> LocalModels:
    r"""Train every client on its own examples.

    .. math:: W_i \leftarrow W_i - \eta \nabla \left( \frac{1}{|b|} \sum_{n \in b}
              -\log p(y_n | x_n, W_i) + \frac{\mu}{2} \| W_i - W \|^2 \right) - e_i

    for the minibatches b of a fresh permutation of client i's examples in every epoch. A client
    without examples keeps the start. Compiled once for the same function objects and shapes.

    Args:
        apply: `apply(params, inputs [B, ...]) -> outputs`.
        likelihood: whose negative log-likelihood is minimised.
        params: the common start, floating leaves.
        federation: the clients' data.
        key: folded by client and epoch; the chunk does not matter.
        optimizer: any optax optimiser; its state starts afresh on every client.
        epochs: passes over each client's data, at least 1.
        batch_size: B, at least 1.
        clients_per_chunk: 1 trains client after client (best on a CPU), k trains k side by side
            (faster on an accelerator, and memory grows with it); None chooses.
        mask: like params, with True where a leaf is trained; others keep their value or take
            the statistics of `apply_train`. None trains everything.
        augment: `augment(key, inputs [B, ...]) -> inputs`, applied to each minibatch.
        apply_train: `apply_train(params, inputs, key) -> (outputs, new)` in place of apply, for
            dropout and running statistics. `new` is None, or like params; its leaves are taken
            where the mask is False. A short batch is filled up by repeating its own examples, which
            carry no weight in the loss but do enter such statistics.
        proximal: mu >= 0, how strongly trained leaves are pulled back to the start W (FedProx). The
            loss that is returned leaves this out.
        correction: e_i, stacked like params with a leading axis M, subtracted from trained leaves
            after each step of the optimiser, which does not see it (SCAFFOLD).
        squared_gradients: whether to add up the squared gradients of the last epoch's minibatches,
            before the proximal term, for FedFish.
        progress: called with the epoch, from 0, and the losses [M] of that epoch. All clients then
            train for an epoch before the next, and their optimiser states are all kept; without it
            a client trains to the end, and only those of a chunk are in memory.

    Returns:
        The stacked params, the loss of every epoch in nats, the number of steps, and the squared
        gradients if asked for.

    Raises:
        TypeError: if params are not floating, or an argument has the wrong kind.
        ValueError: if the targets do not fit the outputs, the mask does not fit params, or a number
            is not positive.

    Example:
        >>> import jax, optax, numpy as np
        >>> from fisherjax import clients, likelihoods, training
        >>> data = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
        >>> federation = clients.federation(data, [np.array([0, 1, 2]), np.array([3])])
        >>> models = training.train(
        ...     lambda w, x: x @ w,
        ...     likelihoods.categorical,
        ...     np.zeros((4, 2)),
        ...     federation,
        ...     key=jax.random.key(0),
        ...     optimizer=optax.sgd(0.1),
        ...     epochs=2,
        ...     batch_size=2,
        ... )
        >>> models.params.shape, models.steps.tolist()
        ((2, 4, 2), [4, 2])

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
        Data", AISTATS 2017, ClientUpdate. The proximal term: Li et al., "Federated Optimization in
        Heterogeneous Networks", MLSys 2020, equation 2. The correction: Karimireddy et al.,
        "SCAFFOLD", ICML 2020, algorithm 1; outside the optimiser as in NIID-Bench's code.
    """
    run = _prepare(
        apply,
        likelihood,
        params,
        federation,
        key=key,
        optimizer=optimizer,
        epochs=epochs,
        batch_size=batch_size,
        clients_per_chunk=clients_per_chunk,
        mask=mask,
        augment=augment,
        apply_train=apply_train,
        proximal=proximal,
        correction=correction,
        squared_gradients=squared_gradients,
    )
    if progress is None:
        trained, losses, squares = _all_epochs(*run.how, epochs, *run.arrays, federation)
    else:
        trained, losses, squares = _epoch_by_epoch(run, epochs, federation, progress)
    steps = epochs * count_steps(federation.sizes, run.how.recipe.batch_size)
    return LocalModels(trained, losses, steps, squares)


def train_memory(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    federation: Federation,
    *,
    epochs: int,
    progress: Any = None,
    **options: Any,
) -> Memory:
    """Predict the memory of `train`, with the data and the models of all clients.

    With `progress` all clients' optimiser states are kept between epochs, otherwise those of a
    chunk.

    Args:
        apply: as for `train`.
        likelihood: as for `train`.
        params: as for `train`.
        federation: as for `train`.
        epochs: as for `train`.
        progress: as for `train`; whether it is None is all that counts.
        **options: all others of `train`.

    Returns:
        Bytes on each device.

    Raises:
        TypeError: as `train`.
        ValueError: as `train`.

    Example:
        >>> import jax, optax, numpy as np
        >>> from fisherjax import clients, likelihoods, training
        >>> data = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
        >>> federation = clients.federation(data, [np.array([0, 1, 2]), np.array([3])])
        >>> need = training.train_memory(
        ...     lambda w, x: x @ w,
        ...     likelihoods.categorical,
        ...     np.zeros((4, 2), np.float32),
        ...     federation,
        ...     key=jax.random.key(0),
        ...     optimizer=optax.sgd(0.1),
        ...     epochs=2,
        ...     batch_size=2,
        ... )
        >>> need.resident > federation.inputs.nbytes
        True
    """
    run = _prepare(apply, likelihood, params, federation, epochs=epochs, **options)
    if progress is None:
        return memory(_all_epochs, *run.how, epochs, *run.arrays, federation)
    params, *others = run.arrays
    start = jax.eval_shape(lambda w: start_state(run.how.recipe, w), params)
    states = stacked_shapes(start, federation.num_clients, run.how.mesh)
    return memory(_epoch, *run.how, states, *others, federation, 0)


class _How(NamedTuple):
    """What a program is compiled for."""

    recipe: Recipe
    clients_per_chunk: int
    mesh: Mesh | None


class _Arrays(NamedTuple):
    """What a program computes with, besides the data."""

    params: Params
    key: Key
    proximal: tuple[Array, Params] | None
    correction: Params | None


class _Run(NamedTuple):
    """Checked arguments, on the devices that the clients are spread over."""

    how: _How
    arrays: _Arrays


def _prepare(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None = None,
    mask: Any = None,
    augment: Augment | None = None,
    apply_train: ApplyTrain | None = None,
    proximal: float = 0.0,
    correction: Params | None = None,
    squared_gradients: bool = False,
) -> _Run:
    params = jax.tree.map(jnp.asarray, params)
    check_data(apply, likelihood, params, federation)
    recipe = make_recipe(
        apply,
        likelihood,
        params,
        federation,
        optimizer=optimizer,
        batch_size=batch_size,
        mask=mask,
        augment=augment,
        apply_train=apply_train,
        squared_gradients=squared_gradients,
    )
    check_key(key)
    check_count("epochs", epochs)
    _check_restraint(proximal, correction, params, federation.num_clients)
    chunk = chunk_size(clients_per_chunk, federation.num_clients)
    mesh = federation.mesh
    params, key = replicate((params, key), mesh)
    pull = None
    if isinstance(proximal, jax.core.Tracer) or proximal > 0:
        pull = (replicate(jnp.asarray(proximal, float), mesh), params)
    return _Run(_How(recipe, chunk, mesh), _Arrays(params, key, pull, correction))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _all_epochs(
    recipe: Recipe,
    chunk: int,
    mesh: Mesh | None,
    epochs: int,
    params: Params,
    key: Key,
    proximal: tuple[Array, Params] | None,
    correction: Params | None,
    federation: Federation,
) -> tuple[Params, Array, Params | None]:
    """Train client after client to the end: only the clients of a chunk have optimiser states."""

    def one(
        own: tuple[Array, Params | None],
        params: Params,
        key: Key,
        proximal: tuple[Array, Params] | None,
        federation: Federation,
    ) -> tuple[Params, Array, Params | None]:
        client, correction = own
        state, losses = train_client(
            recipe,
            federation,
            client,
            key,
            start_state(recipe, params),
            Restraint(proximal, correction),
            jnp.arange(epochs),
        )
        return state.params, losses, state.squared_gradients

    return map_clients(
        one,
        (jnp.arange(federation.num_clients), correction),
        params,
        key,
        proximal,
        federation,
        sizes=federation.sizes,
        clients_per_chunk=chunk,
        mesh=mesh,
    )


def _epoch_by_epoch(
    run: _Run, epochs: int, federation: Federation, progress: Callable[[int, Array], None]
) -> tuple[Params, Array, Params | None]:
    """Train all clients for an epoch before the next, so that something can be shown after each."""
    params, *others = run.arrays
    state = _starts(run.how.recipe, federation.num_clients, params)
    losses = []
    for epoch in range(epochs):
        state, loss = _epoch(*run.how, state, *others, federation, epoch)
        losses.append(loss)
        progress(epoch, loss[:, 0])
    return state.params, jnp.concatenate(losses, axis=1), state.squared_gradients


@partial(jax.jit, static_argnums=(0, 1))
def _starts(recipe: Recipe, num_clients: int, params: Params) -> State:
    def stack(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf, (num_clients, *leaf.shape))

    return jax.tree.map(stack, start_state(recipe, params))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _epoch(
    recipe: Recipe,
    chunk: int,
    mesh: Mesh | None,
    state: State,
    key: Key,
    proximal: tuple[Array, Params] | None,
    correction: Params | None,
    federation: Federation,
    epoch: Array,
) -> tuple[State, Array]:
    def one(
        own: tuple[Array, State, Params | None],
        key: Key,
        proximal: tuple[Array, Params] | None,
        federation: Federation,
        epoch: Array,
    ) -> tuple[State, Array]:
        client, state, correction = own
        restraint = Restraint(proximal, correction)
        return train_client(recipe, federation, client, key, state, restraint, epoch[None])

    return map_clients(
        one,
        (jnp.arange(federation.num_clients), state, correction),
        key,
        proximal,
        federation,
        jnp.asarray(epoch),
        sizes=federation.sizes,
        clients_per_chunk=chunk,
        mesh=mesh,
    )


def _check_restraint(
    proximal: float, correction: Params | None, params: Params, num_clients: int
) -> None:
    if not isinstance(proximal, jax.core.Tracer) and not 0 <= proximal < float("inf"):
        raise ValueError(f"proximal is {proximal}; expected a finite number, zero or more.")
    if correction is None:
        return
    expected = jax.tree.map(lambda leaf: (num_clients, *leaf.shape), params)
    if jax.tree.map(jnp.shape, correction) != expected:
        raise ValueError(
            f"correction has leaves of shapes {jax.tree.map(jnp.shape, correction)}; expected "
            f"{expected}, params with a leading axis of the {num_clients} clients."
        )
