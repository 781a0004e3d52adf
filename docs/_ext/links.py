"""Make links hold both on GitHub, in the repository's tree, and on the site.

Links to files that are no pages of the site become addresses of the repository, and names of the
package in the text become links to the reference. What does not exist is a warning.
"""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import states
from docutils.utils import unescape
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

from _ext import public

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Files of the repository that are pages of the site, by the page that shows them.
SHOWN = {
    **{f"get_started/{path.stem}": path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
    "development/contributing": ROOT / "CONTRIBUTING.md",
    "development/changelog": ROOT / "CHANGELOG.md",
}
# An image's words, if it is one, and where it leads: not to the web, nor to a heading of the page.
LINK = re.compile(r"(!\[[^\]]*)?\]\((?!https?:|mailto:)([^)#\s]+)(?=[)#])")
NAME = re.compile(r"(?:fj|fisherjax)\.[A-Za-z][\w.]*")
DOTTED = re.compile(r"[a-z]\w*(\.\w+)+|[A-Z]\w*[a-z]\w*(\.\w+)*")

logger = logging.getLogger(__name__)


def copy_notebooks(folder: Path) -> None:
    """Copy the notebooks, with their stored outputs, to the folder where Sphinx reads pages."""
    for page, path in SHOWN.items():
        copy = folder / f"{page}.ipynb"
        is_old = not copy.exists() or copy.stat().st_mtime < path.stat().st_mtime
        if path.suffix == ".ipynb" and is_old:
            shutil.copy(path, copy)


def relinked(text: str, source: Path, page: str, repository: str) -> str:
    """Turn links of a file into those of a page: to another page, or to the repository."""
    pages = {path: name for name, path in SHOWN.items()}

    def link(match: re.Match) -> str:
        words, old = match[1] or "", match[2]
        target = Path(os.path.normpath(source.parent / old))
        if target in pages:
            target = DOCS / f"{pages[target]}{target.suffix}"
        if words or target.is_relative_to(DOCS):
            new = os.path.relpath(target, (DOCS / page).parent)
        elif target.exists() and target.is_relative_to(ROOT):
            kind = "tree" if target.is_dir() else "blob"
            new = f"{repository}/{kind}/main/{target.relative_to(ROOT)}"
        else:
            new = old  # MyST says that it leads nowhere
        return f"{words}]({new}"

    return LINK.sub(link, text)


def on_read(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn the links of a page that Sphinx is about to read."""
    path = SHOWN.get(page, DOCS / f"{page}.md")
    source[0] = relinked(source[0], path, page, app.config.repository)


def code(
    _name: str, rawtext: str, text: str, _line: int, inliner: states.Inliner, **_: Any
) -> tuple[list[nodes.Node], list]:
    """Set a docstring's code, and note the module whose names it may use."""
    module = inliner.document.settings.env.ref_context.get("py:module")
    return [nodes.literal(rawtext, unescape(text, restore_backslashes=True), module=module)], []


code.options = {}
code.content = False


class NamesToLinks(SphinxPostTransform):
    """Make links of names of the package in the text."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """Replace each literal that is a name by a link around it."""
        for node in list(self.document.findall(nodes.literal)):
            above = nodes.reference | nodes.title | pending_xref
            if isinstance(node.parent, above) or node.get("classes"):
                continue
            text = re.sub(r"[(\[].*", "", node.astext(), flags=re.DOTALL)
            for name in self.candidates(text, node):
                entry = self.find(name)
                if entry is not None:
                    page, target = entry.docname, entry.node_id
                    here, inner = self.env.docname, node.deepcopy()
                    node.replace_self(make_refnode(self.app.builder, here, page, target, inner))
                    break

    def candidates(self, text: str, node: nodes.literal) -> Iterator[str]:
        """Yield full names that a text may mean; warn where it names what does not exist."""
        if NAME.fullmatch(text):
            name = documented_name("fisherjax." + text.partition(".")[2])
            if not exists(name):
                logger.warning("fisherjax has no %r", text, location=node, type="ref")
            yield name
        elif (module := node.get("module")) and DOTTED.fullmatch(text):
            yield from map(documented_name, (f"{module}.{text}", f"fisherjax.{text}"))

    def find(self, name: str) -> Any:
        """Return the entry of a name in the reference, or that of the class it is a field of."""
        objects = self.env.get_domain("py").objects
        owner = objects.get(name.rpartition(".")[0])
        is_field = owner is not None and owner.objtype == "class"
        return objects.get(name) or (owner if is_field else None)


def split_at_module(name: str) -> tuple[str, list[str]]:
    """Return the longest part of a full name that is a module, and the rest."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            return public.load(".".join(parts[:end])).__name__, parts[end:]
    return "", parts


def documented_name(name: str) -> str:
    """Return the full name under which the reference has what is offered at `name`."""
    module, rest = split_at_module(name)
    if not module or not rest:
        return name
    first = public.documented().get(public.origin(module, rest[0]), f"{module}.{rest[0]}")
    return ".".join([first, *rest[1:]])


def exists(name: str) -> bool:
    """Check whether a full name leads somewhere: through modules, classes and their fields."""
    module, rest = split_at_module(name)
    try:
        reduce(_inside, rest, importlib.import_module(module or "builtins"))
    except AttributeError:
        return False
    except ModuleNotFoundError:
        # It lies in a module whose extra is not installed.
        return name.startswith(public.OPTIONAL)
    return True


def _inside(owner: Any, name: str) -> Any:
    if isinstance(owner, type) and name in getattr(owner, "__annotations__", {}):
        return getattr(owner, name, None)
    return getattr(owner, name)


def on_missing(
    _app: Sphinx, _env: BuildEnvironment, node: pending_xref, inner: nodes.Node
) -> nodes.Node | None:
    """Show types of signatures that are not public as text; what does not exist is a warning."""
    target = node.get("reftarget", "")
    is_own = node.get("refdomain") == "py" and target.startswith("fisherjax.")
    if not is_own or not exists(target):
        return None
    logger.info("not public, but in a signature: %s", target)
    return inner


def begin(app: Sphinx) -> None:
    """Write the pages that are not written by hand."""
    copy_notebooks(Path(app.srcdir))
    public.write(Path(app.srcdir) / "reference")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all of that."""
    app.add_config_value("repository", "", "env", str)
    app.add_role("fisherjax", code)
    app.add_post_transform(NamesToLinks)
    app.connect("builder-inited", begin)
    app.connect("source-read", on_read)
    app.connect("missing-reference", on_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
