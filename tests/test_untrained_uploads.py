"""Leaves that are not trained: statistics are averaged in files as elsewhere, frozen ones stay."""

import json
from pathlib import Path

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import fisherjax as fj
from fisherjax import algorithms, compression, files, secure_aggregation
from fisherjax.__main__ import main
from fisherjax.algorithms import Update

OLD = Path(__file__).parent / "uploads_of_0_2"
CLIENTS, SIZES, WIDE = ("ann", "bob", "cho"), (20, 10, 30), 400
NAMES = ("fedavg", "regmean", "fedfisher_kfac")
FROZEN = {"params/base/kernel", "params/base/bias", "moments/norm/shift"}
MOMENTS = {f"moments/norm/{name}" for name in ("mean", "second_moment", "within")}
QUANTIZED = compression.compose(compression.differences(), compression.quantized(12))


class Small(flax.linen.Module):
    """A wide layer, which the tests freeze, BatchNorm of a narrow one, and a head."""

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        hidden = jnp.tanh(flax.linen.Dense(WIDE, name="base")(inputs))
        hidden = hidden.reshape(*hidden.shape[:-1], 4, -1).mean(-1)
        norm = flax.linen.BatchNorm(momentum=0.0, use_running_average=not train, name="norm")
        return flax.linen.Dense(3, name="head")(norm(hidden))


