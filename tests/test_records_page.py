"""The index of records lists every folder of results, its command and the pages that use it."""

import re
from collections import Counter

import pytest
from _ext import records

PAGE = records.PAGE.read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
ROWS = [
    (heading, *row.groups())
    for heading, *lines in map(str.splitlines, SECTIONS)
    for row in filter(None, map(records.ROW.match, lines))
]


def test_every_folder_has_one_row():
    assert Counter(folder for _, folder, *_ in ROWS) == Counter(records.folders())


@pytest.mark.parametrize(("heading", "folder", "link"), [row[:3] for row in ROWS])
def test_a_folder_stands_under_the_command_that_its_record_names(heading, folder, link):
    assert records.commands(folder) <= set(re.findall(r"`(experiments[\w.]+)`", heading))
    assert link.startswith(f"../../experiments/results/{folder}")
    assert (records.PAGE.parent / link).exists()


def test_the_pages_are_those_that_use_each_folder():
    again = "python docs/_ext/records.py writes them again"
    assert records.page(PAGE) == PAGE, again
    assert not [folder for _, folder, _, _, pages in ROWS if pages == "none"]
