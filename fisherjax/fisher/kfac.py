"""Kronecker-factored Fisher information (K-FAC)."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import _sequences, tree
from fisherjax._core import checks
from fisherjax._core.caching import by_value
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.layer import Layer
from fisherjax._layers.locations import Counted
from fisherjax._layers.pairs import Trace, trace
from fisherjax.fisher import _passes, kinds
from fisherjax.fisher._columns import Columns, over_columns, weighted
from fisherjax.fisher.diagonal import diagonal, leaf_sums
from fisherjax.fisher.kronecker import Kronecker, diagonal_of
from fisherjax.fisher.operators import Diagonal, Template
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params, Scalar

Fallback = Callable[..., Diagonal] | None


class Sharing(NamedTuple):
    """What becomes of inputs and tangents [B, T, f] where positions share a layer's weights.

    Functions of these and of which positions count, [B, T]; None is all. The others are zero.
    """

    inputs: Callable[[Array, Array | None], Array]
    tangents: Callable[[Array, Array | None], Array]


def _as_they_are(values: Array, counts: Array | None = None) -> Array:
    del counts
    return values


def _mean(values: Array, counts: Array | None = None) -> Array:
    if counts is None:
        return values.mean(1, keepdims=True)
    wide = jnp.promote_types(values.dtype, jnp.float32)
    total = values.sum(1, keepdims=True, dtype=wide)
    return (total / locations.number(counts)).astype(values.dtype)


def _sum(values: Array, counts: Array | None = None) -> Array:
    del counts
    return values.sum(1, keepdims=True)


# Each position counts like an example; or all of them together like one.
expand = Sharing(_as_they_are, _as_they_are)
reduce = Sharing(_mean, _sum)


def zero(*args: object, **kwargs: object) -> Diagonal:
    """Mark leaves that K-FAC does not cover as without curvature.

    Written `fisher.kfac(fallback=fisher.zero)`, never called. A merge then leaves them at the
    clients' weighted mean, which is what running statistics want.
    """
    del args, kwargs
    raise TypeError("fisher.zero is an option, fisher.kfac(fallback=fisher.zero), not a Fisher.")


def kfac(
    model: Model,
    params: Params,
    examples: Examples,
    *,
    kind: kinds.Kind = kinds.automatic,
    key: Key | None = None,
    batch_size: int = 64,
    max_examples: int | None = None,
    fallback: Fallback = None,
    sharing: Sharing = expand,
) -> Kronecker:
    """Compute Kronecker factors of the Fisher information for every layer of a network.

        A = E_n[sum_t a_nt a_nt^T],   G = E_n[sum_k mean_t g_nkt g_nkt^T],   F V = A V G,

    with a the layer's inputs at output location t (a trailing 1 where it has a bias) and g the
    tangents of its pre-activations, in at least float32. Layers are dense and convolutional ones of
    any layout, those of attention, embeddings (a is one-hot, A diagonal) and what is added to
    positions; scales and shifts of normalisations get exact 2 x 2 blocks. Exact for one example and
    one location. A leaf that is used several times counts each use as locations; one that is used
    either way round, as embedding and head, gets one pair of factors with the trace of both.

    Leaves that belong to no layer are up to `fallback`: None refuses them, `fisher.diagonal`
    gives them a diagonal, `fisher.zero` no curvature, so that merging takes their weighted mean.
    The other arguments, and what is refused, are those of `fisher.diagonal`.

    `sharing` says what becomes of positions that share weights. `fisher.expand`, the formula above,
    is exact for a linear network with a loss at each position; `fisher.reduce`,

        A = E_n[mean_t a_nt (mean_t a_nt)^T],   G = E_n[sum_k sum_t g_nkt (sum_t g_nkt)^T],

    for a linear network whose positions are averaged before the loss. Sums and means over t are
    over the positions that the model's `positions` let count, T_n of example n: the factors are the
    mean of those of each sentence without its padding.

    Raises:
        ValueError: If a leaf belongs to no layer and `fallback` is None; the message names it and
            why (grouped convolutions, running statistics, loops). If the model has `positions`, and
            a layer meets an example at several locations that are not these.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> params, x = {"w": jnp.ones((2, 1))}, jnp.array([[1.0, 2.0]])
        >>> print(fj.fisher.kfac(model, params, fj.Examples(x)).factors["w"]["input"])
        [[1. 2.]
         [2. 4.]]

    Source: Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, ICML 2015; Grosse and Martens, ICML 2016 (convolutions); Jhunjhunwala, Wang,
        Joshi, FedFisher, AISTATS 2024 (exact expectation over classes, merging), whose code splits
        the scale differently between the factors; the products are equal.
    """
    checks.instance("sharing", sharing, Sharing, "fisher.expand or fisher.reduce")
    params = checks.arrays(params)
    plan = _passes.check(model, params, examples, kind, key, batch_size, max_examples)
    if fallback not in (None, diagonal, zero):
        raise ValueError(
            f"fallback is {fallback!r}; expected None, fisher.diagonal or fisher.zero."
        )
    # By value: another partial of the same must not compile again.
    options = _Options(fallback, sharing, plan.model)
    sums = by_value(partial(_sums, options))
    found = _passes.run(sums, plan, params, examples, key)
    is_tied = len({(layer.leaf, layer.index) for layer in found.layers}) < len(found.layers)
    return _tied(found) if is_tied else found


@jit
def _tied(fisher: Kronecker) -> Kronecker:
    """Make one pair of factors of the several that a leaf has which is used either way round.

        sum_u L_u (x) R_u  ~  (sum_u t_u L_u / tr L_u) (x) (sum_u t_u R_u / tr R_u) / sum_u t_u,

    with t_u = tr L_u tr R_u: the trace stays, and so does all where they have one factor in common.
    """
    uses: dict[tuple, list[Layer]] = {}
    for layer in fisher.layers:
        uses.setdefault((layer.leaf, layer.index), []).append(layer)
    factors = dict(fisher.factors)
    for first, *others in uses.values():
        pairs = [factors[first.kernel]] if others else []
        for layer in others:
            pair = factors.pop(layer.kernel)
            # Where the outputs are other axes, rows are columns.
            turned = {"input": pair["output"], "output": pair["input"]}
            pairs.append(pair if layer.outputs == first.outputs else turned)
        if others:
            factors[first.kernel] = _joined(pairs)
    layers, feeders = tuple(u[0] for u in uses.values()), fisher.feeders
    if feeders is not None:
        names = {x.kernel: first.kernel for first, *others in uses.values() for x in others}
        known = dict(zip(fisher.layers, feeders, strict=True))
        feeders = tuple(
            tuple(dict.fromkeys(names.get(x, x) for x in known[layer])) for layer in layers
        )
    return dataclasses.replace(fisher, factors=factors, layers=layers, feeders=feeders)


def _joined(pairs: list[dict[str, Array]]) -> dict[str, Array]:
    traces = [{side: diagonal_of(x).sum() for side, x in pair.items()} for pair in pairs]
    shares = [each["input"] * each["output"] for each in traces]

    def mean(side: str, total: Scalar) -> Array:
        terms = []
        for pair, sizes, share in zip(pairs, traces, shares, strict=True):
            matrix = jnp.diag(pair[side]) if pair[side].ndim == 1 else pair[side]
            terms.append(matrix * (share / jnp.where(sizes[side] > 0, sizes[side] * total, 1)))
        return jnp.asarray(sum(terms))

    total = jnp.asarray(sum(shares))
    return {"input": mean("input", 1), "output": mean("output", jnp.where(total > 0, total, 1))}


class _Options(NamedTuple):
    fallback: Fallback
    sharing: Sharing
    model: Model  # whose positions count


def _sums(
    options: _Options,
    apply: Apply,
    params: Params,
    x: Array,
    w: Array,
    factor: _passes.Factor,
) -> Kronecker:
    (fallback, sharing, model), seen = options, trace(apply, params, x)
    counts = locations.counted(seen, _sequences.counted(model, x))
    # Still tracing: nothing has been computed yet.
    if seen.uncovered and fallback is None:
        sizes = {name: math.prod(shape) for name, shape in tree.shapes(params).items()}
        share = sum(sizes[name] for name in seen.uncovered) / sum(sizes.values())
        raise ValueError(
            "K-FAC covers parameters that inputs are multiplied by, convolved with, looked up in, "
            f"added to or scaled by, not these, {100 * share:.2g} % of all:\n"
            f"{_listed(seen.uncovered)}\nPass "
            "fallback=fisher.diagonal to give them a diagonal Fisher, or fallback=fisher.zero to "
            "leave them at the weighted mean when merging, or change the network."
        )
    columns, template = factor(seen.outputs), Template.of(params)
    leaves = template.by_name(params)
    entries = {name: jnp.zeros_like(leaves[name]) for name in seen.uncovered}
    if fallback is not zero:
        entries |= leaf_sums(apply, params, x, columns, w, list(seen.uncovered))
    factors, scales = _layer_sums(sharing, seen, counts, columns, w)
    return Kronecker(factors, entries | scales, seen.layers, template, seen.feeders)


def _listed(uncovered: dict[str, str]) -> str:
    """Write a line for each reason, with the names of a few leaves."""
    names: dict[str, list[str]] = {}
    for name, reason in uncovered.items():
        names.setdefault(reason, []).append(f"'{name}'")
    return "\n".join(
        f"  {', '.join(some[:3])}{f' and {len(some) - 3} more' * (len(some) > 3)}: {reason}"
        for reason, some in names.items()
    )


def _layer_sums(
    sharing: Sharing, seen: Trace, counts: Counted, columns: Columns, w: Array
) -> tuple[dict[str, dict[str, Array]], dict[str, Array]]:
    def output_factors(one: Array) -> dict[str, Array]:
        tangents = zip(seen.layers, seen.pullback(one[0]), counts, strict=True)
        return {layer.kernel: _output_factor(sharing, layer, g, c) for layer, g, c in tangents}

    # Once, not once for each column, on which the inputs do not depend.
    inputs = input_moments(seen, w, sharing, counts)
    outputs = over_columns(output_factors, weighted(columns, w), at_once=1)
    factors = {name: {"input": a, "output": outputs[name]} for name, a in inputs.items()}
    return factors, {name: block for name, block in outputs.items() if name not in inputs}


def _output_factor(sharing: Sharing, layer: Layer, g: Array, counts: Array | None) -> Array:
    if layer.form == "scale":
        # Of a scale and a shift the gradients of each example, [B, r, o] -> [r, r, o].
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        return jnp.einsum("bro,bso->rso", wide, wide, precision="highest")
    g = locations.selected(g, counts)
    g = sharing.tangents(g, counts) if layer.form == "product" else g
    # A mean over locations, since A sums over them: kron(A, G) has the exact block's scale.
    if counts is None or g.shape[1] != counts.shape[1]:
        return second_moment(g) / g.shape[1]
    # Of those that count, whose number differs from example to example.
    wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
    return second_moment(wide / jnp.sqrt(locations.number(counts)))


def input_moments(
    seen: Trace, w: Array, sharing: Sharing = expand, counts: Counted | None = None
) -> dict[str, Array]:
    """Sum w_n sum_t a_nt a_nt^T over a minibatch, for each layer by the name of its kernel.

    That of a table, whose inputs are one-hot, is diagonal: how often each row was used, [a].
    """
    counts = (None,) * len(seen.layers) if counts is None else counts
    triples = zip(seen.layers, seen.activations, counts, strict=True)
    return {
        layer.kernel: _input_moment(sharing, layer, a, w, c)
        for layer, a, c in triples
        if layer.form != "scale"
    }


def _input_moment(
    sharing: Sharing, layer: Layer, a: Array, w: Array, counts: Array | None
) -> Array:
    if layer.form == "table":
        wide = jnp.promote_types(w.dtype, jnp.float32)
        used = jnp.broadcast_to(w[:, None].astype(wide), a.shape)
        used = used if counts is None else jnp.where(counts, used, 0)
        return jnp.zeros(layer.rows, wide).at[a].add(used, mode="drop")
    a = sharing.inputs(locations.selected(a, counts), counts)
    # Both sides of the product carry the root of the weight.
    return second_moment(a * jnp.sqrt(w)[:, None, None].astype(a.dtype))


def second_moment(values: Array) -> Array:
    """Sum v_nt v_nt^T over examples and locations: [B, T, f] -> [f, f], in at least float32."""
    # Without the barrier XLA computes the values twice, once for each side of the product.
    flat = jax.lax.optimization_barrier(values.reshape(-1, values.shape[-1]))
    wide = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.matmul(flat.T, flat, precision="highest", preferred_element_type=wide)
