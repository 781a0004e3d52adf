"""Compute exact weighted means over the examples of a data set, one minibatch at a time.

How many examples a pass uses:

* all examples with a weight other than zero, or `max_examples` of them, drawn without replacement
  (`Plan.max_examples`, drawn in `_mean`); methods such as `fedfisher` pass 2,000 by default
  (`algorithms.base.FISHER_EXAMPLES`);
* padded examples have weight zero and change nothing, so that a padded client equals an unpadded
  one, and a client without examples has the mean zero;
* minibatches of `batch_size` rows that hold padding only, at the end, are not run.

Examples that are spread over several devices stay where they are: each device runs over its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fisherjax import _padding, leaves, tree
from fisherjax._core import checks, output_checks
from fisherjax._core.caching import by_value, cached
from fisherjax._core.compiler import jit, trace_once
from fisherjax._minibatches import num_rows
from fisherjax.clients import draw, minibatches, weights_of
from fisherjax.devices import layout_of, mesh_of, on_each, replicate
from fisherjax.fisher._columns import Columns, values
from fisherjax.fisher.kinds import Kind, automatic, true
from fisherjax.typing import Apply, Array, Examples, Key, Likelihood, Model, Params


class Plan(NamedTuple):
    """The options of a pass over a data set, which it is compiled for.

    Attributes:
        model: The network and its likelihood.
        kind: The output-gradient estimator.
        batch_size: Number of rows of a minibatch.
        max_examples: Most examples that the pass uses, drawn without replacement; None uses all.
    """

    model: Model
    kind: Kind
    batch_size: int
    max_examples: int | None = None


# Folded into the key that draws examples. Minibatches fold in their numbers, which are smaller.
_DRAW = 2**31 - 1


Factor = Callable[[Array], Columns]
"""`outputs z [B, ..., C] -> S [K, B, ..., C]`, the columns of one minibatch."""
Sums = Callable[[Apply, Any, Array, Array, Factor], Any]
"""`(apply, params, inputs [B, ...], weights [B], factor) -> sums over the minibatch`, a pytree."""


def weighted_mean(
    batch_sums: Callable[..., Any], examples: Examples, *, key: Key | None, batch_size: int
) -> Any:
    """Return the mean over examples, sum_n w_n f(x_n, y_n) / sum_n w_n; zeros if all w_n are zero.

    `batch_sums(inputs [B, ...], targets or None, weights [B], key or None)` returns the sums over a
    minibatch. If all examples fit into one minibatch, then the mean can be differentiated.
    """
    number, batch = minibatches(examples, batch_size)
    first = jax.eval_shape(lambda: batch(0))
    sums_of, shapes = trace_once(batch_sums, *first, key)

    def one_batch(step: Array | int, sums: Any) -> Any:
        # Keys are folded, so that the draws of a minibatch do not depend on their number.
        batch_key = None if key is None else jax.random.fold_in(key, step)
        batch_sum = sums_of(*batch(step), batch_key)
        # The division comes at the end: in a mean of means a short minibatch would count too much.
        return jax.tree.map(jnp.add, sums, batch_sum)

    # Sums are at least float32, because a long sum in bfloat16 loses its small terms.
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")), shapes
    )
    # The number of minibatches depends on the weights, so that those with padding only are not run.
    if num_rows(examples) <= batch_size:
        # Such a loop cannot be differentiated in reverse, but a `cond` can.
        sums = jax.lax.cond(number > 0, partial(one_batch, 0), lambda none: none, zeros)
    else:
        sums = jax.lax.fori_loop(0, number, one_batch, zeros)
    total = jnp.asarray(weights_of(examples), float).sum()
    # Without any weight no minibatch was run, and the sums are zero.
    scale = 1 / jnp.where(total > 0, total, 1)
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)


def run(
    sums: Sums,
    plan: Plan,
    params: Params,
    examples: Examples,
    key: Key | None,
    vector: Params | None = None,
) -> Any:
    """Compile the weighted mean of `sums`, and run it on every device that holds examples.

    `sums` gets the network as a function of its trained leaves, and these leaves as params, or the
    pair of leaves and vector if a vector is given. If the `NamedSharding` of the inputs splits
    their first axis, then each device runs over its own rows in its own minibatches and with its
    own key, and the mean is on all devices.

    Raises:
        ValueError: If inputs are spread over devices and indices are given.
    """
    inputs = examples.inputs
    layout = layout_of(inputs)
    # The first axis of inputs is that of the examples.
    if layout is None or not layout.spec or layout.spec[0] is None:
        return _mean(sums, plan, params, examples, key, vector)
    if examples.indices is not None:
        raise ValueError(
            "Examples have indices, which select rows of all inputs, but the inputs are spread "
            "over devices, and each device has its own rows only. Spread the selected rows over "
            "devices without indices, or give the other rows weight zero."
        )
    # Each device needs the weights of its own rows.
    weights = jnp.asarray(weights_of(examples), float)
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
    apply, trained = leaves.bind_untrained(model, params)
    point = trained if vector is None else (trained, vector)
    examples = _padding.drop_uncounted(model, examples)
    if most is not None and key is not None:
        examples = draw(jax.random.fold_in(key, _DRAW), examples, most)

    def batch_sums(x: Array, y: Array | None, w: Array, key: Key | None) -> Any:
        def factor(z: Array) -> Columns:
            return kind(_padding.likelihood(model, x, z.shape), z, y, key)

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
    # Each device draws an equal part of max_examples.
    device_plan = plan._replace(max_examples=most and -(-most // layout.mesh.shape[axis]))

    def on_device(point: tuple, key: Key | None, examples: Examples) -> Any:
        examples = _padding.drop_uncounted(plan.model, examples)
        # With the same key all devices would draw the same labels.
        key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
        params, vector = point
        mean = _mean(sums, device_plan, params, examples, key, vector)
        weight = weights_of(examples).sum()
        total = jax.lax.psum(weight, axis)
        # The devices' means are weighted, because devices may hold different numbers of examples.
        share = weight / jnp.where(total > 0, total, 1)
        return jax.lax.psum(jax.tree.map(lambda x: x * share.astype(x.dtype), mean), axis)

    in_specs = everywhere, everywhere, PartitionSpec(axis)
    return on_each(on_device, layout.mesh, in_specs, everywhere)(point, key, examples)


def check(
    model: Model,
    params: Params,
    examples: Examples,
    kind: Kind,
    key: Key | None,
    batch_size: int,
    max_examples: int | None = None,
) -> Plan:
    """Check the arguments of a pass by shapes and dtypes, before it compiles, and return its plan.

    Raises:
        ValueError: If shapes do not fit, or a kind or a draw lacks its targets or key.
        TypeError: If params are not floating, or an argument is of another type.
    """
    checks.model(model)
    params = checks.arrays(params)
    checks.examples(examples)
    output_checks.gradients_stay_apart(params, examples)
    checks.count("batch_size", batch_size)
    checks.function("kind", kind, "fisher.true, fisher.sampled or fisher.empirical")
    if key is not None:
        checks.key(key)
    if max_examples is not None:
        checks.count("max_examples", max_examples)
        if key is None and (number := num_rows(examples)) > max_examples:
            raise ValueError(
                f"max_examples is {max_examples} of {number} examples, which are drawn at "
                "random, but there is no key: pass key=jax.random.key(seed)."
            )
    mask = None if all(checks.mask(model, params)) else model.mask
    # A pass does not train, so models that differ in `apply_train` only share a program. `by_value`
    # lets an equal `partial(fisher.sampled, ...)` share it, too.
    plan = Plan(model._replace(apply_train=None, mask=mask), by_value(kind), int(batch_size))
    shapes, structure = jax.tree.flatten(tree.shape_of((params, examples.inputs)))
    z = _check_outputs(plan.model, structure, tuple(shapes))
    output_checks.are_positions(model, examples.inputs, z.shape)
    # `automatic` and `true` read no targets, so targets may be anything for them.
    if examples.targets is not None and kind not in (automatic, true):
        shape = examples.targets.shape[0], *z.shape[1:]
        model.likelihood.check(shape, output_checks.replace_ignored(model, shape, examples.targets))
    y = None if examples.targets is None else tree.shape_of(examples.targets[:1])
    _check_kind(model.likelihood, plan.kind, z, y, key is None)
    return plan._replace(max_examples=max_examples)


# To trace a network may take longer than the pass itself, so equal shapes are checked only once.
@cached
def _check_outputs(model: Model, structure: Any, shapes: tuple) -> Any:
    """Return the shape of one example's outputs, and check that the network returns one."""
    params, inputs = jax.tree.unflatten(structure, shapes)
    z = output_checks.outputs(model, params, tree.shape_of(inputs, 1))
    if z.ndim < 2:
        raise ValueError(
            f"apply returned outputs of shape {z.shape} for one example; expected [1, C]. Keep the "
            "batch axis, and return a single output as an axis of length one."
        )
    return z


@cached
def _check_kind(likelihood: Likelihood, kind: Kind, z: Any, y: Any, keyless: bool) -> None:
    """Check that a kind has its targets and key, and that it returns columns."""
    key = None if keyless else jax.eval_shape(jax.random.key, 0)
    found = jax.eval_shape(lambda z, y, key: kind(likelihood, z, y, key), z, y, key)
    if getattr(values(found), "shape", ())[1:] != z.shape:
        raise ValueError(
            f"kind returned {found} for outputs of shape {z.shape}; expected an array [K, *shape] "
            "or ByPosition factors of that shape."
        )
