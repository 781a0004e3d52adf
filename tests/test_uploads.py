"""Uploads as files: what was sent is what is merged, or the file is refused by name."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import fisherjax as fj
from fisherjax import compression, files
from fisherjax.__main__ import main
from fisherjax.algorithms import Update
from tests.methods import MERGED, REPEATS, is_filed, reads

ROOT = Path(__file__).parents[1]
CLIENTS, WEIGHTS = ("ann", "bob", "cho"), (20, 10, 30)
SLOW = pytest.mark.slow
# Those that match units are in test_unit_uploads.py.
FILED = [n for n in MERGED if is_filed(n) and fj._layers.graph.Wiring not in reads(n).values()]
ROWS = [pytest.param(n, marks=SLOW) if n in REPEATS else n for n in FILED]
# Conjugate gradients need it where the matrix is singular.
OPTIONS = {n: {"damping": 1.0} for n in FILED if fj.fisher.Dense in reads(n).values()}


def apply(params, x):
    """Two dense layers, a scale and a shift between them, in lists and dicts.

    Equal shapes compile once. Of names "layers/10" is before "layers/2", of leaves behind it.
    """
    first, last = params["layers"][2], params["layers"][10]
    x = jnp.tanh(x @ first["kernel"] + first["bias"])
    x = x * params["scale"] + params["shift"]
    return x @ last["kernel"] + last["bias"]


def params_of(seed):
    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), "float32")

    random = np.random.RandomState(seed)
    layers = [
        *[{} for _ in range(2)],
        {"kernel": normal(4, 4), "bias": normal(4)},
        *[{} for _ in range(7)],
        {"kernel": normal(4, 4), "bias": normal(4)},
    ]
    return {"layers": layers, "scale": 1 + 0.1 * normal(4), "shift": normal(4)}


MODEL = fj.Model(apply, fj.likelihoods.categorical)
PARAMS = [params_of(seed) for seed in range(len(CLIENTS))]


@functools.cache
def updates_of(name: str) -> Update:
    """What clients send; Fishers of the simple forms are made up, which compiles nothing."""
    random = np.random.RandomState(3)
    params = fj.tree.stack(PARAMS)
    if fj.fisher.Diagonal in reads(name).values():
        entries = jax.tree.map(lambda x: random.gamma(0.5, size=x.shape).astype(x.dtype), params)
        fisher = fj.fisher.Diagonal(entries)
        return Update({"params": params, "fisher": fisher}, "params, true diagonal Fisher")
    if fj.fisher.Dense in reads(name).values():
        size = sum(x.size for x in jax.tree.leaves(PARAMS[0]))
        gradients = random.normal(size=(len(CLIENTS), size, 2 * size)).astype("float32")
        template = fj.fisher.operators.Template.of(PARAMS[0])
        fisher = fj.fisher.Dense(gradients @ gradients.mT / (2 * size), template)
        return Update({"params": params, "fisher": fisher}, "params, true full Fisher")
    data = random.normal(size=(60, 4)).astype("float32"), random.randint(4, size=60)
    ends = np.cumsum([0, *WEIGHTS])
    rows = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    federation = fj.clients.federation(data, rows)
    method = fj.algorithms.make(name, MODEL)
    trained = fj.training.Trained(params, PARAMS[0])
    return fj.merging.summarize(method, trained, federation, key=jax.random.key(0))


def save(folder, name, updates=None, **changes):
    """Write all clients' uploads, and return their paths."""
    updates, paths = updates_of(name) if updates is None else updates, []
    for i, (client, examples) in enumerate(zip(CLIENTS, WEIGHTS, strict=True)):
        paths.append(folder / f"{client}.safetensors")
        how = {"algorithm": name, "client": client, "examples": examples} | changes
        files.save_update(paths[-1], files.of_client(updates, i), **how)
    return paths


def assert_equal(found, expected, atol=0.0):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def files_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def by_name(update):
    """Call leaves by their names, as files do: equal structures compile once."""
    names, values = fj.tree.names(PARAMS[0]), dict(update.values)
    values["params"] = dict(zip(names, jax.tree.leaves(values["params"]), strict=True))
    fisher = values.get("fisher")
    if isinstance(fisher, fj.fisher.Diagonal):
        entries = dict(zip(names, jax.tree.leaves(fisher.entries), strict=True))
        values["fisher"] = fj.fisher.Diagonal(entries)
    elif fisher is not None:
        values["fisher"] = fisher.select(names)
    return Update(values, update.kind)


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_files_merge_like_what_never_was_in_a_file(tmp_path, name, rounding):
    out, options = tmp_path / "merged.safetensors", OPTIONS.get(name, {})
    sent = [by_name(files.of_client(updates_of(name), i)) for i in range(len(CLIENTS))]
    method, flat = fj.algorithms.make(name, MODEL, **options), sent[0].values["params"]
    start = flat if method.link.reads_start else None
    merged = files.merge_files(out, save(tmp_path, name), start=start, **options)
    if method.reduce is None:
        expected, _, _ = fj.merging.merge(method._replace(model=None), flat, sent, WEIGHTS)
    else:  # one client after the other
        chunks = (
            (jax.tree.map(lambda x: x[None], x), [w]) for x, w in zip(sent, WEIGHTS, strict=True)
        )
        expected, _, _ = fj.merging.merge_stream(method._replace(model=None), flat, chunks)
    # The compiler divides the sums of leaves without a Gram matrix in two ways.
    close = max(rounding, 1e-7) if "grams" in reads(name) else rounding
    assert_equal(files.load_arrays(out), dict(expected), close)
    assert merged.algorithm == name


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedfisher_kfac", marks=SLOW)])
def test_files_merge_like_the_pytree(tmp_path, name):
    out = tmp_path / "merged.safetensors"
    files.merge_files(out, save(tmp_path, name))
    method = fj.algorithms.make(name, MODEL)
    # The order of the sums differs.
    expected, _, _ = fj.merging.merge(method, PARAMS[0], updates_of(name), WEIGHTS)
    assert_equal(files.load_arrays(out, like=expected), expected, 2e-5)


@pytest.mark.parametrize("name", ROWS)
def test_an_upload_comes_back_as_it_was_sent(tmp_path, name):
    path = save(tmp_path, name)[1]
    found, record = files.load_update(path)
    sent = files.of_client(updates_of(name), 1)
    assert found.kind == record.kind == sent.kind
    assert (record.client, record.examples, record.algorithm) == ("bob", 10, name)
    assert record.nbytes == path.stat().st_size
    assert record.version == fj.__version__
    assert record.layers == fj.tree.shapes(PARAMS[1])
    assert_equal(found, by_name(sent))
    if "fisher" in sent.values:
        vector = jax.tree.map(jnp.sin, PARAMS[0])
        product = sent.values["fisher"].mv(vector)
        flat = dict(zip(fj.tree.names(vector), jax.tree.leaves(vector), strict=True))
        again = found.values["fisher"].mv(flat)
        names = fj.tree.names(product)
        assert_equal(again, dict(zip(names, jax.tree.leaves(product), strict=True)), 1e-5)


