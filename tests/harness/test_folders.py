"""Folders: every damaged byte is noticed, whole units stay, and an experiment may grow."""

import contextlib
import dataclasses
import importlib
import io
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from rich.console import Console

import fisherjax as fj
from experiments.federated import curves, grid
from experiments.federated import plan as federated
from experiments.harness import (
    accuracies,
    choices,
    commands,
    config,
    folders,
    methods,
    one_round,
    records,
    studies,
    tables,
)
from experiments.harness.config import AnyData, Data, Federated, Merging, OneShot
from experiments.harness.records import ONE_SHOT, RESULTS, Row
from experiments.personalized import pictures
from experiments.personalized import settings as personalized
from experiments.personalized.settings import Config as Personalized
from tests.conftest import own_choices

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "experiments" / "results"
PROGRAM = "experiments.one_shot"
ASKED = OneShot(
    Data(num_clients=2),
    merging=Merging(("fedavg", "fedprox")),
    partition_seeds=(0,),
    seeds=(0, 1),
    then_rounds=1,
    calibrate=("ccvr",),
    exchanges=2,
)


def all_rows(asked: OneShot = ASKED) -> list[Row]:
    """Make up the rows that a whole run leaves, with a value of its own each."""
    found = []
    for split, seed in one_round.units(asked):
        kinds = [("central", 1, None)]
        if split is not None:
            kinds = [("local", 1, i) for i in range(asked.data.num_clients)]
            kinds += [("ensemble", 1, None)]
            for name in asked.merging.algorithms:
                kinds += [(name, number, None) for number in range(1, asked.then_rounds + 2)]
                kinds += [(f"{name}+{last}", 2, None) for last in asked.calibrate]
                steps = range(2, asked.exchanges + 2)
                kinds += [(f"{name}+natural_gradient", number, None) for number in steps]
        found += [
            Row(name, seed, number, "test", "accuracy", len(found) + place / 64, split, client)
            for place, (name, number, client) in enumerate(kinds)
        ]
    return found


@pytest.fixture
def written(tmp_path) -> Path:
    """The folder of a finished run of `ASKED`."""
    folders.write_config(tmp_path, dataclasses.replace(ASKED, out=tmp_path), PROGRAM)
    records.write_rows(tmp_path / RESULTS, all_rows(), ONE_SHOT)
    return tmp_path


def ask(out: Path, **changes: object) -> OneShot:
    return dataclasses.replace(ASKED, out=out, **changes)


# Damage


def test_every_damaged_byte_of_the_rows_is_noticed_and_costs_its_unit_alone(written):
    path, rows, said = written / RESULTS, all_rows(), []
    whole = path.read_bytes()
    heading = whole.index(b"\n")
    units = tables.gathered((row.unit, row) for row in rows)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        said.clear()
        if place < heading:
            with pytest.raises(ValueError, match="does not begin with the columns"):
                records.read_rows(path, ONE_SHOT, warn=said.append)
            continue
        found = records.read_rows(path, ONE_SHOT, warn=said.append)
        if whole[place : place + 1] == b"\n":  # it ends a line all the same, or damages two
            assert found == [row for row in rows if row in found]
            continue
        assert len(said) == 1
        lost = {row.unit for row in rows} - {row.unit for row in found}
        assert len(lost) == 1
        assert found == [row for unit, own in units.items() if unit not in lost for row in own]


def test_a_file_that_was_cut_anywhere_keeps_its_whole_units(written):
    path, rows = written / RESULTS, all_rows()
    whole = path.read_bytes()
    ends = {unit: 0 for unit in (row.unit for row in rows)}
    lines, place = whole.splitlines(keepends=True), 0
    for line, row in zip(lines, [None, *rows], strict=True):
        place += len(line)
        if row is not None:
            ends[row.unit] = place - 1  # without the end of the line
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        said = []
        found = records.read_rows(path, ONE_SHOT, warn=said.append)
        kept = {unit for unit, end in ends.items() if end <= length}
        assert found == [row for row in rows if row.unit in kept]
        asked = dict.fromkeys(one_round.missing(ASKED, found))
        assert {*asked} == {*one_round.units(ASKED)} - kept


