"""Which example belongs to which client.

Every scheme is a NumPy function on the host, of the targets and an integer seed, and returns a
*partition*: a list with one integer array of row numbers for each of M clients. Together the arrays
name every one of N examples exactly once, unless a scheme says otherwise; a client's array may be
empty. The seed of the partition has nothing to do with the keys of training, so that one split can
be trained many times. C is the number of classes.
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
    "pathological",
]
