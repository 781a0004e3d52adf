"""Data sets, what prepares images, and files of named arrays."""

import concurrent.futures
import dataclasses
import functools
import shlex
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fisherjax import data

SUFFIXES = [".safetensors", ".npz"]


# Data sets


def test_digits_are_scikit_learns_split_in_two():
    from sklearn.datasets import load_digits

    splits = data.load("digits")
    assert [len(split.inputs) for split in splits] == [1437, 360]
    whole = load_digits()
    images = np.concatenate([split.inputs for split in splits])[..., 0]
    targets = np.concatenate([split.targets for split in splits])
    rows = np.random.RandomState(0).permutation(1797)
    np.testing.assert_array_equal(images, whole.images[rows])
    np.testing.assert_array_equal(targets, whole.target[rows])
    for split in splits:
        assert (split.inputs.dtype, split.targets.dtype) == (np.uint8, np.int32)
        assert (split.num_classes, split.name) == (10, "digits")


@pytest.fixture(scope="module")
def prepared(shared):
    return functools.cache(lambda name: data.load(name, shared / "data"))


@pytest.mark.parametrize(
    ("name", "sizes", "image"),
    [("mnist", (60000, 10000), (28, 28, 1)), ("cifar10", (50000, 10000), (32, 32, 3))],
)
def test_a_prepared_data_set_is_read_as_its_maker_reads_it(prepared, shared, name, sizes, image):
    import tensorflow_datasets as tfds

    for split, part, size in zip(prepared(name), ("train", "test"), sizes, strict=True):
        assert (split.inputs.shape, split.inputs.dtype) == ((size, *image), np.uint8)
        assert (split.targets.shape, split.targets.dtype) == ((size,), np.int32)
        assert (split.num_classes, split.scale, split.name) == (10, 255.0, name)
        source = tfds.data_source(name, split=part, data_dir=shared / "data", download=False)
        for row in (0, 1, 4095, 4096, size // 2, size - 1):
            np.testing.assert_array_equal(split.inputs[row], source[row]["image"])
            assert split.targets[row] == source[row]["label"]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_the_papers_constants_standardise_the_training_images(prepared, name):
    train, _ = prepared(name)
    x = np.asarray(data.normalizer(train)(train.inputs[:10_000]), np.float64)
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=0.02)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=0.04)


def test_the_environment_names_the_folder_unless_the_caller_does(tmp_path, monkeypatch):
    for folder in ("environment", "caller"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "environment"))
    with pytest.raises(FileNotFoundError, match=r"no data set 'mnist' in '.*environment'"):
        data.load("mnist")
    with pytest.raises(FileNotFoundError, match=r"no data set 'mnist' in '.*caller'"):
        data.load("mnist", tmp_path / "caller")


def test_an_unknown_name_is_answered_with_the_nearest():
    for given_name, nearest in [("minst", "mnist"), ("CIFAR-10", "cifar10"), ("svhn", "svhn_")]:
        with pytest.raises(ValueError, match=f"unknown data set '{given_name}'.*mean '{nearest}"):
            data.load(given_name)


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"directory '.*nowhere' does not exist"):
        data.load("mnist", tmp_path / "nowhere")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"directory '.*elsewhere' does not exist"):
        data.load("mnist")


@pytest.mark.parametrize("name", [name for name in data.NAMES if name != "digits"])
@pytest.mark.parametrize("folder", ["plain", 'it\'s a "folder"'])
def test_the_command_in_the_error_prepares_the_data_set_where_it_was_looked_for(
    name, folder, tmp_path
):
    import tensorflow_datasets as tfds

    place = tmp_path / folder
    place.mkdir()
    with pytest.raises(FileNotFoundError, match=r"fisherjax\[prepare\]") as caught:
        data.load(name, place)
    (command,) = (line for line in str(caught.value).splitlines() if "python -c" in line)
    program = shlex.split(command)
    assert program[:2] == ["python", "-c"]
    # Everything but the download itself.
    statement, expression = program[2].split("; ")
    assert statement == "import tensorflow_datasets as tfds"
    builder = eval(expression.removesuffix(".download_and_prepare()"), {"tfds": tfds})
    assert builder.name == name
    assert str(builder.data_dir).startswith(str(place))
    assert builder.info.file_format.value == "array_record"


