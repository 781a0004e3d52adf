"""Images for networks with weights: resized as Pillow does, and Omniglot from its archives."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.harness import drawings

OMNIGLOT = Path(__file__).resolve().parents[3] / "shared/data/omniglot"


@pytest.mark.parametrize(
    ("old", "new"), [((28, 28), (32, 32)), ((28, 28), (64, 48)), ((105, 105), (32, 64))]
)
def test_images_are_resized_as_pillow_does(old, new):
    """Up to the rounding of Pillow, which rounds after each of the two axes."""
    drawn = np.random.RandomState(0).randint(0, 256, (2, *old)).astype("uint8")
    found = drawings.resized(drawn, (*new, 3))
    assert (found.shape, found.dtype) == ((2, *new, 3), np.uint8)
    for one, image in zip(found, drawn, strict=True):
        theirs = Image.fromarray(image).resize(new[::-1], Image.Resampling.BILINEAR)
        assert np.abs(one[..., 0].astype(int) - np.asarray(theirs).astype(int)).max() <= 1
        assert (one == one[..., :1]).all()


def test_colours_stay_and_an_equal_size_changes_nothing():
    drawn = np.random.RandomState(0).randint(0, 256, (3, 8, 8, 3)).astype("uint8")
    np.testing.assert_array_equal(drawings.resized(drawn, (8, 8, 3)), drawn)
    with pytest.raises(ValueError, match="broadcast"):
        drawings.resized(drawn, (8, 8, 2))


def archive(folder, name, alphabets, people=(1, 2)):
    """Write an archive: two characters of each alphabet by each person, one pixel of ink each."""
    with zipfile.ZipFile(folder / name, "w") as written:
        for number, (alphabet, person, character) in enumerate(
            (a, p, c) for a in alphabets for p in people for c in (1, 2)
        ):
            paper = np.ones((105, 105), bool)
            paper[number, 0] = False
            data = io.BytesIO()
            Image.fromarray(paper).save(data, "png")
            path = f"{name[:-4]}/{alphabet}/character{character:02}/0{number}_{person:02}.png"
            written.writestr(path, data.getvalue())


def test_drawings_are_white_on_black_with_their_characters_and_people(tmp_path):
    archive(tmp_path, "images_background_small1.zip", ["Greek", "Korean"])
    with pytest.raises(FileNotFoundError, match="with Greek, Latin: put Omniglot's"):
        drawings.omniglot(tmp_path)
    archive(tmp_path, "images_background_small2.zip", ["Greek", "Latin"])
    found = drawings.omniglot(tmp_path)
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.people.tolist() == [1, 2] * 4
    ink = np.argwhere(found.images)
    assert ink[:, 1].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert found.images.max() == 255


@pytest.mark.skipif(not OMNIGLOT.is_dir(), reason="Omniglot's archives are not there")
@pytest.mark.long
def test_greek_and_latin_are_fifty_characters_of_twenty_people():
    found = drawings.omniglot(OMNIGLOT)
    assert found.images.shape == (1000, 105, 105)
    assert (np.bincount(found.labels) == [20] * 50).all()
    assert (np.bincount(found.people)[1:] == [50] * 20).all()
    assert 0.01 < (found.images > 0).mean() < 0.2
