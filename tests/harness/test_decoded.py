"""Commands keep decoded data sets; whatever happens to the folder, they read the same."""

import jax
import numpy as np
import pytest

from experiments.harness import decoded, program_cache
from fisherjax import datasets


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Make a folder of data sets, and an empty one for what is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is kept depends on these files only, and the digits do not lie in files of their own.
    (tmp_path / "data" / "digits").mkdir(parents=True)
    (tmp_path / "data" / "digits" / "images").write_bytes(b"one")
    before = program_cache.enabled()
    jax.config.update("jax_enable_compilation_cache", True)
    yield tmp_path / "data"
    jax.config.update("jax_enable_compilation_cache", before)


def entries():
    return [*decoded.folder().glob("*.npz")]


def assert_same(splits):
    for split, expected in zip(splits, datasets.load("digits"), strict=True):
        for own, other in zip(split, expected, strict=True):
            np.testing.assert_array_equal(own, other)
            assert type(own) is type(other)


def test_a_second_command_reads_what_the_first_one_kept(place):
    for _ in range(2):
        assert_same(decoded.load("digits", place))
    [path] = entries()
    with np.load(path) as kept:
        changed = {**kept, "test.targets": kept["test.targets"] + 1}
    np.savez(path, **changed)
    targets = decoded.load("digits", place)[1].targets
    np.testing.assert_array_equal(targets, datasets.load("digits")[1].targets + 1)


def test_other_files_are_decoded_again(place):
    decoded.load("digits", place)
    (place / "digits" / "images").write_bytes(b"another")
    assert_same(decoded.load("digits", place))
    assert len(entries()) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "lacking"])
def test_a_damaged_file_is_written_again(place, damage):
    decoded.load("digits", place)
    [path] = entries()
    whole = path.read_bytes()
    if damage == "lacking":
        np.savez(path, other=np.zeros(3))
    else:
        path.write_bytes({"cut": whole[:5000], "empty": b"", "text": b"nothing"}[damage])
    assert_same(decoded.load("digits", place))
    with np.load(path) as kept:
        assert kept["train.inputs"].shape == (1437, 8, 8, 1)


def test_whatever_bit_is_wrong_the_data_are_the_same(place):
    """Some flipped bits claim another compression, or a password."""
    decoded.load("digits", place)
    [path] = entries()
    whole = path.read_bytes()
    directory = whole.index(b"PK\x01\x02")
    for at in (*range(directory + 8, directory + 12), len(whole) // 2):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert_same(decoded.load("digits", place))


def test_a_folder_that_cannot_be_made_is_no_error(place, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert_same(decoded.load("digits", place))


def test_nothing_is_kept_of_data_without_files_or_without_the_cache(place):
    assert_same(decoded.load("digits", place / "elsewhere"))
    assert entries() == []
    program_cache.disable()
    assert_same(decoded.load("digits", place))
    assert entries() == []
