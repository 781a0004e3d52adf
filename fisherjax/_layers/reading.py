"""Read a network: trace it at many examples, find the uses of its leaves, and group them."""

import contextlib
from collections.abc import Callable
from functools import partial

import jax

from fisherjax import tree
from fisherjax._core import compat
from fisherjax._core.batches import num_rows
from fisherjax._layers import equations, mixing, uses, views
from fisherjax._layers.equations import Flat
from fisherjax._layers.layer import Part, group
from fisherjax._layers.views import MANY, LoopObstacle
from fisherjax.typing import Apply, Array, Inputs, Params


class LayersNotFoundError(ValueError):
    """An error that says why a network could not be split into layers."""


def network_of(
    apply: Apply, params: Params, inputs: Inputs
) -> tuple[Flat, list[Part], dict[str, str]]:
    """Read a network on a minibatch, or on its shape.

    Returns:
        The equations, the layers, and the reason for each leaf that belongs to no layer, by name.
    """
    network, reading = read_network(apply, params, inputs)
    return network, *group(reading, tree.names(params), jax.tree.leaves(params))


def read_network(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    read: Callable[..., uses.Reading] = uses.read,
    *,
    keep_loops: bool = False,
) -> tuple[Flat, uses.Reading]:
    """Return the equations of a network on a minibatch, or on its shape, and the uses in them."""
    reading, many = _read(apply, params, inputs, read, keep_loops)
    # The layers were read at `MANY` examples; this trace can be run on the given ones.
    network = equations.flatten(apply, params, inputs, keep_loops=keep_loops)
    is_alike = equations.wiring(network) == equations.wiring(many)
    is_ordered_anew = not is_alike and equations.names(network) == equations.names(many)
    if is_ordered_anew or views.SHARED in reading.obstacles.values():
        # Mapped over single examples, a network merges no axis with that of the examples, and
        # jnp.einsum, which orders its products by their sizes, always orders them alike.
        apart = _one_by_one(apply)
        # It may not take single examples at all.
        with contextlib.suppress(Exception):
            z, alone = (jax.eval_shape(f, params, inputs) for f in (apply, apart))
            other, others = _read(apart, params, inputs, partial(read, is_apart=True), keep_loops)
            found = equations.flatten(apart, params, inputs, keep_loops=keep_loops)
            fits = z.shape == alone.shape and equations.wiring(found) == equations.wiring(others)
            if fits and (is_ordered_anew or len(other.obstacles) < len(reading.obstacles)):
                return found, other
    if not is_alike:
        raise LayersNotFoundError(
            f"The network does something else for {num_rows(inputs)} examples than for {MANY}. "
            "Expected an apply that treats every example alike, however many there are, as "
            "jax.vmap of a function of one example does, but jax.lax.map or a loop over the "
            "examples does not."
        )
    return network, reading


def _one_by_one(apply: Apply) -> Apply:
    """Return a network that computes the outputs of each example by itself."""

    def of_example(params: Params, example: Inputs) -> Array:
        return apply(params, jax.tree.map(lambda x: x[None], example))[0]

    return jax.vmap(of_example, (None, 0))


def check_examples(apply: Apply, params: Params, inputs: Inputs) -> None:
    """Check that a network does not mix the examples of a batch, as far as it can be read.

    Raises:
        ValueError: If it does.
    """
    with contextlib.suppress(LayersNotFoundError):
        _read(apply, params, inputs)


def _read(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    read: Callable[[Flat], uses.Reading] = uses.read,
    keep_loops: bool = False,
) -> tuple[uses.Reading, Flat]:
    # Imported outside of the `try`, so that its failure is not reported as one of the network.
    compat.import_kfac_jax()
    many = tree.shape_of(inputs, MANY)
    try:
        network = equations.flatten(apply, params, many, keep_loops=keep_loops)
        reading = read(network)
    except LoopObstacle:
        raise
    except Exception as error:
        # An error that apply raises for the given inputs, too, is raised as it is.
        jax.eval_shape(apply, params, inputs)
        raise LayersNotFoundError(
            f"The layers of this network could not be found ({type(error).__name__}: {error}). "
            "Use fisher.diagonal, which then takes gradients of single examples, or write the "
            "network with plain dense and convolution layers."
        ) from error
    if reading.fault:
        is_ragged = mixing.RAGGED in equations.names(network)
        raise ValueError(reading.fault + mixing.RAGGED_HINT * is_ragged)
    return reading, network
