"""One client's training: its epochs and steps, and optimisers that are told or keep more."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers, _sequences, clients, leaves
from fisherjax.clients import Federation
from fisherjax.typing import Array, Key, Model, Params


class LocalTraining(NamedTuple):
    """What a client's training is compiled for; functions are recognised by identity."""

    model: Model
    optimizer: optax.GradientTransformation
    batch_size: int


class Kept(NamedTuple):
    """A state of which one part comes back from training; the other is the user's optimiser's."""

    own: Any
    base: Any


class State(NamedTuple):
    """What a step changes: trained leaves, the optimiser's state and running statistics."""

    params: Params
    optimizer: Any
    statistics: Params


class Given(NamedTuple):
    """What a client begins with.

    Attributes:
        start: Its trained leaves.
        extras: What its optimiser is given besides.
        statistics: Its other leaves that training changes.
        frozen: Those that it does not, the same for all clients.
    """

    start: Params
    extras: Any
    statistics: Params
    frozen: Params


def first_state(local: LocalTraining, params: Params, statistics: Params) -> State:
    """Make the state before the first step."""
    # The conversion makes weakly typed scalars strong, as they are after the first step.
    return jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)),
        State(params, local.optimizer.init(params), statistics),
    )


def kept(state: State) -> Any:
    """Take what the optimiser lets come back, see `keeping`; () if nothing."""
    return state.optimizer.own if isinstance(state.optimizer, Kept) else ()


def trained(state: State) -> Params:
    """Take the trained leaves that training has found, see `optimizers.answer`."""
    return _optimizers.answer(state.params, state.optimizer)


def hides_the_loss(model: Model) -> bool:
    """Say whether nothing but gradients may leave an example's loss, as under `privacy.dp_sgd`."""
    return getattr(model.apply_train, "hides_the_loss", False)


