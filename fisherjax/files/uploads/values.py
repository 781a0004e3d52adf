"""Describe the values of an update as JSON and named arrays, and make values of a description.

Params of any structure become a dict by leaf name, and operators act on that dict.
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
from fisherjax.files._limits import ArrayKind
from fisherjax.fisher import Dense, Diagonal, Kronecker
from fisherjax.fisher.operators import Template

# The tables of types that a file may name. Anything else in a file is refused.
_OPERATORS = Diagonal, Dense, Kronecker
_ENCODED = Codes, Difference, Root, Slot, Squares, Stream, Triangle, Truncated
VALUE_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*_OPERATORS, Wiring, *_ENCODED)}
"""Frozen dataclasses that a file can hold, by name. Their children are arrays, dicts of arrays, or
such dataclasses; their static fields are numbers, strings, None, tuples, `Layer` and `Template`."""

_ARRAY = "array"


def decode(path: Path, spec: Any, leaf: Callable[[str], Any]) -> dict[str, Any]:
    """Make values from their description, with `leaf(name)` for each array."""
    try:
        return _decode(spec, "", leaf)
    # A later version may describe values in ways that are not known here.
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the header of {str(path)!r} has a description that this version cannot read "
            f"({error!r}): update fisherjax"
        ) from error


def shape_of(spec: Any, name: str, arrays: dict[str, ArrayKind]) -> tuple[int, ...] | None:
    """Return the shape of a leaf, or None if its description has no shape."""
    if spec == _ARRAY:
        return arrays[name].shape
    # The value of a difference has the shape of the leaf that it is added to.
    if spec.get("type") == Difference.__name__:
        return shape_of(spec["children"]["value"], joined(name, "value"), arrays)
    shape = spec.get("static", {}).get("shape")
    return None if shape is None else tuple(shape)


def flat(values: Mapping[str, Any], ordered: bool = False) -> dict[str, Any]:
    """Return values whose params, and trees of the same structure, are dicts by leaf name."""
    return {name: _flat_one(name, value, ordered) for name, value in values.items()}


def _flat_one(name: str, value: Any, ordered: bool = False) -> Any:
    # JAX sorts the keys of a dict, but the bits of a stream and the rows of a packed matrix are in
    # the order of the original leaves: these need an OrderedDict.
    if name == "update" and isinstance(value, dict):
        return flat(value, ordered)
    if isinstance(value, Stream):
        return dataclasses.replace(value, values=flat(value.values, ordered=True))
    if isinstance(value, Dense) and not _is_array(value.matrix):
        return dataclasses.replace(value, template=_template(value.template))
    if isinstance(value, (Kronecker, Dense)):
        # Selected by name in the order of the template, so that the operator acts on the flat dict.
        return value.select(value.template.names())
    if isinstance(value, Diagonal):
        return Diagonal(_flat_one("params", value.entries, ordered))
    # Nodes of VALUE_TYPES stay as they are, also inside of params.
    if name != "params" or _is_known(value):
        return value
    leaves = jax.tree.leaves(value, is_leaf=_is_known)
    numbered = jax.tree.unflatten(jax.tree.structure(value, is_leaf=_is_known), range(len(leaves)))
    named = OrderedDict(zip(tree.names(numbered), leaves, strict=True))
    return named if ordered and not _is_sorted(named) else dict(named)


def _is_sorted(names: Sequence[str] | Mapping[str, Any]) -> bool:
    return list(names) == sorted(names)


def _template(template: Template) -> Template:
    """Return the template of a dict by leaf name, with the leaves in the same order."""
    names = template.names()
    kind = dict if _is_sorted(names) else OrderedDict
    return Template(jax.tree.structure(kind.fromkeys(names, 0)), template.shapes)


def check_single(values: dict[str, Any]) -> None:
    """Check that values are of one client, as far as codes and operators have shapes."""
    for node in jax.tree.leaves(values, is_leaf=_is_scaled):
        # One client's code has one scale; stacked codes have one for each client.
        if _is_scaled(node) and np.ndim(node.largest if isinstance(node, Codes) else node.step):
            raise ValueError(
                f"This update holds arrays {node.shape} of several clients; expected one client's: "
                "select it with files.of_client(updates, i)"
            )
    params, fisher = values.get("params"), values.get("fisher")
    if not (isinstance(fisher, (Kronecker, Dense)) and isinstance(params, Mapping)):
        return
    expected = dict(zip(fisher.template.names(), fisher.template.shapes, strict=True))
    for name, leaf in params.items():
        if _is_array(leaf) and expected.get(name) != leaf.shape:
            raise ValueError(
                f"Leaf '{name}' has shape {leaf.shape}, but its Fisher {expected.get(name)}; "
                "expected one client's update: select it with files.of_client(updates, i)"
            )


def encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Describe a value as JSON, and collect its arrays by name."""
    if isinstance(value, dict):
        for key in value:
            # JSON would turn other keys into strings, and the dict that is read would be another.
            checks.instance(f"A key of '{name}'", key, str, "a string")
        entries = {key: encode(x, joined(name, key), arrays) for key, x in value.items()}
        return {"ordered" if isinstance(value, OrderedDict) else "dict": entries}
    if _is_known(value):
        children, static = {}, {}
        for field in dataclasses.fields(value):
            inner, key = getattr(value, field.name), joined(name, field.name)
            if not field.metadata.get("static", False):
                children[field.name] = encode(inner, key, arrays)
            # A field that is None by default is left out, so that older versions read the file.
            elif not (inner is None and field.default is None):
                static[field.name] = _static(inner, key)
        return {"type": type(value).__name__, "children": children, "static": static}
    if not (_is_array(value) or isinstance(value, (int, float))):
        raise TypeError(
            f"'{name}' is a {type(value).__name__}; expected an array, a dict of arrays, or one of "
            f"{', '.join(VALUE_TYPES)}. Add another frozen dataclass to files.VALUE_TYPES"
        )
    # The second array would replace the first in the file.
    if name in arrays:
        raise ValueError(f"two leaves are called '{name}': rename a key that holds a '/'")
    arrays[name] = value if _is_array(value) else np.asarray(value)
    return _ARRAY


