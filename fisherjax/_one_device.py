"""Bring arrays of one computation that lie on several devices to one of them."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding


def on_one_device(tree: Any) -> Any:
    """Return a pytree with its arrays on one device, that of the first array that is put on one.

    JAX computes with arrays of several devices only if it may choose their device, so that clients
    that trained on a device each could not be merged. Arrays that are spread over a mesh, tracers
    and arrays of other libraries stay where they are.

    Example:
        >>> pair = [jax.device_put(jax.numpy.ones(2), device) for device in jax.devices()[:2]]
        >>> print(sum(on_one_device(pair)))
        [...]
    """
    devices = list(dict.fromkeys(map(_device, jax.tree.leaves(tree))))
    devices = [device for device in devices if device is not None]
    if len(devices) < 2:
        return tree
    return jax.tree.map(
        lambda x: x if _device(x) in (None, devices[0]) else jax.device_put(x, devices[0]), tree
    )


def _device(x: Any) -> Any:
    """Return the device that an array was put on, or None if JAX may choose or it has several."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
        return None
    is_single = isinstance(x.sharding, SingleDeviceSharding)
    return next(iter(x.sharding.device_set)) if is_single else None
