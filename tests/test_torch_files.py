"""files.load_torch: reads what torch.save wrote, and runs nothing that a file names."""

import os
import struct
import tracemalloc
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest

from fisherjax import files
from tests import torch_files
from tests.torch_files import Raw, archive, called, code_of, named, sequence, storage, tensor

FOUR = np.arange(4, dtype="<f4").tobytes()
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"),
    *("bool", "complex64", "complex128", "uint16", "float8_e4m3fn"),
)


@pytest.fixture
def load(tmp_path):
    """Return a function that writes a file of these bytes and reads it."""

    def load(content, **how):
        path = tmp_path / "net.pth"
        path.write_bytes(content)
        return files.load_torch(path, **how)

    return load


# What is right


@pytest.mark.parametrize("text", [torch_files.ARCHIVE, torch_files.SEQUENCE])
def test_files_that_pytorch_wrote_are_read_with_every_dtype_and_view(load, text):
    found = load(torch_files.recorded(text))
    assert list(found) == ["state", "epoch"]
    assert found["epoch"] == 3
    state = found["state"]
    assert list(state) == [*DTYPES, "T", "part", "scalar"]
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        expected = (np.arange(3) % 2 if name == "bool" else np.arange(3)).astype(dtype)
        assert state[name].dtype == dtype
        np.testing.assert_array_equal(state[name], expected)
    base = np.arange(12, dtype="float32").reshape(3, 4)
    np.testing.assert_array_equal(state["T"], base.T)
    np.testing.assert_array_equal(state["part"], base[1:, ::2])
    assert np.shares_memory(state["T"], state["part"])
    assert not state["T"].flags.writeable
    assert state["scalar"].shape == ()
    assert state["scalar"] == 3.5


def test_plain_values_are_read_as_they_are(load):
    value = {"a": [1, -(2**63), 2**64 - 1, 0.5, True, None], 7: ("é", ()), "empty": {}}
    assert load(archive(value, {})) == value
    assert load(sequence(value, [], [])) == value


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((1, (), ()), 1.0),
        ((0, (0, 10**12), (1, 1)), np.zeros((0, 10**12), "float32")),
        ((0, (2, 3), (0, 1)), [[0, 1, 2], [0, 1, 2]]),
        ((1, (2, 2), (1, 1)), [[1, 2], [2, 3]]),
    ],
)
def test_views_have_the_numbers_that_their_strides_say(load, place, expected):
    found = load(archive({"w": tensor(storage("0"), *place)}, {"data/0": FOUR}))["w"]
    np.testing.assert_array_equal(found, np.asarray(expected))


def test_tensors_of_one_storage_share_its_memory(load):
    """A tied weight is read once, and Python 2's state dicts are those of a list of pairs."""
    pairs = [["w", tensor(storage("0"))], ["tied", tensor(storage("0"), 1, (3,))]]
    state = called(named("collections", "OrderedDict"), pairs)
    stored = struct.pack("<q", 4) + FOUR
    for content in (archive(state, {"data/0": FOUR}), sequence(state, ["0"], [stored])):
        found = load(content)
        np.testing.assert_array_equal(found["tied"], [1, 2, 3])
        assert np.shares_memory(found["w"], found["tied"])


def test_a_parameter_is_its_tensor_and_any_byte_but_zero_is_true(load):
    hooks = called(named("collections", "OrderedDict"))
    parameter = named("torch._utils", "_rebuild_parameter")
    value = called(parameter, tensor(storage("0", "BoolStorage")), True, hooks)
    assert load(archive(value, {"data/0": b"\0\1\2\xff"})).tolist() == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}])
def test_what_pytorch_saves_now_is_read(tmp_path, how):
    """A network and its optimiser, shared and transposed numbers, an expanded and an empty one."""
    torch = pytest.importorskip("torch")
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    adam = torch.optim.Adam(network.parameters())
    network(torch.randn(1, 2, 5, 5)).sum().backward()
    adam.step()
    base = torch.arange(48.0).reshape(1, 3, 4, 4)
    saved = {"network": network.state_dict(), "adam": adam.state_dict(), "some": [base, base[0].T]}
    saved["last"] = base.to(memory_format=torch.channels_last)
    saved |= {"wide": torch.ones(1).expand(7), "none": torch.zeros(0, 5), "shape": base.shape}
    torch.save(saved, tmp_path / "net.pt", **how)
    saved |= {"network": dict(saved["network"]), "shape": (1, 3, 4, 4)}
    expected = jax.tree.map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, saved)
    found = files.load_torch(tmp_path / "net.pt")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# What is refused


def twice():
    content = archive(3, {"data/0": FOUR, "data/x": FOUR})
    return content.replace(b"data/x", b"data/0")


