"""Checkpoints of shards, merged in pieces as in memory, resumed where they stopped, or refused."""

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import fisherjax as fj
from fisherjax import files
from fisherjax.__main__ import main
from fisherjax.files import _shards
from fisherjax.files.checkpoints import _pieces, _unfinished
from tests import damage

ROOT = Path(__file__).parents[1]
BF16, INDEX = ml_dtypes.bfloat16, "model.safetensors.index.json"
SHARDS = ("model-1.safetensors", "model-2.safetensors")
WEIGHTS = [20, 10, 30]
NAMES = ("a", "b", "c")
P = np.divide(WEIGHTS, np.sum(WEIGHTS))


def model_of(seed):
    """Make a network of three leaves of several dtypes, of which one has more than one piece."""
    source = np.random.RandomState(seed)
    return {
        "fc.weight": source.normal(size=(70, 60)).astype(BF16),
        "fc.bias": source.normal(size=60).astype("float16"),
        "head.weight": source.normal(size=(60, 3)).astype("float32"),
        "steps": np.array(seed),
    }


def write(folder, arrays, shards=2):
    """Write a model as Hugging Face's tools do."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"name": folder.name}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    places = {name: SHARDS[i % shards] for i, name in enumerate(arrays)}
    for shard in SHARDS[:shards]:
        own = {x: y for x, y in arrays.items() if places[x] == shard}
        save_file(own, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.fixture
def folders(tmp_path):
    return [write(tmp_path / name, model_of(seed)) for seed, name in enumerate(NAMES)]


@pytest.fixture
def start(tmp_path):
    return write(tmp_path / "start", model_of(9))


@pytest.fixture
def small_pieces(monkeypatch):
    """Split leaves of a few thousand entries, whose last piece is padded."""
    monkeypatch.setattr(_shards, "PIECE", 1 << 10)
    monkeypatch.setattr(_pieces, "_SIZES", [1 << 6, 1 << 10])


def floats_of(arrays):
    return {x: y.astype("float32") for x, y in arrays.items() if x != "steps"}


MODELS = [floats_of(model_of(seed)) for seed in range(3)]
START = floats_of(model_of(9))
FEDERATION = fj.clients.federation((np.zeros((3, 1)), np.zeros(3)), [[0], [1], [2]])


def read(folder):
    return {n: x for shard in SHARDS for n, x in load_file(folder / shard).items()}


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# What comes out


@pytest.mark.parametrize("density", [0.2, 0.9])
def test_ties_in_pieces_has_the_bits_of_ties_in_memory(folders, start, small_pieces, density):
    """Thresholds are of whole models, and sums, signs and ties of magnitudes as in memory."""
    out = start.with_name("out")
    how = {"algorithm": "ties", "start": start, "weights": WEIGHTS, "density": density}
    files.merge_files(out, folders, **how, scaling=0.7)
    method = fj.algorithms.ties(density=density, scaling=0.7)
    trained = fj.training.Trained(fj.tree.stack(MODELS), START)
    sent = fj.merging.summarize(method, trained, FEDERATION, key=jax.random.key(0))
    expected, _, _ = fj.merging.merge(method, START, sent, WEIGHTS)
    found = read(out)
    for name, leaf in expected.items():
        dtype = model_of(9)[name].dtype
        np.testing.assert_array_equal(found[name], np.asarray(leaf).astype(dtype))


def test_magnitudes_that_tie_are_all_kept_or_none(tmp_path, small_pieces):
    """By sorting in float64: of 3,000 entries of five magnitudes the third largest is the 40 %."""
    source = np.random.RandomState(0)
    model = {"w": source.randint(-4, 5, size=3000).astype(BF16)}
    zeros = {"w": np.zeros(3000, BF16)}
    save_file(model, tmp_path / "a.safetensors")
    out, how = tmp_path / "out.safetensors", {"algorithm": "ties", "start": zeros}
    for density in (1e-9, 0.1, 0.4, 0.999):
        files.merge_files(out, [tmp_path / "a.safetensors"], **how, density=density)
        wide = model["w"].astype("f8")
        smallest = np.sort(abs(wide))[3000 - max(1, round(density * 3000))]
        np.testing.assert_array_equal(load_file(out)["w"], np.where(abs(wide) < smallest, 0, wide))


def test_the_mean_is_that_of_float64_and_files_are_those_of_the_first(folders, small_pieces):
    out = folders[0].with_name("out-1.5B")  # no suffix of a file
    merged = files.merge_files(out, folders, weights=WEIGHTS)
    found, first = read(out), model_of(0)
    for name in MODELS[0]:
        mean = sum(p * own[name].astype("f8") for p, own in zip(P, MODELS, strict=True))
        np.testing.assert_array_equal(found[name], mean.astype(first[name].dtype))
    assert found["steps"] == 0
    # Only what was merged, and what is no weight; programs that need the format find it.
    expected = {*SHARDS, INDEX, "config.json", "1_Pooling/config.json"}
    assert everything(out).keys() == expected
    assert json.loads((out / "config.json").read_text()) == {"name": "a"}
    assert merged.copied_from == str(folders[0])
    for shard in SHARDS:
        with safe_open(out / shard, framework="np") as file:
            assert file.metadata()["format"] == "pt"
    places = json.loads((out / INDEX).read_text())["weight_map"]
    assert places == json.loads((folders[0] / INDEX).read_text())["weight_map"]
    # A merged folder is a checkpoint, of which a merge with itself alone changes nothing.
    files.merge_files(out.with_name("again"), [out])
    assert {n: x.tobytes() for n, x in read(out.with_name("again")).items()} == {
        n: x.tobytes() for n, x in found.items()
    }
    assert files.load_arrays(out)["fc.bias"].dtype == np.float16


def test_mixed_shards_and_files_have_the_dtypes_of_the_start(tmp_path, start):
    """Of a folder in float32, a file in bfloat16 and a start in several dtypes."""
    wide = write(tmp_path / "wide", {x: y.astype("f4") for x, y in MODELS[0].items()})
    narrow = {x: y.astype(BF16) for x, y in MODELS[1].items()}
    save_file(narrow, tmp_path / "narrow.safetensors")
    began = {x: y for x, y in model_of(9).items() if x != "steps"}
    out = tmp_path / "out.safetensors"
    files.merge_files(out, [wide, tmp_path / "narrow.safetensors"], start=began)
    for name, leaf in load_file(out).items():
        mean = (MODELS[0][name].astype("f8") + narrow[name].astype("f8")) / 2
        assert leaf.dtype == began[name].dtype
        np.testing.assert_array_equal(leaf, mean.astype(leaf.dtype))


def apply(params, x):
    return jnp.tanh(x @ params["fc.weight"] + params["fc.bias"]) @ params["head.weight"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)


def diagonals():
    return [{x: y**2 + np.float32(0.1 * (y > 0)) for x, y in model.items()} for model in MODELS]


@pytest.fixture
def fishers(tmp_path):
    paths = [tmp_path / f"{name}.fisher.safetensors" for name in NAMES]
    for path, entries, model in zip(paths, diagonals(), MODELS, strict=True):
        files.save_fisher(path, fj.fisher.Diagonal(entries), params=model)
    return paths


def test_fisher_merging_in_pieces_is_the_weighted_mean_of_float64(folders, fishers, small_pieces):
    """Below the floor, which is relative to the whole leaf's mean, it is the mean."""
    out, floor = folders[0].with_name("out"), 0.3
    pairs = list(zip(folders, fishers, strict=True))
    merged = files.merge_files(out, pairs, weights=WEIGHTS, floor=floor)
    assert merged.algorithm == "fisher_merge"
    for name, leaf in read(out).items():
        if name == "steps":
            continue
        total = sum(p * f[name].astype("f8") for p, f in zip(P, diagonals(), strict=True))
        each = zip(P, diagonals(), MODELS, strict=True)
        product = sum(p * f[name].astype("f8") * w[name] for p, f, w in each)
        mean = sum(p * w[name].astype("f8") for p, w in zip(P, MODELS, strict=True))
        expected = np.where(total >= floor * total.mean(), product / total, mean)
        assert (total < floor * total.mean()).any()
        eps = float(jnp.finfo(leaf.dtype).eps)
        np.testing.assert_allclose(leaf.astype("f8"), expected, rtol=2 * eps, atol=4 * eps)
        means = np.array([f[name].astype("f8").mean() for f in diagonals()])
        np.testing.assert_allclose(merged.votes[name], P * means / (P @ means), rtol=1e-5)


