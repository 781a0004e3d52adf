"""Read and write adapter_config.json of peft's LoRA; options that are not honoured are refused.

Every option is in one of three lists: what is honoured, what does not change a trained adapter's
product, and what must be off. Whatever is in none of them must be off, too, so that an option of a
later version of peft cannot change the meaning of an adapter unseen.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherjax.files._limits import Limits

CONFIG = "adapter_config.json"

_IDENTITY = ("base_model_name_or_path", "revision", "task_type", "fan_in_fan_out")
"""Options in which adapters that are merged must agree."""
_HONOURED = {
    *_IDENTITY,
    *(
        "auto_mapping",
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
# They act in training only, or say nothing without an option that must be off.
_WITHOUT_EFFECT = {
    *("peft_version", "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size"),
    *("eva_config", "runtime_config"),
}
_KINDS = {str: "text", int: "an integer"}
# Other initialisations change the base, so that the product is no change of the original one.
_PLAIN_INITS = (True, False, "true", "false", "gaussian", "eva", "orthogonal")


def read_config(path: Path, limits: Limits) -> dict[str, Any]:
    """Read and check the configuration of a LoRA adapter.

    Raises:
        ValueError: If it is damaged, or has an option that is not honoured, which is named.
    """
    limits.check(path, "header", path.stat().st_size)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged ({error}); expected JSON, as peft writes it."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(path)!r} holds a {type(config).__name__}; expected a JSON object.")
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{str(path)!r}: peft_type is {config.get('peft_type')!r}; expected 'LORA', whose "
            "changes are products of two matrices."
        )
    if faults := [*_faults(config)]:
        raise ValueError(
            f"{str(path)!r} has options that would change what the adapter does and are not "
            f"supported: {', '.join(faults)}; expected plain LoRA. Train without them, or convert "
            "the adapter with peft."
        )
    _check_numbers(path, config)
    _check_modules(path, config)
    return config


def _faults(config: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in config.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT:
            continue
        if name == "init_lora_weights":
            is_off = value is None or value in _PLAIN_INITS
        elif name == "bias":
            is_off = value in (None, "none")
        else:
            # Neither `not value`, as an option that is 0 may be on.
            is_off = value is None or value is False or value in ({}, [], "")
        if not is_off:
            found.append(f"{name} = {value!r:.60}")
    return found


def _check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    def is_number(x: Any, kinds: type | tuple) -> bool:
        # Integers may be longer than any float.
        return isinstance(x, kinds) and not isinstance(x, bool) and abs(x) < 1e300

    for name, pattern, kinds in (
        ("r", "rank_pattern", int),
        ("lora_alpha", "alpha_pattern", (int, float)),
    ):
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"{str(path)!r}: {pattern} is {patterns!r:.60}; expected an object.")
        for key, x in ({name: config.get(name)} | patterns).items():
            if not is_number(x, kinds) or (kinds is int and x < 1):  # pyright: ignore
                least = " of at least 1" * (kinds is int)
                raise ValueError(f"{str(path)!r}: {key} is {x!r:.60}; expected a number{least}.")
        for key in patterns:
            # The second is how it is used, in which some expressions are none.
            _check_expressions(path, pattern, key, f"(.*)({key})")
    if not isinstance(config.get("use_rslora", False), bool):
        raise ValueError(
            f"{str(path)!r}: use_rslora is {config['use_rslora']!r:.60}; expected true or false."
        )


def _check_expressions(path: Path, option: str, *expressions: str) -> None:
    for each in expressions:
        try:
            re.compile(each)
        except re.error as error:
            raise ValueError(
                f"{str(path)!r}: {option} has {each!r:.60}, which is no regular expression "
                f"({error})."
            ) from error


def _check_modules(path: Path, config: Mapping[str, Any]) -> None:
    """Check the options that say which modules are adapted."""
    for name, kind in (
        ("target_modules", str),
        ("exclude_modules", str),
        ("layers_pattern", str),
        ("layers_to_transform", int),
    ):
        value = config.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(x) is kind for x in items):
            raise ValueError(
                f"{str(path)!r}: {name} is {value!r:.60}; expected {_KINDS[kind]}, or a list."
            )
        # A list of modules has their names, and not expressions.
        if kind is str and (isinstance(value, str) or name == "layers_pattern"):
            _check_expressions(path, name, *items)


def rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return the rank of a module, and alpha / r, or alpha / sqrt(r) for rsLoRA.

    Example:
        >>> config = {"r": 4, "lora_alpha": 8, "rank_pattern": {"q": 16}, "use_rslora": True}
        >>> rank_and_scale(config, "layers.0.q"), rank_and_scale(config, "layers.0.v")
        ((16, 2.0), (4, 4.0))
    """
    rank = _pattern_value(config.get("rank_pattern") or {}, module, config["r"])
    alpha = _pattern_value(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    # The first that matches, as in peft.
    matches = (x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether peft adapts a module under this configuration, as it does on loading.

    Example:
        >>> config = {"target_modules": ["query"], "layers_to_transform": [1]}
        >>> [is_target(config, f"encoder.layer.{i}.query") for i in range(3)]
        [False, True, False]
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _names(excluded, module):
        return False
    if not targets or isinstance(targets, str) or module in targets:
        return targets == "all-linear" or bool(targets and _names(targets, module))
    if not _names(targets, module):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = [re.match(rf"(?:^|.*?\.){p}\.(?P<index>\d+)\.", module) for p in patterns]
    # Without a pattern, any segment that is followed by a number.
    found = found if patterns else [re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)]
    match = next((x for x in found if x), None)
    wanted = [layers] if isinstance(layers, int) else layers
    return match is not None and int(match["index"]) in wanted


def _names(targets: str | Sequence[str], module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return module in targets or any(module.endswith(f".{target}") for target in targets)


def config_of(modules: Mapping[str, tuple[int, float]], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an adapter, from the rank and the scale of each module.

    Modules are listed by their full names, and options of `like` that say which base, task and
    library it is are kept.
    """
    ranks = {module: rank for module, (rank, _) in modules.items()}
    alphas = {module: _plain(rank * scale) for module, (rank, scale) in modules.items()}
    # The most frequent value needs no entry.
    common_rank, common_alpha = (
        max(sorted({*x.values()}), key=[*x.values()].count) for x in (ranks, alphas)
    )
    return {
        "peft_type": "LORA",
        **{name: like.get(name) for name in ("auto_mapping", *_IDENTITY)},
        "fan_in_fan_out": bool(like.get("fan_in_fan_out", False)),
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_alpha,
        # "^" because peft matches ends of names, too.
        "rank_pattern": {f"^{re.escape(m)}": r for m, r in ranks.items() if r != common_rank},
        "alpha_pattern": {f"^{re.escape(m)}": x for m, x in alphas.items() if x != common_alpha},
        "target_modules": sorted(modules),
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "init_lora_weights": True,
    }


def _plain(number: float) -> int | float:
    return int(number) if float(number).is_integer() else float(number)


def check_agree(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that adapters, by the names of their folders, are of one base and one task."""
    (first, reference), *others = configs.items()
    for folder, config in others:
        for name in _IDENTITY:
            # An option that is absent has peft's default.
            one, other = (x.get(name) or None for x in (reference, config))
            if one != other:
                raise ValueError(
                    f"The adapters are not of one base and task: {name} is {one!r:.100} in "
                    f"{first!r} and {other!r:.100} in {folder!r}; expected the same, because a "
                    "product is a change of the base that it was trained on. If they are names of "
                    "one base, write one of them into all files."
                )
