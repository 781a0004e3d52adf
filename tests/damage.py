"""Damage files in ways that accidents and adversaries do, the same for the same seed."""

import copy
import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

LENGTH, UNKNOWN = 8, "0" * 64
STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e300, float("nan"), float("inf")),
    *(2**31, 2**63, 2**64, -(2**70), 10**400, "", "x", "array", "x" * 3000, "a/b", "../w"),
    *("\x1b[31m", "a\nb", "\u202ea", "\ud800", "\0", "true", "float32", "params", "update"),
    *([], {}, [[]], [0], [1, 2], [2**40], [2**40, 2**40], ["x"], [None], [True], [-1, -4], [1.5]),
    *({"dict": {}}, {"dict": []}, {"dict": {"w": "array"}}, {"type": "Codes"}, {"x": {}}),
    {"type": "Root", "children": {"columns": "array"}, "static": {}},
    {"Layer": {}},
    {"Template": {"w": [2, 2]}},
]
"""Values of JSON that a program may not expect."""


def bytes_of(content: bytes, source: random.Random) -> bytes:
    """Flip, cut, append, overwrite, repeat, remove or exchange bytes."""
    data, size = bytearray(content), len(content)
    first, span = source.randrange(size), source.choice((1, 2, 8, 64, 300))
    match source.randrange(8):
        case 0 | 1:
            data[first] ^= 1 << source.randrange(8)
        case 2:
            del data[first:]
        case 3:
            data += source.randbytes(span)
        case 4:
            data[first : first + span] = source.randbytes(len(data[first : first + span]))
        case 5:
            data[first:first] = data[first : first + span]
        case 6:
            del data[first : first + span]
        case _:
            # In the header, where a byte means most.
            place = source.randrange(min(size, 400))
            data[place] = source.randrange(256)
    return bytes(data)


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """List the container and the key of every value within a tree of JSON."""
    found: list[tuple[Any, Any]] = []
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in inner:
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += places_in(value)
    return found


def json_of(tree: Any, source: random.Random) -> None:
    """Change one value of a tree of JSON in place: another value, type, name, depth or none."""
    places = places_in(tree)
    if not places:
        return
    owner, key = source.choice(places)
    value, (other, name) = owner[key], source.choice(places)
    match source.randrange(11):
        case 0 | 1 | 2 | 3:
            owner[key] = copy.deepcopy(source.choice(STRANGE))
        case 4:
            del owner[key]
        case 5:
            owner[key] = copy.deepcopy(other[name])
        case 6 if isinstance(owner, dict):
            owner[str(source.choice(STRANGE))] = owner.pop(key)
        case 7 if isinstance(owner, dict):
            owner[str(source.choice(STRANGE))] = copy.deepcopy(value)
        case 8 if isinstance(value, int):
            owner[key] = value + source.choice((-1, 1, 8))
        case 9:
            owner[key] = source.choice(([value], {"dict": value}, {key: value}, [value, value]))
        case 10:
            owner[key] = source.choice(("DEEP 40", "DEEP 90", "DEEP 3000"))
        case _:
            owner[key] = str(value)


def json_text_of(content: bytes, source: random.Random) -> bytes:
    """Change values of a file of JSON."""
    tree = json.loads(content)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        json_of(tree, source)
    return text_of(tree).encode("utf-8", "surrogatepass")


