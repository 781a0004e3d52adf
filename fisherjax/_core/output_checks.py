"""Check what a model returns: its outputs, positions and new statistics.

The model's functions are traced with shapes, so that nothing is computed, however large the data
set is. Only positions that are numbers are evaluated, because their values must be 0 or 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core.batches import describe, num_rows
from fisherjax._core.checks import is_traced, kind_of
from fisherjax._other_libraries import summary
from fisherjax.typing import AnyArray, Inputs, Model, Params, Positions

IGNORED = -100
"""The class label of a position that has no loss, as PyTorch and Hugging Face write it."""


def positions(value: Positions, inputs: Inputs) -> Any:
    """Return the shape and dtype of a model's positions; check that they are a mask [B, T]."""
    traced = _traced("positions", lambda _, x: value(x), None, tree.shape_of(inputs))
    shape, batch = getattr(traced, "shape", None), num_rows(inputs)
    if shape is None or len(shape) != 2 or shape[0] != batch:
        raise ValueError(
            f"positions returned {kind_of(traced) if shape is None else f'shape {shape}'} for "
            f"inputs of {describe(inputs)}; expected [{batch}, T], a number for each "
            "position of each example, as lambda tokens: tokens != 0 returns for tokens [B, T]."
        )
    is_number = any(jnp.issubdtype(traced.dtype, x) for x in (jnp.integer, jnp.floating))
    if not is_number and traced.dtype != bool:
        raise TypeError(f"positions returned {traced.dtype}; expected booleans, or 0 and 1.")
    has_values = all(hasattr(x, "__array__") for x in jax.tree.leaves(inputs))
    if traced.dtype != bool and not is_traced(inputs) and has_values:
        with jax.ensure_compile_time_eval():
            mask = jnp.asarray(value(jax.tree.map(jnp.asarray, inputs)))
            fits = bool(((mask == 0) | (mask == 1)).all())
        if not fits:
            raise ValueError(
                f"positions returned {traced.dtype} other than 0 and 1; expected 1 where a "
                "position counts and 0 elsewhere: compare with zero, or pass weights with the "
                "examples."
            )
    return traced


def are_positions(model: Model, inputs: Inputs, shape: tuple[int, ...]) -> bool:
    """Return whether outputs of this shape, [B, T, ..., C], are sequences that are masked.

    Raises:
        ValueError: If the outputs are sequences of another length than the positions.
    """
    if model.positions is None:
        return False
    length = positions(model.positions, inputs).shape[1]
    if len(shape) < 3:
        return False
    if shape[1] not in (length, 1):
        raise ValueError(
            f"The outputs of an example have shape {tuple(shape[1:])}, a sequence of {shape[1]}, "
            f"but positions returned a mask of {length}. Make it return [B, {shape[1]}], or make "
            "apply keep the length of its inputs."
        )
    return shape[1] == length


def are_labels(shape: tuple[int, ...], targets: AnyArray) -> bool:
    """Return whether targets are signed class labels, one for each position, judging by shapes."""
    # Unsigned labels cannot be -100.
    is_signed = jnp.issubdtype(targets.dtype, jnp.signedinteger)
    return is_signed and len(shape) > 2 and tuple(targets.shape) == tuple(shape[:-1])


def replace_ignored(model: Model, shape: tuple[int, ...], targets: AnyArray) -> AnyArray:
    """Replace labels that are ignored by class 0, so that the others can be checked."""
    if model.positions is None or not are_labels(shape, targets):
        return targets
    return targets * (targets != IGNORED)


def outputs(model: Model, params: Params, inputs: Inputs, targets: AnyArray | None = None) -> Any:
    """Return the shape and dtype of the outputs; check that the network runs and targets fit."""
    z = _traced("apply", model.apply, params, tree.shape_of(inputs))
    if getattr(z, "ndim", 0) < 1:
        raise ValueError(f"apply returned {z}; expected outputs [B, C], an array.")
    if not jnp.issubdtype(z.dtype, jnp.floating):
        raise TypeError(
            f"apply returned {z.dtype}; expected floating point, such as logits before an argmax, "
            "or real and imaginary parts side by side."
        )
    are_positions(model, inputs, z.shape)
    if targets is not None:
        model.likelihood.check(z.shape, replace_ignored(model, z.shape, targets))
    return z


def gradients_stay_apart(params: Params, data: Any) -> None:
    """Check that the user's `jax.shard_map`, if there is one, keeps each device's gradients apart.

    JAX sums gradients over the devices if these have params in common, but not the data.
    """
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(data)))
    if any(not axes <= _varying_axes(leaf) for leaf in jax.tree.leaves(params)):
        names = ", ".join(map(repr, sorted(axes)))
        raise ValueError(
            f"Inside jax.shard_map the data differ along mesh axis {names}, but params do not, so "
            "that JAX would add up the gradients of all devices; expected those of each device. "
            "Pass check_vma=False to jax.shard_map, or let fisherjax divide the data: "
            "clients.shard for clients, or inputs with a NamedSharding for examples."
        )


def _varying_axes(value: Any) -> frozenset[str]:
    if not is_traced(value):
        return frozenset()
    aval: Any = jax.typeof(value)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma  # the latter before jax 0.10


def train_outputs(model: Model, params: Params, inputs: Inputs, batch_size: int) -> None:
    """Check that `apply_train` runs on a minibatch and that its results fit `apply` and params."""
    if model.apply_train is None:
        return
    # A minibatch is traced, because `apply_train` never sees the whole data set.
    batch = tree.shape_of(inputs, batch_size)
    z = _traced("apply", model.apply, params, batch)
    # Only the shapes of a key and of weights are needed: nothing is drawn.
    key = jax.eval_shape(jax.random.key, 0)
    weights = jax.ShapeDtypeStruct((batch_size,), jnp.result_type(float))
    result = _traced("apply_train", model.apply_train, params, batch, key, weights)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"apply_train returned {kind_of(result)}; expected a pair (outputs, new), where new is "
            "None or like params."
        )
    given, new = getattr(result[0], "shape", None), result[1]
    if given != z.shape:
        raise ValueError(
            f"apply_train returned outputs of shape {given}; expected {z.shape}, as apply does."
        )
    given, expected = ({} if x is None else tree.shapes(x) for x in (new, params))
    # Leaves that it does not change may be None.
    places = [len(jax.tree.leaves(x, is_leaf=lambda y: y is None)) for x in (new, params)]
    if not given.items() <= expected.items() or (new is not None and places[0] != places[1]):
        raise ValueError(
            f"apply_train returned new leaves {given}; expected None, or those of params, "
            f"{expected}."
        )


def _traced(name: str, function: Callable, params: Params, inputs: Any, *rest: Any) -> Any:
    try:
        return jax.eval_shape(function, params, inputs, *rest)
    except NotImplementedError as error:
        raise ValueError(
            f"{name} failed on inputs of {describe(inputs)} ({summary(error)}). JAX, or the "
            "network itself, does not implement one of its operations. Use another, such as "
            "jnp.einsum for ragged products."
        ) from error
    # The user's function may raise an error of any type.
    except Exception as error:
        raise ValueError(
            f"{name} failed on inputs of {describe(inputs)} ({summary(error)}). Check that the "
            "params and the inputs are those of this network."
        ) from error
