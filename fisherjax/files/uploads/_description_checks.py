"""Check the description of an upload against its arrays, before any value is decoded.

An upload describes its values in JSON: how operators are made of arrays, and to which shapes codes
decode. Descriptions come from clients and are not trusted: a description has to be valid before
`_size_checks` computes which sizes and shapes its values have.
"""

import collections
import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._layers.layer import Layer
from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files.base import Sealed, read
from fisherjax.files.uploads._size_checks import check_sizes, is_shape
from fisherjax.files.uploads.values import VALUE_TYPES, decode, joined

FIELDS = ("algorithm", "kind", "client", "examples", "codec")
"""Fields of the description of every upload, besides its values."""
STATISTICS, FROZEN = "statistics", "frozen"
"""Optional fields with names of leaves that are not trained: running statistics, which are arrays
of the file, and frozen leaves, which are not sent."""


def check(file: Sealed, limits: Limits) -> dict[str, ArrayKind]:
    """Check the description of an upload, and return the kinds of all values that it decodes to.

    Raises:
        ValueError: If the description lacks a field, is invalid, or exceeds the limits. The error
            names the file, and the client and the leaf where those are known.
    """
    check_described(file, limits)
    leaves = shapes_of(file)
    # How many bits a stream needs is told by the widths of its columns, which are short.
    widths = [x for x, kind in file.arrays.items() if (x[-7:], kind.dtype) == ("/widths", "uint8")]
    leaves |= dict(zip(widths, read(file.path, widths), strict=True))
    values = decode(file.path, file.about["values"], leaves.__getitem__)
    sizes = check_sizes(file.path, file.about["client"], values, file.nbytes, limits)
    _check_untrained(file, sizes)
    statistics = (f"{STATISTICS}/{name}" for name in file.about.get(STATISTICS, ()))
    return sizes | {name: file.arrays[name] for name in statistics}


def shapes_of(file: Sealed) -> dict[str, Any]:
    """Return shapes that stand in for the arrays of a file, of which nothing is read."""
    kinds = file.arrays.items()
    return {name: jax.ShapeDtypeStruct(kind.shape, jnp.dtype(kind.dtype)) for name, kind in kinds}


