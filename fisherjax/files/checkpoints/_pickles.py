"""Read what `torch.save` describes in a pickle, without running anything that the pickle names.

Python's own unpickler looks up functions and calls them. Here the operations are read one by one,
and those that call something are compared with a table of what describes a tensor: a tensor becomes
a record of its storage, offset, shape and strides, and whatever else is called is refused.
"""

import pickletools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax


class Storage(NamedTuple):
    """Numbers that tensors are views of: a record of the file, by its key."""

    key: str
    dtype: str
    size: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * itemsize(self.dtype)


class Tensor(NamedTuple):
    """A view of a storage; offset and strides count numbers of its dtype, not bytes."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(NamedTuple):
    """The name of a class or function, which is never imported."""

    name: str


_MOST_AXES = 64  # of NumPy and of PyTorch
_UNTYPED = "torch.storage.UntypedStorage"
_DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Byte": "uint8"},
    **{"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
# Types of which PyTorch has no storages of their own.
_LATER = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
_LATER += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_STORAGES = {f"torch.{x}Storage": dtype for x, dtype in _DTYPES.items()} | {_UNTYPED: "uint8"}
_TYPES = {f"torch.{x}": x for x in (*_DTYPES.values(), *_LATER)}


def read_pickle(file: BinaryIO) -> Any:
    """Read one pickle from where the file is: dicts, lists, tuples, numbers, text and tensors.

    Returns:
        What the pickle describes, in which `Tensor` stands for a tensor. Parts may be shared, or
        contain themselves: whoever walks through them limits the depth and the number of steps.

    Raises:
        ValueError: If the pickle is damaged, or names anything that does not describe a tensor.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(file):
        name = operation.name
        if name in _SIMPLE:
            stack.append(_SIMPLE[name](argument))
        elif name in _OF_STACK:
            size, change = _OF_STACK[name]
            if len(stack) < size:
                raise ValueError(f"its operation {name} has too few values")
            stack[-size:] = [change(*stack[-size:])]
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in _OF_MARK:
            stack, items = below.pop(), stack
            if name != "TUPLE":
                items = [stack.pop(), *items]
            stack.append(_OF_MARK[name](*items))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            # A dict: Python's own unpickler allocates a table as long as the largest number says.
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "STOP":
            [value] = stack
            return value
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the operation {name}, which torch.save does not write")
    raise ValueError("its pickle has no end")


def _number(value: int) -> int:
    # Longer ones could be made to collide in dicts, or take minutes to print.
    if not -(2**63) <= value < 2**64:
        raise ValueError("it has an integer of more than 64 bits")
    return value


def _named(name: str) -> _Global:
    """Return the name of a class or function that is known; raise if it is another one."""
    if name not in _STORAGES and name not in _TYPES and name not in _CALLS:
        raise ValueError(
            f"it has the Python object {name!r:.200}, which is not loaded: save "
            "model.state_dict() instead"
        )
    return _Global(name)


def _append(owner: list, *items: Any) -> list:
    if type(owner) is not list:
        raise ValueError(f"it appends to a {type(owner).__name__}")
    owner.extend(items)
    return owner


