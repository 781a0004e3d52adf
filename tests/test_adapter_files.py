"""Folders of peft: what is read, written and merged, and what is refused by name.

`PATTERNS` and `RSLORA` were recorded with peft 0.21.2: configurations that it wrote, and the first
rows of the changes (`get_delta_weight`) that it computed from factors that `counted` makes.
"""

import json
import os
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fisherjax as fj
from fisherjax.__main__ import main
from fisherjax._layers.layer import Layer
from fisherjax.adapters import Adapter
from fisherjax.files import load_adapter, merge_adapters, save_adapter
from fisherjax.fisher.operators import Template

OFF = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "base_model_name_or_path")),
    **dict.fromkeys(("corda_config", "eva_config", "exclude_modules", "kasa_config")),
    **dict.fromkeys(("layer_replication", "layers_pattern", "layers_to_transform")),
    **dict.fromkeys(("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config")),
    **dict.fromkeys(("revision", "target_parameters", "task_type", "trainable_token_indices")),
    **dict.fromkeys(("use_bdlora", "velora_config")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora"), False),
    **dict.fromkeys(("use_qalora", "use_rslora"), False),
    "alpha_pattern": {},
    "auto_mapping": {"base_model_class": "Net", "parent_library": "__main__"},
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
}
PREFIX = "base_model.model."
PATTERNS = (
    OFF
    | {"r": 2, "lora_alpha": 3, "rank_pattern": {"layers.1.query": 4}}
    | {"alpha_pattern": {"query": 7}, "target_modules": ["query", "emb"]},
    {
        "emb.lora_embedding_A": (2, 11),
        "emb.lora_embedding_B": (6, 2),
        "layers.0.query.lora_A.weight": (2, 6),
        "layers.0.query.lora_B.weight": (5, 2),
        "layers.1.query.lora_A.weight": (4, 6),
        "layers.1.query.lora_B.weight": (5, 4),
    },
    # Of an embedding peft returns [entries, outputs], else [outputs, inputs].
    {"emb": [7.5, -1.5, -3.0, 3.0, -6.0, 7.5]},
    {
        "layers.0.query": [17.5, 7.0, -3.5, -14.0, -7.0, 17.5],
        "layers.1.query": [10.5, 7.0, -5.25, -8.75, -3.5, 10.5],
    },
)
RSLORA = (
    OFF
    | {"r": 4, "lora_alpha": 6, "use_rslora": True, "fan_in_fan_out": True}
    | {"target_modules": r"layers\.\d\.c"},
    {"layers.0.c.lora_A.weight": (4, 7), "layers.0.c.lora_B.weight": (4, 4)},
    {"layers.0.c": [9.0, -18.0, -15.0, 18.0]},
    {},
)


def counted(shape):
    return (np.arange(np.prod(shape), dtype="float32").reshape(shape) % 5) - 2