def check_described(file: Sealed, limits: Limits) -> None:
    """Check the fields, the structure and the names of a description, which may not be written yet.

    Raises:
        ValueError: As in `check`.
    """
    about, where = file.about, repr(str(file.path))
    # These fields are printed, and compared with those of other clients, so that each has to be
    # text.
    for name in ("version", *(name for name in FIELDS if name != "examples")):
        value = about.get(name)
        if not (isinstance(value, str) and (value or name == "kind")):
            raise ValueError(
                f"the header of {where} has {name} {reprlib.repr(value)}; expected a name"
            )
        limits.check(file.path, "name", len(value))
    try:
        # A negative or infinite weight would ruin the merge of all clients.
        checks.number("examples", about.get("examples"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the header of {where} has examples {reprlib.repr(about.get('examples'))}; expected a "
            "finite non-negative number"
        ) from error
    check_values(file, about.get("values"), "", limits, 1)
    for what in (STATISTICS, FROZEN):
        names = about.get(what, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse(file, f"{what} is {reprlib.repr(names)}; expected names of leaves")
    # Frozen leaves are names only, so that a small file could list a million of them.
    frozen = about.get(FROZEN, [])
    limits.check(file.path, "arrays", len(file.arrays) + len(frozen))
    limits.check(file.path, "name", max(map(len, frozen), default=0))


def check_model(file: Sealed) -> None:
    """Check the description of a merged model: the shares of its clients.

    Raises:
        ValueError: If they are not numbers by client.
    """
    clients = file.about.get("clients")
    if not isinstance(clients, dict) or not all(type(x) is float for x in clients.values()):
        raise ValueError(
            f"the header of {str(file.path)!r} has clients {reprlib.repr(clients)}; expected the "
            "share of each client: ask its sender to send it again"
        )


def _check_untrained(file: Sealed, sizes: Mapping[str, ArrayKind]) -> None:
    """Check statistics and frozen leaves: no leaf has two kinds or lacks its array."""
    listed = {what: file.about.get(what, []) for what in (STATISTICS, FROZEN)}
    for name in listed[STATISTICS]:
        if f"{STATISTICS}/{name}" not in file.arrays:
            _refuse(file, f"there is no array '{STATISTICS}/{name}'")
    trained = [name.removeprefix("params/") for name in sizes if name.startswith("params/")]
    # A leaf of two kinds would be merged by one rule and then overwritten by the other.
    times = collections.Counter([*trained, *listed[STATISTICS], *listed[FROZEN]])
    if twice := sorted(name for name, number in times.items() if number > 1):
        _refuse(file, f"{reprlib.repr(twice)} are listed twice, as leaves of several kinds")


def _refuse(file: Sealed, reason: str) -> NoReturn:
    of_client = f" of client {file.about['client']!r}" if "client" in file.about else ""
    raise ValueError(
        f"the header of {str(file.path)!r}{of_client} has a description that this version "
        f"cannot read "
        f"({reason}): update fisherjax, or ask the sender to send the file again"
    )


def check_values(file: Sealed, spec: Any, name: str, limits: Limits, depth: int) -> None:
    """Check that a description is one of values, down to the limit of nesting."""
    limits.check(file.path, "nesting", depth)
    if spec == "array":
        if name not in file.arrays:
            _refuse(file, f"there is no array '{name}'")
        return
    if not isinstance(spec, dict):
        # All errors show foreign text through `reprlib`, which shortens it.
        _refuse(file, f"'{name}' is {reprlib.repr(spec)}; expected a description of values")
    if set(spec) in ({"dict"}, {"ordered"}):
        [children] = spec.values()
    elif set(spec) == {"type", "children", "static"}:
        children = spec["children"]
        _check_fields(file, spec, name, limits, depth)
    else:
        _refuse(file, f"'{name}' has keys {reprlib.repr(list(spec))}; expected those of values")
    if not isinstance(children, dict):
        _refuse(file, f"'{name}' holds {reprlib.repr(children)}; expected values by name")
    for key, child in children.items():
        check_values(file, child, joined(name, key), limits, depth + 1)


def _check_fields(file: Sealed, spec: dict, name: str, limits: Limits, depth: int) -> None:
    """Check the type and the fields of a dataclass that a description names."""
    # Only types of this table are ever made: a description cannot name any other class.
    if not isinstance(spec["type"], str) or spec["type"] not in VALUE_TYPES:
        _refuse(
            file,
            f"'{name}' has type {reprlib.repr(spec['type'])}; expected one of "
            f"{', '.join(VALUE_TYPES)}",
        )
    fields = dataclasses.fields(VALUE_TYPES[spec["type"]])
    for which, is_static in (("children", False), ("static", True)):
        allowed = [x for x in fields if x.metadata.get("static", False) is is_static]
        needed = {x.name for x in allowed if x.default is dataclasses.MISSING}
        found = spec[which]
        # Fields with defaults may be missing, because older versions did not have them.
        if not isinstance(found, dict) or not needed <= set(found) <= {x.name for x in allowed}:
            _refuse(
                file,
                f"'{name}' has {which} {reprlib.repr(found)}; expected {sorted(needed)} for a "
                f"{spec['type']}",
            )
    for field, value in spec["static"].items():
        _check_static(file, value, joined(name, field), limits, depth + 1)


def _check_static(file: Sealed, value: Any, name: str, limits: Limits, depth: int) -> None:
    """Check a static field: numbers, strings, None, lists of them, a Layer or a Template."""
    limits.check(file.path, "nesting", depth)
    if isinstance(value, list):
        for inner in value:
            _check_static(file, inner, name, limits, depth + 1)
    elif isinstance(value, dict):
        # A dict here always stands for a named tuple, by its name.
        [(kind, fields)] = value.items() if len(value) == 1 else [("", None)]
        is_sound = isinstance(fields, dict) and (
            (kind == "Template" and all(map(is_shape, fields.values())))
            or (kind == "Layer" and _is_layer(fields))
        )
        if not is_sound:
            _refuse(file, f"'{name}' has {reprlib.repr(value)}; expected a Layer or a Template")


def _is_layer(fields: dict[str, Any]) -> bool:
    """Return whether fields are those of a `Layer` whose shape and axes are valid."""
    needed = {name for name in Layer._fields if name not in Layer._field_defaults}
    if not needed <= set(fields) <= set(Layer._fields):
        return False
    layer = Layer(**fields)
    # JSON has no types of fields, so that any of them could hold a list or a number.
    texts = [isinstance(x, str) for x in (layer.kernel, layer.form)]
    texts += [x is None or isinstance(x, str) for x in (layer.bias, layer.part_of)]
    if not (all(texts) and is_shape(layer.shape) and is_shape(layer.index)):
        return False
    axes = [layer.outputs, layer.groups]
    if not all(isinstance(x, list | tuple) and all(type(i) is int for i in x) for x in axes):
        return False
    rank, every = len(layer.shape), [*layer.outputs, *layer.groups]
    # Axes may count from the end; none may occur twice.
    places = {axis % rank for axis in every if -rank <= axis < rank}
    is_known = layer.form == "product" or not layer.groups
    return is_known and len(places) == len(every) and math.prod(layer.shape) > 0
