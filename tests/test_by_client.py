"""Clients on disk: small files of each form, written here without the library, and damaged ones."""

import contextlib
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import tarfile
import tracemalloc

import numpy as np
import pytest
from tensorflow_datasets.proto import tf_example_pb2

from fisherjax import datasets

# The tables as TensorFlow Federated documents them.
TABLES = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL,
    serialized_example_proto BLOB NOT NULL);
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL,
    num_examples INTEGER NOT NULL);
"""


def record(**features):
    example = tf_example_pb2.Example()
    for name, value in features.items():
        feature = example.features.feature[name]
        if isinstance(value, str):
            feature.bytes_list.value.append(value.encode())
        elif isinstance(value, int):
            feature.int64_list.value.append(value)
        else:
            feature.float_list.value.extend(value)
    return example.SerializeToString()


def write(path, clients, split="train"):
    """Write the records of clients, by name, into a file of TensorFlow Federated's form."""
    base = sqlite3.connect(path)
    base.executescript(TABLES)
    rows = [(split, name, own) for name, records in clients.items() for own in records]
    # Clients' records need not follow each other.
    base.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows[::2] + rows[1::2])
    counts = [(name, split, len(records)) for name, records in clients.items()]
    base.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counts)
    base.commit()
    base.close()


# Images


@pytest.fixture(scope="module")
def writers():
    random = np.random.default_rng(0)
    sizes = {"f0002_41": 3, "f0001_10": 5, "f0000_14": 0}
    return {
        name: (random.integers(0, 256, (n, 28, 28, 1), np.uint8), random.integers(0, 62, n))
        for name, n in sizes.items()
    }


@pytest.fixture
def emnist_dir(tmp_path, writers):
    records = {
        name: [
            record(pixels=np.float32(image.ravel() / 255).tolist(), label=int(label))
            for image, label in zip(images, labels, strict=True)
        ]
        for name, (images, labels) in writers.items()
    }
    write(tmp_path / "emnist_all.sqlite", records, "all_train")
    return tmp_path


def test_writers_of_emnist_are_those_of_the_file(emnist_dir, writers):
    clients = datasets.emnist(emnist_dir)
    assert [clients.name(k) for k in range(clients.num_clients)] == ["f0001_10", "f0002_41"]
    np.testing.assert_array_equal(clients.sizes, [5, 3])
    for place in range(2):
        images, labels = clients.read(place)
        assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
        expected = writers[clients.name(place)]
        order = np.lexsort((labels, images.sum((1, 2, 3))))
        other = np.lexsort((expected[1], expected[0].sum((1, 2, 3))))
        np.testing.assert_array_equal(images[order], expected[0][other])
        np.testing.assert_array_equal(labels[order], expected[1][other])


def test_a_user_without_examples_is_read_as_none_where_it_is_asked_for(emnist_dir):
    clients = datasets.emnist(emnist_dir, min_examples=0)
    images, labels = clients.read(0)
    assert clients.name(0) == "f0000_14"
    assert (images.shape, labels.shape) == ((0, 28, 28, 1), (0,))


def test_a_cap_takes_the_first_examples_or_draws_other_ones_by_the_seed(emnist_dir):
    clients = datasets.emnist(emnist_dir)
    whole = clients.read(0)[1].tolist()
    assert clients.read(0, 2)[1].tolist() == whole[:2]
    drawn = [clients.read(0, 4, seed)[1].tolist() for seed in range(8)]
    assert all(len(own) == 4 and set(own) <= set(whole) for own in drawn)
    assert len({tuple(own) for own in drawn}) > 1
    assert drawn[3] == clients.read(0, 4, 3)[1].tolist()


def test_a_client_without_more_than_the_cap_is_read_in_order_whatever_the_seed(tmp_path):
    """Rounds of clients on disk then have the minibatches of those in memory."""
    datasets.group([("a", f"text {k}") for k in range(9)], tmp_path, shards=1)
    clients = datasets.texts(tmp_path, context=4)
    whole = clients.read(0)[0]
    np.testing.assert_array_equal(clients.read(0, len(whole), seed=1)[0], whole)
    capped = [clients.read(0, len(whole) - 1, seed)[0].tolist() for seed in range(4)]
    assert len({str(own) for own in capped}) == 4  # fewer texts than the cap do not fix them


# Texts


def test_sentences_of_stack_overflow_follow_one_another_in_windows(tmp_path):
    say = lambda text: record(tokens=text, title="a title", score=3)  # noqa: E731
    users = {"7": ["edit :", "thanks ."], "12": ["no"]}
    write(tmp_path / "stackoverflow.sqlite", {k: [*map(say, v)] for k, v in users.items()})
    clients = datasets.stack_overflow(tmp_path, context=4)
    assert [clients.name(k) for k in range(2)] == ["12", "7"]
    inputs, targets = clients.read(1)
    assert bytes(inputs) == b"edit :\nthank"
    assert bytes(targets.astype(np.uint8)) == b"dit :\nthanks"
    assert clients.read(0)[0].shape == (0, 4)  # three bytes fill no window