def test_the_same_upload_is_the_same_bytes_and_other_programs_read_them(tmp_path):
    save(tmp_path, "fedfisher_kfac")
    before = files_in(tmp_path)
    paths = save(tmp_path, "fedfisher_kfac")
    assert files_in(tmp_path) == before
    arrays = load_file(paths[0])
    np.testing.assert_array_equal(
        arrays["params/layers/2/kernel"], PARAMS[0]["layers"][2]["kernel"]
    )
    assert arrays["fisher/factors/layers/2/kernel/input"].shape == (5, 5)


def test_every_form_of_layer_comes_back(tmp_path):
    """A table, a convolution, a stack of layers, and a leaf without any."""
    from fisherjax._layers.layer import Layer
    from fisherjax.fisher.operators import Template

    random = np.random.RandomState(0)
    params = {
        "table": random.rand(5, 2),
        "conv": random.rand(3, 3, 1, 2),
        "stack": random.rand(2, 3, 3),
        "alone": random.rand(4).astype("float16"),
    }
    layers = (
        Layer("table", None, (5, 2), (-1,), (), "table"),
        Layer("conv", None, (3, 3, 1, 2)),
        *(Layer(f"stack[{i}]", None, (3, 3), (0,), (i,), "product", "stack") for i in range(2)),
    )
    factors = {
        layer.kernel: {
            "input": random.rand(layer.rows, layer.rows),
            "output": np.eye(layer.columns),
        }
        for layer in layers[1:]
    } | {"table": {"input": random.rand(5), "output": np.eye(2)}}
    fisher = fj.fisher.Kronecker(factors, {"alone": random.rand(4)}, layers, Template.of(params))
    path = tmp_path / "ann.safetensors"
    update = Update({"params": params, "fisher": fisher}, "params, Fisher")
    files.save_update(path, update, algorithm="fedfisher_kfac", client="ann", examples=1.5)
    assert_equal(files.load_update(path)[0], update)


class Pair(NamedTuple):
    one: Any
    two: Any


@pytest.mark.parametrize("params", [jnp.ones(2), [jnp.ones(2), Pair(jnp.zeros(1), jnp.ones(()))]])
def test_params_are_any_pytree(tmp_path, params):
    updates = Update(
        {"params": jax.tree.map(lambda x: jnp.stack([x, x + 1, x + 2]), params)}, "params"
    )
    out = tmp_path / "merged.safetensors"
    files.merge_files(out, save(tmp_path, "fedavg", updates), weights=[0, 1, 0])
    assert_equal(files.load_arrays(out, like=params), jax.tree.map(lambda x: x + 1, params))


def test_a_method_may_read_less_than_was_sent(tmp_path):
    paths = save(tmp_path, "fedfisher_kfac")
    files.merge_files(tmp_path / "mean.safetensors", paths, algorithm="fedavg")
    own = tmp_path / "own"
    own.mkdir()
    files.merge_files(tmp_path / "same.safetensors", save(own, "fedavg"))
    same, mean = (files.load_arrays(tmp_path / f"{n}.safetensors") for n in ("same", "mean"))
    assert_equal(mean, same)


def test_uploads_of_several_methods_or_kinds_have_params_in_common(paths):
    rewritten(paths[1], set_to(algorithm="fisher_merge", kind="x"))
    out = paths[0].with_name("merged.safetensors")
    files.merge_files(out, paths, algorithm="fedavg")
    found, p = files.load_arrays(out)["scale"], np.array(WEIGHTS) / sum(WEIGHTS)
    expected = p @ np.float64([x["scale"] for x in PARAMS])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_key_that_json_would_change_is_refused(tmp_path):
    update = Update({"params": {"w": np.ones(2)}, "grams": {1: np.eye(2)}}, "params, Gram matrices")
    with pytest.raises(TypeError, match=r"A key of 'grams' is .*; expected a string"):
        save(tmp_path, "regmean", jax.tree.map(lambda x: np.stack([x] * 3), update))


def test_an_upload_may_have_statistics_only(tmp_path):
    path, update = tmp_path / "a.safetensors", Update({"params": {}}, "x", {"mean": np.ones(2)})
    files.save_update(path, update, algorithm="fedavg", client="a", examples=1)
    assert_equal(files.load_update(path)[0], update)


def test_no_merge_of_files_runs_a_network():
    with pytest.raises(RuntimeError, match="Files are merged without the network"):
        files.uploads._reads._no_network()


def test_options_are_those_of_the_method(tmp_path):
    paths, out = save(tmp_path, "fedfisher_kfac"), tmp_path / "merged.safetensors"
    files.merge_files(out, paths, damping=1e9)
    damped = files.load_arrays(out)
    files.merge_files(out, paths, algorithm="fedavg")
    assert_equal(damped, files.load_arrays(out), 1e-4)


@pytest.mark.parametrize("name", ["fedavg", "fisher_merge", "fedfisher_kfac", "fedfisher_full"])
def test_the_vote_is_the_share_of_the_trace(tmp_path, name):
    options = OPTIONS.get(name, {})
    merged = files.merge_files(tmp_path / "m.safetensors", save(tmp_path, name), **options)
    p = np.array(WEIGHTS) / sum(WEIGHTS)
    np.testing.assert_allclose(merged.shares, p)
    diagonals = [
        files.of_client(updates_of(name), i).values["fisher"].diagonal()
        if "fisher" in reads(name)
        else jax.tree.map(jnp.ones_like, PARAMS[0])
        for i in range(3)
    ]
    traces = [
        dict(zip(fj.tree.names(d), map(jnp.sum, jax.tree.leaves(d)), strict=False))
        for d in diagonals
    ]
    for layer, vote in merged.votes.items():
        names = {
            "all": list(traces[0]),
            "scale": ["scale", "shift"],
        }.get(layer, [layer, layer.replace("kernel", "bias")])
        if not reads(name) or fj.fisher.Diagonal in reads(name).values():
            names = [layer]
        expected = p * [sum(float(trace[n]) for n in set(names)) for trace in traces]
        np.testing.assert_allclose(vote, expected / expected.sum(), rtol=1e-4)


def test_no_curvature_is_a_vote_by_weight_and_tiny_curvature_is_not(tmp_path):
    for scale, expected in ((0.0, [1 / 3, 1 / 6, 1 / 2]), (1e-30, [0.0, 1 / 7, 6 / 7])):
        fishers = fj.fisher.Diagonal({"w": jnp.array([[0.0], [1.0], [2.0]]) * scale})
        updates = Update({"params": {"w": jnp.zeros((3, 1))}, "fisher": fishers}, "Fisher")
        paths = save(tmp_path, "fisher_merge", updates)
        expecting = contextlib.nullcontext() if scale else pytest.warns(match="no client has any")
        with expecting:
            merged = files.merge_files(tmp_path / "m.safetensors", paths, floor=0.0)
        np.testing.assert_allclose(merged.votes["w"], expected, rtol=1e-5)


