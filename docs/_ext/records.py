"""The index of experiments/results: which pages use each folder.

A person writes which command made a folder (the heading above its row) and what it holds;
`python docs/_ext/records.py` writes the last column, the pages that name the folder.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/results/records.md"
RESULTS = ROOT / "experiments/results"
ROW = re.compile(r"^\| \[([\w/]+)\]\((\S+)\) \| (.*?) \| (.*) \|$")


def folders() -> list[str]:
    """Return the folders of results; those of the benchmark, a suite each, stand apart."""
    found = [*RESULTS.iterdir(), *(RESULTS / "benchmark").iterdir()]
    names = {str(path.relative_to(RESULTS)) for path in found if path.is_dir()}
    return sorted(names - {"benchmark"})


def commands(folder: str) -> set[str]:
    """Return the modules of experiments whose commands the texts in a folder hold."""
    texts = [path.read_text() for path in (RESULTS / folder).rglob("*.md")]
    return set(re.findall(r"python -m (experiments[\w.]*\w)", "".join(texts)))


def users(folder: str, pages: dict[Path, str]) -> str:
    """Return links to the pages that name a folder, "none" without any."""
    place = folder if folder.startswith("benchmark/") else f"experiments/results/{folder}"
    named = re.compile(rf"{place}(?!\w)")
    found = sorted(path for path, text in pages.items() if named.search(text))
    links = [f"[{path.stem}]({os.path.relpath(path, PAGE.parent)})" for path in found]
    return ", ".join(links) or "none"


def page(text: str) -> str:
    """Return the page with its last column written anew."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = {path: path.read_text() for path in paths if path != PAGE}
    lines = []
    for line in text.splitlines():
        if row := ROW.match(line):
            folder, link, what, _ = row.groups()
            line = f"| [{folder}]({link}) | {what} | {users(folder, pages)} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
