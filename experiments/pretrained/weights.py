"""Where the files of pre-trained networks lie, where they come from, and what they hash to."""

import hashlib
import os
import tomllib
from pathlib import Path
from typing import NamedTuple

from experiments.harness import program_cache

PREPARE = "python -m experiments.pretrained --prepare"
FOLDER = "FISHERJAX_WEIGHTS"
"""Environment variable with the folder of weights, in place of the one in the user's cache."""


class File(NamedTuple):
    """A file that is kept.

    Attributes:
        name: Its path below the folder of weights.
        inside: Its path within the package, or below the folder of data sets.
        nbytes: Its size in bytes.
        sha256: Its SHA-256.
    """

    name: str
    inside: str
    nbytes: int
    sha256: str


class Source(NamedTuple):
    """Where files come from: a package of the registry, or the folder of data sets.

    Attributes:
        title: What the weights are.
        licence: Their licence.
        package: The package and its version as pip takes them; "" for the folder of data sets.
        files: The files that are kept.
    """

    title: str
    licence: str
    package: str
    files: tuple[File, ...]


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["sources"]
SOURCES = tuple(
    Source(**own | {"files": tuple(File(**file) for file in own["files"])}) for own in _LISTED
)
"""All weights that the command prepares."""


def folder(chosen: Path | None = None) -> Path:
    """Return the folder of weights: the chosen one, that of the environment, or in the cache.

    Raises:
        RuntimeError: If nothing is chosen and the user has no home.
    """
    if chosen is not None:
        return chosen
    if given := os.environ.get(FOLDER):
        return Path(given)
    return program_cache.default_folder().with_name("weights")


def path(name: str, chosen: Path | None = None) -> Path:
    """Return the path of a prepared file, such as "minilm/model.safetensors".

    Its bytes were compared with its hash when it was prepared; only its size is compared here.

    Raises:
        FileNotFoundError: If the file was not prepared, or has another size.
    """
    files = {file.name: file for source in SOURCES for file in source.files}
    found = folder(chosen) / name
    if not found.is_file() or found.stat().st_size != files[name].nbytes:
        where = f" --folder {chosen}" if chosen else ""
        raise FileNotFoundError(
            f"{str(found)!r} is not there or not complete: run {PREPARE}{where}"
        )
    return found


def is_sound(file: File, content: bytes) -> bool:
    """Return whether bytes are those of a file."""
    return len(content) == file.nbytes and hashlib.sha256(content).hexdigest() == file.sha256
