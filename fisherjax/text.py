"""Partition plays by their speaking roles: each role is a client with its own lines.

The text of a play is split into roles and the speech of a role into windows of characters. A model
predicts the next character at every position of a window.

Letters: M roles that are clients, N windows, L characters of a window, C of the alphabet.

Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017 (a client is a role of a play with at least two
lines); Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018 (80 characters predict the
next). Deviations: the plays are those of tiny Shakespeare, not the complete works; roles with too
few characters are dropped. As in McMahan et al., but not in LEAF, every position of a window is
predicted and windows do not overlap.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fisherjax import partition
from fisherjax._core import checks
from fisherjax.datasets.natural import cut

OPENINGS = (
    ("Coriolanus", "First Citizen:\nBefore we proceed any further"),
    ("Richard III", "GLOUCESTER:\nNow is the winter of our discontent"),
    ("Richard II", "KING RICHARD II:\nOld John of Gaunt"),
    ("Romeo and Juliet", "SAMPSON:\nGregory, o' my word"),
    ("Henry VI, Part 3", "WARWICK:\nI wonder how the king escaped"),
    ("The Winter's Tale", "ARCHIDAMUS:\nIf you shall chance, Camillo"),
    ("Measure for Measure", "DUKE VINCENTIO:\nEscalus."),
    ("The Taming of the Shrew", "SLY:\nI'll pheeze you"),
    ("The Tempest", "Master:\nBoatswain!"),
)
"""Name and first words of each play of tiny Shakespeare, which has no titles, in its order."""


class Role(NamedTuple):
    """All lines of one speaker in one play, joined by newlines.

    A speaker whose name changes is two roles: Gloucester becomes King Richard III.

    Attributes:
        play: Name of the play; "" if it is not known.
        speaker: Name of the speaker as the text writes it.
        text: The lines.
    """

    play: str
    speaker: str
    text: str


class Windows(NamedTuple):
    """Windows of the roles' speech, for `clients.federation(windows, windows.partition)`.

    Attributes:
        inputs: Numbers of characters [N, L], of the smallest unsigned type.
        targets: Number of the character after each of them, int32 [N, L].
        partition: The rows of each of M clients, consecutive windows in the order of its speech.
        roles: The M roles, in the order of the clients.
        alphabet: The C characters, in the order of their numbers.
    """

    inputs: np.ndarray
    targets: np.ndarray
    partition: list[np.ndarray]
    roles: tuple[Role, ...]
    alphabet: str

    @property
    def num_classes(self) -> int:
        """The number of characters C."""
        return len(self.alphabet)


def roles(text: str, openings: Sequence[tuple[str, str]] = OPENINGS) -> tuple[Role, ...]:
    r"""Collect the lines of every role.

    Paragraphs are separated by empty lines. A paragraph is a speech if its first line is a name and
    a colon and it has a second line; other paragraphs, such as stage directions and titles, are
    ignored. Roles are in the order of their first speech; a name in two plays is two roles.

    Args:
        text: Text of one or several plays, such as `datasets.load_text()`.
        openings: Name and first words of each play, with the first speaker's line, in the order of
            the text. With `()` the whole text is one play called "".

    Raises:
        ValueError: If there is no speech, or the openings are not found once each and in order.

    Example:
        >>> roles("ROMEO:\nIs the day so young?\n\nROMEO:\nAy me!", openings=())
        (Role(play='', speaker='ROMEO', text='Is the day so young?\nAy me!'),)
    """
    play, found, speeches = "", [], {}
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        heading, _, speech = paragraph.strip("\n").partition("\n")
        if len(heading) < 2 or not heading.endswith(":") or not speech:
            continue
        # The text has no titles: a play begins at its first words.
        for name, opening in openings:
            if f"{heading}\n{speech}".startswith(opening):
                play = name
                found.append(name)
        speeches.setdefault((play, heading[:-1]), []).append(speech)
    if not speeches:
        raise ValueError(
            "the text has no speech: expected paragraphs between empty lines, the first line of "
            "each a name and a colon, as in 'ROMEO:'"
        )
    expected = [name for name, _ in openings]
    if found != expected:
        raise ValueError(
            f"the openings of the plays {found} were found, in this order; expected {expected}, "
            "each once: pass the openings of this text, or openings=() to read it as one play"
        )
    return tuple(Role(own, speaker, "\n".join(lines)) for (own, speaker), lines in speeches.items())


def windows(
    roles: Sequence[Role],
    context: int = 80,
    min_characters: int = 2000,
    alphabet: str | None = None,
) -> Windows:
    """Cut the speech of each role that is long enough into windows; each role is a client.

        x_k = c[kL : kL + L],    y_k = c[kL + 1 : kL + L + 1],    k = 0, ..., floor((n - 1) / L) - 1

    Here c are the n characters of a role. Characters after the last window are dropped, so that no
    window is padded.

    Args:
        roles: Roles that the function `roles` returned.
        context: Number of characters L of a window (default 80).
        min_characters: Roles with fewer characters are dropped (default 2000), and so are roles
            too short for one window.
        alphabet: The characters that may occur. None takes the sorted characters of all roles,
            including those that are dropped.

    Raises:
        ValueError: If context is below 1, no role is long enough, or a character is not in the
            alphabet.

    Example:
        >>> cut = windows([Role("", "ROMEO", "Ay me!")], context=2, min_characters=1)
        >>> [decode(row, cut.alphabet) for row in (*cut.inputs, *cut.targets)]
        ['Ay', ' m', 'y ', 'me']
    """
    checks.count("context", context)
    # One character more than a window, as the target of its last character.
    smallest = max(min_characters, context + 1)
    kept = tuple(role for role in roles if len(role.text) >= smallest)
    if not kept:
        longest = max((len(role.text) for role in roles), default=0)
        raise ValueError(
            f"none of {len(roles)} roles has min_characters={min_characters} characters and fills "
            f"a window of context={context} and one more: the longest has {longest}. Ask for "
            f"min_characters up to {longest} and a context below it"
        )
    # All roles count, so that min_characters does not change the numbers of characters.
    if alphabet is None:
        alphabet = "".join(sorted(set().union(*(role.text for role in roles))))
    cuts = [cut(encode(role.text, alphabet), context) for role in kept]
    inputs, targets = zip(*cuts, strict=True)
    owners = np.repeat(np.arange(len(kept)), [len(rows) for rows in inputs])
    return Windows(
        np.concatenate(inputs), np.concatenate(targets), partition.natural(owners), kept, alphabet
    )


def encode(text: str, alphabet: str) -> np.ndarray:
    """Return the numbers [n] of a text's characters, of the smallest unsigned type for 0 to C - 1.

    Raises:
        ValueError: If a character is not in the alphabet, or the alphabet has one twice.

    Example:
        >>> encode("abba", "ab")
        array([0, 1, 1, 0], dtype=uint8)
    """
    numbers = {character: number for number, character in enumerate(alphabet)}
    if len(numbers) < len(alphabet):
        raise ValueError(f"the alphabet {alphabet!r} has a character twice: write each only once")
    unknown = "".join(sorted(set(text) - set(numbers)))
    if unknown:
        raise ValueError(
            f"the text has the characters {unknown!r}, which are not among the {len(alphabet)} of "
            f"the alphabet {alphabet!r}: add them to it or drop them from the text"
        )
    dtype = np.min_scalar_type(max(len(alphabet) - 1, 0))
    return np.array([numbers[character] for character in text], dtype)


def decode(numbers: np.ndarray, alphabet: str) -> str:
    """Return the text of numbers of characters [n], as `encode` returns them."""
    return "".join(alphabet[number] for number in numbers)
