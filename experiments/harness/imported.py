"""Check what files of `--import` define, when it is read: by type, and data by shape and labels.

`where` begins every refusal: the file, the entry and its table. What an entry is expected to be
stands in `choices`.
"""

import functools
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from fisherjax.algorithms import LAWS, Algorithm, Row
from fisherjax.datasets import Dataset

_GIVES = get_args(get_type_hints(Row)["gives"])
_REAL = jnp.floating, jnp.integer, jnp.bool_
_PAIRS = (
    "expected training and test data, both a fj.datasets.Dataset or both a pair of inputs "
    "and targets"
)


def method(where: str, row: Any) -> Row:
    """Return a row whose factory refuses what is no algorithm."""
    if not isinstance(row, Row):
        raise ValueError(f"{where} is {_words(row)}, expected a fisherjax.algorithms.Row")
    if not callable(row.factory):
        raise ValueError(
            f"{where} has the factory {_words(row.factory)}, expected a function that returns a "
            "fisherjax.algorithms.Algorithm"
        )

    for name in ("label", "paper", "sends"):
        if not isinstance(word := getattr(row, name), str):
            raise ValueError(f"{where} has the {name} {_words(word)}, expected a text")
    if not _is_list(row.laws) or not set(row.laws) <= set(LAWS):
        raise ValueError(f"{where} has the laws {row.laws!r}, expected some of {', '.join(LAWS)}")
    if row.gives not in _GIVES:
        raise ValueError(f"{where} gives {_words(row.gives)}, expected one of {', '.join(_GIVES)}")

    @functools.wraps(row.factory)
    def factory(*args: Any, **options: Any) -> Algorithm:
        made = _called(where, row.factory, *args, **options)
        if not isinstance(made, Algorithm):
            raise ValueError(
                f"{where}: its factory returned {_words(made)}, expected a "
                "fisherjax.algorithms.Algorithm"
            )
        return made

    return row._replace(factory=factory)


def network(where: str, make: Any) -> Callable[..., nn.Module]:
    """Return a function of `num_classes` that refuses what is no flax module."""
    _takes(where, make, "a function of num_classes that returns a flax module", num_classes=2)

    @functools.wraps(make)
    def made(*, num_classes: int) -> nn.Module:
        found = _called(where, make, num_classes=num_classes)
        if not isinstance(found, nn.Module):
            raise ValueError(
                f"{where} returned {_words(found)}, expected a module of flax.linen: a class or "
                "an instance of another library is none"
            )
        return found

    return made


def data(where: str, read: Any) -> Callable[[Path | None], Any]:
    """Return a function of the folder of data that refuses what is no training and test data."""
    _takes(where, read, "a function of the folder of data, or None", None)

    @functools.wraps(read)
    def checked(folder: Path | None) -> Any:
        found = _called(where, read, folder)
        if _is_list(found) and len(found) == 2:
            kinds = {"Dataset" if isinstance(part, Dataset) else "pair" for part in found}
            pairs = (_is_list(part) and len(part) == 2 for part in found)
            if kinds == {"Dataset"} or (kinds == {"pair"} and all(pairs)):
                return _arrays(where, *found)
        raise ValueError(f"{where} returned {_words(found)}, {_PAIRS}")

    return checked


def _arrays(where: str, *parts: Any) -> tuple[Any, ...]:
    """Return data as arrays, with labels of int32."""
    splits = ("training", "test")
    xs, ys = ([_called(where, np.asarray, part[i]) for part in parts] for i in (0, 1))
    for split, part, x, y in zip(splits, parts, xs, ys, strict=True):
        if x.ndim < 2 or not any(jnp.issubdtype(x.dtype, k) for k in _REAL):
            raise ValueError(
                f"{where}: the inputs of the {split} data are {_words(part[0])}, expected an array "
                "of numbers [N, ...] with two axes or more"
            )
        if y.shape != x.shape[:1] or not len(y):
            raise ValueError(
                f"{where}: the {split} data have inputs {list(x.shape)} and targets "
                f"{list(y.shape)}, expected targets [N] for inputs [N, ...], with N of 1 or more"
            )
        _check_labels(f"{where}: the labels of the {split} data", y)
    if xs[0].shape[1:] != xs[1].shape[1:] or xs[0].dtype != xs[1].dtype:
        raise ValueError(
            f"{where}: the inputs of the test data are {_words(xs[1])}, expected the shape of an "
            f"example and the dtype of the training data, {_words(xs[0])}"
        )
    found, most = max(int(y.max()) for y in ys) + 1, len(ys[0])
    declared = [part.num_classes for part in parts if isinstance(part, Dataset)]
    for classes in declared:
        if not isinstance(classes, int | np.integer) or classes < found:
            raise ValueError(
                f"{where}: num_classes is {classes!r}, expected {found} or more, because labels "
                f"are up to {found - 1}"
            )
    if (classes := max([found, *declared])) > most:
        raise ValueError(
            f"{where}: {classes} classes (the largest label is {found - 1}) are more than the "
            f"{most} training examples: number the classes from 0"
        )
    ys = [y.astype(np.int32) for y in ys]
    if declared:
        return tuple(p._replace(inputs=x, targets=y) for p, x, y in zip(parts, xs, ys, strict=True))
    return tuple(zip(xs, ys, strict=True))


def _check_labels(what: str, labels: np.ndarray) -> None:
    expected = "expected integers from 0, one for each class"
    if labels.dtype.kind not in "iu":
        whole = labels.dtype.kind == "b"
        if jnp.issubdtype(labels.dtype, jnp.floating):
            whole = bool(np.all(labels == np.trunc(labels)))
        first = labels.ravel()[0].item()
        mend = "convert them with targets.astype(int)" if whole else "number the classes"
        raise ValueError(f"{what} are {labels.dtype}, such as {first!r}, {expected}: {mend}")
    if labels.min() < 0:
        raise ValueError(f"{what} are as low as {labels.min()}, {expected}")


def _takes(where: str, function: Any, expected: str, *args: Any, **options: Any) -> None:
    """Refuse what cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **options)
    except (TypeError, ValueError) as error:
        given = function if inspect.isroutine(function) else _words(function)
        raise ValueError(f"{where} is {given}, expected {expected} ({error})") from error


def _called(where: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of the file, which may raise anything."""
    try:
        return function(*args, **options)
    except (Exception, SystemExit) as error:
        # The first frame is this function, and compiled code has none.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        place = [f", {Path(x.filename).name} line {x.lineno}" for x in frames[-1:]]
        raise ValueError(f"{where} fails{''.join(place)}: {error!r}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _words(value: Any) -> str:
    """Describe a value by its type, its length or shape, and itself if it is short."""
    if isinstance(value, np.ndarray) or (hasattr(value, "dtype") and hasattr(value, "shape")):
        return f"an array {value.dtype}{list(value.shape)}"
    if _is_list(value) and not hasattr(value, "_fields"):
        kinds = ", ".join(type(part).__name__ for part in value[:4])
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