def test_another_tokenizer_gives_its_own_tokens(tmp_path):
    write(tmp_path / "a.sqlite", {"x": [record(text="one two three"), record(text="")]})
    encode = lambda text: np.array([len(word) for word in text.split()], np.int32)  # noqa: E731
    inputs, targets = datasets.texts(tmp_path / "a.sqlite", context=1, encode=encode).read(0)
    assert (inputs.tolist(), targets.tolist()) == ([[3], [3]], [[3], [5]])


def test_tokens_stay_integers_where_a_tokenizer_returns_lists(tmp_path):
    """A list without tokens, as of an empty text, is an array of floats."""
    write(tmp_path / "a.sqlite", {"x": [record(text="one two three")], "y": [record(text=" ")]})
    encode = lambda text: [len(word) for word in text.split()]  # noqa: E731
    clients = datasets.texts(tmp_path / "a.sqlite", context=1, encode=encode)
    assert [clients.read(k)[0].dtype for k in range(2)] == [np.int32, np.int32]
    halves = datasets.texts(tmp_path / "a.sqlite", encode=lambda text: [0.5] * len(text))
    with pytest.raises(ValueError, match=r"client 'x'.*encode returned float64\[13\]; expected"):
        halves.read(0)


PAGES = {
    "en.example.org": ["A page of text.", "Another one, longer."],
    "b.com": ["Words of b."],
    "empty.net": ["", ""],
}


def shuffled_pages():
    pairs = [(domain, text) for domain, texts in PAGES.items() for text in texts]
    return [pairs[k] for k in np.random.default_rng(1).permutation(len(pairs))]


@pytest.fixture
def c4_files(tmp_path):
    lines = [
        json.dumps({"url": f"https://{domain}:443/a?b", "text": text, "timestamp": "2019-04-25"})
        for domain, text in shuffled_pages()
    ]
    files = [tmp_path / f"c4-train.{k:05}-of-00002.json.gz" for k in range(2)]
    for file, own in zip(files, (lines[:3], lines[3:]), strict=True):
        with gzip.open(file, "wt") as out:
            out.write("\n".join(own) + "\n")
    return files


def test_pages_of_c4_have_the_hosts_of_their_urls(c4_files):
    assert list(datasets.c4_pages(c4_files)) == shuffled_pages()


def test_lines_with_a_domain_are_read_too(tmp_path):
    path = tmp_path / "cc_news.json"
    path.write_text("".join(json.dumps({"domain": d, "text": t}) + "\n" for d, t in [("a", "b")]))
    assert list(datasets.c4_pages([path])) == [("a", "b")]


