"""Merging methods, one paper a file, one interface."""

from fisherjax.aggregation.base import Aggregator
from fisherjax.aggregation.fedavg import fedavg
from fisherjax.aggregation.fedfish import fedfish
from fisherjax.aggregation.fedfisher import fedfisher
from fisherjax.aggregation.fedlpa import fedlpa
from fisherjax.aggregation.fednova import fednova
from fisherjax.aggregation.fisher_merge import fisher_merge
from fisherjax.aggregation.merging import check_updates, merge, merge_stream
from fisherjax.aggregation.regmean import regmean
from fisherjax.aggregation.scaffold import scaffold

__all__ = [
    "Aggregator",
    "check_updates",
    "fedavg",
    "fedfish",
    "fedfisher",
    "fedlpa",
    "fednova",
    "fisher_merge",
    "merge",
    "merge_stream",
    "regmean",
    "scaffold",
]
