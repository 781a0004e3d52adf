"""The registry: one table of all methods, which everything that lists methods reads.

A row of `METHODS` is all that is known of a method by its name. Commands and their options, labels
and colours, files, the README's table and the battery of laws (`tests/algorithms/test_battery.py`)
read it, so that a paper is a file beside this one, an import and a row here, and its own test.
`LAWS` defines what a merge may obey; a row lists the laws that hold for it, and the battery tests
that these hold and that the others do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from fisherjax import fisher
from fisherjax._layers.graph import Wiring
from fisherjax.algorithms._fedlpa_solvers import expectation_approximation, residual_descent
from fisherjax.algorithms._rows import Row
from fisherjax.algorithms.base import Algorithm
from fisherjax.algorithms.distillation.dense import dense
from fisherjax.algorithms.distillation.fedov import fedov
from fisherjax.algorithms.exchanges.analytic_head import analytic_head
from fisherjax.algorithms.exchanges.ccvr import ccvr
from fisherjax.algorithms.exchanges.natural_gradient import natural_gradient
from fisherjax.algorithms.fedavg import fedavg
from fisherjax.algorithms.fedbn import fedbn
from fisherjax.algorithms.feddyn import feddyn
from fisherjax.algorithms.fedfish import fedfish
from fisherjax.algorithms.fedfisher import fedfisher
from fisherjax.algorithms.fedlpa import fedlpa
from fisherjax.algorithms.fednova import fednova
from fisherjax.algorithms.fedper import fedper
from fisherjax.algorithms.fedprox import fedprox
from fisherjax.algorithms.fisher_merge import fisher_merge
from fisherjax.algorithms.otfusion import otfusion
from fisherjax.algorithms.pfnm import pfnm
from fisherjax.algorithms.regmean import regmean
from fisherjax.algorithms.scaffold import scaffold
from fisherjax.algorithms.sequential import fedfisher_sequential
from fisherjax.algorithms.single_set import single_set
from fisherjax.algorithms.ties import ties
from fisherjax.algorithms.weighted_fedavg import weighted_fedavg
from fisherjax.algorithms.wrappers.sketched import fedfisher_sketched
from fisherjax.fisher import Dense, Diagonal, Kronecker
from fisherjax.typing import Model

__all__ = [
    "METHODS",
    "analytic_head",
    "ccvr",
    "dense",
    "expectation_approximation",
    "fedavg",
    "fedbn",
    "feddyn",
    "fedfish",
    "fedfisher",
    "fedfisher_sequential",
    "fedfisher_sketched",
    "fedlpa",
    "fednova",
    "fedov",
    "fedper",
    "fedprox",
    "fisher_merge",
    "natural_gradient",
    "otfusion",
    "pfnm",
    "regmean",
    "residual_descent",
    "scaffold",
    "single_set",
    "ties",
    "weighted_fedavg",
    "weighted_fedbn",
]


def weighted_fedbn(
    model: Model,
    *,
    where: Callable[[str], bool] | frozenset[str] | None = None,
    temperature: float = 1.0,
    **options: Any,
) -> Algorithm:
    """Make Weighted FedAvg with personal BatchNorm, `fedbn(weighted_fedavg(model, ...), where)`.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.categorical)
        >>> weighted_fedbn(model, where=frozenset({"scale"})).kind
        'params and prototypes, of shared leaves'
    """
    return fedbn(weighted_fedavg(model, temperature=temperature, **options), where)


# Every merge obeys these, or says below why not.
_EVERY = ("single client", "weights", "empty")
_KEEPS = (*_EVERY, "frozen")
_SOLVED = (*_KEEPS, "identity", "order", "shift", "equal curvatures", "statistics")
_LAYERS = (*_SOLVED, "layerwise")
_MEAN = "McMahan et al., AISTATS 2017"
_FEDFISHER = "Jhunjhunwala, Wang, Joshi, AISTATS 2024"
_FEDLPA = "Liu et al., NeurIPS 2024"
_FEDFISH = "Dhawan et al., TMLR 2024"
_HERE = "this library"
_FACTORS = "weights and K-FAC factors"
_EMPIRICAL = "weights and K-FAC factors of the empirical Fisher"
_SQUARES = "weights and squared gradients"
_MORE = "takes more than one message, or more than params and curvature"

# Colours of figures go by the order: new rows come last of those of `merges`.
METHODS: dict[str, Row] = {
    "fedavg": Row("FedAvg", _MEAN, "weights", fedavg, _LAYERS, {}),
    "fisher_merge": Row(
        "Fisher merging",
        "Matena, Raffel, NeurIPS 2022",
        "weights and diagonal Fisher",
        fisher_merge,
        _LAYERS,
        {"fisher": Diagonal},
    ),
    # Leaves without a Gram matrix, biases among them, get the plain mean over clients.
    "regmean": Row(
        "RegMean",
        "Jin et al., ICLR 2023",
        "weights and Gram matrices of layer inputs",
        regmean,
        (*_KEEPS, "identity", "order", "shift", "layerwise", "statistics"),
        {"grams": dict},
    ),
    "fedfisher_diag": Row(
        "FedFisher (diagonal)",
        _FEDFISHER,
        "weights and diagonal Fisher",
        partial(fedfisher, fisher=fisher.diagonal),
        (*_LAYERS, "damping"),
        {"fisher": Diagonal},
    ),
    "fedfisher_kfac": Row(
        "FedFisher (K-FAC)",
        _FEDFISHER,
        _FACTORS,
        fedfisher,
        (*_LAYERS, "damping"),
        {"fisher": Kronecker},
    ),
    # The full Fisher couples layers.
    "fedfisher_full": Row(
        "FedFisher (full)",
        _FEDFISHER,
        "weights and full Fisher",
        partial(fedfisher, fisher=fisher.full),
        (*_SOLVED, "damping"),
        {"fisher": Dense},
    ),
    # Clients' errors, which change the curvatures, are relative to the weights.
    "fedfisher_sequential": Row(
        "FedFisher (sequential)",
        _HERE,
        _FACTORS,
        fedfisher_sequential,
        (*_KEEPS, "identity", "order", "damping", "layerwise", "statistics"),
        "solves a layer from what the layers before it became",
    ),
    "fedlpa": Row("FedLPA", _FEDLPA, _EMPIRICAL, fedlpa, _LAYERS, {"fisher": Kronecker}),
    # Mean factors stand for the mean of products: equal models do not come back, nor does a shift;
    # descent from there leads to both in the limit only.
    "fedlpa_ea": Row(
        "FedLPA (EA)",
        _FEDLPA,
        _EMPIRICAL,
        partial(fedlpa, solver=expectation_approximation()),
        (*_KEEPS, "order", "equal curvatures", "layerwise", "statistics"),
        {"fisher": Kronecker},
    ),
    "fedlpa_gd": Row(
        "FedLPA (GD)",
        _FEDLPA,
        _EMPIRICAL,
        partial(fedlpa, solver=residual_descent()),
        (*_KEEPS, "order", "equal curvatures", "layerwise", "statistics"),
        {"fisher": Kronecker},
    ),
    # Clients that took other numbers of steps are scaled apart.
    "fednova": Row(
        "FedNova",
        "Wang et al., NeurIPS 2020",
        "change of the weights and effective number of steps",
        fednova,
        (*_KEEPS, "order", "shift", "layerwise", "statistics"),
        _MORE,
    ),
    "fedfish": Row("FedFish", _FEDFISH, _SQUARES, fedfish, _LAYERS, _MORE),
    "fedfish_last_epoch": Row(
        "FedFish (last epoch)",
        _FEDFISH,
        _SQUARES,
        partial(fedfish, last_epoch=True),
        _LAYERS,
        _MORE,
    ),
    "fedprox": Row("FedProx", "Li et al., MLSys 2020", "weights", fedprox, _LAYERS, _MORE),
    "scaffold": Row(
        "SCAFFOLD",
        "Karimireddy et al., ICML 2020",
        "weights and change of the control",
        scaffold,
        _LAYERS,
        _MORE,
    ),
    "fedfisher_sketched": Row(
        "FedFisher (K-FAC sketches)",
        _HERE,
        "weights and sketches of the K-FAC factors",
        fedfisher_sketched,
        (*_LAYERS, "damping"),
        _MORE,
    ),
    # Units are matched with the first client's; a shift of all weights is another network. It
    # has no place for scales and shifts.
    "otfusion": Row(
        "OTFusion",
        "Singh, Jaggi, NeurIPS 2020",
        "weights",
        otfusion,
        (*_EVERY, "identity"),
        {"wiring": Wiring},
    ),
    "pfnm": Row(
        "PFNM",
        "Yurochkin et al., ICML 2019",
        "weights and numbers of examples by class",
        pfnm,
        reads={"wiring": Wiring, "counts": str},  # an array, by its name in the file
        gives="wider model",
    ),
    "dense": Row("DENSE", "Zhang et al., NeurIPS 2022", "weights", dense, ("frozen",), None),
    "fedov": Row(
        "FedOV",
        "Diao, Li, He, ICLR 2023",
        'weights of a network with an additional "unknown" class',
        fedov,
        ("frozen",),
        None,
        gives="votes",
    ),
    # Equal models lose their small changes too, and which are small is a question to all layers.
    "ties": Row(
        "TIES",
        "Yadav et al., NeurIPS 2023",
        "largest changes of the weights",
        ties,
        ("weights", "empty", "frozen", "order", "shift", "statistics"),
        "trims changes from the model that clients started from",
    ),
    # The server moves beyond the mean, by a share of all clients that took part.
    "feddyn": Row(
        "FedDyn",
        "Acar et al., ICLR 2021",
        "weights",
        feddyn,
        ("weights", "frozen", "order", "shift", "layerwise", "statistics"),
        "needs the model that clients started from",
    ),
    "single_set": Row(
        "SingleSet", "baseline", "nothing", single_set, ("frozen",), None, "model per client"
    ),
    "fedper": Row(
        "FedPer",
        "Arivazhagan et al., 2019",
        "weights but for the head",
        fedper,
        ("frozen",),
        None,
        gives="model per client",
    ),
    "fedbn": Row(
        "FedBN",
        "Li et al., ICLR 2021",
        "weights but for BatchNorm",
        fedbn,
        ("frozen",),
        None,
        gives="model per client",
    ),
    "weighted_fedavg": Row(
        "Weighted FedAvg",
        "Huang et al., ICLR 2024",
        "weights and mean features of its classes",
        weighted_fedavg,
        ("frozen",),
        None,
        gives="model per client",
    ),
    "weighted_fedbn": Row(
        "Weighted FedAvg + personal BN",
        "Huang et al., ICLR 2024",
        "weights but for BatchNorm, and mean features of its classes",
        weighted_fedbn,
        ("frozen",),
        None,
        gives="model per client",
    ),
    # Labels as they follow that of a merge.
    "analytic_head": Row(
        "analytic head",
        "He et al., CVPR 2025",
        "without training, moments of the last layer's inputs and class sums",
        analytic_head,
        ("exchange",),
        None,
    ),
    "ccvr": Row(
        "ccvr",
        "Luo et al., NeurIPS 2021",
        "without training, moments of the last layer's inputs and class sums",
        ccvr,
        ("exchange",),
        None,
    ),
    "natural_gradient": Row(
        "natural gradient",
        "Martens, Grosse, ICML 2015",
        "without training, gradients, K-FAC factors and products with them",
        natural_gradient,
        ("exchange",),
        None,
    ),
}
"""Every method by the name that commands know it by. A program may add a row of its own."""
