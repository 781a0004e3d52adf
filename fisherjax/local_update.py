"""Train one client: its epochs and steps, and wrappers of its optimiser."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers, _padding, clients, leaves
from fisherjax.clients import Federation
from fisherjax.typing import Array, Key, Model, Params


class LocalTraining(NamedTuple):
    """The static arguments of a client's training; functions are compared by identity.

    Attributes:
        model: The model.
        optimizer: The optax optimiser of the client.
        batch_size: Examples of a minibatch.
    """

    model: Model
    optimizer: optax.GradientTransformation
    batch_size: int


class KeptState(NamedTuple):
    """The state of an optimiser that `keep_state` makes.

    Attributes:
        own: State of the transformation, which training returns.
        base: State of the user's optimiser.
    """

    own: Any
    base: Any


class State(NamedTuple):
    """The values that a step changes.

    Attributes:
        params: The trained leaves.
        optimizer: The optimiser's state.
        statistics: The running statistics.
    """

    params: Params
    optimizer: Any
    statistics: Params


class ClientInputs(NamedTuple):
    """The values with which a client starts training.

    Attributes:
        start: The trained leaves.
        extras: Extra argument of the algorithm's optimiser, from `link.receive`.
        statistics: Other leaves that training changes.
        frozen: Leaves that training does not change, the same for all clients.
    """

    start: Params
    extras: Any
    statistics: Params
    frozen: Params


def first_state(local: LocalTraining, params: Params, statistics: Params) -> State:
    """Make the state before the first step."""
    # Weakly typed scalars become strongly typed, as they are after the first step.
    return jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)),
        State(params, local.optimizer.init(params), statistics),
    )


def kept_state(state: State) -> Any:
    """Return the part of the optimiser's state that `keep_state` keeps; () if there is none."""
    return state.optimizer.own if isinstance(state.optimizer, KeptState) else ()


def ends_elsewhere(state: State) -> bool:
    """Return whether `trained_params` may differ from the current params."""
    return _optimizers.ends_elsewhere(state.optimizer)


def trained_params(state: State) -> Params:
    """Return the trained leaves at the end of training, see `_optimizers.final_params`."""
    return _optimizers.final_params(state.params, state.optimizer)


def hides_the_loss(model: Model) -> bool:
    """Return whether optimisers may not read the loss, as under `privacy.dp_sgd`."""
    return getattr(model.apply_train, "hides_the_loss", False)


