"""Plain checkpoints, which other programs wrote: merged by their mean, and read within limits."""

import io
import json
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fisherjax import files
from fisherjax.__main__ import main
from fisherjax.algorithms import Update

NAMES = ("a", "b", "c")


def checkpoint(seed):
    source = np.random.RandomState(seed)
    return {
        "fc.weight": source.normal(size=(3, 2)).astype("float32"),
        "fc.bias": source.normal(size=2).astype("float16"),
        "head.weight": source.normal(size=4).astype(ml_dtypes.bfloat16),
        "bn.num_batches_tracked": np.array(100 + seed),
        "mask": np.array([True, False]),
    }


@pytest.fixture
def paths(tmp_path):
    """Three checkpoints in folders of their own, as programs name them all alike."""
    paths = []
    for seed, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "model.safetensors")
        save_file(checkpoint(seed), paths[-1])
    return paths


def mean(weights):
    """Average by NumPy in float64."""
    each, p = [checkpoint(seed) for seed in range(3)], np.divide(weights, np.sum(weights))
    names = [x for x in each[0] if x.endswith(("weight", "bias"))]
    return {x: sum(w * np.float64(own[x]) for w, own in zip(p, each, strict=True)) for x in names}


@pytest.mark.parametrize("weights", [None, [1, 1, 2]])
def test_the_command_merges_them_to_their_mean_and_says_so(paths, tmp_path, capsys, weights):
    """Arrays that have no mean are those of the first checkpoint, which is said too."""
    out = tmp_path / "merged.safetensors"
    words = ["merge", str(out), *map(str, paths)]
    assert main([*words, *(["--weights", *map(str, weights)] if weights else [])]) == 0
    printed = capsys.readouterr().out
    how = "the weights of --weights" if weights else "equal weights"
    assert f"The mean of 3 plain checkpoints, with {how}, is in {out}\n" in printed
    others = "It has 2 arrays that are not of floats, such as 'bn.num_batches_tracked', as in"
    assert f"{others} {paths[0]}.\n" in printed
    assert "vote" not in printed
    found, first = load_file(out), checkpoint(0)
    assert found.keys() == first.keys()
    for name, expected in mean(weights or [1, 1, 1]).items():
        assert found[name].dtype == first[name].dtype
        close = 2 * float(ml_dtypes.finfo(first[name].dtype).eps)
        np.testing.assert_allclose(np.float64(found[name]), expected, rtol=close, atol=close)
    for name in ("bn.num_batches_tracked", "mask"):
        np.testing.assert_array_equal(found[name], first[name])
    # The file that was written is one that the merge may write again.
    assert main(words) == 0


def test_the_function_merges_them_and_counters_are_of_the_start_if_there_is_one(paths, tmp_path):
    out = tmp_path / "merged.safetensors"
    merged = files.merge_files(out, paths)
    assert [x.client for x in merged.records] == list(map(str, paths))
    assert all(x.is_plain and x.examples == 1 for x in merged.records)
    np.testing.assert_allclose(merged.shares, 1 / 3)
    files.merge_files(out, paths, start=checkpoint(7))
    assert load_file(out)["bn.num_batches_tracked"] == 107


def test_who_forgets_the_file_to_write_loses_no_checkpoint(paths, capsys):
    before = [path.read_bytes() for path in paths]
    assert main(["merge", *map(str, paths)]) == 1
    said = capsys.readouterr().err
    assert "a/model.safetensors' is the file to write, as the first one, but it exists" in said
    assert f"merge merged.safetensors {paths[0]} ..." in said
    assert [path.read_bytes() for path in paths] == before


def other(paths, name, array):
    save_file(checkpoint(1) | {name: array}, paths[1])