def _decode(spec: Any, name: str, leaf: Callable[[str], Any]) -> Any:
    if spec == _ARRAY:
        return leaf(name)
    # The order of the original leaves is kept where it matters, as JAX sorts a dict's keys.
    for word, kind in (("dict", dict), ("ordered", OrderedDict)):
        if word in spec:
            return kind((x, _decode(s, joined(name, x), leaf)) for x, s in spec[word].items())
    children = {x: _decode(s, joined(name, x), leaf) for x, s in spec["children"].items()}
    static = {field: _from_static(x) for field, x in spec["static"].items()}
    return VALUE_TYPES[spec["type"]](**children, **static)


def _static(value: Any, name: str) -> Any:
    """Describe a static field as JSON."""
    if isinstance(value, Template):
        return {"Template": dict(zip(value.names(), value.shapes, strict=True))}
    if isinstance(value, Layer):
        # Older versions of this library know no groups.
        fields = {x: y for x, y in value._asdict().items() if x != "groups" or y}
        return {"Layer": {field: _static(x, name) for field, x in fields.items()}}
    # Exactly these types: a named tuple would be read as a plain tuple.
    if type(value) in (tuple, list):
        return [_static(x, name) for x in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"'{name}' is static and a {type(value).__name__}; expected a number, a string, None, a "
        "tuple of these, a Layer or a Template"
    )


def _from_static(spec: Any) -> Any:
    if isinstance(spec, list):
        return tuple(map(_from_static, spec))
    if not isinstance(spec, dict):
        return spec
    # Named tuples are written as a dict of one entry, their name.
    [(kind, fields)] = spec.items()
    if kind == "Template":
        shapes = OrderedDict((name, tuple(shape)) for name, shape in fields.items())
        return _template(
            Template(jax.tree.structure(OrderedDict.fromkeys(shapes, 0)), (*shapes.values(),))
        )
    return {"Layer": Layer}[kind](**{name: _from_static(x) for name, x in fields.items()})


def joined(name: str, key: str) -> str:
    """Return the name of an entry of a dict or a dataclass called `name`."""
    return f"{name}/{key}" if name else key


def _is_known(value: Any) -> bool:
    return type(value) in VALUE_TYPES.values()


def _is_scaled(value: Any) -> bool:
    return isinstance(value, (Codes, Slot))


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
