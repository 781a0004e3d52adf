"""Describe the pictures that notebooks draw, for those who cannot see them."""

from docutils import nodes
from sphinx.application import Sphinx


def describe(_app: Sphinx, page: nodes.document) -> None:
    """Give each picture without words those of the heading above it."""
    for picture in page.findall(nodes.image):
        section = picture.parent
        while section is not None and not isinstance(section, nodes.section):
            section = section.parent
        if not picture.get("alt") and section is not None:
            picture["alt"] = f"figure that the code above draws, of “{section[0].astext()}”"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("doctree-read", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
