"""Files of flat named arrays: models, updates, factors, as safetensors; NumPy's .npz is read."""

import os
import uuid
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors

_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
}


def save_arrays(path: str | os.PathLike, tree: Any) -> None:
    """Write a pytree of arrays to one .safetensors file, by names such as "layers/0/kernel".

    The file appears whole or not at all: what was there before stays until the new one is complete.

    Raises:
        ValueError: For another suffix, two leaves of one name, or a name that cannot be stored.
        TypeError: If a leaf is not an array, or of a type that the format does not hold.
        FileNotFoundError: If the folder is missing.
    """
    path = _checked_path(path, ".safetensors")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist: make it first")
    arrays = {name: _stored(name, leaf) for name, leaf in _named(tree).items()}
    # In the same folder, as only there a renamed file replaces another in one step; and under a
    # name that no other writer has.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as file:
            # Not save_file, which takes the permission to read from everybody else.
            file.write(safetensors.save(arrays))
            # On the disk before it has the name: after a power cut the name never stands for less.
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_arrays(path: str | os.PathLike, like: Any = None) -> Any:
    """Read a file of named arrays, as NumPy's, which keep their 64 bits whatever JAX is set to.

    Args:
        path: A file that `save_arrays`, or another program, wrote: .safetensors or .npz.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`; the result has its structure. Without it
            the result is a dict from names to arrays.

    Raises:
        ValueError: For another suffix, a damaged file, or other names, shapes or types than `like`.
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
        >>> save_arrays(path, {"dense": [np.ones(2)]})
        >>> load_arrays(path)
        {'dense/0': array([1., 1.])}
        >>> load_arrays(path, like={"dense": [np.zeros(2)]})
        {'dense': [array([1., 1.])]}
    """
    path = _checked_path(path, ".safetensors", ".npz")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        if path.suffix == ".npz":
            # A pickle may run anything: a file from a stranger must not.
            with np.load(path, allow_pickle=False) as archive:
                arrays = dict(archive)
        else:
            arrays = safetensors.load_file(path)
    except Exception as error:  # safetensors, zipfile and zlib each have their own
        raise ValueError(
            f"{str(path)!r} is damaged or not a {path.suffix} file ({error}): write it again"
        ) from error
    if like is None:
        return arrays
    found = {name: _kind(array) for name, array in arrays.items()}
    expected = {name: _kind(leaf) for name, leaf in _named(like).items()}
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"not expected {name}" for name in found if name not in expected]
    for name, kind in expected.items():
        if found.get(name, kind) != kind:
            faults.append(f"{name} is {found[name]}, expected {kind}")
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(
            f"the arrays of {str(path)!r} are not those of `like`: {'; '.join(faults[:20])}{more}. "
            "Pass the structure it was saved from, or none to get a dict"
        )
    # By name, not by place: another program may have written them in another order.
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])


def _checked_path(path: str | os.PathLike, *suffixes: str) -> Path:
    path = Path(path)
    if path.suffix not in suffixes:
        known = " or ".join(suffixes)
        raise ValueError(f"the file name {path.name!r} ends in {path.suffix!r}: end it in {known}")
    return path


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves by name, in the order of flattening; a bare array is called "array"."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        if name in named:
            raise ValueError(f"two leaves are called {name!r}: rename a key that holds a '/'")
        if name == "__metadata__" or "\0" in name:  # the first is what safetensors keeps for itself
            raise ValueError(f"a leaf is called {name!r}, which a file cannot hold: rename it")
        # By its type first: numpy.asarray has no answer for JAX's keys.
        named[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return named


def _kind(leaf) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"


def _stored(name: str, leaf) -> np.ndarray:
    """Return a leaf as the formats want it: on the host, in C order and native byte order."""
    if leaf.dtype.name not in _DTYPES:
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which a .safetensors file cannot hold: expected one "
            f"of {', '.join(sorted(_DTYPES))}"
        )
    return np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
