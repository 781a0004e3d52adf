"""Flat named arrays as safetensors: models, factors of other programs; NumPy's .npz is read.

Other programs call the same arrays otherwise and keep them transposed: a mapping says how, the
same one for writing and for reading.
"""

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from fisherjax._core.checks import nearest
from fisherjax.files.base import CODES, appearing, checked_path
from fisherjax.tree import native

Place = str | tuple[str, tuple[int, ...]]
"""Their name of a leaf; or that and the axes by which ours is transposed to be theirs."""
Places = Mapping[str, Place] | Callable[[str], Place]
"""From our name of a leaf to its place, as a dict or a function; names that a dict lacks stay."""


def save_arrays(path: str | os.PathLike, tree: Any, *, mapping: Places | None = None) -> None:
    """Write a pytree of arrays to one .safetensors file, by names such as "layers/0/kernel".

    The file appears whole or not at all: what was there before stays until the new one is complete.

    Args:
        path: Ends in .safetensors; its folder exists.
        tree: Arrays of any shape.
        mapping: What the file calls our leaves, and by which axes it has them transposed. Without
            it names are paths joined by slashes.

    Raises:
        ValueError: For another suffix, two leaves of one name, a name that cannot be stored, or a
            mapping that does not fit the leaves.
        TypeError: If a leaf is not an array, or of a type that the format does not hold.
        FileNotFoundError: If the folder is missing.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/torch.safetensors"
        >>> mapping = {"dense/kernel": ("fc.weight", (1, 0))}
        >>> save_arrays(path, {"dense": {"kernel": np.ones((3, 2))}}, mapping=mapping)
        >>> {name: array.shape for name, array in load_arrays(path).items()}
        {'fc.weight': (2, 3)}
    """
    path = checked_path(path, ".safetensors")
    leaves = _named(tree)
    places = _places({name: leaf.ndim for name, leaf in leaves.items()}, mapping)
    arrays = {place.name: _stored(name, leaves[name], place) for name, place in places.items()}
    with appearing(path) as file:
        # Not save_file, which takes the permission to read from everybody else.
        file.write(safetensors.save(arrays))


def load_arrays(
    path: str | os.PathLike, like: Any = None, *, mapping: Places | None = None, cast: bool = False
) -> Any:
    """Read a file of named arrays, as NumPy's, which keep their 64 bits whatever JAX is set to.

    Args:
        path: A file that `save_arrays`, or another program, wrote: .safetensors or .npz.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`; the result has its structure. Without it
            the result is a dict from names to arrays, which `unflatten` makes a nested one.
        mapping: What the file calls our leaves, and by which axes it has them transposed: the one
            that it was written by.
        cast: Give floats the precision of `like`, for instance float32 to those of a float16,
            bfloat16 or float64 file. Other types are never changed.

    Raises:
        ValueError: For another suffix, a damaged file, other names, shapes or types than `like`, a
            mapping that does not fit, or a number too large for the type it is cast to.
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
    path = checked_path(path, ".safetensors", ".npz")
    arrays = _read(path, cast)
    if like is None:
        if cast or mapping is not None:
            raise ValueError("cast and mapping need `like`, which has our types and names: pass it")
        return arrays
    leaves = _named(like)
    places = _places({name: len(leaf.shape) for name, leaf in leaves.items()}, mapping)
    # Python's floats, which have no dtype of their own, are of whatever precision the file has.
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
    _check_same(arrays, expected, cast, path)
    # By name, not by place: another program may have written them in another order.
    return jax.tree.unflatten(
        jax.tree.structure(like),
        [
            place.back(_cast(place.name, arrays[place.name], leaves[name].dtype))
            for name, place in places.items()
        ],
    )


def unflatten(arrays: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Make nested dicts of a flat one, whose names are keys joined by a separator.

    Lists come back as dicts with the keys "0", "1" and so on, as names do not tell them apart: read
    those with a `like`.

    Raises:
        ValueError: If a name is the beginning of another, so that it is both array and dict; or if
            the separator is empty.
        TypeError: If what is given is no dict from names.

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
        raise ValueError("the separator is empty: expected what joins the keys, such as '/' or '.'")
    nested: dict[str, Any] = {}
    for name, array in arrays.items():
        *keys, last = name.split(separator)
        inner = nested
        for depth, key in enumerate(keys, 1):
            if separator.join(keys[:depth]) in arrays:
                raise ValueError(
                    f"{separator.join(keys[:depth])!r} is an array, and holds {name!r} too: rename "
                    "one of them, or pass another separator"
                )
            inner = inner.setdefault(key, {})
        inner[last] = array
    return nested


class _Place(NamedTuple):
    """A leaf's name in a file, and the axes by which ours is transposed to be the file's."""

    name: str
    axes: tuple[int, ...]

    def back(self, array: np.ndarray) -> np.ndarray:
        """Turn the file's array to ours."""
        return array.transpose(np.argsort(self.axes))


def _parsed(name: str, given: Any) -> tuple[str, tuple[int, ...] | None]:
    """Read what a mapping says of our leaf: their name, and axes if there are any."""
    if isinstance(given, str):
        return given, None
    try:
        theirs, axes = given
        axes = tuple(map(operator.index, axes))
    except (TypeError, ValueError):
        theirs = axes = None
    if not isinstance(theirs, str):
        raise TypeError(
            f"mapping gives {given!r} for {name!r}; expected the file's name, or a pair of it and "
            "axes such as ('fc.weight', (1, 0))"
        )
    return theirs, axes


