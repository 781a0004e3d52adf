"""Four domains of English sentences with ratings of their sentiment, as clients.

A domain is a file of lines `id, rating, text`, separated by tabs. Sentences of one document (a
review or an article) share the first part of their id, before the underscore. The label is the sign
of the rating; sentences that are nearly neutral are left out.

Source: Hutto and Gilbert, VADER: a parsimonious rule-based model for sentiment analysis of social
media text, ICWSM 2014.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

DOMAINS = ("tweets", "film", "amazon", "nyt")


class Sentences(NamedTuple):
    """Labelled sentences of one domain.

    Attributes:
        texts: The N sentences.
        labels: 1 if the rating is positive, 0 if it is negative, int32 [N].
        documents: Number of the document of each sentence [N].
    """

    texts: tuple[str, ...]
    labels: np.ndarray
    documents: np.ndarray


def read(path: Path, least: float = 0.5) -> Sentences:
    """Read the sentences of a domain whose rating is at least `least` away from zero.

    Raises:
        ValueError: If a line is not an id, a rating and a text.
    """
    kept, numbers = [], {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        cells = line.split("\t")
        try:
            name, rating, text = cells[0], float(cells[1]), cells[2]
        except (IndexError, ValueError):
            raise ValueError(
                f"{path}, line {number}: found {line[:40]!r}; expected an id, a rating and a text "
                "separated by tabs"
            ) from None
        if abs(rating) >= least:
            document = numbers.setdefault(name.partition("_")[0], len(numbers))
            kept.append((text, rating > 0, document))
    texts, labels, documents = zip(*kept, strict=True)
    return Sentences(texts, np.array(labels, np.int32), np.array(documents))


def tokens(tokenizer: Path, texts: Sequence[str], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [N, most], cut and padded by zeros, and the lengths [N] before the cut.

    Sentences begin with [CLS] and end with [SEP], also where they are cut; both count.
    """
    from tokenizers import Tokenizer  # the extra `pretrained`

    read = Tokenizer.from_file(str(tokenizer))
    read.no_padding()
    read.no_truncation()
    lengths = [len(found.ids) for found in read.encode_batch(list(texts))]
    read.enable_truncation(most)
    read.enable_padding(length=most, pad_id=0)
    return np.array([found.ids for found in read.encode_batch(list(texts))]), np.array(lengths)


def split(documents: np.ndarray, tested: int, most: int, seed: int) -> tuple[np.ndarray, ...]:
    """Draw training and test rows of a domain; no document has rows in both.

    Whole documents, in random order, fill the test rows; training rows are drawn from the others.

    Args:
        documents: Number of the document of each row [N].
        tested: Number of test rows, at most.
        most: Number of training rows, at most.
        seed: Equal seeds give equal rows.

    Returns:
        Training rows and test rows, in random order.

    Raises:
        ValueError: If no document is left to train on.

    Example:
        >>> train, test = split(np.array([0, 0, 1, 2, 2]), tested=2, most=9, seed=0)
        >>> set(np.array([0, 0, 1, 2, 2])[train]) & set(np.array([0, 0, 1, 2, 2])[test])
        set()
    """
    random = np.random.default_rng(seed)
    # Each row has the place of its document in a random order of documents.
    _, numbers = np.unique(documents, return_inverse=True)
    places = random.permutation(numbers.max() + 1)[numbers]
    sizes = np.bincount(places)
    first = int(np.searchsorted(np.cumsum(sizes), tested)) + 1
    rows = random.permutation(len(documents))
    train, test = rows[places[rows] >= first], rows[places[rows] < first]
    if not len(train):
        raise ValueError(
            f"{tested} test sentences take all of {len(sizes)} documents, {len(rows)} sentences; "
            "expected fewer, so that some are left for training"
        )
    return train[:most], test[:tested]