def write(folder, config, arrays):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {PREFIX + name: x for name, x in arrays.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def draw(rank=2, seed=0, inputs=6, outputs=5, names=("query",)):
    source = np.random.default_rng(seed)
    return {
        name: Adapter(
            source.normal(size=(rank, inputs)).astype("float32"),
            source.normal(size=(outputs, rank)).astype("float32"),
            0.5 + seed,
        )
        for name in names
    }


def product(adapter):
    return float(adapter.scale) * (np.asarray(adapter.b, float) @ np.asarray(adapter.a, float)).T


@pytest.mark.parametrize(("config", "shapes", "entries", "rows"), [PATTERNS, RSLORA])
def test_products_are_those_that_peft_computes(tmp_path, config, shapes, entries, rows):
    folder = write(tmp_path / "ann", config, {name: counted(x) for name, x in shapes.items()})
    found = load_adapter(folder)
    assert found.adapters.keys() == entries.keys() | rows.keys()
    for name, row in entries.items():
        np.testing.assert_allclose(product(found.adapters[name])[0], row)
    for name, row in rows.items():
        np.testing.assert_allclose(product(found.adapters[name])[:, 0], row)
    assert found.embeddings == {name for name in entries if name == "emb"}
    # What is written is read as the same.
    how = {"config": found.config, "embeddings": found.embeddings}
    save_adapter(tmp_path / "copy", found.adapters, **how)
    copy = load_adapter(tmp_path / "copy")
    assert copy.embeddings == found.embeddings
    for name, adapter in found.adapters.items():
        np.testing.assert_array_equal(copy.adapters[name].a, adapter.a)
        np.testing.assert_array_equal(copy.adapters[name].b, adapter.b)
        np.testing.assert_allclose(copy.adapters[name].scale, adapter.scale)
    names = load_file(tmp_path / "copy" / "adapter_model.safetensors")
    assert names.keys() == {PREFIX + name for name in shapes}


def test_patterns_of_a_written_folder_match_one_module_each(tmp_path):
    """Peft matches ends of names, so that "fc" alone would also be "block.fc"."""
    made = draw(2, names=("fc", "other")) | draw(3, seed=1, names=("block.fc",))
    save_adapter(tmp_path / "ann", made)
    config = json.loads((tmp_path / "ann" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"^block\\.fc": 3}
    assert config["alpha_pattern"] == {"^block\\.fc": 4.5}
    assert (config["r"], config["lora_alpha"]) == (2, 1)
    assert config["target_modules"] == ["block.fc", "fc", "other"]
    found = load_adapter(tmp_path / "ann").adapters
    assert {name: (len(x.a), x.scale) for name, x in found.items()} == {
        **{"fc": (2, 0.5), "other": (2, 0.5)},
        "block.fc": (3, 1.5),
    }


def test_a_merge_is_the_mean_of_the_products(tmp_path):
    clients = [
        draw(2, 0, names=("query", "value")),
        draw(3, 1, names=("query",)),
        draw(1, 2, names=("query",)),
    ]
    folders = [tmp_path / f"client {i}" for i in range(3)]
    for folder, client in zip(folders, clients, strict=True):
        save_adapter(folder, client, config={"base_model_name_or_path": "base", "task_type": "X"})
    done = merge_adapters(tmp_path / "all", folders, weights=[1, 2, 1])
    found = load_adapter(tmp_path / "all")
    expected = sum(w * product(x["query"]) for w, x in zip((0.25, 0.5, 0.25), clients, strict=True))
    np.testing.assert_allclose(product(found.adapters["query"]), expected, rtol=1e-5, atol=1e-6)
    # The others change it by zero.
    one = 0.25 * product(clients[0]["value"])
    np.testing.assert_allclose(product(found.adapters["value"]), one, rtol=1e-5, atol=1e-6)
    assert done.ranks == {"query": 6, "value": 2}
    assert done.only_some == ("value",)
    assert found.config["base_model_name_or_path"] == "base"
    assert found.config["task_type"] == "X"
    assert max(done.lost.values()) < 1e-6
    few = merge_adapters(tmp_path / "few", folders, weights=[1, 2, 1], rank=2)
    u, s, v = np.linalg.svd(expected)
    best = (u[:, :2] * s[:2]) @ v[:2]
    found = product(load_adapter(tmp_path / "few").adapters["query"])
    np.testing.assert_allclose(found, best, rtol=1e-4, atol=1e-5)
    lost = np.linalg.norm(best - expected) / np.linalg.norm(expected)
    np.testing.assert_allclose(few.lost["query"], lost, rtol=1e-4)
    assert sorted(os.listdir(tmp_path)) == ["all", *(f"client {i}" for i in range(3)), "few"]


def test_factors_have_the_names_of_modules_or_of_their_weights(tmp_path):
    clients, held = [draw(2, 0), draw(2, 1)], []
    for i, client in enumerate(clients):
        save_adapter(tmp_path / f"{i}", client)
        x = np.random.default_rng(i).normal(size=(9, 6)).astype("float32")
        held.append({"query.weight" if i else "query": {"input": x.T @ x}, "rest": {}})
    merge_adapters(tmp_path / "all", [tmp_path / "0", tmp_path / "1"], factors=held)
    grams = [{"query": next(iter(x.values()))} for x in held]
    expected = fj.adapters.merge(clients, factors=grams)["query"]
    found = load_adapter(tmp_path / "all").adapters["query"]
    np.testing.assert_allclose(product(found), product(expected), rtol=1e-5, atol=1e-6)


def moments(seed, size):
    x = np.random.default_rng(seed).normal(size=(9, size)) * np.arange(1, size + 1)
    return (x.T @ x / 9).astype("float32")


def operator(
    seed: int, name: str = "query.weight", inputs: int = 6, structure: str = "kronecker"
) -> tuple[Any, dict[str, Any]]:
    """A Fisher of a layer of PyTorch, [outputs, inputs] and a bias, and of a leaf beside it."""
    params: dict[str, Any] = {name: np.ones((5, inputs), "f4"), "query.bias": np.ones(5, "f4")}
    params |= {"norm.weight": np.ones(4, "f4")}
    if structure == "diagonal":
        return fj.fisher.Diagonal(params), params
    if structure == "grams":
        return {f"{name}^T": moments(seed, inputs)}, params
    factors = {name: {"input": moments(seed, inputs + 1), "output": moments(seed + 9, 5)}}
    layers = (Layer(name, "query.bias", (5, inputs), (0,)),)
    entries: dict[str, Any] = {"norm.weight": np.ones(4, "f4")}
    return fj.fisher.Kronecker(factors, entries, layers, Template.of(params)), params


def write_fishers(folder, *fishers):
    """Two folders of adapters and a Fisher file for each."""
    for i, (fisher, params) in enumerate(fishers):
        save_adapter(folder / f"{i}", draw(2, i))
        fj.files.save_fisher(folder / f"{i}.safetensors", fisher, params=params)
    numbers = range(len(fishers))
    return [folder / f"{i}" for i in numbers], [folder / f"{i}.safetensors" for i in numbers]


@pytest.mark.parametrize("structure", ["grams", "kronecker"])
def test_fisher_files_weigh_the_changes(tmp_path, structure):
    """By the normal equations in float64, where the bias does not change."""
    made = [operator(seed, structure=structure) for seed in (0, 1)]
    folders, fishers = write_fishers(tmp_path, *made)
    words = ["merge", str(tmp_path / "out"), *map(str, folders), "--fisher", *map(str, fishers)]
    assert main([*words, "--weights", "1", "3", "--damping", "0.3"]) == 0
    curvatures = []
    for fisher, _ in made:
        if structure == "grams":
            pair = fisher["query.weight^T"], np.eye(5)
        else:
            pair = fisher.factors["query.weight"].values()
        a, g = (np.asarray(x, float) for x in pair)
        curvatures.append(np.kron(a[:6, :6], g))
    changes = [product(draw(2, i)["query"]).ravel() for i in (0, 1)]
    total = sum(p * f for p, f in zip((0.25, 0.75), curvatures, strict=True))
    strength = 0.3 * np.trace(total) / 30
    right = sum(p * f @ x for p, f, x in zip((0.25, 0.75), curvatures, changes, strict=True))
    right += strength * (0.25 * changes[0] + 0.75 * changes[1])
    expected = np.linalg.solve(total + strength * np.eye(30), right).reshape(6, 5)
    found = product(load_adapter(tmp_path / "out").adapters["query"])
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def spoiled(fisher, params):
    fisher["query.weight^T"][0, 0] = -1
    return fisher, params


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (operator(1, name="key.weight"), r"1' adapts \['query'\] and has no factors of them"),
        (operator(1, inputs=7), r"1': the input factor of 'query' has shape \(7, 7\).* \[6, 6\]"),
        (operator(1, structure="grams"), "expected 'input', and 'output' for all clients or for"),
        (
            operator(1, structure="diagonal"),
            r"1\.safetensors' holds a Diagonal; expected Kronecker",
        ),
        (
            spoiled(*operator(1, structure="grams")),
            "input factor of 'query' of .*1.safetensors' is not",
        ),
    ],
)
def test_fisher_files_that_do_not_fit_are_named(tmp_path, second, words):
    folders, fishers = write_fishers(tmp_path, operator(0), second)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=words):
        merge_adapters(tmp_path / "out", folders, factors=fishers)
    assert sorted(os.listdir(tmp_path)) == before
    arrays = folders[0] / "adapter_model.safetensors"
    with pytest.raises(ValueError, match="its arrays have no description"):
        merge_adapters(tmp_path / "out", folders, factors=[fishers[0], arrays])
    with pytest.raises(TypeError, match="expected a list with one item for each client"):
        merge_adapters(tmp_path / "out", folders, factors=fishers[0])