class World:
    """Three clients that took one step each, on all of their examples: what they send, and a start.

    Their running statistics are those of their examples in the start, as momentum is zero.
    """

    def __init__(self):
        source, key = np.random.default_rng(0), jax.random.key(0)
        self.inputs = source.normal(1, 2, (60, 5)).astype("float32")
        rows = np.split(np.arange(60), np.cumsum(SIZES)[:-1])
        federation = fj.clients.federation((self.inputs, source.integers(0, 3, 60)), rows)
        self.start = fj.networks.init(Small(), key, jnp.zeros((1, 5)))
        model = fj.networks.model(Small(), self.start, fj.likelihoods.categorical)
        mask = tuple((name, own and name not in FROZEN) for name, own in model.mask)
        model = model._replace(mask=mask)
        how = {"key": key, "optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 30}
        trained = fj.training.train(model, self.start, federation, **how)
        self.methods = {name: algorithms.make(name, model) for name in NAMES}
        self.methods["small"] = compression.compressed(self.methods["fedfisher_kfac"], QUANTIZED)
        self.sent = {
            name: fj.merging.summarize(method, trained, federation, key=key)
            for name, method in self.methods.items()
        }
        hidden = np.tanh(np.float64(self.inputs) @ np.float64(self.leaf("params/base/kernel")))
        self.hidden = hidden.reshape(60, 4, -1).mean(-1)

    def leaf(self, name):
        return np.asarray(fj.tree.by_name(self.start)[name])

    def save(self, folder, name):
        paths = [folder / f"{client}.safetensors" for client in CLIENTS]
        made_for = name if name in NAMES else "fedfisher_kfac"
        for i, (path, client, size) in enumerate(zip(paths, CLIENTS, SIZES, strict=True)):
            own = files.of_client(self.sent[name], i)
            files.save_update(path, own, algorithm=made_for, client=client, examples=size)
        return paths


@pytest.fixture(scope="module")
def world():
    return World()


SHAPES = {
    **{"params/base/kernel": (5, WIDE), "params/base/bias": (WIDE,), "moments/norm/shift": (4,)},
    **{"params/head/kernel": (4, 3), "params/head/bias": (3,)},
    **dict.fromkeys(MOMENTS, (4,)),
}


def drawn(seed, names=tuple(SHAPES)):
    source = np.random.default_rng(seed)
    return {name: source.normal(size=SHAPES[name]).astype("float32") for name in names}


START = drawn(9)
TRAINED = [name for name in SHAPES if name not in FROZEN | MOMENTS]


@pytest.fixture
def paths(tmp_path):
    """Uploads of made up numbers: of FedAvg, which nothing is compiled for."""
    paths = [tmp_path / f"{client}.safetensors" for client in CLIENTS]
    for i, (path, client, size) in enumerate(zip(paths, CLIENTS, SIZES, strict=True)):
        files.save_update(path, made_up(i), algorithm="fedavg", client=client, examples=size)
    return paths


def rewritten(path, change):
    """Change what a file says, and seal it again."""
    arrays, about = load_file(path), json.loads(json.dumps(files.unseal(path).about))
    change(about, arrays)
    kinds = {name: files.base.ArrayKind.of(x) for name, x in arrays.items()}
    with files.base.sealing(path, kinds, about) as put:
        for name, array in arrays.items():
            put(name, array)


def ways_of_merging(world, name, folder):
    """Merge in memory, as a stream, under masks and as files, to leaves by name."""
    method, sent, start = world.methods[name], world.sent[name], world.start
    yield "files", merged_files(world, name, folder)
    merged, _, _ = fj.merging.merge(method, start, sent, SIZES)
    yield "memory", fj.tree.by_name(merged)
    if method.reduce is not None:
        each = (jax.tree.map(lambda x, i=i: x[i : i + 1], sent) for i in range(3))
        chunks = ((own, [size]) for own, size in zip(each, SIZES, strict=True))
        merged, _, _ = fj.merging.merge_stream(method, start, chunks)
        yield "stream", fj.tree.by_name(merged)
        how = {"bound": 100.0, "threshold": 2, "bits": 64}
        how["entropy"] = np.random.default_rng(0).bytes
        merged, _, _ = secure_aggregation.secure_merge(method, start, sent, SIZES, **how)
        yield "secure", fj.tree.by_name(merged)


def merged_files(world, name, folder):
    out = folder / "merged.safetensors"
    files.merge_files(out, world.save(folder, name), start=world.start)
    return files.load_arrays(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_way_of_merging_averages_moments_and_leaves_frozen_leaves(world, name, tmp_path):
    """The moments are those of all 60 examples, by NumPy in float64, whatever the method."""
    pooled = {"mean": world.hidden.mean(0), "second_moment": (world.hidden**2).mean(0)}
    ends = np.cumsum(SIZES)[:-1]
    each = [own.var(0) for own in np.split(world.hidden, ends)]
    pooled["within"] = np.average(each, axis=0, weights=SIZES)
    first = None
    for way, found in ways_of_merging(world, name, tmp_path):
        assert found.keys() == fj.tree.by_name(world.start).keys(), way
        for moment, expected in pooled.items():
            np.testing.assert_allclose(found[f"moments/norm/{moment}"], expected, rtol=2e-6)
        for leaf in FROZEN:
            assert np.asarray(found[leaf]).tobytes() == world.leaf(leaf).tobytes(), way
        first = found if first is None else first
        for leaf, array in found.items():
            np.testing.assert_allclose(array, first[leaf], rtol=1e-4, atol=2e-6, err_msg=way)
    variance = fj.networks.to_flax({"params": {}, "moments": unflatten(first)["moments"]})
    found = variance["batch_stats"]["norm"]["var"]
    np.testing.assert_allclose(found, world.hidden.var(0), rtol=1e-5)


def unflatten(leaves):
    return files.unflatten({name: jnp.asarray(x) for name, x in leaves.items()})


# `other` is the tolerance for RegMean: merges of files and of updates compile different programs,
# whose solves round differently.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "other"), [("fedavg", 0), ("regmean", 1e-7), ("fedfisher_kfac", 0)]
)
def test_files_merge_to_the_bits_of_a_merge_of_what_is_loaded(
    world, name, other, tmp_path, rounding
):
    paths, out = world.save(tmp_path, name), tmp_path / "merged.safetensors"
    merged = files.merge_files(out, paths, start=world.start)
    loaded = [files.load_update(path)[0] for path in paths]
    method = world.methods[name]._replace(model=None)
    start = fj.tree.by_name(world.start)
    if method.reduce is None:
        expected, _, _ = fj.merging.merge(method, start, loaded, SIZES)
    else:
        chunks = (
            (jax.tree.map(lambda x: x[None], x), [w]) for x, w in zip(loaded, SIZES, strict=True)
        )
        expected, _, _ = fj.merging.merge_stream(method, start, chunks)
    close = max(rounding, other)
    for leaf, array in files.load_arrays(out).items():
        np.testing.assert_allclose(array, expected[leaf], rtol=0, atol=close, err_msg=leaf)
    assert not any(leaf in vote for vote in merged.votes for leaf in FROZEN | MOMENTS)


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, "small"])
def test_an_upload_comes_back_with_what_is_not_trained(world, name, tmp_path):
    path, sent = world.save(tmp_path, name)[1], files.of_client(world.sent[name], 1)
    found, record = files.load_update(path)
    assert set(found.statistics) == set(sent.statistics) == set(record.statistics) == MOMENTS
    for leaf, array in sent.statistics.items():
        np.testing.assert_array_equal(found.statistics[leaf], array)
        assert record.statistics[leaf] == array.shape
    assert found.frozen == sent.frozen == record.frozen
    assert set(found.frozen) == FROZEN
    assert files.unseal(path).about["format"] == 2  # which 0.2 refuses: it would lose them


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, "small"])
def test_bytes_of_frozen_leaves_are_not_sent_and_those_of_statistics_count(world, name, tmp_path):
    path, sent = world.save(tmp_path, name)[0], files.of_client(world.sent[name], 0)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - header == compression.size(sent)
    assert compression.size(sent) == compression.size(sent.values) + 3 * 4 * 4
    assert compression.size(sent) < 4 * WIDE < 4 * 6 * WIDE  # less than the bias alone
    assert world.leaf("params/base/kernel").tobytes() not in content


