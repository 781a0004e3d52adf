"""One client's training: epochs of shuffled minibatches, the last short one kept.

Everything that is compiled into the program is a `Recipe`; everything that a step changes is a
`State`; what holds a client back from going its own way is a `Restraint`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax.clients import TRAIN, Federation
from fisherjax.likelihoods import Likelihood
from fisherjax.typing import Apply, Array, Key, Params

Augment = Callable[[Key, Array], Array]
ApplyTrain = Callable[[Params, Array, Key], tuple[Array, Params | None]]


class Recipe(NamedTuple):
    """What is compiled into the program; recognised by identity and value."""

    apply: Apply
    likelihood: Likelihood
    optimizer: optax.GradientTransformation
    batch_size: int
    mask: tuple[bool, ...]
    augment: Augment | None
    apply_train: ApplyTrain | None


class State(NamedTuple):
    """What a step changes."""

    params: Params
    optimizer: Any


class Restraint(NamedTuple):
    """What holds a client back; None leaves it out of the program.

    Attributes:
        proximal: (mu, params), what the gradient of mu / 2 ||w - params||^2 is computed from.
        correction: like params, subtracted after each step.
    """

    proximal: tuple[Array, Params] | None = None
    correction: Params | None = None


def count_steps(sizes: Array, batch_size: int) -> Array:
    """Count the minibatches of an epoch, ceil(n_i / B)."""
    return (sizes + batch_size - 1) // batch_size


def start_state(optimizer: optax.GradientTransformation, params: Params) -> State:
    """Make the state before the first step."""
    # The conversion makes weakly typed scalars strong, as they are after the first step.
    return jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)),
        State(params, optimizer.init(params)),
    )


def train_client(
    recipe: Recipe,
    federation: Federation,
    client: Array,
    key: Key,
    state: State,
    restraint: Restraint,
    epochs: Array,
) -> tuple[State, Array]:
    """Train one client for the epochs of these numbers; return the mean loss of each."""
    client_key = jax.random.fold_in(jax.random.fold_in(key, TRAIN), client)
    return jax.lax.scan(
        lambda state, epoch: _client_epoch(
            recipe, federation, client, jax.random.fold_in(client_key, epoch), state, restraint
        ),
        state,
        epochs,
    )


def _client_epoch(
    recipe: Recipe,
    federation: Federation,
    client: Array,
    key: Key,
    state: State,
    restraint: Restraint,
) -> tuple[State, Array]:
    size = federation.sizes[client]
    shuffle_key, step_key = jax.random.split(key)
    rows = _shuffle(shuffle_key, federation.indices[client], size)

    def body(step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, total = carry
        start = step * recipe.batch_size
        count = jnp.minimum(size - start, recipe.batch_size)
        position = jnp.arange(recipe.batch_size)
        batch = rows[start + position % count]
        examples = (federation.inputs[batch], federation.targets[batch], position < count)
        state, loss = _step(recipe, state, restraint, *examples, jax.random.fold_in(step_key, step))
        return state, total + loss.astype(total.dtype)

    total = jnp.zeros((), jnp.result_type(float))
    state, total = jax.lax.fori_loop(0, count_steps(size, recipe.batch_size), body, (state, total))
    return state, total / jnp.maximum(size, 1)


def _shuffle(key: Key, rows: Array, size: Array) -> Array:
    """Permute the first `size` rows; the padding stays behind them.

    The draw of a row depends on the key and its place only, not on how much padding there is.
    """
    draws = jax.random.bits(key, rows.shape, jnp.uint32)
    padding = jnp.arange(rows.shape[0]) >= size
    return rows[jnp.argsort(jnp.where(padding, ~jnp.uint32(0), draws), stable=True)]


def _step(
    recipe: Recipe,
    state: State,
    restraint: Restraint,
    inputs: Array,
    targets: Array,
    valid: Array,
    key: Key,
) -> tuple[State, Array]:
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
    if restraint.proximal is not None:
        mu, centre = restraint.proximal
        gradient = jax.tree.map(
            lambda g, w, c: g + mu.astype(g.dtype) * (w - c), gradient, state.params, centre
        )
    gradient = _select(recipe.mask, gradient, jax.tree.map(jnp.zeros_like, gradient))
    updates, optimizer_state = recipe.optimizer.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    if restraint.correction is not None:
        params = jax.tree.map(lambda w, c: w - c.astype(w.dtype), params, restraint.correction)
    params = _select(recipe.mask, params, state.params if new is None else new)
    return State(params, optimizer_state), total


def _select(mask: tuple[bool, ...], trained: Params, others: Params) -> Params:
    """Take the leaves of `trained` where the mask is True."""
    leaves = zip(mask, jax.tree.leaves(trained), jax.tree.leaves(others), strict=True)
    selected = [x if chosen else y.astype(x.dtype) for chosen, x, y in leaves]
    return jax.tree.unflatten(jax.tree.structure(trained), selected)
