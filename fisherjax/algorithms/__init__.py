"""Merging methods with one interface, one paper per file, and the registry of all methods.

A paper is one file and one row of `METHODS` in `registry`, whose public names are all here.
"""

from fisherjax._layers.normalization import normalizations
from fisherjax.algorithms import registry
from fisherjax.algorithms._lookup import check_options, make, merges, options, personal, required
from fisherjax.algorithms._rows import LAWS, Pieces, Row
from fisherjax.algorithms.base import Algorithm, Link, Update, WeightedSum
from fisherjax.algorithms.distillation._open_set import open_set
from fisherjax.algorithms.distillation.dense import DenseReport
from fisherjax.algorithms.distillation.fedov import FedOVReport, voting
from fisherjax.algorithms.distillation.student import StudentReport, distilled
from fisherjax.algorithms.distillation.synthesis import FEDLPA_DISTILLATION, Distillation
from fisherjax.algorithms.exchanges.analytic_head import AnalyticHeadReport
from fisherjax.algorithms.exchanges.ccvr import CCVRReport
from fisherjax.algorithms.exchanges.natural_gradient import NaturalGradientReport
from fisherjax.algorithms.fedadam import fedadam, fedyogi
from fisherjax.algorithms.fedbn import is_normalization
from fisherjax.algorithms.fedfisher import paper_adam
from fisherjax.algorithms.otfusion import OTFusionReport
from fisherjax.algorithms.pfnm import PFNMReport
from fisherjax.algorithms.registry import *  # noqa: F403
from fisherjax.algorithms.stages import Stages, in_stages
from fisherjax.algorithms.wrappers.learning_rates import with_learning_rates
from fisherjax.algorithms.wrappers.local_leaves import keep_local
from fisherjax.algorithms.wrappers.server_optimizer import with_server_optimizer

__all__ = [
    "FEDLPA_DISTILLATION",
    "LAWS",
    "Algorithm",
    "AnalyticHeadReport",
    "CCVRReport",
    "DenseReport",
    "Distillation",
    "FedOVReport",
    "Link",
    "NaturalGradientReport",
    "OTFusionReport",
    "PFNMReport",
    "Pieces",
    "Row",
    "Stages",
    "StudentReport",
    "Update",
    "WeightedSum",
    "check_options",
    "distilled",
    "fedadam",
    "fedyogi",
    "in_stages",
    "is_normalization",
    "keep_local",
    "make",
    "merges",
    "normalizations",
    "open_set",
    "options",
    "paper_adam",
    "personal",
    "required",
    "voting",
    "with_learning_rates",
    "with_server_optimizer",
]
__all__ += registry.__all__
