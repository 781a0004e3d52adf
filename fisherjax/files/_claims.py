"""What an upload says of its values, held against what came, before any of it is made.

An upload describes its values in JSON: how arrays make operators, and what codes decode to. The
description is somebody else's. It is checked in two steps: that it is one, and how large what it
describes would be.
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
from fisherjax.files.base import Kind, Limits, Sealed
from fisherjax.files.values import KNOWN, decode, joined
from fisherjax.fisher import Dense, Diagonal, Kronecker, Operator

SAYS = ("algorithm", "kind", "client", "examples", "codec")
"""What an upload says of itself beside its values."""
STATISTICS, FROZEN = "statistics", "frozen"
"""What it says of leaves that are not trained: names of those among its arrays, and of those that
were not sent."""


def check(file: Sealed, limits: Limits) -> dict[str, Kind]:
    """Check what an upload says of itself, and return what it decodes to by its description alone.

    Raises:
        ValueError: If something is missing, describes no values, or is beyond the limits; it names
            the file, and the client and the leaf where those are known.
    """
    about, where = file.about, repr(str(file.path))
    for name in (*SAYS, "version"):
        said = about.get(name)
        if name != "examples" and not (isinstance(said, str) and (said or name == "kind")):
            raise ValueError(f"{where} says {name} {reprlib.repr(said)}; expected its name")
    try:
        checks.number("examples", about.get("examples"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} says examples {reprlib.repr(about.get('examples'))}; expected a finite "
            "non-negative number"
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
    """Refuse an upload that decodes to too much, or to curvature that is not of its params.

    Args:
        path: Of the file, for errors.
        client: Whose it is, for errors.
        values: Made as their description says, of arrays or of `jax.ShapeDtypeStruct`.
        nbytes: Of the file.
        limits: What may be decoded.

    Returns:
        Types and shapes by name of all that it decodes to.

    Raises:
        ValueError: See above; it names file, client and leaf.
    """
    where = f"{str(path)!r} of client {client!r}"
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} holds a {type(values).__name__}; expected a dict of values.")
    try:
        found = compression.declared(values.get("update", values), limits.expansion * nbytes)
        if not isinstance(found, Mapping):
            raise ValueError(f"an update is a {type(found).__name__}; expected a dict of values")
        if "update" in values and not jax.tree.leaves(found):
            raise ValueError("an update has no arrays")
        for name, kind, *expected in _expected(found):
            if tuple(kind.shape) not in expected:
                words = " or ".join(str(list(shape)) for shape in expected)
                raise ValueError(f"{name} is {Kind.of(kind)}, expected {words} beside its params")
        if isinstance(found.get("wiring"), Wiring):
            _check_wiring(found["wiring"], found["params"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{where} cannot be decoded ({said}): have it sent again. Where its sender is trusted "
            "and its codes stand for more than usual, raise limits=files.Limits(expansion=...), or "
            "--limit expansion=..."
        ) from error
    return {name: Kind.of(x) for name, x in tree.by_name(found).items() if hasattr(x, "dtype")}


def _check_untrained(file: Sealed, sizes: Mapping[str, Kind], limits: Limits) -> None:
    """Refuse leaves that are not trained if they are trained too, or came without an array."""
    said = {what: file.about.get(what, []) for what in (STATISTICS, FROZEN)}
    for what, names in said.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse(file, f"{what} is {reprlib.repr(names)}; expected names of leaves")
    limits.check(file.path, "arrays", len(file.arrays) + len(said[FROZEN]))
    limits.check(file.path, "name", max(map(len, said[FROZEN]), default=0))
    for name in said[STATISTICS]:
        if f"{STATISTICS}/{name}" not in file.arrays:
            _refuse(file, f"there is no array '{STATISTICS}/{name}'")
    trained = [name.removeprefix("params/") for name in sizes if name.startswith("params/")]
    times = collections.Counter([*trained, *said[STATISTICS], *said[FROZEN]])
    if twice := sorted(name for name, number in times.items() if number > 1):
        _refuse(file, f"{reprlib.repr(twice)} are there twice, as leaves of several kinds")


def _refuse(file: Sealed, said: str) -> NoReturn:
    raise ValueError(
        f"{str(file.path)!r} says what this version cannot read ({said}): update fisherjax, or "
        "have it sent again"
    )


def _check_values(file: Sealed, spec: Any, name: str, limits: Limits, depth: int) -> None:
    """Refuse what does not describe values; nothing is followed deeper than the limit."""
    limits.check(file.path, "nesting", depth)
    if spec == "array":
        if name not in file.arrays:
            _refuse(file, f"there is no array '{name}'")
        return
    if not isinstance(spec, dict):
        _refuse(file, f"'{name}' is {reprlib.repr(spec)}; expected values")
    if set(spec) in ({"dict"}, {"ordered"}):
        [children] = spec.values()
    elif set(spec) == {"type", "children", "static"}:
        children = spec["children"]
        _check_fields(file, spec, name, limits, depth)
    else:
        _refuse(file, f"'{name}' has {reprlib.repr(list(spec))}; expected values")
    if not isinstance(children, dict):
        _refuse(file, f"'{name}' holds {reprlib.repr(children)}; expected values by name")
    for key, child in children.items():
        _check_values(file, child, joined(name, key), limits, depth + 1)


def _check_fields(file: Sealed, spec: dict, name: str, limits: Limits, depth: int) -> None:
    if not isinstance(spec["type"], str) or spec["type"] not in KNOWN:
        _refuse(file, f"'{name}' is a {reprlib.repr(spec['type'])}")
    fields = dataclasses.fields(KNOWN[spec["type"]])
    for which, wanted in (("children", False), ("static", True)):
        own = [x for x in fields if x.metadata.get("static", False) is wanted]
        needed = {x.name for x in own if x.default is dataclasses.MISSING}
        given = spec[which]
        if not isinstance(given, dict) or not needed <= set(given) <= {x.name for x in own}:
            _refuse(
                file,
                f"'{name}' has {which} {reprlib.repr(given)}; expected {sorted(needed)} of a "
                f"{spec['type']}",
            )
    for field, value in spec["static"].items():
        _check_static(file, value, joined(name, field), limits, depth + 1)


def _check_static(file: Sealed, value: Any, name: str, limits: Limits, depth: int) -> None:
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
    """Yield what belongs to params, by name, and the shapes that it may have beside them."""
    params, fisher = values.get("params"), values.get("fisher")
    if not isinstance(params, Mapping):
        return
    shapes = {name: tuple(x.shape) for name, x in params.items() if hasattr(x, "shape")}
    if isinstance(fisher, Dense | Kronecker):
        own = dict(zip(fisher.template.names(), fisher.template.shapes, strict=True))
        for name in own.keys() & shapes.keys():
            if shapes[name] != own[name]:
                kind = Kind.of(params[name])
                expected = kind._replace(shape=own[name])
                raise ValueError(f"params/{name} is {kind}, expected {expected} as in its Fisher")
        known, shapes = own, own | shapes
    if isinstance(fisher, Dense):
        total = sum(map(math.prod, own.values()))
        yield "fisher/matrix", fisher.matrix, (total, total)
    if isinstance(fisher, Kronecker):
        yield from _factors(fisher, shapes)
    if isinstance(fisher, Diagonal):
        known = tree.by_name(fisher.entries)
        yield from ((f"fisher/{n}", x, shapes[n]) for n, x in known.items() if n in shapes)
    if isinstance(fisher, Operator) and (missing := sorted(params.keys() - known.keys())):
        raise ValueError(f"its Fisher has nothing of {reprlib.repr(missing)}")
    grams = values.get("grams")
    if isinstance(grams, Mapping):
        for name, gram in grams.items():
            leaf = shapes[name.removesuffix("^T")]
            sizes = {math.prod(leaf[:-1]), math.prod(leaf[1:])}
            yield (f"grams/{name}", gram, *((n, n) for n in sizes))


def _factors(fisher: Kronecker, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[Any, ...]]:
    layers = {layer.kernel: layer for layer in fisher.layers}
    leaves = {name for layer in fisher.layers for name in (layer.leaf, layer.bias)}
    expected = {name for name, layer in layers.items() if layer.form != "scale"}
    alone = fisher.scales | (set(fisher.template.names()) - leaves)
    if (set(fisher.factors), set(fisher.entries)) != (expected, alone):
        raise ValueError(
            f"a Fisher has factors of {reprlib.repr(sorted(fisher.factors))} and entries of "
            f"{reprlib.repr(sorted(fisher.entries))}; expected {reprlib.repr(sorted(expected))} "
            f"and {reprlib.repr(sorted(alone))}"
        )
    for name, layer in layers.items():
        if math.prod(layer.shape) > math.prod(shapes[layer.leaf]):
            raise ValueError(
                f"layer '{name}' has shape {layer.shape}, but its leaf {shapes[layer.leaf]}"
            )
        rows, columns = layer.rows + (layer.bias is not None), layer.columns
        if layer.form == "scale":
            yield f"fisher/{name}", fisher.entries[name], (rows, rows, columns)
            continue
        for side, size in (("input", rows), ("output", columns)):
            yield f"fisher/{name}/{side}", fisher.factors[name][side], (size,), (size, size)
    for name in alone - fisher.scales:
        yield f"fisher/{name}", fisher.entries[name], shapes[name]


def _check_wiring(wiring: Wiring, params: Mapping[str, Any]) -> None:
    layers, sources, spans = wiring.layers, wiring.sources, wiring.spans
    places = range(len(layers))
    known = all(
        isinstance(layer, Layer)
        and layer.leaf in params
        and (layer.bias is None or layer.bias in params)
        for layer in layers
    )
    fed = len(sources) == len(layers) and all(place in places for own in sources for place in own)
    spanned = len(spans) == len(layers) and all(
        len(span) == 2 and _is_shape(span) for span in spans
    )
    if not (layers and known and fed and spanned):
        raise ValueError("its wiring is not one of layers of its params")
