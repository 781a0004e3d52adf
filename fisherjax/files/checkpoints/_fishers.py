"""Write and read files with the Fisher information of a checkpoint, which any merge can use.

A Fisher file holds an operator, or Gram matrices of layer inputs, and says of which params it is:
their names, shapes and a hash of each leaf. It takes long to compute, and is computed once.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import algorithms, tree
from fisherjax.files import base
from fisherjax.files._limits import LIMITS, ArrayKind, Limits, check_limits
from fisherjax.files._paths import checked_path
from fisherjax.files._places import _some
from fisherjax.files._shards import Checkpoint, Stored, of_file
from fisherjax.files._shown import shown_errors
from fisherjax.files.uploads._description_checks import check_values, shapes_of
from fisherjax.files.uploads._size_checks import check_sizes, is_shape
from fisherjax.files.uploads.values import check_single, decode, encode, flat
from fisherjax.fisher import Diagonal, Kronecker, Operator

FISHERS = {"fisher": Operator, "grams": dict}
"""Types of what a Fisher file can hold, by the names that methods read."""


class Fisher(NamedTuple):
    """A Fisher file that was checked.

    Attributes:
        path: The file.
        arrays: Its arrays, by their names there.
        values: The operator or Gram matrices, by "fisher" or "grams", with names of arrays.
        leaves: Shapes of the params, by name.
        hashes: Hash of each leaf of the params.
        algorithm: The first method of the registry that reads such values.
    """

    path: Path
    arrays: dict[str, Stored]
    values: dict[str, Any]
    leaves: dict[str, tuple[int, ...]]
    hashes: dict[str, str]
    algorithm: str


@shown_errors()
def save_fisher(
    path: str | os.PathLike, fisher: Any, *, params: Any, source: str = "", limits: Limits = LIMITS
) -> None:
    """Write the Fisher information of a checkpoint to a file, which any merge can use.

    Args:
        path: Path that ends in .safetensors, in a folder that exists.
        fisher: An operator, as of `fisher.diagonal` or `fisher.kfac`, or the Gram matrices of
            layer inputs by name, which `merging.summarize` of RegMean returns as "grams".
        params: The params at which it was computed, with the names of the checkpoint's arrays, such
            as `load_arrays` returns. A merge refuses other params, and averages leaves that are not
            among them.
        source: How it was computed, which `python -m fisherjax inspect` prints (default "").
        limits: Limits for the header and the names, by which the file will be read.

    Raises:
        ValueError: If the Fisher is stacked, lacks leaves of the params, or a name cannot be
            stored.
        TypeError: If it is neither an operator nor a dict.

    Example:
        >>> import tempfile, numpy as np, fisherjax as fj
        >>> params = {"fc.weight": np.ones((3, 2), "float32")}
        >>> model = fj.Model(lambda params, x: x @ params["fc.weight"], fj.likelihoods.gaussian)
        >>> fisher = fj.fisher.diagonal(model, params, fj.Examples(np.ones((5, 3), "float32")))
        >>> path = f"{tempfile.mkdtemp()}/a.fisher.safetensors"
        >>> fj.files.save_fisher(path, fisher, params=params)
    """
    check_limits(limits)
    path = checked_path(path, ".safetensors")
    if not isinstance(fisher, (Operator, Mapping)):
        raise TypeError(
            f"fisher is a {type(fisher).__name__}; expected an operator such as that of "
            "fisher.diagonal, or a dict of Gram matrices by the name of the kernel"
        )
    leaves = {x: np.asarray(y) for x, y in tree.by_name(tree.as_arrays(params)).items()}
    word = "fisher" if isinstance(fisher, Operator) else "grams"
    values = flat({"params": params, word: tree.as_arrays(fisher)})
    check_single(values)
    del values["params"]
    arrays: dict[str, Any] = {}
    spec = encode(values, "", arrays)
    about = {
        **{"what": "fisher", "source": str(source), "values": spec},
        "leaves": {name: list(leaf.shape) for name, leaf in leaves.items()},
        "hashes": {name: hash_of(leaf) for name, leaf in leaves.items()},
    }
    kinds = {name: ArrayKind.of(array) for name, array in arrays.items()}
    # Whoever reads it checks it too, but only its writer can mend it.
    sizes = sum(kind.nbytes for kind in kinds.values())
    _check(base.Sealed(path, {"version": base.version()} | about, kinds, sizes, ""), limits)
    with base.sealing(path, kinds, about, limits) as put:
        for name, array in arrays.items():
            put(name, array)


@shown_errors()
def open_fisher(path: Any, limits: Limits) -> Fisher:
    """Check a Fisher file, without reading its arrays into memory.

    Raises:
        ValueError: If the file is damaged or is no Fisher file.
        FileNotFoundError: If there is no such file.
    """
    file = base.unseal(path, limits)
    if file.about["what"] != "fisher":
        raise ValueError(
            f"{str(file.path)!r} is a {file.about['what']}; expected a file of files.save_fisher"
        )
    values = _check(file, limits)
    [(word, value)] = values.items()
    reads = {name: row.reads for name, row in algorithms.METHODS.items()}
    fits = (
        name
        for name, read in reads.items()
        if isinstance(read, Mapping) and read.keys() == {word} and isinstance(value, read[word])
    )
    leaves = {name: tuple(shape) for name, shape in file.about["leaves"].items()}
    arrays = of_file(file).arrays
    return Fisher(file.path, arrays, values, leaves, file.about["hashes"], next(fits))


def _check(file: base.Sealed, limits: Limits) -> dict[str, Any]:
    """Check the description of a Fisher file; return its values, with names of arrays."""
    about = file.about
    leaves: Any = about.get("leaves")
    hashes: Any = about.get("hashes")
    is_sound = (
        isinstance(leaves, dict)
        and leaves
        and isinstance(hashes, dict)
        and all(map(is_shape, leaves.values()))
        and leaves.keys() == hashes.keys()
        and all(isinstance(x, str) for x in hashes.values())
    )
    if not is_sound:
        raise ValueError(
            f"the header of {str(file.path)!r} does not say of which params its Fisher is; "
            "expected the shape and the hash of each leaf: write it again"
        )
    limits.check(file.path, "arrays", len(leaves))
    limits.check(file.path, "name", max(map(len, leaves)))
    check_values(file, about.get("values"), "", limits, 1)
    values = decode(file.path, about["values"], lambda name: name)
    word = next(iter(values), "") if isinstance(values, dict) else ""
    if not isinstance(values, dict) or len(values) != 1 or word not in FISHERS:
        raise ValueError(f"{str(file.path)!r} holds no Fisher; expected an operator or grams")
    if not isinstance(values[word], FISHERS[word]):
        raise ValueError(f"{str(file.path)!r} holds a {type(values[word]).__name__}; expected one")
    for name, kind in file.arrays.items():
        if not jnp.issubdtype(jnp.dtype(kind.dtype), jnp.floating):
            raise ValueError(f"{str(file.path)!r}: {name} is {kind}; expected floats")
    params = {x: jax.ShapeDtypeStruct(tuple(y), jnp.float32) for x, y in leaves.items()}
    decoded = decode(file.path, about["values"], shapes_of(file).__getitem__)
    total = sum(4 * math.prod(x.shape) for x in params.values())
    check_sizes(file.path, None, {"params": params} | decoded, file.nbytes + total, limits)
    return values


def hash_of(*pieces: np.ndarray) -> str:
    """Return the hash of a leaf, whichever floats of at most 32 bits hold its numbers.

    Example:
        >>> hash_of(np.ones(3, "float16")) == hash_of(np.ones(1, "float32"), np.ones(2, "float32"))
        True
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(base.little(np.asarray(piece).astype(np.float32)))
    return digest.hexdigest()[:32]


