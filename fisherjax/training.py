"""Local training: every client runs its own optimiser on its own examples, from a common start.

One compiled program trains all clients. Client i takes ceil(n_i / B) steps: its
examples are shuffled, the last short batch is kept and averaged over its own examples. Minibatches
are gathered from the one copy of the data.
"""

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fisherjax import tree
from fisherjax.clients import TRAIN, Federation, LocalModels
from fisherjax.likelihoods import Likelihood
from fisherjax.mapping import chunk_size, map_clients, replicate
from fisherjax.typing import Apply, Array, Key, Params

Augment = Callable[[Key, Array], Array]
ApplyTrain = Callable[[Params, Array, Key], tuple[Array, Params | None]]


class _Recipe(NamedTuple):
    """What is compiled into the program; recognised by identity and value."""

    apply: Apply
    likelihood: Likelihood
    optimizer: optax.GradientTransformation
    batch_size: int
    mask: tuple[bool, ...]
    augment: Augment | None
    apply_train: ApplyTrain | None


class _State(NamedTuple):
    params: Params
    optimizer: Any


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
    progress: Callable[[int, Array], None] | None = None,
) -> LocalModels:
    r"""Train every client on its own examples.

    .. math:: W_i \leftarrow W_i - \eta \nabla \frac{1}{|b|} \sum_{n \in b} -\log p(y_n | x_n, W_i)

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
        progress: called with the epoch, from 0, and the losses [M] of that epoch.

    Returns:
        The stacked params, the loss of every epoch in nats, and the number of steps.

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
        Data", AISTATS 2017, ClientUpdate.
    """
    params = jax.tree.map(jnp.asarray, params)
    recipe = _Recipe(
        apply, likelihood, optimizer, batch_size, _mask(params, mask), augment, apply_train
    )
    _check(recipe, params, federation, key, epochs)
    recipe = recipe._replace(batch_size=min(batch_size, federation.indices.shape[1]))
    chunk = chunk_size(clients_per_chunk, federation.num_clients)

    mesh = federation.mesh
    params, key = replicate((params, key), mesh)
    how = (recipe, chunk, mesh)
    if progress is None:
        trained, losses = _all_epochs(*how, epochs, params, federation, key)
    else:
        trained, losses = _epoch_by_epoch(*how, epochs, params, federation, key, progress)
    return LocalModels(trained, losses, epochs * _steps(federation.sizes, recipe.batch_size))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _all_epochs(
    recipe: _Recipe,
    chunk: int,
    mesh: Mesh | None,
    epochs: int,
    params: Params,
    federation: Federation,
    key: Key,
) -> tuple[Params, Array]:
    """Train client after client to the end: only the clients of a chunk have optimiser states."""

    def one(
        client: Array, params: Params, federation: Federation, key: Key
    ) -> tuple[Params, Array]:
        start = _start(recipe.optimizer, params)
        state, losses = _client_epochs(recipe, federation, client, key, start, jnp.arange(epochs))
        return state.params, losses

    return map_clients(
        one,
        jnp.arange(federation.num_clients),
        params,
        federation,
        key,
        sizes=federation.sizes,
        clients_per_chunk=chunk,
        mesh=mesh,
    )


def _epoch_by_epoch(
    recipe: _Recipe,
    chunk: int,
    mesh: Mesh | None,
    epochs: int,
    params: Params,
    federation: Federation,
    key: Key,
    progress: Callable[[int, Array], None],
) -> tuple[Params, Array]:
    """Train all clients for an epoch before the next, so that something can be shown after each."""
    state = _starts(recipe.optimizer, federation.num_clients, params)
    losses = []
    for epoch in range(epochs):
        state, loss = _epoch(recipe, chunk, mesh, state, federation, key, epoch)
        losses.append(loss)
        progress(epoch, loss[:, 0])
    return state.params, jnp.concatenate(losses, axis=1)


def _start(optimizer: optax.GradientTransformation, params: Params) -> _State:
    # The conversion makes weakly typed scalars strong, as they are after the first step.
    return jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)),
        _State(params, optimizer.init(params)),
    )


@partial(jax.jit, static_argnums=(0, 1))
def _starts(optimizer: optax.GradientTransformation, num_clients: int, params: Params) -> _State:
    def stack(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf, (num_clients, *leaf.shape))

    return jax.tree.map(stack, _start(optimizer, params))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _epoch(
    recipe: _Recipe,
    chunk: int,
    mesh: Mesh | None,
    state: _State,
    federation: Federation,
    key: Key,
    epoch: Array,
) -> tuple[_State, Array]:
    def one(
        client_and_state: tuple[Array, _State], federation: Federation, key: Key, epoch: Array
    ) -> tuple[_State, Array]:
        client, own = client_and_state
        return _client_epochs(recipe, federation, client, key, own, epoch[None])

    return map_clients(
        one,
        (jnp.arange(federation.num_clients), state),
        federation,
        key,
        jnp.asarray(epoch),
        sizes=federation.sizes,
        clients_per_chunk=chunk,
        mesh=mesh,
    )


