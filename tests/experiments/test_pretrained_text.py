"""MiniLM equals PyTorch; no document is in both halves; a killed table goes on untrained."""

import csv
import dataclasses
import hashlib
import json
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import fisherjax as fj
from experiments.pretrained import __main__ as pretrained
from experiments.pretrained import adapter_table, minilm, sentences, text_clients, text_table
from experiments.pretrained.text_table import Config, Measurement
from fisherjax import leaves
from fisherjax._layers.loops import trace

_WIDTH, _INNER, _WORDS = 24, 32, 50
_VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", *"abcdefghijklmno"]
_TOKENS = np.array([[1, 7, 9, 3, 2, 0, 0], [1, 5, 4, 4, 8, 6, 2], [1, 2, 0, 0, 0, 0, 0]])

_embed = jax.jit(minilm.embed)


def _tiny(blocks=2):
    """Return random params of a small network, with a head."""
    sizes = {"width": _WIDTH, "inner": _INNER, "words": _WORDS, "positions": 10}
    random = np.random.default_rng(1)
    head = {"head.weight": random.normal(0, 0.3, (2, _WIDTH)), "head.bias": random.normal(size=2)}
    return minilm.init(**sizes, blocks=blocks) | {k: x.astype(np.float32) for k, x in head.items()}


def _forward(params, row):
    """Embed one sentence in float64, token by token and head by head, without its padding."""
    w = {name: x.astype(float) for name, x in params.items()}
    erf = np.vectorize(math.erf)

    def dense(name, x):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-12)
        return w[f"{name}.weight"] * x + w[f"{name}.bias"]

    tables = (w[f"embeddings.{x}_embeddings.weight"] for x in ("word", "position", "token_type"))
    words, places, kinds = tables
    row = [token for token in row if token]
    hidden = [words[token] + places[place] + kinds[0] for place, token in enumerate(row)]
    hidden = [norm("embeddings.LayerNorm", x) for x in hidden]
    for block in range(sum("query.weight" in name for name in w)):
        name = f"encoder.layer.{block}"
        self = f"{name}.attention.self"
        query, key, value = (
            [np.split(dense(f"{self}.{part}", x), 12) for x in hidden]
            for part in ("query", "key", "value")
        )
        after = []
        for place, x in enumerate(hidden):
            mixed = []
            for head in range(12):
                scores = [query[place][head] @ k[head] / np.sqrt(len(k[head])) for k in key]
                shares = np.exp(scores) / np.exp(scores).sum()
                mixed.append(sum(s * v[head] for s, v in zip(shares, value, strict=True)))
            x = x + dense(f"{name}.attention.output.dense", np.concatenate(mixed))
            x = norm(f"{name}.attention.output.LayerNorm", x)
            inner = dense(f"{name}.intermediate.dense", x)
            inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
            after.append(norm(f"{name}.output.LayerNorm", x + dense(f"{name}.output.dense", inner)))
        hidden = after
    mean = np.mean(hidden, axis=0)
    return mean / np.linalg.norm(mean)


def test_embeddings_equal_a_forward_in_float64():
    params = _tiny()
    expected = [_forward(params, row) for row in _TOKENS]
    np.testing.assert_allclose(_embed(params, _TOKENS), expected, atol=1e-5)


def test_padding_does_not_change_embeddings():
    params = _tiny(blocks=1)
    longer = np.pad(_TOKENS, ((0, 1), (0, 3)))  # and a row that is padding only
    found = np.asarray(_embed(params, longer))
    np.testing.assert_allclose(found[:3], _embed(params, _TOKENS), atol=1e-6)
    gradient = jax.jit(jax.grad(lambda w: minilm.embed(w, longer)[3].sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found, gradient)))


def test_kfac_covers_every_leaf_that_is_trained():
    params = jax.tree.map(jnp.asarray, _tiny())
    apply, own = leaves.bind_untrained(minilm.model(params), params)
    seen = {}

    def traced(own):
        seen["found"] = trace(apply, own, _TOKENS)
        return 0.0

    jax.eval_shape(traced, own)
    assert not seen["found"].uncovered
    kept = {name for name, leaf in own.items() if leaf is None}
    assert kept == {"head.weight", "head.bias", *minilm.UNUSED}


