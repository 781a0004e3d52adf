"""Check that the adapters and the factors of several clients fit each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax.adapters.base import Adapter, Factors


def check(
    adapters: Sequence[Mapping[str, Adapter]],
    factors: Sequence[Mapping[str, Factors]] | None = None,
    labels: Sequence[str] | None = None,
) -> list[str]:
    """Check that clients' adapters and factors fit each other; return the names of the layers.

    Errors call the clients by `labels` (default: their numbers).
    """
    labels = labels or [f"client {number}" for number in range(len(adapters))]
    names = list(dict.fromkeys(name for client in adapters for name in client))
    if not names:
        raise ValueError("There are no adapters; expected those of at least one client and layer.")
    shapes: dict[str, tuple[str, tuple[int, int]]] = {}
    for label, client in zip(labels, adapters, strict=True):
        for name, adapter in client.items():
            checks.instance(f"The adapter of {name!r}", adapter, Adapter, "an adapters.Adapter")
            a, b = jnp.shape(adapter.a), jnp.shape(adapter.b)
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                raise ValueError(
                    f"{label}: the adapter of {name!r} has factors {a} and {b}; expected A "
                    "[r, inputs] and B [outputs, r]."
                )
            for side, factor in zip("AB", adapter[:2], strict=True):
                dtype = (factor if hasattr(factor, "dtype") else np.asarray(factor)).dtype
                if not jnp.issubdtype(dtype, jnp.floating):
                    raise TypeError(
                        f"{label}: factor {side} of {name!r} is of {dtype}; expected floats. "
                        "Quantized numbers mean nothing without their scales."
                    )
            first, found = shapes.setdefault(name, (label, (a[1], b[0])))
            if found != (a[1], b[0]):
                raise ValueError(
                    f"The adapters of {name!r} change a matrix {list(found)} in {first} and one of "
                    f"{[a[1], b[0]]} in {label}; expected the same layer."
                )
    if factors is not None:
        if len(factors) != len(adapters):
            raise ValueError(f"factors has {len(factors)} clients; expected {len(adapters)}.")
        for label, client, held in zip(labels, adapters, factors, strict=True):
            _check_factors(label, client, held, {name: x for name, (_, x) in shapes.items()})
        _check_sides(factors, names)
    return names


def _check_factors(label: str, client: Any, held: Mapping[str, Factors], shapes: Any) -> None:
    if missing := [name for name in client if name not in held]:
        raise ValueError(
            f"{label} adapts {missing} and has no factors of them; expected the factors of "
            f"every layer that a client adapts. Factors are of {list(held)[:3]}."
        )
    for name in [name for name in shapes if name in held]:
        sizes: dict[str, int] = dict(zip(("input", "output"), shapes[name], strict=True))
        for side, factor in held[name].items():
            size = sizes.get(side)
            if jnp.shape(factor) not in ((size, size), (size,)):
                raise ValueError(
                    f"{label}: the {side} factor of {name!r} has shape {jnp.shape(factor)};"
                    f" expected {[size, size]}, without a bias: compute the factors with a mask "
                    "that trains the adapted kernels only (adapters.dense)."
                )


def _check_sides(factors: Sequence[Mapping[str, Factors]], names: Sequence[str]) -> None:
    for name in names:
        sides = {
            tuple((s, jnp.ndim(held[name][s])) for s in sorted(held[name]))
            for held in factors
            if name in held
        }
        if len(sides) != 1 or "input" not in dict(next(iter(sides))):
            raise ValueError(
                f"The factors of {name!r} are {sorted(sides)}, with their numbers of axes; "
                "expected 'input', and 'output' for all clients or for none."
            )
