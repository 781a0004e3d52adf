"""The command's options, result files and reports; nothing is trained here."""

import dataclasses
import shlex
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from experiments import config, figures, memory, records, report
from experiments.config import Config
from experiments.records import Row

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
    "batch_size": 8,
    "augment": True,
    "augment_border": "reflect",
    "normalize": False,
    "seeds": (5, 6),
    "algorithms": ("fedavg",),
    "fisher_kind": "sampled",
    "damping": 0.25,
    "solver": "adam",
    "fedlpa_damping": 0.25,
    "fedlpa_balanced": True,
    "mu": 0.25,
    "then_rounds": 2,
    "central": False,
    "on_nonfinite": "drop",
    "clients_per_chunk": 3,
    "data_dir": Path("data"),
    "out": Path("runs/mine"),
}


def rows_of(configuration: Config) -> list[Row]:
    """Make up what a whole run would leave."""
    rows = []
    for number, (split, seed) in enumerate(records.units(configuration)):
        value = 0.25 + number / 100
        if split is None:
            rows.append(Row("central", None, seed, 1, None, "test", "accuracy", 0.5, 2.5, None))
            continue
        rows += [
            Row(
                "local", split, seed, 1, client, "test", "accuracy", value + 0.1 * client, 1.5, None
            )
            for client in range(configuration.num_clients)
        ]
        rows += [
            Row(name, split, seed, 1, None, "test", "accuracy", value, 0.5, 4000)
            for name in ("ensemble", *configuration.algorithms)
        ]
    return rows


def printed(thing: object, width: int = 80) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


def test_every_option_has_a_change():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("dataset", config.CHOICES["dataset"])
def test_the_printed_command_asks_for_the_same_configuration(dataset):
    asked = dataclasses.replace(config.defaults(dataset), out=Path("runs/it"))
    assert config.parse(shlex.split(config.command(asked))[3:], "") == asked


@pytest.mark.parametrize("field", CHANGES)
def test_the_printed_command_carries_every_option(field):
    asked = dataclasses.replace(Config(out=Path("runs/it")), **{field: CHANGES[field]})
    assert config.parse(shlex.split(config.command(asked))[3:], "") == asked


@pytest.mark.parametrize("field", CHANGES)
def test_the_name_of_a_run_tells_experiments_apart_by_what_changes_their_results(field):
    changed = dataclasses.replace(Config(), **{field: CHANGES[field]})
    is_same = config.name(changed) == config.name(Config())
    assert is_same == (field in ("data_dir", "out", "clients_per_chunk"))


