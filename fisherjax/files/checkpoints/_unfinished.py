"""Write large files piece by piece, so that a process that was killed goes on where it was.

The unfinished files lie in a folder beside the result, which has the result's name and ends in
`.unfinished`. A journal there says which arrays are complete, with a checksum of each. What does
not fit its checksums, or belongs to another merge, is begun anew. An error removes the folder.
"""

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fisherjax.files import base
from fisherjax.files._limits import ArrayKind
from fisherjax.files._paths import locked

# Hidden, as hidden files are not copied from a checkpoint's folder, so that none has this name.
_JOURNAL = ".journal"


class Shard(NamedTuple):
    """A file to write.

    Attributes:
        kinds: Kinds of its arrays, by name.
        header: Its bytes before the arrays.
        places: Place of each array's first byte.
    """

    kinds: dict[str, ArrayKind]
    header: bytes
    places: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(kind.nbytes for kind in self.kinds.values())


class Output(NamedTuple):
    """Functions that write the arrays, and what an earlier process has left.

    Attributes:
        put: (name of an array, its next entries) -> None.
        finish: name of an array -> None, when all of its entries are written.
        note: (word, value of JSON) -> None, for what need not be computed again.
        done: Names of the arrays that are complete.
        notes: Values by word.
        folder: The folder of unfinished files, for others that belong to the result.
    """

    put: Callable[[str, Any], None]
    finish: Callable[[str], None]
    note: Callable[[str, Any], None]
    done: set[str]
    notes: dict[str, Any]
    folder: Path


@contextlib.contextmanager
def unfinished(out: Path, shards: dict[str, Shard], key: str, more: int = 0) -> Iterator[Output]:
    """Write files, which replace `out` in the end: one file of its name, or else a folder.

    Args:
        out: The file, or the folder, to write.
        shards: What to write, by the name of the file.
        key: Text that differs for merges of other files, or by other methods.
        more: Bytes of further files, which the caller writes into the folder.

    Raises:
        OSError: If the disk has too little space, another process writes the same result, or the
            folder beside it is not one of unfinished files.
    """
    target = Path(os.path.realpath(out))
    folder = target.with_name(f"{target.name}.unfinished")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(folder.parent)!r} does not exist: make it first")
    _check_own(folder, shards)
    existing = [path for path in folder.rglob("*") if path.is_file()]
    needed = sum(each.nbytes for each in shards.values()) + more
    needed -= sum(min(path.stat().st_blocks * 512, path.stat().st_size) for path in existing)
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise OSError(
            f"{str(out)!r} needs {needed / 1e9:.2f} GB more, but its disk has {free / 1e9:.2f} GB "
            "free: make room, or write to another disk"
        )
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError as error:
            raise OSError(f"another process writes {str(out)!r}: wait until it ends") from error
        except OSError:  # a file system without locks cannot tell
            pass
        try:
            output, files, hashed = _opened(stack, folder, shards, key)
            yield output
            for name, file in files.items():
                if left := shards[name].kinds.keys() - output.done:
                    raise ValueError(f"{sorted(left)} were not written; expected all arrays")
                base.write_digest(file, shards[name].header, *hashed[name])
                # The bytes reach the disk before the name does.
                file.flush()
                os.fsync(file.fileno())
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / _JOURNAL).unlink()
        if out.name in shards:
            os.replace(folder / out.name, target)
            shutil.rmtree(folder)
        else:
            os.replace(folder, target)


def _check_own(folder: Path, shards: Mapping[str, Shard]) -> None:
    """Check that a folder is new, or that an unfinished merge left it, as it will be removed."""
    is_own = not folder.exists() or (folder.is_dir() and not folder.is_symlink())
    if is_own and folder.exists() and not (folder / _JOURNAL).exists():
        # A process that was killed early left nothing but new files.
        is_own = {path.name for path in folder.iterdir()} <= shards.keys()
    if not is_own:
        raise FileExistsError(
            f"{str(folder)!r} is needed for unfinished files, but it exists, and no merge wrote "
            "it: rename it, or write to another place"
        )


