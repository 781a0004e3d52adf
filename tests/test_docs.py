"""The site: what its reference lists, how its pages hang together, where its links lead."""

import ast
import importlib
import inspect
import re
import tomllib
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pytest
from _ext import markup, public

import fisherjax

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:type):: (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The generated pages, as they are written."""
    folder = tmp_path_factory.mktemp("reference")
    public.write(folder)
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text()
        for path in folder.rglob("*.rst")
    }


def documented(reference):
    """Return what the pages document: full names, those of modules left out."""
    found = []
    for text in reference.values():
        (module,) = re.findall(r"^\.\. automodule:: (\S+)$", text, re.MULTILINE)
        names = [name for name in DIRECTIVE.findall(text) if name != module]
        found += [name if name.startswith("fisherjax.") else f"{module}.{name}" for name in names]
    return found


def value_of(name):
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def modules(module=fisherjax):
    """Yield every module that is reached from the package by names in an `__all__`."""
    yield module
    for name in getattr(module, "__all__", ()):
        if inspect.ismodule(value := getattr(module, name)):
            yield from modules(value)


def offered(module):
    """Return what a module offers that can be told apart: its functions, classes and tables."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    values = [getattr(module, name) for name in names]
    plain = (int, float, str, tuple)  # equal ones are one object
    return [x for x in values if not inspect.ismodule(x) and type(x) not in plain]


def test_every_public_name_stands_once_in_the_reference(reference):
    names = documented(reference)
    assert len(names) > 150
    assert not [name for name, times in Counter(names).items() if times > 1]
    times = Counter(id(value_of(name)) for name in names)
    for module in modules():
        for value in offered(module):
            # Two names of one thing in one module, and aliases of one type, are documented each.
            aliases = [x for x in names if value_of(x) is value]
            is_once = times[id(value)] == 1 or len({x.rpartition(".")[0] for x in aliases}) == 1
            assert is_once, (module.__name__, value, aliases)


def test_every_name_of_an_all_stands_in_the_reference_or_is_linked_from_its_page(reference):
    names = set(documented(reference))
    for module in modules():
        for name in getattr(module, "__all__", ()):
            if not inspect.ismodule(getattr(module, name)):
                own = f"{module.__name__}.{name}"
                page = reference[public.location(module.__name__)]
                linked = re.search(rf":py:obj:`{name} <(\S+)>`", page)
                assert (own in names) != bool(linked), own
                assert own in names or linked[1] in names, own


def test_nothing_underscored_stands_in_the_reference(reference):
    assert not [name for name in documented(reference) if "._" in name]
    assert not [name for name in reference if "_" in (part[0] for part in name.split("/"))]


def annotations(module, name):
    """Yield the annotations that a user meets: those of a function, a class and its methods."""
    source = ast.parse(inspect.getsource(public.load(module)))
    node, *_ = [*(x for x in source.body if getattr(x, "name", None) == name), None]
    functions = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
        yield from [x.annotation for x in node.body if isinstance(x, ast.AnnAssign)]
        functions = [x for x in node.body if isinstance(x, ast.FunctionDef)]
        functions = [x for x in functions if x.name == "__call__" or not x.name.startswith("_")]
    for function in functions:
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        yield from filter(None, [*(x.annotation for x in given), function.returns])


def test_types_in_public_signatures_are_public():
    documented = {public.origin(page.module, x) for page in public.pages() for x in page.names}
    hidden = set()
    for module, name in documented:
        for annotation in annotations(module, name):
            words = {x.id for x in ast.walk(annotation) if isinstance(x, ast.Name)}
            for owner, own in {public.origin(module, word) for word in words}:
                is_ours = owner.startswith("fisherjax") and own in public.sources(owner).defined
                if is_ours and not isinstance(getattr(public.load(owner), own), TypeVar):
                    hidden.add((owner, own))
    assert not hidden - documented


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("fisherjax", "Model", "class"),
        ("fisherjax.fisher", "kfac", "function"),
        ("fisherjax.typing", "Params", "type"),
        ("fisherjax.algorithms", "METHODS", "value"),
    ],
)
def test_a_name_is_shown_as_what_it_is(module, name, kind):
    assert public.kind(module, name) == kind


def test_a_module_without_a_list_offers_what_it_defines(tmp_path, monkeypatch):
    package = tmp_path / "toy_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from toy_package import one, _two\n"
        "from toy_package._two import hidden, g as better\n"
        '__all__ = ["better", "one"]\n'
    )
    (package / "one.py").write_text(
        "import os\nfrom typing import TypeAlias\nfrom toy_package._two import g\n"
        "A, _B = 1, 2\nC: int = 3\nD: TypeAlias = 'A'\ndef f(): ...\n"
    )
    (package / "_two.py").write_text("def g(): ...\ndef hidden(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    top, one = public.pages("toy_package")
    assert (top.names, top.modules) == (("better",), ("toy_package.one",))
    assert one.names == ("A", "C", "D", "f")
    kinds = [public.kind(one.module, name) for name in one.names]
    assert kinds == ["value", "value", "type", "function"]


# Pages


def children(page, text, pages):
    """Return the pages that the toctrees of a page list, as Sphinx reads them."""
    found = []
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r"\.\. toctree::\n((?: +.*\n|\n)+)", text)
    for block in blocks:
        lines = [line.strip() for line in block.splitlines()]
        for entry in [line for line in lines if line and not line.startswith(":")]:
            folder = PurePosixPath(page).parent
            name = entry[1:] if entry.startswith("/") else str(folder / entry)
            matches = [p for p in sorted(pages) if PurePosixPath(p).match(name)]
            same = [p for p in matches if p.count("/") == name.count("/")]
            found += [p for p in same if p not in (page, *found)] if "*" in name else [name]
    return found


