"""The page on the design shows the house as it is: its rooms, their imports, its functions."""

import importlib
import re

import pytest
from _ext import house

PAGE = house.PAGE.read_text()
_, NOUNS, PATH = re.split("^## The (?:nouns|path of a merge)$", PAGE, flags=re.MULTILINE)


def resolve(name: str):
    """Return what a name in the page stands for: "merging.merge", a module or a part of one."""
    module, _, own = f"fisherjax.{name}".rpartition(".")
    return getattr(importlib.import_module(module), own)


def test_the_page_has_every_room_in_the_order_of_the_house():
    assert [room for _, inside in house.storeys(PAGE) for room in inside] == house.order()


def test_the_drawing_is_that_of_the_code():
    again = "python docs/_ext/house.py draws it again"
    assert house.DRAWING.read_text() == house.current(), again


def test_every_import_points_down_the_house():
    place = {room: number for number, room in enumerate(house.order())}
    pairs = house.imports(house.order())
    assert len(pairs) > 100
    assert not [(a, b) for a, b in pairs if place[a] <= place[b]]


@pytest.mark.parametrize("section", [NOUNS, PATH.split("\n## ")[0]], ids=["nouns", "path"])
def test_the_page_names_what_exists(section):
    names = re.findall(r"`((?:\w+\.)+\w+)`", section)
    assert len(names) > 10
    assert all(resolve(name) is not None for name in names)


def test_another_import_or_room_changes_the_drawing(tmp_path):
    file = tmp_path / "room.py"
    file.write_text("import fisherjax.tree, jax\nfrom fisherjax import typing\n")
    assert list(house.imported(file)) == ["tree", "typing"]
    rooms = [("one", ["tree"]), ("two", ["files", "rounds"])]
    plain = house.drawing(rooms, set())
    assert plain != house.drawing(rooms, {("files", "tree")})
    assert plain != house.drawing([*rooms, ("three", ["flower"])], set())


def test_the_page_is_one_page():
    assert len(PAGE.splitlines()) < 150