@pytest.mark.long
def test_embeddings_of_the_checkpoint_equal_those_of_pytorch():
    # PyTorch 2.14's TransformerEncoderLayer with these weights in float64, on fixed tokens.
    try:
        folder = text_table.weights.path("minilm/model.safetensors").parent
    except FileNotFoundError as error:
        pytest.skip(str(error))
    tokens = [
        [101, 2023, 2003, 1037, 6251, 102, 0, 0],
        [101, 1996, 3185, 2001, 6659, 1998, 2146, 102],
        [101, 2307, 102, 0, 0, 0, 0, 0],
    ]
    first = [
        [0.05048305, 0.08800595, 0.00487487, 0.03626889, -0.00101818, 0.01915376],
        [-0.00299251, 0.05236777, -0.02124609, 0.0259817, -0.01919683, 0.01843955],
        [-0.06252305, -0.05636615, -0.07009891, -0.00841099, 0.04087153, -0.02597845],
    ]
    products = [[1, 0.21192392, 0.22756172], [0.21192392, 1, 0.17159437]]
    found = np.asarray(_embed(minilm.load(folder), np.array(tokens)))
    np.testing.assert_allclose(found[:, :6], first, atol=1e-4)
    np.testing.assert_allclose((found @ found.T)[:2], products, atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_no_document_is_in_both_halves(seed):
    random = np.random.default_rng(seed)
    documents = random.integers(0, 40, 200) * 7
    train, test = sentences.split(documents, tested=50, most=100, seed=seed)
    assert not set(documents[train]) & set(documents[test])
    assert len(np.unique([*train, *test])) == len(train) + len(test)
    assert len(test) == 50
    assert 80 <= len(train) <= 100
    again = sentences.split(documents, tested=50, most=100, seed=seed)
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(test, again[1])
    assert set(test) != set(sentences.split(documents, tested=50, most=100, seed=seed + 1)[1])


def test_a_split_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="4 test sentences take all of 2 documents, 5 sentences"):
        sentences.split(np.array([0, 0, 0, 1, 1]), tested=4, most=9, seed=0)


def test_labels_are_the_signs_of_ratings_that_are_not_neutral(tmp_path):
    path = tmp_path / "amazon.tsv"
    path.write_text("1_1\t-0.9\tbad\n1_2\t0.4\tso so\n2_1\t0.5\tgood, twice\n1_3\t3\tvery good\n")
    found = sentences.read(path)
    assert found.texts == ("bad", "good, twice", "very good")
    assert found.labels.tolist() == [0, 1, 1]
    assert found.documents.tolist() == [0, 1, 0]
    path.write_text("1_1\t-0.9\tbad\n1_2\tgood\n")
    with pytest.raises(ValueError, match=r"amazon\.tsv, line 2: found .*expected an id, a rating"):
        sentences.read(path)


