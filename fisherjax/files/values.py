"""Values of an update as JSON and arrays by name, and back.

Params of any structure become a dict by leaf name, and operators act on that.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._layers.graph import Wiring
from fisherjax._layers.layer import Layer
from fisherjax.compression import (
    Codes,
    Difference,
    Root,
    Slot,
    Squares,
    Stream,
    Triangle,
    Truncated,
)
from fisherjax.files.base import Kind
from fisherjax.fisher import Dense, Diagonal, Kronecker
from fisherjax.fisher.operators import Template

_OPERATORS = Diagonal, Dense, Kronecker
_ENCODED = Codes, Difference, Root, Slot, Squares, Stream, Triangle, Truncated
KNOWN: dict[str, type] = {kind.__name__: kind for kind in (*_OPERATORS, Wiring, *_ENCODED)}
"""Frozen dataclasses that a file holds: their children are arrays, dicts of them, or others of
these; their static fields numbers, strings, None, tuples of those, `Layer` and `Template`."""

_ARRAY = "array"


def decode(path: Path, spec: Any, leaf: Callable[[str], Any]) -> dict[str, Any]:
    """Build values from their description, with `leaf(name)` for each array."""
    try:
        return _decode(spec, "", leaf)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} says what this version cannot read ({error!r}): update fisherjax"
        ) from error


def shape_of(spec: Any, name: str, arrays: dict[str, Kind]) -> tuple[int, ...] | None:
    """Give the shape of a leaf, if its description says it."""
    if spec == _ARRAY:
        return arrays[name].shape
    if spec.get("type") == Difference.__name__:
        return shape_of(spec["children"]["value"], joined(name, "value"), arrays)
    shape = spec.get("static", {}).get("shape")
    return None if shape is None else tuple(shape)


def flat(values: Mapping[str, Any], ordered: bool = False) -> dict[str, Any]:
    """Give values with params, and what is structured like them, as dicts by leaf name."""
    return {name: _flat_one(name, value, ordered) for name, value in values.items()}


def _flat_one(name: str, value: Any, ordered: bool = False) -> Any:
    # JAX sorts dicts by their keys, but bits of a stream and rows of a packed matrix stay as they
    # are: these are ordered as the leaves were.
    if name == "update" and isinstance(value, dict):
        return flat(value, ordered)
    if isinstance(value, Stream):
        return dataclasses.replace(value, values=flat(value.values, ordered=True))
    if isinstance(value, Dense) and not _is_array(value.matrix):
        return dataclasses.replace(value, template=_template(value.template))
    if isinstance(value, (Kronecker, Dense)):
        return value.select(value.template.names())
    if isinstance(value, Diagonal):
        return Diagonal(_flat_one("params", value.entries, ordered))
    # What is no params is data of a type that is known, which params may hold as well.
    if name != "params" or _is_known(value):
        return value
    leaves = jax.tree.leaves(value, is_leaf=_is_known)
    numbered = jax.tree.unflatten(jax.tree.structure(value, is_leaf=_is_known), range(len(leaves)))
    named = OrderedDict(zip(tree.names(numbered), leaves, strict=True))
    return named if ordered and not _is_sorted(named) else dict(named)


def _is_sorted(names: Sequence[str] | Mapping[str, Any]) -> bool:
    return list(names) == sorted(names)


def _template(template: Template) -> Template:
    """Give the template of a dict by leaf name, whose leaves are in the same order."""
    names = template.names()
    kind = dict if _is_sorted(names) else OrderedDict
    return Template(jax.tree.structure(kind.fromkeys(names, 0)), template.shapes)


def check_single(values: dict[str, Any]) -> None:
    """Refuse stacked values, which their operator tells, or what they are packed in."""
    for node in jax.tree.leaves(values, is_leaf=_is_scaled):
        if _is_scaled(node) and np.ndim(node.largest if isinstance(node, Codes) else node.step):
            raise ValueError(
                f"This update holds arrays {node.shape} of several clients; expected one client's: "
                "files.of_client(updates, i) takes one of many"
            )
    params, fisher = values.get("params"), values.get("fisher")
    if not (isinstance(fisher, (Kronecker, Dense)) and isinstance(params, Mapping)):
        return
    expected = dict(zip(fisher.template.names(), fisher.template.shapes, strict=True))
    for name, leaf in params.items():
        if _is_array(leaf) and expected.get(name) != leaf.shape:
            raise ValueError(
                f"Leaf '{name}' has shape {leaf.shape}, but its Fisher is of {expected.get(name)}; "
                "expected one client's update: files.of_client(updates, i) takes one of many"
            )


def encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Describe a value as JSON, and collect its arrays by name."""
    if isinstance(value, dict):
        for key in value:
            checks.instance(f"A key of '{name}'", key, str, "a string")
        inner = {key: encode(x, joined(name, key), arrays) for key, x in value.items()}
        return {"ordered" if isinstance(value, OrderedDict) else "dict": inner}
    if _is_known(value):
        fields = {x.name: x.metadata.get("static", False) for x in dataclasses.fields(value)}
        # Left out, so that files stay those of versions that did not know of a field.
        unsaid = {
            x.name
            for x in dataclasses.fields(value)
            if x.default is None and getattr(value, x.name) is None
        }
        children = {
            field: encode(getattr(value, field), joined(name, field), arrays)
            for field, static in fields.items()
            if not static
        }
        static = {
            field: _static(getattr(value, field), joined(name, field))
            for field, is_static in fields.items()
            if is_static and field not in unsaid
        }
        return {"type": type(value).__name__, "children": children, "static": static}
    if not (_is_array(value) or isinstance(value, (int, float))):
        raise TypeError(
            f"'{name}' is a {type(value).__name__}; a file holds arrays, dicts of them and "
            f"{', '.join(KNOWN)}. files.KNOWN takes other frozen dataclasses"
        )
    if name in arrays:
        raise ValueError(f"two leaves are called '{name}': rename a key that holds a '/'")
    arrays[name] = value if _is_array(value) else np.asarray(value)
    return _ARRAY


