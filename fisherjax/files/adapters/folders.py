"""Read and write LoRA adapters in the folders of peft.

A folder has adapter_config.json and adapter_model.safetensors.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fisherjax import adapters as products
from fisherjax.adapters import Adapter
from fisherjax.files._limits import LIMITS, Limits
from fisherjax.files._paths import atomic_file, scratch
from fisherjax.files._shown import shown_errors
from fisherjax.files.adapters import _config as _adapter_config
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
        own = sides.setdefault(match[1], {})
        if (match[2] or match[3]) in own or (own and bool(match[3]) != (match[1] in embeddings)):
            raise ValueError(
                f"{str(folder)!r} holds {match[1]!r} as a layer and as an embedding; expected one "
                "of them."
            )
        own[match[2] or match[3]] = array
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
    folder = new_folder(folder)
    if unknown := sorted({*embeddings}.difference(adapters)):
        raise ValueError(f"embeddings has {unknown}, which are no modules of {sorted(adapters)}.")
    arrays = {}
    for name, adapter in adapters.items():
        rank = np.shape(adapter.a)[0]
        if rank < 1 or np.ndim(adapter.scale):
            raise ValueError(
                f"The adapter of {name!r} has rank {rank} and scale {adapter.scale!r:.60}; expected"
                " a rank of at least 1 and a number: leave out modules without a change."
            )
        if not all(np.isfinite(np.asarray(x)).all() for x in adapter):
            raise ValueError(f"The adapter of {name!r} is not finite; expected finite numbers.")
        ends = ("embedding_A", "embedding_B") if name in embeddings else ("A.weight", "B.weight")
        for end, factor in zip(ends, adapter[:2], strict=True):
            arrays[f"{_PREFIX}{name}.lora_{end}"] = np.asarray(factor)
    modules = {name: (np.shape(x.a)[0], float(x.scale)) for name, x in adapters.items()}
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


def new_folder(folder: str | os.PathLike) -> Path:
    """Return the path of a folder; raise if it exists and is not empty."""
    folder = Path(folder)
    # A new folder is moved to this place, which does not follow links.
    is_free = folder.is_dir() and not any(folder.iterdir())
    if folder.is_symlink() or (folder.exists() and not is_free):
        raise ValueError(
            f"{str(folder)!r} exists; expected a new folder: remove it, or take another."
        )
    return folder
