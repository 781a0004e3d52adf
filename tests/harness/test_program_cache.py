"""Commands keep what they compile; whatever happens to the folder, they compute the same."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.harness import program_cache

ROOT = Path(__file__).resolve().parents[2]

# Counts the programs that a cache had, and that it lacked.
COUNTED = """
import collections, resource, runpy, sys
import jax
found = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: found.update([event.split("/")[-1]]))
"""
SMALL = (
    COUNTED
    + """
from experiments.harness import program_cache
with program_cache.kept() as note:
    if len(sys.argv) > 1:  # no file may be longer: each is cut off, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
    value = jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.arange(8.0))
print(note)
print(float(value), found["cache_misses"], found["cache_hits"])
"""
)
RUN = (
    COUNTED
    + """
try:
    runpy.run_module("experiments.one_shot", run_name="__main__")
finally:
    print(found["cache_misses"], found["cache_hits"])
"""
)


def run(program: str, *words: object, **environment: object) -> tuple[list[str], str]:
    """Run a program in a process of its own, and return its lines and its errors."""
    own = {name: text for name, text in os.environ.items() if "COMPILATION_CACHE" not in name}
    own |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    own |= {name: str(text) for name, text in environment.items()}
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    return done.stdout.splitlines(), done.stderr


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*-cache") if path.is_file()]


@pytest.mark.slow
def test_a_second_process_of_a_command_compiles_nothing(tmp_path):
    words = ["--epochs", 1, "--algorithms", "fedfisher_kfac", "--no-central"]
    outputs = [
        run(RUN, *words, "--out", tmp_path / out, XDG_CACHE_HOME=tmp_path) for out in ("one", "two")
    ]
    (first, _), (second, errors) = outputs
    where = f"Compiled programs are kept in {tmp_path / 'fisherjax/programs'} "
    assert sum(line.startswith(where) for line in first) == 1, first
    misses, hits = map(int, first[-1].split())
    assert misses > 10
    assert second[-1].split() == ["0", str(misses + hits)], errors
    assert not errors
    one, two = (
        [
            line
            for line in (tmp_path / out / "results.csv").read_text().splitlines()
            if ",accuracy," in line  # seconds differ
        ]
        for out in ("one", "two")
    )
    assert [line.split(",")[:8] for line in one] == [line.split(",")[:8] for line in two]


@pytest.mark.long
def test_an_option_switches_the_cache_off(tmp_path):
    words = ["--no-compilation-cache", "--epochs", 0, "--out", tmp_path / "out"]
    output, _ = run(RUN, *words, XDG_CACHE_HOME=tmp_path)
    assert output[-1].split() == ["0", "0"]
    assert not any("ompiled programs" in line for line in output)
    assert not (tmp_path / "fisherjax").exists()


@pytest.mark.long
def test_damaged_entries_are_compiled_again_without_a_word_and_written_anew(tmp_path):
    def again() -> list[str]:
        (_, numbers), errors = run(SMALL, XDG_CACHE_HOME=tmp_path)
        assert not errors
        return numbers.split()

    value, misses, _ = again()
    written = entries(tmp_path)
    assert len(written) == int(misses) > 1
    for number, path in enumerate(written):
        path.write_bytes([b"", b"garbage", path.read_bytes()[:-9]][number % 3])
    assert again() == [value, misses, "0"]
    # The folder is emptied, because JAX would not replace what it cannot read.
    assert not entries(tmp_path)
    assert again() == [value, misses, "0"]
    assert again() == [value, "0", misses]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_full_disk_is_no_error_and_leaves_no_half_of_an_entry(tmp_path):
    (_, numbers), errors = run(SMALL, 100, XDG_CACHE_HOME=tmp_path)
    assert not errors
    x = np.arange(8.0)
    assert float(numbers.split()[0]) == pytest.approx(np.sin(x) @ x, rel=1e-5)
    assert not entries(tmp_path)


@pytest.mark.long
def test_what_the_user_chose_stays(tmp_path):
    own = tmp_path / "own"
    (note, numbers), errors = run(SMALL, XDG_CACHE_HOME=tmp_path, JAX_COMPILATION_CACHE_DIR=own)
    assert note == f"Compiled programs are kept in {own}, as JAX_COMPILATION_CACHE_DIR says."
    # Not even the least time, JAX's own default, changes.
    assert numbers.split()[1:] == ["0", "0"], errors
    off = {"JAX_ENABLE_COMPILATION_CACHE": "false", "XDG_CACHE_HOME": tmp_path}
    (note, _), errors = run(SMALL, **off)
    assert note.startswith("Compiled programs are not kept")
    slow = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 100, "XDG_CACHE_HOME": tmp_path}
    (note, _), errors = run(SMALL, **slow)
    assert str(tmp_path / "fisherjax") in note
    assert not entries(tmp_path), errors


@pytest.fixture
def cache_is_on(monkeypatch):
    """As in a process without the environment of the tests, in which nothing is set in JAX."""
    monkeypatch.setattr(program_cache.jax, "config", Config())
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)


class Config:
    """The names of `jax.config` that matter here, whose changes a test may not make."""

    jax_enable_compilation_cache = True
    jax_compilation_cache_dir = None

    def update(self, name, value):
        raise AssertionError(f"{name} was set to {value}")


def note_of(monkeypatch, caches: object) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    with program_cache.kept() as note:
        return note


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch, cache_is_on):
    (tmp_path / "file").write_text("")
    note = note_of(monkeypatch, tmp_path / "file" / "caches")
    assert note.startswith("Compiled programs are not kept: ")
    assert str(tmp_path) in note


def test_a_disk_that_is_nearly_full_keeps_nothing(tmp_path, monkeypatch, cache_is_on):
    usage = program_cache.shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(program_cache.shutil, "disk_usage", lambda _: usage)
    assert "not kept: less than 0.5 GB are free" in note_of(monkeypatch, tmp_path)


def test_a_user_without_a_home_keeps_nothing(monkeypatch, cache_is_on):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(program_cache.Path, "home", home)
    assert note_of(monkeypatch, "").endswith("not kept: Could not determine home directory.")


@pytest.mark.parametrize(
    ("platform", "folder"),
    [
        ("linux", ".cache/fisherjax/programs"),
        ("darwin", "Library/Caches/fisherjax/programs"),
        ("win32", "local/fisherjax/programs"),
    ],
)
def test_the_folder_is_where_the_platform_has_caches(tmp_path, monkeypatch, platform, folder):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(program_cache.sys, "platform", platform)
    monkeypatch.setattr(program_cache.Path, "home", lambda: tmp_path)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert program_cache.default_folder() == tmp_path / folder


def test_the_entries_that_were_not_used_for_longest_make_room(tmp_path):
    (tmp_path / "inner").mkdir()
    # Used (read or written) at these times: a file that was read lately is not the oldest.
    used = {"a": (100, 900), "inner/b": (200, 200), "c": (300, 300), "d": (800, 100)}
    for name, times in used.items():
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, times)

    def left() -> list[str]:
        files = (x for x in tmp_path.rglob("*") if x.is_file())
        return sorted(x.relative_to(tmp_path).as_posix() for x in files)

    (tmp_path / "empty").write_bytes(b"")
    program_cache.make_room(tmp_path, 40)
    assert left() == sorted(used)
    program_cache.make_room(tmp_path, 25)
    assert left() == ["a", "d"]
    program_cache.make_room(tmp_path, 0)
    assert left() == []