def text_of(tree: Any) -> str:
    """Write JSON, where "DEEP 90" stands for 90 lists in one another."""
    text = json.dumps(tree, separators=(",", ":"))
    return re.sub(r'"DEEP (\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


def opened(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Read the header and the data of a .safetensors file."""
    end = LENGTH + int.from_bytes(content[:LENGTH], "little")
    return json.loads(content[LENGTH:end]), content[end:]


def closed(header: Any, data: bytes, source: random.Random | None = None) -> bytes:
    """Write a .safetensors file; with a source, sometimes with a name that is there twice."""
    text = text_of(header)
    if source is not None and not source.randrange(8) and text[0] == "{" and text != "{}":
        name = source.choice(list(header))
        text = f"{text[:-1]},{json.dumps(name)}:{text_of(header[name])}}}"
    text += " " * (-len(text) % LENGTH)
    return len(text).to_bytes(LENGTH, "little") + text.encode() + data


def header_of(content: bytes, source: random.Random) -> bytes:
    """Change the entries of a .safetensors file, whatever its data."""
    header, data = opened(content)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        json_of(header, source)
    return closed(header, data, source)


def sealed_of(content: bytes, source: random.Random) -> bytes:
    """Change a sealed file as somebody does who seals it again: description, entries or data."""
    header, data = opened(content)
    meta = header["__metadata__"]
    about = json.loads(meta["fisherjax"])
    how = source.randrange(10)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        if how < 7:
            json_of(about, source)
        elif how == 7:
            shape_of(header, source)
        elif how == 8:
            data = bytes_of(data, source)[: len(data)].ljust(len(data), b"\0")
        else:
            entries = {x: y for x, y in header.items() if x != "__metadata__"}
            json_of(entries, source)
            header = {"__metadata__": meta} | entries
    meta["fisherjax"] = text_of(about)
    return sealed(header, data, source)


def shape_of(header: dict[str, Any], source: random.Random) -> None:
    """Give an array another shape or type of as many bytes."""
    entry = source.choice([x for name, x in header.items() if name != "__metadata__"])
    shape, dtype = entry["shape"], entry["dtype"]
    match source.randrange(4):
        case 0:
            entry["shape"] = shape[::-1]
        case 1:
            entry["shape"] = [*shape, *[1] * source.choice((1, 2, 40))]
        case 2:
            size = 1
            for axis in shape:
                size *= axis
            entry["shape"] = [size]
        case _:
            same = {"F32": ("I32", "U32"), "U8": ("I8", "BOOL"), "F16": ("BF16", "I16")}
            entry["dtype"] = source.choice(same.get(dtype, (dtype,)))


def sealed(header: dict[str, Any], data: bytes, source: random.Random | None = None) -> bytes:
    """Write a sealed file whose digest is that of its bytes; with a source as `closed` does."""
    meta = header.get("__metadata__")
    if isinstance(meta, dict) and "sha256" in meta:
        meta["sha256"] = UNKNOWN
    content = closed(header, data, source)
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(UNKNOWN.encode(), digest.encode(), 1)


def archive_of(content: bytes, source: random.Random) -> bytes:
    """Change the members of an .npz archive, whose checksums are right again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(x.filename, archive.read(x)) for x in archive.infolist()]
    place = source.randrange(len(members))
    name, data = members[place]
    length = 10 + int.from_bytes(data[8:10], "little")
    match source.randrange(9):
        case 0:
            members[place] = name, bytes_of(data, source)
        case 1:
            members.append((source.choice(members)[0], data))
        case 2:
            del members[place]
        case 3:
            names = ("x", "a.npy.npy", "../a.npy", "\x1b.npy", ".npy", "a/.npy", "x" * 2000)
            members[place] = source.choice(names), data
        case 4:
            members[place] = name, data[: source.randrange(len(data))]
        case 5:
            members[place] = name, data + source.randbytes(source.choice((1, 8, 99)))
        case _:
            header = data[10:length].decode("latin1")
            for _ in range(source.choice((1, 1, 2))):
                header = source.choice(EDITS)(header)
            text = header.rstrip().encode("latin1", "replace")[:60_000] + b"\n"
            members[place] = name, data[:8] + len(text).to_bytes(2, "little") + text + data[length:]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", source.choice((0, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in members:
            # By hand, because `writestr` warns of a name that is there twice.
            archive.NameToInfo.pop(name, None)
            archive.writestr(name, data)
    return file.getvalue()


def pickle_of(content: bytes, source: random.Random) -> bytes:
    """Change the pickle of a file of PyTorch, whose checksums are right again."""
    if not content.startswith(b"PK"):
        return PICKLE_OF_SEQUENCE + operations_of(content[len(PICKLE_OF_SEQUENCE) :], source)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {x.filename: archive.read(x) for x in archive.infolist()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            is_pickle = name.endswith("data.pkl")
            archive.writestr(name, operations_of(data, source) if is_pickle else data)
    return file.getvalue()


def operations_of(content: bytes, source: random.Random) -> bytes:
    """Exchange bytes of a pickle, most of them by operations and numbers that pickles have."""
    data = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 3))):
        place = source.randrange(min(len(data), 2000))
        data[place : place + source.randrange(2)] = source.choice(OPERATIONS)
    return bytes(data)


PICKLE_OF_SEQUENCE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
OPERATIONS = [
    bytes([x]) for x in b"(tN).]}aesuRQbcqrhjJKMXGi\x81\x85\x86\x87\x88\x8a\x93\x94\0\x01\xff"
]
OPERATIONS += [b"h\x01", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"cos\nsystem\n", b"]h\x01a"]


def replaced(old: str, *new: str) -> Callable[[str], str]:
    """Make an edit of a header; which replacement it takes goes by the header's length."""
    return lambda text: text.replace(old, new[len(text) % len(new)], 1)


EDITS = [
    *(replaced("'shape': (", f"'shape': ({axis}, ") for axis in (0, 1, 10**12, -1, "1" * 400)),
    *(replaced("'<f4'", f"'{x}'") for x in ("|O", "<f8", ">f4", "<U4", "<M8[s]", "<c8", "f99")),
    replaced("'<f4'", "[('a', '<f4')]", "['<f4'] * 10 ** 9", "1" * 400, "()"),
    replaced("'shape': (", "'shape': (1,)* 10 ** 9 + (", "'shape': ('x', ", "'shape': None, ("),
    replaced("False", "True", "None", "[" * 200, "0x" + "f" * 500),
    replaced("'descr'", "'shape'", "'other'", "descr", "b'descr'"),
    lambda text: text[: len(text) // 2],
    lambda text: "(" * 3000 + text,
]
"""Edits of the text in which NumPy says the type, the order and the shape of an array."""
