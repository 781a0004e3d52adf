"""Messages as Flower's records: a description, and arrays as the bytes of a file.

The file travels as one array of bytes, which Flower cuts into chunks. Flower's own conversion of
arrays is not used, as it corrupts bfloat16; and nothing that arrives is unpickled.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fisherjax.files.base import version

FORMAT = 1
"""Version of the messages. Sides of different formats do not work together."""
HELLO, TRAIN, EXCHANGE, SECURE = "query.hello", "train", "query.exchange", "query.secure"
"""Types of the messages, as Flower names them."""
_ABOUT, _FILE = "fisherjax", "file"
_SERIALIZATION = "fisherjax.safetensors"

Result = TypeVar("Result")


def content(about: Mapping[str, Any], file: bytes | None = None) -> RecordDict:
    """Make the content of a message from its description and the bytes of a file."""
    own = {"version": version(), "format": FORMAT}
    records: dict[str, Any] = {_ABOUT: ConfigRecord({**own, **about})}
    if file is not None:
        records[_FILE] = file_record(file)
    return RecordDict(records)


def file_record(file: bytes) -> ArrayRecord:
    """Make Flower's record of a file."""
    return ArrayRecord({_FILE: Array("uint8", (len(file),), _SERIALIZATION, file)})


def file_of(record: Any) -> bytes:
    """Return the bytes of a file from Flower's record.

    Raises:
        ValueError: If the record holds anything else.
    """
    array = record.get(_FILE) if isinstance(record, ArrayRecord) else None
    if array is None or len(record) != 1 or array.stype != _SERIALIZATION:
        raise ValueError(
            f"the message has no file of arrays; expected one array '{_FILE}' of type "
            f"{_SERIALIZATION}, as fisherjax.flower sends it"
        )
    return array.data


def opened(records: RecordDict) -> tuple[dict[str, Any], bytes | None]:
    """Check the versions of a message, and return its description and the bytes of its file.

    Raises:
        ValueError: If it is no message of fisherjax, or has another format.
    """
    about = records.get(_ABOUT)
    if not isinstance(about, ConfigRecord):
        raise ValueError(
            "the message has no description; expected one of fisherjax.flower: use its apps on "
            "both sides"
        )
    if about.get("format") != FORMAT:
        raise ValueError(
            f"the message is of fisherjax {about.get('version')!r:.40} and has format "
            f"{about.get('format')!r:.40}, but this side is fisherjax {version()} with format "
            f"{FORMAT}: install the same version on both sides"
        )
    return dict(about), file_of(records[_FILE]) if _FILE in records else None


def field(about: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return an entry of a description; raise ValueError if it is missing or has another type."""
    value = about.get(name)
    if type(value) is not kind:
        raise ValueError(f"the message has {name} {value!r:.80}; expected a {kind.__name__}")
    return value


def upload_file(reply: Message) -> bytes:
    """Return the file of a client's reply.

    Where files hold the algorithm's updates, these are the bytes of an upload, which
    `files.load_update` and `files.merge_files` read, its SHA-256 included.

    Raises:
        ValueError: If the reply has no file, or is of another version.

    Example: see `strategy`.
    """
    file = opened(reply.content)[1]
    if file is None:
        raise ValueError("the message has no file; expected the reply of a client that trained")
    return file


def written(write: Callable[[Path], None]) -> bytes:
    """Return the bytes of a .safetensors file that a function writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.safetensors")
        write(path)
        return path.read_bytes()


def read(file: bytes, function: Callable[[Path], Result]) -> Result:
    """Return what a function reads from a .safetensors file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.safetensors")
        path.write_bytes(file)
        try:
            return function(path)
        except ValueError as error:
            # The place is gone when somebody reads the error.
            raise ValueError(str(error).replace(f"{folder}/", "")) from error
