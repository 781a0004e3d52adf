"""Keep compiled programs in a folder of the user, so that the next process need not compile them.

JAX writes and reads the entries, which have the program, the versions and flags of the compiler and
the features of the processor in their names, and on a GPU the compiler's autotuning results. What
is here: where the folder is, how large it gets, and what happens when it fails.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

LIMIT = 5 * 10**8
"""Most bytes that the folder has when a command starts; the oldest entries make room."""

_FOLDER = "jax_compilation_cache_dir"
_ENABLED = "jax_enable_compilation_cache"
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def disable() -> None:
    """Keep no compiled programs, whatever the environment asks for."""
    jax.config.update(_ENABLED, False)


def enabled() -> bool:
    """Return whether compiled programs may be kept."""
    return getattr(jax.config, _ENABLED)


@contextlib.contextmanager
def kept() -> Iterator[str]:
    """Keep the programs that are compiled within this context; yield a sentence about it.

    What the user chose, by an environment variable or by `jax.config`, stays. A folder that cannot
    be written is no error, and one with entries that cannot be read is emptied in the end.
    """
    if not enabled():
        yield "Compiled programs are not kept, as JAX_ENABLE_COMPILATION_CACHE says."
        return
    if _FOLDER.upper() in os.environ or getattr(jax.config, _FOLDER):
        chosen = getattr(jax.config, _FOLDER)
        where = f"kept in {chosen}" if chosen else "not kept"
        yield f"Compiled programs are {where}, as {_FOLDER.upper()} says."
        return
    try:
        folder = default_folder()
        _prepare(folder)
        make_room(folder, LIMIT)
    except (OSError, RuntimeError) as error:
        yield f"Compiled programs are not kept: {error}"
        return
    jax.config.update(_FOLDER, str(folder))
    # Most programs compile in less than JAX's default of a second, and together take most time.
    if _LEAST_SECONDS.upper() not in os.environ:
        jax.config.update(_LEAST_SECONDS, 0)
    with _emptied_on_failure(folder):
        yield f"Compiled programs are kept in {folder} (not with --no-compilation-cache)."


def default_folder() -> Path:
    """Return the folder of compiled programs below the user's cache.

    Raises:
        RuntimeError: If the user has no home.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        caches = Path(chosen)
    elif sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        caches = Path(os.environ["LOCALAPPDATA"])
    else:
        caches = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return caches / "fisherjax" / "programs"


def make_room(folder: Path, limit: int) -> None:
    """Remove the files that were not used for longest until at most `limit` bytes remain.

    JAX has such a limit too, but it needs a further package and takes a lock for every program.
    """
    found = []
    for path in folder.rglob("*"):
        # Another process may remove a file in between.
        with contextlib.suppress(OSError):
            if path.is_file():
                state = path.stat()
                # Most systems note at least once a day that a file was read.
                found.append((max(state.st_atime, state.st_mtime), state.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        # An empty file is what a full disk left of an entry.
        if total <= limit and size > 0:
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size


def _prepare(folder: Path) -> None:
    """Make the folder; raise an OSError if nothing can be written there."""
    # Only the user may write here: who can replace a program can run any code.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"x")
    if shutil.disk_usage(folder).free < LIMIT:
        raise OSError(f"less than {LIMIT / 1e9:g} GB are free in {folder}")


@contextlib.contextmanager
def _emptied_on_failure(folder: Path) -> Iterator[None]:
    """Show no warning of JAX about its cache; empty the folder in the end if there was one.

    JAX compiles a program whose entry is unreadable, but never writes that entry again.
    """
    show, failures = warnings.showwarning, []

    def show_others(message: Any, *place: Any, **more: Any) -> None:
        if "persistent compilation cache" in str(message):
            failures.append(message)
        else:
            show(message, *place, **more)

    warnings.showwarning = show_others
    try:
        yield
    finally:
        warnings.showwarning = show
        if failures:
            make_room(folder, 0)
