"""Options of a run: read, written again, checked, and what tells experiments apart."""

import contextlib
import dataclasses
import re
import shlex
import types
import typing
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from experiments.harness import commands, config, folders, grids, limits, records, titles
from experiments.harness.config import Data, OneShot
from experiments.reference_clients import __main__ as reference_clients
from fisherjax import algorithms
from tests.methods import MERGED

CHANGES = {
    "dataset": "mnist",
    "model": "lenet",
    "num_clients": 7,
    "partition": "iid",
    "alpha": 0.5,
    "beta": 0.5,
    "min_size": 3,
    "classes_per_client": 3,
    "partition_seeds": (4,),
    "epochs": 2,
    "learning_rate": 0.125,
    "momentum": 0.0,
    "weight_decay": 0.25,
    "label_smoothing": 0.125,
    "batch_size": 8,
    "augment": True,
    "augment_border": "reflect",
    "normalize": False,
    "seeds": (5, 6),
    "algorithms": ("fedavg",),
    "fisher_kind": "sampled",
    "max_examples": 7,
    "solver": "adam",
    "distillation": "fedlpa",
    "choose": "test",
    "aside": "test",
    "compress": "paper",
    "then_rounds": 2,
    "then_epochs": 3,
    "calibrate": ("analytic_head",),
    "exchanges": 2,
    "central": False,
    "on_nonfinite": "drop",
    "clients_per_chunk": 3,
    "keep_clients": True,
    "imports": (str(Path(__file__).with_name("own_choices.py")),),
    "data_dir": Path("data"),
    "out": Path("runs/mine"),
    "fedfisher_kfac.damping": 0.25,
    "fedlpa.damping": 0.25,
    "fedlpa.balanced": True,
    "fedprox.mu": 0.25,
    "dense.epochs": 2,
    "dense.width": 16,
    "fedov.steps": 2,
    "student.epochs": 3,
}
DATASETS = ("digits", "mnist", "cifar10", config.PLAYS)
COMMANDS = [
    (OneShot, config.one_shot, config.IMAGES),
    (config.Federated, config.federated, DATASETS),
    (grids.Grid, grids.Grid, ()),
    (reference_clients.Config, reference_clients.Config, ()),
]


def changed(asked: OneShot, name: str, value: object) -> OneShot:
    """Give one option another value, in the group that it belongs to."""
    if "." in name:
        name, value = "options", (*asked.merging.options, (name, value))
    for group in ("data", "training", "merging"):
        if hasattr(getattr(asked, group), name):
            own = dataclasses.replace(getattr(asked, group), **{name: value})
            return dataclasses.replace(asked, **{group: own})
    return dataclasses.replace(asked, **{name: value})


def read_again(asked: object, defaults: object) -> object:
    words = shlex.split(commands.write(asked, "experiments.some"))
    assert words[:3] == ["python", "-m", "experiments.some"]
    return commands.read(words[3:], "experiments.some", "", defaults)


# Read and written


def test_every_option_has_a_change():
    assert {name for name in CHANGES if "." not in name} == set(commands.contents(OneShot()))


@pytest.mark.parametrize("dataset", config.IMAGES)
def test_the_printed_command_asks_for_the_same_configuration(dataset):
    asked = dataclasses.replace(config.one_shot(dataset), out=Path("runs/it"))
    assert read_again(asked, config.one_shot) == asked


def test_the_printed_command_carries_every_option():
    asked = OneShot()
    for name, value in CHANGES.items():
        asked = changed(asked, name, value)
    again = read_again(asked, config.one_shot)
    assert commands.contents(again) == commands.contents(asked)
    assert again == asked


def values(kind: object) -> st.SearchStrategy:
    """Draw what an option of a type may hold."""
    if dataclasses.is_dataclass(kind):
        return configurations(kind)
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return st.lists(values(typing.get_args(kind)[0]), max_size=3).map(tuple)
    if isinstance(kind, types.UnionType):
        return st.one_of(values(own) for own in typing.get_args(kind))
    return {
        bool: st.booleans(),
        int: st.integers(0, 2**40),
        float: st.floats(0, allow_infinity=False, allow_subnormal=False),
        str: st.text("abc_1", min_size=1),
        Path: st.text("ab /.'é\"$", max_size=5).map(lambda end: Path(f"runs{end}")),
        type(None): st.none(),
    }[kind]


def configurations(kind: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(kind)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    fields = {name: values(kinds[name]) for name in kinds if name not in ("options", "imports")}
    return st.builds(kind, **fields, **({"options": own_options()} if "options" in kinds else {}))


@st.composite
def own_options(draw: st.DrawFn) -> commands.Options:
    """Draw values for some of the methods' options, other than their defaults."""
    numbers = [
        (f"{name}.{option}", default, float if default is None else type(default))
        for name in MERGED
        for option, default in algorithms.options(name).items()
        if type(default) in (bool, int, float) or option == "damping"
    ]
    chosen = draw(st.sets(st.sampled_from(range(len(numbers))), max_size=4))
    drawn = [(*numbers[i][:2], draw(values(numbers[i][2]))) for i in sorted(chosen)]
    return tuple((name, value) for name, default, value in drawn if value != default)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "defaults", "datasets"), COMMANDS)