def _opened(
    stack: contextlib.ExitStack, folder: Path, shards: dict[str, Shard], key: str
) -> tuple[Output, dict[str, BinaryIO], dict[str, tuple[Any, int]]]:
    """Open the files, as an earlier process left them or anew; return also what is hashed of each.

    Entries are written and hashed in a thread, while the caller computes the next ones. A file
    whose entries come in its own order need not be read again for its digest.
    """
    done, notes = _left(folder, shards, key)
    if not done and not notes:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, each in shards.items():
            (folder / name).write_bytes(each.header)
        (folder / _JOURNAL).write_text(json.dumps(key) + "\n")
    files = {}
    for name in shards:
        files[name] = stack.enter_context((folder / name).open("r+b"))
    journal = stack.enter_context((folder / _JOURNAL).open("a"))
    owners = {leaf: name for name, each in shards.items() for leaf in each.kinds}
    written: dict[str, tuple[int, int]] = {}
    hashed = {x: (hashlib.sha256(y.header), len(y.header)) for x, y in shards.items()}
    pool, pending = stack.enter_context(ThreadPoolExecutor(1)), []

    def write(leaf: str, entries: Any) -> None:
        name, (size, check) = owners[leaf], written.get(leaf, (0, 0))
        content, place = base.little(entries), shards[name].places[leaf] + size
        files[name].seek(place)
        files[name].write(content)
        written[leaf] = size + content.nbytes, zlib.crc32(content, check)
        digest, end = hashed[name]
        if place == end:
            digest.update(content)
            hashed[name] = digest, end + content.nbytes

    def wait() -> None:
        while pending:
            pending.pop().result()

    def put(leaf: str, entries: Any) -> None:
        wait()  # so that memory holds the entries of one call more
        pending.append(pool.submit(write, leaf, entries))

    def add(line: Any) -> None:
        text = json.dumps(line)
        # A checksum, because a number that was changed would still be one.
        journal.write(json.dumps([line, zlib.crc32(text.encode())]) + "\n")
        journal.flush()

    def finish(leaf: str) -> None:
        wait()
        size, check = written.pop(leaf, (0, 0))
        if size != (expected := shards[owners[leaf]].kinds[leaf].nbytes):
            raise ValueError(f"{leaf} has {size} bytes; expected {expected}")
        # What the journal says is complete has left this process.
        files[owners[leaf]].flush()
        add([leaf, check])
        done.add(leaf)

    def note(word: str, value: Any) -> None:
        add({word: value})
        notes[word] = value

    return Output(put, finish, note, done, notes, folder), files, hashed


def _left(folder: Path, shards: dict[str, Shard], key: str) -> tuple[set[str], dict[str, Any]]:
    """Read what an earlier process finished; return nothing if any of it is not as it was."""
    done, notes = set(), {}
    owners = {leaf: name for name, each in shards.items() for leaf in each.kinds}
    try:
        first, *lines = map(json.loads, (folder / _JOURNAL).read_text().splitlines())
        if first != key:
            return set(), {}
        for name, each in shards.items():
            with open(folder / name, "rb") as file:
                if file.read(len(each.header)) != each.header:
                    return set(), {}
        for line, sealed in lines:
            if zlib.crc32(json.dumps(line).encode()) != sealed:
                return set(), {}
            if isinstance(line, dict):
                notes |= line
                continue
            leaf, check = line
            name = owners[leaf]
            if _checksum(folder / name, shards[name], leaf) != check:
                return set(), {}
            done.add(leaf)
    # A process may be killed while it writes a line, and a disk may lose what was written.
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return set(), {}
    return done, notes


def _checksum(path: Path, planned: Shard, leaf: str) -> int:
    check, left = 0, planned.kinds[leaf].nbytes
    with open(path, "rb") as file:
        file.seek(planned.places[leaf])
        while left and (content := file.read(min(left, 1 << 20))):
            check, left = zlib.crc32(content, check), left - len(content)
    return -1 if left else check
