"""Turn docstrings into reStructuredText.

Docstrings here are plain text: single backticks are code, equations are indented, `|x|` is a norm.
"""

import re
from collections.abc import Iterator

SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):$")
ITEM = re.compile(r" *(?:\* |\d+\. )")
CODE = re.compile(r"(`[^`]+`)")
EMPHASIS = re.compile(r"(?<![\w*])(\*\w[^*]*\w\*)(?![\w*])")


def marked_up(lines: list[str]) -> list[str]:
    """Return a docstring as reStructuredText: escaped, with indented equations as literal blocks.

    Code in backticks may span lines, so that a paragraph is escaped as a whole.
    """
    made: list[str] = []
    in_section = False
    for paragraph in _paragraphs(lines):
        first = paragraph[0]
        if not first.startswith(" "):
            in_section = bool(SECTION.match(first))
        if first.lstrip().startswith(">>>"):
            made += paragraph
        elif first.startswith(" ") and not in_section and not _continues(made, first):
            made += [".. code-block:: text", "", *paragraph]
        else:
            made += escaped("\n".join(_dedented(paragraph))).split("\n")
        made.append("")
    return made


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    found: list[str] = []
    for line in [*lines, ""]:
        starts_example = line.lstrip().startswith(">>>") and found
        if found and (not line.strip() or (starts_example and ">>>" not in found[0])):
            yield found
            found = []
        if line.strip():
            found.append(line)


def _dedented(paragraph: list[str]) -> list[str]:
    """Take the indentation off a paragraph that hangs: it would become a definition."""
    first, *rest = paragraph
    hangs = (
        rest and not first.startswith(" ") and not SECTION.match(first) and not ITEM.match(first)
    )
    return [first, *(line.lstrip() for line in rest)] if hangs else paragraph


def _continues(made: list[str], first: str) -> bool:
    """Check whether an indented paragraph belongs to the item of a list before it."""
    before = next((line for line in reversed(made) if line and not line.startswith("    ")), "")
    return bool(ITEM.match(before)) and not first.startswith("    ")


def escaped(text: str) -> str:
    """Escape what reStructuredText would take for markup, outside code and *emphasis*."""
    parts = CODE.split(text)
    for place, part in enumerate(parts):
        if place % 2:
            after = parts[place + 1][:1]
            # A letter behind code, as in `jit`s, needs a mark that ends the code.
            parts[place] = " ".join(part.split()) + ("\\ " if after.isalnum() else "")
        else:
            parts[place] = "\n".join(map(_escaped_line, part.split("\n")))
    return "".join(parts)


def _escaped_line(line: str) -> str:
    bullet = ITEM.match(line)
    head = bullet[0] if bullet else ""
    pieces = EMPHASIS.split(line[len(head) :].replace("\\", "\\\\"))
    pieces[::2] = [re.sub(r"([*|]|_\b(?!\w))", r"\\\1", piece) for piece in pieces[::2]]
    return head + "".join(pieces)
