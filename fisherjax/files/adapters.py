"""Read, write and merge LoRA adapters in the folders of peft.

A folder has adapter_config.json and adapter_model.safetensors. A change is the product
alpha / r * B A of the factors of a module; which factors make it says nothing, so that adapters are
merged by their products.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fisherjax import adapters as products
from fisherjax._core import checks
from fisherjax.adapters import Adapter
from fisherjax.clients import shares
from fisherjax.files import _adapter_config
from fisherjax.files._limits import LIMITS, Limits
from fisherjax.files._paths import atomic_file, scratch
from fisherjax.files._shown import shown_errors
from fisherjax.files.arrays import load_arrays, save_arrays

_ARRAYS, _PREFIX = "adapter_model.safetensors", "base_model.model."
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))", re.DOTALL)


class PeftAdapter(NamedTuple):
    """A folder of peft.

    Attributes:
        adapters: The adapter of each module, by the name of the module, such as
            "encoder.layer.0.attention.self.query".
        config: The options in adapter_config.json.
        embeddings: Names of the modules that are embeddings.
    """

    adapters: dict[str, Adapter]
    config: dict[str, Any]
    embeddings: frozenset[str] = frozenset()


class AdapterMerge(NamedTuple):
    """Summary of a merge of adapters.

    Attributes:
        shares: Clients' weights [M] with sum one.
        ranks: Rank of the merged adapter, by module.
        lost: By module, the part of the weighted mean of the products that the merged adapter does
            not have, |D - X|_F / |D|_F; without factors it is the error of the truncation.
        only_some: Modules that only some clients adapt, to which the others contribute zero.
    """

    shares: np.ndarray
    ranks: dict[str, int]
    lost: dict[str, float]
    only_some: tuple[str, ...]


@shown_errors()
def load_adapter(folder: str | os.PathLike, limits: Limits = LIMITS) -> PeftAdapter:
    """Read a LoRA adapter from a folder of peft.

    Scales follow from r, lora_alpha, rank_pattern, alpha_pattern and use_rslora.

    Raises:
        ValueError: If an array or an option is not plain LoRA (DoRA, trained biases,
            modules_to_save, an initialisation that changes the base, another peft_type, an unknown
            option that is on), ranks or modules differ from the configuration, or a file is
            damaged. The error names it.
        FileNotFoundError: If there is no such folder, or it lacks one of the files.

    Example:
        >>> import tempfile
        >>> folder = f"{tempfile.mkdtemp()}/ann"
        >>> save_adapter(folder, {"query": Adapter(np.ones((1, 2)), np.ones((3, 1)), 2.0)})
        >>> load_adapter(folder).adapters["query"].scale
        2.0
    """
    folder = Path(folder)
    for name in (_adapter_config.CONFIG, _ARRAYS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"There is no {name} in {str(folder)!r}; expected a folder that peft's "
                "save_pretrained wrote. It writes .bin files, which hold pickled objects, only if "
                "safe_serialization is off."
            )
    config = _adapter_config.read_config(folder / _adapter_config.CONFIG, limits)
    arrays = load_arrays(folder / _ARRAYS, limits=limits)
    sides: dict[str, dict[str, np.ndarray]] = {}
    embeddings, others = set(), []
    for name, array in arrays.items():
        if (match := _NAME.fullmatch(name)) is None:
            others.append(name)
            continue
        sides.setdefault(match[1], {})[match[2] or match[3]] = array
        embeddings |= {match[1]} if match[3] else set()
    if others:
        raise ValueError(
            f"{str(folder)!r} holds {others[:3]}{' and more' * (len(others) > 3)}, which are no "
            "LoRA factors of a module; expected names such as "
            f"{_PREFIX}layer.lora_A.weight. Save without trained biases, modules and embeddings "
            "(save_embedding_layers=False)."
        )
    if not sides:
        raise ValueError(f"{str(folder)!r} holds no adapters; expected at least one module.")
    made = {name: _adapter(folder, name, pair, config) for name, pair in sides.items()}
    return PeftAdapter(made, config, frozenset(embeddings))


@shown_errors()
def save_adapter(
    folder: str | os.PathLike,
    adapters: Mapping[str, Adapter],
    *,
    config: Mapping[str, Any] | None = None,
    embeddings: Collection[str] = (),
    limits: Limits = LIMITS,
) -> None:
    """Write a LoRA adapter to a new folder, which peft's `PeftModel.from_pretrained` loads.

    The folder appears only once it is complete.

    Args:
        folder: Path of a folder that does not exist, or is empty.
        adapters: The adapter of each module, by the name of the module in the PyTorch model.
        config: Options of which base_model_name_or_path, revision, task_type, auto_mapping and
            fan_in_fan_out are written, for instance `PeftAdapter.config`. Ranks, alphas and targets
            are those of `adapters`.
        embeddings: Names of the modules that are embeddings.
        limits: Limits by which the folder will be read.

    Raises:
        ValueError: If there are no adapters, factors do not fit or are not finite, or the folder
            is not empty.
        TypeError: If an adapter has another type, or its dtype cannot be stored.
        OSError: If the folder cannot be written.

    Example:
        >>> import tempfile
        >>> folder = f"{tempfile.mkdtemp()}/ann"
        >>> save_adapter(folder, {"query": Adapter(np.ones((1, 2)), np.ones((3, 1)))})
        >>> sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    products.check([adapters])
    folder = _new_folder(folder)
    if unknown := sorted({*embeddings}.difference(adapters)):
        raise ValueError(f"embeddings has {unknown}, which are no modules of {sorted(adapters)}.")
    arrays = {}
    for name, adapter in adapters.items():
        if not all(np.isfinite(np.asarray(x)).all() for x in adapter):
            raise ValueError(f"The adapter of {name!r} is not finite; expected finite numbers.")
        ends = ("embedding_A", "embedding_B") if name in embeddings else ("A.weight", "B.weight")
        for end, factor in zip(ends, adapter[:2], strict=True):
            arrays[f"{_PREFIX}{name}.lora_{end}"] = np.asarray(factor)
    modules = {name: (x.a.shape[0], float(x.scale)) for name, x in adapters.items()}
    options = _adapter_config.config_of(modules, config or {})
    text = json.dumps(options, indent=2, sort_keys=True, allow_nan=False)
    with scratch(folder.parent) as beside:
        made = beside / "adapter"
        made.mkdir()
        save_arrays(made / _ARRAYS, arrays, limits=limits)
        with atomic_file(made / _adapter_config.CONFIG) as file:
            file.write(text.encode())
        # Renaming is one step: the folder is there with both files, or not at all.
        os.replace(made, folder)


