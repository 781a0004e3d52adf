"""Read and write records of TensorFlow, `tf.train.Example`, without TensorFlow."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def parse(record: bytes, kinds: Mapping[str, str]) -> list[Any]:
    """Return features of a serialised record by their kinds: bytes of one text, or an array.

    Raises:
        ValueError: If the bytes are no record, it lacks a feature, or a feature is of another kind.
    """
    from google.protobuf.message import DecodeError

    try:
        found = _proto().FromString(record).features.feature
    except (DecodeError, TypeError) as error:
        raise ValueError(f"a record is no tf.train.Example ({error})") from error
    missing = [name for name in kinds if name not in found]
    if missing:
        raise ValueError(f"a record has the features {sorted(found)}; expected {missing} too")
    return [_value(name, found[name], kind) for name, kind in kinds.items()]


def _value(name: str, feature: Any, kind: str) -> Any:
    # A feature without a value has no kind.
    if (given := feature.WhichOneof("kind") or kind) != kind:
        raise ValueError(f"the feature {name!r} of a record is a {given}; expected a {kind}")
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return values[0] if values else b""
    return np.array(values)


def of_text(name: str, text: str) -> bytes:
    """Return the serialised record of one text."""
    example = _proto()()
    example.features.feature[name].bytes_list.value.append(text.encode())
    return example.SerializeToString()


def _proto() -> Any:
    from tensorflow_datasets.proto import tf_example_pb2

    made: Any = tf_example_pb2  # its classes are made when it is imported
    return made.Example
