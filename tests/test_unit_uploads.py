"""Uploads of methods that match units: files say which layer feeds which, and models may widen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import compression, files
from fisherjax.__main__ import main
from fisherjax.algorithms import Update

CLIENTS, COUNTS = ("ann", "bob", "cho"), (20, 10, 30)


def apply(params, x):
    """Two layers with biases, in a list."""
    first, last = params["layers"]
    return jnp.tanh(x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]


def params_of(seed):
    random = np.random.RandomState(seed)
    shapes = ({"kernel": (4, 5), "bias": (5,)}, {"kernel": (5, 3), "bias": (3,)})
    layers = [
        {name: jnp.asarray(2 * random.normal(size=shape), "float32") for name, shape in own.items()}
        for own in shapes
    ]
    return {"layers": layers}


MODEL = fj.Model(apply, fj.likelihoods.categorical)
PARAMS = [params_of(seed) for seed in range(3)]
SELDOM = pytest.param("otfusion", {"fix_last_layer": False}, marks=pytest.mark.slow)
METHODS = [("otfusion", {}), SELDOM, ("pfnm", {})]
METHODS += [("pfnm", {"concentration": 50.0, "misplaced_prior": True})]


def updates_of(name):
    random = np.random.RandomState(3)
    data = random.normal(size=(60, 4)).astype("float32"), random.randint(3, size=60)
    rows = np.split(np.arange(60), np.cumsum(COUNTS)[:-1])
    federation = fj.clients.federation(data, rows)
    method = fj.algorithms.make(name, MODEL)
    return fj.merging.summarize(method, PARAMS, federation, key=jax.random.key(0))


@pytest.fixture(scope="module", params=["otfusion", "pfnm"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def sent():
    return {name: updates_of(name) for name in ("otfusion", "pfnm")}


def save(folder, name, updates, **changes):
    paths = []
    for i, (client, examples) in enumerate(zip(CLIENTS, COUNTS, strict=True)):
        paths.append(folder / f"{client}.safetensors")
        how = {"algorithm": name, "client": client, "examples": examples} | changes
        files.save_update(paths[-1], files.of_client(updates, i), **how)
    return paths


def assert_equal(found, expected):
    """Compare files, whose arrays go by the names of leaves, and pytrees."""
    named = dict(zip(fj.tree.names(expected), jax.tree.leaves(expected), strict=True))
    assert found.keys() == named.keys()
    for leaf, array in named.items():
        np.testing.assert_array_equal(found[leaf], array)


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_files_merge_like_what_never_was_in_a_file(tmp_path, sent, name, options):
    out = tmp_path / "merged.safetensors"
    merged = files.merge_files(out, save(tmp_path, name, sent[name]), **options)
    method = fj.algorithms.make(name, MODEL, **options)
    expected, _, _ = fj.merging.merge(method, PARAMS[0], sent[name], COUNTS)
    assert_equal(files.load_arrays(out), expected)
    assert merged.algorithm == name
    if fj.algorithms.METHODS[name].gives == "wider model":
        assert expected["layers"][0]["bias"].shape > (5,)


def test_a_wider_model_is_read_at_its_own_width_and_refused_at_the_clients(tmp_path, sent):
    out = tmp_path / "merged.safetensors"
    files.merge_files(out, save(tmp_path, "pfnm", sent["pfnm"]))
    nested = files.unflatten(files.load_arrays(out))["layers"]
    wide = {"layers": [nested["0"], nested["1"]]}
    assert apply(wide, jnp.ones((2, 4))).shape == (2, 3)
    with pytest.raises(ValueError, match="layers/0/bias"):
        files.load_arrays(out, like=PARAMS[0])


def test_an_upload_comes_back_as_it_was_sent(tmp_path, sent, name):
    found, record = files.load_update(save(tmp_path, name, sent[name])[1])
    own = files.of_client(sent[name], 1)
    assert (record.algorithm, found.kind) == (name, own.kind)
    assert record.layers == fj.tree.shapes(PARAMS[1])
    assert found.values["wiring"] == own.values["wiring"]
    assert_equal(found.values["params"], own.values["params"])
    if "counts" in own.values:
        np.testing.assert_array_equal(found.values["counts"], own.values["counts"])


def test_a_method_reads_what_it_needs_of_what_was_sent(tmp_path, sent):
    out = {name: tmp_path / f"{name}.safetensors" for name in ("fedavg", "otfusion")}
    paths = save(tmp_path, "pfnm", sent["pfnm"])
    for name, path in out.items():
        files.merge_files(path, paths, algorithm=name)
        method = fj.algorithms.make(name, MODEL)
        values = dict(sent["pfnm"].values)
        values = {key: values[key] for key in ("params", *fj.algorithms.METHODS[name].reads)}
        given = PARAMS[0], Update(values, method.kind), COUNTS
        expected, _, _ = fj.merging.merge(method, *given)
        found = files.load_arrays(path)
        for leaf, array in zip(fj.tree.names(expected), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found[leaf], array, atol=1e-6)


def test_label_counts_that_nobody_sent_are_missed_by_name(tmp_path, sent):
    paths = save(tmp_path, "otfusion", sent["otfusion"])
    with pytest.raises(
        ValueError, match=r"pfnm, which merges params and wiring \(Wiring\) and counts \(arr"
    ):
        files.merge_files(tmp_path / "out.safetensors", paths, algorithm="pfnm")
    assert not (tmp_path / "out.safetensors").exists()


def test_networks_of_other_wiring_do_not_mix(tmp_path, sent):
    paths = save(tmp_path, "otfusion", sent["otfusion"])
    own = files.of_client(sent["otfusion"], 2)
    apart = dataclasses.replace(own.values["wiring"], sources=((), ()), spans=((0, 0), (0, 0)))
    other = Update(own.values | {"wiring": apart}, own.kind)
    how = {"algorithm": "otfusion", "client": "cho", "examples": 30}
    files.save_update(paths[2], other, **how)
    with pytest.raises(ValueError, match="'cho' describes its layers differently"):
        files.merge_files(tmp_path / "out.safetensors", paths)


def test_votes_are_weights_or_presence_and_label_counts(tmp_path, sent):
    merged = files.merge_files(
        tmp_path / "a.safetensors", save(tmp_path, "otfusion", sent["otfusion"])
    )
    assert len(merged.votes) == 4
    for vote in merged.votes.values():
        np.testing.assert_allclose(vote, np.array(COUNTS) / 60)
    paths = save(tmp_path, "pfnm", sent["pfnm"])
    merged = files.merge_files(tmp_path / "b.safetensors", paths, weights=[5, 0, 1])
    for leaf in ("kernel", "bias"):
        np.testing.assert_allclose(merged.votes[f"layers/0/{leaf}"], [0.5, 0, 0.5])
        np.testing.assert_allclose(merged.votes[f"layers/1/{leaf}"], [0.4, 0, 0.6])


@pytest.mark.long
def test_who_diverged_is_left_out(tmp_path, sent, name):
    broken = jax.tree.map(lambda x: x.at[1].set(jnp.nan), sent[name].values["params"])
    updates = Update(sent[name].values | {"params": broken}, sent[name].kind)
    out, paths = tmp_path / "merged.safetensors", save(tmp_path, name, updates)
    with pytest.raises(ValueError, match="'bob' is not finite"):
        files.merge_files(out, paths)
    with pytest.warns(match="Left out, as uploads that are not finite: client 'bob' for leaf"):
        merged = files.merge_files(out, paths, on_nonfinite="drop")
    assert merged.left_out == {"bob": "params/layers/0/bias"}
    method = fj.algorithms.make(name, MODEL)
    expected, _, _ = fj.merging.merge(method, PARAMS[0], sent[name], [20, 0, 30])
    assert_equal(files.load_arrays(out), expected)


@pytest.mark.long
def test_compressed_uploads_are_decoded_and_merged(tmp_path, sent, name):
    method = fj.algorithms.make(name, MODEL)
    codec = compression.compose(compression.differences(), compression.quantized(8))
    small = compression.compressed(method, codec)
    random = np.random.RandomState(3)
    data = random.normal(size=(60, 4)).astype("float32"), random.randint(3, size=60)
    federation = fj.clients.federation(data, np.split(np.arange(60), np.cumsum(COUNTS)[:-1]))
    trained = fj.training.Trained(fj.tree.stack(PARAMS), PARAMS[0])
    updates = fj.merging.summarize(small, trained, federation, key=jax.random.key(0))
    out, paths = tmp_path / "merged.safetensors", save(tmp_path, name, updates)
    files.merge_files(out, paths, start=PARAMS[0])
    expected, _, _ = fj.merging.merge(small, PARAMS[0], updates, COUNTS)
    found = files.load_arrays(out)
    for leaf, array in zip(fj.tree.names(expected), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found[leaf], array, atol=1e-5)


def test_the_command_merges_and_shows_the_width(tmp_path, sent, capsys):
    out, paths = tmp_path / "merged.safetensors", save(tmp_path, "pfnm", sent["pfnm"])
    assert main(["merge", str(out), *map(str, paths)]) == 0
    said = capsys.readouterr().out
    assert "pfnm of 3 clients is in" in said
    assert "layers/0/kernel  0.333  0.333  0.333" in said
    assert main(["inspect", str(out)]) == 0
    width = files.load_arrays(out)["layers/0/bias"].shape[0]
    assert f"layers/0/kernel  float32[4, {width}]" in capsys.readouterr().out
    assert width > 5
