"""Merging methods, one paper a file, one interface, and the table of them.

A paper is one file and one row of `TABLE`: commands, labels and the battery of laws read that row.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from fisherjax import checks, fisher
from fisherjax.algorithms.analytic_head import analytic_head
from fisherjax.algorithms.base import Algorithm, Link, Update
from fisherjax.algorithms.ccvr import ccvr
from fisherjax.algorithms.dense import dense
from fisherjax.algorithms.fedavg import fedavg
from fisherjax.algorithms.fedbn import fedbn, is_normalization
from fisherjax.algorithms.fedfish import fedfish
from fisherjax.algorithms.fedfisher import fedfisher, paper_adam
from fisherjax.algorithms.fedlpa import expectation_approximation, fedlpa, residual_descent
from fisherjax.algorithms.fednova import fednova
from fisherjax.algorithms.fedopt import with_server_optimizer
from fisherjax.algorithms.fedov import fedov, open_set, voting
from fisherjax.algorithms.fedper import fedper
from fisherjax.algorithms.fedprox import fedprox
from fisherjax.algorithms.fisher_merge import fisher_merge
from fisherjax.algorithms.natural_gradient import natural_gradient
from fisherjax.algorithms.otfusion import otfusion
from fisherjax.algorithms.pfnm import pfnm
from fisherjax.algorithms.private import keep_private
from fisherjax.algorithms.regmean import regmean
from fisherjax.algorithms.scaffold import scaffold
from fisherjax.algorithms.sequential import fedfisher_sequential
from fisherjax.algorithms.single_set import single_set
from fisherjax.algorithms.sketched import fedfisher_sketched
from fisherjax.algorithms.stages import Stages, in_stages
from fisherjax.algorithms.student import distilled
from fisherjax.algorithms.weighted_fedavg import weighted_fedavg
from fisherjax.distillation import FEDLPA_DISTILLATION, Distillation
from fisherjax.fisher.normalization import normalizations
from fisherjax.typing import Model

__all__ = [
    "DISTILLED",
    "FEDLPA_DISTILLATION",
    "LAWS",
    "PERSONAL",
    "TABLE",
    "VOTES",
    "WIDER",
    "Algorithm",
    "Distillation",
    "Link",
    "Row",
    "Stages",
    "Update",
    "analytic_head",
    "ccvr",
    "dense",
    "distilled",
    "expectation_approximation",
    "fedavg",
    "fedbn",
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
    "in_stages",
    "is_normalization",
    "keep_private",
    "make",
    "natural_gradient",
    "normalizations",
    "open_set",
    "options",
    "otfusion",
    "paper_adam",
    "pfnm",
    "regmean",
    "residual_descent",
    "scaffold",
    "single_set",
    "voting",
    "weighted_fedavg",
    "weighted_fedbn",
    "with_server_optimizer",
]

LAWS = ("identity", "order", "weights", "empty", "shift")
"""What a merge may obey: clients with one model get it back; the order of clients and the scale of
weights do not matter; a client without weight has no influence; the merged model moves with all."""


class Row(NamedTuple):
    """What there is to know of a method, once.

    Attributes:
        label: For tables and figures.
        factory: With keyword defaults, the options of the command line; its first argument is
            `model` if it needs the network.
        laws: Those of `LAWS` that hold.
    """

    label: str
    factory: Callable[..., Algorithm]
    laws: tuple[str, ...] = LAWS


_UNSOLVED = ("order", "weights", "empty")
TABLE = {
    "fedavg": Row("FedAvg", fedavg),
    "fisher_merge": Row("Fisher merging", fisher_merge),
    "regmean": Row("RegMean", regmean),
    "fedfisher_diag": Row("FedFisher (diagonal)", partial(fedfisher, fisher=fisher.diagonal)),
    "fedfisher_kfac": Row("FedFisher (K-FAC)", fedfisher),
    "fedfisher_full": Row("FedFisher (full)", partial(fedfisher, fisher=fisher.full)),
    # Errors are relative to the weights, so that a shift of all of them is another merge.
    "fedfisher_sequential": Row("FedFisher (sequential)", fedfisher_sequential, LAWS[:-1]),
    "fedlpa": Row("FedLPA", fedlpa),
    # Mean factors stand for the mean of products: equal models do not come back, nor does a shift;
    # descent from there leads to both in the limit only.
    "fedlpa_ea": Row("FedLPA (EA)", partial(fedlpa, solver=expectation_approximation()), _UNSOLVED),
    "fedlpa_gd": Row("FedLPA (GD)", partial(fedlpa, solver=residual_descent()), _UNSOLVED),
    # Clients that came to one model by paths of different lengths are scaled apart.
    "fednova": Row("FedNova", fednova, ("order", "weights", "empty", "shift")),
    "fedfish": Row("FedFish", fedfish),
    "fedfish_last_epoch": Row("FedFish (last epoch)", partial(fedfish, last_epoch=True)),
    "fedprox": Row("FedProx", fedprox),
    "scaffold": Row("SCAFFOLD", scaffold),
    # Last: colours of figures go by the order.
    "fedfisher_sketched": Row("FedFisher (K-FAC sketches)", fedfisher_sketched),
    # Units are matched with the first client's; a shift of all weights is another network.
    "otfusion": Row("OTFusion", otfusion, ("identity", "weights", "empty")),
}
"""Every method that makes one model, by the name that commands know it by."""


def weighted_fedbn(
    model: Model, *, where: Callable[[str], bool] | frozenset[str] | None = None, **options: Any
) -> Algorithm:
    """Make Weighted FedAvg with personal BatchNorm, `fedbn(weighted_fedavg(model, ...), where)`."""
    return fedbn(weighted_fedavg(model, **options), where)


PERSONAL = {
    "single_set": Row("SingleSet", single_set, ()),
    "fedper": Row("FedPer", fedper, ()),
    "fedbn": Row("FedBN", fedbn, ()),
    "weighted_fedavg": Row("Weighted FedAvg", weighted_fedavg, ()),
    "weighted_fedbn": Row("Weighted FedAvg + personal BN", weighted_fedbn, ()),
}
"""Every method that makes a model for each client; `LAWS` are of one merged model."""


WIDER = {"pfnm": Row("PFNM", pfnm, ())}
"""Every method whose merged model is wider than the clients', so that rounds and `LAWS` of models
of one shape have no meaning."""


DISTILLED = {"dense": Row("DENSE", dense, ())}
"""Every method that trains on the server, which obeys no law of one solve."""


VOTES = {"fedov": Row("FedOV", fedov, ())}
"""Every method that gives no one model, but all of the clients' for a vote."""