def test_the_data_set_chooses_the_defaults_and_options_override_them():
    asked = config.parse(["--no-augment", "--dataset", "cifar10", "--epochs", "2"], "")
    expected = dataclasses.replace(config.defaults("cifar10"), augment=False, epochs=2)
    assert dataclasses.replace(asked, out=None) == expected
    assert config.parse(["--dataset=cifar10"], "").augment


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("dataset", "minst", "mnist"),
        ("model", "lenett", "lenet"),
        ("partition", "idd", "iid"),
        ("algorithms", ("fedavg", "fedfisher_kfca"), "fedfisher_kfac"),
        ("fisher_kind", "empircal", "empirical"),
        ("solver", "adma", "adam"),
        ("augment_border", "reflct", "reflect"),
        ("on_nonfinite", "rise", "raise"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(field, value, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        config.check(dataclasses.replace(Config(), **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
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
        ("fedlpa_damping", -1e-3),
        ("mu", -0.1),
        ("mu", float("nan")),
        ("then_rounds", -1),
        ("epochs", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("inf")),
        ("momentum", 1.0),
        ("batch_size", 0),
        ("seeds", (1, 1)),
        ("algorithms", ()),
        ("damping", -0.1),
        ("clients_per_chunk", 0),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_option(field, value):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is "):
        config.check(dataclasses.replace(Config(), **{field: value}))


def test_rows_come_back_from_their_file_as_they_were(tmp_path):
    rows = rows_of(Config())
    records.write(tmp_path / "results.csv", rows)
    assert records.read(tmp_path / "results.csv") == rows
    assert records.finished(rows) == set(records.units(Config()))
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def begun(folder: Path, configuration: Config) -> list[Row]:
    """Leave an experiment in a folder, as an interrupted run does."""
    rows = rows_of(configuration)[:3]
    records.write_config(folder, configuration)
    records.write(folder / "results.csv", rows)
    return rows


@pytest.mark.parametrize("field", [x for x in CHANGES if x not in config.WHERE_AND_HOW])
def test_a_folder_refuses_another_experiment_and_names_what_differs(tmp_path, field):
    begun(tmp_path, Config())
    changed = dataclasses.replace(Config(), **{field: CHANGES[field]})
    with pytest.raises(ValueError, match=f"another experiment: {field} was .*, is "):
        records.resume(tmp_path, changed)


@pytest.mark.parametrize("field", config.WHERE_AND_HOW)
def test_a_folder_continues_when_only_place_or_chunks_differ(tmp_path, field):
    rows = begun(tmp_path, Config())
    changed = dataclasses.replace(Config(), **{field: CHANGES[field]})
    assert records.resume(tmp_path, changed) == rows


def test_a_folder_where_nothing_was_finished_takes_any_experiment(tmp_path):
    records.write_config(tmp_path, Config())
    assert records.resume(tmp_path, Config(epochs=1)) == []


def test_folders_that_cannot_hold_the_results_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to --out"):
        records.resume(tmp_path / "file", Config())
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="does not begin with the columns"):
        records.resume(tmp_path, Config())
    records.write(tmp_path / "results.csv", rows_of(Config()))
    with pytest.raises(ValueError, match=r"without a config\.json"):
        records.resume(tmp_path, Config())


def test_the_table_averages_local_models_over_clients_and_everything_over_runs():
    asked = Config(num_clients=3, partition_seeds=(0, 1), seeds=(0,))
    table = {line.algorithm: line for line in report.lines(rows_of(asked), asked.algorithms)}
    assert list(table) == ["local", "ensemble", *asked.algorithms, "central"]
    assert np.allclose(table["fedavg"].accuracies, [25, 26])
    assert np.allclose(table["local"].accuracies, [35, 36])
    assert table["central"].accuracies == (50.0,)


def test_the_summary_holds_the_table_as_printed_and_the_command():
    asked = Config()
    rows = rows_of(asked)
    table = printed(report.accuracy_table(report.lines(rows, asked.algorithms), "title"))
    summary = report.summary(rows, asked, {"jax": "1.2.3"})
    assert config.command(asked) in summary
    assert "jax 1.2.3" in summary
    plain = [line.replace("|", " ").replace("*", "").split() for line in summary.splitlines()]
    for line in table.splitlines()[3:]:
        assert not line.strip(" ─") or line.split() in plain


def test_label_tables_hold_every_count_in_80_columns():
    counts = np.full((5, 10), 5949)
    counts[0, 3] = 0
    cells = printed(report.label_table(counts, partition_seed=3)).split()
    assert [cells.count(number) for number in ("5949", "·", "59490")] == [49, 1, 4]


def test_label_tables_of_many_clients_or_classes_stay_short():
    counts = np.random.default_rng(0).integers(500, size=(200, 100))
    shown = printed(report.label_table(counts, partition_seed=0))
    assert len(shown.splitlines()) < 30
    assert "180 more clients" in shown
    assert "…" not in shown


def test_the_figure_is_a_picture_and_takes_a_single_run(tmp_path):
    asked = Config(seeds=(0,), partition_seeds=(0,))
    table = report.lines(rows_of(asked), asked.algorithms)
    figures.accuracy(table, report.title(asked), tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_that_exceeds_the_device_is_refused_with_the_chunk_that_fits():
    need = memory.Need("training", resident=600, scratch=4000, clients=8)
    assert "8 side by side" in memory.check(need, 4600)
    assert "8 side by side" in memory.check(need, None)
    with pytest.raises(ValueError, match=r"training, 8 side by side\) of .*--clients-per-chunk 6"):
        memory.check(need, 3600)
    with pytest.raises(ValueError, match="Not even one client at a time would fit"):
        memory.check(need, 1000)