def test_a_missing_row_is_computed_again_with_its_method_alone():
    rows = all_rows()
    assert one_round.missing(ASKED, rows) == {}
    for place, row in enumerate(rows):
        first = row.algorithm.partition("+")[0]
        expected = first if first in ASKED.merging.algorithms else one_round.REFERENCES
        left = one_round.missing(ASKED, rows[:place] + rows[place + 1 :])
        assert left == {row.unit: (expected,)}
        # What comes in its place is put there once.
        new = [one._replace(value=0.5) for one in rows if one.unit == row.unit]
        again = one_round.replaced(rows, new)
        assert sorted(map(str, again)) == sorted(
            map(str, [*(one for one in rows if one.unit != row.unit), *new])
        )


def test_a_file_without_checksums_is_read_and_its_broken_lines_cost_their_methods(written):
    path, rows = written / RESULTS, all_rows()
    lines = [",".join(ONE_SHOT)]
    lines += [x.rpartition(",")[0] for x in path.read_text().splitlines()[1:]]
    path.write_text("\n".join(lines) + "\n")
    assert records.read_rows(path, ONE_SHOT) == rows
    (place,) = (i for i, x in enumerate(rows) if x[:3] == ("fedprox", 1, 2))
    lines[place + 1] = lines[place + 1][:-9]
    path.write_text("\n".join(lines))
    said = []
    found = records.read_rows(path, ONE_SHOT, warn=said.append)
    assert found == [*rows[:place], *rows[place + 1 :]]
    assert said == [
        f"{path} is damaged: 1 of {len(rows)} rows are not as they were written, and what they "
        "held is computed again."
    ]
    assert one_round.missing(ASKED, found) == {(0, 1): ("fedprox",)}


def as_of_0_2(path: Path) -> None:
    """Remove from a configuration what version 0.2 did not write."""
    document = json.loads(path.read_text())
    assert document.pop("rows_have_checksums") is True
    del document["checksum"]
    path.write_text(json.dumps(document))


def test_rows_whose_checksums_were_removed_are_computed_again(written, capsys):
    path, asked, whole = written / RESULTS, ask(written), (written / RESULTS).read_text()
    lines = [x.rpartition(",")[0] for x in whole.splitlines()]
    path.write_text(
        "\n".join(lines).replace("fedavg,1,2,test,accuracy,", "fedavg,1,2,test,accuracy,1")
    )
    assert folders.resume(asked, OneShot()) == (asked, [])
    assert "the checksums of its rows are gone, and what they held is" in capsys.readouterr().out
    # A configuration of version 0.2 says nothing of checksums, and while its rows have none, the
    # configuration of a run that continues there does not either.
    path.write_text("\n".join(lines))
    config_path = written / records.CONFIG
    as_of_0_2(config_path)
    for _ in range(2):
        assert folders.resume(asked, OneShot()) == (asked, all_rows())
        folders.write_config(written, asked, PROGRAM, goes_on=True)
    path.write_text(whole)
    folders.write_config(written, asked, PROGRAM, goes_on=True)
    assert json.loads(config_path.read_text())["rows_have_checksums"] is True
    path.write_text("")
    assert folders.resume(asked, OneShot())[1] == []
    assert "damaged: all rows are gone" in capsys.readouterr().out


def test_every_damaged_byte_of_the_configuration_is_noticed_or_changes_nothing(written):
    path, asked = written / records.CONFIG, ask(written, epochs=30)
    whole = path.read_bytes()
    document = json.loads(whole)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):
            if json.loads(path.read_bytes()) == document:  # a space became another
                assert folders.grown(asked, OneShot()) == asked
                continue
        with pytest.raises(ValueError, match="is not a configuration that was written here"):
            folders.grown(asked, OneShot())


