"""Compute the Kronecker-factored Fisher information (K-FAC).

Its operator is in `fisher.kfac_operator`. When merging, the default damping of its layers is
`Kronecker.default_damping`, 1 in units of a layer's mean eigenvalue.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fisherjax import _padding, tree
from fisherjax._core import checks
from fisherjax._core.caching import by_value
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.layer import Layer
from fisherjax._layers.loops import trace
from fisherjax.fisher import _passes, kinds
from fisherjax.fisher._factors import Sharing, expand, layer_factors
from fisherjax.fisher.diagonal import diagonal, leaf_sums
from fisherjax.fisher.kfac_operator import Kronecker, diagonal_of
from fisherjax.fisher.operators import Diagonal, Template
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params, Scalar

Fallback: TypeAlias = Callable[..., Diagonal] | None
"""What K-FAC does with leaves that it does not cover: a diagonal Fisher, `zero`, or an error."""


def zero(*args: object, **kwargs: object) -> Diagonal:
    """Select no curvature for leaves that K-FAC does not cover, as `kfac(fallback=fisher.zero)`.

    A merge then sets these leaves to the clients' weighted mean, which is right for running
    statistics. This function is only an option and cannot be called.
    """
    del args, kwargs
    raise TypeError(
        "fisher.zero is an option and cannot be called: pass fisher.kfac(..., fallback=fisher.zero)"
    )


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

    with a the layer's inputs at output location t (and a trailing 1 if it has a bias) and g the
    gradients with respect to its pre-activations, in at least float32. Layers are dense and
    convolution layers of any layout, attention projections, embeddings (a is one-hot, and A is
    diagonal) and position tables: any matrix that is added to values of each example counts as one,
    whose rows are locations with A = I. A layer with groups, such as a depthwise convolution, has
    factors for each group. Scales and shifts of normalisations have exact 2 x 2 blocks. The factors
    are exact for one example and one location. If a leaf is used several times, then each
    use counts as further locations. A leaf that is used as it is and transposed, as embedding and
    head, has one pair of factors, with the trace of both uses.

    Sums and means over t are over the T_n positions of example n that the model's `positions` let
    count: the factors are the mean over sequences of the factors of each without its padding.

    Args:
        model: The network and its likelihood.
        params: A pytree of floating arrays.
        examples: The examples, as in `fisher.diagonal`.
        kind: The output-gradient estimator, as in `fisher.diagonal`.
        key: Random key, for kinds that draw and for `max_examples`.
        batch_size: Number of examples in a minibatch (default 64).
        max_examples: Most examples to use, drawn without replacement; None (default) uses all.
        fallback: Treatment of leaves that belong to no layer. None (default) raises an error,
            `fisher.diagonal` computes their diagonal, and `fisher.zero` gives them no curvature, so
            that a merge takes their weighted mean.
        sharing: Treatment of locations that share a layer's weights. `fisher.expand` (default) is
            the equation above, exact for a linear network with a loss at each position.
            `fisher.reduce` is exact for a linear network that averages over positions before the
            loss,

                A = E_n[mean_t a_nt (mean_t a_nt)^T],
                G = E_n[sum_k sum_t g_nkt (sum_t g_nkt)^T].

    Returns:
        The operator. `Kronecker.default_damping` is the damping that merging takes by default.

    Raises:
        ValueError: If a leaf belongs to no layer and `fallback` is None; the message has its name
            and the reason (normalised kernels, running statistics, loops). If the model has
            `positions`, and a layer has several locations that are not these positions. And the
            errors of `fisher.diagonal`.

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
    # `by_value` lets equal options share one compiled program.
    options = _Options(fallback, sharing, plan.model)
    sums = by_value(partial(_sums, options))
    found = _passes.run(sums, plan, params, examples, key)
    held = found.factors.keys() | found.entries.keys()
    found = found if held.issuperset(layer.kernel for layer in found.layers) else _cut(found)
    is_tied = len({(layer.leaf, layer.index) for layer in found.layers}) < len(found.layers)
    return _merge_tied(found) if is_tied else found


@jit
def _cut(fisher: Kronecker) -> Kronecker:
    """Cut the factors of stacks, which have the name of the first layer, into those of layers."""
    held = fisher.factors.keys() | fisher.entries.keys()
    stacks = {layer.leaf for layer in fisher.layers if layer.kernel not in held}

    def cut(held: dict[str, Any]) -> dict[str, Any]:
        first = {layer: f"{layer.leaf}[0]" for layer in fisher.layers if layer.leaf in stacks}
        return held | {
            layer.kernel: jax.tree.map(operator.itemgetter(layer.index), held[name])
            for layer, name in first.items()
            if name in held
        }

    return dataclasses.replace(fisher, factors=cut(fisher.factors), entries=cut(fisher.entries))


@jit
def _merge_tied(fisher: Kronecker) -> Kronecker:
    """Replace the factors L_u (x) R_u of a leaf that is used in several ways u by one pair.

        sum_u L_u (x) R_u  ~  (sum_u t_u L_u / tr L_u) (x) (sum_u t_u R_u / tr R_u) / sum_u t_u,

    with t_u = tr L_u tr R_u. This keeps the trace, and is exact if all uses have the same L_u or
    the same R_u.
    """
    uses: dict[tuple, list[Layer]] = {}
    for layer in fisher.layers:
        uses.setdefault((layer.leaf, layer.index), []).append(layer)
    factors = dict(fisher.factors)
    for first, *others in uses.values():
        pairs = [factors[first.kernel]] if others else []
        for layer in others:
            pair = factors.pop(layer.kernel)
            # The outputs of the transposed use are the inputs of the first use.
            swapped = {"input": pair["output"], "output": pair["input"]}
            pairs.append(pair if layer.outputs == first.outputs else swapped)
        if others:
            factors[first.kernel] = _merge_pairs(pairs)
    layers, feeders = tuple(u[0] for u in uses.values()), fisher.feeders
    if feeders is not None:
        names = {x.kernel: first.kernel for first, *others in uses.values() for x in others}
        known = dict(zip(fisher.layers, feeders, strict=True))
        feeders = tuple(
            tuple(dict.fromkeys(names.get(x, x) for x in known[layer])) for layer in layers
        )
    return dataclasses.replace(fisher, factors=factors, layers=layers, feeders=feeders)


def _merge_pairs(pairs: list[dict[str, Array]]) -> dict[str, Array]:
    """Return one pair of factors for a sum of Kronecker products, as `_merge_tied` has it."""
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
    model: Model  # for its `positions`


def _sums(
    options: _Options, apply: Apply, params: Params, x: Array, w: Array, factor: _passes.Factor
) -> Kronecker:
    (fallback, sharing, model), traced = options, trace(apply, params, x)
    counts = locations.counted(traced, _padding.counted_positions(model, x))
    # This is known while JAX traces, before anything is computed.
    sizes = {name: math.prod(shape) for name, shape in tree.shapes(params).items()}
    uncovered = {name: reason for name, reason in traced.uncovered.items() if sizes[name]}
    if uncovered and fallback is None:
        share = sum(sizes[name] for name in uncovered) / sum(sizes.values())
        raise ValueError(
            "K-FAC expects parameters of dense and convolution layers, embeddings, position tables "
            f"and normalisations. These parameters are of another kind, {100 * share:.2g} % of all:"
            f"\n{_list_reasons(uncovered)}\nPass fallback=fisher.diagonal to give them a "
            "diagonal Fisher, or fallback=fisher.zero to leave them at the weighted mean when "
            "merging, or change the network."
        )
    columns, template = factor(traced.outputs), Template.of(params)
    leaves = template.by_name(params)
    entries = {name: jnp.zeros_like(leaves[name]) for name in traced.uncovered}
    if fallback is not zero:
        entries |= leaf_sums(apply, params, x, columns, w, list(traced.uncovered))
    factors, scales = layer_factors(sharing, traced, counts, columns, w)
    layers = traced.blocks or traced.layers
    return Kronecker(factors, entries | scales, layers, template, traced.feeders)


def _list_reasons(uncovered: dict[str, str]) -> str:
    """Return a line for each reason, with the names of at most three leaves."""
    names: dict[str, list[str]] = {}
    for name, reason in uncovered.items():
        names.setdefault(reason, []).append(f"'{name}'")
    return "\n".join(
        f"  {', '.join(some[:3])}{f' and {len(some) - 3} more' * (len(some) > 3)}: {reason}"
        for reason, some in names.items()
    )