@shown_errors()
def merge_adapters(
    out: str | os.PathLike,
    folders: Sequence[str | os.PathLike],
    *,
    weights: Any = None,
    factors: Sequence[Mapping[str, products.Factors]] | None = None,
    rank: int | None = None,
    damping: float = 1.0,
    limits: Limits = LIMITS,
) -> AdapterMerge:
    """Merge LoRA adapters of one base to one adapter, by the products of their factors.

    The products are those of `adapters.merge`: the weighted mean, or with `factors` the solution in
    their metric, and then the best adapter of a rank.

    Args:
        out: New folder of the merged adapter.
        folders: Folders of peft, one for each client.
        weights: Non-negative weights [M] (default: equal).
        factors: For each client the Kronecker factors of the modules, by their names or those of
            their weights, as in `adapters.merge` (default: the weighted mean of the products).
        rank: Largest rank of the merged adapter (default: the exact result, of rank sum_i r_i, or
            full with output factors).
        damping: Damping in units of a layer's mean eigenvalue, if there are factors.
        limits: Limits for the files.

    Raises:
        ValueError: If adapters are of different bases, revisions or tasks, are not plain LoRA or
            not finite, change the same module in different shapes, or factors do not fit.
        OSError: If a file cannot be read or written.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> for name, x in (("ann", 1.0), ("bob", 3.0)):
        ...     adapter = Adapter(np.full((1, 2), x, "f4"), np.ones((2, 1), "f4"))
        ...     save_adapter(f"{place}/{name}", {"query": adapter})
        >>> summary = merge_adapters(f"{place}/out", [f"{place}/ann", f"{place}/bob"], rank=1)
        >>> print(products.product(load_adapter(f"{place}/out").adapters["query"]).round(3))
        [[2. 2.]
         [2. 2.]]
        >>> summary.ranks
        {'query': 1}
    """
    out = _new_folder(out)
    if isinstance(folders, (str, bytes, os.PathLike)) or not folders:
        raise TypeError(
            f"folders is {folders!r:.80}; expected a list of paths, one for each client."
        )
    found: dict[str, PeftAdapter] = {}
    for folder in folders:
        if os.path.realpath(folder) in map(os.path.realpath, found):
            raise ValueError(f"{str(folder)!r} is there twice; expected one folder a client.")
        found[os.fspath(folder)] = load_adapter(folder, limits)
    if rank is not None:
        checks.count("rank", rank)
    _adapter_config.check_agree({folder: x.config for folder, x in found.items()})
    clients = [x.adapters for x in found.values()]
    _check_finite(found)
    embeddings = _embeddings(found)
    names = products.check(clients, labels=[repr(folder) for folder in found])
    if factors is not None:
        factors = [{_module(k, names): x for k, x in held.items()} for held in factors]
    merged = products.merge(clients, weights, factors, rank=rank, damping=damping)
    mean = products.merge(clients, weights)
    lost = {name: float(products.distance(mean[name], x)) for name, x in merged.items()}
    config = next(iter(found.values())).config
    save_adapter(out, merged, config=config, embeddings=embeddings, limits=limits)
    return AdapterMerge(
        shares(np.ones(len(found)) if weights is None else np.asarray(weights, float)),
        {name: x.a.shape[0] for name, x in merged.items()},
        lost,
        tuple(name for name in names if not all(name in client for client in clients)),
    )


