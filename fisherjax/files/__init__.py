"""Models, factors and uploads as files, and the merge of uploads where no network is."""

from fisherjax.files._places import Place, Places
from fisherjax.files.arrays import load_arrays, save_arrays, unflatten
from fisherjax.files.base import Limits, Sealed, unseal
from fisherjax.files.merge import Merge, merge_files
from fisherjax.files.uploads import Record, load_update, of_client, save_update
from fisherjax.files.values import KNOWN

__all__ = [
    "KNOWN",
    "Limits",
    "Merge",
    "Place",
    "Places",
    "Record",
    "Sealed",
    "load_arrays",
    "load_update",
    "merge_files",
    "of_client",
    "save_arrays",
    "save_update",
    "unflatten",
    "unseal",
]
