"""Partition examples among clients.

Every scheme is a NumPy function of the targets and an integer seed, and returns a *partition*: a
list with one integer array of row numbers for each of M clients. Together the arrays contain each
of the N examples exactly once, unless the scheme's docstring says otherwise; a client's array may
be empty. The seed is independent of the keys of training, so that one partition can be used in many
runs. C is the number of classes.
"""

from fisherjax.partition.checks import check_partition
from fisherjax.partition.label_blind import central, hold_out, iid, natural
from fisherjax.partition.label_skew import (
    classes_per_client,
    dirichlet_of_client,
    label_counts,
    niid_bench,
)
from fisherjax.partition.matched_test_sets import in_proportion, pathological
from fisherjax.partition.pachinko import pachinko

__all__ = [
    "central",
    "check_partition",
    "classes_per_client",
    "dirichlet_of_client",
    "hold_out",
    "iid",
    "in_proportion",
    "label_counts",
    "natural",
    "niid_bench",
    "pachinko",
    "pathological",
]