FAULTS = {
    "another shape": (
        lambda paths: other(paths, "fc.weight", np.ones((2, 2), "float32")),
        r"fc.weight is float32\[2, 2\] in .*b/model.*, expected float32\[3, 2\] as in .*a/model",
    ),
    "another array": (
        lambda paths: other(paths, "new", np.ones(1, "float32")),
        r"new is float32\[1\] in .*b/model.*, expected none as in .*a/model",
    ),
    "another counter": (
        lambda paths: other(paths, "new", np.ones(1, "int32")),
        r"new is int32\[1\] in .*b/model.*, expected none as in .*a/model",
    ),
    "not finite": (
        lambda paths: other(paths, "fc.weight", np.full((3, 2), np.nan, "float32")),
        r"b/model.safetensors' is not finite: params/fc.weight",
    ),
    "truncated": (
        lambda paths: paths[1].write_bytes(paths[1].read_bytes()[:-1]),
        r"b/model.safetensors' is damaged, or is not",
    ),
    "no floats": (
        lambda paths: save_file({"n": np.arange(3)}, paths[1]),
        r"b/model.safetensors' has no arrays of floats",
    ),
    "an upload": (
        lambda paths: files.save_update(
            paths[0],
            Update({"params": {"w": np.ones(1)}}, "params"),
            **{"algorithm": "fedavg", "client": "ann", "examples": 1},
        ),
        r"b/model.safetensors' was written by another program: .* or only checkpoints",
    ),
    "one twice": (
        lambda paths: (paths[1].unlink(), paths[1].symlink_to(paths[0])),
        r"a/model.safetensors' and in .*b/model.safetensors': merge only one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_by_file_and_array(paths, tmp_path, fault):
    spoil, message = FAULTS[fault]
    spoil(paths)
    with pytest.raises(ValueError, match=message):
        files.merge_files(tmp_path / "merged.safetensors", paths)
    assert not (tmp_path / "merged.safetensors").exists()


def test_other_methods_say_what_they_need(paths, tmp_path):
    with pytest.raises(ValueError, match=r"regmean merges params and grams of Fisher files"):
        files.merge_files(tmp_path / "merged.safetensors", paths, algorithm="regmean")
    with pytest.raises(ValueError, match=r"was written by another program.*files.load_arrays"):
        files.load_update(paths[0])


def test_inspect_calls_a_plain_checkpoint_one(paths, capsys):
    assert main(["inspect", str(paths[0])]) == 0
    printed = capsys.readouterr().out
    assert printed.split("\n")[0].split() == ["what", "plain", "checkpoint"]
    assert "bn.num_batches_tracked  int64[]" in printed


# Claims and limits


def archive(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members:
            file.NameToInfo.pop(name, None)  # for a name that is there twice
            file.writestr(name, content)
    return path


def npy(shape="(2,)", dtype="<f4", data=bytes(8), version=1):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = len(text).to_bytes(2 * version, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


CLAIMS = {
    "terabytes": [("a.npy", npy("(10000000000000,)"))],
    "two unknown axes": [("a.npy", npy("(-1, -2)"))],
    "a number of 400 digits": [("a.npy", npy(f"({'9' * 400},)"))],
    "a byte too few": [("a.npy", npy(data=bytes(7)))],
    "a byte too many": [("a.npy", npy(data=bytes(9)))],
    "an array twice": [("a.npy", npy()), ("a.npy", npy(data=b"\1" * 8))],
    "no array": [("a.txt", b"hello")],
    "a header for names of fields": [("a.npy", npy(version=3))],
    "objects": [("a.npy", npy("(1,)", "|O"))],
}


@pytest.mark.parametrize("case", CLAIMS)
def test_what_an_archive_claims_is_compared_with_what_came(tmp_path, case):
    path = archive(tmp_path / "a.npz", CLAIMS[case])
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"a\.npz' is damaged, or is not a .npz file"):
        files.load_arrays(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_hidden_array_is_missed(tmp_path):
    """A changed length in the directory makes the second entry a comment of the first."""
    path = archive(tmp_path / "a.npz", [("a.npy", npy()), ("b.npy", npy())])
    content = bytearray(path.read_bytes())
    first, second = content.index(b"PK\1\2"), content.rindex(b"PK\1\2")
    end = content.rindex(b"PK\5\6")
    content[first + 32 : first + 34] = (end - second).to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged.*says that it has 2 arrays, but has 1"):
        files.load_arrays(path)


def test_archives_of_all_versions_and_much_compressed_ones_are_read(tmp_path):
    long = npy(data=b"\1" * 8, version=1)
    second = long[:6] + b"\2\0" + long[8:10] + b"\0\0" + long[10:]
    path = archive(tmp_path / "a.npz", [("a.npy", long), ("b.npy", second)])
    found = files.load_arrays(path)
    np.testing.assert_array_equal(found["a"], found["b"])
    np.savez_compressed(path, zeros=np.zeros(1_000_000, "float32"))
    assert not files.load_arrays(path)["zeros"].any()


def test_a_small_archive_of_a_large_array_is_read_by_who_says_so(tmp_path):
    """Compressed by bzip2, 4 MB of zeros take 200 bytes."""
    content = io.BytesIO()
    np.save(content, np.zeros(1_000_000, "float32"))
    path = archive(tmp_path / "a.npz", [("w.npy", content.getvalue())], zipfile.ZIP_BZIP2)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"a\.npz' exceeds a limit .*--limit expansion=") as error:
        files.load_arrays(path)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    number = int(str(error.value).rpartition("=")[2])
    found = files.load_arrays(path, limits=files.Limits(expansion=number))
    assert found["w"].shape == (1_000_000,)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_limits_hold_for_plain_files_and_starts(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    arrays = {"x" * 30: np.ones(2, "float32"), "y": np.ones(2, "float32")}
    np.savez(path, **arrays) if suffix == ".npz" else save_file(arrays, path)
    upload, out = tmp_path / "up.safetensors", tmp_path / "out.safetensors"
    update = Update({"params": {"y": np.ones(2, "float32")}}, "params")
    files.save_update(upload, update, algorithm="fedavg", client="a", examples=1)
    limits = {"arrays": 1, "name": 29} | ({} if suffix == ".npz" else {"header": 50})
    for limit, most in limits.items():
        with pytest.raises(ValueError, match=rf"a\{suffix}' exceeds .*--limit {limit}="):
            files.load_arrays(path, limits=files.Limits(**{limit: most}))
    with pytest.raises(ValueError, match=rf"a\{suffix}' exceeds .*--limit name=3"):
        files.merge_files(out, [upload], start=path, limits=files.Limits(name=20))
    files.merge_files(out, [upload], start=path)


def test_names_that_are_there_twice_are_refused(tmp_path):
    """Programs differ in which of them counts: one would check what another reads."""
    path = tmp_path / "a.safetensors"
    save_file({"w": np.ones(2, "float32")}, path)
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")].decode().strip()
    entry = json.dumps(json.loads(header)["w"] | {"shape": [1, 2]})
    text = f'{header[:-1]},"w":{entry}}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[-8:])
    with pytest.raises(ValueError, match=r"is damaged.*a name is there twice"):
        files.load_arrays(path)


def test_a_merged_model_is_read_as_it_was_written_or_not_at_all(paths, tmp_path):
    out = tmp_path / "merged.safetensors"
    files.merge_files(out, paths)
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    with pytest.raises(ValueError, match=r"merged.* was changed after it was written"):
        files.load_arrays(out)
    # Without its digest it would be no plain file either.
    out.write_bytes(bytes(content).replace(b'"sha256"', b'"sha257"'))
    with pytest.raises(ValueError, match=r"is damaged.*lacks its description or its digest"):
        files.load_arrays(out)
