"""Write equations as MathML, which browsers show by themselves: the site needs no network for them.

An equation that docutils cannot translate is a warning, and stays as it is written.
"""

import html
import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
# TeX takes the digits of \frac12 apart, which docutils reads as twelve.
FRACTION = re.compile(r"(\\[td]?frac) *(\d) *(\d)")
BIG = re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])")  # delimiters grow by themselves


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """Write an equation inside a line."""
    writer.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """Write an equation of its own lines, which scrolls where the page is narrower."""
    writer.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def mathml(node: nodes.Node, *, as_block: bool) -> str:
    """Return the MathML of an equation."""
    tex = FRACTION.sub(r"\1{\2}{\3}", BIG.sub("", node.astext()))
    try:
        return tex2mathml(tex, as_block=as_block)
    except MathError as error:
        logger.warning("equation: %s", error, location=node, type="math")
        return f"<code>{html.escape(node.astext())}</code>"


def setup(app: Sphinx) -> dict[str, bool]:
    """Offer `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