def wide_updates(folder, width, layers, clients):
    """Write K-FAC uploads of many equal layers, one client after the other."""
    from fisherjax._layers.layer import Layer
    from fisherjax.fisher.operators import Template

    names = [f"dense{i}" for i in range(layers)]
    paths = []
    for client in range(clients):
        params = {name: np.full((width, width), client, "float32") for name in names}
        eye = np.eye(width, dtype="float32")
        factors = {name: {"input": eye, "output": eye} for name in names}
        known = tuple(Layer(name, None, (width, width)) for name in names)
        fisher = fj.fisher.Kronecker(factors, {}, known, Template.of(params))
        paths.append(folder / f"{client}.safetensors")
        update = Update({"params": params, "fisher": fisher}, "params, Fisher")
        how = {"algorithm": "fedfisher_kfac", "client": str(client), "examples": 1}
        files.save_update(paths[-1], update, **how)
    return paths


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedlpa_ea", "fedavg"])  # which solves, and which adds up
def test_memory_is_that_of_one_layer_of_all_clients(tmp_path, name):
    width, layers, clients = 128, 6, 3
    paths, held = wide_updates(tmp_path, width, layers, clients), []
    one = 3 * 4 * width**2 * clients

    def count(*_):
        held.append(sum(x.nbytes for x in jax.live_arrays()))

    # What Python has of compiled programs is not counted.
    (tmp_path / "few").mkdir()
    few = wide_updates(tmp_path / "few", width, 1, clients)
    files.merge_files(tmp_path / "m.safetensors", few, algorithm=name)
    before = sum(x.nbytes for x in jax.live_arrays())
    tracemalloc.start()
    try:
        files.merge_files(tmp_path / "m.safetensors", paths, algorithm=name, progress=count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(held) == layers
    # What is left of the layer before, and NumPy's arrays, beside what Python has for itself.
    assert max(held) - before <= one
    assert peak < 2 * one + 1e6, peak / one
    np.testing.assert_allclose(
        files.load_arrays(tmp_path / "m.safetensors")["dense3"], 1, atol=1e-4
    )


FLIPPED = {}


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_seen(tmp_path, place, bit):
    path = FLIPPED.setdefault("path", None) or save(tmp_path, "fedavg")[0]
    content = FLIPPED.setdefault("content", path.read_bytes())
    FLIPPED["path"] = path
    changed = bytearray(content)
    changed[int(place * len(changed))] ^= 1 << bit
    bad = path.with_name("flipped.safetensors")
    bad.write_bytes(changed)
    with pytest.raises(ValueError, match=r"flipped\.safetensors"):
        files.load_update(bad)


def test_every_bit_of_the_digest_counts_and_every_length(tmp_path):
    path = save(tmp_path, "fedavg")[0]
    content = path.read_bytes()
    start = content.index(files.load_update(path)[1].sha256.encode())
    bad = tmp_path / "bad.safetensors"
    changes = [(start + i, 1 << bit) for i in (0, 31, 63) for bit in range(8)]
    variants = [content[:p] + bytes([content[p] ^ b]) + content[p + 1 :] for p, b in changes]
    variants += [content[:end] for end in range(0, len(content), 97)] + [content + b"\0"]
    for variant in variants:
        bad.write_bytes(variant)
        with pytest.raises(ValueError, match=r"bad\.safetensors.*send it again"):
            files.load_update(bad)


def rewritten(path, change):
    """Change what a file says, and seal it again."""
    sealed = files.unseal(path)
    arrays, about = load_file(path), json.loads(json.dumps(sealed.about))
    change(about, arrays)
    kinds = {name: files.base.ArrayKind.of(x) for name, x in arrays.items()}
    with files.base.sealing(path, kinds, about) as put:
        for name, array in arrays.items():
            put(name, array)


def set_to(**said):
    return lambda about, arrays: about.update(said)


def shrink(about, arrays):
    arrays["params/layers/2/kernel"] = arrays["params/layers/2/kernel"][:2]


def halve(about, arrays):
    arrays["params/scale"] = arrays["params/scale"].astype("float16")


def spoil(about, arrays):
    arrays["params/shift"][1] = np.nan


def indefinite(about, arrays):
    arrays["fisher/factors/layers/10/kernel/output"][0, 0] *= -1


def transposed(about, arrays):
    about["values"]["dict"]["fisher"]["static"]["layers"][0]["Layer"]["outputs"] = [0]


BAD = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "bob.*is damaged, or is not"),
    "flipped": (
        lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])),
        r"bob\.safetensors' was changed after it was written",
    ),
    "foreign": (lambda p: save_file({"w": np.ones(2)}, p), "bob.*was written by another program"),
    "no arrays at all": (lambda p: p.write_text("hello"), "bob.*is damaged, or is not"),
    "missing": (lambda p: p.unlink(), "there is no file .*bob"),
    "a model": (
        lambda p: rewritten(p, set_to(what="model")),
        "bob.* is a model; expected an upload",
    ),
    "future": (
        lambda p: rewritten(p, set_to(format=3, version="9.1")),
        r"bob.*format 3 and was written by fisherjax 9\.1; .*update it",
    ),
    "later type": (
        lambda p: rewritten(p, set_to(values={"type": "Sparse", "children": {}, "static": {}})),
        "bob.*that this version cannot read.*Sparse",
    ),
    "other layers": (
        lambda p: rewritten(p, shrink),
        r"bob.*params/layers/2/kernel is float32\[2, 4\], expected float32\[4, 4\]",
    ),
    "other dtypes": (
        lambda p: rewritten(p, halve),
        r"bob.*params/scale is float16\[4\], expected float32\[4\]",
    ),
    "other description": (
        lambda p: rewritten(p, transposed),
        "bob.*describes its layers differently",
    ),
    "other kind": (
        lambda p: rewritten(p, set_to(kind="x")),
        "bob.*holds 'x', but .*ann.* 'params,",
    ),
    "other algorithm": (
        lambda p: rewritten(p, set_to(algorithm="fedavg")),
        r"bob.*client 'bob' was made for fedavg, but .*ann.* for fedfisher_kfac; expected one",
    ),
    "packed": (lambda p: rewritten(p, set_to(codec="int8")), "bob.*packed by 'int8'"),
    "duplicated": (
        lambda p: rewritten(p, set_to(client="ann")),
        r"Client 'ann' is in .*ann\.safetensors' and in .*bob\.safetensors': merge only one",
    ),
    "NaN": (lambda p: rewritten(p, spoil), "bob.*of client 'bob' is not finite: params/shift"),
    "indefinite": (
        lambda p: rewritten(p, indefinite),
        "bob.*client 'bob' has a Fisher that is not symmetric positive semi-definite: "
        "layers/10/kernel/output",
    ),
    "an array that is missing": (
        lambda p: rewritten(p, lambda about, arrays: arrays.pop("params/scale")),
        r"bob.*client 'bob' .* \(there is no array 'params/scale'\)",
    ),
    "no name": (lambda p: rewritten(p, set_to(client="")), "bob.* has client ''; expected a name"),
    "negative examples": (lambda p: rewritten(p, set_to(examples=-1)), "finite non-negative"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    save(folder, "fedfisher_kfac")
    return files_in(folder)


@pytest.fixture
def paths(tmp_path, sound):
    for name, content in sound.items():
        (tmp_path / name).write_bytes(content)
    return [tmp_path / name for name in sound]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_upload_is_refused_by_name_and_nothing_is_written(paths, case, capsys):
    spoil, message = BAD[case]
    spoil(paths[1])
    out = paths[0].with_name("merged.safetensors")
    out.write_text("the old model")
    before = files_in(out.parent)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        files.merge_files(out, paths)
    assert main(["merge", str(out), *map(str, paths)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert files_in(out.parent) == before


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"weights": [1, 2]}, ValueError, r"weights has shape \(2,\); expected \(3,\)"),
        ({"weights": [1, -2, 2]}, ValueError, "expected finite non-negative"),
        ({"weights": [1, np.nan, 2]}, ValueError, "expected finite non-negative"),
        ({"weights": [0, 0, 0]}, ValueError, "Every weight is zero"),
        ({"algorithm": "fedfischer"}, ValueError, "algorithm is 'fedfischer'; .*Did you mean"),
        (
            {"algorithm": "fedfisher_sequential"},
            ValueError,
            "fedfisher_sequential merges a layer by the merged layers before it",
        ),
        ({"algorithm": "scaffold"}, ValueError, "scaffold takes more than one message"),
        (
            {"algorithm": "regmean"},
            ValueError,
            r"ann.*regmean, which merges params and grams \(dict",
        ),
        (
            {"algorithm": "fisher_merge"},
            ValueError,
            r"fisher_merge, which merges params and fisher \(Diag",
        ),
        ({"shrink": 0.5}, TypeError, "fedfisher_kfac has no option 'shrink'. Did you mean"),
        ({"damping": -1.0}, ValueError, "damping is -1"),
        ({"equal_traces": True}, ValueError, "equal_traces is an option of clients"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite is 'ignore'"),
    ],
)
def test_a_bad_argument_is_refused_and_nothing_is_written(paths, how, error, message):
    before = files_in(paths[0].parent)
    with pytest.raises(error, match=message):
        files.merge_files(paths[0].with_name("merged.safetensors"), paths, **how)
    assert files_in(paths[0].parent) == before


