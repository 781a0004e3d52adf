"""Files of named arrays: what was saved is what is loaded, whole or not at all."""

import concurrent.futures
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fisherjax as fj
from fisherjax import files

SUFFIXES = [".safetensors"]


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factors:
    inputs: Any
    outputs: Any
    name: str = dataclasses.field(metadata={"static": True}, default="layer")


ARRAYS = st.one_of(
    hnp.arrays(
        st.one_of(
            hnp.floating_dtypes(),
            hnp.integer_dtypes(),
            hnp.unsigned_integer_dtypes(),
            st.just(bool),
        ),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    hnp.arrays(np.float32, (3, 2)).map(np.transpose),
    hnp.arrays(np.float32, (4, 3), elements=st.floats(-9, 9, width=16)).map(lambda x: x[::2]),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1)
TREES = st.recursive(
    ARRAYS,
    lambda inner: st.one_of(
        st.dictionaries(KEYS.filter(lambda key: key != "__metadata__"), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Factors, inner, inner),
    ),
    max_leaves=6,
)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, np.ndarray)
        assert a.dtype == b.dtype.newbyteorder("=")
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("suffix", SUFFIXES)
@given(tree=TREES)
@settings(deadline=None, max_examples=60)
def test_what_was_saved_is_what_is_loaded(tmp_path_factory, suffix, tree):
    path = tmp_path_factory.mktemp("arrays") / f"tree{suffix}"
    files.save_arrays(path, tree)
    assert_same(files.load_arrays(path, like=tree), tree)
    assert len(files.load_arrays(path)) == len(jax.tree.leaves(tree))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_are_paths_joined_by_slashes(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    tree = {
        "conv.1/kernel.npy": np.ones(1),
        "file": [np.ones(2), Pair(np.ones(3), {7: np.ones(4)})],
        "layer.x": Factors(np.ones(5), np.ones(6)),
        "x": np.ones(7),
        "x.npy": np.ones(8),
    }
    files.save_arrays(path, tree)
    assert {name: len(array) for name, array in files.load_arrays(path).items()} == {
        "conv.1/kernel.npy": 1,
        "file/0": 2,
        "file/1/first": 3,
        "file/1/second/7": 4,
        "layer.x/inputs": 5,
        "layer.x/outputs": 6,
        "x": 7,
        "x.npy": 8,
    }
    assert_same(files.load_arrays(path, like=tree), tree)


def test_other_programs_read_the_files(tmp_path):
    from safetensors.numpy import load_file

    tree = {"dense": {"kernel": np.arange(6.0).reshape(2, 3).T}}
    files.save_arrays(tmp_path / "tree.safetensors", tree)
    found = load_file(tmp_path / "tree.safetensors")["dense/kernel"]
    np.testing.assert_array_equal(found, tree["dense"]["kernel"])


def test_numpys_archives_are_read(tmp_path):
    tree = {"dense": {"kernel": np.arange(6.0).reshape(2, 3).T}}
    np.savez(tmp_path / "theirs.npz", **{"dense/kernel": tree["dense"]["kernel"]})
    assert_same(files.load_arrays(tmp_path / "theirs.npz", like=tree), tree)


def test_bfloat16_survives_where_the_format_has_it(tmp_path):
    tree = {"w": jnp.array([1.5, -2.0, 3.25], jnp.bfloat16)}
    files.save_arrays(tmp_path / "w.safetensors", tree)
    loaded = files.load_arrays(tmp_path / "w.safetensors", like=tree)["w"]
    assert loaded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded, tree["w"])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_shapes_suffice_for_the_structure(tmp_path, suffix):
    tree = {"a": np.ones((2, 3), np.float32), "b": [np.arange(4), 2.5]}
    files.save_arrays(tmp_path / f"t{suffix}", tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)
    assert_same(files.load_arrays(tmp_path / f"t{suffix}", like), jax.tree.map(np.asarray, tree))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_fault_of_the_structure_is_listed(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    files.save_arrays(
        path, {"a": np.ones(2), "b": np.ones((2, 3)), "c": np.ones(4), "d": np.ones(1)}
    )
    like = {"a": np.ones(2), "b": np.ones((3, 2)), "c": np.ones(4, np.float32), "e": np.ones(1)}
    with pytest.raises(ValueError, match="not those of `like`") as caught:
        files.load_arrays(path, like)
    for fault in (
        "missing e",
        "not expected d",
        "b is float64[2, 3], expected float64[3, 2]",
        "c is float64[4], expected float32[4]",
    ):
        assert fault in str(caught.value)
    assert "a is" not in str(caught.value)
    assert "axes are transposed" in str(caught.value)
    with pytest.raises(ValueError, match=r"a is float64\[2\], expected float64\[3\]") as caught:
        files.load_arrays(path, like | {"a": np.ones(3), "b": np.ones((2, 3))})
    assert "transposed" not in str(caught.value)


def test_other_suffixes_missing_files_and_missing_folders_are_named(tmp_path):
    for name in ("model.pt", "model", "model.NPZ"):
        with pytest.raises(ValueError, match=rf"'{name}' .*\.safetensors"):
            files.save_arrays(tmp_path / name, {"a": np.ones(1)})
        with pytest.raises(ValueError, match=rf"'{name}' .*\.safetensors or \.npz"):
            files.load_arrays(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no file '.*absent\.npz'"):
        files.load_arrays(tmp_path / "absent.npz")
    with pytest.raises(FileNotFoundError, match=r"folder '.*nowhere' does not exist"):
        files.save_arrays(tmp_path / "nowhere" / "a.safetensors", {"a": np.ones(1)})


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a/b": np.ones(1), "a": {"b": np.ones(1)}}, ValueError, "two leaves are called 'a/b'"),
        ({"__metadata__": np.ones(1)}, ValueError, "called '__metadata__'.*rename"),
        ({"a\0b": np.ones(1)}, ValueError, "cannot hold: rename"),
        ({"name": "text"}, TypeError, "name has dtype <U4"),
        ({"thing": np.array([object()])}, TypeError, "thing has dtype object"),
        ({"key": jax.random.key(0)}, TypeError, "key has dtype key<fry>"),
    ],
)
def test_what_cannot_be_stored_leaves_the_old_file_alone(tmp_path, suffix, tree, error, message):
    path = tmp_path / f"tree{suffix}"
    files.save_arrays(path, {"old": np.arange(3)})
    with pytest.raises(error, match=message):
        files.save_arrays(path, {"fine": np.ones(2), **tree})
    np.testing.assert_array_equal(files.load_arrays(path)["old"], np.arange(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, suffix):
    resource = pytest.importorskip("resource")
    path = tmp_path / f"tree{suffix}"
    files.save_arrays(path, {"old": np.arange(3)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(Exception, match=r"(?i)file too large"):
            files.save_arrays(path, {"new": np.random.RandomState(0).rand(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    np.testing.assert_array_equal(files.load_arrays(path)["old"], np.arange(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_of_writers_at_once_one_wins_whole(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: files.save_arrays(path, {"a": np.full(10_000, i)}), range(32)))
    assert len(set(files.load_arrays(path)["a"].tolist())) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_anywhere_is_called_damaged(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    files.save_arrays(path, {"a": np.arange(6.0), "b": {"c": np.ones(3, np.int8)}})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"is damaged, or is not a .* file"):
            files.load_arrays(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_new_file_replaces_the_old_with_the_usual_permissions(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    files.save_arrays(path, {"a": np.ones(1)})
    files.save_arrays(path, {"b": np.ones(2)})
    assert list(files.load_arrays(path)) == ["b"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


NUMBERS = ["f2", "f4", "f8", "i2", "i4", "u8", "c8", "c16"]


@pytest.mark.parametrize("code", NUMBERS)
def test_arrays_come_in_the_byte_order_of_this_machine(tmp_path, code):
    """Whatever the order of the machine that an archive is for, and that of `like`."""
    native = np.arange(6, dtype=f"={code}").reshape(2, 3)
    path = tmp_path / "a.npz"
    for stored in "<>":
        np.savez(path, w=native.astype(f"{stored}{code}"))
        likes = [None, *({"w": np.zeros((2, 3), f"{order}{code}")} for order in "<>")]
        for like in likes:
            found = files.load_arrays(path, like=like)["w"]
            assert found.dtype == native.dtype
            assert found.dtype.isnative
            np.testing.assert_array_equal(found, native)
            assert jnp.asarray(found).shape == (2, 3)


@pytest.mark.parametrize("wanted", ["f4", "f8"])
def test_a_cast_is_to_the_byte_order_of_this_machine(tmp_path, wanted):
    for stored in (">f2", ">f4", "<f8", ">f8", np.longdouble):
        np.savez(tmp_path / "a.npz", w=np.arange(3).astype(stored))
        like = {"w": np.zeros(3, f">{wanted}")}
        found = files.load_arrays(tmp_path / "a.npz", like=like, cast=True)["w"]
        assert found.dtype == np.dtype(f"={wanted}")
        np.testing.assert_array_equal(found, np.arange(3))


NO_NUMBERS = {
    "records": np.zeros(2, [("a", ">f4")]),
    "dates": np.zeros(2, "M8[s]"),
    "spans": np.zeros(2, "m8[s]"),
    "text": np.array(["a"]),
    "bytes": np.array([b"a"]),
    "nothing": np.zeros(2, "V3"),
    "objects": np.array([None]),
}
if np.dtype(np.longdouble).itemsize > 8:  # elsewhere it is float64 by another name
    NO_NUMBERS["wide"] = np.zeros(2, np.longdouble)


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_is_no_array_of_numbers_is_refused_by_name(tmp_path, kind):
    """In files, federations, examples, params and updates."""
    array = NO_NUMBERS[kind]
    np.savez(tmp_path / "a.npz", w=array)
    for like in (None, {"w": np.zeros(array.shape, "float32")}):
        with pytest.raises(ValueError, match=r"a\.npz' .*[Nn]umbers"):
            files.load_arrays(tmp_path / "a.npz", like=like)
    rows, zeros = [np.arange(len(array))], np.zeros(len(array))
    model = fj.Model(lambda w, x: x * w, fj.likelihoods.gaussian)
    update = fj.algorithms.Update({"params": {"w": array}}, "params")
    acts = {
        "^inputs has": lambda: fj.clients.federation((array, zeros), rows),
        "^targets has": lambda: fj.clients.federation((zeros, array), rows),
        "^(examples.)?inputs has": lambda: fj.metrics.accuracy(
            model, jnp.ones(1), fj.Examples(array, zeros)
        ),
        "^Leaf 'values/params/w' of client 0 has": lambda: fj.merging.merge(
            fj.algorithms.fedavg(), {"w": zeros}, [update, update]
        ),
    }
    for named, act in acts.items():
        with pytest.raises(TypeError, match=f"{named} .*JAX does not have; expected numbers"):
            act()


def test_arrays_of_another_byte_order_are_taken_or_named():
    """They are copied where they go to the device; what is passed on as it is says how to mend."""
    swapped = np.arange(4.0, dtype="float32").astype(">f4")
    federation = fj.clients.federation((swapped, swapped), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(federation.inputs, np.arange(4))
    one = fj.algorithms.Update({"params": {"w": swapped}}, "params")
    both = fj.algorithms.Update({"params": {"w": np.stack([swapped] * 2)}}, "params")
    start = {"w": np.zeros(4, "float32")}
    for updates in ([one, one], both):
        merged = fj.merging.merge(fj.algorithms.fedavg(), start, updates)[0]
        np.testing.assert_array_equal(merged["w"], np.arange(4))
    model = fj.Model(lambda w, x: x * w, fj.likelihoods.gaussian)
    with pytest.raises(TypeError, match=r"inputs has dtype >f4, .*newbyteorder"):
        fj.metrics.accuracy(model, jnp.ones(1), fj.Examples(swapped, swapped))
    with pytest.raises(TypeError, match=r"Leaf 'w' of params has dtype >f4, .*newbyteorder"):
        fj.merging.merge(fj.algorithms.fedavg(), {"w": swapped}, both)


FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
OURS = {
    "conv": {"kernel": np.arange(36.0, dtype=np.float32).reshape(3, 3, 2, 2), "bias": np.ones(2)},
    "dense": [np.arange(6.0).reshape(2, 3), np.arange(3)],
}
TORCH = {
    "conv/kernel": ("0.weight", (3, 2, 0, 1)),
    "conv/bias": "0.bias",
    "dense/0": ("1.weight", (1, 0)),
}


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_floats_are_cast_to_those_of_like(tmp_path, stored, wanted):
    path, values = tmp_path / "tree.safetensors", np.array([[1.5, -0.25], [np.inf, 0]])
    files.save_arrays(path, {"w": values.astype(stored), "n": np.arange(3)})
    like = {"w": np.zeros((2, 2), wanted), "n": np.arange(3)}
    assert_same(
        files.load_arrays(path, like, cast=True), {"w": values.astype(wanted), "n": np.arange(3)}
    )
    if stored != wanted:
        with pytest.raises(ValueError, match=r"w is .*expected .*cast=True"):
            files.load_arrays(path, like)


def test_only_floats_of_equal_shape_are_cast_and_none_to_infinity(tmp_path):
    path = tmp_path / "tree.safetensors"
    files.save_arrays(path, {"w": np.array([1.0, 1e30], np.float32), "n": np.arange(2)})
    integers = np.arange(2)
    for like in (
        {"w": integers, "n": integers},
        {"w": np.zeros(2, np.float32), "n": np.zeros(2)},
        {"w": np.zeros(2, np.float32), "n": integers.astype(np.int32)},
        {"w": np.zeros((2, 1)), "n": integers},
    ):
        with pytest.raises(ValueError, match="are not those of `like`") as caught:
            files.load_arrays(path, like, cast=True)
        assert "cast=True" not in str(caught.value)
    with pytest.raises(ValueError, match=r"w holds 1e\+30, which is too large for float16"):
        files.load_arrays(path, {"w": np.zeros(2, np.float16), "n": integers}, cast=True)
    for how in ({"cast": True}, {"mapping": {"w": "v"}}):
        with pytest.raises(ValueError, match="cast and mapping need `like`"):
            files.load_arrays(path, **how)


def test_torchs_names_and_axes_are_written_and_read_by_one_mapping(tmp_path):
    path = tmp_path / "torch.safetensors"
    files.save_arrays(path, OURS, mapping=TORCH)
    theirs = files.load_arrays(path)
    assert sorted(theirs) == ["0.bias", "0.weight", "1.weight", "dense/1"]
    # One entry of a kernel: by row, column, input and output here, by output and input first there.
    assert theirs["0.weight"][1, 0, 2, 1] == OURS["conv"]["kernel"][2, 1, 0, 1]
    np.testing.assert_array_equal(theirs["1.weight"], OURS["dense"][0].T)
    assert_same(files.load_arrays(path, like=OURS, mapping=TORCH), OURS)


@pytest.mark.long
@given(tree=TREES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_what_a_mapping_wrote_it_reads(tmp_path_factory, tree, seed):
    path, draw = tmp_path_factory.mktemp("arrays") / "tree.safetensors", np.random.default_rng(seed)
    files.save_arrays(path, tree)
    ranks = {name: array.ndim for name, array in files.load_arrays(path).items()}
    names = dict(zip(ranks, draw.permutation(list(ranks)).tolist(), strict=True))
    axes = {name: tuple(draw.permutation(rank).tolist()) for name, rank in ranks.items()}

    def mapping(name):
        return names[name], axes[name]

    files.save_arrays(path, tree, mapping=mapping)
    assert_same(files.load_arrays(path, tree, mapping=mapping), tree)
    # A dict and a function say the same.
    listed = {name: mapping(name) for name in ranks}
    assert_same(files.load_arrays(path, tree, mapping=listed), tree)


def test_the_mapping_the_other_way_round_undoes_a_mapping(tmp_path):
    ours, theirs, again = (tmp_path / f"{name}.safetensors" for name in ("ours", "theirs", "again"))
    files.save_arrays(ours, OURS)
    files.save_arrays(theirs, files.load_arrays(ours), mapping=TORCH)
    back = {
        "0.weight": ("conv/kernel", (2, 3, 1, 0)),
        "0.bias": "conv/bias",
        "1.weight": ("dense/0", (1, 0)),
    }
    files.save_arrays(again, files.load_arrays(theirs), mapping=back)
    assert_same(files.load_arrays(again, OURS), OURS)


def _saved(path, tree):
    files.save_arrays(path, tree)
    return path


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ([("conv/bias", "0.bias")], TypeError, "mapping is a list; expected a dict"),
        (
            {"conv/weight": "0.weight"},
            ValueError,
            "has the keys conv/weight, but the leaves are conv/b",
        ),
        (dict.fromkeys(map("{:02}".format, range(25)), "x"), ValueError, "18, 19, and 5 more, but"),
        ({"conv/bias": 3}, TypeError, "has 3 for 'conv/bias'; expected the name in the file"),
        ({"conv/bias": ("0.bias", 0)}, TypeError, r"has \('0.bias', 0\) for 'conv/bias'"),
        ({"conv/bias": ("b", (0.0,))}, TypeError, "expected the name in the file, or a pair"),
        ({"dense/0": ("w", (1, 1))}, ValueError, r"'dense/0', which has 2 axes, by \(1, 1\)"),
        ({"dense/0": ("w", (-1, 0))}, ValueError, r"expected each of \(0, 1\) once"),
        ({"dense/0": "dense/1"}, ValueError, "'dense/0' and 'dense/1' are both called 'dense/1'"),
        ({"dense/0": "__metadata__"}, ValueError, "called '__metadata__'.*rename"),
        (lambda name: None, TypeError, "has None for 'conv/bias'"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused_and_leaves_the_old_file(
    tmp_path, mapping, error, message
):
    path = _saved(tmp_path / "tree.safetensors", OURS)
    with pytest.raises(error, match=message):
        files.save_arrays(path, OURS, mapping=mapping)
    assert_same(files.load_arrays(path, OURS), OURS)
    assert list(tmp_path.iterdir()) == [path]
    if "__metadata__" not in message:
        with pytest.raises(error, match=message):
            files.load_arrays(path, OURS, mapping=mapping)


def test_a_file_of_other_names_or_axes_says_that_a_mapping_may_help(tmp_path):
    path = tmp_path / "torch.safetensors"
    files.save_arrays(path, OURS, mapping=TORCH)
    with pytest.raises(
        ValueError, match=r"missing dense/0; .*names differ, map them with `mapping`"
    ):
        files.load_arrays(path, OURS)
    upright = TORCH | {"dense/0": "1.weight"}
    message = r"1\.weight is float64\[3, 2\], expected float64\[2, 3\].*transposed, map them with"
    with pytest.raises(ValueError, match=message):
        files.load_arrays(path, OURS, mapping=upright)


NESTED = st.recursive(
    st.integers(), lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@given(nested=NESTED)
def test_nested_dicts_are_made_of_names_again(nested):
    flat = {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(nested)
    }
    assert files.unflatten(flat) == nested


def test_another_separator_leaves_slashes_alone():
    assert files.unflatten({"a/b.c": 1, "a/b.d": 2}, ".") == {"a/b": {"c": 1, "d": 2}}


def test_names_that_cannot_nest_are_refused():
    for arrays in ({"a": 1, "a/b/c": 2}, {"a/b/c": 2, "a": 1}):
        with pytest.raises(
            ValueError, match="'a' is an array, but also the beginning of 'a/b/c': rename"
        ):
            files.unflatten(arrays)
    with pytest.raises(ValueError, match="separator is empty"):
        files.unflatten({"a": 1}, "")
    for wrong in ([1, 2], ["a"], {1: 2}):
        with pytest.raises(TypeError, match="expected a dict from names"):
            files.unflatten(wrong)
