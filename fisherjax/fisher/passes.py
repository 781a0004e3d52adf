"""One pass over a data set: weighted means over examples, a minibatch at a time, exactly.

Padding is by weight: an example of weight zero leaves no trace, so a padded client equals an
unpadded one, and an empty client gives zeros. Minibatches after the last example that counts are
not run. Examples that are spread over devices are passed over where they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fisherjax import tree
from fisherjax.fisher import kinds
from fisherjax.likelihoods import Likelihood
from fisherjax.mapping import mesh_of, replicate
from fisherjax.typing import Apply, Array, Key, Params

BatchSums = Callable[[Array, Array | None, Array, Key | None], Any]
"""`(inputs [B, ...], targets [B, ...], weights [B], key) -> sums over the minibatch`, a pytree."""


def weighted_mean(
    batch_sums: BatchSums,
    inputs: Array,
    targets: Array | None,
    *,
    weights: Array | None,
    indices: Array | None,
    key: Key | None,
    batch_size: int,
) -> Any:
    """Average over examples, sum_n w_n f(x_n, y_n) / sum_n w_n.

    Args:
        batch_sums: Weighted sums over one minibatch.
        inputs: [N, ...], rows to choose from.
        targets: [N, ...] or None.
        weights: [n] for the rows in use, all ones if None.
        indices: [n] rows in use, all of them in order if None; no row is copied but minibatches.
        key: Randomness of the pass, folded for each minibatch; None if it needs none.
        batch_size: Rows of a minibatch.

    Returns:
        The mean, in the structure of `batch_sums`; zeros if all weights are zero.
    """
    indices = jnp.arange(inputs.shape[0]) if indices is None else indices
    weights = jnp.ones(indices.shape) if weights is None else jnp.asarray(weights, float)
    batch_size = min(batch_size, indices.shape[0])
    padding = -indices.shape[0] % batch_size
    indices, weights = jnp.pad(indices, (0, padding)), jnp.pad(weights, (0, padding))

    def one_batch(batch: Array, sums: Any) -> Any:
        rows = jax.lax.dynamic_slice(indices, (batch * batch_size,), (batch_size,))
        w = jax.lax.dynamic_slice(weights, (batch * batch_size,), (batch_size,))
        y = None if targets is None else targets[rows]
        batch_key = None if key is None else jax.random.fold_in(key, batch)
        return jax.tree.map(jnp.add, sums, batch_sums(inputs[rows], y, w, batch_key))

    shapes = jax.eval_shape(
        lambda: batch_sums(
            inputs[:batch_size],
            None if targets is None else targets[:batch_size],
            weights[:batch_size],
            key,
        )
    )
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    last = jnp.max(jnp.where(weights != 0, jnp.arange(1, weights.size + 1), 0))
    sums = jax.lax.fori_loop(0, -(-last // batch_size), one_batch, zeros)
    total = weights.sum()
    scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)


def run(
    function: Callable[..., Any],
    static: tuple,
    common: Any,
    inputs: Array,
    targets: Array | None,
    *,
    weights: Array | None,
    indices: Array | None,
    key: Key | None,
) -> Any:
    """Run a compiled mean over examples, on every device that holds some of them.

    Args:
        function: `(*static, common, inputs, targets, weights, indices, key) -> mean`, jitted.
        static: What it is compiled for.
        common: What it needs besides, the same for all examples.
        inputs: [N, ...]; with a `NamedSharding` that splits its first axis, each device runs over
            its own rows, in minibatches of its own and with a key of its own.
        targets: [N, ...] or None.
        weights: [n] or None.
        indices: [n] or None.
        key: Or None.

    Returns:
        The mean; on all devices if inputs are spread.

    Raises:
        ValueError: If inputs are spread and indices are given.
    """
    mesh = mesh_of(inputs)
    axis = inputs.sharding.spec[0] if mesh and inputs.sharding.spec else None
    if axis is None:
        return function(*static, common, inputs, targets, weights, indices, key)
    if indices is not None:
        raise ValueError(
            "indices select rows of all inputs, but the inputs are spread over devices, each of "
            "which sees its own rows only. Spread the selected rows, or leave rows out by weights "
            "of zero."
        )
    weights = jnp.ones(inputs.shape[0]) if weights is None else jnp.asarray(weights, float)
    common, key = replicate((common, key), mesh)
    return _on_every_device(function, static, mesh, axis, common, inputs, targets, weights, key)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _on_every_device(
    function: Callable[..., Any],
    static: tuple,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    common: Any,
    inputs: Array,
    targets: Array | None,
    weights: Array,
    key: Key | None,
) -> Any:
    def on_one(
        common: Any, key: Key | None, inputs: Array, targets: Array | None, weights: Array
    ) -> Any:
        key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
        own = function(*static, common, inputs, targets, weights, None, key)
        total = jax.lax.psum(weights.sum(), axis)
        share = weights.sum() / jnp.where(total > 0, total, 1)
        return jax.lax.psum(jax.tree.map(lambda x: x * share.astype(x.dtype), own), axis)

    rows, everywhere = PartitionSpec(axis), PartitionSpec()
    return jax.shard_map(
        on_one,
        mesh=mesh,
        in_specs=(everywhere, everywhere, rows, rows, rows),
        out_specs=everywhere,
        check_vma=False,
    )(common, key, inputs, targets, weights)


def check(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    inputs: Array,
    targets: Array | None,
    *,
    kind: Callable[..., Array],
    weights: Array | None,
    indices: Array | None,
    key: Key | None,
    batch_size: int,
) -> None:
    """Refuse bad arguments of a pass over a data set, by shapes and dtypes, before it is compiled.

    Raises:
        ValueError: If shapes do not fit together, or the kind lacks its targets or key.
        TypeError: If params are not floating or targets have the wrong dtype.
    """
    tree.check_floating(params)
    rows = _check_rows(inputs, targets, weights, indices)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; expected an integer of at least 1.")
    if weights is not None and weights.shape != (rows,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({rows},), one for each row in use."
        )
    _check_values("weights", weights, 0, float("inf"), "finite numbers, zero or more")
    _check_values("indices", indices, 0, inputs.shape[0] - 1, f"rows of {inputs.shape[0]} inputs")
    one = jax.ShapeDtypeStruct((1, *inputs.shape[1:]), inputs.dtype)
    z = jax.eval_shape(apply, params, one)
    if z.ndim < 2:
        raise ValueError(
            f"apply returned outputs of shape {z.shape} for one example; expected [1, C]. Keep the "
            "batch axis and give even a single output an axis of its own."
        )
    if targets is not None and kind is not kinds.true:
        likelihood.check((targets.shape[0], *z.shape[1:]), targets)
    y = None if targets is None else jax.ShapeDtypeStruct((1, *targets.shape[1:]), targets.dtype)
    jax.eval_shape(lambda z, y, key: kind(likelihood, z, y, key), z, y, key)


def _check_rows(
    inputs: Array, targets: Array | None, weights: Array | None, indices: Array | None
) -> int:
    """Refuse what are not arrays of fitting lengths; return the number of rows in use."""
    named = {"inputs": inputs, "targets": targets, "weights": weights, "indices": indices}
    for name, value in named.items():
        if value is not None and not getattr(value, "ndim", 0):
            raise TypeError(
                f"{name} is a {type(value).__name__}; expected an array with an axis of examples."
            )
    if indices is not None and not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"indices have dtype {indices.dtype}; expected integers. Turn a mask into rows with "
            "numpy.flatnonzero, or pass it as weights."
        )
    if targets is not None and targets.shape[0] != inputs.shape[0]:
        raise ValueError(
            f"There are {targets.shape[0]} targets for {inputs.shape[0]} inputs; expected as many."
        )
    rows = inputs.shape[0] if indices is None else indices.shape[0]
    if rows == 0 or inputs.shape[0] == 0:
        raise ValueError("The data set is empty: a Fisher is a mean over at least one example.")
    return rows


def _check_values(name: str, values: Array | None, low: float, high: float, meaning: str) -> None:
    if values is None or isinstance(values, jax.core.Tracer):
        return
    smallest, largest = float(values.min()), float(values.max())
    # Negated, because comparisons with NaN are false.
    if not (low <= smallest and largest <= high and largest < float("inf")):
        raise ValueError(f"{name} run from {smallest:g} to {largest:g}; expected {meaning}.")
