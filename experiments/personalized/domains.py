"""Make domains of digits, one for each client, from MNIST, CIFAR-10, scikit-learn and fonts."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import fisherjax as fj
from experiments.harness import figures

SIZE = 28
"""Height and width of all images, which have three channels."""
Images = tuple[np.ndarray, np.ndarray]  # uint8 [N, 28, 28, 3], labels [N]


class Domain(NamedTuple):
    """The training and test images of one client."""

    name: str
    train: Images
    test: Images


def domains(
    names: Sequence[str], number: int, tested: int, seed: int, data_dir: Path | None
) -> list[Domain]:
    """Make `number` training images of each domain, and at most `tested` test images.

    - mnist: unchanged.
    - mnist_m: |patch of a photograph - digit|, as in Ganin et al., JMLR 2016, with photographs of
      CIFAR-10 in place of BSDS500.
    - fonts: digits in the fonts of matplotlib, shifted, rotated and coloured, like the Synthetic
      Digits of the same paper.
    - scans: scikit-learn's digits of 8 x 8 pixels, enlarged, which look like USPS.
    - coloured: MNIST in random colours, half of it inverted, with noise.
    - svhn_cropped: if it is prepared.

    No two domains share an image of MNIST.
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
        made, sides = [], zip(parts, (number, tested), photographs, strict=True)
        for (images, labels), most, photos in sides:
            rows = source.permutation(len(labels))[:most]
            own = None if images is None else images[rows]
            drawn = _DRAWN[name](source, own, labels[rows], photos)
            made.append((np.clip(np.rint(drawn), 0, 255).astype(np.uint8), labels[rows]))
        found.append(Domain(name, *made))
    return found


def draw(found: Sequence[Domain], path: Path) -> None:
    """Draw two samples of each digit of each domain."""
    figure, axes = figures.canvas(8, 0.45 * len(found), 1, len(found), squeeze=False)
    for domain, panel in zip(found, axes[:, 0], strict=True):
        images, labels = domain.train
        rows = [row for label in range(10) for row in np.flatnonzero(labels == label)[:2]]
        drawn = np.concatenate(images[rows], axis=1)
        figures.image(panel, drawn, domain.name, interpolation="nearest")
        panel.spines[:].set_visible(False)
    figures.save(figure, path)


def _shares(both: Sequence[fj.datasets.Dataset], kinds: Sequence[str], seed: int) -> dict[str, Any]:
    """Return for each kind its share of MNIST's training images and of its test images."""
    shares = []
    for data in both:
        rows = np.random.default_rng(seed).permutation(len(data.targets))
        split = np.array_split(rows, len(kinds))
        shares.append([(data.inputs[own], data.targets[own]) for own in split])
    return dict(zip(kinds, zip(*shares, strict=True), strict=True))


def _grey(_: Any, images: np.ndarray, *__: Any) -> np.ndarray:
    return np.repeat(images, 3, axis=-1)


def _blended(source: Any, images: np.ndarray, _: Any, photos: fj.datasets.Dataset) -> np.ndarray:
    chosen = source.integers(0, len(photos.targets), len(images))
    tops, lefts = source.integers(0, 32 - SIZE + 1, (2, len(images)))
    corners = zip(chosen, tops, lefts, strict=True)
    patches = [photos.inputs[n, y : y + SIZE, x : x + SIZE] for n, y, x in corners]
    return np.abs(np.stack(patches).astype(float) - images)


def _coloured(source: Any, images: np.ndarray, *_: Any) -> np.ndarray:
    back, ink = _two_colours(source, len(images))
    share = images / 255
    inverted = source.random(len(images)) < 0.5
    share[inverted] = 1 - share[inverted]
    drawn = back[:, None, None] * (1 - share) + ink[:, None, None] * share
    return drawn + source.normal(0, 20, drawn.shape)


def _two_colours(source: Any, number: int) -> np.ndarray:
    """Draw pairs of colours [2, number, 3] that can be told apart."""
    colours = source.integers(0, 256, (2, number, 3)).astype(float)
    # Brightnesses that are less than 80 apart are moved to either end.
    bright = colours.mean(-1)
    close = np.abs(bright[0] - bright[1]) < 80
    high = np.where(bright[0] > bright[1], 0, 1)
    for place in np.flatnonzero(close):
        colours[high[place], place] += 255 - colours[high[place], place].max()
        colours[1 - high[place], place] *= 0.3
    return colours


def _enlarged(_: Any, images: np.ndarray, *__: Any) -> np.ndarray:
    border = (SIZE - 20) // 2
    small = (Image.fromarray(x[..., 0].astype(np.uint8)) for x in images)
    large = np.stack([np.asarray(x.resize((20, 20), Image.Resampling.BICUBIC)) for x in small])
    padded = np.pad(large, ((0, 0), (border, border), (border, border)))
    return np.repeat(padded[..., None], 3, axis=-1)


def _written(source: Any, _: Any, labels: np.ndarray, __: Any) -> np.ndarray:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # Fonts of mathematical symbols are left out, because they lack digits or draw others.
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


def _photographed(_: Any, images: np.ndarray, *__: Any) -> np.ndarray:
    """Return the middle of larger photographs."""
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
"""Names of the domains."""