def test_the_splits_of_a_text_are_joined_in_their_order(shared):
    import tensorflow_datasets as tfds

    text, start = data.load_text(data_dir=shared / "data"), 0
    for split in ("train", "validation", "test"):
        source = tfds.data_source("tiny_shakespeare", split=split, data_dir=shared / "data")
        part = source[0]["text"].decode()
        assert text[start : start + len(part)] == part
        start += len(part)
    assert len(text) == start


def test_a_text_that_is_unknown_or_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"unknown text 'mnist'.*data\.load.*read_text"):
        data.load_text("mnist")
    with pytest.raises(FileNotFoundError, match=r"directory '.*nowhere' does not exist"):
        data.load_text(data_dir=tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r'no data set.*\n.*\n.*builder\("tiny_shakespeare"'
    ):
        data.load_text(data_dir=tmp_path)


# Normalisation


@pytest.fixture(scope="module")
def colours():
    images = np.random.RandomState(0).randint(0, 256, (5, 6, 4, 3)).astype(np.uint8)
    targets = np.zeros(5, np.int32)
    return data.Dataset(images, targets, 2, 255.0, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), "colours")


def test_normalisation_is_affine_in_each_channel(colours):
    x = jax.jit(data.normalizer(colours))(colours.inputs)
    assert x.dtype == jnp.float32
    for channel in range(3):
        mean, std = colours.mean[channel], colours.std[channel]
        expected = (colours.inputs[..., channel].astype(float) / 255 - mean) / std
        np.testing.assert_allclose(x[..., channel], expected, rtol=1e-5, atol=1e-6)
    again = data.normalizer(colours)(x)  # normalised before: unchanged
    np.testing.assert_array_equal(again, x)
    one_by_one = jax.vmap(jax.vmap(jax.vmap(data.normalizer(colours))))(colours.inputs)
    np.testing.assert_allclose(one_by_one, x, rtol=1e-6, atol=1e-6)


def test_equal_constants_give_the_same_functions_and_nothing_compiles_again(colours, compilations):
    @functools.partial(jax.jit, static_argnums=(0, 1))
    def use(normalize, augment, key, x):
        return normalize(x).sum() + augment(key, x).sum()

    other = colours._replace(inputs=colours.inputs + 1, mean=list(np.array(colours.mean)))
    first, second = data.normalizer(colours), data.normalizer(other)
    assert first is second
    assert data.crop_and_flip(first) is data.crop_and_flip(second, padding=4)
    assert data.normalizer(colours._replace(scale=16)) is not first
    x, key = jnp.asarray(colours.inputs), jax.random.key(0)
    use(first, data.crop_and_flip(first), key, x)
    with compilations() as count:
        use(second, data.crop_and_flip(second), key, x)
    assert count() == 0


def test_constants_that_cannot_normalise_are_refused(colours):
    for fault in ({"std": (0.5, 0.0, 0.7)}, {"std": (0.5,)}, {"scale": 0.0}, {"scale": np.nan}):
        with pytest.raises(ValueError, match=r"cannot normalise 'colours'.*scale and stds above 0"):
            data.normalizer(colours._replace(**fault))
    with pytest.raises(TypeError, match="dtype bool"):
        data.normalizer(colours)(colours.inputs > 3)


# Augmentation


