"""Show text that came from elsewhere, such as names of clients and leaves, in errors and tables."""

import contextlib
from collections.abc import Iterator
from typing import Any

_MOST = 2000  # characters of an error


def shown(text: Any) -> str:
    r"""Return text with escapes for all characters that cannot be printed as they are.

    A line break in a name could forge lines of a table, and a control character could change what
    a terminal shows; a lone surrogate cannot be encoded at all.

    Example:
        >>> print(shown("ann\x1b[31m\n"))
        ann\x1b[31m\n
    """
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in str(text))


@contextlib.contextmanager
def shown_errors() -> Iterator[None]:
    """Show the text of errors, without their middle if they are very long."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        # An error with several arguments, such as that of a system call, has no text of ours.
        if len(error.args) == 1:
            text = shown(error)
            if len(text) > _MOST:
                text = f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
            error.args = (text,)
        raise
