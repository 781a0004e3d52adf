"""Data sets, and what prepares images."""

import functools
import importlib.util
import shlex
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import datasets

# Data sets


def test_digits_are_scikit_learns_split_in_two():
    from sklearn.datasets import load_digits

    splits = datasets.load("digits")
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
    """Read data sets of which every split ends early: 60,000 images take many seconds to decode."""
    import tensorflow_datasets as tfds

    whole = tfds.data_source

    def beginning(name, split, **options):
        return whole(name, split=[f"{part}[:{BEGINNING}]" for part in split], **options)

    @functools.cache
    def read(name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tfds, "data_source", beginning)
            return datasets.load(name, shared / "data")

    return read


BEGINNING = 4100  # more than are decoded at a time
PREPARED = {"mnist": ((60000, 10000), (28, 28, 1)), "cifar10": ((50000, 10000), (32, 32, 3))}


def assert_read_as_by_its_maker(splits, name, sizes, folder):
    import tensorflow_datasets as tfds

    image = PREPARED[name][1]
    for split, part, size in zip(splits, ("train", "test"), sizes, strict=True):
        assert (split.inputs.shape, split.inputs.dtype) == ((size, *image), np.uint8)
        assert (split.targets.shape, split.targets.dtype) == ((size,), np.int32)
        assert (split.num_classes, split.scale, split.name) == (10, 255.0, name)
        source = tfds.data_source(name, split=part, data_dir=folder, download=False)
        for row in (0, 1, 4095, 4096, size // 2, size - 1):
            np.testing.assert_array_equal(split.inputs[row], source[row]["image"])
            assert split.targets[row] == source[row]["label"]


@pytest.mark.long
@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_data_set_is_read_as_its_maker_reads_it(prepared, shared, name):
    assert_read_as_by_its_maker(prepared(name), name, (BEGINNING, BEGINNING), shared / "data")


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_data_set_is_read_to_its_end(shared, name):
    sizes, _ = PREPARED[name]
    splits = datasets.load(name, shared / "data")
    assert_read_as_by_its_maker(splits, name, sizes, shared / "data")


@pytest.mark.long
@pytest.mark.parametrize("name", PREPARED)
def test_the_papers_constants_standardise_the_training_images(prepared, name):
    train, _ = prepared(name)
    x = np.asarray(datasets.normalizer(train)(train.inputs), np.float64)
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=0.02)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=0.04)


def test_the_environment_names_the_folder_unless_the_caller_does(tmp_path, monkeypatch):
    for folder in ("environment", "caller"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "environment"))
    with pytest.raises(FileNotFoundError, match=r"no data set 'mnist' in '.*environment'"):
        datasets.load("mnist")
    with pytest.raises(FileNotFoundError, match=r"no data set 'mnist' in '.*caller'"):
        datasets.load("mnist", tmp_path / "caller")


def test_an_unknown_name_is_answered_with_the_nearest():
    papers = [("CIFAR-10", "cifar10"), ("CINIC-10", "cinic10"), ("svhn", "svhn_")]
    for given_name, nearest in [("minst", "mnist"), *papers]:
        with pytest.raises(ValueError, match=f"data set is '{given_name}'.*mean '{nearest}"):
            datasets.load(given_name)


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"directory '.*nowhere' does not exist"):
        datasets.load("mnist", tmp_path / "nowhere")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"directory '.*elsewhere' does not exist"):
        datasets.load("mnist")


@pytest.mark.parametrize("name", [name for name in datasets.NAMES if name != "digits"])
@pytest.mark.parametrize("folder", ["plain", 'it\'s a "folder"'])
def test_the_command_in_the_error_prepares_the_data_set_where_it_was_looked_for(
    name, folder, tmp_path
):
    import tensorflow_datasets as tfds

    place = tmp_path / folder
    place.mkdir()
    with pytest.raises(FileNotFoundError, match=r"fisherjax\[prepare\]") as caught:
        datasets.load(name, place)
    (command,) = (line for line in str(caught.value).splitlines() if "python -c" in line)
    program = shlex.split(command)
    assert program[:2] == ["python", "-c"]
    # Everything but the download itself.
    *statements, expression = program[2].split("; ")
    # Where the library has a builder of its own, that is registered first.
    module = f"fisherjax._{name}"
    ours = [f"import {module}"] if importlib.util.find_spec(module) else []
    assert statements == ["import tensorflow_datasets as tfds", *ours]
    builder = eval(expression.removesuffix(".download_and_prepare()"), {"tfds": tfds})
    assert builder.name == name
    assert str(builder.data_dir).startswith(str(place))
    assert builder.info.file_format.value == "array_record"


