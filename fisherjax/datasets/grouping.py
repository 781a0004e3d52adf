"""Group texts by their clients on disk, and read the pages of C4 and CC-News with their domains."""

import contextlib
import gzip
import json
import os
import sqlite3
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from fisherjax._core import checks
from fisherjax.datasets import _records

_TABLES = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL,
    serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL,
    num_examples INTEGER NOT NULL);
PRAGMA synchronous = OFF;
"""
_FINISH = """
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
INSERT INTO client_metadata
    SELECT client_id, split_name, COUNT(*) FROM examples GROUP BY split_name, client_id;
"""

_DAMAGES = EOFError, zlib.error, gzip.BadGzipFile, KeyError, ValueError


def group(
    records: Iterable[tuple[str, str]],
    folder: str | os.PathLike,
    *,
    split: str = "train",
    shards: int = 16,
) -> list[Path]:
    r"""Group texts by client into shards on disk, once, for `texts`.

    The records are read one after the other, and never are more of them in memory. All texts of a
    client are in one shard, chosen by the CRC-32 of its name.

    Args:
        records: Pairs (name of the client, text), in any order, such as `c4_pages(files)`.
        folder: Folder of the shards, `clients-00003-of-00016.sqlite`; made if it does not exist.
        split: Name of the split; another split needs another folder.
        shards: Number of files (default 16). Several processes may read different ones.

    Returns:
        The shards.

    Raises:
        FileExistsError: If the folder has shards.
        TypeError: If a name or a text is no text.
        ValueError: If there is no record, or the number of shards is below 1.

    Example:
        >>> import tempfile
        >>> from fisherjax.datasets.natural import texts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pages = [("a.org", "One."), ("b.org", "Two."), ("a.org", "Three.")]
        ...     _ = group(pages, folder, shards=1)
        ...     clients = texts(folder, context=4)
        ...     print(clients.name(0), clients.sizes, bytes(clients.read(0)[0]))
        a.org [2 1] b'One.\nThr'
    """
    checks.count("shards", shards)
    folder = Path(folder).expanduser()
    if existing := sorted(folder.glob("*.sqlite")):
        raise FileExistsError(f"{existing[0]} exists: choose another folder, or remove its shards")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"clients-{k:05}-of-{shards:05}.sqlite" for k in range(shards)]
    # What an interrupted call leaves behind has another name, and is written anew.
    unfinished = [file.with_suffix(".unfinished") for file in files]
    with contextlib.ExitStack() as stack:
        bases = []
        for file in unfinished:
            file.unlink(missing_ok=True)
            bases.append(stack.enter_context(contextlib.closing(sqlite3.connect(file))))
            bases[-1].executescript(_TABLES)
        is_empty = True
        for client, text in records:
            is_empty = False
            if not (isinstance(client, str) and isinstance(text, str)):
                raise TypeError(
                    f"a record is ({client!r:.40}, {text!r:.40}); expected the name of its client "
                    "and a text"
                )
            row = split, client, _records.of_text("text", text)
            own = bases[zlib.crc32(client.encode()) % shards]
            own.execute("INSERT INTO examples VALUES (?, ?, ?)", row)
        if is_empty:
            raise ValueError("there is no record to group; expected pairs (client, text)")
        for base in bases:
            base.executescript(_FINISH)
            base.commit()
    for old, new in zip(unfinished, files, strict=True):
        old.rename(new)
    return files


def c4_pages(files: Iterable[str | os.PathLike]) -> Iterator[tuple[str, str]]:
    """Read the domain and the text of each page of C4.

    The form is that which AllenAI distributes, `c4-train.00000-of-01024.json.gz`: a page a line, a
    JSON object with "url" and "text". The domain is the URL's host. A line with "domain" instead
    of "url", as of Hugging Face's `cc_news` written with `to_json`, is read too, and so are files
    that are not compressed.

    Args:
        files: The shards; they are read one after the other, a line at a time.

    Yields:
        Pairs (domain, text), for `group`.

    Raises:
        FileNotFoundError: If a shard does not exist.
        ValueError: If a shard is damaged or has no line, or a line has no domain or no text; named
            by its number.

    Source: Raffel et al., Exploring the Limits of Transfer Learning, JMLR 2020. By domain:
    Charles et al., Towards Federated Foundation Models, NeurIPS 2023.
    """
    if isinstance(files, (str, os.PathLike)):
        raise TypeError(f"files is {str(files)!r}; expected several, such as [{str(files)!r}]")
    for file in map(Path, files):
        number = 0
        try:
            with _decompressed(file) as lines:
                for line in lines:
                    number += 1
                    yield _page(json.loads(line), "text", "domain")
            if not number:
                raise ValueError("the file has no line")
        except _DAMAGES as error:
            raise ValueError(f"{file}, at line {number}: {_described(error)}") from error


def cc_news_pages(archive: str | os.PathLike) -> Iterator[tuple[str, str]]:
    """Read the domain and the text of each article of CC-News.

    The form is `cc_news.tar.gz`, an article a file, the JSON object of news-please with
    "source_domain" and "maintext". An article without text has the text "".

    Args:
        archive: The archive, which is read once from its beginning to its end, not unpacked.

    Yields:
        Pairs (domain, text), for `group`.

    Raises:
        FileNotFoundError: If the archive does not exist.
        ValueError: If the archive is damaged, or an article has no domain; named by its file.

    Source: Hamborg et al., news-please, 2017; its articles of Common Crawl in Hugging Face's
    `cc_news`.
    """
    name = "its beginning"
    try:
        with _decompressed(Path(archive)) as content:
            with tarfile.open(fileobj=content, mode="r|*", tarinfo=_Member) as members:
                for member in members:
                    name = repr(member.name)
                    if member.isreg() and member.name.endswith(".json"):
                        file: Any = members.extractfile(member)
                        yield _page(json.loads(file.read()), "maintext", "source_domain")
            # The checksum of a compressed file is at its end, behind that of the archive.
            while content.read(2**20):
                pass
    except (*_DAMAGES, tarfile.TarError) as error:
        raise ValueError(f"{archive}, at {name}: {_described(error)}") from error


class _Member(tarfile.TarInfo):
    """A member of an archive whose headers are all sound; tarfile stops at one that is not."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise  # the end of the archive
            raise tarfile.ReadError(f"the archive is cut or damaged ({error})") from error


def _decompressed(file: Path) -> IO[bytes]:
    """Open a file, which is compressed if its name says so."""
    return cast("IO[bytes]", gzip.open(file) if file.suffix == ".gz" else open(file, "rb"))


def _page(page: Any, text: str, domain: str) -> tuple[str, str]:
    if not isinstance(page, dict):
        raise ValueError(f"expected a JSON object, not {page!r:.40}")
    own = page.get(domain) or urlsplit(_text("url", page["url"])).hostname
    if not own:
        raise ValueError(f"the URL {page['url']!r} has no host")
    return _text(domain, own), _text(text, page[text])


def _text(name: str, value: str | None) -> str:
    """Return the text of a field, "" for null."""
    if not isinstance(value, str | None):
        raise ValueError(f"{name!r} is {value!r:.40}; expected a text")
    (value or "").encode()  # half a surrogate pair is no text, which only JSON can write
    return value or ""


def _described(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no {error} in the JSON object"
    return f"{error}; download the file again if it is damaged"
