"""The palette: an algorithm looks the same everywhere, in colour and in greyscale."""

import itertools

import numpy as np
import pytest
from matplotlib import colors
from PIL import Image

from experiments.harness import choices, config, figures
from experiments.harness.figures import REFERENCES, line_style, style
from fisherjax.algorithms import METHODS, merges

DRAWN = list(merges())
NAMES = [*DRAWN, *REFERENCES]


def look(name: str) -> tuple[str, str]:
    own = style(name)
    return own["color"], own["marker"]


def lightness(name: str) -> float:
    """L* of CIELAB as a share of white's: what is left in greyscale, in even steps for the eye."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in colors.to_rgb(style(name)["color"])
    ]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 1.16 * luminance ** (1 / 3) - 0.16 if luminance > 0.008856 else 9.033 * luminance


def test_every_algorithm_has_a_colour_and_a_marker_of_its_own():
    assert len({look(name) for name in DRAWN}) == len(DRAWN)
    assert len({style(name)["label"] for name in DRAWN}) == len(DRAWN)
    assert {style(name)["color"] for name in REFERENCES} == {figures.GREY}
    assert all(style(name)["color"] != figures.GREY for name in DRAWN)


def test_an_exchange_without_training_looks_like_the_merge_it_follows():
    first, second = style("regmean"), style("regmean+analytic_head")
    assert second["label"] == "RegMean + analytic head"
    assert second["color"] == first["color"]
    assert second["marker"] != first["marker"]


def test_how_an_algorithm_looks_does_not_depend_on_what_else_is_drawn():
    first = {name: (style(name), line_style(name)) for name in NAMES}
    again = {name: (style(name), line_style(name)) for name in reversed(NAMES)}
    assert first == again


def test_more_algorithms_than_colours_still_look_different(monkeypatch):
    before = {name: look(name) for name in DRAWN}
    for number in range(3 * len(DRAWN)):
        monkeypatch.setitem(METHODS, f"another_{number}", METHODS["fedavg"])
    assert len({look(name) for name in DRAWN}) == len(DRAWN)
    assert {name: look(name) for name in before} == before


@pytest.mark.parametrize(("one", "other"), list(itertools.pairwise(DRAWN)))
def test_neighbours_differ_in_greyscale(one, other):
    assert abs(lightness(one) - lightness(other)) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_colours_are_seen_on_white(name):
    assert lightness(name) < 0.85


def test_a_legend_names_everybody_once():
    drawn, panels = figures.canvas(4, 2, columns=2, sharey=True)
    for panel in panels:
        for name in ("fedavg", "regmean"):
            panel.plot([0, 1], [0, 1], **style(name))
    figures.legend(drawn, panels)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["FedAvg", "RegMean"]
    assert len(drawn.legends) == 1
    assert all(panel.get_legend() is None for panel in panels)


def test_data_sets_and_networks_are_called_as_in_papers():
    assert figures.label("mnist") == "MNIST"
    assert figures.label("something else") == "something else"
    assert figures._LABELS.keys() <= {*choices.DATASETS, *choices.MODELS, *config.OWNERS}


def test_a_drawing_keeps_its_colours_and_has_two_hundred_dots_an_inch(tmp_path):
    drawn, panel = figures.canvas(4, 2)
    for place, name in enumerate(DRAWN):
        panel.bar(place, 1, color=style(name)["color"])
    figures.save(drawn, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as picture:
        assert (picture.size, picture.mode) == ((800, 400), "P")
        found = {
            colors.to_hex([c / 255 for c in rgb]) for _, rgb in picture.convert("RGB").getcolors()
        }
    assert {style(name)["color"] for name in DRAWN} | {"#ffffff"} <= found


def test_a_photograph_keeps_all_its_colours(tmp_path):
    drawn, panel = figures.canvas(2, 2)
    panel.imshow(np.random.default_rng(0).random((200, 200, 3)), interpolation="nearest")
    figures.save(drawn, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.mode == "RGB"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_panels_in_two_columns_are_as_wide_as_a_page(count):
    drawn, panels = figures.in_two_columns(count, 2.0)
    assert len(panels) == count == sum(panel.get_visible() for panel in drawn.axes)
    assert drawn.get_figwidth() < 8