def options(name: str) -> dict[str, object]:
    """Give the keyword options of a method and their defaults, as the table's factory has them.

    Example:
        >>> options("fedprox")
        {'mu': 0.001}
    """
    # The signature of a `partial` shows what it fixes as defaults.
    parameters = inspect.signature(_row(name).factory).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def make(name: str, model: Model, **chosen: object) -> Algorithm:
    """Make a method of any table, the same object for equal arguments.

    Some methods do without the model; what may be chosen are their `options`. FedPer has to be told
    its `head`, and DENSE the `shape` of images.

    Raises:
        ValueError: If the name is unknown; the message names the nearest three.
        TypeError: If the method has no such option.

    Example:
        >>> make("fedprox", None, mu=0.1) is fedprox(mu=0.1)
        True
    """
    factory = _row(name).factory
    parameters = inspect.signature(factory).parameters
    check_options(name, chosen)
    return factory(model, **chosen) if "model" in parameters else factory(**chosen)


def check_options(name: str, chosen: Iterable[str]) -> None:
    """Refuse options that a method does not have, with a TypeError that names the nearest.

    Example:
        >>> check_options("fedprox", ["mu"])
    """
    parameters = inspect.signature(_row(name).factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # they are those of another method, which knows them
    known = sorted(parameters.keys() - {"model"})
    for option in sorted(set(chosen) - set(known)):
        hint = f"Did you mean {checks.nearest(option, known)}? " if known else ""
        raise TypeError(
            f"{name} has no option {option!r}. {hint}algorithms.options({name!r}) gives all with "
            "their defaults."
        )


def _row(name: str) -> Row:
    rows = TABLE | PERSONAL | WIDER | DISTILLED | VOTES
    checks.one_of("algorithm", name, rows, f"algorithms.{', '.join(_TABLES)}")
    return rows[name]


_TABLES = "TABLE", "PERSONAL", "WIDER", "DISTILLED", "VOTES"