def client_epochs(
    local: LocalTraining,
    federation: Federation,
    place: Array,
    key: Key,
    given: Given,
    epochs: Array,
) -> Callable[[Array, State], tuple[State, Array]]:
    """Make one client's `epoch(number, state) -> (state, mean loss of its examples)`."""
    examples = _sequences.weighed(local.model, clients.view(federation, place))
    size = _size(local, federation, place)
    # By id, not by place: in a cohort a client draws what it would draw among all.
    key = clients.client_key(key, clients.TRAIN, clients.ids(federation)[place])

    def epoch(number: Array, state: State) -> tuple[State, Array]:
        # By the epoch's number: training that stops after every epoch draws the same.
        shuffle_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        mixed = clients.shuffled(shuffle_key, examples)
        steps, batch = clients.minibatches(mixed, local.batch_size)
        extra = {
            "start": given.start,
            "extras": given.extras,
            "last_epoch": number == epochs - 1,
        }

        def body(step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, total = carry
            batch_key = jax.random.fold_in(step_key, step)
            state, loss = _step(local, state, given.frozen, extra, batch(step), batch_key)
            return state, total + loss.astype(total.dtype)

        # At least float32, even where the network computes in bfloat16.
        total = jnp.zeros((), jnp.result_type(float))
        # Each client's own number of steps. In turn this wastes nothing; side by side whoever is
        # done waits for the largest of the chunk.
        state, total = jax.lax.fori_loop(0, steps, body, (state, total))
        # A client without examples takes no step: its loss is 0, not 0 / 0.
        return state, total / jnp.maximum(size, 1)

    return epoch


def sizes(local: LocalTraining, federation: Federation) -> Array:
    """Count the examples that each client trains on, [M]: those of which any position counts."""
    if local.model.positions is None:
        return federation.sizes
    places = jnp.arange(federation.num_clients)
    return jax.lax.map(lambda place: _size(local, federation, place), places)


def _size(local: LocalTraining, federation: Federation, place: Array) -> Array:
    if local.model.positions is None:
        return federation.sizes[place]
    own = _sequences.weighed(local.model, clients.view(federation, place))
    return jnp.count_nonzero(clients.weights_of(own)).astype(federation.sizes.dtype)


def _step(
    local: LocalTraining,
    state: State,
    frozen: Params,
    extra: dict[str, Any],
    batch: clients.Minibatch,
    key: Key,
) -> tuple[State, Array]:
    """Take one step; return the sum of the valid examples' losses too."""
    model, (inputs, targets, weights) = local.model, batch

    def measured(params: Params) -> tuple[Array, tuple[Array, Params | None]]:
        every = leaves.join(params, state.statistics, frozen)
        if model.apply_train is None:
            outputs, new = model.apply(every, inputs), None
        else:
            outputs, new = model.apply_train(every, inputs, key, weights)
        likelihood = _sequences.likelihood(model, inputs, outputs.shape)
        losses = likelihood.negative_log_likelihood(outputs, targets)
        # Selected, not multiplied: zero times NaN is NaN.
        total = jnp.where(weights > 0, losses, 0).sum()
        return total / (weights > 0).sum(), (total, new)

    def mean_loss(params: Params) -> Array:
        return measured(params)[0]

    (value, (total, new)), gradient = jax.value_and_grad(measured, has_aux=True)(state.params)
    if not hides_the_loss(model):
        extra = extra | _optimizers.loss_arguments(mean_loss, value, gradient)
    update = _optimizers.supported(local.optimizer).update
    updates, optimizer_state = update(gradient, state.optimizer, state.params, **extra)
    params = optax.apply_updates(state.params, updates)
    statistics = state.statistics if new is None else leaves.like(state.statistics, new)
    # The state of a loop keeps its dtypes.
    return jax.tree.map(_as_before, State(params, optimizer_state, statistics), state), total


def _as_before(new: Array, old: Array) -> Array:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def penalised(
    penalty: Callable[..., Array],
) -> Callable[[optax.GradientTransformation], optax.GradientTransformationExtraArgs]:
    """Make a client's optimiser minimise its loss plus a penalty.

    Args:
        penalty: (params, *, start, extras) -> a number, differentiable by params; `start` is what
            the client began with and `extras` what `link.receive` gave besides.

    Returns:
        The user's optimiser -> one whose gradients, and losses where an optimiser asks for them,
        have the penalty; for an algorithm's `optimizer`. Equal bases give the same object. The loss
        that training reports leaves the penalty out.

    Example:
        >>> optimizer = penalised(lambda w, start, extras: (w - start) ** 2 / 4)(optax.sgd(1.0))
        >>> w = jnp.array(3.0)
        >>> step, _ = optimizer.update(0 * w, optimizer.init(w), w, start=jnp.array(1.0))
        >>> print(step)
        -1.0
    """

    # Equal optimisers give one object, or `jit` would compile training again.
    @functools.lru_cache(maxsize=64)
    def optimizer(base: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        inner = _optimizers.supported(base)

        def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
            added = functools.partial(penalty, start=given["start"], extras=given.get("extras", ()))

            def tilted(gradient: Params, w: Params) -> Params:
                return jax.tree.map(jnp.add, gradient, jax.grad(added)(w))

            # The loss that an optimiser may ask for is what clients minimise, with its penalty.
            if "value_fn" in given:
                loss, at = given["value_fn"], given["grad_fn"]
                given["value"] = given["value"] + added(params)
                given["grad"] = tilted(given["grad"], params)
                given["value_fn"] = lambda w: loss(w) + added(w)
                given["grad_fn"] = lambda w, *step: tilted(at(w, *step), w)
            return inner.update(tilted(updates, params), state, params, **given)

        return optax.GradientTransformationExtraArgs(base.init, update)

    return optimizer


def keeping(
    transformation: optax.GradientTransformation, base: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Put a transformation before an optimiser, and let its state come back from training.

    Args:
        transformation: It sees the gradients first, and is given `start`, `extras` and `last_epoch`
            as extra arguments; what it returns as gradients must be those of the loss.
        base: The user's optimiser.

    Returns:
        The chain of both. `Trained.extras` is the stacked final state of the transformation.
    """
    first, second = map(_optimizers.supported, (transformation, base))

    # Not optax.chain, whose state is a plain tuple: after training `Kept` is known by its type.
    def init(params: Params) -> Kept:
        return Kept(first.init(params), second.init(params))

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        updates, own = first.update(updates, state.own, params, **given)
        updates, rest = second.update(updates, state.base, params, **given)
        return updates, Kept(own, rest)

    return optax.GradientTransformationExtraArgs(init, update)
