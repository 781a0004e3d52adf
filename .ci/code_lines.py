"""Count the lines of code of folders, without docstrings, comments and blank lines.

    python .ci/code_lines.py fisherjax experiments

prints files, lines of code, and the longest file with all its lines.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    r"""Return how many lines of a Python source hold code.

    Example:
        >>> code_lines("x = 1  # one\n# a comment\ny = 2\n")
        2
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is a docstring, of an attribute too.
        is_alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_alone and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def main(folders: list[str]) -> None:
    """Print one line for each folder."""
    for folder in folders:
        texts = {path: path.read_text() for path in sorted(Path(folder).rglob("*.py"))}
        longest = max(texts, key=lambda path: texts[path].count("\n"))
        lines = sum(map(code_lines, texts.values()))
        print(
            f"{folder}: {len(texts)} files, {lines:,} lines of code; the longest file is "
            f"{longest} with {texts[longest].count(chr(10))} lines"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