def test_a_bad_place_is_refused_and_nothing_is_written(paths):
    folder = paths[0].parent
    before = files_in(folder)
    with pytest.raises(ValueError, match="is one of the uploads"):
        files.merge_files(paths[1], paths)
    with pytest.raises(ValueError, match="end it in"):
        files.merge_files(folder / "merged.npz", paths)
    with pytest.raises(FileNotFoundError, match=r"folder .* does not exist"):
        files.merge_files(folder / "nowhere" / "merged.safetensors", paths)
    with pytest.raises(ValueError, match="no uploads to merge"):
        files.merge_files(folder / "merged.safetensors", [])
    assert files_in(folder) == before


def test_who_diverged_can_be_left_out(paths, capsys):
    out = paths[0].with_name("merged.safetensors")
    files.merge_files(out, paths, weights=[20, 0, 30])
    expected = files.load_arrays(out)
    rewritten(paths[1], spoil)
    found = ["merge", str(out), *map(str, paths), "--on-nonfinite", "drop"]
    assert main(found) == 0
    assert_equal(files.load_arrays(out), expected)
    printed = capsys.readouterr()
    row, why = (line for line in printed.out.splitlines() if line.startswith("bob"))
    assert row.split()[1:] == ["10", "0.000", str(paths[1].stat().st_size), "no"]
    assert why == "bob is left out: params/shift is not finite"
    # Once, and not once a layer.
    said = "Left out, as uploads that are not finite: client 'bob' for leaf 'params/shift'."
    assert printed.err == f"warning: {said}\n"
    assert files.unseal(out).about["left_out"] == {"bob": "params/shift"}


def test_who_has_no_weight_may_have_any_fisher(paths):
    out = paths[0].with_name("merged.safetensors")
    files.merge_files(out, paths, weights=[20, 0, 30])
    expected = files.load_arrays(out)
    rewritten(paths[1], indefinite)
    files.merge_files(out, paths, weights=[20, 0, 30])
    assert_equal(files.load_arrays(out), expected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    codes: Any
    scale: Any
    bits: int = dataclasses.field(metadata={"static": True})
    shape: tuple = dataclasses.field(metadata={"static": True})
    hint: Any = dataclasses.field(metadata={"static": True}, default=None)


PACKED = Packed(np.arange(6, dtype="uint8"), np.float32(0.5), 4, (3, 4))


def test_one_line_adds_a_type_of_data(tmp_path, monkeypatch):
    path = tmp_path / "ann.safetensors"
    update = Update({"params": {"dense": {"kernel": PACKED}}}, "packed params")
    how = {"algorithm": "fedavg", "client": "ann", "examples": 1}
    with pytest.raises(TypeError, match=r"'fisher/w' is a Packed; .*VALUE_TYPES"):
        files.save_update(path, Update({"fisher": {"w": PACKED}}, "packed Fisher"), **how)
    monkeypatch.setitem(files.VALUE_TYPES, "Packed", Packed)
    files.save_update(path, update, codec="int4", **how)
    found, record = files.load_update(path)
    assert_equal(found, Update({"params": {"dense/kernel": PACKED}}, "packed params"))
    assert record.codec == "int4"
    wrong = dataclasses.replace(PACKED, hint=np.dtype("int8"))
    with pytest.raises(TypeError, match="'params/dense/kernel/hint' is static and a Int8DType"):
        files.save_update(path, Update({"params": {"dense": {"kernel": wrong}}}, "x"), **how)
    assert files.load_update(path)[0].kind == "packed params"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"algorithm": "fedmean"}, ValueError, "algorithm is 'fedmean'"),
        *(
            ({"algorithm": name}, ValueError, f"algorithm is '{name}', whose uploads are not")
            for name, row in fj.algorithms.METHODS.items()
            if row.reads is None
        ),
        ({"client": ""}, ValueError, "client is ''"),
        ({"client": 3}, ValueError, "client is 3; expected a name"),
        ({"examples": -1}, ValueError, "examples is -1"),
        ({"examples": "many"}, TypeError, "examples is 'many'"),
        ({"codec": ""}, ValueError, "codec is ''"),
    ],
)
def test_what_an_upload_says_is_checked(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path, "fedavg", **changes)
    assert files_in(tmp_path) == {}


