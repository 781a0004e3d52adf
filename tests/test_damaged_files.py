"""Damaged files are refused by name, or read as far as their format can tell right from wrong.

Damages are drawn from a seed (tests/damage.py). A file with a digest reads as it was written, or is
refused. An adversary can compute the digest again: what is read then is consistent, as small as the
file, and merges like any upload or not at all. A plain file notices no changed number.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import random
import tracemalloc
import warnings
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fisherjax as fj
from fisherjax import compression, files
from fisherjax.__main__ import main
from fisherjax._layers.graph import Wiring
from fisherjax._layers.layer import Layer
from fisherjax.algorithms import Update
from fisherjax.compression import (
    Codes,
    Difference,
    Root,
    Slot,
    Squares,
    Stream,
    Triangle,
    Truncated,
)
from fisherjax.files.checkpoints import _fishers
from fisherjax.files.uploads.update import open_upload
from fisherjax.fisher.operators import Template
from tests import damage, torch_files

OLD = Path(__file__).parent / "uploads_of_0_2"
PLAIN = {
    "w": np.arange(12, dtype="float32").reshape(3, 4),
    "n": np.arange(3),
    "deep/b": np.ones(2, ml_dtypes.bfloat16),
    "flag": np.array([True, False]),
    "f64": np.ones((2, 2)),
}
LAYER = Layer("a", "b", (2, 3))
SHAPES = {"a": (2, 3), "b": (3,), "c": (4,)}
START = {name: np.ones(shape, "float32") for name, shape in SHAPES.items()}
METHODS = ("fedavg", "fisher_merge", "regmean", "fedfisher_kfac", "fedfisher_full", "pfnm")
CODED = {  # together they have every node
    "differences": "fedavg",
    "filling": "fisher_merge",
    "roots": "regmean",
    "triangles": "fedfisher_kfac",
    "truncated": "fedfisher_full",
}
UPLOADS = (*METHODS, "format 2", "0.2", "0.2-small", *CODED)
FEW, MANY = 8, 1000  # damages of each kind; of every format there are two kinds


def values_of(method, source):
    """Make up what a client sends."""

    def gram(size):
        x = source.normal(size=(size, 2 * size)).astype("float32")
        return x @ x.T

    params = {x: source.normal(size=shape).astype("float32") for x, shape in SHAPES.items()}
    squares = {name: x**2 for name, x in params.items()}
    template = Template.of(params)
    factors = {"a": {"input": gram(3), "output": gram(3)}}
    operators = {
        "fisher_merge": lambda: fj.fisher.Diagonal(squares),
        "fedfisher_kfac": lambda: fj.fisher.Kronecker(
            factors, {"c": squares["c"]}, (LAYER,), template
        ),
        "fedfisher_full": lambda: fj.fisher.Dense(gram(13), template),
    }
    values = {"params": params}
    if method in operators:
        values["fisher"] = operators[method]()
    if method == "regmean":
        values["grams"] = {"a": gram(2)}
    if method == "pfnm":
        params["k"] = params.pop("c").reshape(2, 2)[[0, 1, 1]]
        layers = LAYER, Layer("k", None, (3, 2))
        values["wiring"] = Wiring(layers, ((), (0,)), ((0, 0), (1, 1)))
        values["counts"] = np.array([3, 2], "float32")
    return values


def coded_of(values, source):
    """Make up codes of what a client sends, without the programs that would compute them."""

    def codes(*shape, bits=8):
        packed = np.frombuffer(source.bytes(-(-math.prod(shape) * bits // 8)), "uint8")
        return Codes(packed, np.float32(2), bits, shape, "float32")

    def triangle(matrix):
        size = len(matrix)
        return Triangle(codes((size + 1) // 2, size + 1 - size % 2, bits=4))

    def triplets(matrix):
        # A symmetric matrix of positive values: a code is a byte, and 127 stands for zero.
        size, left, values = len(matrix), codes(len(matrix), 3), codes(3)
        turned = left.packed.reshape(size, 3).T.ravel()
        right = dataclasses.replace(left, packed=turned, shape=(3, size))
        return Truncated(left, dataclasses.replace(values, packed=values.packed | 128), right)

    def slot(x):
        columns = x.shape[-1] if x.ndim > 1 else 1
        widths = np.full((columns + 1) // 2, 0x33, "uint8")
        widths[-1] = 0x30 if columns % 2 else 0x33
        return Slot(np.float32(0.1), widths, x.shape, "float32")

    params, fisher = values["params"], values.get("fisher")
    made = {name: codes(*x.shape) for name, x in params.items()}
    if "grams" in values:
        return {"params": made, "grams": {"a": Root(codes(2, 1))}}
    if isinstance(fisher, fj.fisher.Kronecker):
        factors = jax.tree.map(triangle, fisher.factors)
        return {"params": made, "fisher": dataclasses.replace(fisher, factors=factors)}
    if isinstance(fisher, fj.fisher.Dense):
        return {
            "params": made,
            "fisher": dataclasses.replace(fisher, matrix=triplets(fisher.matrix)),
        }
    if fisher is not None:
        roots = fj.fisher.Diagonal({name: Squares(slot(x)) for name, x in params.items()})
        moved = {name: Difference(slot(x), name) for name, x in params.items()}
        bits = np.frombuffer(source.bytes(10), "uint8")
        return Stream({"params": moved, "fisher": roots}, bits)
    return {"params": {name: Difference(x, name) for name, x in made.items()}}


@functools.cache
def upload(kind: str, client: str, folder: Path) -> bytes:
    """Write the upload of a client, and return its bytes."""
    if kind.startswith("0.2"):
        return (OLD / f"{client}{kind[3:]}.safetensors").read_bytes()
    path, source = folder / "sound.safetensors", np.random.RandomState(ord(client[0]))
    method = CODED.get(kind, kind if kind in METHODS else "fedavg")
    values, extra, text = values_of(method, source), (), "params"
    if kind in CODED:
        values, text = {"update": coded_of(values, source)}, "params; a code"
    if kind == "format 2":
        moments = {"mean": np.ones(2, "float32"), "second_moment": np.full(2, 9, "float32")}
        extra = moments, ("z", "y")
    how = {"algorithm": method, "client": client, "examples": 10}
    files.save_update(path, Update(values, text, *extra), **how)
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def bytes_read():
    """Count the bytes that this process has read."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0


