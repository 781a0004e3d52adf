"""Check the sizes and shapes of an upload's values, before memory for them is allocated.

A short file can describe codes that decode to huge arrays, or curvature that does not belong to its
params. Both are found from shapes alone: arrays may be `jax.ShapeDtypeStruct`.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fisherjax import compression, tree
from fisherjax._layers.graph import Wiring
from fisherjax._layers.layer import Layer
from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.fisher import Dense, Diagonal, Kronecker, Operator


def check_sizes(
    path: Path, client: str | None, values: Mapping[str, Any], nbytes: int, limits: Limits
) -> dict[str, ArrayKind]:
    """Check the sizes and shapes of the values that an upload decodes to.

    Args:
        path: Path of the file, for errors.
        client: Name of the client, for errors; None for a file that is of no client.
        values: Values as described, of arrays or of `jax.ShapeDtypeStruct`.
        nbytes: Size of the file in bytes.
        limits: Limits for the decoded size.

    Returns:
        Kinds of all decoded arrays, by name.

    Raises:
        ValueError: If the values decode to too many bytes, or curvature does not fit the params.
            The error names the file, the client and the leaf.
    """
    where = repr(str(path)) if client is None else f"{str(path)!r} of client {client!r}"
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} holds a {type(values).__name__}; expected a dict of values.")
    try:
        # Codes declare to which shapes they decode. The sum of these is compared with the bytes of
        # the file, as the values of a few bytes could fill the memory.
        found = compression.declared(values.get("update", values), limits.expansion * nbytes)
        if not isinstance(found, Mapping):
            raise ValueError(f"an update is a {type(found).__name__}; expected a dict of values")
        # An empty update would pass every comparison with params.
        if "update" in values and not jax.tree.leaves(found):
            raise ValueError("an update has no arrays; expected those of its params")
        for name, kind, *expected in _expected(found):
            # A wrong shape would be broadcast in a product, and give a wrong model without an
            # error.
            if tuple(kind.shape) not in expected:
                shapes = " or ".join(str(list(shape)) for shape in expected)
                raise ValueError(
                    f"{name} is {ArrayKind.of(kind)}, expected {shapes} to fit its params"
                )
        if isinstance(found.get("wiring"), Wiring):
            _check_wiring(found["wiring"], found["params"])
    # A description can be wrong in any way, and every way is the client's fault, not a crash.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        mend = (
            "write it again for its params" if client is None else "ask the client to send it again"
        )
        raise ValueError(
            f"{where} cannot be decoded ({reason}): {mend}. If you trust its sender and its codes "
            "decode to more bytes than usual, raise the limit: limits=files.Limits(expansion=...), "
            "or --limit expansion=..."
        ) from error
    return {name: ArrayKind.of(x) for name, x in tree.by_name(found).items() if hasattr(x, "dtype")}


def is_shape(value: Any) -> bool:
    """Return whether a value is a list of axes whose lengths are integers, as JSON holds them."""
    # NumPy supports no more axes; the product of very many would take long.
    is_list = isinstance(value, list | tuple) and len(value) <= 32
    # Booleans are integers in Python, but no lengths.
    return is_list and all(type(x) is int and 0 <= x < 2**60 for x in value)


def _expected(values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield each array that belongs to params, with its name and the shapes that it may have."""
    params, fisher = values.get("params"), values.get("fisher")
    if not isinstance(params, Mapping):
        return
    # Params are flat: of an inner dict no leaf would have a name that a merge knows.
    if inner := [name for name, x in params.items() if isinstance(x, Mapping)]:
        raise ValueError(f"params/{inner[0]} is a dict; expected an array")
    shapes = {name: tuple(x.shape) for name, x in params.items() if hasattr(x, "shape")}
    # The template of an operator has the shapes of all leaves, even of encoded params.
    if isinstance(fisher, Dense | Kronecker):
        # Compared with the params where these have shapes; encoded params have none.
        known = dict(zip(fisher.template.names(), fisher.template.shapes, strict=True))
        for name in known.keys() & shapes.keys():
            if shapes[name] != known[name]:
                kind = ArrayKind.of(params[name])
                expected = kind._replace(shape=known[name])
                raise ValueError(f"params/{name} is {kind}, expected {expected} as in its Fisher")
        shapes = known | shapes
    if isinstance(fisher, Dense):
        # The matrix of all leaves has one row for each of their numbers.
        total = sum(map(math.prod, known.values()))
        yield "fisher/matrix", fisher.matrix, (total, total)
    if isinstance(fisher, Kronecker):
        yield from _factors(fisher, shapes)
    if isinstance(fisher, Diagonal):
        known = tree.by_name(fisher.entries)
        yield from ((f"fisher/{n}", x, shapes[n]) for n, x in known.items() if n in shapes)
    # A merge selects every leaf of the params from the operator.
    if isinstance(fisher, Operator) and (missing := sorted(params.keys() - known.keys())):
        raise ValueError(f"its Fisher lacks the leaves {reprlib.repr(missing)}")
    grams = values.get("grams")
    of_grams = [name.removesuffix("^T") for name in grams] if isinstance(grams, Mapping) else []
    # The curvature of other leaves would be ignored, as that of a leaf by another name.
    if more := sorted({*(known if isinstance(fisher, Operator) else ()), *of_grams} - {*params}):
        raise ValueError(
            f"it has curvature of {reprlib.repr(more)}, which are not among its params"
        )
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
    # Every leaf is covered exactly once: by two factors, by a block or by its diagonal.
    if (set(fisher.factors), set(fisher.entries)) != (expected, diagonal):
        raise ValueError(
            f"a Fisher has factors of {reprlib.repr(sorted(fisher.factors))} and entries of "
            f"{reprlib.repr(sorted(fisher.entries))}; expected {reprlib.repr(sorted(expected))} "
            f"and {reprlib.repr(sorted(diagonal))}"
        )
    for name, layer in layers.items():
        # A layer may be a part of its leaf, such as one of several heads, but never more.
        if math.prod(layer.shape) > math.prod(shapes[layer.leaf]):
            raise ValueError(
                f"layer '{name}' has shape {layer.shape}, expected at most the size of its leaf, "
                f"{shapes[layer.leaf]}"
            )
        # The bias is one more row of the layer's matrix.
        rows, columns = layer.rows + (layer.bias is not None), layer.columns
        if layer.form == "scale":
            yield f"fisher/{name}", fisher.entries[name], (rows, rows, columns)
            continue
        # A vector [size] is a diagonal factor, as of one-hot inputs.
        for side, size in (("input", rows), ("output", columns)):
            shapes_of_side = (
                ((*layer.stack, size, size),) if layer.groups else ((size,), (size, size))
            )
            yield f"fisher/{name}/{side}", fisher.factors[name][side], *shapes_of_side
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
    # Matching follows the sources from layer to layer, and must not leave the list of layers.
    has_sources = len(sources) == len(layers) and all(
        place in places for feeding in sources for place in feeding
    )
    has_spans = len(spans) == len(layers) and all(
        len(span) == 2 and is_shape(span) for span in spans
    )
    if not (layers and has_leaves and has_sources and has_spans):
        raise ValueError("its wiring does not fit the layers of its params")