def test_stacked_updates_and_colliding_names_are_refused(tmp_path):
    path, how = tmp_path / "a.safetensors", {"algorithm": "fedavg", "client": "a", "examples": 1}
    with pytest.raises(ValueError, match=r"'layers/2/bias' has shape .*files.of_client"):
        files.save_update(path, updates_of("fedfisher_kfac"), **how)
    twice = Update({"params": {"a/b": np.ones(1), "a": {"b": np.ones(1)}}}, "params")
    with pytest.raises(ValueError, match=r"'a/b'.*contains a slash"):
        files.save_update(path, twice, **how)
    with pytest.raises(TypeError, match=r"update is a dict; expected an algorithms.Update"):
        files.save_update(path, {"params": np.ones(1)}, **how)
    assert files_in(tmp_path) == {}


START = params_of(9)
CODECS = {  # together they have every node
    "fedavg": compression.compose(compression.differences(), compression.quantized(8)),
    "fisher_merge": compression.water_filling(1.5),
    "regmean": compression.compose(compression.roots(2), compression.quantized(8)),
    "fedfisher_kfac": compression.compose(compression.triangles(), compression.quantized(4)),
    "fedfisher_full": compression.compose(compression.truncated(3), compression.quantized(16)),
}


@functools.cache
def packed(name: str) -> list[Update]:
    """What each client sends when a codec is used."""
    codec, updates = CODECS[name], updates_of(name)
    encode = jax.jit(lambda values: {"update": codec.encode(values, START)})
    own = [files.of_client(updates, i).values for i in range(len(CLIENTS))]
    return [Update(encode(values), f"{updates.kind}; {codec.name}") for values in own]


def save_packed(folder, name, **changes):
    return save(folder, name, fj.tree.stack(packed(name)), **changes)


@pytest.mark.parametrize("name", CODECS)
def test_a_compressed_upload_comes_back_bit_for_bit_and_its_bytes_are_those_of_its_arrays(
    tmp_path, name
):
    sent, path = packed(name)[1], save_packed(tmp_path, name)[1]
    found, record = files.load_update(path)
    assert (found.kind, record.codec) == (sent.kind, CODECS[name].name)
    assert record.layers == fj.tree.shapes(PARAMS[1])
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert record.nbytes - header == compression.size(sent)
    if not reads(name):
        sizes = [x.size for x in jax.tree.leaves(START)]
        assert compression.size(sent) == sum(sizes) + 4 * len(sizes)
    # Decoded by the same program, which says that every bit and its place are the same.
    decode = jax.jit(compression.decode)
    expected = decode(sent.values["update"], START)
    found = Update(files.uploads.values.flat(decode(found.values["update"], START)), "")
    assert_equal(found, by_name(Update(expected, "")))


def test_every_node_of_every_codec_was_in_a_file():
    nodes = set()

    def visit(value):
        if dataclasses.is_dataclass(value):
            nodes.add(type(value).__name__)
            value = vars(value)
        for inner in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            visit(inner)

    for name in CODECS:
        visit(packed(name)[0].values)
    known = {x for x in compression.__all__ if dataclasses.is_dataclass(getattr(compression, x))}
    assert known <= nodes
    assert nodes <= files.VALUE_TYPES.keys()


@pytest.mark.parametrize(
    "name",
    [
        # Of four bits: factors are not semi-definite before the server makes them so.
        *("fedavg", "fedfisher_kfac"),
        *(pytest.param(x, marks=SLOW) for x in ("fisher_merge", "regmean", "fedfisher_full")),
    ],
)
def test_compressed_files_merge_like_compressed_updates(tmp_path, name):
    options, paths = OPTIONS.get(name, {}), save_packed(tmp_path, name)
    before, out = files_in(tmp_path), tmp_path / "merged.safetensors"
    merged = files.merge_files(out, paths, start=START, **options)
    assert [x.nbytes for x in merged.records] == [len(content) for content in before.values()]
    assert files_in(tmp_path).keys() == before.keys() | {out.name}
    method = fj.algorithms.make(name, MODEL, **options)
    method = compression.compressed(method, CODECS[name])._replace(model=None)
    if fj.fisher.Kronecker in reads(name).values():
        # By leaf name, as that has been compiled.
        loaded = [files.load_update(path)[0] for path in paths]
        start = by_name(Update({"params": START}, "")).values["params"]
        expected, _, _ = fj.merging.merge(method, start, loaded, WEIGHTS)
        assert_equal(files.load_arrays(out), dict(expected), 1e-6)
    else:
        expected, _, _ = fj.merging.merge(method, START, packed(name), WEIGHTS)
        assert_equal(files.load_arrays(out, like=expected), expected, 2e-5)


def test_differences_need_the_model_that_clients_started_from(tmp_path, capsys):
    paths, out = save_packed(tmp_path, "fedavg"), tmp_path / "merged.safetensors"
    start = tmp_path / "start.safetensors"
    files.save_arrays(start, START)
    before = files_in(tmp_path)
    words = ["merge", str(out), *map(str, paths)]
    assert main(words) == 1
    assert re.search(
        "ann.*client 'ann' is packed by 'differences, 8 bits'.*--start", capsys.readouterr().err
    )
    other = {**START, "scale": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"ann.*differences of 'scale' \(4,\), but .* \(3,\)"):
        files.merge_files(out, paths, start=other)
    del other["scale"]
    with pytest.raises(ValueError, match=r"ann.*differences of 'scale' \(4,\), but .* none"):
        files.merge_files(out, paths, start=other)
    assert files_in(tmp_path) == before
    assert main([*words, "--start", str(start)]) == 0
    there = files.load_arrays(out)
    files.merge_files(out, paths, start=START)
    assert_equal(files.load_arrays(out), there)


def test_packed_and_plain_uploads_merge(tmp_path):
    paths, out = save_packed(tmp_path, "fedavg"), tmp_path / "merged.safetensors"
    plain = Update({"params": PARAMS[0]}, "params")
    files.save_update(paths[0], plain, algorithm="fedavg", client="ann", examples=20)
    files.merge_files(out, paths, start=START, weights=[1, 0, 0])
    assert_equal(files.load_arrays(out, like=PARAMS[0]), PARAMS[0])


def cut(about, arrays):
    name = "update/params/scale/value/packed"
    arrays[name] = arrays[name][:-1]


def diverge(about, arrays):
    arrays["update/params/shift/value/largest"][...] = np.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"bob\.safetensors' of client 'bob' cannot be decoded"),
        (diverge, r"bob\.safetensors' of client 'bob' is not finite: params/shift"),
    ],
)
def test_a_bad_compressed_upload_is_refused_by_name(tmp_path, change, message):
    paths = save_packed(tmp_path, "fedavg")
    rewritten(paths[1], change)
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=message):
        files.merge_files(tmp_path / "merged.safetensors", paths, start=START)
    assert files_in(tmp_path) == before


def test_stacked_compressed_updates_are_refused(tmp_path):
    how = {"algorithm": "fedavg", "client": "a", "examples": 1}
    for name in ("fedavg", "fisher_merge"):
        with pytest.raises(ValueError, match=r"of several clients.*files\.of_client"):
            files.save_update(tmp_path / "a.safetensors", fj.tree.stack(packed(name)), **how)
    assert files_in(tmp_path) == {}


# Claims


