"""One client's training: epochs of shuffled minibatches, the last short one kept.

Everything that is compiled into the program is a `Recipe`; everything that a step changes is a
`State`; what holds a client back from going its own way is a `Restraint`.
"""

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import tree
from fisherjax.clients import TRAIN, Federation
from fisherjax.likelihoods import Likelihood
from fisherjax.typing import Apply, Array, Key, Params

Augment = Callable[[Key, Array], Array]
ApplyTrain = Callable[[Params, Array, Key], tuple[Array, Params | None]]


class Recipe(NamedTuple):
    """What is compiled into the program; recognised by identity and value.

    `training.train` says what each of them is; `mask` has one entry a leaf.
    """

    apply: Apply
    likelihood: Likelihood
    optimizer: optax.GradientTransformation
    batch_size: int
    mask: tuple[bool, ...]
    augment: Augment | None
    apply_train: ApplyTrain | None
    squared_gradients: bool


class State(NamedTuple):
    """What a step changes.

    Attributes:
        params: the client's own.
        optimizer: the state of its optimiser.
        squared_gradients: like params, at least float32, of the epoch that is under way; None
            leaves them out of the program.
    """

    params: Params
    optimizer: Any
    squared_gradients: Params | None = None


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


def make_recipe(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    federation: Federation,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    mask: Any = None,
    augment: Augment | None = None,
    apply_train: ApplyTrain | None = None,
    squared_gradients: bool = False,
) -> Recipe:
    """Put together what clients train with; `training.train` says what the arguments are.

    Raises:
        TypeError: if the optimiser is none.
        ValueError: if the mask does not fit params, or the batch size is not positive.
    """
    check_optimizer("optimizer", optimizer)
    check_count("batch_size", batch_size)
    return Recipe(
        apply,
        likelihood,
        optimizer,
        min(batch_size, federation.indices.shape[1]),
        _mask(params, mask),
        augment,
        apply_train,
        squared_gradients,
    )


def check_data(
    apply: Apply, likelihood: Likelihood, params: Params, federation: Federation
) -> None:
    """Refuse params that are not floating, and data that do not fit the network's outputs."""
    tree.check_floating(params)
    if not isinstance(federation, Federation):
        raise TypeError(
            f"federation is a {type(federation).__name__}; expected the result of "
            "clients.federation."
        )
    outputs = jax.eval_shape(apply, params, federation.inputs)
    likelihood.check(outputs.shape, federation.targets)


def check_optimizer(name: str, optimizer: Any) -> None:
    """Refuse what is not an optax optimiser."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"{name} is {optimizer!r}; expected an optax optimiser such as optax.sgd(1e-2, 0.9)."
        )


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a positive integer."""
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 1.")


def check_key(key: Any) -> None:
    """Refuse old-style keys."""
    if not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key):
        raise TypeError("key is not a typed key; make one with jax.random.key(seed).")


def start_state(recipe: Recipe, params: Params) -> State:
    """Make the state before the first step."""
    squares = zero_squares(params) if recipe.squared_gradients else None
    # The conversion makes weakly typed scalars strong, as they are after the first step.
    return jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)),
        State(params, recipe.optimizer.init(params), squares),
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
    if recipe.squared_gradients:
        state = state._replace(squared_gradients=zero_squares(state.params))
    rows = shuffle(shuffle_key, federation.indices[client], size)

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


def shuffle(key: Key, rows: Array, size: Array) -> Array:
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
    zeros = jax.tree.map(jnp.zeros_like, gradient)
    gradient = select(recipe.mask, gradient, zeros)
    squares = state.squared_gradients
    if recipe.squared_gradients:
        squares = add_squares(squares, gradient)
    if restraint.proximal is not None:
        mu, centre = restraint.proximal
        gradient = jax.tree.map(
            lambda g, w, c: g + mu.astype(g.dtype) * (w - c), gradient, state.params, centre
        )
        gradient = select(recipe.mask, gradient, zeros)
    updates, optimizer_state = recipe.optimizer.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    if restraint.correction is not None:
        params = jax.tree.map(lambda w, c: w - c.astype(w.dtype), params, restraint.correction)
    params = select(recipe.mask, params, state.params if new is None else new)
    return State(params, optimizer_state, squares), total


def add_squares(squares: Params, gradient: Params) -> Params:
    """Add the squares of a gradient, entry by entry."""
    return jax.tree.map(lambda s, g: s + jnp.square(g.astype(s.dtype)), squares, gradient)


def zero_squares(params: Params) -> Params:
    """Make zeros like params, at least float32: squares are too small for bfloat16."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), params
    )


def select(mask: tuple[bool, ...], trained: Params, others: Params) -> Params:
    """Take the leaves of `trained` where the mask is True."""
    leaves = zip(mask, jax.tree.leaves(trained), jax.tree.leaves(others), strict=True)
    selected = [x if chosen else y.astype(x.dtype) for chosen, x, y in leaves]
    return jax.tree.unflatten(jax.tree.structure(trained), selected)


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
