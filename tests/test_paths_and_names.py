"""Paths of files and names in them: of any length and characters, and links, locales and kills."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fisherjax import compression, files
from fisherjax.__main__ import main
from fisherjax.algorithms import Update
from fisherjax.files._shown import shown

ROOT = Path(__file__).parents[1]
ONE = {"w": np.ones(2, "float32")}
EVIL = [  # what, how it is shown, and a name of a leaf, as no file has half a letter in one
    ("\x1b[2J", r"\x1b[2J", "\x1b[2J"),
    ("a\nb", r"a\nb", "a\nb"),
    ("\u202ecba", r"\u202ecba", "\u202ecba"),
    ("\ud800", r"\ud800", "w"),
]


def save(path, client="ann", value=1.0, leaf="w", **changes):
    update = Update({"params": {leaf: np.full(2, value, "float32")}}, "params")
    how = {"algorithm": "fedavg", "client": client, "examples": 1} | changes
    files.save_update(path, update, **how)
    return path


# Names


@pytest.mark.parametrize(("name", "escaped", "leaf"), EVIL)
def test_names_merge_and_are_shown_escaped(tmp_path, capsys, name, escaped, leaf):
    """In tables, results and the header of the merged file a client keeps its name."""
    out = tmp_path / "out.safetensors"
    paths = [save(tmp_path / f"{i}.safetensors", name * i, i, leaf) for i in (1, 2)]
    assert main(["merge", str(out), *map(str, paths)]) == 0
    assert main(["inspect", str(paths[0])]) == 0
    assert main(["inspect", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n"))
    assert printed.count(escaped) > 6
    assert files.unseal(out).about["clients"] == {name: 0.5, 2 * name: 0.5}
    np.testing.assert_array_equal(files.load_arrays(out)[leaf], [1.5, 1.5])


@pytest.mark.parametrize(("name", "escaped", "leaf"), EVIL)
def test_errors_and_warnings_show_names_escaped(tmp_path, capsys, name, escaped, leaf):
    out = tmp_path / "out.safetensors"
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save(good, "bob", leaf=leaf)
    save(bad, name, np.nan, leaf)
    with pytest.raises(ValueError, match="is not finite") as error:
        files.merge_files(out, [good, bad])
    assert str(error.value).isprintable()
    assert escaped in str(error.value).replace("\\\\", "\\")
    with pytest.warns(match="Left out") as caught:
        files.merge_files(out, [good, bad], on_nonfinite="drop")
    assert str(caught[0].message).isprintable()
    assert caught[0].filename == __file__
    assert main(["merge", str(out), str(good), str(bad), "--on-nonfinite", "drop"]) == 0
    assert all(map(str.isprintable, "".join(capsys.readouterr()).split("\n")))
    like = {leaf: np.ones(3, "float32")}
    with pytest.raises(ValueError, match="not those of `like`") as error:
        files.load_arrays(good, like=like)
    assert str(error.value).isprintable()


def test_what_is_printable_is_shown_as_it_is():
    assert shown("Zoë 'x' \\ 日本 \u00a0\u200b") == "Zoë 'x' \\ 日本 \\xa0\\u200b"


def test_a_leaf_that_no_file_can_hold_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"called '\\ud800', which a file cannot hold: rename"):
        files.save_arrays(tmp_path / "a.safetensors", {"\ud800": np.ones(1)})
    with pytest.raises(ValueError, match=r"params/\\ud800', which a file cannot hold: rename"):
        save(tmp_path / "a.safetensors", leaf="\ud800")
    assert not list(tmp_path.iterdir())


def test_a_long_name_or_a_long_error_is_limited(tmp_path):
    """An error that repeats a name of a megabyte would hide what to do about it."""
    path = tmp_path / "a.safetensors"
    for field in ("client", "codec"):
        said = r"length of a name .* 1001; .*--limit name=1001"
        # Refused in writing too, as nobody could read it by the same limits.
        with pytest.raises(ValueError, match=said):
            save(path, **{field: "x" * 1001})
        save(path, **{field: "x" * 1001}, limits=files.Limits(name=1001))
        with pytest.raises(ValueError, match=said):
            files.load_update(path)
        files.load_update(path, limits=files.Limits(name=1001))
    save(path, leaf="x" * 900)
    with pytest.raises(ValueError, match=r"^the arrays.* \.\.\. .*with `mapping`$") as error:
        files.load_arrays(path, like={"x" * 5000: np.ones(2)})
    assert len(str(error.value)) < 2100


# Paths


@pytest.mark.parametrize("length", [13, 243, 255])
def test_a_file_name_may_be_as_long_as_the_system_allows(tmp_path, length):
    out = tmp_path / ("x" * (length - 12) + ".safetensors")
    files.save_arrays(out, ONE)
    files.merge_files(out, [save(tmp_path / "a.safetensors")])
    np.testing.assert_array_equal(files.load_arrays(out)["w"], [1, 1])
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "a.safetensors"}


def test_a_link_stays_and_the_file_that_it_names_is_written(tmp_path):
    """As by other programs that open a file for writing."""
    (tmp_path / "far").mkdir()
    upload, link = save(tmp_path / "a.safetensors"), tmp_path / "link.safetensors"
    for is_there in (True, False):
        target = tmp_path / "far" / f"{is_there}.safetensors"
        if is_there:
            target.write_text("old")
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        for write, what in ((files.save_arrays, ONE), (files.merge_files, [upload])):
            write(link, what)
            assert link.is_symlink()
            np.testing.assert_array_equal(load_file(target)["w"], [1, 1])
    assert {path.name for path in tmp_path.iterdir()} == {"far", link.name, upload.name}
    assert len(list((tmp_path / "far").iterdir())) == 2
    link.unlink()
    link.symlink_to(tmp_path / "nowhere" / "x.safetensors")
    with pytest.raises(FileNotFoundError, match=r"folder '.*nowhere' does not exist"):
        files.save_arrays(link, ONE)


@pytest.mark.parametrize("name", ["env", "env.safetensors"])
def test_a_folder_is_called_a_folder(tmp_path, name, capsys):
    folder, upload = tmp_path / name, save(tmp_path / "a.safetensors")
    folder.mkdir()
    said = rf"'.*{name}' is a folder; expected a file that ends in \.safetensors"
    for act in (
        lambda: files.save_arrays(folder, ONE),
        lambda: files.load_update(folder),
        lambda: files.merge_files(folder, [upload]),
    ):
        with pytest.raises(ValueError, match=said):
            act()
    # These read folders with a checkpoint in them.
    for act in (
        lambda: files.load_arrays(folder),
        lambda: files.merge_files(tmp_path / "out.safetensors", [folder]),
    ):
        with pytest.raises(ValueError, match=rf"{name}' is a folder with 0 .safetensors files"):
            act()
    assert main(["merge", str(folder), str(upload)]) == 1
    assert main(["inspect", str(folder)]) == 1
    assert capsys.readouterr().err.count("is a folder") == 2
    with pytest.raises(ValueError, match="'none' has no suffix: end it in"):
        files.save_arrays(tmp_path / "none", ONE)


def test_what_killed_processes_left_is_removed_and_what_works_is_not(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    left = [tmp_path / f".fisherjax-{name}" for name in ("dead", "alive", "young")]
    for folder in left:
        folder.mkdir()
        (folder / "0.safetensors").write_text("half")
        if folder.name != ".fisherjax-young":
            os.utime(folder, (0, time.time() - 3600))
    handle = os.open(left[1], os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        files.save_arrays(tmp_path / "a.safetensors", ONE)
        assert [folder.exists() for folder in left] == [False, True, True]
    finally:
        os.close(handle)
    save(tmp_path / "b.safetensors")
    assert [folder.exists() for folder in left] == [False, False, True]


def test_a_system_without_locks_writes_and_removes_nothing(tmp_path, monkeypatch):
    left = tmp_path / ".fisherjax-dead"
    left.mkdir()
    os.utime(left, (0, time.time() - 3600))
    monkeypatch.setattr(files._paths, "fcntl", None)
    path = tmp_path / "a.safetensors"
    files.save_arrays(path, ONE)
    assert {x.name for x in tmp_path.iterdir()} == {left.name, path.name}


def test_a_path_that_the_system_cannot_name_is_refused(tmp_path):
    for act in (lambda path: files.save_arrays(path, ONE), files.load_arrays, files.load_update):
        with pytest.raises(ValueError, match=r"ud800.* cannot be encoded in this locale, which"):
            act(tmp_path / "\ud800.safetensors")


WAITING = """
import sys, time
from fisherjax import __main__
from fisherjax.files.uploads import _packed

