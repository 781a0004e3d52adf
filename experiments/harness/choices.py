"""The networks and data sets that commands take by name, and files that add to them.

A file of `--import` is a Python module, which may define `METHODS`, rows of the registry of
methods; `NETWORKS`, functions of `num_classes` that return a flax module; and `DATASETS`, functions
of the folder of data that return the training and the test data, each a `fj.datasets.Dataset` or a
pair of inputs and targets.
"""

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import fisherjax as fj
from experiments.harness import decoded, imported, names
from fisherjax.algorithms import METHODS
from fisherjax.datasets import Dataset

MODELS: dict[str, Callable[..., Any]] = {
    "mlp": fj.networks.MLP,
    "residual_mlp": fj.networks.ResidualMLP,
    "lenet": fj.networks.LeNet,
    "cnn": fj.networks.CNN,
    "simple_cnn": fj.networks.SimpleCNN,
    "simple_cnn_mnist": fj.networks.SimpleCNNMNIST,
    "normed_cnn": fj.networks.NormedCNN,
    "dropout_cnn": fj.networks.DropoutCNN,
    "resnet18": fj.networks.ResNet18,
    "vision_transformer": fj.networks.VisionTransformer,
    "transformer": fj.networks.Transformer,
    "dropout_transformer": partial(fj.networks.Transformer, context=128, dropout=0.1),
}
DATASETS: dict[str, Callable[[Path | None], Any]] = {
    name: partial(decoded.load, name) for name in fj.datasets.NAMES
}
FEDFISH = {
    "emnist": ("dropout_cnn", 3380, 100, 10, 64, 1500, 0.001, 1),
    "cifar100": ("resnet18", 480, 100, 25, 64, 1500, 0.001, 4),
    "stack_overflow": ("dropout_transformer", 1000, 16, 4, 16, 1500, 0.01, 4),
    "c4": ("dropout_transformer", 1000, 16, 4, 8, 10000, 0.01, 4),
    "cc_news": ("dropout_transformer", 1000, 16, 4, 8, 10000, 0.01, 4),
}
"""Table 2 of FedFish: network, clients, their examples, batch, cohort, rounds, server rate, and
epochs of personalisation. The paper has more users and domains, and larger transformers."""
_TABLES: dict[str, dict[str, Any]] = {"METHODS": METHODS, "NETWORKS": MODELS, "DATASETS": DATASETS}
_CHECKED = {"METHODS": imported.method, "NETWORKS": imported.network, "DATASETS": imported.data}
_ADDED: dict[tuple[str, str], Any] = {}  # what files define, by table and name


def own_datasets() -> list[str]:
    """Return the names of the data sets that files have added."""
    return [name for name in DATASETS if name not in fj.datasets.NAMES]


def load(name: str, data_dir: Path | None) -> tuple[Dataset, Dataset]:
    """Read the training and the test data of a data set; pairs of arrays become data sets.

    Pixels of uint8 are divided by 255. Normalisation takes the moments of the training data.
    """
    train, test = DATASETS[name](data_dir)
    if isinstance(train, Dataset):
        return train, test
    inputs = train[0]
    scale, axes = (255.0 if inputs.dtype == np.uint8 else 1.0), tuple(range(inputs.ndim - 1))
    mean = tuple((np.mean(inputs, axes, float) / scale).tolist())
    # A constant channel is not divided.
    deviation = tuple(x or 1.0 for x in (np.std(inputs, axes, float) / scale).tolist())
    about = int(max(np.max(y) for _, y in (train, test))) + 1, scale, mean, deviation, name
    return Dataset(*train, *about), Dataset(*test, *about)


def add(files: Iterable[str], methods: Iterable[str] = ()) -> None:
    """Add what files define to the methods, networks and data sets, and variants to the methods.

    A variant NAME@option=value,option=value is a method with other options.

    Raises:
        ValueError: If a file cannot be run, or it defines nothing, a name that exists or what is no
            such entry; or if a method has no such option.
    """
    for path in files:
        module = _module(path)
        found = {name: getattr(module, name) for name in _TABLES if hasattr(module, name)}
        if not found:
            raise ValueError(f"--import {path} defines none of {', '.join(_TABLES)}")
        for table, rows in found.items():
            if not isinstance(rows, dict):
                given = f"--import {path}: {table} is {type(rows).__name__}"
                raise ValueError(f"{given}, expected a dict by name")
            for name, row in rows.items():
                _add_entry(path, table, name, row)
    for part in (part for name in methods for part in name.split("+")):
        base, at, _ = part.partition("@")
        if at and base in METHODS and part not in METHODS:
            options, row = names.options_in(part), METHODS[base]
            try:
                fj.algorithms.check_options(base, options)
            except TypeError as error:
                raise ValueError(f"--algorithms is {part}: {error}") from error
            words = ", ".join(f"{option} {value}" for option, value in options.items())
            factory = partial(row.factory, **options)
            METHODS[part] = row._replace(label=f"{row.label}, {words}", factory=factory)


def _add_entry(path: str, table: str, name: Any, row: Any) -> None:
    """Add what a file defines by a name, once, so that it is checked when it is read."""
    where = f"--import {path}: {name!r} in {table}"
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise ValueError(f"{where} is no word of letters")
    if name not in _TABLES[table]:
        _TABLES[table][name], _ADDED[table, name] = _CHECKED[table](where, row), row
    elif row is not _TABLES[table][name] and row is not _ADDED.get((table, name), _ADDED):
        raise ValueError(f"{where} exists already: choose another name")


def hashes(files: Iterable[str]) -> dict[str, str]:
    """Return the first digits of the SHA-256 of each file, by its path."""
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path in files}


def _module(path: str) -> ModuleType:
    """Run a file as a module, once for equal contents."""
    try:
        (digest,) = hashes([path]).values()
    except OSError as error:
        raise ValueError(f"--import {path} cannot be read: {error}") from error
    name = f"imported_{Path(path).stem}_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"--import {path} is no Python file: its name should end in .py")
        # Classes of dataclasses and flax look their module up by its name.
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # the file may raise anything
            del sys.modules[name]
            lines = [
                x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == path
            ]
            where = f"line {lines[-1]}: " if lines else ""
            raise ValueError(f"--import {path} fails, {where}{error!r}") from error
    return sys.modules[name]
