"""What files refuse in words, where it gave another client's, half or no result before."""

import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fisherjax as fj
from fisherjax import files
from fisherjax.algorithms import Update


@pytest.mark.parametrize("client", [3, 7, -1, 1.0, "0", [0], True])
def test_a_client_that_is_not_there_is_refused(client):
    updates = Update({"params": {"w": np.arange(3.0)}}, "params")
    assert files.of_client(updates, np.int32(2)).values["params"]["w"] == 2
    with pytest.raises(IndexError, match=r"^client is .*; expected 0 to 2"):
        files.of_client(updates, client)


def test_one_client_is_not_selected_from_an_update_of_one():
    one = Update({"params": {"w": np.ones((3, 2)), "b": np.ones(2)}}, "params")
    with pytest.raises(ValueError, match=r"leading axes .* expected the number of clients"):
        files.of_client(one, 1)


def merged(folder, *checkpoints, **how):
    paths = [folder / f"{number}.safetensors" for number in range(len(checkpoints))]
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        save_file(checkpoint, path)
    files.merge_files(folder / "out.safetensors", paths, **how)
    return load_file(folder / "out.safetensors")


VARIANCES = [
    ("bn.running_mean", "bn.running_var"),
    ("bn/mean", "bn/var"),
    ("bn/moving_mean:0", "bn/moving_variance:0"),
]


@pytest.mark.parametrize(("mean", "variance"), VARIANCES)
def test_plain_running_variances_are_refused_beside_their_means(tmp_path, mean, variance):
    """Their mean is 1, where the mixture of clients with means 0 and 10 has 26."""
    each = [{mean: np.full(2, x, "f4"), variance: np.ones(2, "f4")} for x in (0, 10)]
    with pytest.raises(ValueError, match=rf"0\.safe.*{variance}' stands beside.*variance \+ mean"):
        merged(tmp_path, *each)
    # Layers may be called so too, and second moments are averaged to those of the mixture.
    merged(tmp_path, {"fc_mean.weight": np.ones(2), "fc_var.weight": np.ones(2)})
    moments = [{mean: x[mean], "second": x[variance] + x[mean] ** 2} for x in each]
    found = merged(tmp_path, *moments)
    np.testing.assert_array_equal(found["second"] - found[mean] ** 2, 26)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_plain_checkpoints_keep_their_dtypes(tmp_path, dtype):
    """The mean is NumPy's in float64, rounded once, of the largest finite numbers too."""
    dtype, source = np.dtype(dtype), np.random.RandomState(0)
    each = source.normal(size=(3, 50)).astype(dtype)
    each[:, 0] = float(ml_dtypes.finfo(dtype).max)
    found = merged(tmp_path, *({"w": x} for x in each), weights=[1, 2, 5])["w"]
    assert found.dtype == dtype
    expected = np.average(each[:, 1:].astype("float64"), axis=0, weights=[1, 2, 5])
    rounding = {"rtol": 1e-15, "atol": 1e-16} if dtype == "float64" else {"rtol": 0}
    np.testing.assert_allclose(found[1:].astype("float64"), expected.astype(dtype), **rounding)
    assert found[0] == each[0, 0]


@pytest.mark.parametrize("other", [np.zeros(3, "int32"), np.zeros(2, "int64"), np.zeros(2, bool)])
def test_arrays_that_are_not_of_floats_are_compared_too(tmp_path, other):
    first = {"w": np.ones(2), "n": np.zeros(2, "int32")}
    with pytest.raises(ValueError, match=r"n is .*1\.safe.*, expected int32\[2\] as in .*0\.s"):
        merged(tmp_path, first, first | {"n": other})
    with pytest.raises(ValueError, match=r"n is int32\[2\] in .*0\.s.*, expected .* as in the st"):
        merged(tmp_path, first, first, start=first | {"n": other})
    assert merged(tmp_path, first, first, start=first).keys() == first.keys()


