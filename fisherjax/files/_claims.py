"""Check the description of an upload against its arrays, before any value is decoded.

An upload describes its values in JSON: how operators are made of arrays, and to which shapes codes
decode. Descriptions come from clients and are not trusted. Two checks come first: that the
description is valid, and that the values that it describes have allowed sizes and shapes.
"""

import collections
import dataclasses
import math
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from fisherjax import compression, tree
from fisherjax._core import checks
from fisherjax._layers.graph import Wiring
from fisherjax._layers.layer import Layer
from fisherjax.files._limits import Kind, Limits
from fisherjax.files.base import Sealed
from fisherjax.files.values import VALUE_TYPES, decode, joined
from fisherjax.fisher import Dense, Diagonal, Kronecker, Operator

FIELDS = ("algorithm", "kind", "client", "examples", "codec")
"""Fields of the description of every upload, besides its values."""
STATISTICS, FROZEN = "statistics", "frozen"
"""Optional fields with names of leaves that are not trained: running statistics, which are arrays
of the file, and frozen leaves, which are not sent."""


def check(file: Sealed, limits: Limits) -> dict[str, Kind]:
    """Check the description of an upload, and return the kinds of all values that it decodes to.

    Raises:
        ValueError: If the description lacks a field, is invalid, or exceeds the limits. The error
            names the file, and the client and the leaf where those are known.
    """
    about, where = file.about, repr(str(file.path))
    for name in (*FIELDS, "version"):
        value = about.get(name)
        if name != "examples" and not (isinstance(value, str) and (value or name == "kind")):
            raise ValueError(
                f"the header of {where} has {name} {reprlib.repr(value)}; expected a name"
            )
    try:
        checks.number("examples", about.get("examples"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the header of {where} has examples {reprlib.repr(about.get('examples'))}; expected a "
            "finite non-negative number"
        ) from error
    _check_values(file, about.get("values"), "", limits, 1)
    shapes = {n: jax.ShapeDtypeStruct(k.shape, jnp.dtype(k.dtype)) for n, k in file.arrays.items()}
    values = decode(file.path, about["values"], shapes.__getitem__)
    sizes = check_sizes(file.path, about["client"], values, file.nbytes, limits)
    _check_untrained(file, sizes, limits)
    statistics = (f"{STATISTICS}/{name}" for name in about.get(STATISTICS, ()))
    return sizes | {name: file.arrays[name] for name in statistics}


def check_sizes(
    path: Path, client: str, values: Mapping[str, Any], nbytes: int, limits: Limits
) -> dict[str, Kind]:
    """Check the sizes and shapes of the values that an upload decodes to.

    Args:
        path: Path of the file, for errors.
        client: Name of the client, for errors.
        values: Values as described, of arrays or of `jax.ShapeDtypeStruct`.
        nbytes: Size of the file in bytes.
        limits: Limits for the decoded size.

    Returns:
        Kinds of all decoded arrays, by name.

    Raises:
        ValueError: If the values decode to too many bytes, or curvature does not fit the params.
            The error names the file, the client and the leaf.
    """
    where = f"{str(path)!r} of client {client!r}"
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} holds a {type(values).__name__}; expected a dict of values.")
    try:
        found = compression.declared(values.get("update", values), limits.expansion * nbytes)
        if not isinstance(found, Mapping):
            raise ValueError(f"an update is a {type(found).__name__}; expected a dict of values")
        if "update" in values and not jax.tree.leaves(found):
            raise ValueError("an update has no arrays; expected those of its params")
        for name, kind, *expected in _expected(found):
            if tuple(kind.shape) not in expected:
                shapes = " or ".join(str(list(shape)) for shape in expected)
                raise ValueError(f"{name} is {Kind.of(kind)}, expected {shapes} to fit its params")
        if isinstance(found.get("wiring"), Wiring):
            _check_wiring(found["wiring"], found["params"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{where} cannot be decoded ({reason}): ask the client to send it again. If you trust "
            "its sender and its codes decode to more bytes than usual, raise the limit: "
            "limits=files.Limits(expansion=...), or --limit expansion=..."
        ) from error
    return {name: Kind.of(x) for name, x in tree.by_name(found).items() if hasattr(x, "dtype")}


def _check_untrained(file: Sealed, sizes: Mapping[str, Kind], limits: Limits) -> None:
    """Check the names of statistics and frozen leaves: no leaf has two kinds or lacks its array."""
    listed = {what: file.about.get(what, []) for what in (STATISTICS, FROZEN)}
    for what, names in listed.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse(file, f"{what} is {reprlib.repr(names)}; expected names of leaves")
    limits.check(file.path, "arrays", len(file.arrays) + len(listed[FROZEN]))
    limits.check(file.path, "name", max(map(len, listed[FROZEN]), default=0))
    for name in listed[STATISTICS]:
        if f"{STATISTICS}/{name}" not in file.arrays:
            _refuse(file, f"there is no array '{STATISTICS}/{name}'")
    trained = [name.removeprefix("params/") for name in sizes if name.startswith("params/")]
    times = collections.Counter([*trained, *listed[STATISTICS], *listed[FROZEN]])
    if twice := sorted(name for name, number in times.items() if number > 1):
        _refuse(file, f"{reprlib.repr(twice)} are listed twice, as leaves of several kinds")


def _refuse(file: Sealed, reason: str) -> NoReturn:
    raise ValueError(
        f"the header of {str(file.path)!r} has a description that this version cannot read "
        f"({reason}): update fisherjax, or ask the sender to send the file again"
    )


def _check_values(file: Sealed, spec: Any, name: str, limits: Limits, depth: int) -> None:
    """Check that a description is one of values, down to the limit of nesting."""
    limits.check(file.path, "nesting", depth)
    if spec == "array":
        if name not in file.arrays:
            _refuse(file, f"there is no array '{name}'")
        return
    if not isinstance(spec, dict):
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
        _check_values(file, child, joined(name, key), limits, depth + 1)


def _check_fields(file: Sealed, spec: dict, name: str, limits: Limits, depth: int) -> None:
    """Check the type and the fields of a dataclass that a description names."""
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
        [(kind, fields)] = value.items() if len(value) == 1 else [("", None)]
        is_sound = isinstance(fields, dict) and (
            (kind == "Template" and all(map(_is_shape, fields.values())))
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
    texts = [isinstance(x, str) for x in (layer.kernel, layer.form)]
    texts += [x is None or isinstance(x, str) for x in (layer.bias, layer.part_of)]
    if not (all(texts) and _is_shape(layer.shape) and _is_shape(layer.index)):
        return False
    rank, outputs = len(layer.shape), layer.outputs
    if not isinstance(outputs, list | tuple) or not all(type(axis) is int for axis in outputs):
        return False
    places = {axis % rank for axis in outputs if -rank <= axis < rank}
    return len(places) == len(outputs) and math.prod(layer.shape) > 0


def _is_shape(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    return is_list and all(type(x) is int and 0 <= x < 2**60 for x in value)


def _expected(values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield each array that belongs to params, with its name and the shapes that it may have."""
    params, fisher = values.get("params"), values.get("fisher")
    if not isinstance(params, Mapping):
        return
    shapes = {name: tuple(x.shape) for name, x in params.items() if hasattr(x, "shape")}
    # The template of an operator has the shapes of all leaves, even of encoded params.
    if isinstance(fisher, Dense | Kronecker):
        known = dict(zip(fisher.template.names(), fisher.template.shapes, strict=True))
        for name in known.keys() & shapes.keys():
            if shapes[name] != known[name]:
                kind = Kind.of(params[name])
                expected = kind._replace(shape=known[name])
                raise ValueError(f"params/{name} is {kind}, expected {expected} as in its Fisher")
        shapes = known | shapes
    if isinstance(fisher, Dense):
        total = sum(map(math.prod, known.values()))
        yield "fisher/matrix", fisher.matrix, (total, total)
    if isinstance(fisher, Kronecker):
        yield from _factors(fisher, shapes)
    if isinstance(fisher, Diagonal):
        known = tree.by_name(fisher.entries)
        yield from ((f"fisher/{n}", x, shapes[n]) for n, x in known.items() if n in shapes)
    if isinstance(fisher, Operator) and (missing := sorted(params.keys() - known.keys())):
        raise ValueError(f"its Fisher lacks the leaves {reprlib.repr(missing)}")
    grams = values.get("grams")
    if isinstance(grams, Mapping):
        # A Gram matrix has the size of the inputs; a name with ^T is that of a transposed kernel.
        for name, gram in grams.items():
            leaf = shapes[name.removesuffix("^T")]
            sizes = {math.prod(leaf[:-1]), math.prod(leaf[1:])}
            yield (f"grams/{name}", gram, *((n, n) for n in sizes))


def _factors(fisher: Kronecker, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the factors and entries of a Kronecker operator, as `_expected` does."""
    layers = {layer.kernel: layer for layer in fisher.layers}
    leaves = {name for layer in fisher.layers for name in (layer.leaf, layer.bias)}
    expected = {name for name, layer in layers.items() if layer.form != "scale"}
    diagonal = fisher.scales | (set(fisher.template.names()) - leaves)
    if (set(fisher.factors), set(fisher.entries)) != (expected, diagonal):
        raise ValueError(
            f"a Fisher has factors of {reprlib.repr(sorted(fisher.factors))} and entries of "
            f"{reprlib.repr(sorted(fisher.entries))}; expected {reprlib.repr(sorted(expected))} "
            f"and {reprlib.repr(sorted(diagonal))}"
        )
    for name, layer in layers.items():
        if math.prod(layer.shape) > math.prod(shapes[layer.leaf]):
            raise ValueError(
                f"layer '{name}' has shape {layer.shape}, expected at most the size of its leaf, "
                f"{shapes[layer.leaf]}"
            )
        rows, columns = layer.rows + (layer.bias is not None), layer.columns
        if layer.form == "scale":
            yield f"fisher/{name}", fisher.entries[name], (rows, rows, columns)
            continue
        for side, size in (("input", rows), ("output", columns)):
            yield f"fisher/{name}/{side}", fisher.factors[name][side], (size,), (size, size)
    for name in sorted(diagonal - fisher.scales):
        yield f"fisher/{name}", fisher.entries[name], shapes[name]


def _check_wiring(wiring: Wiring, params: Mapping[str, Any]) -> None:
    """Check that a wiring connects layers whose leaves are among the params."""
    layers, sources, spans = wiring.layers, wiring.sources, wiring.spans
    places = range(len(layers))
    has_leaves = all(
        isinstance(layer, Layer)
        and layer.leaf in params
        and (layer.bias is None or layer.bias in params)
        for layer in layers
    )
    has_sources = len(sources) == len(layers) and all(
        place in places for feeding in sources for place in feeding
    )
    has_spans = len(spans) == len(layers) and all(
        len(span) == 2 and _is_shape(span) for span in spans
    )
    if not (layers and has_leaves and has_sources and has_spans):
        raise ValueError("its wiring does not fit the layers of its params")