def test_frozen_leaves_are_in_the_merged_file_only_if_there_is_a_start(paths, capsys):
    out, start = paths[0].with_name("m.safetensors"), paths[0].with_name("start.safetensors")
    files.save_arrays(start, START)
    words = ["merge", str(out), *map(str, paths)]
    assert main(words) == 0
    assert "The file lacks 3 frozen leaves, such as 'moments/norm/shift'" in capsys.readouterr().out
    found = files.load_arrays(out)
    assert found.keys() == START.keys() - FROZEN
    assert main([*words, "--start", str(start)]) == 0
    assert "Without" not in capsys.readouterr().out
    whole = files.load_arrays(out)
    for leaf, array in whole.items():
        expected = START[leaf] if leaf in FROZEN else found[leaf]
        assert (array.dtype, array.tobytes()) == (expected.dtype, expected.tobytes())


OTHER_STARTS = {
    "no frozen leaf": (
        lambda leaves: leaves.pop("params/base/bias"),
        r"start lacks the frozen leaves \['params/base/bias'\]",
    ),
    "another statistic": (
        lambda leaves: leaves.update({"moments/norm/mean": np.ones(7)}),
        r"statistics/moments/norm/mean is float32\[4\], expected \[7\]",
    ),
    "another trained leaf": (
        lambda leaves: leaves.update({"params/head/bias": np.ones(7)}),
        r"params/params/head/bias is float32\[3\], expected \[7\]",
    ),
}


@pytest.mark.parametrize("case", OTHER_STARTS)
def test_a_start_of_another_network_is_refused(paths, case):
    change, message = OTHER_STARTS[case]
    leaves, out = dict(START), paths[0].with_name("m.safetensors")
    change(leaves)
    with pytest.raises(ValueError, match=message):
        files.merge_files(out, paths, start=leaves)
    assert not out.exists()