def node(type, *children, **static):
    return {"type": type, "children": dict.fromkeys(children, "array"), "static": static}


HUGE = files.Limits(1 << 30, 1 << 30, 1 << 30)  # to write what is refused


def of_params(leaf):
    return {"update": {"dict": {"params": {"dict": {"w": leaf}}}}}


def nested(depth):
    spec = "array"
    for _ in range(depth):
        spec = {"type": "Root", "children": {"columns": spec}, "static": {}}
    return spec


FLOAT, ONE, NOTHING = np.zeros, np.ones((), "float32"), np.zeros(0, "uint8")
IN = "update/params/w"


def stream(shape, widths, bits=b"\0"):
    slot = node("Slot", "step", "widths", shape=shape, dtype="float32")
    children = {"values": {"dict": {"params": {"dict": {"w": slot}}}}, "bits": "array"}
    arrays = {
        "update/values/params/w/step": ONE,
        "update/values/params/w/widths": widths,
        "update/bits": np.frombuffer(bits, "uint8"),
    }
    return {"update": {"type": "Stream", "children": children, "static": {}}}, arrays


def coded(packed=NOTHING, **changes):
    static = {"bits": 8, "shape": [4], "dtype": "float32"} | changes
    return of_params(node("Codes", "packed", "largest", **static)), {
        f"{IN}/packed": packed,
        f"{IN}/largest": ONE,
    }


def vectors(rows, rank, columns, more=0):
    return of_params(node("Truncated", "left", "values", "right")), {
        f"{IN}/left": FLOAT((rows, rank), "float32"),
        f"{IN}/values": FLOAT(rank + more, "float32"),
        f"{IN}/right": FLOAT((rank, columns), "float32"),
    }


def gram(rows, spec=None, **arrays):
    spec = spec or node("Root", "columns")
    values = {"grams": {"dict": {"w": spec}}, "params": {"dict": {"w": "array"}}}
    arrays = arrays or {"columns": FLOAT((rows, 1), "float32")}
    named = {f"update/grams/w/{name}": array for name, array in arrays.items()}
    return {"update": {"dict": values}}, {IN: FLOAT((2, 2), "float32"), **named}


def coded_by_fisher(shape):
    values, arrays = coded()
    template = {"Template": {"w": shape}}
    spec = {"type": "Dense", "children": {"matrix": "array"}, "static": {"template": template}}
    values["update"]["dict"]["fisher"] = spec
    return values, arrays | {"update/fisher/matrix": ONE}


BOMBS = {  # what is claimed, and what the refusal says; each of under a megabyte
    "no bits for 10^9 numbers": (coded(bits=0, shape=[10**9]), "params/w: Codes have 0 bits"),
    "no bits for 10^12 numbers": (coded(bits=0, shape=[10**12]), "params/w: Codes have 0 bits"),
    "more bits than a float": (coded(bits=10**6), "params/w: Codes have 1000000 bits"),
    "bits that are none": (coded(bits=True), "params/w: Codes have True bits"),
    "bytes that did not come": (
        coded(shape=[10**12]),
        r"params/w: An array of shape \(10+,\) .* codes of 0 bytes",
    ),
    "as much as no machine counts": (coded(shape=[10**30]), "params/w: An array of shape"),
    "nothing at all": (({"update": {"dict": {}}}, {"x": ONE}), "an update has no arrays"),
    "a number of 400 digits": (coded(shape=[10**400]), "params/w: An array of shape"),
    "a negative axis": (coded(shape=[-1, -4]), "params/w: An array of shape"),
    "axes that are none": (coded(shape=[2.5]), "params/w: An array of shape"),
    "a thousand axes": (coded(np.zeros(1, "uint8"), shape=[1] * 1000), "params/w: An array of sh"),
    "text for numbers": (coded(np.zeros(4, "uint8"), dtype="U900000000"), "type U900000000"),
    "a root": (gram(150_000), r"grams/w: A Root decodes to .*150000, 150000.* bytes"),
    "a matrix larger than its params": (
        gram(50),
        r"grams/w is float32\[50, 50\], expected \[2, 2\]",
    ),
    "a triangle that is none": (
        gram(0, node("Triangle", "entries"), entries=FLOAT((7, 3), "float32")),
        r"grams/w: A triangle has shape \[7, 3\]",
    ),
    "an outer product": (vectors(90_000, 1, 90_000), r"params/w: A Truncated decodes to .*90000"),
    "vectors that do not fit": (vectors(3, 2, 3, more=1), r"params/w: Singular triplets"),
    "columns of no bits": (stream([10**11, 2], np.zeros(1, "uint8")), r"params/w: It has 2\d+"),
    "fewer columns": (
        stream([2**20, 60], np.zeros(30, "uint8")),
        "A Stream decodes",
    ),
    "widths of other columns": (
        stream([4, 60], np.zeros(1, "uint8")),
        "params/w: An array .* widths",
    ),
    "an empty array in a stream": (stream([0, 0], NOTHING), "params/w: An array .* widths"),
    "bits that are not there": (
        stream([100, 2], np.full(1, 255, "uint8")),
        "A stream of 200 numbers needs 3000 bits, but has 8",
    ),
    "no bits at all": (stream([1, 2], np.zeros(1, "uint8"), b""), "needs 0 bits, but has 0"),
    "33 codes in one another": (
        (of_params(nested(33)), {IN + 33 * "/columns": np.ones((2, 2), "float32")}),
        "exceeds a limit .*nested.*--limit nesting=",
    ),
    "300 codes in one another": (
        (of_params(nested(300)), {IN + 300 * "/columns": np.ones((2, 2), "float32")}),
        "exceeds a limit .*limits=files.Limits",
    ),
    "lists in lists": (coded(shape=json.loads(100 * "[" + 100 * "]")), "limit .*nested"),
    "a product of very many lengths": (
        coded_by_fisher([2**59] * 33),
        r"of client 'eve' has a description .*expected a Layer or a Template",
    ),
    "too many arrays": (
        (
            {"update": {"dict": {"params": {"dict": {str(i): "array" for i in range(10_001)}}}}},
            {f"update/params/{i}": NOTHING for i in range(10_001)},
        ),
        "number of arrays is 10001; expected at most 10000",
    ),
    "a long header": (
        (of_params("array"), {IN: ONE, **{f"{i}{'x' * 900}": NOTHING for i in range(5000)}}),
        "size of the header in bytes .*--limit header=",
    ),
    "a long name": ((of_params("array"), {IN: ONE, "x" * 1001: NOTHING}), "length of a name"),
    "an empty array of long axes": (
        (of_params("array"), {IN: np.zeros((0, 10**9), "float32")}),
        "exceeds a limit",
    ),
}
INSIDE = """
import resource, sys, time
from fisherjax.__main__ import main
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
# What the process has, and 300 MB.
resource.setrlimit(resource.RLIMIT_AS, (now + 300_000_000, -1))
for path in sys.argv[2:]:
    for words in (["merge", sys.argv[1], path], ["inspect", path]):
        before = time.process_time()
        print("DONE", words[0], main(words), time.process_time() - before, flush=True)
"""


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("bombs"), {}
    for number, (case, ((values, arrays), _)) in enumerate(BOMBS.items()):
        paths[case] = folder / f"{number}.safetensors"
        said = {"algorithm": "fedavg", "kind": "params", "client": "eve", "examples": 5}
        said["codec"] = "a code"
        about = {"what": "upload", "values": {"dict": values}} | said
        kinds = {name: files.base.ArrayKind.of(x) for name, x in arrays.items()}
        with files.base.sealing(paths[case], kinds, about, HUGE) as put:
            for name, array in arrays.items():
                put(name, array)
    return paths


