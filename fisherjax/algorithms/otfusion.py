"""OTFusion: match the units of all clients with those of one client, and average the layers.

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
from fisherjax._core.caching import by_value, cached
from fisherjax._core.compiler import jit
from fisherjax._layers.graph import Wiring, wiring
from fisherjax._layers.layer import assemble, matrix
from fisherjax.algorithms.base import Algorithm
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.solvers.base import as_partial
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


class OTFusionReport(NamedTuple):
    """Report of OTFusion.

    Attributes:
        transports: T_i [M, o, o] of each layer by name, with a row for each unit of the client.
        scores: Scores [4] of the merges with each pair (correction, past_correction) of `CHOICES`;
            None without a score.
    """

    transports: dict[str, Array]
    scores: Array | None = None


CHOICES = ((True, True), (True, False), (False, True), (False, False))
"""`(correction, past_correction)` that a score selects from, in the order of FedFisher's code."""


@cached
def otfusion(
    model: Model,
    *,
    correction: bool = True,
    past_correction: bool = True,
    fix_last_layer: bool = True,
    score: Callable[[Params], Array] | None = None,
) -> Algorithm[OTFusionReport]:
    """Make OTFusion of weights with exact transport, which averages matched units.

        W = sum_i p_i X_i T_i,   T_i = argmin_T sum_pq T_pq |x_p - y_q|^2   over permutations,

    layer by layer, where X_i is a layer of client i with its inputs moved by the transport of the
    layer before, and x_p and y_q are columns, one for each unit, of X_i and of the pivot's layer.
    The pivot is the first client with a weight, and keeps the order of its units. If clients
    started from one model, their units stay nearly in place: T_i is then the identity and OTFusion
    is FedAvg.

    Args:
        model: The network, of dense and convolution layers with activations, pooling and reshapes
            between them. If branches are added, as in a residual block, inputs are moved by the
            mean of the branches' transports; an identity skip is ignored.
        correction: Whether a transport is a permutation. Otherwise it is a permutation divided by
            the number of units, the plan between uniform measures, which shrinks all layers of all
            clients but the pivot by this number.
        past_correction: Whether the layers whose inputs were moved are averaged. Otherwise layers
            with their original inputs are averaged, and moved inputs are used only for matching.
        fix_last_layer: Whether outputs keep their order, so that the last layer is not
            transported: its inputs are moved for any `past_correction`, and it is not shrunk.
            Otherwise it is treated like the other layers, as in FedFisher's experiments.
        score: Function params -> scalar, higher is better, such as the accuracy on validation data.
            It selects among all four pairs of `correction` and `past_correction`, which must have
            their defaults, as FedFisher's authors do: the first of the best, or the first pair if
            all scores are NaN.

    Returns:
        The algorithm. Updates are {"params": W_i, "wiring": which layer feeds which, static}. It
        reports `OTFusionReport`.

    Raises:
        ValueError: If there is a score and a pair was chosen too; on summarize, if a leaf belongs
            to no such layer (BatchNorm), or an operation between two layers mixes units; on merge,
            if no client has a weight.

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
        in Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024. Deviations: by default,
        outputs keep their order; nothing is selected without a `score`; biases, which neither has,
        are an additional input that is never moved, and are matched with the rest of their column.
    """
    checks.model(model)
    how = _How(correction, past_correction, fix_last_layer)
    for name, value in how._asdict().items():
        checks.instance(name, value, bool, "True or False")
    if score is not None:
        checks.function("score", score, "a function of params")
        if not (correction and past_correction):
            raise ValueError(
                f"correction is {correction} and past_correction is {past_correction}, but a score "
                "selects both; expected either these arguments or a score, not both."
            )
    evaluate = None if score is None else as_partial(score)

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

    summarize = by_value(partial(_summarize, model))
    return Algorithm(summarize, aggregate, kind="params and wiring", model=model)


def _summarize(
    model: Model, key: Key, trained: Trained, examples: Examples, local: Any
) -> tuple[dict[str, Any], Any]:
    del key
    leaves.check_all_trained("OTFusion", trained.statistics, trained.frozen)
    found = wiring(model.apply, trained.params, examples.inputs)
    return {"params": trained.params, "wiring": found}, local


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
def _fused(
    how: _How, wires: Wiring, stacked: Params, weights: Array
) -> tuple[Params, OTFusionReport]:
    present = weights > 0
    # The params of a client without weight must not matter, however large they are.
    stacked = tree.where(present, stacked)
    template = Template.of(jax.tree.map(lambda leaf: leaf[0], stacked))
    leaves = template.by_name(stacked)
    layers = {layer.kernel: jax.vmap(partial(matrix, layer))(leaves) for layer in wires.layers}
    first = jnp.argmax(present)
    pivot = {name: value[first] for name, value in layers.items()}
    stays = jnp.arange(len(weights)) == first
    moved, transports = jax.vmap(partial(_aligned, how, wires, pivot))(layers, stays)
    merged = assemble(wires.layers, tree.weighted_sum(moved, weights))
    return template.restore(merged), OTFusionReport(transports)


@partial(jit, static_argnums=0)
def _chosen(
    how: _How, evaluate: Callable, wires: Wiring, stacked: Params, weights: Array
) -> tuple[Params, OTFusionReport]:
    """Merge with each pair of `CHOICES`, and return the first merge with the best score."""
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
    how: _How, wires: Wiring, pivot: dict[str, Array], client: dict[str, Array], stays: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return a client's layers with its units in the pivot's order, and the transports."""
    moved, transports = {}, {}
    *_, last = wires.layers
    for layer, sources, span in zip(wires.layers, wires.sources, wires.spans, strict=True):
        value = client[layer.kernel]
        before = [transports[wires.layers[source].kernel] for source in sources]
        inputs = _moved_inputs(value, before, span)
        transport = jnp.eye(layer.columns, dtype=value.dtype)
        # Outputs keep their order: only the inputs of the layer are moved.
        skipped = layer == last and how.fix_last_layer
        if not skipped:
            found = transport[_matched(inputs, pivot[layer.kernel])]
            found = found if how.correction else found / layer.columns
            # The pivot stays as it is: it is not shrunk, and equal units of it are not exchanged.
            transport = jnp.where(stays, transport, found)
        transports[layer.kernel] = transport
        kept = inputs if how.past_correction or skipped else value
        moved[layer.kernel] = jnp.matmul(kept, transport, precision=PRECISION)
    return moved, transports


def _moved_inputs(value: Array, before: list[Array], span: tuple[int, int]) -> Array:
    """Move the rows [b * units * c] of a layer's matrix, except a bias, by the mean transport."""
    if not before:
        return value
    transport, (outer, inner) = jnp.asarray(sum(before)) / len(before), span
    units = len(transport)
    rows = outer * units * inner
    kernel = value[:rows].reshape(outer, units, inner, -1)
    kernel = jnp.einsum("uv,buco->bvco", transport, kernel, precision=PRECISION)
    return jnp.concatenate([kernel.reshape(rows, -1), value[rows:]])


def _matched(columns: Array, others: Array) -> Array:
    """Return for each column the index of its match among the others, by exact transport."""
    products = jnp.matmul(columns.T, others, precision=PRECISION)
    squares = jnp.square(columns).sum(0)[:, None] + jnp.square(others).sum(0)
    places = jnp.zeros(columns.shape[1], int)
    rows, found = assignment.hungarian_algorithm(jnp.maximum(squares - 2 * products, 0))
    return places.at[rows].set(found)