def wait(*_):
    print("ready", flush=True)
    time.sleep(60)

_packed._decode = wait
sys.exit(__main__.main())
"""


def coded(path):
    node = compression.Codes(np.zeros(2, "uint8"), np.float32(1), 8, (2,), "float32")
    update = Update({"update": {"params": {"w": node}}}, "params; 8 bits")
    files.save_update(path, update, algorithm="fedavg", client="ann", examples=1)


@pytest.mark.long
def test_a_terminated_merge_leaves_nothing_and_a_killed_one_until_the_next(tmp_path):
    upload, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    coded(upload)
    out.write_text("old")
    words = [sys.executable, "-c", WAITING, "merge", str(out), str(upload)]
    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            assert len(list(tmp_path.glob(".*"))) == 1
            process.send_signal(number)
            assert process.wait(30) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
            assert process.stderr.read() == b""
        assert len(list(tmp_path.glob(".*"))) == left
        assert out.read_text() == "old"
    for folder in tmp_path.glob(".*"):
        os.utime(folder, (0, time.time() - 3600))
    files.merge_files(out, [upload])
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "out.safetensors"}


IN_C = """
import json, sys
from fisherjax import files
from fisherjax.__main__ import main
import numpy as np

assert sys.stdout.encoding != "utf-8"
try:
    files.save_arrays("\\xf6.safetensors", {"w": np.ones(1)})
except ValueError as error:
    print(error, file=sys.stderr)
sys.exit(main())
"""


@pytest.mark.long
def test_names_that_are_not_ascii_work_in_a_c_locale(tmp_path):
    out = tmp_path / "ö.safetensors"
    upload = save(tmp_path / "änn.safetensors", "Zoë", leaf="gewicht-ü")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", IN_C, "merge", out.name, upload.name],
        **{"capture_output": True, "cwd": tmp_path, "text": True},
        env=os.environ | locale | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert r"Zo\xeb" in done.stdout
    assert r"gewicht-\xfc" in done.stdout
    assert "cannot be encoded in this locale, which has ascii" in done.stderr
    assert "PYTHONUTF8=1" in done.stderr
    np.testing.assert_array_equal(files.load_arrays(out)["gewicht-ü"], [1, 1])
