"""Write and read named arrays as .safetensors files, and read NumPy's .npz files.

Other programs may have other names for the same arrays, or store them transposed. A `mapping`
describes both; the same mapping serves for writing and for reading.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from fisherjax.files import base
from fisherjax.files._archive import read_archive
from fisherjax.files._limits import LIMITS, ArrayKind, Limits, check_limits, check_storable
from fisherjax.files._paths import atomic_file, checked_path
from fisherjax.files._places import Places, _Place, _places, _some
from fisherjax.files._shards import is_finite, is_folder, open_checkpoint
from fisherjax.files._shown import shown_errors
from fisherjax.tree import to_native


@shown_errors()
def save_arrays(
    path: str | os.PathLike, tree: Any, *, mapping: Places | None = None, limits: Limits = LIMITS
) -> None:
    """Write a pytree of arrays to one .safetensors file, with names such as "layers/0/kernel".

    Writing is atomic: an old file at this path stays until the new one is complete. If the path is
    a link, the file that it names is written.

    Args:
        path: Path that ends in .safetensors, in a folder that exists.
        tree: Pytree of arrays of any shape.
        mapping: Names of the leaves in the file, and the axes by which it stores them transposed
            (default: paths joined by slashes, and no transposition).
        limits: Limits for the header and the names, by which the file will be read.

    Raises:
        ValueError: If the suffix is wrong, two leaves have one name, a name cannot be stored, the
            mapping does not fit the leaves, or the file would exceed the limits.
        TypeError: If a leaf is not an array, or the format does not hold its dtype.
        FileNotFoundError: If the folder does not exist.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/torch.safetensors"
        >>> mapping = {"dense/kernel": ("fc.weight", (1, 0))}
        >>> save_arrays(path, {"dense": {"kernel": np.ones((3, 2))}}, mapping=mapping)
        >>> {name: array.shape for name, array in load_arrays(path).items()}
        {'fc.weight': (2, 3)}
    """
    path = checked_path(path, ".safetensors")
    check_limits(limits)
    leaves = _named(tree)
    # All names are known before the first byte is written.
    places = _places({name: leaf.ndim for name, leaf in leaves.items()}, mapping)
    arrays = {place.name: _stored(leaves[name], place) for name, place in places.items()}
    # safetensors.save_file would remove the permission to read from other users.
    content = safetensors.save(arrays)
    limits.check_header(path, int.from_bytes(content[:8], "little"), arrays.keys())
    with atomic_file(path) as file:
        file.write(content)


@shown_errors()
def load_arrays(
    path: str | os.PathLike,
    like: Any = None,
    *,
    mapping: Places | None = None,
    cast: bool = False,
    limits: Limits = LIMITS,
) -> Any:
    """Read a file of named arrays as NumPy arrays, which keep 64 bits whatever JAX's setting.

    Args:
        path: A .safetensors or .npz file that `save_arrays` or another program wrote, or a folder
            of .safetensors shards with their index.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`, whose structure the result has. Without
            it the result is a dict from names to arrays; `unflatten` turns it into nested dicts.
        mapping: Names of the leaves of `like` in the file, and the axes by which it stores them
            transposed, as for `save_arrays`.
        cast: Whether to cast floats to the dtypes of `like`, for instance those of a float16,
            bfloat16 or float64 file to float32 (default False). Other dtypes are never changed.
        limits: Limits for the size of the file, which are checked before memory is allocated.

    Raises:
        ValueError: If the suffix is wrong, the file is damaged or exceeds the limits, its names,
            shapes or dtypes differ from `like`, the mapping does not fit, or a number overflows in
            the cast. Files with a SHA-256, as uploads and merged models have it, are compared with
            it; other files do not tell whether a number was changed.
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
        >>> save_arrays(path, {"dense": [np.ones(2)]})
        >>> load_arrays(path)
        {'dense/0': array([1., 1.])}
        >>> load_arrays(path, like={"dense": [np.zeros(2)]})
        {'dense': [array([1., 1.])]}
        >>> load_arrays(
        ...     path, like={"bias": np.zeros(2, "float16")}, mapping={"bias": "dense/0"}, cast=True
        ... )
        {'bias': array([1., 1.], dtype=float16)}
    """
    check_limits(limits)
    if not is_folder(path):
        path = checked_path(path, ".safetensors", ".npz", exists=True)
    arrays = _read(path, cast, limits)
    if like is None:
        # Without `like` there are no names to map and no dtypes to cast to.
        if cast or mapping is not None:
            raise ValueError(
                "cast and mapping need `like`, a pytree with the names and dtypes of the result: "
                "pass it"
            )
        return arrays
    leaves = _named(like)
    places = _places({name: len(leaf.shape) for name, leaf in leaves.items()}, mapping)
    # Python's floats have no dtype of their own: they accept the precision of the file.
    for name, is_python in _named(jax.tree.map(lambda x: np.array(type(x) is float), like)).items():
        found = arrays.get(places[name].name)
        if is_python and found is not None and not found.shape and _is_float(found):
            leaves[name] = found
    expected = {
        place.name: jax.ShapeDtypeStruct(
            [leaves[name].shape[i] for i in place.axes], leaves[name].dtype
        )
        for name, place in places.items()
    }
    _check_same(arrays, expected, cast, Path(os.fsdecode(path)))
    # By name: another program may have written the arrays in another order.
    return jax.tree.unflatten(
        jax.tree.structure(like),
        [
            place.back(_cast(place.name, arrays[place.name], leaves[name].dtype))
            for name, place in places.items()
        ],
    )


def unflatten(arrays: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Make nested dicts from a flat dict whose names are keys joined by a separator.

    Lists become dicts with the keys "0", "1" and so on, because names do not distinguish lists from
    dicts. To read lists, pass `like` to `load_arrays`.

    Raises:
        ValueError: If one name is the beginning of another, so that it would be both an array and a
            dict; or if the separator is empty.
        TypeError: If `arrays` is not a dict from names.

    Example:
        >>> unflatten({"dense/kernel": 1, "dense/bias": 2, "scale": 3})
        {'dense': {'kernel': 1, 'bias': 2}, 'scale': 3}
        >>> unflatten({"fc.weight": 1}, separator=".")
        {'fc': {'weight': 1}}
    """
    if not isinstance(arrays, Mapping) or not all(isinstance(x, str) for x in arrays):
        raise TypeError(
            f"unflatten got a {type(arrays).__name__} {list(arrays)!r:.80}; expected a dict from "
            "names to arrays, such as load_arrays returns without `like`"
        )
    if not separator:
        raise ValueError("the separator is empty; expected the text between keys: '/' or '.'")
    nested: dict[str, Any] = {}
    for name, array in arrays.items():
        *keys, last = name.split(separator)
        inner = nested
        for depth, key in enumerate(keys, 1):
            if separator.join(keys[:depth]) in arrays:
                raise ValueError(
                    f"{separator.join(keys[:depth])!r} is an array, but also the beginning of "
                    f"{name!r}: rename one of them, or pass another separator"
                )
            inner = inner.setdefault(key, {})
        inner[last] = array
    return nested


def _read(path: Any, cast: bool, limits: Limits) -> dict[str, np.ndarray]:
    if is_folder(path):
        stored = open_checkpoint(path, limits).arrays
        found = {name: x.whole() for name, x in stored.items()}
    elif path.suffix == ".npz":
        found = read_archive(path, limits)
    else:
        names = base.opened(path, limits).arrays
        with base.damaged(path):
            found = dict(zip(names, base.read(path, names), strict=True))
    # Floats of more bits than JAX supports are kept here only if they will be cast.
    is_cast = {name for name, x in found.items() if cast and x.dtype.type is np.longdouble}
    try:
        # An .npz file may have another byte order than this machine.
        return {n: x if n in is_cast else to_native(x, n) for n, x in found.items()}
    except TypeError as error:
        raise ValueError(f"{str(path)!r} has an array that is not of numbers. {error}") from error


def _check_same(
    arrays: dict[str, Any], expected: dict[str, jax.ShapeDtypeStruct], cast: bool, path: Path
) -> None:
    """Check that a file has the expected arrays, by their names in the file."""
    faults = [f"missing {name}" for name in expected if name not in arrays]
    faults += [f"not expected {name}" for name in arrays if name not in expected]
    hints = ["Pass a pytree like the one that was saved, or no `like` to get a dict"]
    if faults:
        hints.append("if names differ, map them with `mapping`")
    for name, leaf in expected.items():
        found = arrays.get(name, leaf)
        # These have names of dtypes, because the byte order of `like` does not matter.
        kind, wanted = ArrayKind.of(found), ArrayKind.of(leaf)
        is_castable = found.shape == leaf.shape and _is_float(found) and _is_float(leaf)
        if kind == wanted or (cast and is_castable):
            continue
        faults.append(f"{name} is {kind}, expected {wanted}")
        if is_castable:
            hints.append("to change the precision of floats, pass cast=True")
        elif found.shape != leaf.shape and sorted(found.shape) == sorted(leaf.shape):
            hints.append("if axes are transposed, map them with `mapping`")
    if faults:
        raise ValueError(
            f"the arrays of {str(path)!r} are not those of `like`: {_some(faults, '; ')}. "
            f"{'; '.join(dict.fromkeys(hints))}"
        )


def _cast(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Cast floats to another precision; raise if a finite number would become infinite."""
    if array.dtype.name == dtype.name:
        return array
    with np.errstate(over="ignore"):
        # The byte order of `like` does not matter.
        result = array.astype(dtype.newbyteorder("="))
    if not is_finite(result) and (lost := np.isfinite(array) & ~np.isfinite(result)).any():
        raise ValueError(
            f"{name} holds {float(array[lost][0]):.3g}, which is too large for {result.dtype}: "
            "read it without cast, or with a `like` of higher precision"
        )
    return result


def _is_float(leaf: Any) -> bool:
    # np.issubdtype does not know bfloat16.
    return jnp.issubdtype(leaf.dtype, np.floating)


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves by name, in the order of flattening; a bare array is called "array"."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "array"
        if name in named:
            raise ValueError(f"two leaves are called {name!r}: rename a key that holds a '/'")
        # np.asarray fails for JAX's keys, which have a dtype.
        named[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return named


def _stored(leaf: Any, place: _Place) -> np.ndarray:
    """Return a leaf as the format requires it: on the host, in C order and native byte order."""
    check_storable(place.name, leaf.dtype)
    array = np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="))
    return np.asarray(array.transpose(place.axes), order="C")