def freeze_less(about, arrays):
    about["frozen"].remove("params/base/bias")


def made_up(client, frozen=FROZEN, statistics=MOMENTS):
    values = {"params": drawn(client, TRAINED)}
    return Update(values, "params", drawn(client, sorted(statistics)), tuple(sorted(frozen)))


@pytest.mark.parametrize(
    "changes", [{"frozen": FROZEN - {"params/base/bias"}}, {"statistics": MOMENTS - {min(MOMENTS)}}]
)
def test_chunks_of_other_untrained_leaves_are_refused(changes):
    each = [jax.tree.map(lambda x: x[None], own) for own in (made_up(0), made_up(1, **changes))]
    with pytest.raises(ValueError, match="Chunk 1 holds leaves of shapes"):
        fj.merging.merge_stream(algorithms.fedavg(), START, ((own, None) for own in each))


def test_under_masks_the_moments_are_those_of_who_stayed():
    """By NumPy in float64; `bob` drops out after the keys were shared."""
    sent, how = fj.tree.stack([made_up(client) for client in range(3)]), {"bound": 100.0}
    how |= {"threshold": 2, "bits": 64, "entropy": np.random.default_rng(0).bytes}
    how["absent"] = {"mask": [1]}
    own = (algorithms.fedavg(), START, sent, SIZES)
    assert isinstance(secure_aggregation.contributions(*own)[0], fj.merging.SumsAndStatistics)
    merged, _, _ = secure_aggregation.secure_merge(*own, **how)
    for name in MOMENTS:
        each = [np.float64(made_up(client).statistics[name]) for client in range(3)]
        expected = np.average(each, axis=0, weights=[20, 0, 30])
        np.testing.assert_allclose(merged[name], expected, rtol=1e-5, atol=1e-6)
    for name in FROZEN:
        assert np.asarray(merged[name]).tobytes() == START[name].tobytes()


def running_variance(about, arrays):
    about["statistics"] = [x.replace("second_moment", "var") for x in about["statistics"]]
    moment = arrays.pop("statistics/moments/norm/second_moment")
    arrays["statistics/moments/norm/var"] = moment


def forget_one(about, arrays):
    about["statistics"].remove("moments/norm/within")
    del arrays["statistics/moments/norm/within"]


def diverge(about, arrays):
    arrays["statistics/moments/norm/within"][1] = np.inf


