"""Compute the diagonal of the Fisher information, from gradients of single examples."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.batches import take
from fisherjax._layers.layer import Layer, assemble, unpack
from fisherjax._layers.loops import of_layers, trace
from fisherjax._layers.pairs import Trace
from fisherjax._layers.reading import LayersNotFoundError
from fisherjax.fisher import _passes, kinds
from fisherjax.fisher._columns import Columns, sum_over_columns, weight
from fisherjax.fisher.operators import Diagonal, Template, widen
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params


def diagonal(
    model: Model,
    params: Params,
    examples: Examples,
    *,
    kind: kinds.Kind = kinds.automatic,
    key: Key | None = None,
    batch_size: int = 64,
    max_examples: int | None = None,
) -> Diagonal:
    """Compute the diagonal of the Fisher information.

        f_j = sum_n w_n sum_k (J_n^T s_nk)_j^2 / sum_n w_n.

    The squares are those of gradients of single examples, not of a minibatch mean. For dense and
    convolution layers they are computed from inputs and output gradients, and the gradient of one
    example is in memory at a time. For other leaves a minibatch holds [K, B, size of the leaf],
    with at most 16 columns. Only leaves that the model's mask trains are included: the result acts
    on `leaves.trained(model, params)`.

    Args:
        model: The network, jitted or not, and its likelihood.
        params: A pytree of floating arrays.
        examples: The examples; only the empirical kind reads their targets. If the sharding of the
            inputs splits N over devices, then each device runs over its own rows, and draws labels
            with its own key.
        kind: The output-gradient estimator. `fisher.true` is the exact expectation;
            `fisher.curvature_propagation` estimates it without bias in one backward pass;
            `fisher.sampled` draws labels and `fisher.empirical` takes those of the data.
            `fisher.automatic` (default) is `true`, or `curvature_propagation` if the outputs of an
            example are a sequence.
        key: Random key, for kinds that draw and for `max_examples`.
        batch_size: Number of examples in a minibatch (default 64); more need more memory.
        max_examples: Most examples to use, drawn without replacement; None (default) uses all.

    Returns:
        The operator, with entries of the shapes of the trained leaves.

    Raises:
        ValueError: If shapes do not fit, if the kind or the draw lacks its targets or key, or if
            indices are given for inputs that are spread over devices.
        TypeError: If params are not floating.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> params, x = {"w": jnp.ones((2, 1))}, jnp.array([[1.0, 2.0], [3.0, 0.0]])
        >>> print(fj.fisher.diagonal(model, params, fj.Examples(x)).entries["w"].T)
        [[5. 2.]]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, section 4; Matena and Raffel,
        Merging models with Fisher-weighted averaging, NeurIPS 2022, equation 5.
    """
    params = checks.arrays(params)
    plan = _passes.check(model, params, examples, kind, key, batch_size, max_examples)
    return _passes.run(_sums, plan, params, examples, key)


def _sums(apply: Apply, params: Params, x: Array, w: Array, factor: _passes.Factor) -> Diagonal:
    try:
        traced = trace(apply, params, x)
    except LayersNotFoundError:
        # Without layers all leaves are computed from gradients of single examples.
        traced = Trace(apply(params, x), (), (), lambda _: (), {})
    columns, template = factor(traced.outputs), Template.of(params)
    sums = _layer_sums(traced, weight(columns, w))
    rest = [name for name in template.names() if name not in sums]
    return Diagonal(template.restore(sums | leaf_sums(apply, params, x, columns, w, rest)))


def leaf_sums(
    apply: Apply, params: Params, x: Array, columns: Columns, w: Array, names: list[str]
) -> dict[str, Array]:
    """Sum w_n sum_k (d(s_nk^T z_n)/d leaf)^2 over a minibatch, for the leaves with these names."""
    if not names:
        return {}
    template = Template.of(params)
    leaves = template.by_name(params)

    def squares(example: Array, factor: Array) -> dict[str, Array]:
        def outputs(chosen: dict[str, Array]) -> Array:
            return apply(template.restore(leaves | chosen), take(example, None))[0]

        _, pullback = jax.vjp(outputs, {name: leaves[name] for name in names})
        # One forward pass serves several columns.
        (gradients,) = jax.vmap(pullback)(factor)
        return jax.tree.map(lambda g: jnp.square(widen(g)).sum(0), gradients)

    def weighted_squares(columns: Array) -> dict[str, Array]:
        # [few, B, ..., C] -> [B, few, ..., C]: an example has a gradient for each column.
        per_example = jax.vmap(squares)(x, jnp.moveaxis(columns, 0, 1))
        return jax.tree.map(lambda s: jnp.tensordot(w.astype(s.dtype), s, 1), per_example)

    return sum_over_columns(weighted_squares, columns)


def _layer_sums(traced: Trace, columns: Columns) -> dict[str, Array]:
    """Sum squared gradients over a minibatch for the leaves of layers, by name."""
    # The gradient of a leaf in two layers is a sum over both, whose square is not read off them.
    uses = Counter((layer.leaf, layer.index) for layer in traced.layers)
    single = [layer for layer in traced.layers if uses[layer.leaf, layer.index] == 1]

    def layer_squares(columns: Array) -> dict[str, Array]:
        def of_layer(number: int, a: Array, g: Array) -> Array | None:
            layer = traced.layers[number]
            return _squares(layer, a, g) if layer in single else None

        tangents = zip(traced.layers, jax.lax.map(traced.pullback, columns), strict=True)
        # [K, L, B, ...] -> [L, K, B, ...] for a stack of L blocks.
        moved = [jnp.moveaxis(g, 1, 0) if x.kernel in traced.stacks else g for x, g in tangents]
        found = of_layers(traced, of_layer, traced.activations, moved)
        every = zip(traced.layers, found, strict=True)
        return {layer.kernel: squares for layer, squares in every if squares is not None}

    sums = sum_over_columns(layer_squares, columns) if single else {}
    leaves = assemble(tuple(x for x in single if x.kernel not in traced.stacks), sums)
    for layer in single:
        if layer.kernel in traced.stacks:
            leaves |= jax.vmap(partial(unpack, layer))(sums[layer.kernel])
    return leaves


def _squares(layer: Layer, a: Array, g: Array) -> Array:
    if layer.form == "scale":
        return jnp.square(widen(g)).sum((0, 1))
    return _squared_gradients(a, g, layer.rows if layer.form == "table" else None)


def _squared_gradients(a: Array, g: Array, table: int | None) -> Array:
    """Sum (sum_t a_nt g_knt^T)^2 over columns and examples: [B, T, a], [K, B, T, o] -> [a, o].

    For a table with `table` rows, a holds row numbers [B, T].
    """
    a, g = a if table else widen(a), widen(g)
    if a.shape[1] == 1 and not table:
        # The square of an outer product is the outer product of the squares: [a, B] times [B, o].
        return jnp.matmul(jnp.square(a[:, 0]).T, jnp.square(g[:, :, 0]).sum(0), precision="highest")

    # One example at a time, with all columns in one product, so that gradients stay in the cache
    # and the one-hot rows of a table are written out for one example only.
    def one_example(sums: Array, example: tuple[Array, Array]) -> tuple[Array, None]:
        patches, tangents = example
        patches = jax.nn.one_hot(patches, table, dtype=g.dtype) if table else patches
        gradients = jnp.matmul(patches.T, tangents, precision="highest")
        # [a, K * o] -> [a, K, o] -> [a, o].
        return sums + jnp.square(gradients).reshape(-1, *g.shape[::3]).sum(1), None

    # [K, B, T, o] -> [B, T, K * o].
    beside = jnp.moveaxis(g, 0, 2).reshape(*a.shape[:2], -1)
    zeros = jnp.zeros(
        (table or a.shape[2], g.shape[3]), g.dtype if table else jnp.result_type(a, g)
    )
    return jax.lax.scan(one_example, zeros, (a, beside))[0]