CLASSES = ("airplane", "automobile", "bird", "cat", "deer")
CLASSES += ("dog", "frog", "horse", "ship", "truck")


@pytest.fixture
def unpacked(tmp_path):
    """Write images as CINIC-10's archive holds them: two of a class to train on, one elsewhere."""
    from PIL import Image

    random, folder = np.random.default_rng(0), tmp_path / "downloads" / "manual" / "CINIC-10"
    for split, number in (("train", 2), ("valid", 1), ("test", 1)):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for image in range(number):
                pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"cifar10-{image}.png")
    return folder


def prepare_as_told(place):
    """Run the command that the error names, in this process."""
    with pytest.raises(FileNotFoundError, match="prepare it once") as caught:
        datasets.load("cinic10", place)
    assert f"in {place}/downloads/manual/CINIC-10" in str(caught.value)
    exec(shlex.split(str(caught.value).splitlines()[2])[-1], {})


def test_cinic10_is_prepared_from_its_images_and_read_like_the_others(unpacked, tmp_path):
    from PIL import Image

    grey = unpacked / "test" / "deer" / "cifar10-0.png"
    Image.open(grey).convert("L").save(grey)
    prepare_as_told(tmp_path)
    for split, number in zip(datasets.load("cinic10", tmp_path), (2, 1), strict=True):
        part = "train" if number == 2 else "test"
        assert (split.inputs.shape, split.inputs.dtype) == ((10 * number, 32, 32, 3), np.uint8)
        assert (split.num_classes, split.scale, split.name) == (10, 255.0, "cinic10")
        stored = {
            (label, np.asarray(Image.open(path).convert("RGB")).tobytes())
            for label, name in enumerate(CLASSES)
            for path in (unpacked / part / name).iterdir()
        }
        read = zip(split.targets.tolist(), map(np.ndarray.tobytes, split.inputs), strict=True)
        assert set(read) == stored


def test_classes_of_cinic10_that_are_not_there_are_named(unpacked, tmp_path):
    for name in ("cat", "ship"):
        (unpacked / "valid" / name / "cifar10-0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"no images of cat, ship in .*valid: Unpack"):
        prepare_as_told(tmp_path)
    with pytest.raises(FileNotFoundError, match="prepare it once"):
        datasets.load("cinic10", tmp_path)


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [("digits", "sklearn.datasets", "scikit-learn"), ("mnist", "PIL", "pillow")],
)
def test_a_package_that_is_missing_is_named(shared, monkeypatch, name, package, said):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{said}.*pip install 'fisherjax\[experiments\]'"):
        datasets.load(name, shared / "data")


def test_the_splits_of_a_text_are_joined_in_their_order(shared):
    import tensorflow_datasets as tfds

    text, start = datasets.load_text(data_dir=shared / "data"), 0
    for split in ("train", "validation", "test"):
        source = tfds.data_source("tiny_shakespeare", split=split, data_dir=shared / "data")
        part = source[0]["text"].decode()
        assert text[start : start + len(part)] == part
        start += len(part)
    assert len(text) == start


def test_a_text_that_is_unknown_or_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"unknown text 'mnist'.*datasets\.load.*read_text"):
        datasets.load_text("mnist")
    with pytest.raises(FileNotFoundError, match=r"directory '.*nowhere' does not exist"):
        datasets.load_text(data_dir=tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r'no data set.*\n.*\n.*builder\("tiny_shakespeare"'
    ):
        datasets.load_text(data_dir=tmp_path)


# Normalisation


@pytest.fixture(scope="module")
def colours():
    images = np.random.RandomState(0).randint(0, 256, (5, 6, 4, 3)).astype(np.uint8)
    targets = np.zeros(5, np.int32)
    return datasets.Dataset(images, targets, 2, 255.0, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), "colours")


def test_normalisation_is_affine_in_each_channel(colours):
    x = jax.jit(datasets.normalizer(colours))(colours.inputs)
    assert x.dtype == jnp.float32
    for channel in range(3):
        mean, std = colours.mean[channel], colours.std[channel]
        expected = (colours.inputs[..., channel].astype(float) / 255 - mean) / std
        np.testing.assert_allclose(x[..., channel], expected, rtol=1e-5, atol=1e-6)
    again = datasets.normalizer(colours)(x)  # normalised before: unchanged
    np.testing.assert_array_equal(again, x)
    one_by_one = jax.vmap(jax.vmap(jax.vmap(datasets.normalizer(colours))))(colours.inputs)
    np.testing.assert_allclose(one_by_one, x, rtol=1e-6, atol=1e-6)


