"""The registry: one table of all methods, from which every list of methods is made.

A row of `METHODS` holds all that the library and the experiments know of a method by its name. The
commands and their options, labels and colours of figures, `merge_files`, the table of methods and
the battery of laws (`tests/algorithms/test_battery.py`) read it. To add a paper, write a file
beside this one, an import and a row here, and a test of its own. A row lists the `LAWS` that hold
for the method; the battery tests that these hold and that the others do not.
"""

from functools import partial

from fisherjax import fisher
from fisherjax._layers.graph import Wiring
from fisherjax.algorithms._fedlpa_solvers import expectation_approximation, residual_descent
from fisherjax.algorithms._rows import Pieces, Row
from fisherjax.algorithms.dare import dare
from fisherjax.algorithms.distillation.dense import dense
from fisherjax.algorithms.distillation.fedov import fedov
from fisherjax.algorithms.exchanges.analytic_head import analytic_head
from fisherjax.algorithms.exchanges.ccvr import ccvr
from fisherjax.algorithms.exchanges.natural_gradient import natural_gradient
from fisherjax.algorithms.exchanges.running_statistics import running_statistics
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
from fisherjax.algorithms.iso_c import iso_c
from fisherjax.algorithms.otfusion import otfusion
from fisherjax.algorithms.pfnm import pfnm
from fisherjax.algorithms.preconditioned_mixing import preconditioned_mixing
from fisherjax.algorithms.regmean import regmean
from fisherjax.algorithms.scaffold import scaffold
from fisherjax.algorithms.sequential import fedfisher_sequential
from fisherjax.algorithms.single_set import single_set
from fisherjax.algorithms.task_arithmetic import task_arithmetic
from fisherjax.algorithms.ties import ties
from fisherjax.algorithms.weighted_fedavg import weighted_fedavg
from fisherjax.algorithms.weighted_fedbn import weighted_fedbn
from fisherjax.algorithms.wrappers.sketched import fedfisher_sketched

__all__ = [
    "METHODS",
    "analytic_head",
    "ccvr",
    "dare",
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
    "iso_c",
    "natural_gradient",
    "otfusion",
    "pfnm",
    "preconditioned_mixing",
    "regmean",
    "residual_descent",
    "running_statistics",
    "scaffold",
    "single_set",
    "task_arithmetic",
    "ties",
    "weighted_fedavg",
    "weighted_fedbn",
]

# Laws that hold for most merges; comments give reasons where fewer hold.
_COMMON = ("single client", "weights", "empty")
_MASKED = (*_COMMON, "frozen")
_QUADRATIC = (*_MASKED, "identity", "order", "shift", "equal curvatures", "statistics")
_LAYERWISE = (*_QUADRATIC, "layerwise")
_DAMPED = (*_LAYERWISE, "damping")
_LEAST_SQUARES = (*_MASKED, "identity", "order", "shift", "layerwise", "statistics")
_LIMITS = (*_MASKED, "order", "equal curvatures", "layerwise", "statistics")
_CHANGES = ("weights", "empty", "frozen", "order", "shift", "layerwise", "statistics")
_FACTORS = "weights and K-FAC factors"
_MOMENTS = "without training, moments of the last layer's inputs and class sums"
_CHANNELS = "without training, moments of normalised channels"
_NO_FILES = "takes more than one message, or more than params and curvature"

# Rows of a paper's variants; of methods whose messages files do not hold; by least squares; of
# changes of the start; of exchanges; and of those that make a model for each client.
_fedfisher = partial(Row, paper="Jhunjhunwala, Wang, Joshi, AISTATS 2024", laws=_DAMPED)
_fedlpa = partial(
    Row,
    paper="Liu et al., NeurIPS 2024",
    sends="weights and K-FAC factors of the empirical Fisher",
    reads={"fisher": fisher.Kronecker},
)
_in_rounds = partial(Row, laws=_LAYERWISE, reads=_NO_FILES)
_squares = {"paper": "Dhawan et al., TMLR 2024", "sends": "weights and squared gradients"}
_fedfish = partial(_in_rounds, laws=_DAMPED, **_squares)
_regmean = partial(Row, laws=_LEAST_SQUARES, reads={"grams": dict})
_change = partial(Row, laws=_CHANGES, reads={}, pieces=Pieces())
_exchange = partial(Row, laws=("exchange", "frozen"), reads=None)
_personal = partial(Row, laws=("frozen",), reads=None, gives="model per client")