def every_crop(image, padding, mode="constant"):
    """List all results, from NumPy: padded after normalisation, cut, perhaps mirrored."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode)
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[top : top + height, left : left + width]
            yield crop
            yield crop[:, ::-1]


@pytest.mark.parametrize(
    ("padding", "mode"),
    [(0, "constant"), (1, "constant"), (5, "constant"), (0, "reflect"), (3, "reflect")],
)
def test_an_augmented_image_is_one_of_its_crops(colours, padding, mode, key):
    normalize = data.normalizer(colours)
    result = data.crop_and_flip(normalize, padding, mode)(key, jnp.asarray(colours.inputs))
    assert result.shape == colours.inputs.shape
    for image, augmented in zip(np.asarray(normalize(colours.inputs)), result, strict=True):
        distances = [np.abs(crop - augmented).max() for crop in every_crop(image, padding, mode)]
        assert min(distances) < 1e-5


def test_every_crop_is_drawn_equally_often_and_apart_from_its_neighbour(colours, key):
    """18 outcomes; under equal chances the chi-square statistics have means 17 and 17^2."""
    copies, normalize = 18 * 18 * 40, data.normalizer(colours)
    images = jnp.broadcast_to(colours.inputs[:1], (copies, *colours.inputs.shape[1:]))
    result = np.asarray(jax.jit(data.crop_and_flip(normalize, 1))(key, images))
    crops = np.stack(list(every_crop(np.asarray(normalize(images[0])), 1)))
    outcome = np.array([np.abs(crops - image).max((1, 2, 3)).argmin() for image in result])
    single = Counter(outcome)
    expected = copies / 18
    assert sum((single[o] - expected) ** 2 / expected for o in range(18)) < 17 + 5 * 34**0.5
    table = np.histogram2d(outcome[::2], outcome[1::2], bins=18)[0]
    independent = table.sum(0) * table.sum(1)[:, None] / table.sum()
    assert ((table - independent) ** 2 / independent).sum() < 289 + 5 * 578**0.5


def test_augmentation_under_jit_and_vmap_is_the_eager_one(colours):
    augment = data.crop_and_flip(data.normalizer(colours), 2)
    images = jnp.asarray(np.stack([colours.inputs, colours.inputs[::-1]]))
    keys = jax.random.split(jax.random.key(3), 2)
    together = jax.jit(jax.vmap(augment))(keys, images)
    for one, key, image in zip(together, keys, images, strict=True):
        np.testing.assert_allclose(one, augment(key, image), rtol=1e-6, atol=1e-6)
    assert not np.allclose(augment(keys[0], images[0]), augment(keys[1], images[0]))


def test_images_normalised_before_are_only_moved(colours, key):
    normalize = data.normalizer(colours)
    augment = data.crop_and_flip(normalize, 2)
    stored, floats = jnp.asarray(colours.inputs), normalize(colours.inputs)
    np.testing.assert_array_equal(augment(key, stored), augment(key, floats))


def test_augmentation_refuses_what_is_not_a_batch_of_images(colours, key):
    for padding in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"padding is {padding}"):
            data.crop_and_flip(data.normalizer(colours), padding)
    with pytest.raises(ValueError, match="mode is 'wrap', expected 'constant' or 'reflect'"):
        data.crop_and_flip(data.normalizer(colours), mode="wrap")
    with pytest.raises(ValueError, match="cannot be reflected by padding=4: it must be below"):
        data.crop_and_flip(data.normalizer(colours), 4, "reflect")(key, jnp.asarray(colours.inputs))
    with pytest.raises(ValueError, match=r"shape \(6, 4, 3\), expected \[B, H, W, channels\]"):
        data.crop_and_flip(data.normalizer(colours))(key, jnp.asarray(colours.inputs[0]))


# Files of named arrays


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


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(tree=TREES)
@settings(deadline=None, max_examples=60)
def test_what_was_saved_is_what_is_loaded(tmp_path_factory, suffix, tree):
    path = tmp_path_factory.mktemp("arrays") / f"tree{suffix}"
    data.save_arrays(path, tree)
    assert_same(data.load_arrays(path, like=tree), tree)
    assert len(data.load_arrays(path)) == len(jax.tree.leaves(tree))


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
    data.save_arrays(path, tree)
    assert {name: len(array) for name, array in data.load_arrays(path).items()} == {
        "conv.1/kernel.npy": 1,
        "file/0": 2,
        "file/1/first": 3,
        "file/1/second/7": 4,
        "layer.x/inputs": 5,
        "layer.x/outputs": 6,
        "x": 7,
        "x.npy": 8,
    }
    assert_same(data.load_arrays(path, like=tree), tree)


def test_other_programs_read_the_files(tmp_path):
    from safetensors.numpy import load_file

    tree = {"dense": {"kernel": np.arange(6.0).reshape(2, 3).T}}
    for suffix, read in zip(SUFFIXES, (load_file, np.load), strict=True):
        data.save_arrays(tmp_path / f"tree{suffix}", tree)
        found = read(tmp_path / f"tree{suffix}")["dense/kernel"]
        np.testing.assert_array_equal(found, tree["dense"]["kernel"])
    np.savez(tmp_path / "theirs.npz", **{"dense/kernel": tree["dense"]["kernel"]})
    assert_same(data.load_arrays(tmp_path / "theirs.npz", like=tree), tree)


def test_bfloat16_survives_where_the_format_has_it(tmp_path):
    tree = {"w": jnp.array([1.5, -2.0, 3.25], jnp.bfloat16)}
    data.save_arrays(tmp_path / "w.safetensors", tree)
    loaded = data.load_arrays(tmp_path / "w.safetensors", like=tree)["w"]
    assert loaded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded, tree["w"])
    with pytest.raises(TypeError, match=r"w has dtype bfloat16, which a \.npz file cannot hold"):
        data.save_arrays(tmp_path / "w.npz", tree)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_shapes_suffice_for_the_structure(tmp_path, suffix):
    tree = {"a": np.ones((2, 3), np.float32), "b": [np.arange(4), 2.5]}
    data.save_arrays(tmp_path / f"t{suffix}", tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)
    assert_same(data.load_arrays(tmp_path / f"t{suffix}", like), jax.tree.map(np.asarray, tree))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_fault_of_the_structure_is_listed(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    data.save_arrays(
        path, {"a": np.ones(2), "b": np.ones((2, 3)), "c": np.ones(4), "d": np.ones(1)}
    )
    like = {"a": np.ones(2), "b": np.ones((3, 2)), "c": np.ones(4, np.float32), "e": np.ones(1)}
    with pytest.raises(ValueError, match="not those of `like`") as caught:
        data.load_arrays(path, like)
    for fault in (
        "missing e",
        "not expected d",
        "b is float64[2, 3], expected float64[3, 2]",
        "c is float64[4], expected float32[4]",
    ):
        assert fault in str(caught.value)
    assert "a is" not in str(caught.value)


def test_other_suffixes_missing_files_and_missing_folders_are_named(tmp_path):
    for name in ("model.pt", "model", "model.NPZ"):
        with pytest.raises(ValueError, match=rf"'{name}' ends in .*\.safetensors or \.npz"):
            data.save_arrays(tmp_path / name, {"a": np.ones(1)})
        with pytest.raises(ValueError, match=rf"'{name}' ends in .*\.safetensors or \.npz"):
            data.load_arrays(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no file '.*absent\.npz'"):
        data.load_arrays(tmp_path / "absent.npz")
    with pytest.raises(FileNotFoundError, match=r"folder '.*nowhere' does not exist"):
        data.save_arrays(tmp_path / "nowhere" / "a.npz", {"a": np.ones(1)})


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
    data.save_arrays(path, {"old": np.arange(3)})
    with pytest.raises(error, match=message):
        data.save_arrays(path, {"fine": np.ones(2), **tree})
    np.testing.assert_array_equal(data.load_arrays(path)["old"], np.arange(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, suffix):
    resource = pytest.importorskip("resource")
    path = tmp_path / f"tree{suffix}"
    data.save_arrays(path, {"old": np.arange(3)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(Exception, match=r"(?i)file too large"):
            data.save_arrays(path, {"new": np.random.RandomState(0).rand(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    np.testing.assert_array_equal(data.load_arrays(path)["old"], np.arange(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_of_writers_at_once_one_wins_whole(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: data.save_arrays(path, {"a": np.full(10_000, i)}), range(32)))
    assert len(set(data.load_arrays(path)["a"].tolist())) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_anywhere_is_called_damaged(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    data.save_arrays(path, {"a": np.arange(6.0), "b": {"c": np.ones(3, np.int8)}})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"is damaged or not a .* file"):
            data.load_arrays(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_new_file_replaces_the_old_with_the_usual_permissions(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    data.save_arrays(path, {"a": np.ones(1)})
    data.save_arrays(path, {"b": np.ones(2)})
    assert list(data.load_arrays(path)) == ["b"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