def judged(act, path, bounded=True):
    """Return (what was read, "") or (None, the refusal): in bounded memory, by bounded reading."""
    before, found, kind = bytes_read(), None, ValueError
    tracemalloc.start()
    try:
        found, said = act(path), ""
    except ValueError as error:
        kind, said = type(error), str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # Errors of other libraries, such as UnicodeDecodeError, are ValueErrors of other types.
    assert kind is ValueError, said
    # A merge compiles programs, whatever the size of the file.
    assert peak < 2_000_000 or not bounded, peak
    assert bytes_read() - before < 4 * path.stat().st_size + 20_000 or not bounded
    assert said.isprintable(), said
    assert len(said) < 2200
    # Finite numbers of several clients may overflow only in their sum.
    assert not said or path.name in said or "merged model is not finite" in said, said
    return found, said


def inspected(path):
    """Run `inspect`, and raise what it says."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if main(["inspect", str(path)]):
            raise ValueError(err.getvalue().strip())
    assert all(line.isprintable() for line in out.getvalue().split("\n"))
    return True


def same(found, expected):
    """Compare pytrees bit for bit."""
    both = [jax.tree.flatten(x) for x in (found, expected)]
    (leaves, structure), (others, other) = both
    return structure == other and all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in zip(leaves, others, strict=True)
    )


def cases(names, many=MANY):
    """Few damages of each kind of file, and many for who asks."""
    slow = pytest.mark.slow
    return [x for name in names for x in ((name, FEW), pytest.param(name, many, marks=slow))]


@pytest.mark.parametrize(("kind", "number"), cases([*UPLOADS, "model"]))
def test_a_changed_byte_of_a_file_with_a_digest_is_seen(folder, kind, number):
    """Of uploads and of merged models, whoever reads them: what is read is what was written."""
    if kind == "model":
        files.merge_files(
            folder / "sound.safetensors", [_written(folder, "fedavg", "ann")], start=START
        )
        content = (folder / "sound.safetensors").read_bytes()
    else:
        content = upload(kind, "ann", folder)
    path = folder / "damaged.safetensors"
    path.write_bytes(content)
    expected = files.load_arrays(path)
    for seed in range(number):
        source = random.Random(seed)
        change = source.choice((damage.bytes_of, damage.header_of))
        path.write_bytes(change(content, source))
        if path.read_bytes() == content:
            continue
        acts = (files.load_arrays, inspected)
        for act in acts if kind == "model" else (*acts, files.load_update):
            found, said = judged(act, path)
            # Other entries of the metadata, or another order, are the same file to safetensors.
            assert said or found is True or act is files.load_update or same(found, expected), seed


def _written(folder, kind, client):
    path = folder / f"{client}.safetensors"
    path.write_bytes(upload(kind, client, folder))
    return path


@pytest.mark.parametrize(("kind", "number"), cases(UPLOADS))
def test_what_somebody_sealed_again_is_consistent_or_refused(folder, kind, number):
    """What decodes has the claimed shapes, and is written and read again as it is."""
    content, path = upload(kind, "ann", folder), folder / "damaged.safetensors"
    path.write_bytes(content)
    assert not judged(files.load_update, path)[1]
    for seed in range(number):
        path.write_bytes(damage.sealed_of(content, random.Random(seed)))
        found, said = judged(files.load_update, path)
        assert bool(judged(inspected, path)[1]) == bool(said), (seed, said)
        if found is None:
            continue
        update, record = found
        sizes = open_upload(path)[2]
        own = update.values.get("update", update.values)
        nodes = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, Difference))
        start = {x.leaf: np.float32(0) for x in nodes if isinstance(x, Difference)}
        made = jax.eval_shape(compression.decode, own, start)
        shapes = {name: (x.dtype.name, x.shape) for name, x in fj.tree.by_name(made).items()}
        listed = {x: tuple(y) for x, y in sizes.items() if not x.startswith("statistics/")}
        assert listed == shapes, seed
        if record.algorithm in fj.algorithms.METHODS:
            again = folder / "again.safetensors"
            how = {x: getattr(record, x) for x in ("algorithm", "client", "examples", "codec")}
            files.save_update(again, update, **how)
            assert same(files.load_update(again)[0].values, update.values)


@pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_model_that_somebody_sealed_again_is_printed_or_refused(folder, number):
    path, sound = folder / "damaged.safetensors", folder / "sound.safetensors"
    files.merge_files(sound, [_written(folder, "fedavg", "ann")])
    content = sound.read_bytes()
    for seed in range(number):
        path.write_bytes(damage.sealed_of(content, random.Random(seed)))
        judged(inspected, path)
        judged(files.load_arrays, path)


@pytest.mark.parametrize(("kind", "number"), [("fedavg", FEW), *cases(UPLOADS)[1::2]])
def test_what_can_be_read_merges_to_finite_numbers_or_is_refused(folder, kind, number):
    """Beside a sound upload, whose leaves the merged model has."""
    content, path = upload(kind, "ann", folder), folder / "damaged.safetensors"
    sound, out = _written(folder, kind, "bob"), folder / "merged.safetensors"
    shapes = dict(files.load_update(sound)[1].layers)
    for seed in range(number):
        path.write_bytes(damage.sealed_of(content, random.Random(seed)))
        if judged(files.load_update, path)[1]:
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Blocks ")
            start = START if kind in CODED else None
            act = functools.partial(files.merge_files, out, start=start)
            if judged(lambda own, act=act: act([sound, own]), path, bounded=False)[1]:
                continue
        found = files.load_arrays(out)
        assert {x: found[x].shape for x in shapes} == shapes or kind == "pfnm"
        assert all(np.isfinite(x).all() for x in found.values()), seed
    kept = {"merged.safetensors", "damaged.safetensors", "bob.safetensors", "ann.safetensors"}
    assert {x.name for x in folder.iterdir()} <= kept | {"sound.safetensors", "again.safetensors"}


@pytest.mark.parametrize(("method", "number"), cases(METHODS[1:-1]))
def test_a_fisher_file_that_somebody_sealed_again_is_consistent_or_refused(folder, method, number):
    """What is read merges to finite numbers beside its checkpoint, or is refused by name."""
    values = values_of(method, np.random.RandomState(0))
    params = values.pop("params")
    path, model = folder / "damaged.safetensors", folder / "ann.safetensors"
    files.save_fisher(path, *values.values(), params=params)
    save_file(params, model)
    content, out = path.read_bytes(), folder / "merged.safetensors"
    assert files.merge_files(out, [(model, path)]).algorithm in METHODS
    for seed in range(number):
        path.write_bytes(damage.sealed_of(content, random.Random(seed)))
        found, said = judged(lambda own: _fishers.open_fisher(own, files.Limits()), path)
        assert bool(judged(inspected, path)[1]) == bool(said), (seed, said)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Blocks ")
            act = functools.partial(judged, path=path, bounded=False)
            refused = act(lambda own: files.merge_files(out, [(model, own)]))[1]
        # What cannot be opened cannot be merged.
        assert refused or found is not None
        if refused:
            continue
        merged = files.load_arrays(out)
        assert {x: merged[x].shape for x in params} == {x: y.shape for x, y in params.items()}
        assert all(np.isfinite(x).all() for x in merged.values()), seed


@pytest.mark.parametrize("number", [50, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [damage.bytes_of, damage.json_text_of])
def test_an_index_is_read_as_it_was_written_or_refused(tmp_path, change, number):
    """Whatever it names, no array is taken from another file than the one that holds it."""
    arrays, places = dict(PLAIN), {}
    for place, name in enumerate(arrays):
        places[name] = f"model-{place % 2}.safetensors"
    for shard in sorted(set(places.values())):
        save_file({x: y for x, y in arrays.items() if places[x] == shard}, tmp_path / shard)
    path = tmp_path / "model.safetensors.index.json"
    content = json.dumps({"metadata": {"total_size": 100}, "weight_map": places}).encode()
    for seed in range(number):
        path.write_bytes(change(content, random.Random(seed)))
        found, said = judged(files.load_arrays, path)
        assert said or same(dict(sorted(found.items())), dict(sorted(arrays.items()))), seed


LAYER_AT = "dict/fisher/static/layers/0/Layer"
WIRING_AT = "dict/wiring/static"
REMOVED = object()
NO_LAYER, NO_WIRING = "expected a Layer or a Template", "its wiring does not fit the layers"
NO_DICT = {"type": "Diagonal", "children": {"entries": {"dict": {}}}, "static": {}}
WRONG = [  # of an upload: where in its description, what is there, and what the refusal says
    ("fedavg", "dict", [], "holds .*; expected values by name"),
    ("fedavg", "dict/params", 3, "'params' is 3; expected a description of values"),
    (
        "fedavg",
        "dict/params",
        {"dict": {}, "x": 1},
        "'params' has keys .*; expected those of values",
    ),
    ("fedavg", "dict/params/dict/new", "array", "there is no array 'params/new'"),
    ("fedavg", "dict/params/dict/c", {"dict": {}}, "params/c is a dict; expected an array"),
    ("fedavg", "", {"type": "Root", "children": {"columns": "array"}, "static": {}}, "no array"),
    ("fedavg", "", {"dict": {"update": "array"}}, "no array 'update'"),
    ("fedavg", "", NO_DICT, "holds a Diagonal; expected a dict of values"),
    ("fedavg", "", {"dict": {"update": NO_DICT}}, "an update is a Diagonal; expected a dict of"),
    ("fedfisher_full", "dict/fisher/type", [], r"has type \[\]; expected one of Diagonal"),
    ("fedfisher_full", "dict/fisher/type", "Object", "has type 'Object'; expected one of Diagonal"),
    ("fedfisher_full", "dict/fisher/children", [], r"has children \[\]; expected \['matrix'\]"),
    ("fedfisher_full", "dict/fisher/children", {}, r"has children {}; expected \['matrix'\]"),
    ("fedfisher_full", "dict/fisher/children/more", "array", "has children {.*more"),
    ("fedfisher_full", "dict/fisher/static", [], r"has static \[\]; expected \['template'\]"),
    ("fedfisher_full", "dict/fisher/static", {}, r"has static {}; expected \['template'\]"),
    ("fedfisher_full", "dict/fisher/static/more", 1, "has static {.*more"),
    ("fedfisher_full", "dict/fisher/static/template", {"Template": [1]}, NO_LAYER),
    ("fedfisher_full", "dict/fisher/static/template", {"Template": {"a": "x"}}, NO_LAYER),
    ("fedfisher_full", "dict/fisher/static/template", {"Layer": {"a": [2, 3]}}, NO_LAYER),
    ("fedfisher_full", "dict/fisher/static/template", {"Other": {"a": [2, 3]}}, NO_LAYER),
    ("fedfisher_full", "dict/fisher/static/template", {"Template": {}, "Layer": {}}, NO_LAYER),
    ("fedfisher_full", "dict/fisher/static/template", [{"Other": {}}], NO_LAYER),
    ("fedfisher_full", "dict/fisher/static/template", "x", "cannot be decoded .*'str' object"),
    (
        "fedfisher_full",
        "dict/fisher/static/template/Template/c",
        [5],
        r"params/c is float32\[4\], ex",
    ),
    ("fedfisher_full", "dict/fisher/static/template/Template/c", REMOVED, "fisher/matrix is"),
    ("fedfisher_full", "dict/fisher/static/template/Template/d", [1], r"matrix is .* \[14, 14\]"),
    ("fedfisher_kfac", "dict/fisher/static/layers/0", {"Other": LAYER._asdict()}, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/kernel", REMOVED, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/more", 1, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/kernel", 3, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/form", 3, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/bias", 3, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/part_of", 3, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", "23", NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", [2.0, 3], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", [True, 3], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", [-2, -3], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", [2**60, 3], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", [0, 3], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/index", ["x"], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/outputs", 1, NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/outputs", [0.5], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/outputs", [2], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/outputs", [-3], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/outputs", [-1, 1], NO_LAYER),
    ("fedfisher_kfac", f"{LAYER_AT}/kernel", "z", "has factors of .* and entries of"),
    ("fedfisher_kfac", f"{LAYER_AT}/shape", [200, 3], "layer 'a' has shape .* at most the size of"),
    ("fedfisher_kfac", f"{LAYER_AT}/bias", None, "has factors of .* and entries of"),
    ("fedfisher_kfac", "dict/fisher/children/entries/dict/c", REMOVED, "has factors of .* entries"),
    ("fedfisher_kfac", "dict/fisher/children/factors/dict/a/dict/input", REMOVED, "KeyError"),
    ("fisher_merge", "dict/fisher/children/entries/dict/c", REMOVED, r"lacks the leaves \['c'\]"),
    ("regmean", "dict/grams/dict/z", "array", "there is no array"),
    ("pfnm", WIRING_AT, {"layers": [], "sources": [], "spans": []}, NO_WIRING),
    ("pfnm", f"{WIRING_AT}/layers", [], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/layers/1", [3], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/layers/1/Layer/kernel", "z", NO_WIRING),
    ("pfnm", f"{WIRING_AT}/layers/1/Layer/bias", "z", NO_WIRING),
    ("pfnm", f"{WIRING_AT}/sources", [[]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/sources", [[], [2]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/sources", [[], [-1]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/sources", [[], ["x"]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/spans", [[0, 0]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/spans", [[0, 0], [1]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/spans", [[0, 0], [1, "x"]], NO_WIRING),
    ("pfnm", f"{WIRING_AT}/spans", 3, "cannot be decoded"),
]


def rewritten(folder, kind, place, value):
    """Write an upload whose description has another value at a place."""
    header, data = damage.opened(upload(kind, "ann", folder))
    about = json.loads(header["__metadata__"]["fisherjax"])
    owner, keys = about, ["values", *filter(None, place.split("/"))]
    for key in keys[:-1]:
        owner = owner[int(key) if isinstance(owner, list) else key]
    key = int(keys[-1]) if isinstance(owner, list) else keys[-1]
    if value is REMOVED:
        del owner[key]
    else:
        owner[key] = value
    header["__metadata__"]["fisherjax"] = damage.text_of(about)
    path = folder / "damaged.safetensors"
    path.write_bytes(damage.sealed(header, data))
    return path


@pytest.mark.parametrize(("kind", "place", "value", "message"), WRONG)
def test_every_check_of_a_description_is_needed(folder, kind, place, value, message):
    path = rewritten(folder, kind, place, value)
    with pytest.raises(ValueError, match=rf"damaged.*client 'ann' .*{message}"):
        files.load_update(path)


def test_codes_of_another_shape_are_refused_before_anything_is_decoded(folder, monkeypatch):
    def refuse(*_):
        raise ValueError("decoded")

    sound, out = _written(folder, "roots", "bob"), folder / "merged.safetensors"
    place = "dict/update/dict/params/dict/c/static/shape"
    path = rewritten(folder, "roots", place, [2, 2])
    monkeypatch.setattr(files.uploads._packed, "_decode", refuse)
    with pytest.raises(ValueError, match=r"damaged.* decodes to other layers than .*bob"):
        files.merge_files(out, [sound, path])
    with pytest.raises(ValueError, match=r"bob.* cannot be decoded .decoded"):
        files.merge_files(out, [sound])


def test_a_negative_matrix_is_refused_by_file_client_and_leaf(folder):
    """The merge of a layer knows clients and leaves by their numbers only."""
    sound, path = _written(folder, "regmean", "bob"), folder / "damaged.safetensors"
    values = values_of("regmean", np.random.RandomState(0))
    values["grams"]["a"] = -values["grams"]["a"]
    how = {"algorithm": "regmean", "client": "eve", "examples": 1}
    files.save_update(path, Update(values, "params"), **how)
    with pytest.raises(ValueError, match=r"damaged.* of client 'eve' is negative: 'grams/a' has"):
        files.merge_files(folder / "merged.safetensors", [sound, path])


def test_units_that_move_leave_no_leaf_behind(folder):
    path, source = folder / "damaged.safetensors", np.random.RandomState(0)
    update = Update(values_of("pfnm", source), "params", {"mean": np.ones(2, "float32")}, ("z",))
    files.save_update(path, update, algorithm="pfnm", client="ann", examples=1)
    with pytest.raises(ValueError, match=r"\['mean', 'z'\] are not trained and keep theirs"):
        files.merge_files(folder / "merged.safetensors", [path])


def plain_file(suffix, folder):
    """Write arrays as another program does."""
    path = folder / f"sound{suffix}"
    if suffix == ".safetensors":
        save_file(PLAIN, path)
    else:
        how = np.savez_compressed if "small" in str(folder) else np.savez
        how(path, **{name: x for name, x in PLAIN.items() if name != "deep/b"})
    return path


@pytest.mark.parametrize(("suffix", "number"), cases([".safetensors", ".npz"]))
@pytest.mark.parametrize("packing", ["plain", "small"])
def test_a_changed_byte_of_a_plain_file_changes_numbers_or_names_at_most(
    tmp_path, suffix, number, packing
):
    """Archives have checksums of their members: they read as they were written, or not at all."""
    folder = tmp_path / packing
    folder.mkdir()
    sound, path = plain_file(suffix, folder), folder / f"damaged{suffix}"
    content, expected = sound.read_bytes(), files.load_arrays(sound)
    for seed in range(number):
        path.write_bytes(damage.bytes_of(content, random.Random(seed)))
        found, said = judged(files.load_arrays, path)
        if suffix == ".npz":
            assert said or same(found, expected), seed
        elif found is not None:
            # As many bytes in as many arrays, of which shapes are not changed by accident alone.
            assert sum(x.nbytes for x in found.values()) == sum(x.nbytes for x in PLAIN.values())
            like, said = judged(lambda own: files.load_arrays(own, like=PLAIN), path)
            kinds = {x: (y.dtype, y.shape) for x, y in found.items()}
            assert (like is None) == (kinds != {x: (y.dtype, y.shape) for x, y in PLAIN.items()})


@pytest.mark.parametrize(("name", "number"), cases(["ARCHIVE", "SEQUENCE"]))
@pytest.mark.parametrize("change", [damage.bytes_of, damage.pickle_of])
def test_a_damaged_file_of_pytorch_is_read_or_refused(tmp_path, name, number, change):
    """What is read has plain values and arrays alone; a member of an archive has a checksum."""
    content, path = torch_files.recorded(getattr(torch_files, name)), tmp_path / "damaged.pth"
    kinds = np.ndarray | dict | list | tuple | str | int | float | bool | None
    for seed in range(number):
        path.write_bytes(change(content, random.Random(seed)))
        found = judged(files.load_torch, path)[0]
        assert all(isinstance(x, kinds) for x in jax.tree.leaves(found)), seed


@pytest.mark.parametrize(("suffix", "number"), cases([".safetensors", ".npz"]))
def test_other_headers_of_plain_files_are_read_as_others_read_them(tmp_path, suffix, number):
    """NumPy and safetensors agree about the arrays that are read."""
    sound, path = plain_file(suffix, tmp_path), tmp_path / f"damaged{suffix}"
    content = sound.read_bytes()
    change = damage.header_of if suffix == ".safetensors" else damage.archive_of
    for seed in range(number):
        path.write_bytes(change(content, random.Random(seed)))
        found = judged(files.load_arrays, path)[0]
        if found is None:
            continue
        with contextlib.ExitStack() as stack:
            others = load_file(path) if suffix != ".npz" else stack.enter_context(np.load(path))
            others = {name: x.astype(x.dtype.newbyteorder("=")) for name, x in others.items()}
            assert same(found, others), seed


def with_metadata(path, about, digest=None):
    """Write a file whose description is this text."""
    meta = {"fisherjax": about} | ({} if digest is None else {"sha256": digest})
    header = {"__metadata__": meta, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    path.write_bytes(damage.closed(header, bytes(8)))


@pytest.mark.parametrize("about", ["[1]", "3", "null", "{", '{"format":1,"format":1}'])
def test_a_description_that_is_none_is_damage(tmp_path, about):
    with_metadata(tmp_path / "a.safetensors", about, damage.UNKNOWN)
    for act in (files.load_arrays, files.unseal, files.load_update):
        with pytest.raises(ValueError, match=r"a\.safetensors' is damaged, or is not"):
            act(tmp_path / "a.safetensors")


def test_a_digest_that_is_none_is_a_wrong_one(tmp_path):
    with_metadata(tmp_path / "a.safetensors", '{"format":1}', "0" * 10)
    with pytest.raises(ValueError, match=r"a\.safetensors' was changed after it was written"):
        files.load_arrays(tmp_path / "a.safetensors")


def test_values_of_a_later_version_are_called_so(tmp_path):
    """Also where a description is decoded without the checks of a file."""
    with pytest.raises(ValueError, match=r"a\.safetensors' has a description .*update fisherjax"):
        files.uploads.values.decode(tmp_path / "a.safetensors", {"type": "Later"}, str)


def test_a_type_that_numpy_lacks_is_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}
    path.write_bytes(damage.closed({"w": entry}, bytes(8)))
    with pytest.raises(ValueError, match=r"array 'w' has type F8_E4M3; expected one of BOOL, I8"):
        files.load_arrays(path)


def test_a_file_is_written_with_all_of_its_arrays_or_not_at_all(tmp_path):
    path, kinds = tmp_path / "a.safetensors", {"w": files.ArrayKind("float32", (2,))}
    with (
        pytest.raises(ValueError, match=r"w is float32\[3\]; expected float32\[2\]"),
        files.base.sealing(path, kinds, {}) as put,
    ):
        put("w", np.ones(3, "float32"))
    with (
        pytest.raises(ValueError, match=r"\['w'\] were not written; expected a call of put"),
        files.base.sealing(path, kinds, {}),
    ):
        pass
    assert not list(tmp_path.iterdir())
