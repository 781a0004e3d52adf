"""OTFusion: units of every client are matched with those of one, layer by layer, then averaged.

Singh and Jaggi, Model fusion via optimal transport, NeurIPS 2020, algorithm 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax import assignment

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax._layers.graph import Wiring, wiring
from fisherjax._layers.layer import assemble, matrix
from fisherjax.algorithms.base import Algorithm
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.solvers.base import as_partial
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


class Transported(NamedTuple):
    """What OTFusion reports.

    Attributes:
        transports: T_i [M, o, o] of each layer by name, a row for each own unit.
        scores: Of what was chosen among [4], (correction, past_correction) as in `CHOICES`; None
            where nothing was.
    """

    transports: dict[str, Array]
    scores: Array | None = None


CHOICES = ((True, True), (True, False), (False, True), (False, False))
"""`correction` and `past_correction` that a score chooses among, as FedFisher's code has them."""


@cached
def otfusion(
    model: Model,
    *,
    correction: bool = True,
    past_correction: bool = True,
    fix_last_layer: bool = True,
    score: Callable[[Params], Array] | None = None,
) -> Algorithm[Transported]:
    """Make OTFusion of weights with exact transport, which averages what has been matched.

        W = sum_i p_i X_i T_i,   T_i = argmin_T sum_pq T_pq |x_p - y_q|^2   over permutations,

    layer by layer, where X_i is a layer of client i whose inputs were moved by the transport of the
    layer before, and x_p and y_q are columns, one for each unit, of X_i and of the pivot's layer.
    The pivot is the first client that has weight, whose units stay. Clients that started from one
    model keep their units nearly in place: then T_i is the identity and OTFusion is FedAvg.

    Args:
        model: The network, of dense and convolution layers with activations, pooling and reshapes
            between them. Where branches are added, as in a residual block, inputs are moved by the
            mean of the branches' transports; a skip that passes by unchanged is not counted.
        correction: Whether a transport is a permutation. Otherwise it is one over the number of
            units, as of a plan between uniform measures, which shrinks every layer of every client
            but the pivot by that.
        past_correction: Whether the averaged layers are those whose inputs were moved. Otherwise
            inputs are as they were, and only matching knows of the move.
        fix_last_layer: Whether outputs stay in their order, so that the last layer is not
            transported: its inputs are moved whatever `past_correction` is, and it is not shrunk.
            Otherwise it is a layer like the others, as in FedFisher's experiments.
        score: Params -> scalar, higher is better, such as the accuracy on validation data. It
            chooses among all four pairs of `correction` and `past_correction`, which stay as they
            are then, as FedFisher's authors do: the first of the best, and the first where no
            score is a number.

    Returns:
        The algorithm. Updates are {"params": W_i, "wiring": which layer feeds which, static}. It
        reports `Transported`.

    Raises:
        ValueError: If a score has to choose what was chosen already; on summarize, if a leaf
            belongs to no such layer (BatchNorm), or something between two layers mixes units; on
            merge, if no client has weight.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: (x @ w["a"]) @ w["b"], fj.likelihoods.gaussian)
        >>> one = {"a": jnp.array([[1.0, 2.0]]), "b": jnp.array([[1.0], [3.0]])}
        >>> other = jax.tree.map(lambda x: x[..., ::-1] if x.shape == (1, 2) else x[::-1], one)
        >>> federation = fj.clients.federation((jnp.eye(1), jnp.ones((1, 1))), [[0], [0]])
        >>> sent = fj.merging.summarize(
        ...     otfusion(model), [one, other], federation, key=jax.random.key(0)
        ... )
        >>> print(fj.merging.merge(otfusion(model), one, sent)[0]["a"])
        [[1. 2.]]

    Source: the paper above and its code, whose `skip_last_layer` is `fix_last_layer`; and its use
        in Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024. Deviations: the last layer stays by
        default; nothing is chosen without a `score`; biases, which neither has, are one more input
        that nobody moves, and are matched with the rest of their column.
    """
    checks.model(model)
    how = _How(correction, past_correction, fix_last_layer)
    for name, value in how._asdict().items():
        checks.instance(name, value, bool, "True or False")
    if score is not None:
        checks.function("score", score, "a function of params")
        if not (correction and past_correction):
            raise ValueError(
                f"correction is {correction} and past_correction {past_correction}, which a score "
                "chooses; expected either of them, or a score."
            )
    evaluate = None if score is None else as_partial(score)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key
        leaves.check_all_trained("OTFusion", trained.statistics, trained.frozen)
        found = wiring(model.apply, trained.params, examples.inputs)
        return {"params": trained.params, "wiring": found}, local

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, params, cohort
        updates, weights = received
        _check_whole(updates["wiring"], updates["params"])
        given = updates["wiring"], updates["params"], weights
        if evaluate is None:
            merged, info = _fused(how, *given)
        else:
            merged, info = _chosen(how, evaluate, *given)
        return merged, state, info

    return Algorithm(summarize, aggregate, kind="params and wiring", model=model)