def test_an_array_without_a_name_is_kept_or_refused(tmp_path):
    """Only a bare array is called "array"."""
    for tree in ({"": np.ones(2), "array": np.zeros(3)}, {"": np.ones(2)}):
        files.save_arrays(tmp_path / "a.safetensors", tree)
        for like in (None, tree):
            found = files.load_arrays(tmp_path / "a.safetensors", like)
            assert found.keys() == tree.keys()
            assert all(map(np.array_equal, found.values(), tree.values()))
        with pytest.raises(ValueError, match="an array without a name, '', which a merged file"):
            merged(tmp_path, tree, tree)
        update, path = Update({"params": tree}, "params"), tmp_path / "update.safetensors"
        files.save_update(path, update, algorithm="fedavg", client="a", examples=1)
        if len(tree) > 1:
            with pytest.raises(ValueError, match="client 'a' has an array without a name"):
                files.merge_files(tmp_path / "out.safetensors", [path])


def test_paths_are_checked_in_words(tmp_path):
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.symlink_to(second)
    second.symlink_to(first)
    for write in (files.save_arrays, files.merge_files):
        with pytest.raises(ValueError, match="is a link of a loop, which names no file"):
            write(first, {"w": np.ones(2)})
    assert first.is_symlink()
    path = os.fsencode(tmp_path / "a.safetensors")
    files.save_arrays(path, {"w": np.ones(2)})
    assert files.load_arrays(path).keys() == {"w"}
    out = os.fsencode(tmp_path / "out.safetensors")
    assert files.merge_files(out, [path], start=path).algorithm == "fedavg"
    for paths in (str(path), path, tmp_path / "a.safetensors", 3):
        with pytest.raises(TypeError, match=r"^paths is .* expected a list of paths"):
            files.merge_files(out, paths)
    with pytest.raises(TypeError, match=r"^the path is 3; expected a string or a pathlib\.Path"):
        files.load_arrays(3)
    for read in (files.load_arrays, files.load_update, files.unseal):
        with pytest.raises(TypeError, match=r"^limits is a dict; expected files\.Limits"):
            read(path, limits={"arrays": 1})


def test_what_nobody_could_read_by_the_same_limits_is_not_written(tmp_path):
    path, many = tmp_path / "a.safetensors", {str(x): np.ones(1, "f4") for x in range(9)}
    deep = {"x": {"x": np.ones(1, "f4")}}
    cases = [
        ("name", 1000, {"x" * 1001: np.ones(1)}, ()),
        ("arrays", 8, many, ()),
        ("arrays", 9, many, ("frozen",)),
        ("header", 400, many, ()),
        ("nesting", 3, {"w": fj.fisher.Diagonal(deep["x"])}, ()),
    ]
    for limit, most, tree, frozen in cases:
        limits = files.Limits(**{limit: most})
        if not frozen and limit != "nesting":
            with pytest.raises(ValueError, match=rf"a\.safe.*exceeds a limit.*--limit {limit}="):
                files.save_arrays(path, tree, limits=limits)
        update = Update({"params": tree, "more": deep}, "params", {}, frozen)
        how = {"algorithm": "fedavg", "client": "a", "examples": 1}
        with pytest.raises(ValueError, match=rf"a\.safe.*exceeds a limit.*--limit {limit}="):
            files.save_update(path, update, **how, limits=limits)
        assert not path.exists()


@pytest.mark.parametrize(
    ("algorithm", "kind"), [("fedavg", "params"), ("fisher_merge", "diagonal")]
)
def test_uploads_of_another_network_are_named(tmp_path, algorithm, kind):
    paths = [tmp_path / f"{width}.safetensors" for width in (3, 4)]
    for width, path in zip((3, 4), paths, strict=True):
        params = {"w": np.ones((2, width), "f4"), "b": np.ones(2, "f4")}
        values = {"params": params}
        if kind == "diagonal":
            values["fisher"] = fj.fisher.Diagonal(params)
        how = {"algorithm": algorithm, "client": str(width), "examples": 1}
        files.save_update(path, Update(values, kind), **how)
    said = r"4\.safe.* holds other layers than '.*3\.safe.*w is float32\[2, 4\], expected float32"
    with pytest.raises(ValueError, match=said):
        files.merge_files(tmp_path / "out.safetensors", paths, algorithm=algorithm)