@pytest.mark.parametrize("case", BOMBS)
def test_what_an_upload_claims_is_held_against_what_came(bombs, case):
    """Before anything is made of it: in memory that is counted, and in seconds."""
    message, path = BOMBS[case][1], bombs[case]
    for act in (
        lambda: files.load_update(path),
        lambda: files.merge_files(path.with_name("merged.safetensors"), [path]),
    ):
        tracemalloc.start()
        with pytest.raises(ValueError, match=message) as error:
            act()
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
        tracemalloc.stop()
        assert path.name in str(error.value)


@pytest.mark.long
def test_no_bomb_ends_the_command(bombs, tmp_path):
    """All of them in one process that may take 300 MB more than it has: it goes on after each."""
    pytest.importorskip("resource")
    if not Path("/proc/self/statm").exists():
        pytest.skip("nothing tells how much memory a process has")
    words = [str(tmp_path / "merged.safetensors"), *map(str, bombs.values())]
    done = subprocess.run([sys.executable, "-c", INSIDE, *words], capture_output=True, text=True)
    results = [line.split()[1:] for line in done.stdout.splitlines() if line[:5] == "DONE "]
    assert [int(code) for _, code, _ in results] == [1, 1] * len(BOMBS), done.stderr
    assert max(float(seconds) for *_, seconds in results) < 2
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    assert not (tmp_path / "merged.safetensors").exists()


@pytest.mark.long
def test_claims_are_held_against_the_start_and_the_other_clients(tmp_path):
    """One client codes a layer of another shape: nothing of anybody is decoded."""
    paths = save_packed(tmp_path, "fedavg")

    def reshape(about, arrays):
        leaf = about["values"]["dict"]["update"]["dict"]["params"]["dict"]["scale"]
        leaf["children"]["value"]["static"]["shape"] = [2, 2]

    rewritten(paths[2], reshape)
    before = files_in(tmp_path)
    # The start has the last word, and clients that differ are told apart without one.
    with pytest.raises(
        ValueError, match=r"cho.*'scale' .*start has \(4,\)|cho.*start: params/scale"
    ):
        files.merge_files(tmp_path / "merged.safetensors", paths, start=START)
    plain = save_packed(tmp_path, "fedfisher_kfac")

    def widen(about, arrays):
        leaf = about["values"]["dict"]["update"]["dict"]["params"]["dict"]["scale"]
        leaf["static"]["shape"] = [2, 2]

    rewritten(plain[1], widen)
    with pytest.raises(ValueError, match=r"bob.*params/scale is float32\[2, 2\], expected"):
        files.merge_files(tmp_path / "merged.safetensors", plain)
    assert set(files_in(tmp_path)) == set(before)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("fisher_merge", "fisher/entries/layers/2/bias"),
        ("fedfisher_kfac", "fisher/factors/layers/10/kernel/output"),
        ("fedfisher_kfac", "fisher/entries/scale"),
        ("fedfisher_full", "fisher/matrix"),
        ("regmean", "grams/layers/2/kernel"),
    ],
)
def test_curvature_of_other_shapes_than_its_params_is_refused(tmp_path, name, array):
    """One number would be broadcast to all of a leaf."""
    [path, *_] = save(tmp_path, name)
    if array not in files.load_update(path)[1].arrays:
        pytest.skip("this network has no such block")
    rewritten(path, lambda about, arrays: arrays.update({array: np.ones((), "float32")}))
    with pytest.raises(ValueError, match=r"ann.* cannot be decoded \(.*float32\[\], expected \["):
        files.merge_files(tmp_path / "merged.safetensors", [path])


@pytest.mark.long
def test_limits_can_be_raised_and_lowered(tmp_path, capsys):
    paths, out = save_packed(tmp_path, "fisher_merge"), tmp_path / "merged.safetensors"
    words = ["merge", str(out), *map(str, paths)]
    start = ["--start", str(tmp_path / "start.safetensors")]
    files.save_arrays(start[1], START)
    for limit, said in (
        ("arrays=3", "number of arrays .*--limit arrays="),
        ("nesting=3", "depth to which"),
        ("name=9", "length of a name"),
        ("header=99", "size of the header"),
        ("arrays=0", "limit arrays is 0; expected an integer of at least 1"),
        ("array=3", "limit is 'array'; expected .* or 'arrays' or"),
    ):
        assert main([*words, *start, "--limit", limit]) == 1
        assert re.search(said, capsys.readouterr().err)
        assert main(["inspect", str(paths[0]), "--limit", limit]) == 1
        assert re.search(said, capsys.readouterr().err)
    assert main([*words, *start, "--limit", "arrays=99999", "--limit", "nesting=99"]) == 0


def test_codes_that_stand_for_very_much_are_read_by_who_says_so(tmp_path):
    """A root of rank one of a wide layer's Gram matrix: 36 MB from 24 kB."""
    values = {"params": {"w": jnp.ones((3000, 1))}, "grams": {"w": jnp.ones((3000, 3000))}}
    columns = compression.Root(jnp.ones((3000, 1)))
    sent = Update({"update": values | {"grams": {"w": columns}}}, "params, grams; rank 1")
    path = tmp_path / "a.safetensors"
    files.save_update(path, sent, algorithm="regmean", client="a", examples=1)
    with pytest.raises(ValueError, match=r"grams/w: A Root decodes .*--limit expansion="):
        files.load_update(path)
    found, _ = files.load_update(path, limits=files.Limits(expansion=2000))
    decoded = compression.decode(found.values["update"], {})
    assert_equal(decoded["grams"]["w"], values["grams"]["w"])


def test_what_is_packed_without_a_codecs_name_is_refused(tmp_path):
    sent = compression.quantized(8).encode({"params": {"w": jnp.ones((3, 3))}}, None)
    path = tmp_path / "a.safetensors"
    files.save_update(path, Update(sent, "params"), algorithm="fedavg", client="a", examples=1)
    with pytest.raises(ValueError, match=r"'a' has codec 'none', but holds encoded values \(Codes"):
        files.merge_files(tmp_path / "merged.safetensors", [path])


def test_an_unknown_command_is_answered_by_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["mrge"])
    assert re.search("'mrge'.*merge.*inspect.*check", capsys.readouterr().err)