def client_epochs(
    local: LocalTraining,
    federation: Federation,
    place: Array,
    key: Key,
    given: ClientInputs,
    epochs: Array,
) -> Callable[[Array, State], tuple[State, Array]]:
    """Make a client's function `epoch(number, state) -> (state, mean loss of its examples)`."""
    examples = _padding.drop_uncounted(local.model, clients.view(federation, place))
    size = _size(local, federation, place)
    # Folded with the id, not the place: a client has the same draws in every cohort.
    key = clients.client_key(key, clients.TRAIN, clients.ids(federation)[place])

    def epoch(number: Array, state: State) -> tuple[State, Array]:
        # Folded with the epoch: training that stops after every epoch has the same draws.
        shuffle_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        permuted = clients.shuffled(shuffle_key, examples)
        steps, batch = clients.minibatches(permuted, local.batch_size)
        extra = {"start": given.start, "extras": given.extras, "last_epoch": number == epochs - 1}

        def body(step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, total = carry
            batch_key = jax.random.fold_in(step_key, step)
            state, loss = _step(local, state, given.frozen, extra, batch(step), batch_key)
            return state, total + loss.astype(total.dtype)

        # The sum has at least float32, even if the network computes in bfloat16.
        total = jnp.zeros((), jnp.result_type(float))
        # The number of steps differs between clients. Under vmap, clients that are done wait for
        # the largest client of the chunk.
        state, total = jax.lax.fori_loop(0, steps, body, (state, total))
        # A client without examples takes no step: its loss is 0, not 0 / 0.
        return state, total / jnp.maximum(size, 1)

    return epoch


def sizes(local: LocalTraining, federation: Federation) -> Array:
    """Return how many examples each client trains on, [M]: those of which a position counts."""
    if local.model.positions is None:
        return federation.sizes
    places = jnp.arange(federation.num_clients)
    return jax.lax.map(lambda place: _size(local, federation, place), places)


def _size(local: LocalTraining, federation: Federation, place: Array) -> Array:
    if local.model.positions is None:
        return federation.sizes[place]
    examples = _padding.drop_uncounted(local.model, clients.view(federation, place))
    return jnp.count_nonzero(clients.weights_of(examples)).astype(federation.sizes.dtype)


def _step(
    local: LocalTraining,
    state: State,
    frozen: Params,
    extra: dict[str, Any],
    batch: clients.Minibatch,
    key: Key,
) -> tuple[State, Array]:
    """Take one optimiser step; return the new state and the sum of the examples' losses."""
    model, (inputs, targets, weights) = local.model, batch

    def losses_of(params: Params) -> tuple[Array, tuple[Array, Params | None]]:
        all_leaves = leaves.join(params, state.statistics, frozen)
        if model.apply_train is None:
            outputs, new = model.apply(all_leaves, inputs), None
        else:
            outputs, new = model.apply_train(all_leaves, inputs, key, weights)
        likelihood = _padding.likelihood(model, inputs, outputs.shape)
        losses = likelihood.negative_log_likelihood(outputs, targets)
        # `where` is used because zero times NaN is NaN.
        total = jnp.where(weights > 0, losses, 0).sum()
        return total / (weights > 0).sum(), (total, new)

    (value, (total, new)), gradient = jax.value_and_grad(losses_of, has_aux=True)(state.params)
    if not hides_the_loss(model):
        extra = extra | _optimizers.loss_arguments(lambda w: losses_of(w)[0], value, gradient)
    update = _optimizers.with_extra_args(local.optimizer).update
    updates, optimizer_state = update(gradient, state.optimizer, state.params, **extra)
    params = optax.apply_updates(state.params, updates)
    statistics = state.statistics if new is None else leaves.select(state.statistics, new)
    # JAX requires that the state of a loop keeps its dtypes.
    return jax.tree.map(_as_before, State(params, optimizer_state, statistics), state), total


def _as_before(new: Array, old: Array) -> Array:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def penalised(
    penalty: Callable[..., Array],
) -> Callable[[optax.GradientTransformation], optax.GradientTransformationExtraArgs]:
    """Make a client's optimiser minimise its loss plus a penalty.

    Args:
        penalty: `(params, *, start, extras) -> number`, differentiable in params; `start` are the
            params at the start of training and `extras` is the value that `link.receive` returned.

    Returns:
        A function from the user's optimiser to one that adds the penalty to gradients, and to
        losses if the optimiser reads them; for the field `optimizer` of an algorithm. Equal
        optimisers give the same object. The loss that training reports has no penalty.

    Example:
        >>> optimizer = penalised(lambda w, start, extras: (w - start) ** 2 / 4)(optax.sgd(1.0))
        >>> w = jnp.array(3.0)
        >>> step, _ = optimizer.update(0 * w, optimizer.init(w), w, start=jnp.array(1.0))
        >>> print(step)
        -1.0
    """

    # Results are cached, so that `jit` does not compile training again.
    @functools.lru_cache(maxsize=64)
    def optimizer(base: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        inner = _optimizers.with_extra_args(base)

        def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
            start, extras = given["start"], given.get("extras", ())
            penalty_of = functools.partial(penalty, start=start, extras=extras)

            def penalised_gradient(gradient: Params, w: Params) -> Params:
                return jax.tree.map(jnp.add, gradient, jax.grad(penalty_of)(w))

            # An optimiser that reads the loss gets the one that clients minimise, with the penalty.
            if "value_fn" in given:
                loss, grad_fn = given["value_fn"], given["grad_fn"]
                given["value"] = given["value"] + penalty_of(params)
                given["grad"] = penalised_gradient(given["grad"], params)
                given["value_fn"] = lambda w: loss(w) + penalty_of(w)
                given["grad_fn"] = lambda w, *step: penalised_gradient(grad_fn(w, *step), w)
            return inner.update(penalised_gradient(updates, params), state, params, **given)

        return optax.GradientTransformationExtraArgs(base.init, update)

    return optimizer


def keep_state(
    transformation: optax.GradientTransformation, base: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Chain a transformation and an optimiser, and return the transformation's state from training.

    Args:
        transformation: Gets the gradients first, with the extra arguments `start`, `extras` and
            `last_epoch`, and must return gradients of the loss.
        base: The user's optimiser.

    Returns:
        The chain of both. `Trained.extras` is the stacked final state of the transformation.
    """
    first, second = map(_optimizers.with_extra_args, (transformation, base))

    # optax.chain has a plain tuple as state; after training `KeptState` is found by its type.
    def init(params: Params) -> KeptState:
        return KeptState(first.init(params), second.init(params))

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        updates, own = first.update(updates, state.own, params, **given)
        updates, rest = second.update(updates, state.base, params, **given)
        return updates, KeptState(own, rest)

    return optax.GradientTransformationExtraArgs(init, update)
