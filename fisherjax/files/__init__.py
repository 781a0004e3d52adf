"""Read and write models, Fisher factors and uploads as files; merge uploads without the network."""

from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files._places import Place, Places
from fisherjax.files.adapters.folders import PeftAdapter, load_adapter, save_adapter
from fisherjax.files.adapters.merge import AdapterMerge, merge_adapters
from fisherjax.files.arrays import load_arrays, save_arrays, unflatten
from fisherjax.files.base import Sealed, unseal
from fisherjax.files.checkpoints._fishers import save_fisher
from fisherjax.files.checkpoints._torch import load_torch
from fisherjax.files.merge import Merge, merge_files
from fisherjax.files.uploads.update import Record, load_update, of_client, save_update
from fisherjax.files.uploads.values import VALUE_TYPES

__all__ = [
    "VALUE_TYPES",
    "AdapterMerge",
    "ArrayKind",
    "Limits",
    "Merge",
    "PeftAdapter",
    "Place",
    "Places",
    "Record",
    "Sealed",
    "load_adapter",
    "load_arrays",
    "load_torch",
    "load_update",
    "merge_adapters",
    "merge_files",
    "of_client",
    "save_adapter",
    "save_arrays",
    "save_fisher",
    "save_update",
    "unflatten",
    "unseal",
]