def _decode(spec: Any, name: str, leaf: Callable[[str], Any]) -> Any:
    if spec == _ARRAY:
        return leaf(name)
    for word, kind in (("dict", dict), ("ordered", OrderedDict)):
        if word in spec:
            return kind((x, _decode(s, joined(name, x), leaf)) for x, s in spec[word].items())
    children = {x: _decode(s, joined(name, x), leaf) for x, s in spec["children"].items()}
    static = {field: _from_static(x) for field, x in spec["static"].items()}
    return KNOWN[spec["type"]](**children, **static)


def _static(value: Any, name: str) -> Any:
    """Describe a static field as JSON."""
    if isinstance(value, Template):
        return {"Template": dict(zip(value.names(), value.shapes, strict=True))}
    if isinstance(value, Layer):
        return {"Layer": {field: _static(x, name) for field, x in value._asdict().items()}}
    # Of these types and no others: a tuple with a name would come back as a bare one.
    if type(value) in (tuple, list):
        return [_static(x, name) for x in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"'{name}' is static and a {type(value).__name__}; a file holds numbers, strings, None, "
        "tuples of those, Layer and Template"
    )


def _from_static(spec: Any) -> Any:
    if isinstance(spec, list):
        return tuple(map(_from_static, spec))
    if not isinstance(spec, dict):
        return spec
    [(kind, fields)] = spec.items()
    if kind == "Template":
        given = OrderedDict((name, tuple(shape)) for name, shape in fields.items())
        return _template(
            Template(jax.tree.structure(OrderedDict.fromkeys(given, 0)), (*given.values(),))
        )
    return {"Layer": Layer}[kind](**{name: _from_static(x) for name, x in fields.items()})


def joined(name: str, key: str) -> str:
    """Name what is inside."""
    return f"{name}/{key}" if name else key


def _is_known(value: Any) -> bool:
    return type(value) in KNOWN.values()


def _is_scaled(value: Any) -> bool:
    return isinstance(value, (Codes, Slot))


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