@pytest.fixture
def cc_news(tmp_path):
    with tarfile.open(tmp_path / "cc_news.tar.gz", "w:gz") as archive:
        for number, (domain, text) in enumerate(shuffled_pages()):
            page = {"source_domain": domain, "maintext": text or None, "url": "https://x.y/z"}
            content = json.dumps(page).encode()
            member = tarfile.TarInfo(f"cc_download_articles/{domain}/{number}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        archive.addfile(tarfile.TarInfo("cc_download_articles/README"))
    return tmp_path / "cc_news.tar.gz"


def test_articles_of_cc_news_have_their_source_domains(cc_news):
    assert list(datasets.cc_news_pages(cc_news)) == shuffled_pages()


@pytest.mark.parametrize("shards", [1, 3])
def test_grouping_keeps_every_text_once_and_in_order_for_each_client(tmp_path, shards):
    files = datasets.group(shuffled_pages(), tmp_path / "shards", shards=shards)
    assert len(files) == shards
    clients = datasets.texts(tmp_path / "shards", context=1)
    expected = {}
    for domain, text in shuffled_pages():
        expected[domain] = expected.get(domain, b"") + (text.encode() + b"\n" if text else b"")
    found = {clients.name(k): clients.read(k) for k in range(clients.num_clients)}
    assert found.keys() == expected.keys()
    for domain, (inputs, targets) in found.items():
        assert bytes(inputs) == expected[domain][:-1], domain
        assert bytes(targets.astype(np.uint8)) == expected[domain][1:]
    assert sum(clients.sizes) == len(shuffled_pages())


def test_a_domain_without_text_has_no_example(tmp_path):
    datasets.group(shuffled_pages(), tmp_path, shards=1)
    clients = datasets.texts(tmp_path, context=4)
    names = [clients.name(k) for k in range(3)]
    assert clients.read(names.index("empty.net"))[0].shape == (0, 4)


# Memory


def test_a_capped_client_reads_no_more_texts_than_it_needs(tmp_path):
    """The client has 20 MB of text; four windows of 128 tokens are read."""
    page = "x" * 100_000
    datasets.group((("big.org", page) for _ in range(200)), tmp_path, shards=1)
    clients = datasets.texts(tmp_path)
    tracemalloc.start()
    inputs, _ = clients.read(0, most=4, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert inputs.shape == (4, 128)
    assert peak < 1_500_000


WHOLE = """
import resource, sys
import numpy as np
from tensorflow_datasets.proto import tf_example_pb2
from fisherjax import datasets

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
page = "".join(map(str, range(20_000)))  # 99 kB
pages = ((f"domain{k % 500}.org", page) for k in range(4000))
files = datasets.group(pages, sys.argv[1], shards=4)
grouped = peak()
clients = datasets.texts(sys.argv[1])
for number in range(clients.num_clients):
    clients.read(number, most=16, seed=number)
print(sum(file.stat().st_size for file in files) / 2**20, grouped - before, peak() - before)
"""


@pytest.mark.long
def test_data_larger_than_memory_never_load(tmp_path):
    """Peak resident memory of a process that groups 340 MiB and reads all clients of them."""
    command = [sys.executable, "-c", WHOLE, str(tmp_path / "shards")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    size, grouping, reading = map(float, result.stdout.split())
    assert size > 300
    assert grouping <= reading < size / 10


# Faults


def test_a_shard_that_is_missing_is_named_with_what_to_do(tmp_path):
    files = datasets.group(shuffled_pages(), tmp_path, shards=3)
    clients = datasets.texts(tmp_path, context=2)
    files[1].rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"00001-of-00003.*does not exist: put it back"):
        datasets.texts(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"00001-of-00003.*last state"):
        [*map(clients.read, range(clients.num_clients))]
    (tmp_path / "elsewhere").rename(files[1])
    assert len([*map(clients.read, range(clients.num_clients))]) == 3


def test_an_incomplete_file_is_named(emnist_dir):
    path = emnist_dir / "emnist_all.sqlite"
    clients = datasets.emnist(emnist_dir)
    base = sqlite3.connect(path)
    base.execute("DELETE FROM examples WHERE client_id = 'f0001_10' AND rowid % 2")
    base.commit()
    base.close()
    with pytest.raises(ValueError, match=r"f0001_10.*emnist_all.*of its 5 records.*incomplete"):
        clients.read(0)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "emnist_all.sqlite").write_bytes(b"\xfd7zXZ\x00" * 1000)  # still compressed
    with pytest.raises(ValueError, match=r"emnist_all.sqlite cannot be read as SQLite.*decompress"):
        datasets.emnist(tmp_path)


def test_records_of_another_data_set_are_named(tmp_path):
    write(tmp_path / "emnist_all.sqlite", {"a": [record(tokens="x")]}, "all_train")
    with pytest.raises(ValueError, match=r"client 'a'.*\['tokens'\]; expected \['pixels', 'label'"):
        datasets.emnist(tmp_path).read(0)
    write(tmp_path / "other.sqlite", {"a": [b"no record"]})
    with pytest.raises(ValueError, match=r"client 'a' of .*other.sqlite.*no tf.train.Example"):
        datasets.texts(tmp_path / "other.sqlite").read(0)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"pixels": [200.0] * 784, "label": 3}, "784 pixels; expected 784 from 0 to 1"),
        ({"pixels": [float("nan")] * 784, "label": 3}, "expected 784 from 0 to 1"),
        ({"pixels": [1.0] * 783, "label": 3}, "783 pixels; expected 784"),
        ({"pixels": "x", "label": 3}, "'pixels' of a record is a bytes_list; expected a float_li"),
        ({"pixels": [1.0] * 784, "label": [3.5]}, "'label' of a record is a float_list"),
        ({"pixels": [1.0] * 784, "label": 62}, r"label \[62\]; expected one from 0 to 61"),
    ],
)
def test_images_of_another_scale_are_refused_instead_of_read_as_others(tmp_path, features, words):
    write(tmp_path / "emnist_all.sqlite", {"a": [record(**features)]}, "all_train")
    with pytest.raises(ValueError, match=rf"client 'a' of .*emnist_all.sqlite.*{words}"):
        datasets.emnist(tmp_path).read(0)


def test_numbers_are_no_text(tmp_path):
    write(tmp_path / "a.sqlite", {"x": [record(text=5)]})
    with pytest.raises(ValueError, match=r"'text' of a record is a int64_list; expected a bytes"):
        datasets.texts(tmp_path / "a.sqlite").read(0)


def test_a_shard_that_was_replaced_is_named(tmp_path):
    (file,) = datasets.group(shuffled_pages(), tmp_path, shards=1)
    clients = datasets.texts(tmp_path)
    file.unlink()
    datasets.group([("z", "one")], tmp_path, shards=1)
    with pytest.raises(ValueError, match=r"00000-of-00001.sqlite.*has changed, and row 2 is gone"):
        [*map(clients.name, range(3))]


