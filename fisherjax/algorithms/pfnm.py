"""PFNM: match the units of all clients with those of a wider network, layer by layer.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, Bayesian nonparametric federated learning of
neural networks, ICML 2019; convolutions as in Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni,
Federated learning with matched averaging, ICLR 2020.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import by_value, cached
from fisherjax._layers.graph import Wiring, wiring
from fisherjax._layers.layer import Layer, matrix, unpack
from fisherjax.algorithms._unit_matching import Prior, match_units
from fisherjax.algorithms.base import Algorithm, present_on_host
from fisherjax.fisher.operators import Template
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


class PFNMReport(NamedTuple):
    """Report of PFNM.

    Attributes:
        places: For each hidden layer, by kernel name, an array [o] for each participating client:
            the units of the merged layer with which its own units were matched.
    """

    places: dict[str, list[np.ndarray]]


@cached
def pfnm(
    model: Model,
    *,
    prior_precision: float = 1.0,
    prior_mean: float = 0.1,
    concentration: float = 7.0,
    sweeps: int = 5,
    most_new: int = 700,
    misplaced_prior: bool = False,
) -> Algorithm[PFNMReport]:
    """Make PFNM, whose merged network has one unit for each group of matched units.

        theta_g = (s mu + sum_{w -> g} w) / (s + m_g)

    is unit g of a hidden layer, where the units w of m_g clients are matched with it, s is the
    precision of the prior in units of a client's, and mu the prior mean. A unit is a column of the
    layer's matrix, with the client's inputs already in the merged order. The matches maximise the
    posterior of a Beta-Bernoulli process, one client after another, each by an exact assignment.
    The last layer is the mean of the clients' by their numbers of examples of each class.

    Therefore, at s = 1, the weights of a unit that only one client has are halved, and if all
    clients are identical, all layers except the last shrink by M / (M + s), provided that their
    units are large. Units near zero may not be matched, because new units are cheap: each client
    then adds its own.

    Args:
        model: The network, a chain of dense and convolution layers with activations, pooling and
            reshapes between them, for classification. Apply the merged params by
            `networks.apply_fn(module, any_width=True)` if it is a flax module; any other `apply`
            must infer its widths from the params.
        prior_precision: Precision s of the prior, in units of a client's (default 1).
        prior_mean: Prior mean of a unit's bias (default 0.1); it is zero for other weights.
        concentration: Concentration gamma of the process; new units are cheaper if it is larger.
        sweeps: Number of times that each client is matched anew, in random order by the key of the
            merge.
        most_new: Width of a layer beyond which a client adds at most one unit to it. A client with
            more units than places adds all that find no place: the widest client, which is
            matched first, and clients that are matched anew when the others are narrow.
        misplaced_prior: Whether layers after the first have the prior mean at their first input
            instead of the bias, as in the code of both papers.

    Returns:
        The algorithm. Updates are {"params": W_i, "counts": number of examples of each class [C],
        "wiring": which layer feeds which, static}, so that label counts are disclosed. The merged
        params are wider than `params`, so that rounds cannot continue from them. It reports
        `PFNMReport`.

    Raises:
        ValueError: If a number is out of range or the likelihood is not the categorical one; on
            summarize, if a leaf belongs to no such layer, an operation between layers mixes units,
            or there are branches.
        TypeError: On a merge under `jit`, because the widths are computed on the host.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: (x @ w["a"]) @ w["b"], fj.likelihoods.categorical)
        >>> one = {"a": 9 * jnp.eye(2), "b": jnp.eye(2)}
        >>> other = {"a": one["a"][:, ::-1], "b": one["b"][::-1]}
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.arange(2)), [[0, 1], [0, 1]])
        >>> sent = fj.merging.summarize(
        ...     pfnm(model), [one, other], federation, key=jax.random.key(0)
        ... )
        >>> print(fj.merging.merge(pfnm(model), one, sent)[0]["a"])
        [[6. 0.]
         [0. 6.]]

    Source: the papers above, and their use in Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024.
        Deviations: absent biases are matched as zeros and removed at the end; for a class without
        examples, the last layer is the plain mean; the weights of clients are ignored, except that
        clients of weight zero are left out. The code of both papers keeps all units of the first
        client, and later drops units of a client for which `most_new` leaves no place; here no unit
        is dropped.
    """
    checks.model(model)
    if not likelihoods.is_categorical(model.likelihood):
        raise ValueError(
            "PFNM averages the last layer by how many examples of each class a client has: the "
            "model's likelihood must be the categorical one. algorithms.otfusion accepts others."
        )
    checks.positive("prior_precision", prior_precision)
    checks.positive("concentration", concentration)
    checks.number("prior_mean", prior_mean)
    checks.instance("misplaced_prior", misplaced_prior, bool, "True or False")
    for name, value in (("sweeps", sweeps), ("most_new", most_new)):
        checks.count(name, value)
    prior = Prior(prior_precision, float(prior_mean), concentration, sweeps, most_new)

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del cohort
        # The widths of the merged leaves depend on values.
        present = present_on_host("PFNM computes its width", received, params, params, key)
        updates, _ = received
        order = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        counts = np.asarray(updates["counts"], float)[present]
        leaves = Template.of(params).by_name(updates["params"])
        leaves = {name: np.asarray(leaf, float)[present] for name, leaf in leaves.items()}
        merged, places = _merged(prior, misplaced_prior, updates["wiring"], leaves, counts, order)
        names, structure = Template.of(params).names(), jax.tree.structure(params)
        merged = jax.tree.unflatten(structure, [jnp.asarray(merged[name]) for name in names])
        return merged, state, PFNMReport(places)

    kind, summarize = "params, counts of classes and wiring", by_value(partial(_summarize, model))
    return Algorithm(summarize, aggregate, kind=kind, model=model, gives="wider model")


def _summarize(
    model: Model, key: Key, trained: Trained, examples: Examples, local: Any
) -> tuple[dict[str, Any], Any]:
    del key
    leaves.check_all_trained("PFNM", trained.statistics, trained.frozen)
    found = wiring(model.apply, trained.params, examples.inputs)
    _check_chain(found)
    counts = _class_counts(examples, found.layers[-1].columns)
    return {"params": trained.params, "counts": counts, "wiring": found}, local


def _check_chain(found: Wiring) -> None:
    for place, (layer, sources) in enumerate(zip(found.layers, found.sources, strict=True)):
        if sources != ((place - 1,) if place else ()):
            raise ValueError(
                f"PFNM needs a chain of layers, each fed by the one before; '{layer.kernel}' is "
                f"fed by {[found.layers[s].kernel for s in sources] or 'the inputs'}. "
                "algorithms.otfusion accepts networks with branches."
            )


def _class_counts(examples: Examples, classes: int) -> Array:
    _, targets, indices, weights = examples
    if targets is None:
        raise ValueError(
            "targets are None; PFNM counts the examples of each class, and needs labels."
        )
    targets = targets if indices is None else targets[indices]
    present = jnp.ones(targets.shape[0]) if weights is None else jnp.sign(weights)
    return jnp.zeros(classes).at[targets].add(present)


def _merged(
    prior: Prior,
    misplaced: bool,
    wires: Wiring,
    leaves: dict[str, np.ndarray],
    counts: np.ndarray,
    order: np.random.Generator,
) -> tuple[dict[str, np.ndarray], dict[str, list[np.ndarray]]]:
    """Merge stacked leaves by name; return them and the matches of each client's units."""
    merged, found, places, width = {}, {}, [], 0
    *_, last = wires.layers
    clients = [{name: leaf[i] for name, leaf in leaves.items()} for i in range(len(counts))]
    for layer, (outer, inner) in zip(wires.layers, wires.spans, strict=True):
        matrices = [_with_bias(layer, client) for client in clients]
        if places:
            pairs = zip(matrices, places, strict=True)
            matrices = [_moved_inputs(value, moved, width, outer, inner) for value, moved in pairs]
        if layer == last:
            value = _by_class(np.stack(matrices), counts)
        else:
            mean = np.zeros(len(matrices[0]))
            mean[0 if misplaced and places else -1] = prior.mean
            units, places = match_units(prior, mean, [x.T for x in matrices], order)
            value, found[layer.kernel] = units.T, places
        wide = layer if not width else _widened(layer, outer, inner, width)
        wide = wide._replace(shape=_replaced(wide.shape, wide.outputs[0], value.shape[1]))
        kept = value if layer.bias is not None else value[:-1]
        merged |= {name: np.asarray(x) for name, x in unpack(wide, kept).items()}
        width = value.shape[1]
    return merged, found


