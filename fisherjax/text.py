"""Plays as the data of natural clients: each speaking role holds what it says.

A play's text is cut into roles, a role's speech into windows of characters, and a model predicts
the next character everywhere in a window.

Letters: M roles kept as clients, N windows, L characters of a window, C of the alphabet.

Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017 (a client is a role of a play with at least two
lines); Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018 (80 characters predict the
next). Deviations: the plays are those of tiny Shakespeare, not the complete works; small roles are
dropped by their number of characters; and, as in McMahan et al. but not LEAF, every position of a
window is predicted and windows do not overlap.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fisherjax import partition

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
"""How each play of tiny Shakespeare, which names none, opens, in the order of that text."""


class Role(NamedTuple):
    """What one speaker says in one play ("" where none is known): all lines, joined by newlines.

    A speaker whose name changes is two roles: Gloucester becomes King Richard III.
    """

    play: str
    speaker: str
    text: str


class Windows(NamedTuple):
    """The speech of roles as examples, for `clients.federation(windows, windows.partition)`.

    Attributes:
        inputs: Numbers of characters [N, L], of the smallest unsigned type.
        targets: The character after each, int32 [N, L].
        partition: For each of M clients its rows, consecutive windows in the order of its speech.
        roles: The M roles behind them.
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
    r"""Collect what every role says.

    Paragraphs are separated by empty lines. One whose first line is a name and a colon is a speech;
    others (stage directions, titles) belong to nobody, and a speech without words is none. The
    roles come in the order of their first speech; one name in two plays is two.

    Args:
        text: Plays, for instance `datasets.load_text()`.
        openings: For each play its name and how its first speech begins, with the speaker's line,
            in the order of the text. With `()` the whole text is one play called "".

    Raises:
        ValueError: If there is no speech, or the openings are not found once each, in order.

    Example:
        >>> roles("ROMEO:\nIs the day so young?\n\nROMEO:\nAy me!", openings=())
        (Role(play='', speaker='ROMEO', text='Is the day so young?\nAy me!'),)
    """
    play, found, speeches = "", [], {}
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        heading, _, speech = paragraph.strip("\n").partition("\n")
        if len(heading) < 2 or not heading.endswith(":") or not speech:
            continue
        # The text names no play: a play begins where its first words are spoken.
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
    """Cut the speech of the larger roles into windows, role by role, each a client.

        x_k = c[kL : kL + L],    y_k = c[kL + 1 : kL + L + 1],    k = 0, ..., floor((n - 1) / L) - 1

    for a role that says the n characters c. The rest is dropped, so that nothing is padded.

    Args:
        roles: What `roles` returned.
        context: L, the characters of a window.
        min_characters: Roles that say less are dropped, and so are those without one window.
        alphabet: The characters that may occur; None takes all of any role, dropped or not, sorted.

    Raises:
        ValueError: If context is below 1, no role is long enough, or a character has no number.

    Example:
        >>> cut = windows([Role("", "ROMEO", "Ay me!")], context=2, min_characters=1)
        >>> [decode(row, cut.alphabet) for row in (*cut.inputs, *cut.targets)]
        ['Ay', ' m', 'y ', 'me']
    """
    if context < 1:
        raise ValueError(f"context is {context}, expected a window of at least 1 character")
    # One more than a window: the target of its last character.
    smallest = max(min_characters, context + 1)
    kept = tuple(role for role in roles if len(role.text) >= smallest)
    if not kept:
        longest = max((len(role.text) for role in roles), default=0)
        raise ValueError(
            f"none of {len(roles)} roles says min_characters={min_characters} characters and fills "
            f"a window of context={context} and one more: the longest says {longest}. Ask for "
            f"min_characters up to {longest} and a context below it"
        )
    # Of all roles, so that the choice of who is kept does not change the numbers of characters.
    if alphabet is None:
        alphabet = "".join(sorted(set().union(*(role.text for role in roles))))
    inputs, targets = [], []
    for role in kept:
        numbers = encode(role.text, alphabet)
        end = (len(numbers) - 1) // context * context
        inputs.append(numbers[:end].reshape(-1, context))
        targets.append(numbers[1 : end + 1].reshape(-1, context))
    owners = np.repeat(np.arange(len(kept)), [len(own) for own in inputs])
    targets = np.concatenate(targets).astype(np.int32)
    return Windows(np.concatenate(inputs), targets, partition.natural(owners), kept, alphabet)


def encode(text: str, alphabet: str) -> np.ndarray:
    """Turn a text into its characters' numbers [n], of the smallest unsigned type for 0 to C - 1.

    Raises:
        ValueError: If a character is not in the alphabet, or one is there twice.

    Example:
        >>> encode("abba", "ab")
        array([0, 1, 1, 0], dtype=uint8)
    """
    numbers = {character: number for number, character in enumerate(alphabet)}
    if len(numbers) < len(alphabet):
        raise ValueError(f"the alphabet {alphabet!r} names a character twice: name each once")
    unknown = "".join(sorted(set(text) - set(numbers)))
    if unknown:
        raise ValueError(
            f"the text has the characters {unknown!r}, which are not among the {len(alphabet)} of "
            f"the alphabet {alphabet!r}: add them to it or drop them from the text"
        )
    dtype = np.min_scalar_type(max(len(alphabet) - 1, 0))
    return np.array([numbers[character] for character in text], dtype)


def decode(numbers: np.ndarray, alphabet: str) -> str:
    """Turn numbers of characters [n], as `encode` gives them, back into a text."""
    return "".join(alphabet[number] for number in numbers)
