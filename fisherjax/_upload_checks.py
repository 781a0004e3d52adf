"""Check uploads before a merge: their kind, their leaves, their number and their weights.

Their values are checked in `_finite_uploads` and `_semidefinite_uploads`. Shapes that differ
between clients are refused by `tree.stack`, and those that differ from the server's model in
`merging._server_half`. Uploads that are files are first checked in `files.uploads`, entry by entry,
before anything of them is allocated.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._core import checks
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm
from fisherjax.typing import AnyArray


def stacked(algorithm: Algorithm, updates: Any) -> Update:
    """Stack a list of updates, and check their kind and that all leaves have M clients."""
    check_algorithm(algorithm)
    if isinstance(updates, (list, tuple)):
        # Stacking updates of other kinds would report only that their trees differ.
        for client, update in enumerate(updates):
            _check_kind(algorithm, update, f"The update of client {client}")
        updates = tree.stack(list(updates))
    _check_kind(algorithm, updates, "updates")
    if not jax.tree.leaves(updates.values):
        raise ValueError(
            "This method, as single_set, sends no updates and has no merged model; use "
            "rounds.federated(...), whose `models` returns the model of every client."
        )
    num_clients(updates.values)
    _check_untrained(algorithm, updates)
    return tree.to_native(updates, "the stacked updates")


def num_clients(updates: Any) -> int:
    """Return the number of clients in stacked updates, or raise ValueError if leaves differ in it.

    Example:
        >>> num_clients({"w": np.ones((3, 2)), "b": np.ones(3)})
        3
    """
    shapes = tree.shapes(updates)
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        raise ValueError(
            f"The stacked updates have leading axes {lengths}; expected the number of clients in "
            "all of them."
        )
    return next(iter(shapes.values()))[0]


def check_weights(weights: Any, num_clients: int) -> Any:
    """Check the clients' weights [M], and return them in float64 on the host unless traced.

    None means equal weights.
    """
    if weights is None:
        return np.ones(num_clients)
    if not checks.is_traced(weights):
        try:
            # The sum of weights such as 1e38 would overflow in float32.
            weights = np.asarray(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"weights are {weights!r}; expected numbers, one for each client."
            ) from error
    if weights.shape != (num_clients,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({num_clients},), one for each update."
        )
    if not checks.is_traced(weights) and not (np.all(weights >= 0) and np.isfinite(weights).all()):
        raise ValueError(
            f"weights are {weights.tolist()}; expected finite non-negative numbers, one "
            "for each client."
        )
    return weights


def check_not_all_zero(weights: Any) -> None:
    """Raise ValueError if all weights are zero."""
    # Not by their sum, which may overflow.
    if not checks.is_traced(weights) and not np.any(np.asarray(weights) > 0):
        raise ValueError(
            "Every weight is zero; expected at least one positive weight. Use federation.weights "
            "or numbers of examples, for instance."
        )


def check_any_left(weights: AnyArray) -> None:
    """Raise ValueError if all clients were left out."""
    if not checks.is_traced(weights) and not np.any(np.asarray(weights) > 0):
        raise ValueError("No client is left: no update of positive weight is finite.")


def check_precision(what: str, values: Any) -> None:
    """Check that the dtypes of leaves can be added up: JAX promotes no floats of 8 bits or fewer.

    Raises:
        TypeError: If one cannot; the message has its name and the remedy.

    Example:
        >>> check_precision("params", {"w": np.ones(3, np.float16)})
    """
    for name, leaf in tree.by_name(values).items():
        dtype = getattr(leaf, "dtype", None)
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        if is_float and jnp.finfo(dtype).bits < 16:
            raise TypeError(
                f"Leaf '{name}' of {what} has dtype {dtype}, of which no sums are computed; "
                "expected floats of at least 16 bits. Multiply it by its scale, if it has one, and "
                "convert it on clients and server by x.astype('bfloat16'), or exclude it from "
                "training by the model's mask."
            )


def _check_untrained(algorithm: Algorithm, update: Update) -> None:
    """Check that an update made by hand names the leaves that the model does not train."""
    mask = () if algorithm.model is None else algorithm.model.mask or ()
    named = {*update.statistics, *update.frozen}
    if missing := [name for name, trained in mask if not trained and name not in named]:
        raise ValueError(
            f"The model's mask does not train {missing}, but the update does not name these "
            "leaves, and its values may contain them as if they were trained. Make updates by "
            "merging.summarize, or name the leaves in Update(..., statistics=, frozen=)."
        )


def _check_kind(algorithm: Algorithm, update: Any, what: str) -> None:
    if not isinstance(update, Update):
        raise TypeError(
            f"{what} is a {type(update).__name__}; expected what merging.summarize returns, a list "
            "of algorithms.Update, or Update(stacked values, algorithm.kind)."
        )
    if update.kind != algorithm.kind:
        raise ValueError(
            f"{what} holds '{update.kind}', but this algorithm merges '{algorithm.kind}'. "
            "Summarize with the algorithm that merges."
        )