def _set(owner: dict, *items: Any) -> dict:
    if type(owner) is not dict:
        raise ValueError(f"it sets items of a {type(owner).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int):
            raise ValueError(f"a dict has a {type(key).__name__} as a key")
        if key in owner:
            raise ValueError(f"{key!r:.200} is there twice")
        owner[key] = value
    return owner


def _build(owner: Any, state: Any) -> Any:
    """Return a state dict without what PyTorch keeps beside it, the versions of its modules."""
    if type(owner) is not dict or type(state) is not dict or not state.keys() <= {"_metadata"}:
        raise ValueError(f"it sets attributes of a {type(owner).__name__}")
    return owner


def _persistent(about: tuple) -> Storage:
    word, kind, key, _, size, *view = about
    if word != "storage" or kind.name not in _STORAGES or any(x is not None for x in view):
        raise ValueError(f"it has {reprlib.repr(word)} where a storage is expected")
    if type(key) is not str or type(size) is not int or size < 0:
        raise ValueError(f"a storage has key {reprlib.repr(key)} and size {reprlib.repr(size)}")
    return Storage(key, _STORAGES[kind.name], size)


def _call(function: _Global, arguments: tuple) -> Any:
    if not isinstance(function, _Global) or function.name not in _CALLS:
        raise ValueError(f"it calls a {type(function).__name__}")
    return _CALLS[function.name](*arguments)


def _tensor(storage: Storage, *places: Any) -> Tensor:
    """Return a view of a storage with a type."""
    return _view(storage, storage.dtype, *places)


def _tensor_of_bytes(
    storage: Storage, offset: int, shape: tuple, strides: tuple, *more: Any
) -> Tensor:
    """Return a view of a storage of bytes, whose type comes last."""
    requires_grad, hooks, kind, *metadata = more
    dtype = _TYPES[kind.name]
    return _view(storage, dtype, offset, shape, strides, requires_grad, hooks, *metadata)


def _view(
    storage: Storage, dtype: str, offset: int, shape: tuple, strides: tuple, *more: Any
) -> Tensor:
    """Return a view that lies within its storage."""
    if not isinstance(storage, Storage):
        raise ValueError(f"a tensor is a view of a {type(storage).__name__}")
    # Whether gradients are required, hooks, and whether numbers are to be conjugated or negated.
    if any(more[1:]):
        raise ValueError("a tensor has hooks, or is conjugated or negated only when it is read")
    if len(shape) != len(strides) or len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor has {len(shape)} axes and {len(strides)} strides")
    if not all(type(x) is int and 0 <= x < 2**60 for x in (offset, *shape, *strides)):
        raise ValueError(f"a tensor has places {reprlib.repr((offset, *shape, *strides))}")
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    end = offset if 0 in shape else last + 1
    if end * itemsize(dtype) > storage.nbytes:
        raise ValueError(f"a tensor ends after its storage {reprlib.repr(storage.key)}")
    return Tensor(storage, dtype, offset, tuple(shape), tuple(strides))


def itemsize(dtype: str) -> int:
    """Return the size of a number of this type in bytes."""
    return jax.numpy.dtype(dtype).itemsize


def _parameter(tensor: Tensor, requires_grad: bool, hooks: Any) -> Tensor:
    del requires_grad
    if not isinstance(tensor, Tensor) or hooks:
        raise ValueError("a parameter is no tensor, or has hooks")
    return tensor


def _ordered(pairs: list | None = None) -> dict:
    made: dict[str | int, Any] = {}
    for key, value in pairs or ():
        _set(made, key, value)
    # A list that is named again and again is not copied as often.
    if pairs:
        pairs.clear()
    return made


def _size(shape: tuple) -> tuple:
    if type(shape) is not tuple:
        raise ValueError(f"a shape is a {type(shape).__name__}")
    return shape


_CALLS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
}
"""What a pickle may call, by name, and what is done in its place."""

_SIMPLE: Mapping[str, Callable[[Any], Any]] = {
    **{"NONE": lambda _: None, "NEWTRUE": lambda _: True, "NEWFALSE": lambda _: False},
    **{"EMPTY_DICT": lambda _: {}, "EMPTY_LIST": lambda _: [], "EMPTY_TUPLE": lambda _: ()},
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _number),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINFLOAT"), lambda x: x),
    # Texts of Python 2.
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda x: x),
    "GLOBAL": lambda words: _named(words.replace(" ", ".", 1)),
}
_OF_STACK: Mapping[str, tuple[int, Callable[..., Any]]] = {
    **{f"TUPLE{n}": (n, lambda *items: items) for n in (1, 2, 3)},
    **{"APPEND": (2, _append), "SETITEM": (3, _set), "BUILD": (2, _build)},
    **{"REDUCE": (2, _call), "BINPERSID": (1, _persistent)},
    # What is no text cannot be joined.
    "STACK_GLOBAL": (2, lambda module, name: _named(".".join((module, name)))),
}
"""Operations by name: how many values of the stack they take, and what they put there."""
_OF_MARK: Mapping[str, Callable[..., Any]] = {
    "TUPLE": lambda *items: items,
    "APPENDS": _append,
    "SETITEMS": _set,
}
"""Operations on all values after the last mark, the latter two with the one before it."""