COMMAND = """
import json, resource, sys
from fisherjax.__main__ import main
for limit, words in json.loads(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    print(main(words))
heavy = ["fisherjax.networks", "flax", "kfac_jax", "tensorflow_datasets"]
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.long
def test_the_command_needs_no_network_and_a_full_disk_leaves_the_old_file(paths):
    out, uploads = paths[0].with_name("merged.safetensors"), list(map(str, paths))
    out.write_text("the old model")
    before, mean = files_in(out.parent), str(out.with_name("mean.safetensors"))
    # The disk is full after the first layer was merged.
    runs = [
        (600, ["merge", str(out), *uploads]),
        (-1, ["merge", mean, *uploads, *["--algorithm", "fedavg"]]),
    ]
    words = [sys.executable, "-c", COMMAND, json.dumps(runs)]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    first, *_, second, heavy = result.stdout.splitlines()
    assert (first, second, heavy) == ("1", "0", "[]"), result.stderr
    assert result.stderr.startswith("error: ")
    assert "File too large" in result.stderr
    assert files_in(out.parent) == before | {"mean.safetensors": Path(mean).read_bytes()}


def test_the_command_is_the_function(paths, capsys):
    out = paths[0].with_name("merged.safetensors")
    words = ["merge", str(out), *map(str, paths), *["--damping", "0.5", "--weights", "1", "1", "2"]]
    assert main(words) == 0
    rows = {row.split()[0]: row.split() for row in capsys.readouterr().out.splitlines() if row}
    assert [rows[client][2] for client in CLIENTS] == ["0.250", "0.250", "0.500"]
    there = files.load_arrays(out)
    files.merge_files(out, paths, damping=0.5, weights=[1, 1, 2])
    assert_equal(files.load_arrays(out), there)
    assert main([*words[:-6], "--option", "damping=0.5", *words[-4:]]) == 0
    assert_equal(files.load_arrays(out), there)


@pytest.mark.parametrize("value", ["sum", "'sum'", "["])
def test_an_option_that_is_no_literal_is_text(paths, capsys, value):
    out = str(paths[0].with_name("merged.safetensors"))
    assert main(["merge", out, *map(str, paths), "--option", f"centre={value}"]) == 1
    expected = "centre is '['; expected" if value == "[" else "reads the model that clients started"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("option", ["damping", "damping=", "=1 2"])
def test_an_option_that_is_none_is_refused(paths, capsys, option):
    with pytest.raises(SystemExit):
        main(
            [
                "merge",
                str(paths[0].with_name("merged.safetensors")),
                str(paths[0]),
                "--option",
                option,
            ]
        )
    assert f"'{option}' is not NAME=VALUE" in capsys.readouterr().err


def test_inspect_prints_what_a_file_says(paths, capsys):
    assert main(["inspect", str(paths[0])]) == 0
    printed = capsys.readouterr().out
    record = files.load_update(paths[0])[1]
    assert {"ann", "20", record.kind, record.sha256} <= {
        line.split(maxsplit=1)[1] for line in printed.split("\n\n")[0].splitlines()
    }
    for name, kind in record.arrays.items():
        assert f"{name}  " in printed
        assert str(kind) in printed
    out = paths[0].with_name("merged.safetensors")
    files.merge_files(out, paths)
    assert main(["inspect", str(out)]) == 0
    assert "bob     0.167" in capsys.readouterr().out
    assert main(["inspect", str(out.with_name("none.safetensors"))]) == 1


@pytest.mark.parametrize("clients", [None, [0.5], {"ann": "half"}, {"ann": 1}])
def test_inspect_refuses_a_model_without_the_shares_of_its_clients(paths, capsys, clients):
    out = paths[0].with_name("merged.safetensors")
    files.merge_files(out, paths, algorithm="fedavg")
    rewritten(out, set_to(clients=clients))
    assert main(["inspect", str(out)]) == 1
    assert re.search(
        r"merged.* has clients .*; expected the share of each client", capsys.readouterr().err
    )


def test_numbers_of_examples_may_be_as_large_as_floats_are(tmp_path):
    paths = save(tmp_path, "fedavg", examples=1e308)
    merged = files.merge_files(tmp_path / "merged.safetensors", paths)
    np.testing.assert_allclose(merged.shares, 1 / 3)


def test_an_update_may_have_no_kind(tmp_path):
    path, update = tmp_path / "a.safetensors", Update({"params": np.ones(2)}, "")
    files.save_update(path, update, algorithm="fedavg", client="a", examples=1)
    assert files.load_update(path)[0].kind == ""


def test_two_writers_at_once_leave_one_whole_file(paths):
    out = paths[0].with_name("merged.safetensors")
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(files.merge_files, out, paths, algorithm="fedavg", weights=[1, 0, 0][::way])
            for way in (1, -1) * 4
        ]
        [job.result() for job in jobs]
    found = files.load_arrays(out)
    assert files.unseal(out).about["clients"] in (
        {"ann": 1, "bob": 0, "cho": 0},
        {"ann": 0, "bob": 0, "cho": 1},
    )
    assert any(np.array_equal(found["scale"], PARAMS[i]["scale"]) for i in (0, 2))
    assert {path.name for path in out.parent.iterdir()} == {out.name, *(p.name for p in paths)}


@pytest.mark.long
def test_the_page_about_uploads_runs_and_prints_what_stands_under_it(run_page, capsys, monkeypatch):
    pages = [
        ROOT / f"docs/how_to/{name}.md" for name in ("uploads", "merge_uploads", "upload_kinds")
    ]
    names, text = run_page(*pages), "".join(page.read_text() for page in pages)
    monkeypatch.chdir(names["folder"])
    capsys.readouterr()
    said = re.search(r"It prints (0\.\d+) and (0\.\d+)", text).groups()
    # Other versions of JAX round differently: two of the 360 test images.
    np.testing.assert_allclose(names["found"], np.float64(said), atol=0.006)
    widths, of_units = re.search(r"It prints (\[.*\]) and (0\.\d+)", text).groups()
    assert names["widths"] == json.loads(widths)
    judged = float(fj.metrics.accuracy(names["wider"], names["wide"], names["held_out"]))
    np.testing.assert_allclose(judged, float(of_units), atol=0.006)
    size, nbytes, accuracy = re.search(r"It prints (\d+) (\d+) (0\.\d+)", text).groups()
    assert compression.size(names["own"]) == int(size)
    # The version stands in the header.
    assert abs(names["record"].nbytes - int(nbytes)) < 100
    np.testing.assert_allclose(names["accuracy"], float(accuracy), atol=0.006)
    commands = re.findall(r"^\$ python -m fisherjax (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    assert len(commands) == 2
    for command, expected in commands:
        assert main(command.split()) == 0
        printed = capsys.readouterr().out.split()
        for word, wanted in zip(printed, expected.split(), strict=True):
            if re.fullmatch(r"0\.\d{3}", wanted):
                assert abs(float(word) - float(wanted)) < 0.01
            elif not re.fullmatch(r"[0-9a-f]{64}", wanted):
                assert word == wanted