def test_equal_constants_give_the_same_functions_and_nothing_compiles_again(colours, compilations):
    @functools.partial(jax.jit, static_argnums=(0, 1))
    def use(normalize, augment, key, x):
        return normalize(x).sum() + augment(key, x).sum()

    other = colours._replace(inputs=colours.inputs + 1, mean=list(np.array(colours.mean)))
    first, second = datasets.normalizer(colours), datasets.normalizer(other)
    assert first is second
    assert datasets.crop_and_flip(first) is datasets.crop_and_flip(second, padding=4)
    assert datasets.normalizer(colours._replace(scale=16)) is not first
    x, key = jnp.asarray(colours.inputs), jax.random.key(0)
    use(first, datasets.crop_and_flip(first), key, x)
    with compilations() as count:
        use(second, datasets.crop_and_flip(second), key, x)
    assert count() == 0


def test_constants_that_cannot_normalise_are_refused(colours):
    for fault in ({"std": (0.5, 0.0, 0.7)}, {"std": (0.5,)}, {"scale": 0.0}, {"scale": np.nan}):
        with pytest.raises(ValueError, match=r"cannot normalise 'colours'.*scale and stds above 0"):
            datasets.normalizer(colours._replace(**fault))
    with pytest.raises(TypeError, match="dtype bool"):
        datasets.normalizer(colours)(colours.inputs > 3)


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
    normalize = datasets.normalizer(colours)
    result = datasets.crop_and_flip(normalize, padding, mode)(key, jnp.asarray(colours.inputs))
    assert result.shape == colours.inputs.shape
    for image, augmented in zip(np.asarray(normalize(colours.inputs)), result, strict=True):
        distances = [np.abs(crop - augmented).max() for crop in every_crop(image, padding, mode)]
        assert min(distances) < 1e-5


def test_every_crop_is_drawn_equally_often_and_apart_from_its_neighbour(colours, key):
    """18 outcomes; under equal chances the chi-square statistics have means 17 and 17^2."""
    copies, normalize = 18 * 18 * 40, datasets.normalizer(colours)
    images = jnp.broadcast_to(colours.inputs[:1], (copies, *colours.inputs.shape[1:]))
    result = np.asarray(jax.jit(datasets.crop_and_flip(normalize, 1))(key, images))
    crops = np.stack(list(every_crop(np.asarray(normalize(images[0])), 1)))
    outcome = np.array([np.abs(crops - image).max((1, 2, 3)).argmin() for image in result])
    single = Counter(outcome)
    expected = copies / 18
    assert sum((single[o] - expected) ** 2 / expected for o in range(18)) < 17 + 5 * 34**0.5
    table = np.histogram2d(outcome[::2], outcome[1::2], bins=18)[0]
    independent = table.sum(0) * table.sum(1)[:, None] / table.sum()
    assert ((table - independent) ** 2 / independent).sum() < 289 + 5 * 578**0.5


def test_augmentation_under_jit_and_vmap_is_the_eager_one(colours):
    augment = datasets.crop_and_flip(datasets.normalizer(colours), 2)
    images = jnp.asarray(np.stack([colours.inputs, colours.inputs[::-1]]))
    keys = jax.random.split(jax.random.key(3), 2)
    together = jax.jit(jax.vmap(augment))(keys, images)
    for one, key, image in zip(together, keys, images, strict=True):
        np.testing.assert_allclose(one, augment(key, image), rtol=1e-6, atol=1e-6)
    assert not np.allclose(augment(keys[0], images[0]), augment(keys[1], images[0]))


def test_images_normalised_before_are_only_moved(colours, key):
    normalize = datasets.normalizer(colours)
    augment = datasets.crop_and_flip(normalize, 2)
    stored, floats = jnp.asarray(colours.inputs), normalize(colours.inputs)
    np.testing.assert_array_equal(augment(key, stored), augment(key, floats))


def test_augmentation_refuses_what_is_not_a_batch_of_images(colours, key):
    for padding in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"padding is {padding}"):
            datasets.crop_and_flip(datasets.normalizer(colours), padding)
    with pytest.raises(ValueError, match="mode is 'wrap'; expected 'constant' or 'reflect'"):
        datasets.crop_and_flip(datasets.normalizer(colours), mode="wrap")
    with pytest.raises(ValueError, match="cannot be reflected by padding=4: it must be below"):
        datasets.crop_and_flip(datasets.normalizer(colours), 4, "reflect")(
            key, jnp.asarray(colours.inputs)
        )
    with pytest.raises(ValueError, match=r"shape \(6, 4, 3\), expected \[B, H, W, channels\]"):
        datasets.crop_and_flip(datasets.normalizer(colours))(key, jnp.asarray(colours.inputs[0]))