def test_accuracies_that_are_no_numbers_are_kept_and_reported(tmp_path):
    asked = ask(tmp_path)
    values = {"fedavg": math.nan}
    rows = [row._replace(value=values.get(row.algorithm, 0.5)) for row in all_rows()]
    folders.write_config(tmp_path, asked, PROGRAM)
    records.write_rows(tmp_path / RESULTS, rows, ONE_SHOT)
    _, found = folders.resume(asked, OneShot())
    assert list(map(str, found)) == list(map(str, rows))
    assert one_round.missing(asked, found) == {}
    accuracies.report(asked, "title", found, PROGRAM, Console(file=io.StringIO()))
    assert "| fedavg | nan |" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e4])
def test_losses_of_diverged_clients_are_kept_and_reported(tmp_path, value):
    asked = Federated(
        AnyData("tiny_shakespeare"),
        merging=Merging(("fedavg",)),
        rounds=1,
        local_epochs=(1,),
        seeds=(0, 1),
        out=tmp_path,
    )
    losses = [("cohort", "loss"), ("cohort", "barrier_loss"), ("test", "loss")]
    finite = [("test", "accuracy"), ("validation", "accuracy")]
    finite += [("traffic", "down"), ("traffic", "up")]
    numbers = dict.fromkeys(losses, value) | dict.fromkeys(finite, 8.0)
    where = {"local_epochs": 1, "server_learning_rate": 1.0}
    rows = [
        Row("fedavg", seed, 1, *what, number, **where)
        for seed in asked.seeds
        for what, number in numbers.items()
    ]
    folders.write_config(tmp_path, asked, PROGRAM)
    records.write_rows(tmp_path / RESULTS, rows, records.FEDERATED)
    asked, found = folders.resume(asked, Federated(), records.FEDERATED)
    assert list(map(str, found)) == list(map(str, rows))
    assert federated.following(asked, found) is None
    curves.report(asked, found, PROGRAM, Console(file=io.StringIO()))
    perplexity = "nan" if math.isnan(value) else "inf"
    assert f"| {perplexity} ± nan |" in (tmp_path / "summary.md").read_text()


def test_the_choice_by_accuracy_does_not_choose_what_is_no_number():
    asked = Federated(rounds=1, server_learning_rate=(0.1, 1.0), merging=Merging(("fedavg",)))
    rows = [
        Row("fedavg", 0, 1, "validation", "accuracy", value, None, None, None, None, 1, rate)
        for rate, value in ((0.1, math.nan), (1.0, 0.2))
    ]
    assert federated.select(asked, rows) == {("fedavg", 1): (1.0, None)}
    assert tables.spread([0.5, math.nan]) == "nan ± nan"
    assert tables.moments([0.5, math.inf])[2] == 2


# Folders of earlier versions


def asked_of(name: str, default: object) -> object:
    """Return what a stored run was asked for, as far as its rows depend on it."""
    document = json.loads((STORED / name / records.CONFIG).read_text())["configuration"]
    document = {n: x for n, x in folders._modern(document).items() if x is not None}
    names = {n: x for n, x in document.items() if n in commands.contents(default)}
    return commands.replaced(default, names)


def stored(program: str) -> list[str]:
    found = (path for path in STORED.glob("*/config.json") if program in path.read_text())
    return sorted(path.parent.name for path in found)


@pytest.mark.parametrize("name", stored("experiments.one_shot "))
def test_stored_runs_of_one_round_are_whole(name):
    rows = records.read_rows(STORED / name / RESULTS, ONE_SHOT)
    assert one_round.missing(asked_of(name, OneShot()), rows) == {}


@pytest.mark.parametrize("name", stored("experiments.federated "))
def test_stored_runs_of_rounds_are_whole(name):
    asked = asked_of(name, Federated())
    rows = records.read_rows(STORED / name / RESULTS, grid.columns(asked))
    assert federated.following(asked, rows) is None


