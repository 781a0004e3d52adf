"""Batches of inputs: one array [N, ...], or any pytree of such arrays, such as a dict or a tuple.

A list is no container here but rows, as NumPy reads it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._other_libraries import as_array, check_keys
from fisherjax.typing import AnyArray, Inputs


def num_rows(inputs: Inputs) -> int:
    """Return the number of examples N, the length of the first axis.

    Example:
        >>> num_rows({"left": np.ones((3, 2)), "right": np.ones(3)})
        3
    """
    return jax.tree.leaves(inputs)[0].shape[0]


def take(inputs: Inputs, rows: Any) -> Inputs:
    """Return the examples at these rows, an index or a slice of the first axis of every leaf."""
    return jax.tree.map(lambda x: x[rows], inputs)


def named_leaves(inputs: Inputs, what: str = "inputs") -> dict[str, Any]:
    """Return the leaves by the expressions that reach them; a list is a leaf.

    Example:
        >>> list(named_leaves({"left": 1, "right": (2, [3, 4])}))
        ["inputs['left']", "inputs['right'][0]", "inputs['right'][1]"]
    """
    paths = jax.tree_util.tree_leaves_with_path(inputs, is_leaf=_is_list)
    return {what + jax.tree_util.keystr(path): leaf for path, leaf in paths}


def describe(inputs: Inputs) -> str:
    """Return the shapes and dtypes of inputs in words, for error messages."""
    found = {
        jax.tree_util.keystr(path): f"shape {tuple(x.shape)} and dtype {x.dtype}"
        for path, x in jax.tree_util.tree_leaves_with_path(inputs)
    }
    return found.get("") or ", ".join(f"{name} of {words}" for name, words in found.items())


def as_inputs(inputs: Any, what: str = "inputs") -> Inputs:
    """Return inputs with arrays of NumPy or JAX as leaves; check that each has an axis of examples.

    Raises:
        TypeError: If a leaf cannot be read as an array of numbers.
        ValueError: If leaves have no axis of examples or differ in its length.

    Example:
        >>> as_inputs({"left": [[1, 2], [3, 4]]})["left"].shape
        (2, 2)
    """
    check_keys(inputs, what)
    leaves = named_leaves(inputs, what) or {what: inputs}
    named = {name: as_array_of_numbers(x, name) for name, x in leaves.items()}
    if len({x.shape[:1] for x in named.values()} - {()}) != 1 or not all(
        x.ndim for x in named.values()
    ):
        shapes = {name: tuple(x.shape) for name, x in named.items()}
        raise ValueError(
            f"{what} have the shapes {shapes}; expected arrays with the same first axis, that of "
            "the examples."
        )
    structure = jax.tree.structure(inputs, is_leaf=_is_list)
    return jax.tree.unflatten(structure, list(named.values()))


def _is_list(x: Any) -> bool:
    return isinstance(x, list)


def as_array_of_numbers(value: Any, what: str) -> AnyArray:
    """Return an array of any library, or a list, as one that JAX takes without changing a value."""
    # NumPy reads the keys of a mapping.
    found = np.asarray(None) if isinstance(value, Mapping) else as_array(value, what)
    if found.dtype == object and found.ndim == 0:
        raise TypeError(
            f"{what} is of type {type(value).__name__}; expected an array or a list of rows, and "
            "for several inputs a dict or a tuple of these. Batches, as of a DataLoader, become "
            "arrays by clients.from_batches, another mapping by dict(x), and a class of your own "
            "a pytree by jax.tree_util.register_dataclass."
        )
    if found.dtype == object and found.size and isinstance(found.flat[0], Mapping):
        raise TypeError(
            f"{what} has rows that are dicts, {dict(found.flat[0])!r:.60} first; expected an array "
            "for each key, such as {'age': [row['age'] for row in rows]}, or one array of numbers."
        )
    found = tree.to_native(found, what)
    check_range(found, what)
    return found


def check_range(x: Any, what: str) -> None:
    """Check that integers of 64 bits fit the 32 that JAX keeps unless told otherwise."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.size:
        kept = jnp.iinfo(jnp.result_type(x))
        if x.min() < kept.min or x.max() > kept.max:
            raise ValueError(
                f"{what} run from {x.min()} to {x.max()}, which {kept.dtype} does not hold; "
                "expected smaller integers. Number them anew, as numpy.unique(x, "
                "return_inverse=True) does, or set jax_enable_x64."
            )


def check_native(name: str, value: Any) -> None:
    """Check that an array has a dtype and a byte order that JAX supports."""
    if tree.to_native(value, name) is not value:
        raise TypeError(
            f"{name} has dtype {value.dtype.str}, another byte order than this machine's; "
            "convert it with x.astype(x.dtype.newbyteorder('='))."
        )