def test_tokens_are_cut_and_padded_by_zeros(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "b": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.save(str(tmp_path / "tokenizer.json"))
    found, lengths = sentences.tokens(tmp_path / "tokenizer.json", ["a b", "b", "a a a c"], 4)
    assert found.tolist() == [[1, 4, 5, 2], [1, 5, 2, 0], [1, 4, 4, 2]]
    assert lengths.tolist() == [4, 3, 6]


@pytest.mark.parametrize("domain", sentences.DOMAINS)
def test_both_signs_are_in_every_domain(domain, shared):
    found = sentences.read(shared / "data" / "vader" / f"{domain}.tsv")
    assert set(found.labels) == {0, 1}
    assert 0.3 < found.labels.mean() < 0.7


@pytest.fixture
def options(tmp_path, monkeypatch) -> dict[str, Any]:
    """Return options of a small study: a tiny checkpoint, a tokenizer and two domains."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "minilm").mkdir()
    (tmp_path / "vader").mkdir()
    params = {name: x for name, x in _tiny(blocks=1).items() if "head" not in name}
    fj.files.save_arrays(tmp_path / "minilm/model.safetensors", params)
    numbers = {word: number for number, word in enumerate(_VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.save(str(tmp_path / "minilm/tokenizer.json"))
    random = np.random.default_rng(0)
    for domain in ("film", "nyt"):
        lines = []
        for number in range(40):
            word, rating = (("good", 2), ("bad", -2))[number % 2]
            text = " ".join([word, *random.choice(_VOCABULARY[6:], 14)])
            lines.append(f"{number // 2}_{number}\t{rating}\t{text}\n")
        (tmp_path / f"vader/{domain}.tsv").write_text("".join(lines))
    monkeypatch.setattr(text_table.weights, "path", lambda name, _=None: tmp_path / name)
    return {
        **{"domains": ("film", "nyt"), "examples": 20, "tested": 10, "length": 10, "epochs": 1},
        **{"batch_size": 5, "seeds": (0,), "algorithms": ("fedavg",), "scales": (1.0, 0.0)},
        **{"data_dir": tmp_path, "out": tmp_path / "out"},
    }


def _run(asked):
    """Run a table, and return the rows of its results."""
    text_table.run(asked, "experiments.pretrained", Console(width=200))
    found = (asked.out / "results.csv").read_text().splitlines()
    # The last column is a checksum; names with several options are quoted.
    return [dict(zip(Measurement._fields, row, strict=False)) for row in csv.reader(found[1:])]


def _train(*_, **__):
    raise AssertionError("clients were kept, but are trained again")


@pytest.mark.slow
def test_a_study_goes_on_and_further_methods_train_nothing(options, monkeypatch, capsys):
    first = _run(Config(**options))
    assert [row["algorithm"] for row in first[::2]] == ["start", "own", "joint"] + 2 * ["fedavg"]
    start, scaled = first[:2], [row for row in first if row["scale"] == "0.0"]
    # A change that is scaled by zero is the start.
    assert [row["accuracy"] for row in scaled] == [row["accuracy"] for row in start]
    size = json.loads((options["out"] / "config.json").read_text())
    assert size["configuration"]["examples"] == 20
    monkeypatch.setattr(fj.training, "train", _train)
    second = _run(Config(**(options | {"algorithms": ("ties",)})))
    assert second[: len(first)] == first
    assert {row["algorithm"] for row in second[len(first) :]} == {"ties"}
    assert "each client on its own domain" in capsys.readouterr().out


def test_clients_of_a_domain_have_its_sentences_in_shares_of_labels(options):
    task = Config(**(options | {"domains": ("film",), "num_clients": 3, "label_alpha": 0.01}))
    files = options["data_dir"] / "vader", options["data_dir"] / "minilm/tokenizer.json"
    found = text_clients.data(task, *files, seed=0)
    whole = text_clients.data(dataclasses.replace(task, num_clients=None), *files, seed=0)
    np.testing.assert_array_equal(found.train.inputs, whole.train.inputs)
    np.testing.assert_array_equal(found.test[0].inputs, whole.test[0].inputs)
    assert found.train.num_clients == 3
    assert found.train.sizes.sum() == whole.train.sizes.sum()
    # At 0.01 nearly all of a client's sentences have one label.
    views = [fj.clients.view(found.train, client) for client in range(3)]
    counts = [np.bincount(np.asarray(view.targets)[np.asarray(view.indices)]) for view in views]
    assert sum(max(count) for count in counts) > 0.9 * found.train.sizes.sum()


@pytest.mark.slow
def test_every_domain_that_is_split_has_clients_of_its_own(options, capsys):
    split = options | {"num_clients": 2, "scales": (1.0,)}
    both = _run(Config(**split))
    assert [row["domain"] for row in both] == ["film", "nyt"] * 4
    alone = _run(Config(**(split | {"domains": ("nyt",), "out": options["out"] / "alone"})))
    accuracies = [row["accuracy"] for row in both if row["domain"] == "nyt"]
    assert [row["accuracy"] for row in alone] == accuracies
    assert "a client's own model" in capsys.readouterr().out


def test_clients_that_were_kept_before_domains_could_be_split_are_found(options, monkeypatch):
    task = Config(**options)
    names = [field.name for field in dataclasses.fields(text_clients.Task)]
    before = {name: getattr(task, name) for name in names if name not in text_clients.OF_SPLIT}
    about = json.dumps([before, 0], sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()[:12]
    assert text_clients.digest(task, 0) == digest
    assert text_clients.digest(dataclasses.replace(task, num_clients=2), 0) != digest


@pytest.mark.slow
def test_of_adapters_all_methods_merge_clients_that_are_trained_once(options, monkeypatch):
    options |= {"algorithms": ("fedavg", "task_arithmetic"), "ranks": (2,)}
    summaries, summarize = [], fj.merging.summarize

    def counted(*arguments, **how):
        summaries.append(arguments[0].kind)
        return summarize(*arguments, **how)

    monkeypatch.setattr(fj.merging, "summarize", counted)
    first = _run(adapter_table.Config(**options, merged=("products", "cut")))
    assert len(summaries) == 1, "all of these merge the same updates"
    names = [
        *("start", "own@rank=2", "joint@rank=2"),
        *("fedavg@rank=2,merged='products'", "fedavg@rank=2,merged='cut'"),
        *("task_arithmetic@rank=2,merged='products'", "task_arithmetic@rank=2,merged='cut'"),
    ]
    assert list(dict.fromkeys(row["algorithm"] for row in first)) == names
    # Clients send a product's factors, which a rank of two makes thin.
    sizes = {row["bytes"] for row in first[6:]}
    thin = 2 * (4 * (_WIDTH + _WIDTH) + 2 * (_WIDTH + _INNER))
    assert sizes == {str(4 * thin)}
    monkeypatch.setattr(fj.training, "train", _train)
    second = _run(adapter_table.Config(**options, merged=("factors",)))
    assert second[: len(first)] == first
    assert {row["algorithm"][-16:] for row in second[len(first) :]} == {"merged='factors'"}


@pytest.mark.slow
def test_kept_adapters_are_those_that_were_trained(options, tmp_path):
    task = Config(**options)
    found = text_clients.data(task, tmp_path / "vader", tmp_path / "minilm/tokenizer.json", 0)
    given = task, found, tmp_path / "minilm", 0, tmp_path / "clients"
    trained, kept = (text_clients.clients(*given, rank=3, alpha=6.0) for _ in range(2))
    assert jax.tree.structure(trained[2:]) == jax.tree.structure(kept[2:])
    for new, old in zip(jax.tree.leaves(trained[2:]), jax.tree.leaves(kept[2:]), strict=True):
        np.testing.assert_array_equal(new, old)
    # Each block has an adapter of rank 3 and scale 6 / 3 at all of its six matrices.
    held = trained.start["adapters"]
    assert {x.a.shape[0] for x in held.values()} == {3}
    assert {float(x.scale) for x in held.values()} == {2.0}
    own = jax.tree.map(lambda x: x[0], trained.trained.params)
    changed = fj.adapters.merged(fj.leaves.join(own, trained.trained.frozen))
    base = trained.start["base"]
    moved = {name for name in base if not np.array_equal(base[name], changed[name])}
    parts = ["attention.self." + x for x in ("query", "key", "value")]
    parts += ["attention.output.dense", "intermediate.dense", "output.dense"]
    assert moved == {f"encoder.layer.0.{part}.weight" for part in parts}


@pytest.mark.slow
def test_adapters_of_the_checkpoint_are_merged_in_two_gigabytes(shared, tmp_path):
    try:
        text_table.weights.path("minilm/model.safetensors")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pytest.importorskip("tokenizers")
    options = {"examples": 32, "tested": 50, "epochs": 1, "ranks": (8,), "seeds": (0,)}
    options |= {"merged": ("factors", "products", "cut"), "algorithms": ("fedavg",)}
    program = (
        "import resource, sys; from pathlib import Path; from rich.console import Console\n"
        "from experiments.pretrained import adapter_table as table\n"
        f"table.run(table.Config(**{options}, data_dir=Path(sys.argv[1]), out=Path(sys.argv[2])),"
        " 'experiments.pretrained', Console())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, shared / "data", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 2 * 2**20  # in KiB
    found = (tmp_path / "results.csv").read_text().splitlines()[1:]
    rows = [dict(zip(Measurement._fields, row, strict=False)) for row in csv.reader(found)]
    assert min(float(row["accuracy"]) for row in rows) > 0.4


def test_unknown_domains_and_methods_are_refused_before_anything_runs(tmp_path):
    wrongs: list[dict[str, Any]] = [{"domains": ("films",)}, {"algorithms": ("fedavgs",)}]
    for wrong in wrongs:
        (value,) = wrong.values()
        with pytest.raises(ValueError, match=rf"{value[0]}.*did you mean '?{value[0][:-1]}"):
            text_table.run(Config(out=tmp_path / "out", **wrong), "program", Console())
    assert not (tmp_path / "out").exists()


def test_every_table_takes_its_options_as_a_command(tmp_path, capsys):
    for table in ("text", "adapters"):
        folders = ["--client-folder", str(tmp_path / "kept"), "--out", str(tmp_path / "out")]
        numbers = ["--ranks", "0", "2", "--alpha", "8", "--merged", "cut", "--scales", "1", "1.5"]
        given = ["--table", table, *folders, *numbers, "--domains"]
        assert pretrained.main([*given, "films"]) == 1
        assert "did you mean 'film'" in capsys.readouterr().err
        assert pretrained.main([*given, "film", "--ranks", "-1"]) == 1
        assert "--ranks is -1, expected 0 or more" in capsys.readouterr().err