def test_a_diagonal_without_damping_is_its_closed_form_in_files_and_in_memory(tmp_path):
    """Of curvatures over 14 decades, of which the least count as the largest; zero is the mean."""
    source, paths = np.random.RandomState(0), []
    models = [{"w": source.normal(size=500).astype("f4")} for _ in NAMES]
    entries = [{"w": np.exp(4 * source.normal(size=500)).astype("f4")} for _ in NAMES]
    for name, model, entry in zip(NAMES, models, entries, strict=True):
        entry["w"][:9] = 0
        paths.append([tmp_path / f"{name}.safetensors", tmp_path / f"{name}.fisher.safetensors"])
        save_file(model, paths[-1][0])
        files.save_fisher(paths[-1][1], fj.fisher.Diagonal(entry), params=model)
    out, name = tmp_path / "out.safetensors", "fedfisher_diag"
    files.merge_files(out, paths, algorithm=name, weights=WEIGHTS)
    method = fj.algorithms.make(name, MODEL)
    sent = {"params": fj.tree.stack(models), "fisher": fj.fisher.Diagonal(fj.tree.stack(entries))}
    update = fj.algorithms.Update(sent, method.kind)
    found = fj.merging.merge(method, models[0], update, WEIGHTS)[0]["w"]
    votes = P[:, None] * np.stack([entry["w"].astype("f8") for entry in entries])
    votes[:, :9] = P[:, None]
    expected = (votes * [model["w"] for model in models]).sum(0) / votes.sum(0)
    np.testing.assert_allclose(load_file(out)["w"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_leaves_that_no_fisher_file_has_are_averaged_and_named(folders, tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in NAMES]
    for path, entries, model in zip(paths, diagonals(), MODELS, strict=True):
        entries, own = ({"fc.bias": x["fc.bias"]} for x in (entries, model))
        files.save_fisher(path, fj.fisher.Diagonal(entries), params=own)
    merged = files.merge_files(tmp_path / "out", list(zip(folders, paths, strict=True)))
    assert set(merged.taken) == {"fc.weight", "head.weight"}
    mean = sum(x["head.weight"].astype("f8") for x in MODELS) / 3
    np.testing.assert_allclose(read(tmp_path / "out")["head.weight"], mean, rtol=1e-6)


SOURCE = """
import numpy as np, jax.numpy as jnp, fisherjax as fj
def apply(params, x):
    return jnp.tanh(x @ params["fc.weight"] + params["fc.bias"]) @ params["head.weight"]
def model_and_data():
    source = np.random.RandomState(0)
    data = source.normal(size=(20, 70)).astype("float32"), source.randint(3, size=20)
    return fj.Model(apply, fj.likelihoods.categorical), data
"""


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fedfisher_kfac", "regmean"])
def test_the_command_computes_fisher_files_that_merge_as_uploads_do(
    tmp_path, folders, algorithm, capsys
):
    (tmp_path / "mine.py").write_text(SOURCE)
    given = ["--import", f"{tmp_path / 'mine.py'}:model_and_data", "--algorithm", algorithm]
    fishers = [str(tmp_path / f"{name}.fisher.safetensors") for name in NAMES]
    for out, folder in zip(fishers, folders, strict=True):
        assert main(["fisher", out, str(folder), *given]) == 0
    assert "The Fisher of 4,440 parameters of" in capsys.readouterr().out
    assert main(["inspect", fishers[0]]) == 0
    assert "mine.py:model_and_data, sha256" in capsys.readouterr().out
    out = tmp_path / "out"
    words = ["merge", str(out), *map(str, folders), "--fisher", *fishers]
    assert main([*words, "--weights", *map(str, WEIGHTS)]) == 0
    assert f"{algorithm} of 3 plain checkpoints" in capsys.readouterr().out
    scope: dict = {}
    exec(SOURCE, scope)
    method = fj.algorithms.make(algorithm, MODEL)
    data = scope["model_and_data"]()[1]
    federation, key = fj.clients.federation([data]), jax.random.key(0)
    sent = [
        files.of_client(fj.merging.summarize(method, [own], federation, key=key), 0)
        for own in MODELS
    ]
    expected, _, _ = fj.merging.merge(method, MODELS[0], sent, WEIGHTS)
    for name, leaf in expected.items():
        dtype = model_of(0)[name].dtype
        eps = max(float(jnp.finfo(dtype).eps), 1e-5)
        found = read(out)[name].astype("f4")
        np.testing.assert_allclose(found, np.asarray(leaf), rtol=eps, atol=eps)


def test_the_gram_matrices_of_regmean_plus_plus_are_those_of_regmean_at_the_start(
    tmp_path, folders, start, capsys
):
    (tmp_path / "mine.py").write_text(SOURCE)
    made = ["--import", f"{tmp_path / 'mine.py'}:model_and_data", "--algorithm"]
    paths = [str(tmp_path / f"{name}.fisher.safetensors") for name in ("plus", "own")]
    plus = ["fisher", paths[0], str(folders[0]), *made, "regmean_plus_plus"]
    assert main(plus) == 1
    assert "which is unknown. Pass" in (said := capsys.readouterr().err)
    assert said.endswith("the command `fisher` reads it from --start.\n")
    assert main([*plus, "--start", str(start)]) == 0
    assert main(["fisher", paths[1], str(start), *made, "regmean"]) == 0
    found, expected = map(files.load_arrays, paths)
    for name, gram in expected.items():
        np.testing.assert_array_equal(found[name], gram)
    assert main(["fisher", paths[1], str(start), *made, "ties"]) == 1
    assert "algorithm is 'ties'; expected 'fisher_merge' or 'regmean'" in capsys.readouterr().err


@pytest.mark.parametrize("curvature", [fj.fisher.Diagonal, lambda entries: entries])
def test_curvature_of_leaves_that_are_no_params_is_refused(tmp_path, curvature):
    params = {"fc.weight": np.ones((3, 2), "f4")}
    both = curvature({name: np.ones((3, 2), "f4") for name in ("fc.weight", "head.weight")})
    with pytest.raises(ValueError, match=r"\['head\.weight'\], which are not among its params"):
        files.save_fisher(tmp_path / "a.safetensors", both, params=params)


def test_shards_that_the_index_does_not_name_are_said_not_to_be_read(tmp_path, folders):
    save_file({"fc.bias": np.full(60, 9, "f4")}, folders[1] / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"b' has consolidated\.safetensors besides the weights"):
        files.merge_files(tmp_path / "out", folders[1:])
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()
    mean = sum(x["fc.bias"].astype("f8") for x in MODELS[1:]) / 2
    np.testing.assert_array_equal(read(tmp_path / "out")["fc.bias"], mean.astype("float16"))


def peak_of(act):
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_that_of_a_piece_of_all_models_whatever_the_size_of_a_leaf(tmp_path):
    """Of NumPy's arrays, which hold the pieces; a leaf of one model takes 4 MB, and 16 MB."""
    peaks = []
    for size in (1_000_000, 4_000_000):
        paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
        for path in paths:
            save_file({"w": np.zeros(size, "f4")}, path)
        models = [_shards.open_checkpoint(path, files.Limits()) for path in paths]
        pieces = fj.algorithms.Pieces(kept="density")
        plan = _pieces.Plan(models, [], models[0], np.ones(2), None, pieces, 0.2, ["w"], [])
        out = tmp_path / "out.safetensors"
        peaks.append(peak_of(lambda paths=paths, out=out: files.merge_files(out, paths)))
        peaks.append(peak_of(lambda plan=plan: _pieces.smallest_kept(plan)))
    # The thread that reads ahead holds a piece of each model more, 2 MiB, or not; a leaf is 12 MB
    # larger.
    assert peaks[2] - peaks[0] < 3_000_000
    assert peaks[3] - peaks[1] < 3_000_000


# Leaves that differ


def test_leaves_that_differ_are_taken_as_asked_and_named(tmp_path, folders, start, capsys):
    other = model_of(1) | {"head.weight": np.ones((60, 5), "f4"), "extra": np.ones(2, "f4")}
    shutil.rmtree(folders[1])
    write(folders[1], other)
    with pytest.raises(ValueError, match=r"extra is float32\[2\] in .*b', expected none .*head\."):
        files.merge_files(tmp_path / "out", folders)
    kept = {"start": START["head.weight"], "first": MODELS[0]["head.weight"], "skip": None}
    for how, expected in kept.items():
        out = tmp_path / f"by-{how}"
        words = ["merge", str(out), *map(str, folders), "--unequal", how, "--start", str(start)]
        assert main([*words, "--algorithm", "ties"]) == 0
        printed = capsys.readouterr().out
        done = "left out" if expected is None else f"of the {how}"
        assert f"head.weight  {done}\n" in printed
        assert "extra        left out\n" in printed
        found = read(out)
        assert "extra" not in found
        assert ("head.weight" in found) == (expected is not None)
        if expected is not None:
            np.testing.assert_array_equal(found["head.weight"], expected)
        # Its config describes the shapes that it has.
        source = folders[0] if how == "first" else start
        assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_packed_weights_are_no_counters(tmp_path):
    """Their scales are floats, and would be averaged without them."""
    for name in "ab":
        packed = np.full((2, 2), ord(name), "int8")
        save_file({"w": np.ones(2, "f4"), "q": packed}, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(ValueError, match=r"q is int8\[2, 2\] with other numbers .*unpack it first"):
        files.merge_files(tmp_path / "out.safetensors", paths)
    files.merge_files(tmp_path / "out.safetensors", paths, unequal="first")
    assert (load_file(tmp_path / "out.safetensors")["q"] == ord("a")).all()


# Stopped and refused


def stop_at(leaf):
    def progress(name, number, total):
        if name == leaf:
            raise KeyboardInterrupt

    return progress


def test_a_merge_that_was_stopped_goes_on_at_its_leaf(folders, start, monkeypatch):
    out, leaf = start.with_name("out"), "head.weight"
    how = {"algorithm": "ties", "start": start, "weights": WEIGHTS}
    with pytest.raises(KeyboardInterrupt):
        files.merge_files(out, folders, **how, progress=stop_at(leaf))
    left = out.with_name("out.unfinished")
    assert not out.exists()
    assert {x.name for x in left.iterdir()} == {".journal", *SHARDS}
    merged = []
    original = _pieces.merged_pieces
    monkeypatch.setattr(
        files.checkpoints._leaf_writers,
        "merged_pieces",
        lambda plan, name, *args: (merged.append(name), original(plan, name, *args))[1],
    )
    # Magnitudes are not computed again either.
    monkeypatch.setattr(files.checkpoints._leaf_writers, "smallest_kept", None)
    files.merge_files(out, folders, **how)
    assert merged == [leaf]
    assert not left.exists()
    monkeypatch.undo()
    whole = out.with_name("whole")
    files.merge_files(whole, folders, **how)
    assert everything(out) == everything(whole)


SPOILS = {
    "a cut line": lambda left: (left / ".journal").write_text((left / ".journal").read_text()[:-3]),
    "no journal": lambda left: (left / ".journal").unlink(),
    "other numbers": lambda left: (left / ".journal").write_text(
        (left / ".journal").read_text().replace('["fc.bias", ', '["fc.bias", 1')
    ),
    "other bytes": lambda left: [
        x.write_bytes(x.read_bytes()[:-8] + bytes(8)) for x in left.glob("*.safetensors")
    ],
    "a shard is gone": lambda left: (left / SHARDS[0]).unlink(),
    "another merge": lambda left: None,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_damaged_journal_or_another_merge_begins_anew(folders, spoil):
    out = folders[0].with_name("out")
    weights = [1, 1, 1] if spoil in ("another merge",) else WEIGHTS
    with pytest.raises(KeyboardInterrupt):
        files.merge_files(out, folders, weights=weights, progress=stop_at("head.weight"))
    SPOILS[spoil](out.with_name("out.unfinished"))
    files.merge_files(out, folders, weights=WEIGHTS)
    whole = out.with_name("whole")
    files.merge_files(whole, folders, weights=WEIGHTS)
    assert everything(out) == everything(whole)


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(folders, monkeypatch):
    out = folders[0].with_name("out")
    before = everything(out.parent)
    free = shutil.disk_usage(out.parent)._replace(free=5000)
    monkeypatch.setattr(_unfinished.shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match=r"out' needs .* GB more, but its disk has 0\.00 GB free"):
        files.merge_files(out, folders)
    assert everything(out.parent) == before
    assert not out.with_name("out.unfinished").exists()


FULL = """
import resource, sys
from fisherjax.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_disk_that_fills_meanwhile_leaves_nothing(folders):
    out = folders[0].with_name("out")
    before = everything(out.parent)
    words = [sys.executable, "-c", FULL, "merge", str(out), *map(str, folders)]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: [Errno 27] File too large\n"
    assert everything(out.parent) == before
    assert sorted(x.name for x in out.parent.iterdir()) == ["a", "b", "c"]


def reindex(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def spoil_number(folder):
    arrays = load_file(folder / SHARDS[0])
    arrays["fc.weight"][69, 59] = np.nan
    save_file(arrays, folder / SHARDS[0])


def link(folder, name, target):
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def fp8(folder):
    header, data = damage.opened((folder / SHARDS[1]).read_bytes())
    header["fc.bias"] |= {"dtype": "F8_E4M3", "shape": [120]}
    (folder / SHARDS[1]).write_bytes(damage.closed(header, data))


def save_upload(path):
    update = fj.algorithms.Update({"params": {"fc.weight": np.ones((70, 60), "f4")}}, "params")
    files.save_update(path, update, algorithm="fedavg", client="ann", examples=1)


BAD = {
    "a missing shard": (
        lambda b: (b / SHARDS[1]).unlink(),
        r"b/model.safetensors.index.json' names the shards model-2.safetensors, which are not in",
    ),
    "a leaf that is nowhere": (
        lambda b: reindex(b, lambda places: places.update(more=SHARDS[0])),
        r"index.json' puts more into 'model-1.safetensors', which lacks it|which lacks them",
    ),
    "a leaf elsewhere": (
        lambda b: reindex(b, lambda places: places.pop("fc.bias")),
        r"b/model-2.safetensors' holds fc.bias, but .* does not name fc.bias",
    ),
    "a leaf in two shards": (
        lambda b: save_file(
            load_file(b / SHARDS[0]) | {"fc.bias": np.ones(60, "float16")}, b / SHARDS[0]
        ),
        r"b/model-1.safetensors' holds fc.bias, but .* puts 'fc.bias' into 'model-2.safetensors'",
    ),
    "a name twice": (
        lambda b: (b / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
        "index.json' is damaged.*a name is there twice",
    ),
    "a path upwards": (
        lambda b: reindex(b, lambda places: places.update({"fc.bias": f"../a/{SHARDS[1]}"})),
        r"puts 'fc.bias' into '../a/model-2.safetensors'; expected the name of a .safetensors file",
    ),
    "an absolute path": (
        lambda b: reindex(
            b, lambda places: places.update({"fc.bias": str(b.with_name("a") / SHARDS[1])})
        ),
        r"puts 'fc.bias' into '/.*'; expected the name of",
    ),
    "a link of a shard": (
        lambda b: link(b, SHARDS[1], b.with_name("a") / SHARDS[1]),
        r"b/model-2.safetensors' is a link to .*a/model-2.safetensors', outside of its folder",
    ),
    "a link of another file": (
        lambda b: link(b.with_name("a"), "config.json", "/etc/hostname"),
        r"a/config.json' is a link to '/etc/hostname', outside of its folder",
    ),
    "NaN": (spoil_number, r"b' is not finite: params/fc.weight"),
    "8 bits": (fp8, r"model-2.* array 'fc.bias' has type F8_E4M3; .*Convert .* to BF16 first"),
    "no index": (
        lambda b: (b / INDEX).unlink(),
        r"b' is a folder with 2 .safetensors files and no index; expected one file of weights",
    ),
    "two indices": (
        lambda b: shutil.copy(b / INDEX, b / f"other{INDEX}"),
        "b' is a folder with 2 indices",
    ),
    "an upload": (
        lambda b: save_upload(b / SHARDS[0]),
        r"model-1.safetensors' is a file of upload; expected one of a model",
    ),
    "the same twice": (
        lambda b: (shutil.rmtree(b), b.symlink_to(b.with_name("a"))),
        r"/b' is in .*a' and in .*b': merge only one of them",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_by_name_and_nothing_is_written(folders, case, capsys):
    spoil, message = BAD[case]
    spoil(folders[1])
    out, before = folders[0].with_name("out"), everything(folders[0].parent)
    with pytest.raises(ValueError, match=message):
        files.merge_files(out, folders)
    assert main(["merge", str(out), *map(str, folders)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert everything(out.parent) == before
    assert {x.name for x in out.parent.iterdir()} == set(NAMES)


def test_links_of_a_cache_are_followed(folders):
    """Hugging Face's cache has blobs, and links to them in snapshots/REVISION."""
    root = folders[0].parent / "cache"
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    for path in (*folders[0].glob("*.json"), *folders[0].glob("*.safetensors")):
        shutil.move(path, root / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    out = root / "out"
    files.merge_files(out, [snapshot, folders[1]])
    mean = (MODELS[0]["head.weight"].astype("f8") + MODELS[1]["head.weight"]) / 2
    np.testing.assert_array_equal(read(out)["head.weight"], mean.astype("f4"))
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize("algorithm", ["fedavg", "ties", "fisher_merge"])
def test_who_diverged_can_be_left_out(folders, start, fishers, algorithm, small_pieces):
    """The others merge as if it had never been there."""
    paths, how = folders, {"algorithm": algorithm, "start": start}
    if fj.algorithms.METHODS[algorithm].reads == {"fisher": fj.fisher.Diagonal}:
        paths = list(zip(folders, fishers, strict=True))
    few, out = start.with_name("few"), start.with_name("out")
    files.merge_files(few, [paths[0], paths[2]], weights=[20, 30], **how)
    spoil_number(folders[1])
    with pytest.warns(UserWarning, match=r"client '.*/b' for leaf 'params/fc.weight'"):
        merged = files.merge_files(out, paths, weights=WEIGHTS, on_nonfinite="drop", **how)
    assert merged.left_out == {str(folders[1]): "params/fc.weight"}
    np.testing.assert_allclose(merged.shares, [0.4, 0, 0.6])
    for name, leaf in read(few).items():
        found, eps = read(out)[name].astype("f8"), 1e-6
        if leaf.dtype != np.int64:
            eps = 2 * float(jnp.finfo(leaf.dtype).eps)
        np.testing.assert_allclose(found, leaf.astype("f8"), rtol=eps, atol=eps)


needs_adapters = pytest.mark.skipif(
    not hasattr(files, "merge_adapters"), reason="adapters are merged by files.merge_adapters"
)


@needs_adapters
def test_the_command_merges_folders_of_adapters(tmp_path, capsys):
    for name, x in (("ann", 1.0), ("bob", 3.0)):
        adapter = fj.adapters.Adapter(np.full((1, 2), x, "f4"), np.ones((2, 1), "f4"))
        files.save_adapter(tmp_path / name, {"query": adapter})
    folders = [str(tmp_path / name) for name in ("ann", "bob")]
    words = ["merge", str(tmp_path / "out"), *folders]
    assert main([*words, "--algorithm", "ties"]) == 1
    assert "--algorithm does not belong to a merge of adapters" in capsys.readouterr().err
    assert main([*words, "--weights", "1", "3", "--option", "rank=1"]) == 0
    assert f"The mean of 2 adapters is in {tmp_path / 'out'}\n" in capsys.readouterr().out
    found = files.load_adapter(tmp_path / "out").adapters["query"]
    np.testing.assert_allclose(fj.adapters.product(found), np.full((2, 2), 2.5), rtol=1e-5)


def other_network(folders, fishers):
    files.save_fisher(
        fishers[1], fj.fisher.Diagonal({"w": np.ones(2, "f4")}), params={"w": np.ones(2, "f4")}
    )


def other_params(folders, fishers):
    files.save_fisher(fishers[1], fj.fisher.Diagonal(diagonals()[1]), params=MODELS[0])


def other_sign(folders, fishers):
    entries = diagonals()[1]
    entries["fc.bias"][3] = -1
    files.save_fisher(fishers[1], fj.fisher.Diagonal(entries), params=MODELS[1])


def other_kind(folders, fishers):
    grams = {"head.weight": np.eye(60, dtype="f4")}
    files.save_fisher(fishers[1], grams, params=MODELS[1])


BAD_FISHERS = {
    "another network": (other_network, r"b.fisher.* of another network: w has shape \[2\] there"),
    "other params": (other_params, r"b.fisher.* other params than those of .*b': fc.bias differs"),
    "negative": (other_sign, r"b.fisher.*not symmetric positive semi-definite: fc.bias"),
    "another kind": (
        other_kind,
        r"b.fisher.* holds grams \(dict\); fisher_merge merges params",
    ),
    "a checkpoint": (
        lambda folders, fishers: shutil.copy(folders[1] / SHARDS[0], fishers[1]),
        "b.fisher.* was written by another program",
    ),
    "one byte": (
        lambda folders, fishers: fishers[1].write_bytes(fishers[1].read_bytes()[:-1] + b"\7"),
        "b.fisher.* was changed after it was written",
    ),
}


@pytest.mark.parametrize("case", BAD_FISHERS)
def test_bad_fisher_files_are_refused_by_name(folders, fishers, case):
    spoil, message = BAD_FISHERS[case]
    spoil(folders, fishers)
    out = folders[0].with_name("out")
    with pytest.raises(ValueError, match=message):
        files.merge_files(out, list(zip(folders, fishers, strict=True)))
    assert not list(out.parent.glob("out*"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"algorithm": "ties"}, r"The start is missing, .*as `start` \(--start\)"),
        ({"unequal": "start"}, "The start is missing"),
        ({"unequal": "second"}, "unequal is 'second'"),
        ({"algorithm": "regmean"}, "regmean merges params and grams of Fisher files. Compute"),
        ({"algorithm": "pfnm"}, "pfnm needs what no checkpoint has, and does not merge"),
        ({"algorithm": "scaffold"}, "scaffold takes more than one message, .* not merge checkp"),
        ({"algorithm": "ties", "start": {"fc.weight": np.ones(2)}}, "expected .* as in the start"),
    ],
)
def test_bad_arguments_are_refused(folders, how, message):
    with pytest.raises(ValueError, match=message):
        files.merge_files(folders[0].with_name("out"), folders, **how)


def test_a_folder_that_exists_is_not_replaced(folders):
    with pytest.raises(ValueError, match=r"b' exists: name a new folder, or remove it first"):
        files.merge_files(folders[1], folders[:1])
    files.merge_files(folders[0].with_name("out.safetensors"), folders)  # one file of all shards
    assert load_file(folders[0].with_name("out.safetensors")).keys() == model_of(0).keys()


@pytest.mark.long
def test_the_page_about_checkpoints_runs_and_its_command_makes_the_same_file(
    run_page, capsys, monkeypatch
):
    page = ROOT / "docs/how_to/fisher_files.md"
    names, text = run_page(page), page.read_text()
    assert capsys.readouterr().out.startswith("fisher_merge [0.")
    [command] = re.findall(r"^python -m fisherjax (fisher .*)$", text, re.MULTILINE)
    monkeypatch.chdir(names["folder"])
    before = files.load_arrays("a.fisher.safetensors")
    assert main(command.replace("model-a/", "a.safetensors").split()) == 0
    for name, found in files.load_arrays("a.fisher.safetensors").items():
        np.testing.assert_allclose(found, before[name], rtol=1e-4)


def test_a_number_of_the_journal_that_was_changed_is_not_believed(folders, start):
    out, how = start.with_name("out"), {"algorithm": "ties", "start": start}
    with pytest.raises(KeyboardInterrupt):
        files.merge_files(out, folders, **how, progress=stop_at("head.weight"))
    journal = out.with_name("out.unfinished") / ".journal"
    text = journal.read_text()
    assert '"smallest": [' in text
    # Still a number, and so large that everything would be trimmed.
    journal.write_text(text.replace('"smallest": [', '"smallest": [9'))
    files.merge_files(out, folders, **how)
    whole = out.with_name("whole")
    files.merge_files(whole, folders, **how)
    assert everything(out) == everything(whole)


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_no_merge_wrote_is_not_removed(folders, is_folder):
    other = folders[0].with_name("out.unfinished")
    if is_folder:
        other.mkdir()
        other = other / "thesis.txt"
    other.write_text("mine")
    with pytest.raises(FileExistsError, match=r"out\.unfinished' is needed .* no merge wrote it"):
        files.merge_files(folders[0].with_name("out"), folders)
    assert other.read_text() == "mine"


def test_a_file_called_journal_is_copied_like_others(folders):
    (folders[0] / "journal").write_text("of the model")
    out = folders[0].with_name("out")
    files.merge_files(out, folders)
    assert (out / "journal").read_text() == "of the model"


@pytest.mark.parametrize("name", ["merged", "merged.safetensors", "1_Pooling/merged"])
def test_a_result_within_a_folder_that_is_read_is_refused(folders, name):
    before = everything(folders[1])
    with pytest.raises(ValueError, match="which is read: write to a place outside of it"):
        files.merge_files(folders[1] / name, folders)
    assert everything(folders[1]) == before


def test_a_folder_and_the_file_in_it_are_one_checkpoint(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two.safetensors"
    one.mkdir()
    save_file({"w": np.ones(2, "float32")}, one / "model.safetensors")
    save_file({"w": np.zeros(2, "float32")}, two)
    with pytest.raises(ValueError, match="is read twice"):
        files.merge_files(tmp_path / "out", [one, two, one / "model.safetensors"])


def test_nan_in_an_array_that_is_copied_is_refused(tmp_path):
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"{number}.safetensors")
        arrays = {"w": np.ones(2, "float32"), "head": np.full(2 + number, np.nan, "float32")}
        save_file(arrays, paths[-1])
    out = tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match=r"0\.safetensors' is not finite: head"):
        files.merge_files(out, paths, unequal="first")
    assert not out.exists()


def test_iso_c_of_an_empty_matrix_is_empty(tmp_path):
    arrays, path = {"w": np.zeros((0, 3), "float32"), "b": np.ones(2, "float32")}, tmp_path / "a"
    save_file(arrays, path := path.with_suffix(".safetensors"))
    out = tmp_path / "out.safetensors"
    files.merge_files(out, [path], algorithm="iso_c", start=arrays)
    assert files.load_arrays(out)["w"].shape == (0, 3)


def test_a_fisher_file_does_not_replace_its_checkpoint(tmp_path, capsys):
    path, source = tmp_path / "a.safetensors", tmp_path / "mine.py"
    save_file({"w": np.ones((2, 1), "float32")}, path)
    source.write_text("def made(): raise RuntimeError")
    before = path.read_bytes()
    assert main(["fisher", str(path), str(path), "--import", f"{source}:made"]) == 1
    assert "exists, and is no Fisher file" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_ties_of_float64_keeps_as_many_entries_as_the_density_says(tmp_path, x64):
    """Magnitudes that differ in their last bits only are ordered in float64, too."""
    source, size, kept = np.random.RandomState(0), 40, 12
    change = (1 + source.permutation(size) * 1e-12) * source.choice([-1, 1], size)
    single = np.zeros(3, "float32")  # a leaf of another width, which loses all entries
    path, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    save_file({"w": 5 + change, "v": single}, path)
    start, how = {"w": np.full(size, 5.0), "v": single}, {"algorithm": "ties", "scaling": 1.0}
    files.merge_files(out, [path], **how, start=start, density=kept / (size + 3))
    largest = np.argsort(np.abs(change))[-kept:]
    expected = np.full(size, 5.0)
    expected[largest] += change[largest]
    np.testing.assert_allclose(files.load_arrays(out)["w"], expected, rtol=1e-14)