def _places(ranks: dict[str, int], mapping: Places | None) -> dict[str, _Place]:
    """Find the places of our leaves, which have so many axes."""
    mapping = {} if mapping is None else mapping
    if not (callable(mapping) or isinstance(mapping, Mapping)):
        raise TypeError(
            f"mapping is a {type(mapping).__name__}; expected a dict from our names to the file's, "
            "such as {'dense/kernel': ('fc.weight', (1, 0))}, or a function of our name"
        )
    if not callable(mapping) and (unknown := [name for name in mapping if name not in ranks]):
        raise ValueError(
            f"mapping lists {_some(unknown)}, but our leaves are {_some(ranks)}: its keys are our "
            f"names, its values those of the file. For {unknown[0]!r}, did you mean "
            f"{nearest(unknown[0], ranks)}?"
        )
    places: dict[str, _Place] = {}
    owners: dict[str, str] = {}
    for name, rank in ranks.items():
        given = mapping(name) if callable(mapping) else mapping.get(name, name)
        theirs, axes = _parsed(name, given)
        axes = tuple(range(rank)) if axes is None else axes
        if sorted(axes) != list(range(rank)):
            raise ValueError(
                f"mapping transposes {name!r}, which has {rank} axes, by {axes}: expected each of "
                f"{tuple(range(rank))} once"
            )
        if (other := owners.setdefault(theirs, name)) != name:
            raise ValueError(
                f"{other!r} and {name!r} are both called {theirs!r} in the file: give each a name "
                "of its own"
            )
        places[name] = _Place(theirs, axes)
    return places


def _read(path: Path, cast: bool) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        if path.suffix == ".npz":
            # A pickle may run anything: a file from a stranger must not.
            with np.load(path, allow_pickle=False) as archive:
                found = dict(archive)
        else:
            found = safetensors.load_file(path)
    except Exception as error:  # safetensors, zipfile and zlib each have their own
        raise ValueError(
            f"{str(path)!r} is damaged or not a {path.suffix} file ({error}): write it again, of "
            "arrays of numbers, which Python's objects are not"
        ) from error
    # Floats of more bits than JAX has are cast to those of `like`.
    is_cast = {name for name, x in found.items() if cast and x.dtype.type is np.longdouble}
    try:
        # Archives keep the byte order of the machine that they are for.
        return {n: x if n in is_cast else native(x, n) for n, x in found.items()}
    except TypeError as error:
        raise ValueError(f"{str(path)!r} holds what is no array of numbers. {error}") from error


def _check_same(
    arrays: dict[str, Any], expected: dict[str, jax.ShapeDtypeStruct], cast: bool, path: Path
) -> None:
    """Refuse a file whose arrays are not those that are expected, by its own names."""
    faults = [f"missing {name}" for name in expected if name not in arrays]
    faults += [f"not expected {name}" for name in arrays if name not in expected]
    hints = ["Pass the structure it was saved from, or none to get a dict"]
    if faults:
        hints.append("if its names differ, say how by `mapping`")
    for name, leaf in expected.items():
        found = arrays.get(name, leaf)
        is_castable = found.shape == leaf.shape and _is_float(found) and _is_float(leaf)
        # By name: the byte order of `like` is not to be kept.
        if _kind(found) == _kind(leaf) or (cast and is_castable):
            continue
        faults.append(f"{name} is {_kind(found)}, expected {_kind(leaf)}")
        if is_castable:
            hints.append("cast=True changes the precision of floats")
        elif found.shape != leaf.shape and sorted(found.shape) == sorted(leaf.shape):
            hints.append("if axes are transposed, give them by `mapping`")
    if faults:
        raise ValueError(
            f"the arrays of {str(path)!r} are not those of `like`: {_some(faults, '; ')}. "
            f"{'; '.join(dict.fromkeys(hints))}"
        )


def _cast(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Change the precision of floats; refuse numbers that would become infinite."""
    if array.dtype.name == dtype.name:
        return array
    with np.errstate(over="ignore"):
        # The byte order of `like` is not to be kept.
        result = array.astype(dtype.newbyteorder("="))
    if (lost := np.isfinite(array) & ~np.isfinite(result)).any():
        raise ValueError(
            f"{name} holds {float(array[lost][0]):.3g}, which is too large for {result.dtype}: "
            "read it in the precision of the file"
        )
    return result


def _is_float(leaf: Any) -> bool:
    # numpy's own does not know bfloat16.
    return jnp.issubdtype(leaf.dtype, np.floating)


def _some(words: Iterable[str], between: str = ", ") -> str:
    words = list(words)
    return between.join(words[:20]) + f"{between}and {len(words) - 20} more" * (len(words) > 20)


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves by name, in the order of flattening; a bare array is called "array"."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        if name in named:
            raise ValueError(f"two leaves are called {name!r}: rename a key that holds a '/'")
        # By its type first: numpy.asarray has no answer for JAX's keys.
        named[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return named


def _kind(leaf) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"


def _stored(name: str, leaf: Any, place: _Place) -> np.ndarray:
    """Return a leaf as the format wants it: on the host, in C order and native byte order."""
    if place.name == "__metadata__" or "\0" in place.name:
        # The first is what safetensors keeps for itself.
        raise ValueError(f"a leaf is called {place.name!r}, which a file cannot hold: rename it")
    if leaf.dtype.name not in CODES:
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which a .safetensors file cannot hold: expected one "
            f"of {', '.join(sorted(CODES))}"
        )
    array = np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="))
    return np.asarray(array.transpose(place.axes), order="C")