def test_every_page_is_in_exactly_one_toctree(reference):
    tracked = {
        path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text()
        for path in DOCS.rglob("*.md")
    }
    pages = tracked | {f"reference/{name}": text for name, text in reference.items()}
    pages |= {f"get_started/{path.stem}": "" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert len(tracked) > 20
    listed = [child for page, text in pages.items() for child in children(page, text, pages)]
    assert sorted(listed) == sorted(pages.keys() - {"index"})


def test_the_index_of_the_reference_says_what_each_module_is_for():
    listed = re.findall(r"^   (\S+)$", (DOCS / "reference/index.md").read_text(), re.MULTILINE)
    modules = [page.module for page in public.pages() if page.module.count(".") < 2]
    assert listed == [name for name in modules if name not in public.OPTIONAL]


# Docstrings and links, which need the packages of the extra `docs`


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("The norm |x| of a* and x_ is `a|b`s.", "The norm |x| of a* and x_ is a|bs."),
        ("An *emphasis* and 2 * 3 * 4.", "An emphasis and 2 * 3 * 4."),
        ("A text\n\n    F = *a | b_\n\ngoes on.", "A text\n\nF = *a | b_\n\ngoes on."),
        ("Source: somebody,\n    somewhere.", "Source: somebody,\nsomewhere."),
        ("* one\n  more\n* two", "one\nmore\n\ntwo"),
        ("A \\ and `\\n`.", "A \\ and \\n."),
    ],
)
def test_marks_of_a_docstring_are_shown(written, shown):
    core = pytest.importorskip("docutils.core")
    roles = pytest.importorskip("docutils.parsers.rst.roles")
    made = ".. default-role:: code\n\n" + "\n".join(markup.marked_up(written.splitlines()))
    try:
        assert core.publish_doctree(made).astext() == shown
    finally:
        roles._roles.pop("", None)  # docutils keeps a default role for its next text


@pytest.fixture(scope="module")
def links():
    pytest.importorskip("sphinx")
    return importlib.import_module("_ext.links")


@pytest.mark.parametrize(
    ("source", "page", "old", "new"),
    [
        ("docs/how_to/uploads.md", "how_to/uploads", "../methods/merging.md", None),
        ("docs/how_to/uploads.md", "how_to/uploads", "../../README.md", "URL/blob/main/README.md"),
        ("docs/how_to/uploads.md", "how_to/uploads", "../../tests", "URL/tree/main/tests"),
        (
            "docs/methods/theory.md",
            "methods/theory",
            "../../notebooks/theory.ipynb",
            "../get_started/theory.ipynb",
        ),
        ("docs/index.md", "index", "../CHANGELOG.md", "development/changelog.md"),
        (
            "notebooks/theory.ipynb",
            "get_started/theory",
            "../docs/methods/theory.md",
            "../methods/theory.md",
        ),
        ("docs/index.md", "index", "no_such_file.md", None),
        ("docs/index.md", "index", "https://example.org/x.md", None),
    ],
)
def test_a_link_leads_to_the_same_file_on_the_site(links, source, page, old, new):
    text = links.relinked(f"[words]({old}) [words]({old}#part)", ROOT / source, page, "URL")
    assert text == f"[words]({new or old}) [words]({new or old}#part)"


def test_an_image_outside_the_pages_stays_an_image(links):
    source = "notebooks/theory.ipynb"
    made = links.relinked("![a](x.png) [b](x.png)", ROOT / source, "get_started/theory", "URL")
    assert made == "![a](../../notebooks/x.png) [b](x.png)"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("fisherjax.merging.merge", "fisherjax.merging.merge"),
        ("fisherjax.typing.Model", "fisherjax.Model"),
        ("fisherjax.Model.positions", "fisherjax.Model.positions"),
        ("fisherjax.merging", "fisherjax.merging"),
    ],
)
def test_names_in_texts_are_found_in_the_reference(links, name, place):
    assert links.exists(name)
    assert links.documented_name(name) == place


@pytest.mark.parametrize("name", ["merging.merg", "mergin", "Model.position", "merging.merge.x"])
def test_names_that_do_not_exist_are_noticed(links, name):
    assert not links.exists(links.documented_name(f"fisherjax.{name}"))


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\|.*(?:\n\|.*)*", re.MULTILINE)
RULE = re.compile(r"\|(?: ?:?-+:? ?\|)+")


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_every_table_has_a_heading_and_rows_of_its_width(path):
    for table in TABLE.findall(FENCED.sub("", path.read_text())):
        lines = table.splitlines()
        assert len(lines) > 2, lines
        assert RULE.fullmatch(lines[1]), lines[1]
        # A bar inside of code is written as \\|.
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert len(widths) == 1, table


def test_every_block_of_code_is_opened_and_closed():
    for path in DOCS.rglob("*.md"):
        fences = re.findall(r"^ *```(.*)$", path.read_text(), re.MULTILINE)
        assert len(fences) % 2 == 0, path
        assert not any(fences[1::2]), path  # a fence that closes names no language


def test_the_page_on_installation_lists_every_package_and_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base, extras = (
        set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", part, re.MULTILINE))))
        for part in (DOCS / "get_started/installation.md").read_text().split("## Extras")
    )
    assert base == {re.match(r"[\w-]+", x)[0] for x in project["dependencies"]}
    assert extras == set(project["optional-dependencies"])
