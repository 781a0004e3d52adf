"""Merge clients' adapters by their products, in the metric of the layers' Kronecker factors."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax.numpy as jnp

from fisherjax import quadratic, solvers, tree
from fisherjax._core import checks, linalg
from fisherjax._core.compiler import jit
from fisherjax._layers.layer import Layer
from fisherjax._one_device import on_one_device
from fisherjax._upload_checks import check_not_all_zero, check_weights
from fisherjax.adapters import base
from fisherjax.adapters._checks import check
from fisherjax.adapters.base import Adapter, Factors
from fisherjax.clients import shares
from fisherjax.fisher import Kronecker
from fisherjax.fisher.kfac_operator import diagonal_of, identity_like
from fisherjax.fisher.operators import Template, widen
from fisherjax.solvers import Solver
from fisherjax.typing import AnyArray, Array, Scalar, Weights


def merge(
    adapters: Sequence[Mapping[str, Adapter]],
    weights: Weights | None = None,
    factors: Sequence[Mapping[str, Factors]] | None = None,
    *,
    rank: int | Mapping[str, int] | None = None,
    damping: Scalar = Kronecker.default_damping,
    in_span: bool = False,
    solver: Solver | None = None,
) -> dict[str, Adapter]:
    """Merge clients' adapters, layer by layer, by the changes D_i = scale_i B_i A_i that they make.

        argmin sum_i p_i 1/2 |G_i^(1/2) (D - D_i) A_i^(1/2)|^2 + damping towards sum_i p_i D_i

    over D of any rank, of which the best one of `rank` follows in the metric `mean_factors`. Ranks
    and scales may differ between clients. A client that does not adapt a layer changes it by zero.

    Args:
        adapters: For each client its adapters, by layer. Different clients may adapt different
            layers.
        weights: [M] non-negative weights of the clients, scaled to sum one (default: equal).
        factors: For each client the Kronecker factors of its layers, such as `factors` of the
            result of `fisher.kfac` at the base and its change. None (default) takes the weighted
            mean. Without "output", which is RegMean, the solution has the rank of all adapters
            together. A client may lack the factors of a layer that it does not adapt: then it has
            no curvature there.
        rank: Largest rank of the result, for all layers or by layer; None (default) keeps the exact
            solution, whose rank is sum_i r_i, or full with output factors.
        damping: Damping in units of a layer's mean eigenvalue, positive.
        in_span: Whether the solution of layers with output factors is sought in the span of the
            clients' factors only, of rank sum_i r_i, without any matrix of the layer's size.
        solver: Solver of layers with output factors (default `solvers.conjugate_gradients()`).

    Returns:
        The merged adapters, with scale one.

    Raises:
        ValueError: If adapters of a layer have different inputs or outputs, factors do not fit or
            are missing, or a number is out of range.
        TypeError: If an argument has the wrong type.

    Example:
        >>> ann = {"dense": Adapter(jnp.array([[1.0, 0.0]]), jnp.array([[2.0]]))}
        >>> bob = {"dense": Adapter(jnp.array([[0.0, 1.0]]), jnp.array([[4.0]]), scale=0.5)}
        >>> print(base.product(merge([ann, bob])["dense"]).T)
        [[1. 1.]]
        >>> grams = [{"dense": {"input": jnp.diag(x)}} for x in jnp.array([[1.0, 0], [0, 1]])]
        >>> print(base.product(merge([ann, bob], factors=grams, damping=1e-6)["dense"]).T.round(3))
        [[2. 2.]]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 7; Jin et al., RegMean,
        ICLR 2023; here for products of factors.
    """
    names = check(adapters, factors)
    checks.positive("damping", damping)
    sizes = dict.fromkeys(names, rank) if not isinstance(rank, Mapping) else dict(rank)
    for name in names:
        if sizes.get(name) is not None:
            checks.count(f"the rank of {name!r}", sizes[name])
    known = check_weights(weights, len(adapters))
    check_not_all_zero(known)
    shared = jnp.asarray(shares(known), float)
    solve = solvers.conjugate_gradients() if solver is None else solver
    merged = {}
    for name in names:
        layer = [client.get(name) for client in adapters]
        held = None if factors is None else [client.get(name) for client in factors]
        layer, held = on_one_device((layer, held))
        how = sizes.get(name), in_span, solve
        merged[name] = _merge_layer(how, layer, held, shared, damping)
    return merged


def mean_factors(
    factors: Sequence[Factors], weights: Sequence[Scalar] | Array, damping: Scalar = 0.0
) -> dict[str, Array]:
    """Return one pair of factors for sum_i p_i A_i (x) G_i, whose trace it keeps.

        A = sum_i p_i tr(G_i) A_i,   G = sum_i p_i tr(A_i) G_i,   up to one scale for both.

    It is exact if all clients have the same A or the same G. With damping, each factor has its
    part, sqrt(damping) times its mean eigenvalue.

    Source: the Kronecker product nearest to a sum, for factors of rank one in their traces; damping
        as in Martens and Grosse, ICML 2015, section 6.3.
    """
    traces = {
        side: jnp.stack([jnp.sum(diagonal_of(f[side])) for f in factors]) for side in factors[0]
    }
    # Divided by the largest: only ratios count, and products of tiny traces would be zero.
    relative = {side: t / jnp.where(t.max() > 0, t.max(), 1) for side, t in traces.items()}
    means = {}
    for side in factors[0]:
        others = [x for other, x in relative.items() if other != side]
        votes = jnp.asarray(weights) * (others[0] if others else 1)
        scale = jnp.where(traces[side].max() > 0, traces[side].max(), 1)
        mean = _mean([widen(f[side]) / scale for f in factors], votes)
        scale = jnp.mean(diagonal_of(mean))
        # Without any curvature, the metric is that of least squares.
        shift = jnp.where(scale > 0, jnp.sqrt(damping) * scale, 1)
        means[side] = mean + shift.astype(mean.dtype) * identity_like(mean)
    return means


def _mean(matrices: Sequence[Array], weights: Sequence[Scalar] | Array) -> Array:
    return tree.weighted_sum(jnp.stack(matrices), jnp.asarray(weights))


@partial(jit, static_argnums=0)
def _merge_layer(
    how: tuple[int | None, bool, Solver],
    layer: Sequence[Adapter | None],
    factors: Sequence[Factors | None] | None,
    weights: Array,
    damping: Scalar,
) -> Adapter:
    rank, in_span, solver = how
    present = [(x, w) for x, w in zip(layer, weights, strict=True) if x is not None]
    mean = base.weighted_sum(*zip(*present, strict=True))
    if factors is None:
        return mean if rank is None else base.truncate(mean, rank)
    # The factors of a client that has none are zero: it has no curvature in this layer.
    known = next(f for f in factors if f is not None)
    held = [{s: jnp.zeros_like(x) for s, x in known.items()} if f is None else f for f in factors]
    if "output" in known:
        merged = (_solve_in_span if in_span else _solve)(layer, held, weights, damping, solver)
    else:
        merged = _least_squares(layer, [f["input"] for f in held], weights, damping)
    if rank is None:
        return merged
    return base.truncate(merged, rank, mean_factors(held, weights, damping))


def _least_squares(
    layer: Sequence[Adapter | None], grams: Sequence[Array], weights: Array, damping: Scalar
) -> Adapter:
    """Solve for the layer's outputs, sum_i p_i D_i (A_i + shift) (sum_i p_i A_i + shift)^-1.

    It acts on the rows of the clients' A only, so that the rank does not grow.
    """
    total = _mean([widen(gram) for gram in grams], weights)
    mean = jnp.mean(diagonal_of(total))
    # At scale one. Without any curvature, the solution is the mean.
    scale, shift = jnp.where(mean > 0, mean, 1), jnp.where(mean > 0, damping, 1)
    rows = []
    for adapter, gram in zip(layer, grams, strict=True):
        if adapter is not None:
            a, at_one = widen(jnp.asarray(adapter.a)), widen(gram) / scale
            seen = a * at_one if gram.ndim == 1 else _times(a, at_one)
            rows.append(adapter._replace(a=seen + shift * a))
    present = [w for w, x in zip(weights, layer, strict=True) if x is not None]
    stacked = base.weighted_sum(rows, present)
    matrix = total / scale + shift * identity_like(total)
    if matrix.ndim == 1:
        return stacked._replace(a=stacked.a / matrix)
    return stacked._replace(a=linalg.solve_definite(matrix, jnp.asarray(stacked.a.T)).T)


def _solve(
    layer: Sequence[Adapter | None],
    factors: Sequence[Factors],
    weights: Array,
    damping: Scalar,
    solver: Solver,
) -> Adapter:
    """Solve the quadratic of K-FAC, whose solution has full rank, as a matrix.

    The factors have the size of the matrix already, so that low rank would save nothing.
    """
    known = next(x for x in layer if x is not None)
    shape = known.a.shape[1], known.b.shape[0]
    changes = [jnp.zeros(shape) if x is None else base.product(x) for x in layer]
    # One name for all layers, so that those of one shape share a program.
    params = {"kernel": jnp.stack(changes)}
    stacked = {side: jnp.stack([f[side] for f in factors]) for side in ("input", "output")}
    template = Template.of({"kernel": changes[0]})
    fishers = Kronecker({"kernel": stacked}, {}, (Layer("kernel", None, shape),), template)
    problem = quadratic.quadratic(fishers, params, weights, damping)
    return base.from_product(solver(problem).params["kernel"])


def _solve_in_span(
    layer: Sequence[Adapter | None],
    factors: Sequence[Factors],
    weights: Array,
    damping: Scalar,
    solver: Solver,
) -> Adapter:
    """Solve the quadratic over D = (U C V^T)^T, with bases U of all B and V of all A."""
    present = [x for x in layer if x is not None]
    stacked = base.weighted_sum(present, [1.0] * len(present))
    bases = {"input": _basis(jnp.asarray(stacked.a.T)), "output": _basis(jnp.asarray(stacked.b))}
    small = [{s: _project(x, bases[s]) for s, x in f.items()} for f in factors]
    seen = [
        x and Adapter(_times(x.a, bases["input"]), _times(bases["output"].T, x.b), x.scale)
        for x in layer
    ]
    # The damping is in units of the mean eigenvalue of the layer, not of its part in the span.
    sizes = [_mean_trace(f, weights, factors) for f in (factors, small)]
    ratio = sizes[0] / jnp.where(sizes[1] > 0, sizes[1], 1)
    core = _solve(seen, small, weights, jnp.where(sizes[1] > 0, ratio, 1) * damping, solver)
    return Adapter(_times(core.a, bases["input"].T), _times(bases["output"], core.b))


def _basis(x: Array) -> Array:
    """Return an orthonormal basis of the columns of x, with zeros for those that depend."""
    u, s, _ = linalg.svd(x)
    return jnp.where(s > s[0] * jnp.finfo(s.dtype).eps * max(x.shape), u, 0)


def _project(factor: Array, basis: Array) -> Array:
    wide = widen(factor)
    return _times(basis.T, wide[:, None] * basis if wide.ndim == 1 else _times(wide, basis))


def _mean_trace(factors: Sequence[Factors], weights: Array, units: Sequence[Factors]) -> Array:
    """Return sum_i p_i tr(A_i) tr(G_i) / (a o), in units of the largest traces of some factors."""
    means = []
    for side in ("input", "output"):
        largest = jnp.stack([jnp.sum(diagonal_of(f[side])) for f in units]).max()
        traces = jnp.stack([jnp.mean(diagonal_of(f[side])) for f in factors])
        means.append(traces / jnp.where(largest > 0, largest, 1))
    return jnp.sum(weights * means[0] * means[1])


def _times(left: AnyArray, right: AnyArray) -> Array:
    return jnp.matmul(left, right, precision="highest")