# Growth


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({"seeds": (1, 5)}, {"seeds": (0, 1, 5)}),
        ({"partition_seeds": (3,)}, {"partition_seeds": (0, 3)}),
        ({"then_rounds": 4}, {"then_rounds": 4}),
        ({"then_rounds": 0}, {"then_rounds": 1}),
        ({"exchanges": 3, "central": False}, {"exchanges": 3, "central": True}),
        ({"calibrate": ("analytic_head",)}, {"calibrate": ("ccvr", "analytic_head")}),
        (
            {"merging": Merging(("regmean",))},
            {"merging": Merging(("fedavg", "fedprox", "regmean"))},
        ),
        ({"keep_clients": True}, {"keep_clients": True}),
    ],
)
def test_a_folder_takes_more_than_it_began_with(written, changes, has, capsys):
    asked, rows = folders.resume(ask(written, **changes), OneShot())
    assert asked == ask(written, **has)
    assert rows == all_rows()
    # What a whole run of the larger configuration would leave is what there is and what is missing.
    left = one_round.missing(asked, rows)
    wanted = {row._replace(value=0) for row in all_rows(asked)}
    there = {row._replace(value=0) for row in rows}
    lacking = {
        (row.unit, first if first in asked.merging.algorithms else one_round.REFERENCES)
        for row in wanted - there
        for first in [row.algorithm.partition("+")[0]]
    }
    assert {(unit, name) for unit, names in left.items() for name in names} == lacking
    fewer = any(changes[name] != has[name] for name in changes)
    assert fewer == ("has more than is asked for" in capsys.readouterr().out)
    # config.json then has all.
    folders.begin(asked, PROGRAM, Console(file=io.StringIO()), "some")
    document = json.loads((written / records.CONFIG).read_text())
    assert document["configuration"] == commands.contents(asked)


def test_options_that_cannot_grow_are_refused_with_both_values_and_the_remedy(written):
    merging = Merging(("fedavg", "fedprox"), options=(("fedprox.mu", 0.5),))
    with pytest.raises(ValueError, match="epochs was 30, is 2") as stop:
        folders.resume(ask(written, epochs=2, merging=merging, seeds=(0, 7)), OneShot())
    assert str(stop.value) == (
        f"{written} holds results of another experiment: epochs was 30, is 2; fedprox.mu was the "
        "default, is 0.5. Choose another --out, or delete that folder; for both in one folder, add "
        "--algorithms fedprox@mu=0.5 instead"
    )


def test_options_of_what_the_folder_has_not_run_are_free(written):
    merging = Merging(("fedfisher_kfac",), options=(("fedfisher_kfac.damping", 0.5),))
    asked, _ = folders.resume(ask(written, merging=merging), OneShot())
    assert asked.merging.algorithms == ("fedavg", "fedprox", "fedfisher_kfac")
    assert asked.merging.options == merging.options
    folders.write_config(written, ask(written, then_rounds=0), PROGRAM)
    assert folders.resume(ask(written, then_epochs=3), OneShot())[0].then_epochs == 3


def test_methods_that_are_not_asked_for_again_keep_their_options(written):
    merging = Merging(("fedavg", "fedprox"), options=(("fedprox.mu", 0.5),))
    folders.write_config(written, ask(written, merging=merging), PROGRAM)
    asked, _ = folders.resume(ask(written, merging=Merging(("regmean",))), OneShot())
    assert asked.merging == Merging(("fedavg", "fedprox", "regmean"), options=merging.options)
    with pytest.raises(ValueError, match=r"fedprox\.mu was 0\.5, is the default"):
        folders.resume(ask(written), OneShot())


def test_numbers_of_clients_do_not_grow_but_lists_of_them_do(tmp_path):
    class Grid(NamedTuple):
        first: tuple
        second: object

    for first, second in (((1, 2), 3), ((2, 3), 4)):
        made = dataclasses.make_dataclass("Made", ["num_clients", "classes", "out"], frozen=True)
        asked = made(first, second, tmp_path)
        if second == 3:
            folders.write_config(tmp_path, asked, "some")
    with pytest.raises(ValueError, match=r"experiment: classes was 3, is 4\. Choose"):
        folders.grown(asked, asked)
    asked = dataclasses.replace(asked, classes=3)
    assert folders.grown(asked, asked).num_clients == (1, 2, 3)