def check_hash(fisher: Fisher, path: Path, leaf: str, found: str) -> None:
    """Check that a leaf of a checkpoint is the one at which the Fisher was computed."""
    if found != fisher.hashes[leaf]:
        raise ValueError(
            f"{str(fisher.path)!r} was computed at other params than those of {str(path)!r}: "
            f"{leaf} differs. Compute it at this checkpoint."
        )


def check_fishers(fishers: list[Fisher], models: list[Checkpoint], merged: list[str]) -> list[str]:
    """Check that each Fisher is of the checkpoint beside it; return the leaves that they cover.

    Raises:
        ValueError: If a Fisher is of another network, or Fishers differ in structure.
    """
    for fisher, model in zip(fishers, models, strict=False):
        own = {name: stored.kind.shape for name, stored in model.arrays.items()}
        faults = [
            f"{name} has shape {list(shape)} there and {list(own.get(name, ['no array']))} in "
            f"{str(model.path)!r}"
            for name, shape in fisher.leaves.items()
            if own.get(name) != shape
        ]
        if faults:
            raise ValueError(
                f"{str(fisher.path)!r} is a Fisher of another network: {_some(faults, '; ')}. "
                "Compute it at the params of the checkpoint, with the names of its arrays."
            )
    covered = [name for name in merged if fishers and name in fishers[0].leaves]
    for fisher in fishers:
        lacking = [name for name in merged if (name in fisher.leaves) != (name in covered)]
        both = [_described(x, covered) for x in (fisher, fishers[0]) if not lacking]
        if lacking or both[0] != both[1] or not covered:
            raise ValueError(
                f"{str(fisher.path)!r} describes its layers differently than "
                f"{str(fishers[0].path)!r}; expected Fishers of one kind, of one network"
            )
    return covered


def restricted(fisher: Fisher, leaves: list[str]) -> dict[str, Any]:
    """Return the values of a Fisher file for some leaves."""
    [(word, value)] = fisher.values.items()
    if isinstance(value, Diagonal):
        return {word: Diagonal({name: value.entries[name] for name in leaves})}
    if isinstance(value, Kronecker):
        return {word: value.select(leaves)}
    if isinstance(value, dict):
        return {word: {x: y for x, y in value.items() if x.removesuffix("^T") in leaves}}
    # A full matrix couples all leaves.
    return fisher.values


def _described(fisher: Fisher, leaves: list[str]) -> Any:
    values = restricted(fisher, leaves)
    return values, [fisher.arrays[name].kind for name in jax.tree.leaves(values)]
