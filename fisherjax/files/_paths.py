"""Check paths, and write files atomically, without anything left beside them."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None

_PREFIX = ".fisherjax-"
_AGE = 60  # seconds; more than it takes to lock a folder after it was made


def checked_path(path: str | bytes | os.PathLike, *suffixes: str, exists: bool = False) -> Path:
    """Return a path; raise if it is a folder, has another suffix, or should exist and does not."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"the path is {path!r:.80}; expected a string or a pathlib.Path")
    path, known = Path(os.fsdecode(path)), " or ".join(suffixes)
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the path {str(path)!r} cannot be encoded in this locale, which has "
            f"{error.encoding}; expected other characters, or a UTF-8 locale: set PYTHONUTF8=1"
        ) from error
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; expected a file that ends in {known}")
    if path.suffix not in suffixes:
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise ValueError(f"the file name {path.name!r} {ending}: end it in {known}")
    # Otherwise writing would replace the link, which names no file.
    if os.path.islink(os.path.realpath(path)):
        raise ValueError(f"{str(path)!r} is a link of a loop, which names no file: remove it")
    if exists and not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    return path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it replaces the one at `path` only once it is complete.

    If `path` is a link, the file that it names is replaced, and the link stays.
    """
    target = Path(os.path.realpath(path))
    with scratch(target.parent) as folder:
        partial = folder / "partial"
        with open(partial, "x+b") as file:
            yield file
            # The bytes reach the disk before the name, so that a power cut leaves no partial file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Make a folder for temporary files beside a result, and remove it in the end.

    A process that is killed leaves its folder, which the next call for the same place removes. It
    is in the same place because a rename is atomic only within a file system, and because the
    system's folder for temporary files may be small.
    """
    # Otherwise the error would name the temporary folder, which the user has never heard of.
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {str(folder)!r} does not exist: make it first")
    for left in folder.glob(f"{_PREFIX}*"):
        # That of a process which works is locked.
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _AGE:
                with locked(left):
                    shutil.rmtree(left)
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder)))
        # A file system without locks keeps what a killed process leaves.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(place))
        yield place


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the end, or that of this process; raise OSError if another one has it."""
    if fcntl is None:
        raise OSError("there are no locks")
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