# Studies


class Found(NamedTuple):
    """A measurement of a made-up study."""

    name: str
    draw: int
    value: float

    @property
    def unit(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Study:
    """Draws of names; `draws` may grow."""

    names: tuple[str, ...] = ("a", "b")
    draws: int = 2
    out: Path = Path()


def test_a_study_measures_the_units_that_lack_measurements(tmp_path):
    told, quiet = [], Console(file=io.StringIO())

    def run(asked: Study) -> list[Found]:
        def measured(missing):
            for name in missing:
                told.append(name)
                yield [Found(name, draw, 0.1 * draw) for draw in range(asked.draws)]

        asked, found = folders.resume(asked, Study(), Found._fields, Found)
        units = dict.fromkeys(asked.names, asked.draws)
        return studies.completed(asked, PROGRAM, found, units, measured, quiet)

    asked = Study(out=tmp_path)
    whole = run(asked)
    assert run(asked) == whole
    assert told == ["a", "b"]
    path = tmp_path / RESULTS
    text = path.read_text()
    path.write_text(text.replace("b,1,0.1,", "b,1,0.2,"))
    assert run(asked) == whole
    assert told == ["a", "b", "b"]
    assert path.read_text() == text
    as_of_0_2(tmp_path / records.CONFIG)
    path.write_text("name,draw,value\na,0,0.0\na,1,0.1\nb,0,0.0\n")  # of version 0.2, and cut
    assert run(asked) == whole
    assert told[3:] == ["b"]
    grown = run(dataclasses.replace(asked, draws=3))
    assert told[4:] == ["a", "b"]
    assert len(grown) == 6


def test_a_personal_run_counts_its_measurements():
    asked = Personalized(domains=("scans", "fonts"), rounds=25)
    units = personalized.testing(asked, dict.fromkeys(asked.algorithms, 0.1))
    sizes = personalized.sizes(asked, units)
    # Rounds 1, 2, 4, ..., 24, 25 and each of two clients.
    assert {sizes[unit] for unit in units if unit.rounds == 25} == {14 + 2}
    # Rounds 1 to 10.
    assert {sizes[unit] for unit in units if unit.rounds == 10} == {10 + 2}


def test_weights_of_a_personal_run_come_back_and_damaged_ones_are_left_out(tmp_path, capsys):
    path, rows = tmp_path / "weights.csv", {"a, b": [[0.25, 0.75], [0.5, 0.5]], "c": [[1.0], [2.0]]}
    for name, weights in rows.items():
        pictures.keep_weights(path, name, np.array(weights))
    assert {name: x.tolist() for name, x in pictures.read_weights(path).items()} == rows
    assert capsys.readouterr().out == ""
    path.write_text(path.read_text().replace("0.25", "0.26"))
    assert {*pictures.read_weights(path)} == {"c"}
    assert "is damaged" in capsys.readouterr().out
    path.write_text('run,client,0,1\n"a, b",0,0.25,0.75\n"a, b",1,0.5,0.5\n')  # of version 0.2
    assert pictures.read_weights(path)["a, b"].tolist() == rows["a, b"]


# Every command


COMMANDS = [
    *("attack", "baselines", "compression", "federated", "fedfisher_table"),
    *("fedlpa_pictures", "function_space", "knee", "niid_table", "one_shot", "personalized"),
    *("privacy", "secure", "theory"),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_a_folder_that_is_held_or_cannot_be_written(name, tmp_path, capsys):
    main = importlib.import_module(f"experiments.{name}.__main__").main
    (tmp_path / "other").write_text("mine")
    with records.folder(tmp_path / "held"):
        assert main(["--out", str(tmp_path / "held")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: another process is writing to --out {tmp_path / 'held'}")
    assert list((tmp_path / "held").iterdir()) == []
    assert main(["--out", str(tmp_path / "other")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write to --out {tmp_path / 'other'}")
    assert error.count("\n") == 1
    assert (tmp_path / "other").read_text() == "mine"


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "clients/a/0.orbax-checkpoint-tmp/default").mkdir(parents=True)
    for name in (".results.csv.partial", "models/.a.safetensors.12ab.partial", "mine.partial"):
        (tmp_path / name).write_text("half")
    with records.folder(tmp_path):
        found = {path.name for path in tmp_path.rglob("*")}
    assert found == {"models", "clients", "a", "mine.partial"}


COMMAND = """
import dataclasses
from pathlib import Path
import jax
from experiments.harness import commands, records

@dataclasses.dataclass(frozen=True)
class Config:
    \"\"\"A folder.\"\"\"

    out: Path = Path("runs")
    \"\"\"Folder.\"\"\"

@commands.command("experiments.command", "Run until it is terminated.", Config)
def main(asked, console):
    with records.folder(asked.out):
        {}

raise SystemExit(main())
"""
WRITER = COMMAND.format(
    """
        while True:
            records.write_bytes(asked.out / "large.bin", bytes(50_000_000))
            print("written", flush=True)
    """
)
COMPUTER = COMMAND.format(
    """
        square = lambda _, x: jax.numpy.tanh(x @ x)
        found = jax.jit(lambda x: jax.lax.fori_loop(0, 2**31 - 1, square, x))(jax.numpy.eye(99))
        print("computing", flush=True)
        found.block_until_ready()
    """
)

COLLECTOR = COMMAND.format(
    """
        import gc, os, signal, time
        # A shell's background processes ignore it from the start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sent = iter([signal.SENT])
        gc.callbacks.append(lambda *_: [os.kill(os.getpid(), one) for one in sent])
        gc.collect()
        time.sleep(300)
    """
)


@pytest.mark.long
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_terminated_process_leaves_whole_files_and_nothing_beside_them(tmp_path, sent, status):
    words = [sys.executable, "-c", WRITER, "--out", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while "written" not in process.stdout.readline():
            pass
        process.send_signal(sent)
        left = process.stdout.read()
    assert process.returncode == status
    with records.folder(tmp_path):  # the next run
        assert [path.name for path in tmp_path.iterdir()] == ["large.bin"]
    assert (tmp_path / "large.bin").read_bytes() == bytes(50_000_000)
    assert ("the same command continues it" in left) == (sent == signal.SIGTERM)


@pytest.mark.long
def test_a_terminated_process_does_not_wait_for_a_program_that_runs_for_hours(tmp_path):
    words = [sys.executable, "-c", COMPUTER, "--out", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while "computing" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        try:
            left, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    assert "the same command continues it" in left


@pytest.mark.long
@pytest.mark.parametrize(("sent", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_during_a_garbage_collection_ends_a_process(tmp_path, sent, status):
    """Python ignores what a callback of the garbage collection raises."""
    words = [sys.executable, "-c", COLLECTOR.replace("SENT", sent), "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert "the same command continues it" in done.stdout


# Variants and files of one's own


def test_a_variant_is_the_method_with_other_options():
    name = "fedprox@mu=0.25"
    with own_choices():
        asked = commands.read(["--algorithms", "fedavg", name], "", "", config.one_shot)
        assert fj.algorithms.make(name, None) is fj.algorithms.fedprox(mu=0.25)
        assert fj.algorithms.METHODS[name].label == "FedProx, mu 0.25"
        words = commands.write(asked, PROGRAM).split()[3:]
        assert commands.read(words, "", "", config.one_shot) == asked
    assert name not in fj.algorithms.METHODS


def test_options_in_a_name_come_before_those_of_the_command():
    name, model = "fedfisher_kfac@max_examples=7", fj.Model(np.matmul, fj.likelihoods.categorical)
    options = (("fedfisher_kfac.damping", 0.5), ("fedfisher_kfac.max_examples", 9))
    with own_choices():
        choices.add((), [name])
        made = methods.methods(Merging((name,), max_examples=8, options=options), model, 32)
    how = {"max_examples": 7, "damping": 0.5}
    assert made[name].server(None) is fj.algorithms.make("fedfisher_kfac", model, **how)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedprox@nu=1", "fedprox has no option 'nu'. Did you mean 'mu'"),
        ("fedprox@mu=strong", "expected NAME@option=number, also True, False or None"),
        ("fedprox@mu", "expected NAME@option=number"),
        ("fedprox@", "is fedprox@, expected NAME@option=number"),
        ("fedprox@mu=1,", "is fedprox@mu=1,, expected NAME@option=number"),
        ("fedprox@mu=1, mu=2", "expected mu only once"),
    ],
)
def test_a_variant_that_cannot_be_is_refused(name, said):
    with own_choices(), pytest.raises(ValueError, match="--algorithms is fedprox@") as stop:
        commands.read(["--algorithms", name], "", "", config.one_shot)
    assert said in str(stop.value)


OWN = """
import numpy as np
import fisherjax as fj
from fisherjax.algorithms import Row, fedprox

def halves(data_dir):
    x = np.arange(240, dtype=np.uint8).reshape(30, 2, 2, 2)
    y = np.arange(30) % 3
    return (x[:20], y[:20]), (x[20:], y[20:])

METHODS = {"mine": Row("Mine", "here", "weights", fedprox)}
NETWORKS = {"narrow": lambda num_classes: fj.networks.MLP(num_classes=num_classes)}
DATASETS = {"halves": halves}
"""


def test_a_file_brings_methods_networks_and_data(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    words = ["--import", str(path), "--dataset", "halves", "--model", "narrow"]
    words += ["--algorithms", "mine", "mine@mu=0.5", "--mine.mu", "0.25", "--out", "runs/own"]
    with own_choices():
        asked = commands.read(words, "", "", config.one_shot)
        assert (asked.data.dataset, asked.data.model) == ("halves", "narrow")
        assert asked.merging.options == (("mine.mu", 0.25),)
        again = commands.write(asked, PROGRAM).split()[3:]
        assert commands.read(again, "", "", config.one_shot) == asked
        train, test = choices.load("halves", None)
    images = np_images()
    assert (train.num_classes, train.scale, len(test.targets)) == (3, 255.0, 10)
    for place in range(2):
        channel = [value / 255 for value in images[place:160:2]]
        mean = sum(channel) / len(channel)
        spread = math.sqrt(sum((x - mean) ** 2 for x in channel) / len(channel))
        assert train.mean[place] == pytest.approx(mean, rel=1e-12)
        assert train.std[place] == pytest.approx(spread, rel=1e-12)


def np_images() -> list[int]:
    """Return the pixels of `OWN`, of which the last axis is the channel."""
    return list(range(240))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "defines none of METHODS, NETWORKS, DATASETS"),
        ("x = 1\ny = x / 0", "fails, line 2: ZeroDivisionError"),
        ("x = (", "fails, SyntaxError"),
        ("METHODS = {'fedavg': 1}", "'fedavg' in METHODS exists already"),
        ("NETWORKS = {'a+b': 1}", "'a+b' in NETWORKS is no word"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path, text, said):
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with own_choices(), pytest.raises(ValueError, match=f"--import {path}") as stop:
        commands.read(["--import", str(path)], "", "", config.one_shot)
    assert said in str(stop.value)


def test_a_file_that_changed_is_said(written, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    shown = Console(width=500, file=(written / "said").open("w"))
    with own_choices():
        choices.add([str(path)])
        asked = ask(written, imports=(str(path),))
        folders.write_config(written, asked, PROGRAM)
        before = folders.environment(asked)[str(path)]
        path.write_text(OWN + "\n# Another.\n")
        folders.begin(asked, PROGRAM, shown, "some")
        after = folders.environment(asked)[str(path)]
    shown.file.close()
    assert f"{path} was {before}, is {after}" in (written / "said").read_text()