REFUSED = {
    "use_dora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["head"],
    "trainable_token_indices": [3],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [7],
    "target_parameters": ["experts.weight"],
    "loftq_config": {"bits": 4},
    "init_lora_weights": "pissa_niter_4",
    "of_a_later_version": 0,
    "megatron_config": {"size": 2},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_change_the_adapter_is_named(tmp_path, name):
    config = OFF | {"r": 2, "lora_alpha": 2, "target_modules": ["query"], name: REFUSED[name]}
    arrays = {"query.lora_A.weight": counted((2, 6)), "query.lora_B.weight": counted((5, 2))}
    folder = write(tmp_path / "ann", config, arrays)
    with pytest.raises(ValueError, match=f"not supported: {name} = "):
        load_adapter(folder)


@pytest.mark.parametrize(
    ("change", "others", "words"),
    [
        ({"peft_type": "LOHA"}, {}, "peft_type is 'LOHA'; expected 'LORA'"),
        ({"r": 3}, {}, r"'query' has factors A \(2, 6\) and B \(5, 2\); expected \[3, inputs\]"),
        ({"r": "2"}, {}, "r is '2'; expected a number"),
        ({"rank_pattern": {"(": 3}}, {}, "which is no regular expression"),
        ({"r": 0}, {}, "r is 0; expected a number of at least 1"),
        ({"rank_pattern": {"query": -2}}, {}, "query is -2; expected a number of at least 1"),
        ({"lora_alpha": 10**400}, {}, "lora_alpha is 1000.*; expected a number"),
        ({"rank_pattern": {"(?i)Query": 2}}, {}, "no regular expression .global flags"),
        ({"target_modules": "("}, {}, "target_modules has '.', which is no regular expression"),
        ({"target_modules": 5}, {}, "target_modules is 5; expected text, or a list"),
        ({"layers_pattern": 3}, {}, "layers_pattern is 3; expected text, or a list"),
        ({"layers_to_transform": "3"}, {}, "layers_to_transform is '3'; expected an integer"),
        ({}, {"query.lora_embedding_A": counted((2, 6))}, "as a layer and as an embedding"),
        ({"use_rslora": 1}, {}, "use_rslora is 1; expected true or false"),
        ({"target_modules": ["key"]}, {}, "by its configuration .* peft does not adapt it"),
        ({"exclude_modules": ["query"]}, {}, "peft does not adapt it"),
        ({}, {"query.lora_magnitude_vector": counted((5,))}, "lora_magnitude_vector.*are no LoRA"),
        ({}, {"head.weight": counted((5, 5))}, "head.weight.*are no LoRA factors"),
        ({}, {"key.lora_A.weight": counted((2, 6))}, "'key' lacks its factor B"),
        ({}, {"query.lora_A.weight": counted((2, 3, 3, 6))}, r"has factors A \(2, 3, 3, 6\)"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(tmp_path, change, others, words):
    config = OFF | {"r": 2, "lora_alpha": 2, "target_modules": ["query"]} | change
    arrays = {"query.lora_A.weight": counted((2, 6)), "query.lora_B.weight": counted((5, 2))}
    folder = write(tmp_path / "ann", config, arrays | others)
    with pytest.raises(ValueError, match=words):
        load_adapter(folder)


def test_layers_are_chosen_as_peft_does(tmp_path):
    config = OFF | {"r": 2, "lora_alpha": 2, "target_modules": ["query"]}
    config |= {"layers_to_transform": [1], "layers_pattern": "layers"}
    names = [f"layers.{i}.experts.0.query" for i in range(2)]
    pair = {"lora_A.weight": counted((2, 6)), "lora_B.weight": counted((5, 2))}
    one, other = ({f"{name}.{end}": x for end, x in pair.items()} for name in names)
    assert [*load_adapter(write(tmp_path / "ann", config, other)).adapters] == names[1:]
    with pytest.raises(ValueError, match=r"'layers\.0\.experts\.0\.query'"):
        load_adapter(write(tmp_path / "bob", config, one))


@pytest.mark.parametrize(
    ("config", "client", "words"),
    [
        (
            {"base_model_name_or_path": "other"},
            draw(),
            "base_model_name_or_path is 'base' in .*ann",
        ),
        ({"revision": "v2"}, draw(), "revision is None in .* and 'v2' in .*bob"),
        ({"task_type": "SEQ_CLS"}, draw(), "task_type is None"),
        ({"fan_in_fan_out": True}, draw(), "fan_in_fan_out"),
        ({}, draw(inputs=7), r"'query' change a matrix \[6, 5\] in .*ann.* \[7, 5\] in .*bob"),
    ],
)
def test_adapters_that_do_not_fit_are_named_and_nothing_is_written(tmp_path, config, client, words):
    base = {"base_model_name_or_path": "base"}
    save_adapter(tmp_path / "ann", draw(), config=base)
    save_adapter(tmp_path / "bob", client, config=base | config)
    with pytest.raises(ValueError, match=words):
        merge_adapters(tmp_path / "out", [tmp_path / "ann", tmp_path / "bob"])
    assert sorted(os.listdir(tmp_path)) == ["ann", "bob"]


def test_a_client_that_diverged_is_named(tmp_path):
    for name in ("ann", "bob"):
        save_adapter(tmp_path / name, draw())
    path = tmp_path / "bob" / "adapter_model.safetensors"
    wrong = {PREFIX + "query.lora_B.weight": np.full((5, 2), np.nan, "float32")}
    save_file(load_file(path) | wrong, path)
    with pytest.raises(ValueError, match="bob' is not finite: factor B of 'query'"):
        merge_adapters(tmp_path / "out", [tmp_path / "ann", tmp_path / "bob"])
    assert sorted(os.listdir(tmp_path)) == ["ann", "bob"]


def test_an_embedding_and_a_product_of_one_name_are_not_merged(tmp_path):
    save_adapter(tmp_path / "ann", draw(), embeddings=["query"])
    save_adapter(tmp_path / "bob", draw())
    with pytest.raises(
        ValueError, match=r"'query'. are embeddings for other clients, but not in .*bob"
    ):
        merge_adapters(tmp_path / "out", [tmp_path / "ann", tmp_path / "bob"])


def test_paths_that_do_not_fit_are_named(tmp_path):
    save_adapter(tmp_path / "ann", draw())
    with pytest.raises(ValueError, match="ann' exists; expected a new folder"):
        save_adapter(tmp_path / "ann", draw())
    with pytest.raises(ValueError, match="is there twice"):
        merge_adapters(tmp_path / "out", [tmp_path / "ann", f"{tmp_path}/./ann"])
    with pytest.raises(TypeError, match="expected a list of paths"):
        merge_adapters(tmp_path / "out", tmp_path / "ann")
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json in .*eve"):
        merge_adapters(tmp_path / "out", [tmp_path / "eve"])
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        save_adapter(tmp_path / "nowhere" / "out", draw())
    with pytest.raises(ValueError, match="are no modules of"):
        save_adapter(tmp_path / "out", draw(), embeddings=["emb"])
    (tmp_path / "ann" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json' is damaged"):
        load_adapter(tmp_path / "ann")
    (tmp_path / "empty").mkdir()
    # An empty folder is taken.
    save_adapter(tmp_path / "empty", draw())
    assert sorted(os.listdir(tmp_path)) == ["ann", "empty"]


def test_what_is_not_finite_is_not_written(tmp_path):
    adapter = draw()["query"]
    for wrong in (adapter._replace(scale=np.inf), adapter._replace(a=adapter.a * np.nan)):
        with pytest.raises(ValueError, match="adapter of 'query' is not finite"):
            save_adapter(tmp_path / "out", {"query": wrong})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_factors_that_are_no_floats_are_refused(tmp_path, dtype):
    config = OFF | {"r": 2, "lora_alpha": 2, "target_modules": ["query"]}
    arrays = {"query.lora_A.weight": counted((2, 6)), "query.lora_B.weight": counted((5, 2))}
    folders = []
    for name in ("ann", "bob"):
        folders.append(write(tmp_path / name, config, arrays))
        wrong = {PREFIX + x: y.astype(dtype) for x, y in arrays.items()}
        save_file(wrong, folders[-1] / "adapter_model.safetensors")
    with pytest.raises(TypeError, match=f"factor A of 'query' is of {dtype}; expected floats"):
        merge_adapters(tmp_path / "out", folders)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "factor", [np.triu(np.ones((6, 6))), -np.eye(6), np.full((6, 6), np.nan), -np.ones(6)]
)
def test_factors_that_are_no_means_of_outer_products_are_refused(tmp_path, factor):
    config = OFF | {"r": 2, "lora_alpha": 2, "target_modules": ["query"]}
    arrays = {"query.lora_A.weight": counted((2, 6)), "query.lora_B.weight": counted((5, 2))}
    folder = write(tmp_path / "ann", config, arrays)
    with pytest.raises(ValueError, match=r"input factor of 'query' of .*ann' is not finite, symm"):
        merge_adapters(tmp_path / "out", [folder], factors=[{"query": {"input": factor}}])


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(np.ones((0, 2)), np.ones((3, 0))),
        Adapter(np.ones((1, 2)), np.ones((3, 1)), np.ones(1)),
    ],
)
def test_an_adapter_that_could_not_be_read_is_not_written(tmp_path, adapter):
    with pytest.raises(ValueError, match="expected a rank of at least 1 and a number"):
        save_adapter(tmp_path / "ann", {"query": adapter})
    assert not (tmp_path / "ann").exists()


def test_a_link_is_no_new_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "ann").symlink_to(tmp_path / "empty")
    with pytest.raises(ValueError, match="ann' exists; expected a new folder"):
        save_adapter(tmp_path / "ann", {"query": Adapter(np.ones((1, 2)), np.ones((3, 1)))})
