"""One pass over a data set: weighted means over examples, a minibatch at a time, exactly.

Padding is by weight: an example of weight zero leaves no trace, so a padded client equals an
unpadded one, and an empty client gives zeros. Minibatches after the last example that counts are
not run. Examples that are spread over devices are passed over where they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fisherjax import _sequences, leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import by_value, cached
from fisherjax._core.compiler import jit
from fisherjax.clients import draw, minibatches, weights_of
from fisherjax.devices import layout_of, mesh_of, replicate
from fisherjax.fisher._columns import Columns, values
from fisherjax.fisher.kinds import Kind, automatic, true
from fisherjax.typing import Apply, Array, Examples, Key, Likelihood, Model, Params


class Plan(NamedTuple):
    """What a pass over a data set is compiled for."""

    model: Model
    kind: Kind
    batch_size: int
    max_examples: int | None = None


_DRAW = 2**31 - 1  # what a key is folded by to draw examples; no number of a minibatch


Factor = Callable[[Array], Columns]
"""`outputs z [B, ..., C] -> S [K, B, ..., C]`, what a kind makes of one minibatch."""
Sums = Callable[[Apply, Any, Array, Array, Factor], Any]
"""`(apply, params, inputs [B, ...], weights [B], factor) -> sums over the minibatch`, a pytree."""


def weighted_mean(
    batch_sums: Callable[..., Any], examples: Examples, *, key: Key | None, batch_size: int
) -> Any:
    """Average over examples, sum_n w_n f(x_n, y_n) / sum_n w_n; zeros if all weights are zero.

    `batch_sums(inputs [B, ...], targets or None, weights [B], key or None)` sums over a minibatch.
    What fits into one minibatch has a gradient by inputs and parameters.
    """
    number, batch = minibatches(examples, batch_size)

    def one_batch(step: Array | int, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        sums, total = carry
        # Folded, so that a minibatch's draws do not depend on how many there are.
        batch_key = None if key is None else jax.random.fold_in(key, step)
        own = batch_sums(*batch(step), batch_key)
        # Divided once, at the end: in a mean of means the short minibatch would weigh too much.
        return jax.tree.map(jnp.add, sums, own), total + batch(step)[2].sum()

    shapes = jax.eval_shape(lambda: (batch_sums(*batch(0), key), batch(0)[2].sum()))
    # In at least float32: a long sum in bfloat16 loses its small terms.
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")), shapes
    )
    # The number is data, not a shape: minibatches of padding alone are not run.
    rows = examples.inputs if examples.indices is None else examples.indices
    if rows.shape[0] <= batch_size:  # a loop of a number that is data has no gradient
        sums, total = jax.lax.cond(number > 0, partial(one_batch, 0), lambda none: none, zeros)
    else:
        sums, total = jax.lax.fori_loop(0, number, one_batch, zeros)
    scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)


def run(
    sums: Sums,
    plan: Plan,
    params: Params,
    examples: Examples,
    key: Key | None,
    vector: Params | None = None,
) -> Any:
    """Compile the weighted mean of `sums`, and run it on every device that holds some examples.

    The sums are given the network as a function of its trained leaves, and these; with a vector the
    pair of both in their place. Where the `NamedSharding` of the inputs splits their first axis,
    each device runs over its own rows, in minibatches of its own and with a key of its own, and the
    mean is on all devices.

    Raises:
        ValueError: If inputs are spread and indices are given.
    """
    inputs, weights = examples.inputs, examples.weights
    layout = layout_of(inputs)
    # Its first axis is that of the examples.
    if layout is None or not layout.spec or layout.spec[0] is None:
        return _mean(sums, plan, params, examples, key, vector)
    if examples.indices is not None:
        raise ValueError(
            "indices select rows of all inputs, but the inputs are spread over devices, each of "
            "which sees its own rows only. Spread the selected rows, or leave rows out by weights "
            "of zero."
        )
    # Each device weighs its mean by the weights of its own rows.
    weights = jnp.ones(inputs.shape[0]) if weights is None else jnp.asarray(weights, float)
    params, key, vector = replicate((params, key, vector), mesh_of(inputs))
    examples = examples._replace(weights=weights)
    return _mean_over_devices(sums, plan, layout, (params, vector), examples, key)


@partial(jit, static_argnums=(0, 1))
def _mean(
    sums: Sums,
    plan: Plan,
    params: Params,
    examples: Examples,
    key: Key | None,
    vector: Params | None,
) -> Any:
    model, kind, batch_size, most = plan
    apply, own = leaves.opened(model, params)
    point = own if vector is None else (own, vector)
    examples = _sequences.weighed(model, examples)
    if most is not None and key is not None:
        examples = draw(jax.random.fold_in(key, _DRAW), examples, most)

    def batch_sums(x: Array, y: Array | None, w: Array, key: Key | None) -> Any:
        def factor(z: Array) -> Columns:
            return kind(_sequences.likelihood(model, x, z.shape), z, y, key)

        return sums(apply, point, x, w, factor)

    return weighted_mean(batch_sums, examples, key=key, batch_size=batch_size)


@partial(jit, static_argnums=(0, 1, 2))
def _mean_over_devices(
    sums: Sums,
    plan: Plan,
    layout: NamedSharding,
    point: tuple[Params, Params | None],
    examples: Examples,
    key: Key | None,
) -> Any:
    axis, everywhere, most = layout.spec[0], PartitionSpec(), plan.max_examples
    # Each device draws its part.
    own_plan = plan._replace(max_examples=most and -(-most // layout.mesh.shape[axis]))

    def on_one(point: tuple, key: Key | None, examples: Examples) -> Any:
        examples = _sequences.weighed(plan.model, examples)
        # Otherwise all devices would draw the same labels.
        key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
        params, vector = point
        own = _mean(sums, own_plan, params, examples, key, vector)
        weight = weights_of(examples).sum()
        total = jax.lax.psum(weight, axis)
        # Weighted means of means: devices may hold different numbers of examples that count.
        share = weight / jnp.where(total > 0, total, 1)
        return jax.lax.psum(jax.tree.map(lambda x: x * share.astype(x.dtype), own), axis)

    in_specs = everywhere, everywhere, PartitionSpec(axis)
    spread = {"mesh": layout.mesh, "in_specs": in_specs, "out_specs": everywhere}
    return jax.shard_map(on_one, **spread, check_vma=False)(point, key, examples)


def check(
    model: Model,
    params: Params,
    examples: Examples,
    kind: Kind,
    key: Key | None,
    batch_size: int,
    max_examples: int | None = None,
) -> Plan:
    """Refuse bad arguments of a pass over a data set by shapes and dtypes, before it compiles."""
    checks.model(model)
    params = checks.arrays(params)
    checks.examples(examples)
    checks.count("batch_size", batch_size)
    checks.function("kind", kind, "fisher.true, fisher.sampled or fisher.empirical")
    if key is not None:
        checks.key(key)
    if max_examples is not None:
        checks.count("max_examples", max_examples)
        rows = examples.inputs if examples.indices is None else examples.indices
        if key is None and rows.shape[0] > max_examples:
            raise ValueError(
                f"max_examples is {max_examples} of {rows.shape[0]} examples, which are drawn: "
                "pass key=jax.random.key(seed)."
            )
    mask = None if all(checks.mask(model, params)) else model.mask
    # Without how it trains: networks that differ in that only share a program. By value: an inline
    # `partial(fisher.sampled, ...)` must not compile again.
    plan = Plan(model._replace(apply_train=None, mask=mask), by_value(kind), int(batch_size))
    shapes, structure = jax.tree.flatten(jax.tree.map(tree.shape_of, (params, examples.inputs)))
    z = _outputs(plan.model, structure, tuple(shapes))
    checks.are_positions(model, examples.inputs, z.shape)
    # These kinds read no targets, whatever they are.
    if examples.targets is not None and kind not in (automatic, true):
        shape = examples.targets.shape[0], *z.shape[1:]
        model.likelihood.check(shape, checks.labels(model, shape, examples.targets))
    y = None if examples.targets is None else tree.shape_of(examples.targets[:1])
    _columns(model.likelihood, plan.kind, z, y, key is None)
    return plan._replace(max_examples=max_examples)


# Tracing a network takes longer than many a product: equal shapes are checked once.
@cached
def _outputs(model: Model, structure: Any, shapes: tuple) -> Any:
    """Give the shape of one example's outputs; refuse a network that does not fit."""
    params, inputs = jax.tree.unflatten(structure, shapes)
    z = checks.outputs(model, params, tree.shape_of(inputs, 1))
    if z.ndim < 2:
        raise ValueError(
            f"apply returned outputs of shape {z.shape} for one example; expected [1, C]. Keep the "
            "batch axis and give even a single output an axis of its own."
        )
    return z


@cached
def _columns(likelihood: Likelihood, kind: Kind, z: Any, y: Any, keyless: bool) -> None:
    """Let a kind say which argument it lacks; refuse what are no columns."""
    key = None if keyless else jax.eval_shape(jax.random.key, 0)
    found = jax.eval_shape(lambda z, y, key: kind(likelihood, z, y, key), z, y, key)
    if getattr(values(found), "shape", ())[1:] != z.shape:
        raise ValueError(
            f"kind made {found} of outputs of shape {z.shape}; expected an array [K, *shape], or "
            "ByPosition factors of that shape."
        )