def _client_epochs(
    recipe: _Recipe, federation: Federation, client: Array, key: Key, state: _State, epochs: Array
) -> tuple[_State, Array]:
    """Train one client for the epochs of these numbers; return the mean loss of each."""
    client_key = jax.random.fold_in(jax.random.fold_in(key, TRAIN), client)
    return jax.lax.scan(
        lambda state, epoch: _client_epoch(
            recipe, federation, client, jax.random.fold_in(client_key, epoch), state
        ),
        state,
        epochs,
    )


def _client_epoch(
    recipe: _Recipe, federation: Federation, client: Array, key: Key, state: _State
) -> tuple[_State, Array]:
    size = federation.sizes[client]
    shuffle_key, step_key = jax.random.split(key)
    rows = _shuffle(shuffle_key, federation.indices[client], size)

    def body(step: Array, carry: tuple[_State, Array]) -> tuple[_State, Array]:
        state, total = carry
        start = step * recipe.batch_size
        count = jnp.minimum(size - start, recipe.batch_size)
        position = jnp.arange(recipe.batch_size)
        batch = rows[start + position % count]
        inputs, targets = federation.inputs[batch], federation.targets[batch]
        state, loss = _step(
            recipe, state, inputs, targets, position < count, jax.random.fold_in(step_key, step)
        )
        return state, total + loss.astype(total.dtype)

    total = jnp.zeros((), jnp.result_type(float))
    state, total = jax.lax.fori_loop(0, _steps(size, recipe.batch_size), body, (state, total))
    return state, total / jnp.maximum(size, 1)


def _shuffle(key: Key, rows: Array, size: Array) -> Array:
    """Permute the first `size` rows; the padding stays behind them.

    The draw of a row depends on the key and its place only, not on how much padding there is.
    """
    draws = jax.random.bits(key, rows.shape, jnp.uint32)
    padding = jnp.arange(rows.shape[0]) >= size
    return rows[jnp.argsort(jnp.where(padding, ~jnp.uint32(0), draws), stable=True)]


def _step(
    recipe: _Recipe, state: _State, inputs: Array, targets: Array, valid: Array, key: Key
) -> tuple[_State, Array]:
    """Take one step; return the sum of the valid examples' losses too."""
    augment_key, apply_key = jax.random.split(key)
    if recipe.augment is not None:
        inputs = recipe.augment(augment_key, inputs)

    def mean_loss(params: Params) -> tuple[Array, tuple[Array, Params | None]]:
        if recipe.apply_train is None:
            outputs, new = recipe.apply(params, inputs), None
        else:
            outputs, new = recipe.apply_train(params, inputs, apply_key)
        losses = recipe.likelihood.negative_log_likelihood(outputs, targets)
        total = jnp.where(valid, losses, 0).sum()
        return total / valid.sum(), (total, new)

    gradient, (total, new) = jax.grad(mean_loss, has_aux=True)(state.params)
    gradient = _select(recipe.mask, gradient, jax.tree.map(jnp.zeros_like, gradient))
    updates, optimizer_state = recipe.optimizer.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    params = _select(recipe.mask, params, state.params if new is None else new)
    return _State(params, optimizer_state), total


def _select(mask: tuple[bool, ...], trained: Params, others: Params) -> Params:
    """Take the leaves of `trained` where the mask is True."""
    leaves = zip(mask, jax.tree.leaves(trained), jax.tree.leaves(others), strict=True)
    selected = [x if chosen else y.astype(x.dtype) for chosen, x, y in leaves]
    return jax.tree.unflatten(jax.tree.structure(trained), selected)


def _steps(sizes: Array, batch_size: int) -> Array:
    return (sizes + batch_size - 1) // batch_size


def _mask(params: Params, mask: Any) -> tuple[bool, ...]:
    if mask is None:
        return (True,) * len(jax.tree.leaves(params))
    if jax.tree.structure(mask) != jax.tree.structure(params):
        raise ValueError(
            f"The mask has leaves {list(tree.names(mask))}; expected one True or False for "
            f"each leaf of params, {list(tree.names(params))}."
        )
    leaves = jax.tree.leaves(mask)
    if not all(isinstance(leaf, (bool, jnp.bool_)) for leaf in leaves) or not any(leaves):
        raise ValueError(
            f"The mask's leaves are {leaves}; expected Python's True (trained) or False, and at "
            "least one True."
        )
    return tuple(map(bool, leaves))


def _check(recipe: _Recipe, params: Params, federation: Federation, key: Key, epochs: int) -> None:
    tree.check_floating(params)
    if not isinstance(federation, Federation):
        raise TypeError(
            f"federation is a {type(federation).__name__}; expected the result of "
            "clients.federation."
        )
    if not (hasattr(recipe.optimizer, "init") and hasattr(recipe.optimizer, "update")):
        raise TypeError(
            f"optimizer is {recipe.optimizer!r}; expected an optax optimiser such as "
            "optax.sgd(1e-2, 0.9)."
        )
    if not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key):
        raise TypeError("key is not a typed key; make one with jax.random.key(seed).")
    for name, value in (("epochs", epochs), ("batch_size", recipe.batch_size)):
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected an integer of at least 1.")
    outputs = jax.eval_shape(recipe.apply, params, federation.inputs)
    recipe.likelihood.check(outputs.shape, federation.targets)