def _adapter(
    folder: Path, name: str, pair: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Adapter:
    if missing := {"A", "B"}.difference(pair):
        raise ValueError(f"{str(folder)!r}: {name!r} lacks its factor {missing.pop()}.")
    if not _adapter_config.is_target(config, name):
        raise ValueError(
            f"{str(folder)!r} holds an adapter of {name!r}, but by its configuration "
            "(target_modules, exclude_modules, layers_to_transform) peft does not adapt it."
        )
    a, b = pair["A"], pair["B"]
    rank, scale = _adapter_config.rank_and_scale(config, name)
    # Convolutions have factors with four axes.
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
        raise ValueError(
            f"{str(folder)!r}: {name!r} has factors A {a.shape} and B {b.shape}; expected "
            f"[{rank}, inputs] and [outputs, {rank}], by r and rank_pattern of its configuration."
        )
    return Adapter(a, b, scale)


def _new_folder(folder: str | os.PathLike) -> Path:
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"{str(folder)!r} exists; expected a new folder: remove it, or take another."
        )
    return folder


def _check_finite(found: Mapping[str, PeftAdapter]) -> None:
    for folder, each in found.items():
        for name, adapter in each.adapters.items():
            for side, factor in zip("AB", adapter[:2], strict=True):
                if not np.isfinite(factor).all():
                    raise ValueError(
                        f"{folder!r} is not finite: factor {side} of {name!r}. The client "
                        "diverged: train it with a smaller learning rate, or leave it out."
                    )


def _embeddings(found: Mapping[str, PeftAdapter]) -> frozenset[str]:
    """Return the modules that are embeddings; raise if one is not for all clients."""
    every = frozenset[str]().union(*(x.embeddings for x in found.values()))
    for folder, each in found.items():
        if wrong := sorted(every.intersection(each.adapters) - each.embeddings):
            raise ValueError(f"{wrong} are embeddings for other clients, but not in {folder!r}.")
    return every


def _module(name: str, modules: Collection[str]) -> str:
    return name if name in modules else name.removesuffix(".weight")
