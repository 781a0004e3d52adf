"""The built site as a reader meets it: links, anchors, pictures, and no need of a network."""

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURE = re.compile(r"!\[([^\]]*)\]\((?!http)([^)]+)\)")
SHOWN = [(page, *found) for page in PAGES for found in PICTURE.findall(page.read_text())]


@pytest.mark.parametrize(("page", "words", "name"), SHOWN, ids=[x for *_, x in SHOWN])
def test_a_picture_has_words_and_is_sharp_and_small(page, words, name):
    assert len(words.split()) > 3, words
    path = page.parent / name
    assert path.stat().st_size < 400_000
    if path.suffix == ".svg":  # sharp at any width
        return
    with Image.open(path) as picture:
        assert picture.width > 800  # pixels: it is not enlarged on a page of the site
        assert picture.convert("RGBA").getextrema()[3] == (255, 255)  # no dark theme shines through


@pytest.fixture(scope="module")
def mathml():
    nodes = pytest.importorskip("docutils.nodes")
    pytest.importorskip("sphinx")
    equations = importlib.import_module("_ext.equations")

    def translate(tex):
        """Return the MathML of an equation without spaces; a warning instead fails."""
        made = equations.mathml(nodes.math(tex, tex), as_block=False)
        assert made.startswith("<math"), tex
        return "".join(made.split())

    return translate


def test_every_equation_of_the_notebooks_is_shown(mathml):
    texts = [path.read_text() for path in (ROOT / "notebooks").glob("*.py")]
    words = "\n".join(re.findall(r"^# (.*)$", "\n".join(texts), re.MULTILINE))
    found = re.findall(r"\$\$(.+?)\$\$|\$([^$]+)\$", words, re.DOTALL)
    assert len(found) > 40
    for tex in map("".join, found):
        assert mathml(tex)


@pytest.mark.parametrize(
    ("short", "long"),
    [(r"\tfrac12x", r"\tfrac{1}{2} x"), (r"\frac1n", r"\frac{1}{n}"), (r"\big[g\big]", "[g]")],
)
def test_an_equation_means_what_it_means_in_tex(mathml, short, long):
    assert mathml(short) == mathml(long)


class Page(HTMLParser):
    """What a page of the site has and needs.

    Attributes:
        anchors: The places on it that links may name.
        links: Addresses that readers may follow.
        pictures: Words and addresses of its pictures.
        needed: Addresses of scripts, styles, fonts and frames, without which it looks otherwise.
        text: Its letters and digits.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.pictures: list[tuple[str, str]] = []
        self.needed: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attrs}
        self.anchors |= {own[name] for name in ("id", "name") if name in own}
        if tag == "a" and "href" in own:
            self.links.append(own["href"])
        elif tag == "img":
            self.pictures.append((own.get("alt", ""), own["src"]))
        elif tag == "link" and own.get("rel") in ("stylesheet", "preload", "icon"):
            self.needed.append(own["href"])
        elif tag in ("script", "iframe") and "src" in own:
            self.needed.append(own["src"])

    def handle_data(self, data: str) -> None:
        self.text += letters(data)


def letters(text: str) -> str:
    """Return the letters and digits of a text, without what marks it up."""
    return re.sub(r"[\W_]", "", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """Build the site, and return its pages."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    how = ["--quiet", "--fail-on-warning", "--keep-going", "--doctree-dir", folder / "doctrees"]
    words = [sys.executable, "-m", "sphinx", *how, "docs", folder / "html"]
    subprocess.run([str(word) for word in words], cwd=ROOT, check=True)
    return {path.resolve(): Page(path) for path in (folder / "html").rglob("*.html")}


def target(page: Path, address: str) -> Path:
    """Return the file to which a relative address on a page leads."""
    name = unquote(urlsplit(address).path)
    return (page.parent / name).resolve() if name else page


@pytest.mark.slow
def test_each_link_leads_to_a_page_and_a_place_on_it(site):
    dead = []
    for path, page in site.items():
        for address in page.links:
            if not urlsplit(address).scheme:
                file, anchor = target(path, address), unquote(urlsplit(address).fragment)
                if not file.exists() or (file in site and anchor not in site[file].anchors):
                    dead.append((path.name, address))
    assert len(site) > 100
    assert not dead


@pytest.mark.slow
def test_each_picture_is_there_and_has_words(site):
    found = [(path, *picture) for path, page in site.items() for picture in page.pictures]
    own = [picture for picture in found if "_static/" not in picture[-1]]  # Sphinx's own signs
    assert len(own) > 30
    for path, words, address in own:
        assert len(words.split()) > 2, (path.name, address, words)
        is_here = not urlsplit(address).scheme
        assert not is_here or target(path, address).exists(), (path.name, address)


@pytest.mark.slow
def test_pages_need_nothing_from_the_network_to_be_read(site):
    for path, page in site.items():
        assert not [x for x in page.needed if urlsplit(x).netloc], path.name


@pytest.mark.slow
def test_every_line_of_prose_stands_on_its_page(site):
    (root,) = [path.parent for path in site if path.name == "genindex.html"]
    lost = []
    for path in (ROOT / "docs").rglob("*.md"):
        text = re.sub(
            r"^(`{3,}|:{3,}).*?^\1$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        text = re.sub(r"<!--.*?-->|\]\([^)]*\)|!\[[^\]]*|^\d+\. ", "", text, flags=re.DOTALL | re.M)
        shown = site[root / path.relative_to(ROOT / "docs").with_suffix(".html")].text
        cells = re.split(r"\n|(?<!\\)\|", text)
        lost += [(path.name, cell) for cell in cells if letters(cell) not in shown]
    assert not lost