def _check_whole(wires: Wiring, stacked: Params) -> None:
    used = (name for layer in wires.layers for name in (layer.leaf, layer.bias))
    needed = {name for name in used if name is not None}
    if missing := sorted(needed - set(tree.names(stacked))):
        raise ValueError(
            f"Clients keep {missing}, which take units that OTFusion puts in another order; "
            "expected all layers. Use another method under keep_local, fedper or fedbn."
        )


class _How(NamedTuple):
    correction: bool
    past_correction: bool
    fix_last_layer: bool


@partial(jit, static_argnums=0)
def _fused(how: _How, wires: Wiring, stacked: Params, weights: Array) -> tuple[Params, Transported]:
    present = weights > 0
    # Who has no weight is not asked, however large it is.
    stacked = tree.keep(present, stacked)
    template = Template.of(jax.tree.map(lambda leaf: leaf[0], stacked))
    leaves = template.by_name(stacked)
    layers = {layer.kernel: jax.vmap(partial(matrix, layer))(leaves) for layer in wires.layers}
    first = jnp.argmax(present)
    pivot = {name: value[first] for name, value in layers.items()}
    stays = jnp.arange(len(weights)) == first
    moved, transports = jax.vmap(partial(_aligned, how, wires, pivot))(layers, stays)
    merged = assemble(wires.layers, tree.weighted_sum(moved, weights))
    return template.restore(merged), Transported(transports)


@partial(jit, static_argnums=0)
def _chosen(
    how: _How, evaluate: Callable, wires: Wiring, stacked: Params, weights: Array
) -> tuple[Params, Transported]:
    """Fuse in every way, and give the first of those with the best score."""
    found, scores = [], []
    for correction, past in CHOICES:
        other = how._replace(correction=correction, past_correction=past)
        found.append(_fused(other, wires, stacked, weights))
        scores.append(jnp.asarray(evaluate(found[-1][0]), float))
    scores = jnp.stack(scores)
    best = jnp.argmax(jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    merged, info = jax.tree.map(lambda *ways: jnp.stack(ways)[best], *found)
    return merged, info._replace(scores=scores)


def _aligned(
    how: _How,
    wires: Wiring,
    pivot: dict[str, Array],
    client: dict[str, Array],
    stays: Array,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Give a client's layers with its units in the pivot's order, and the transports."""
    moved, transports = {}, {}
    *_, last = wires.layers
    for layer, sources, span in zip(wires.layers, wires.sources, wires.spans, strict=True):
        own = client[layer.kernel]
        before = [transports[wires.layers[source].kernel] for source in sources]
        inputs = _moved_inputs(own, before, span)
        transport = jnp.eye(layer.columns, dtype=own.dtype)
        # Outputs that stay are not transported: the layer has its inputs moved, and that is all.
        skipped = layer == last and how.fix_last_layer
        if not skipped:
            found = transport[_matched(inputs, pivot[layer.kernel])]
            found = found if how.correction else found / layer.columns
            # The pivot is what others are moved to, and stays as it is: it is not shrunk, and
            # units of it that are equal do not change places.
            transport = jnp.where(stays, transport, found)
        transports[layer.kernel] = transport
        kept = inputs if how.past_correction or skipped else own
        moved[layer.kernel] = jnp.matmul(kept, transport, precision=PRECISION)
    return moved, transports


def _moved_inputs(own: Array, before: list[Array], span: tuple[int, int]) -> Array:
    """Move the rows [b * units * c] of a layer's matrix, but a bias, by the mean transport."""
    if not before:
        return own
    transport, (outer, inner) = jnp.asarray(sum(before)) / len(before), span
    units = len(transport)
    rows = outer * units * inner
    kernel = own[:rows].reshape(outer, units, inner, -1)
    kernel = jnp.einsum("uv,buco->bvco", transport, kernel, precision=PRECISION)
    return jnp.concatenate([kernel.reshape(rows, -1), own[rows:]])


def _matched(columns: Array, others: Array) -> Array:
    """Give for each column the one of the others that it goes to: exact transport."""
    products = jnp.matmul(columns.T, others, precision=PRECISION)
    squares = jnp.square(columns).sum(0)[:, None] + jnp.square(others).sum(0)
    places = jnp.zeros(columns.shape[1], int)
    rows, found = assignment.hungarian_algorithm(jnp.maximum(squares - 2 * products, 0))
    return places.at[rows].set(found)