@settings(max_examples=5, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(data=st.data())
def test_what_is_written_reads_as_it_was(kind, defaults, datasets, data):
    asked = data.draw(configurations(kind))
    if datasets:
        own = dataclasses.replace(asked.data, dataset=data.draw(st.sampled_from(sorted(datasets))))
        asked = dataclasses.replace(asked, data=own)
    assert read_again(asked, defaults) == asked


def test_the_data_set_chooses_the_defaults_and_options_override_them():
    words = ["--no-augment", "--dataset", "cifar10", "--epochs", "2"]
    asked = commands.read(words, "", "", config.one_shot)
    paper = config.one_shot("cifar10")
    expected = changed(changed(paper, "augment", False), "epochs", 2)
    assert asked == expected
    assert commands.read(["--dataset=cifar10"], "", "", config.one_shot).data.augment
    assert config.one_shot("cinic10").data == changed(paper, "dataset", "cinic10").data


# Refused


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("dataset", "minst", "mnist"),
        ("model", "lenett", "lenet"),
        ("partition", "idd", "iid"),
        ("algorithms", ("fedavg", "fedfisher_kfca"), "fedfisher_kfac"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(option, value, nearest):
    # Three at most, whatever the case, and where all are.
    for word in (value, value.upper() if isinstance(value, str) else value):
        words = rf"did you mean '{nearest}', '\w+' or '\w+'\? Known: "
        with pytest.raises(ValueError, match=words) as refused:
            limits.check_one_shot(changed(OneShot(), option, word))
        assert len(str(refused.value)) < 220


@pytest.mark.parametrize(
    ("option", "known"),
    [("dataset", (*config.IMAGES, config.PLAYS)), ("model", tuple(config.MODELS))],
)
def test_help_of_one_round_offers_what_is_not_refused(capsys, monkeypatch, option, known):
    monkeypatch.setenv("COLUMNS", "80")  # wide help has several columns
    with pytest.raises(SystemExit):
        commands.read(["--help"], "", "", config.one_shot)
    flat = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    offered = re.search(rf"--{option}\{{(.*?)\}}", flat)[1].split(",")
    for name in known:
        refused = pytest.raises(ValueError, match=f"--{option} is '{name}'")
        with contextlib.nullcontext() if name in offered else refused:
            limits.check_one_shot(changed(OneShot(), option, name))
    assert 0 < len(offered) < len(known)


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("fisher-kind", "empircal", "empirical"),
        ("solver", "adma", "adam"),
        ("augment-border", "reflct", "reflect"),
        ("on-nonfinite", "rise", "raise"),
    ],
)
def test_an_unknown_word_of_few_is_answered_with_all_of_them(capsys, option, value, nearest):
    with pytest.raises(SystemExit) as stop:
        commands.read([f"--{option}", value], "", "", config.one_shot)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (f"--{option}", f"'{value}'", f"'{nearest}'"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_clients", 0),
        ("alpha", 0.0),
        ("alpha", -1.0),
        ("alpha", float("nan")),
        ("partition_seeds", ()),
        ("partition_seeds", (-1,)),
        ("beta", 0.0),
        ("beta", -0.5),
        ("min_size", -1),
        ("classes_per_client", 0),
        ("weight_decay", -1e-5),
        ("label_smoothing", 1.0),
        ("fedlpa_ea.damping", -1e-3),
        ("fedprox.mu", -0.1),
        ("fedprox.mu", float("nan")),
        ("then_rounds", -1),
        ("epochs", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("inf")),
        ("momentum", 1.0),
        ("batch_size", 0),
        ("seeds", (1, 1)),
        ("algorithms", ()),
        ("fedfisher_kfac.damping", -0.1),
        ("clients_per_chunk", 0),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_option(option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} is "):
        limits.check_one_shot(changed(OneShot(), option, value))


# What tells experiments apart


@pytest.mark.parametrize("option", CHANGES)
def test_the_name_of_a_run_tells_experiments_apart_by_what_changes_their_results(option):
    is_same = titles.name(changed(OneShot(), option, CHANGES[option])) == titles.name(OneShot())
    assert is_same == (option in folders.WHERE_AND_HOW)


@pytest.fixture
def begun(tmp_path, rows_of):
    """The folder of an interrupted run, and what it has finished."""
    rows = rows_of(OneShot())[:3]
    folders.write_config(tmp_path, OneShot(), "experiments.one_shot")
    records.write_rows(tmp_path / records.RESULTS, rows, records.ONE_SHOT)
    return tmp_path, rows


IDLE = (
    *("fedlpa.damping", "fedlpa.balanced", "fedprox.mu", "dense.epochs", "dense.width"),
    *("fedov.steps", "student.epochs", "then_epochs"),
)  # methods and rounds that do not run
GROWN = [name for name in folders.GROWS if name in CHANGES]
CHANGE_NOTHING = (*folders.WHERE_AND_HOW, *IDLE)


@pytest.mark.parametrize("option", [x for x in CHANGES if x not in (*CHANGE_NOTHING, *GROWN)])
def test_a_folder_refuses_another_experiment_and_names_what_differs(begun, option):
    asked = changed(OneShot(), option, CHANGES[option])
    with pytest.raises(ValueError, match=f"another experiment: {option} was .*, is "):
        folders.resume(dataclasses.replace(asked, out=begun[0]), OneShot())


@pytest.mark.parametrize("option", [x for x in CHANGES if x in CHANGE_NOTHING])
def test_a_folder_continues_when_only_place_chunks_or_methods_that_do_not_run_differ(begun, option):
    asked = changed(OneShot(), option, CHANGES[option])
    assert folders.resume(dataclasses.replace(asked, out=begun[0]), OneShot())[1] == begun[1]


def test_a_folder_where_nothing_was_finished_takes_any_experiment(tmp_path):
    folders.write_config(tmp_path, OneShot(), "experiments.one_shot")
    asked = OneShot(Data("mnist"), epochs=1, out=tmp_path)
    assert folders.resume(asked, OneShot()) == (asked, [])
