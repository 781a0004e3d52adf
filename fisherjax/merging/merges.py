"""Merge client updates to one model, all at once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax._one_device import on_one_device
from fisherjax._upload_checks import check_not_all_zero, check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Report, Update
from fisherjax.clients import shares
from fisherjax.devices import mesh_of, replicate
from fisherjax.merging._server_half import server_half, server_key
from fisherjax.typing import AnyArray, Array, Key, Params, Weights


def merge(
    algorithm: Algorithm[Report],
    params: Params,
    updates: Update | Sequence[Update],
    weights: Weights | None = None,
    *,
    state: Any = None,
    cohort: Array | None = None,
    key: Key | None = None,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any, Report]:
    """Merge client updates to one model: the server's half of a round.

    Args:
        algorithm: Method that merges.
        params: Model that clients started from; the result has its structure and dtypes.
        updates: Result of `summarize`, or a list of M updates, for instance loaded from files.
        weights: [M] non-negative weights of the clients, for instance their numbers of examples,
            which are scaled to sum one; None means equal weights.
        state: State of the algorithm after the last merge; None starts afresh.
        cohort: [M] places of these clients in the federation; None means 0 to M - 1.
        key: Random key of algorithms that draw on the server. Those whose noise must be secret, as
            `privacy.private`, require one.
        on_nonfinite: "raise" for an error if a client diverged, or "drop" to leave it out.

    Returns:
        The merged params, the state of the algorithm, and its info, for instance a solver's.

    Raises:
        ValueError: If the updates do not fit each other or the algorithm, the weights do not fit,
            or an update or the merged model is not finite. The message names clients and leaves.
        TypeError: If params are not floating, or updates have another type.

    Example:
        >>> import fisherjax as fj
        >>> updates = [fj.algorithms.Update({"params": {"w": w}}, "params") for w in jnp.eye(2)]
        >>> merged, _, _ = merge(fj.algorithms.fedavg(), {"w": jnp.zeros(2)}, updates, [1, 3])
        >>> print(merged["w"])
        [0.25 0.75]
    """
    params = checks.arrays(params)
    update = stacked(algorithm, updates)
    num_clients = jax.tree.leaves(update)[0].shape[0]
    known = check_weights(weights, num_clients)
    check_not_all_zero(known)
    # Updates may be spread over a mesh, and other arrays must be there too. Weights are scaled
    # before they are rounded to float32, in which their sum may overflow.
    mesh = mesh_of(update)
    params, scaled = replicate((params, as_floats(shares(known))), mesh)
    cohort = np.arange(num_clients) if cohort is None else cohort
    key = server_key(algorithm, key)
    update, params, state, key = on_one_device((update, params, state, key))
    how = {"state": state, "cohort": cohort, "key": key, "on_nonfinite": on_nonfinite}
    found = server_half(algorithm, params, update, scaled, **how)
    return found.params, found.state, found.info


def as_floats(weights: AnyArray) -> Array:
    """Return weights as an array of the default precision; from NumPy without a program."""
    if isinstance(weights, np.ndarray):
        return jax.device_put(weights.astype(jnp.result_type(float)))
    return jnp.asarray(weights, float)
