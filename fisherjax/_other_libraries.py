"""Read arrays of other libraries, such as PyTorch tensors, by NumPy's protocol.

NumPy's own subclasses, such as `numpy.memmap`, become plain views without a copy.
"""

from typing import Any

import jax
import numpy as np


def summary(error: Exception) -> str:
    """Return the type and the first line of an error that other code raised.

    Example:
        >>> summary(KeyError("a"))
        "KeyError: 'a'"
    """
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def as_array(value: Any, what: str) -> Any:
    """Return an array of another library, or a list, as one of NumPy; leave JAX's as they are.

    Raises:
        TypeError: If NumPy cannot read it.

    Example:
        >>> as_array([[1, 2], [3, 4]], "inputs").shape
        (2, 2)
    """
    # Masked entries are refused by name where dtypes are.
    if isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and np.ma.is_masked(value)):
        return value
    try:
        return np.asarray(value)
    # A tensor of a GPU, or one that needs a gradient, raises an error of its library's own.
    except Exception as error:
        raise TypeError(
            f"{what} of type {type(value).__name__} cannot be read as an array ({summary(error)}). "
            "Expected rows of equal lengths, or an array in the CPU's memory: of a PyTorch tensor "
            "pass x.detach().cpu().numpy(), and of one of bfloat16 x.float() first."
        ) from error


def check_keys(tree: Any, what: str) -> None:
    """Check that the keys of a pytree's dicts can be sorted, as JAX does.

    Example:
        >>> check_keys({"left": 1, "right": {2: 3}}, "inputs")
    """
    try:
        jax.tree.structure(tree)
    # JAX's type of this error is not documented, nor is that of a class of one's own.
    except Exception as error:
        raise TypeError(
            f"{what} cannot be read as a pytree ({summary(error)}); expected dicts whose keys are "
            "all of one type, such as text: {str(key): x for key, x in given.items()}."
        ) from error


def as_arrays(tree: Any, what: str) -> Any:
    """Return a pytree whose leaves of other libraries are NumPy's; leave anything else as it is."""

    def one(leaf: Any) -> Any:
        # A pytree may hold tracers, shapes and placeholders.
        is_known = isinstance(leaf, (jax.Array, np.generic)) or type(leaf) is np.ndarray
        return leaf if is_known or not hasattr(leaf, "__array__") else as_array(leaf, what)

    check_keys(tree, what)
    return jax.tree.map(one, tree)