def overlapping():
    """Two entries of the directory for the same bytes: 60 of them are longer than the file."""
    content = archive(3, {"data/0": bytes(4000)})
    start = content.index(b"PK\x01\x02")
    entry = content[content.index(b"PK\x01\x02", start + 1) : content.index(b"PK\x05\x06")]
    more = b"".join(entry.replace(b"data/0", b"data/%c" % (65 + i)) for i in range(20))
    end = bytearray(content[content.index(b"PK\x05\x06") :])
    end[8:12] = struct.pack("<HH", 22, 22)
    end[12:16] = struct.pack("<I", len(content) - start - 22 + len(more))
    return content[: content.index(b"PK\x05\x06")] + more + bytes(end)


# Lists of nine times the list before: twelve of them are 9 ** 12 values.
ROWS = [b"](" + b"h%c" % i * 9 + b"eq%c" % (i + 1) for i in range(12)]
SHARED = b"](]q\x00" + b"".join(ROWS) + b"e"
OWN = b"]q\x00h\x00a"  # a list that holds itself
MEMO = b"Nr\xff\xff\xff\xff"  # Python's unpickler allocates 2 ** 32 places
SYSTEM = named("os", "system")
HOSTILE = {
    "reduce": (called(SYSTEM, "touch owned"), "the Python object 'os.system'"),
    "object": (called(named("torch.nn.modules.linear", "Linear")), "modules.linear.Linear'"),
    "eval": (called(named("builtins", "eval"), "1"), "builtins.eval"),
    "nested": (Raw(b"X\x05\0\0\0torchX\x09\0\0\0os.system\x93"), "torch.os.system"),
    "no text": (Raw(b"]X\x01\0\0\0x\x93"), "expected str instance, list found"),
    "instance": (Raw(b"(cos\nsystem\nX\x02\0\0\0ls" + b"o"), "os.system"),
    "old instance": (Raw(b"(X\x02\0\0\0lsios\nsystem\n"), "the operation INST"),
    "new": (Raw(b"ctorch\nFloatStorage\n)\x81"), "the operation NEWOBJ"),
    "number called": (Raw(b"K\x01)R"), "it calls a int"),
    "storage called": (called(named("torch", "FloatStorage"), 4), "it calls a _Global"),
    "state": (Raw(code_of({}) + code_of({"__class__": 1}) + b"b"), "sets attributes of a dict"),
    "extension": (Raw(b"\x82\x01"), "the operation EXT1"),
    "class alone": ({"a": named("torch", "FloatStorage")}, "torch.FloatStorage that is no part"),
    "storage alone": ({"a": storage("0")}, "has a Storage that is no part of a tensor"),
    "persistent": (Raw(code_of(("module", 1, "0", "cpu", 4)) + b"Q"), "has 'module' where"),
    "not text": (Raw(code_of([]) + code_of("x") * 2 + b"s"), "sets items of a list"),
    "appended": (Raw(code_of({}) + b"K\x01a"), "appends to a dict"),
    "key": ({(1,): 2}, "a dict has a tuple as a key"),
    "twice": (Raw(b"}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u"), "'a' is there twice"),
    "long": (2**64, "an integer of more than 64 bits"),
    "digits": (Raw(b"L" + b"9" * 5000 + b"L\n"), "limit"),
    "empty stack": (Raw(b"\x86"), "operation TUPLE2 has too few values"),
    "empty": (Raw(b""), "unpack"),
    "no end": (Raw(b"X\xff\xff\xff\xffab"), "expected 4294967295 bytes"),
    "shared": (Raw(SHARED), "describes more values than the bytes that describe them"),
    "own": (Raw(OWN), "more values|the depth to which values are nested"),
    "deep": (Raw(b"]" * 50 + b"a" * 49), "the depth to which values are nested is 33"),
    "memo": (Raw(MEMO), None),
    "past the end": (tensor(storage("0"), 1), "ends after its storage '0'"),
    "stride": (tensor(storage("0"), 0, (2,), (4,)), "ends after its storage '0'"),
    "negative": (tensor(storage("0"), 3, (2,), (-1,)), r"has places \(3, 2, -1\)"),
    "offset": (tensor(storage("0"), -1), "has places"),
    "shape": (tensor(storage("0"), 0, (-1,), (1,)), "has places"),
    "axes": (tensor(storage("0"), 0, (1,) * 65, (1,) * 65), "has 65 axes"),
    "fewer strides": (tensor(storage("0"), 0, (1, 1), (1,)), "has 2 axes and 1 strides"),
    "float shape": (tensor(storage("0"), 0, (1.0,), (1,)), "has places"),
    "huge": (tensor(storage("0"), 0, (2**50, 2**50), (0, 0)), "exceeds a limit .* decoded"),
    "expanded": (tensor(storage("0"), 0, (10**7,), (0,)), "exceeds a limit .* decoded"),
    "conjugated": (tensor(storage("0"), 0, (4,), (1,), {"conj": True}), "conjugated or negated"),
    "missing": (tensor(storage("1")), r"file \('net/data/1'\)"),
    "size": (tensor(storage("0", size=5), 0, (5,)), "'0' has 16 bytes, not those"),
    "huge storage": (tensor(storage("0", size=2**60), 0, (4,)), "'0' has 16 bytes, not those"),
    "negative size": (tensor(storage("0", size=-1)), "has key '0' and size -1"),
    "key of a storage": (tensor(storage(0)), "has key 0 and size 4"),
    "two types": (
        [tensor(storage("0")), tensor(storage("0", "IntStorage"))],
        "storage '0' has two types",
    ),
    "no storage": (tensor(3), "no attribute 'dtype'"),
    "quantized": (tensor(storage("0", "QInt8Storage")), "torch.QInt8Storage"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_runs(load, monkeypatch, case):
    value, said = HOSTILE[case]
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it ran"))
    content = archive(value, {"data/0": FOUR})
    tracemalloc.start()
    try:
        if said is None:
            assert load(content) is None
        else:
            with pytest.raises(ValueError, match=said) as refused:
                load(content)
            assert "net.pth" in str(refused.value)
            assert type(refused.value) is ValueError
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2_000_000


ARCHIVES = {
    "twice": (twice(), "a record is there twice"),
    "overlapping": (overlapping(), "longer than the file|Overlapped"),
    "length": (
        archive(3, {"byteorder": b"little"}).replace(b"\x06\0\0\0\x06", b"\x06\0\0\x04\x06"),
        "its records are longer than the file",
    ),
    "bomb": (archive(3, {"data/0": bytes(10**6)}, zipfile.ZIP_DEFLATED), "are compressed"),
    "big-endian": (archive(3, {"byteorder": b"big"}), "numbers are big-endian"),
    "script": (archive(3, {"constants.pkl": b""}), "a program of TorchScript"),
    "another": (archive(3, {}).replace(b"data.pkl", b"data.pkx"), "no data.pkl of torch.save"),
    "two folders": (archive(3, {"a": b""}).replace(b"net/a", b"tet/a"), "no data.pkl"),
    "damaged": (archive(3, {"byteorder": b"little"}).replace(b"litt", b"Litt"), "Bad CRC"),
    "text": (b"weights of the network", "begins with b'weights '; expected a zip archive"),
    "empty": (b"", "begins with b''; expected a zip archive"),
    "old and big-endian": (sequence(3, [], [], little_endian=False), "numbers are big-endian"),
    "old of a version": (
        sequence(3, [], []).replace(b"\xe9\x03.", b"\xea\x03."),
        "another version",
    ),
    "old and cut": (sequence(3, [], [])[:40], "damaged"),
    "old with less": (sequence(tensor(storage("0")), [], []), "damaged"),
    "old with more": (sequence(3, ["0"], [struct.pack("<q", 4) + FOUR]), "damaged"),
    "old of another size": (
        sequence(tensor(storage("0")), ["0"], [struct.pack("<q", 5) + FOUR]),
        "has another size",
    ),
    "old and too short": (
        sequence(tensor(storage("0")), ["0"], [struct.pack("<q", 4) + FOUR[1:]]),
        "has 15 bytes",
    ),
    "old and huge": (
        sequence(tensor(storage("0", size=2**40)), ["0"], [struct.pack("<q", 2**40) + FOUR]),
        "has another size",
    ),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_an_archive_that_pytorch_did_not_write_is_refused(load, case):
    content, said = ARCHIVES[case]
    with pytest.raises(ValueError, match=said) as refused:
        load(content)
    assert "net.pth" in str(refused.value)


@pytest.mark.parametrize("write", [archive, lambda value, _: sequence(value, ["0"], [])])
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"header": 20}, "header in bytes"),
        ({"arrays": 1}, "number of arrays"),
        ({"name": 2}, "name"),
    ],
)
def test_limits_hold(load, write, limits, said):
    value = {"abc": tensor(storage("0")), "b": tensor(storage("0"))}
    with pytest.raises(ValueError, match=said):
        load(write(value, {"data/0": FOUR}), limits=files.Limits(**limits))


def test_a_list_that_is_named_often_is_not_copied_as_often(load):
    """A few bytes make an OrderedDict of all pairs: only the first has them."""
    pairs = [[f"{i}", None] for i in range(3)]
    made = named("collections", "OrderedDict").code + b"h\x02R"
    value = Raw(b"](" + code_of((pairs,)) + b"q\x02" + made * 2 + b"e")
    assert [len(x) for x in load(archive(value, {}))] == [1, 3, 0]


def test_other_suffixes_and_missing_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*a\.pt"):
        files.load_torch(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"end it in \.pth or \.pt or"):
        files.load_torch(tmp_path / "a.npz")
