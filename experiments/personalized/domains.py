"""Digits of five looks, each a client's own: made of MNIST, CIFAR-10, scikit-learn and fonts."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fisherjax as fj
from experiments.harness import figures
from fisherjax.datasets import Dataset

SIZE = 28
"""Of all images, in pixels, which have three channels."""
Images = tuple[np.ndarray, np.ndarray]  # uint8 [N, 28, 28, 3], labels [N]


class Domain(NamedTuple):
    """What one client sees, to train on and to be judged by."""

    name: str
    train: Images
    test: Images


def domains(
    names: Sequence[str], number: int, tested: int, seed: int, data_dir: Path | None
) -> list[Domain]:
    """Make so many images of each domain to train on, and up to so many to test.

    mnist: as it is. mnist_m: |patch of a photograph - digit|, as Ganin et al., JMLR 2016, who take
    those of BSDS500 where this takes CIFAR-10's. fonts: drawn from the fonts that matplotlib has,
    anywhere, turned and coloured, as the Synthetic Digits there. scans: scikit-learn's digits of
    8 x 8 pixels enlarged, which have the look of USPS. coloured: MNIST in random colours, half of
    it inverted, with noise. svhn_cropped: where it is prepared. No two domains share an image of
    MNIST.
    """
    found, halves = [], {}
    for name in names:
        source = np.random.default_rng((seed, zlib.crc32(name.encode())))
        kinds = ("mnist", "mnist_m", "coloured")
        if name in kinds and not halves:
            halves = _shares(fj.datasets.load("mnist", data_dir), kinds, seed)
        if name in kinds:
            parts = halves[name]
        elif name == "scans":
            parts = tuple((x.inputs * 15.9375, x.targets) for x in fj.datasets.load("digits"))
        elif name == "fonts":
            parts = tuple((None, source.integers(0, 10, n, np.int32)) for n in (number, tested))
        else:
            parts = tuple((x.inputs, x.targets) for x in fj.datasets.load(name, data_dir))
        photographs = fj.datasets.load("cifar10", data_dir) if name == "mnist_m" else (None,) * 2
        made = []
        for (images, labels), most, photos in zip(
            parts, (number, tested), photographs, strict=True
        ):
            rows = source.permutation(len(labels))[:most]
            own = None if images is None else images[rows]
            drawn = _DRAWN[name](source, own, labels[rows], photos)
            made.append((np.clip(np.rint(drawn), 0, 255).astype(np.uint8), labels[rows]))
        found.append(Domain(name, *made))
    return found


def draw(found: Sequence[Domain], path: Path) -> None:
    """Draw two samples of each digit and domain."""
    figure, axes = figures.canvas(9, 0.95 * len(found), 1, len(found), squeeze=False)
    for domain, panel in zip(found, axes[:, 0], strict=True):
        images, labels = domain.train
        rows = [row for label in range(10) for row in np.flatnonzero(labels == label)[:2]]
        panel.imshow(np.concatenate(images[rows], axis=1))
        panel.set(xticks=[], yticks=[])
        panel.set_ylabel(domain.name, rotation=0, ha="right", va="center")
        panel.spines[:].set_visible(False)
    figures.save(figure, path)


def _shares(both: Sequence[Dataset], kinds: Sequence[str], seed: int) -> dict[str, Any]:
    """Give every kind a share of MNIST's training images and one of its test images."""
    shares = []
    for data in both:
        rows = np.random.default_rng(seed).permutation(len(data.targets))
        split = np.array_split(rows, len(kinds))
        shares.append([(data.inputs[own], data.targets[own]) for own in split])
    return dict(zip(kinds, zip(*shares, strict=True), strict=True))


def _grey(source: Any, images: np.ndarray, labels: Any, photos: Any) -> np.ndarray:
    del source, labels, photos
    return np.repeat(images, 3, axis=-1)


def _blended(source: Any, images: np.ndarray, labels: Any, photos: Dataset) -> np.ndarray:
    del labels
    chosen = source.integers(0, len(photos.targets), len(images))
    tops, lefts = source.integers(0, 32 - SIZE + 1, (2, len(images)))
    patches = np.stack(
        [
            photos.inputs[n, top : top + SIZE, left : left + SIZE]
            for n, top, left in zip(chosen, tops, lefts, strict=True)
        ]
    )
    return np.abs(patches.astype(float) - images)


def _coloured(source: Any, images: np.ndarray, labels: Any, photos: Any) -> np.ndarray:
    del labels, photos
    back, ink = _two_colours(source, len(images))
    share = images / 255
    inverted = source.random(len(images)) < 0.5
    share[inverted] = 1 - share[inverted]
    drawn = back[:, None, None] * (1 - share) + ink[:, None, None] * share
    return drawn + source.normal(0, 20, drawn.shape)


def _two_colours(source: Any, number: int) -> np.ndarray:
    """Draw pairs of colours [2, number, 3] that can be told apart."""
    colours = source.integers(0, 256, (2, number, 3)).astype(float)
    # Luminances at least 80 apart: too close ones are moved to either end.
    bright = colours.mean(-1)
    close = np.abs(bright[0] - bright[1]) < 80
    high = np.where(bright[0] > bright[1], 0, 1)
    for place in np.flatnonzero(close):
        colours[high[place], place] += 255 - colours[high[place], place].max()
        colours[1 - high[place], place] *= 0.3
    return colours


def _enlarged(source: Any, images: np.ndarray, labels: Any, photos: Any) -> np.ndarray:
    from PIL import Image

    del source, labels, photos
    inner, border = 20, (SIZE - 20) // 2
    large = [
        np.asarray(Image.fromarray(x[..., 0].astype(np.uint8)).resize((inner, inner), 3))
        for x in images
    ]
    padded = np.pad(np.stack(large), ((0, 0), (border, border), (border, border)))
    return np.repeat(padded[..., None], 3, axis=-1)


def _written(source: Any, images: Any, labels: np.ndarray, photos: Any) -> np.ndarray:
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    del images, photos
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # Text fonts: those of mathematical symbols have no digits, or others.
    paths = sorted(p for p in folder.glob("*.ttf") if p.name.startswith(("DejaVu", "STIXGeneral")))
    paths = [p for p in paths if "Display" not in p.name]
    colours, drawn = _two_colours(source, len(labels)), []
    for label, back, ink in zip(labels, *colours, strict=True):
        font = ImageFont.truetype(str(source.choice(paths)), int(source.integers(18, 27)))
        mask = Image.new("L", (SIZE, SIZE))
        at = tuple(source.integers(-3, 4, 2) + SIZE // 2)
        ImageDraw.Draw(mask).text(at, str(label), fill=255, font=font, anchor="mm")
        mask = mask.rotate(float(source.uniform(-20, 20)), resample=Image.Resampling.BILINEAR)
        share = np.asarray(mask)[..., None] / 255
        drawn.append(back * (1 - share) + ink * share)
    drawn = np.stack(drawn)
    return drawn + source.normal(0, 8, drawn.shape)


def _photographed(source: Any, images: np.ndarray, labels: Any, photos: Any) -> np.ndarray:
    """Take the middle of larger photographs."""
    del source, labels, photos
    top, left = ((edge - SIZE) // 2 for edge in images.shape[1:3])
    return images[:, top : top + SIZE, left : left + SIZE]


_DRAWN: dict[str, Callable[..., np.ndarray]] = {
    "mnist": _grey,
    "coloured": _coloured,
    "scans": _enlarged,
    "fonts": _written,
    "mnist_m": _blended,
    "svhn_cropped": _photographed,
}
LOOKS = tuple(_DRAWN)
"""Domains that can be asked for."""