def _with_bias(layer: Layer, leaves: dict[str, np.ndarray]) -> np.ndarray:
    value = np.asarray(matrix(layer, leaves), float)
    return value if layer.bias is not None else np.vstack([value, np.zeros(value.shape[1])])


def _moved_inputs(
    value: np.ndarray, places: np.ndarray, width: int, outer: int, inner: int
) -> np.ndarray:
    """Move the rows [b * units * c] of a matrix to the matches of input units, except a bias."""
    kernel = value[:-1].reshape(outer, len(places), inner, -1)
    wide = np.zeros((outer, width, inner, kernel.shape[-1]))
    wide[:, places] = kernel
    return np.vstack([wide.reshape(outer * width * inner, -1), value[-1:]])


def _widened(layer: Layer, outer: int, inner: int, width: int) -> Layer:
    """Return the layer with the kernel's shape for `width` input units."""
    shape, output = layer.shape, layer.outputs[0] % len(layer.shape)
    inputs = [axis for axis in range(len(shape)) if axis != output]
    units = layer.rows // (outer * inner)
    for number, axis in enumerate(inputs):
        sizes = [shape[a] for a in inputs]
        ends = math.prod(sizes[:number]), math.prod(sizes[number + 1 :])
        if shape[axis] == units and ends == (outer, inner):
            return layer._replace(shape=_replaced(shape, axis, width))
    # A dense layer after an image has one axis of all positions and channels.
    (axis,) = inputs
    return layer._replace(shape=_replaced(shape, axis, outer * width * inner))


def _replaced(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    found = list(shape)
    found[axis] = size
    return tuple(found)


def _by_class(stacked: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Average last layers [M, a, C], each class by the clients' numbers of its examples."""
    total = counts.sum(0)
    shares = np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / len(counts))
    return np.einsum("mac,mc->ac", stacked, shares)
