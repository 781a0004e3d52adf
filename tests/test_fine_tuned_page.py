"""What the page about fine-tuned models says holds: its code runs, its digits are measured."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fisherjax.__main__ import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how_to/fine_tuned.md"
INSPECT = ROOT / "docs/how_to/inspect_merge.md"


@pytest.mark.long
def test_the_page_about_fine_tuned_models_runs_and_prints_what_stands_under_it(
    run_page, monkeypatch
):
    page = SimpleNamespace(**run_page(INSPECT))
    said = re.search(r"prints `\[(.*?)\] (\S+)`", INSPECT.read_text())
    np.testing.assert_allclose(page.relative, np.float64(said[1].split()), atol=0.006)
    assert abs(page.cosines[1, 2] - float(said[2])) < 0.06
    files = page.fj.files.load_arrays
    mean, ties, voted = (files(f"{page.place}/{x}.safetensors") for x in ("mean", "ties", "voted"))
    for name in page.start:
        models = [own[name] for own in page.models]
        np.testing.assert_allclose(mean[name], np.mean(models, axis=0), rtol=1e-5, atol=1e-6)
        # TIES keeps the start where no change is among the largest fifth of its client.
        assert (ties[name] == page.start[name]).mean() > 0.3
        fishers = [files(beside)[f"fisher/entries/{name}"] for _, beside in page.pairs]
        fishers = np.float64(fishers) + 1e-12
        expected = (fishers * models).sum(0) / fishers.sum(0)
        np.testing.assert_allclose(voted[name], expected, rtol=1e-3, atol=1e-4)
    monkeypatch.chdir(page.place)
    names = {"base/": "base.safetensors", "merged/": "out.safetensors"}
    for first, (path, beside) in zip("abc", page.pairs, strict=True):
        names |= {f"{first}/": path, f"{first}.safetensors": beside}
    commands = re.findall(r"^python -m fisherjax (merge .*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert main([names.get(word, word) for word in command.split()]) == 0
    np.testing.assert_array_equal(files("out.safetensors")["fc.bias"], voted["fc.bias"])


def test_the_digits_of_the_page_are_those_of_the_page_about_changes_of_a_start():
    rows = re.findall(r"^\| (.+?) \| (\d+\.\d) \| (\d+\.\d) \|$", PAGE.read_text(), re.MULTILINE)
    changes = (ROOT / "docs/methods/changes_of_a_start.md").read_text()
    table = changes.split("## On digits", 1)[1].split("\n\n", 3)[2]
    held = re.findall(r"^\| (.+?) \| +\| (\S+) \+- \S+ \| (\S+) \+- \S+ \|$", table, re.MULTILINE)
    of_changes = {name: numbers for name, *numbers in held}
    for name, *numbers in rows[:9]:
        assert of_changes[name.split(",")[0]] == numbers, name