BAD = {
    "other frozen leaves": (
        freeze_less,
        r"client 'bob' has other frozen leaves than .*ann.* differ in params/base/bias",
    ),
    "a running variance": (running_variance, r"client 'bob': The statistic 'moments/norm/var' "),
    "other statistics": (forget_one, r"other layers .*statistics/moments/norm/within is missing"),
    "diverged": (diverge, r"'bob' is not finite: statistics/moments/norm/within"),
    "no list": (
        lambda about, arrays: about.update(frozen="base"),
        r"frozen is 'base'; expected names of leaves",
    ),
    "names that are none": (
        lambda about, arrays: about.update(statistics=[["moments"]]),
        r"statistics is \[\['moments'\]\]; expected names of leaves",
    ),
    "no array": (
        lambda about, arrays: arrays.pop("statistics/moments/norm/mean"),
        r"there is no array 'statistics/moments/norm/mean'",
    ),
    "trained and frozen": (
        lambda about, arrays: about["frozen"].append("params/head/bias"),
        r"\['params/head/bias'\] are listed twice",
    ),
    "frozen twice": (
        lambda about, arrays: about["frozen"].append("params/base/bias"),
        r"\['params/base/bias'\] are listed twice",
    ),
    "very many": (
        lambda about, arrays: about["frozen"].extend(map(str, range(10_000))),
        r"the number of arrays is 100\d\d; expected at most 10000.*--limit arrays=",
    ),
    "a long name": (
        lambda about, arrays: about["frozen"].append("x" * 1001),
        r"the length of a name in characters is 1001; expected at most 1000",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_upload_is_refused_by_name_and_nothing_is_written(paths, case, capsys):
    change, message = BAD[case]
    rewritten(paths[1], change)
    out = paths[0].with_name("merged.safetensors")
    with pytest.raises(ValueError, match=rf"bob.*{message}"):
        files.merge_files(out, paths)
    assert main(["merge", str(out), *map(str, paths)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not out.exists()


def test_a_running_variance_is_not_written(tmp_path):
    statistics = {"norm/mean": np.zeros(1), "norm/var": np.ones(1)}
    update = Update({"params": {"w": np.ones(1)}}, "params", statistics)
    how = {"algorithm": "fedavg", "client": "a", "examples": 1}
    with pytest.raises(ValueError, match="'norm/var' stands beside 'norm/mean'"):
        files.save_update(tmp_path / "a.safetensors", update, **how)
    assert not list(tmp_path.iterdir())


def test_who_diverged_in_one_statistic_is_left_out_of_every_layer(paths, capsys):
    check_left_out(paths, START)
    out = paths[0].with_name("merged.safetensors")
    assert main(["inspect", str(out)]) == 0
    assert "'bob': 'statistics/moments/norm/within'" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedfisher_kfac", "small"])
def test_who_diverged_has_no_say_in_a_solve(world, name, tmp_path):
    check_left_out(world.save(tmp_path, name), world.start)


def check_left_out(paths, start):
    """As if the client had no weight, to the bit; each layer of it alone is finite."""
    out = paths[0].with_name("merged.safetensors")
    files.merge_files(out, paths, start=start, weights=[20, 0, 30])
    expected = files.load_arrays(out)
    rewritten(paths[1], diverge)
    leaf = "statistics/moments/norm/within"
    said = f"Left out, as uploads that are not finite: client 'bob' for leaf '{leaf}'"
    with pytest.warns(match=said) as warned:
        merged = files.merge_files(out, paths, start=start, on_nonfinite="drop")
    assert len(warned) == 1  # once, and not once a layer
    assert merged.left_out == files.unseal(out).about["left_out"] == {"bob": leaf}
    np.testing.assert_allclose(merged.shares, [0.4, 0, 0.6])
    found = files.load_arrays(out)
    for place, array in expected.items():
        np.testing.assert_array_equal(found[place], array)


def test_nobody_left_is_an_error(paths):
    for path in paths:
        rewritten(path, diverge)
    out = paths[0].with_name("merged.safetensors")
    with pytest.raises(ValueError, match="No client is left"), pytest.warns(match="Left out"):
        files.merge_files(out, paths, on_nonfinite="drop")
    assert not out.exists()


@pytest.mark.long
def test_compressed_files_merge_like_compressed_updates(world, tmp_path):
    found = merged_files(world, "small", tmp_path)
    method, sent = world.methods["small"], world.sent["small"]
    expected, _, _ = fj.merging.merge(method, world.start, sent, SIZES)
    for leaf, array in fj.tree.by_name(expected).items():
        np.testing.assert_allclose(found[leaf], array, rtol=1e-4, atol=2e-6, err_msg=leaf)


@pytest.mark.long
def test_encoding_afterwards_keeps_what_is_not_trained(world):
    plain = world.sent["fedfisher_kfac"]
    start = fj.leaves.split_by_name(world.start, tuple(plain.statistics), plain.frozen).trained
    found = compression.encode(plain, QUANTIZED, start=start)
    expected = world.sent["small"]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, array in plain.statistics.items():
        np.testing.assert_array_equal(found.statistics[leaf], array)
    assert compression.size(found) == compression.size(expected)


def test_inspect_names_frozen_leaves_and_shows_statistics_as_arrays(paths, capsys):
    assert main(["inspect", str(paths[0])]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    said = {row[0]: row[1] for row in rows}
    assert set(json.loads(said["frozen"].replace("'", '"'))) == FROZEN
    assert said["statistics/moments/norm/mean"] == "float32[4]"
    assert "statistics" not in said


@pytest.mark.long
def test_methods_that_move_units_refuse_what_cannot_follow(tmp_path):
    layers = [
        {"kernel": jnp.ones((1, 2, 4)), "bias": jnp.ones((1, 4))},
        {"kernel": jnp.ones((1, 4, 3)), "bias": jnp.ones((1, 3))},
    ]

    def apply(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return x

    federation = fj.clients.federation((np.ones((2, 2)), np.zeros(2, int)), [[0, 1]])
    method = algorithms.otfusion(fj.Model(apply, fj.likelihoods.categorical))
    trained = fj.training.Trained(layers)
    sent = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
    own = files.of_client(sent, 0)
    own = Update(own.values, own.kind, {"mean": np.ones(3, "float32")}, ("base",))
    path, out = tmp_path / "a.safetensors", tmp_path / "merged.safetensors"
    files.save_update(path, own, algorithm="otfusion", client="a", examples=1)
    with pytest.raises(ValueError, match=r"\['base', 'mean'\] are not trained and keep theirs"):
        files.merge_files(out, [path])
    files.merge_files(out, [path], algorithm="fedavg")
    np.testing.assert_array_equal(files.load_arrays(out)["mean"], 1)


# Uploads of 0.2, which had every leaf among params


@pytest.mark.long
@pytest.mark.parametrize("kind", ["", "-small"])
def test_uploads_of_0_2_merge_as_they_did(tmp_path, kind, recwarn):
    """All leaves are among params; moments have no curvature, and keep the weighted mean."""
    paths = [OLD / f"{client}{kind}.safetensors" for client in ("ann", "bob")]
    out = tmp_path / "merged.safetensors"
    files.merge_files(out, paths)
    found, before = (files.load_arrays(path) for path in (out, OLD / f"merged{kind}.safetensors"))
    assert found.keys() == before.keys()
    layers = ("params/first", "params/head")
    for layer in layers:
        # 0.2 stopped when a layer's residual was 1e-4 of its whole weights, kernel and bias.
        one, other = (
            np.concatenate([x[f"{layer}/{leaf}"].ravel() for leaf in ("kernel", "bias")])
            for x in (found, before)
        )
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
    for leaf in [leaf for leaf in before if not leaf.startswith(layers)]:
        np.testing.assert_allclose(found[leaf], before[leaf], rtol=1e-4, atol=1e-6, err_msg=leaf)
    assert all("no client has any curvature" in str(x.message) for x in recwarn)


def test_uploads_of_0_2_are_read_and_averaged_like_any(tmp_path):
    paths, out = (
        [OLD / f"{client}.safetensors" for client in ("ann", "bob")],
        tmp_path / "m.safetensors",
    )
    updates = [files.load_update(path) for path in paths]
    for update, record in updates:
        assert (update.statistics, update.frozen) == ({}, ())
        assert (record.statistics, record.frozen) == ({}, ())
        assert "moments/norm/second_moment" in update.values["params"]
    files.merge_files(out, paths, algorithm="fedavg")
    found = files.load_arrays(out)
    for leaf in found:
        each = [np.float64(update.values["params"][leaf]) for update, _ in updates]
        expected = np.average(each, axis=0, weights=[20, 10])
        np.testing.assert_allclose(found[leaf], expected, rtol=1e-6, err_msg=leaf)


def test_what_has_no_untrained_leaves_is_the_file_that_0_2_wrote(tmp_path):
    path = OLD / "ann.safetensors"
    update, record = files.load_update(path)
    said = {"algorithm": record.algorithm, "client": record.client, "examples": record.examples}
    again = tmp_path / "ann.safetensors"
    files.save_update(again, update, **said)
    old, new = (files.unseal(x).about for x in (path, again))
    assert new | {"version": old["version"]} == old
