"""Read and write records of TensorFlow, `tf.train.Example`, without TensorFlow."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def parse(record: bytes, names: Iterable[str]) -> list[Any]:
    """Return features of a serialised record: arrays of numbers, or the bytes of one text.

    Raises:
        ValueError: If the bytes are no record, or it lacks a feature.
    """
    from google.protobuf.message import DecodeError

    try:
        found = _proto().FromString(record).features.feature
    except DecodeError as error:
        raise ValueError(f"a record is no tf.train.Example ({error})") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"a record has the features {sorted(found)}; expected {missing} too")
    return [_value(found[name]) for name in names]


def _value(feature: Any) -> Any:
    if feature.bytes_list.value:
        return feature.bytes_list.value[0]
    if feature.int64_list.value:
        return np.array(feature.int64_list.value, np.int64)
    return np.array(feature.float_list.value, np.float32)


def of_text(name: str, text: str) -> bytes:
    """Return the serialised record of one text."""
    example = _proto()()
    example.features.feature[name].bytes_list.value.append(text.encode())
    return example.SerializeToString()


def _proto() -> Any:
    from tensorflow_datasets.proto import tf_example_pb2

    made: Any = tf_example_pb2  # its classes are made when it is imported
    return made.Example
