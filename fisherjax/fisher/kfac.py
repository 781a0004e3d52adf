"""Kronecker-factored Fisher information (K-FAC)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fisherjax.configuration import by_value
from fisherjax.fisher import kinds, passes
from fisherjax.fisher.diagonal import diagonal, leaf_sums, over_columns, weighted_columns
from fisherjax.fisher.layers import Trace, trace
from fisherjax.fisher.operators import Diagonal, Kronecker, Template
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params

Fallback = Callable[..., Diagonal] | None


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
    kind: kinds.Kind = kinds.true,
    key: Key | None = None,
    batch_size: int = 64,
    fallback: Fallback = None,
) -> Kronecker:
    """Compute Kronecker factors of the Fisher information for every dense and convolution layer.

        A = E_n[sum_t a_nt a_nt^T],   G = E_n[sum_k mean_t g_nkt g_nkt^T],   F V = A V G,

    with a the layer's inputs at output location t (a trailing 1 where it has a bias) and g the
    tangents of its pre-activations, in at least float32. Exact for one example of a dense layer.

    Leaves that belong to no such layer are up to `fallback`: None refuses them, `fisher.diagonal`
    gives them a diagonal, `fisher.zero` no curvature, so that merging takes their weighted mean.
    The other arguments, and what is refused, are those of `fisher.diagonal`.

    Raises:
        ValueError: If a leaf belongs to no layer and `fallback` is None; the message names it and
            why (normalisation, shared weights, dilation, a cast).

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
    plan = passes.check(model, params, examples, kind, key, batch_size)
    if fallback not in (None, diagonal, zero):
        raise ValueError(
            f"fallback is {fallback!r}; expected None, fisher.diagonal or fisher.zero."
        )
    # By value: another partial of the same must not compile again.
    return passes.run(by_value(partial(_sums, fallback)), plan, params, examples, key)


def _sums(
    fallback: Fallback, apply: Apply, params: Params, x: Array, w: Array, factor: passes.Factor
) -> Kronecker:
    seen = trace(apply, params, x)
    # Still tracing: nothing has been computed yet.
    if seen.uncovered and fallback is None:
        lines = "\n".join(f"  '{name}': {reason}" for name, reason in seen.uncovered.items())
        raise ValueError(
            "K-FAC covers dense and two-dimensional convolution layers, not these parameters:\n"
            f"{lines}\nPass fallback=fisher.diagonal to give them a diagonal Fisher, or "
            "fallback=fisher.zero to leave them at the weighted mean when merging, or change the "
            "network."
        )
    columns, template = factor(seen.outputs), Template.of(params)
    if fallback is zero:
        leaves = template.by_name(params)
        entries = {name: jnp.zeros_like(leaves[name]) for name in seen.uncovered}
    else:
        entries = leaf_sums(apply, params, x, columns, w, list(seen.uncovered))
    return Kronecker(_factor_sums(seen, columns, w), entries, seen.layers, template)


def _factor_sums(seen: Trace, columns: Array, w: Array) -> dict[str, dict[str, Array]]:
    def output_factors(column: Array) -> dict[str, Array]:
        tangents = zip(seen.layers, seen.pullback(column), strict=True)
        # A mean over locations, since A sums over them: kron(A, G) has the exact block's scale.
        return {layer.kernel: second_moment(g) / g.shape[1] for layer, g in tangents}

    # Once, not once for each column, on which the inputs do not depend.
    inputs = input_moments(seen, w)
    outputs = over_columns(output_factors, weighted_columns(columns, w))
    return {name: {"input": inputs[name], "output": outputs[name]} for name in inputs}


def input_moments(seen: Trace, w: Array) -> dict[str, Array]:
    """Sum w_n sum_t a_nt a_nt^T over a minibatch, for each layer by the name of its kernel."""
    # Both sides of the product carry the root of the weight.
    root = jnp.sqrt(w)[:, None, None]
    pairs = zip(seen.layers, seen.activations, strict=True)
    return {layer.kernel: second_moment(a * root.astype(a.dtype)) for layer, a in pairs}


def second_moment(values: Array) -> Array:
    """Sum v_nt v_nt^T over examples and locations: [B, T, f] -> [f, f], in at least float32."""
    # Without the barrier XLA computes the values twice, once for each side of the product.
    flat = jax.lax.optimization_barrier(values.reshape(-1, values.shape[-1]))
    wide = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.matmul(flat.T, flat, precision="highest", preferred_element_type=wide)