def test_wrong_places_splits_and_folders_are_named(emnist_dir, tmp_path):
    clients = datasets.emnist(emnist_dir)
    with pytest.raises(IndexError, match="client"):
        clients.read(2)
    with pytest.raises(ValueError, match="most"):
        clients.read(0, 0)
    with pytest.raises(ValueError, match=r"no client .* 'train'; it has the splits \['all_train'"):
        datasets.emnist(emnist_dir, "train")
    with pytest.raises(FileNotFoundError, match=r"stackoverflow.sqlite does not exist: download"):
        datasets.stack_overflow(tmp_path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file \*.sqlite: see datasets.group"):
        datasets.texts(tmp_path / "nothing")
    with pytest.raises(ValueError, match="context"):
        datasets.texts(emnist_dir, context=0)


def test_grouping_refuses_no_records_and_a_folder_in_use(tmp_path):
    with pytest.raises(ValueError, match="no record to group"):
        datasets.group([], tmp_path, shards=1)
    datasets.group([("a", "b")], tmp_path, shards=1)  # what was left unfinished is no hindrance
    with pytest.raises(FileExistsError, match=r"00000-of-00001.sqlite exists"):
        datasets.group([("a", "b")], tmp_path, shards=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"text": "x"}', "line 2: there is no 'url'"),
        ('{"text": "x", "url": "/a"}', "line 2: the URL '/a' has no host"),
        ('{"url": "https://a.b/c"}', "line 2: there is no 'text'"),
        ('{"url": "https://a.b/c", "text": ["x"]}', "line 2: 'text' is .*; expected a text"),
        ('{"url": 5, "text": "x"}', "line 2: 'url' is 5; expected a text"),
        ('{"domain": 5, "text": "x"}', "line 2: 'domain' is 5; expected a text"),
        ('{"domain": "a", "text": "\\ud800"}', "line 2: .*surrogates not allowed"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, words):
    path = tmp_path / "c4.json"
    path.write_text('{"text": "x", "url": "https://a.b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"c4.json, at {words}"):
        list(datasets.c4_pages([path]))


def test_a_shard_that_was_cut_is_named(c4_files, cc_news):
    for path, read in (
        (c4_files[1], lambda x: datasets.c4_pages([x])),
        (cc_news, datasets.cc_news_pages),
    ):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=rf"{path.name}, at .*download the file again"):
            list(read(path))
    with pytest.raises(FileNotFoundError):
        list(datasets.c4_pages([c4_files[0].with_name("none.json.gz")]))
    with pytest.raises(TypeError, match=r"files is '.*'; expected several, such as \['"):
        next(datasets.c4_pages(c4_files[0]))


def test_an_empty_shard_is_named(tmp_path):
    (tmp_path / "c4.json.gz").touch()  # reads as no line, also in gzip
    with pytest.raises(ValueError, match=r"c4.json.gz, at line 0: the file has no line"):
        list(datasets.c4_pages([tmp_path / "c4.json.gz"]))


def test_no_archive_loses_articles_without_a_word(cc_news, tmp_path):
    """Cut at every block, also between two articles, or with a header that is not sound."""
    content = gzip.decompress(cc_news.read_bytes())
    path = tmp_path / "cut.tar"
    for cut in range(0, len(content) // 512 * 512, 512):
        path.write_bytes(content[:cut])
        with contextlib.suppress(ValueError):
            assert list(datasets.cc_news_pages(path)) == shuffled_pages()
    second = content.index(b"cc_download", 512)
    path.write_bytes(content[:second] + b"x" + content[second + 1 :])
    with pytest.raises(ValueError, match=r"cut.tar, at .*cut or damaged"):
        list(datasets.cc_news_pages(path))


def test_the_checksum_of_a_compressed_archive_is_read(cc_news):
    content = bytearray(cc_news.read_bytes())
    content[-5] ^= 1
    cc_news.write_bytes(content)
    with pytest.raises(ValueError, match=r"cc_news.tar.gz, at .*"):
        list(datasets.cc_news_pages(cc_news))


def test_a_link_in_an_archive_is_no_article(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("b.json")
        member.type, member.linkname = tarfile.SYMTYPE, "../../elsewhere.json"
        archive.addfile(member)
    assert list(datasets.cc_news_pages(tmp_path / "a.tar")) == []


@pytest.mark.parametrize("pair", [(None, "x"), ("a", None), (5, "x")])
def test_what_is_no_text_is_not_grouped(tmp_path, pair):
    with pytest.raises(TypeError, match=r"a record is .*; expected the name of its client"):
        datasets.group([pair], tmp_path, shards=1)