# The order of rows determines colours in figures: append new rows after those of `merges`.
METHODS: dict[str, Row] = {
    "fedavg": Row(
        "FedAvg", "McMahan et al., AISTATS 2017", "weights", fedavg, _LAYERWISE, {}, pieces=Pieces()
    ),
    "fisher_merge": Row(
        "Fisher merging",
        "Matena, Raffel, NeurIPS 2022",
        "weights and diagonal Fisher",
        fisher_merge,
        _LAYERWISE,
        {"fisher": fisher.Diagonal},
        pieces=Pieces(floor="floor"),
    ),
    # Leaves without a Gram matrix become the unweighted mean over clients.
    "regmean": _regmean(
        "RegMean",
        "Jin et al., ICLR 2023",
        "weights and Gram matrices of layer inputs",
        regmean,
    ),
    "fedfisher_diag": _fedfisher(
        "FedFisher (diagonal)",
        sends="weights and diagonal Fisher",
        factory=partial(fedfisher, fisher=fisher.diagonal),
        reads={"fisher": fisher.Diagonal},
    ),
    "fedfisher_kfac": _fedfisher(
        "FedFisher (K-FAC)", sends=_FACTORS, factory=fedfisher, reads={"fisher": fisher.Kronecker}
    ),
    # The full Fisher couples layers, so that layers cannot be merged one by one.
    "fedfisher_full": _fedfisher(
        "FedFisher (full)",
        sends="weights and full Fisher",
        factory=partial(fedfisher, fisher=fisher.full),
        laws=(*_QUADRATIC, "damping"),
        reads={"fisher": fisher.Dense},
    ),
    # The curvatures depend on errors relative to the weights, so that a shift changes the merge.
    "fedfisher_sequential": Row(
        "FedFisher (sequential)",
        "this library",
        _FACTORS,
        fedfisher_sequential,
        (*_MASKED, "identity", "order", "damping", "layerwise", "statistics"),
        "merges a layer by the merged layers before it",
    ),
    "fedlpa": _fedlpa("FedLPA", factory=fedlpa, laws=_LAYERWISE),
    # The product of mean factors replaces the mean of products: equal models are not returned, nor
    # does a shift of all models shift the merge. Descent from there reaches both only in the limit.
    "fedlpa_ea": _fedlpa(
        "FedLPA (EA)", factory=partial(fedlpa, solver=expectation_approximation()), laws=_LIMITS
    ),
    "fedlpa_gd": _fedlpa(
        "FedLPA (GD)", factory=partial(fedlpa, solver=residual_descent()), laws=_LIMITS
    ),
    # Clients with different numbers of steps are scaled differently.
    "fednova": Row(
        "FedNova",
        "Wang et al., NeurIPS 2020",
        "change of the weights and effective number of steps",
        fednova,
        (*_MASKED, "order", "shift", "layerwise", "statistics"),
        _NO_FILES,
    ),
    "fedfish": _fedfish("FedFish", factory=fedfish),
    "fedfish_last_epoch": _fedfish(
        "FedFish (last epoch)", factory=partial(fedfish, last_epoch=True)
    ),
    "fedprox": _in_rounds("FedProx", "Li et al., MLSys 2020", "weights", fedprox),
    "scaffold": _in_rounds(
        "SCAFFOLD", "Karimireddy et al., ICML 2020", "weights and change of the control", scaffold
    ),
    "fedfisher_sketched": Row(
        "FedFisher (K-FAC sketches)",
        "this library",
        "weights and sketches of the K-FAC factors",
        fedfisher_sketched,
        _DAMPED,
        _NO_FILES,
    ),
    # Units are matched with those of the first client; a shift of all weights is another network.
    # Layers of scales and shifts are refused.
    "otfusion": Row(
        "OTFusion",
        "Singh, Jaggi, NeurIPS 2020",
        "weights",
        otfusion,
        (*_COMMON, "identity"),
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
    # Small changes are dropped even if models are equal, and the threshold is common to all layers.
    "ties": Row(
        "TIES",
        "Yadav et al., NeurIPS 2023",
        "largest changes of the weights",
        ties,
        ("weights", "empty", "frozen", "order", "shift", "statistics"),
        "trims changes from the model that clients started from",
        pieces=Pieces(kept="density"),
    ),
    # The server moves beyond the mean, in proportion to the share of clients that participate.
    "feddyn": Row(
        "FedDyn",
        "Acar et al., ICLR 2021",
        "weights",
        feddyn,
        ("weights", "frozen", "order", "shift", "layerwise", "statistics"),
        "needs the model that clients started from",
    ),
    # Changes are added to the start with weights that do not sum to one.
    "task_arithmetic": _change(
        "Task arithmetic", "Ilharco et al., ICLR 2023", "weights", task_arithmetic
    ),
    "dare": Row(
        "DARE",
        "Yu et al., ICML 2024",
        "a tenth of the changes of the weights",
        dare,
        _CHANGES,
        "drops entries of changes from the model that clients started from",
    ),
    "iso_c": _change(
        "Iso-C", "Marczak et al., ICML 2025", "weights", iso_c, pieces=Pieces(unit="leaf")
    ),
    "regmean_plus_plus": _regmean(
        "RegMean++",
        "Nguyen et al., 2025",
        "weights and Gram matrices of layer inputs in the received network",
        partial(regmean, received=True),
    ),
    # A merge is of the models after the clients' second-order steps, not of the trained ones.
    "preconditioned_mixing": Row(
        "Preconditioned mixing",
        "after Ishii et al., AAAI 2026",
        _FACTORS,
        preconditioned_mixing,
        _CHANGES,
        {"fisher": fisher.Kronecker},
    ),
    "single_set": _personal("SingleSet", "baseline", "nothing", single_set),
    "fedper": _personal("FedPer", "Arivazhagan et al., 2019", "weights but for the head", fedper),
    "fedbn": _personal("FedBN", "Li et al., ICLR 2021", "weights but for BatchNorm", fedbn),
    "weighted_fedavg": _personal(
        "Weighted FedAvg",
        "Huang et al., ICLR 2024",
        "weights and mean features of its classes",
        weighted_fedavg,
    ),
    "weighted_fedbn": _personal(
        "Weighted FedAvg + personal BN",
        "Huang et al., ICLR 2024",
        "weights but for BatchNorm, and mean features of its classes",
        weighted_fedbn,
    ),
    # Exchanges, whose labels are appended to that of a merge.
    "analytic_head": _exchange("analytic head", "He et al., CVPR 2025", _MOMENTS, analytic_head),
    "ccvr": _exchange("ccvr", "Luo et al., NeurIPS 2021", _MOMENTS, ccvr),
    "natural_gradient": _exchange(
        "natural gradient",
        "Martens, Grosse, ICML 2015",
        "without training, gradients, K-FAC factors and products with them",
        natural_gradient,
    ),
    "running_statistics": _exchange(
        "running statistics", "Izmailov et al., UAI 2018", _CHANNELS, running_statistics
    ),
}
"""All methods by the names that commands use. A program can add rows of its own."""
