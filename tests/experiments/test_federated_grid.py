"""Grids of learning rates, early stopping, and what is said of rounds, on made-up numbers."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.federated import barriers, grid, personal, plan
from experiments.federated.__main__ import main
from experiments.federated.grid import Cell
from experiments.harness import records
from experiments.harness.config import Federated, Merging
from tests.experiments.test_federated import SMALL, rows_of

NAME = ("fedavg",)
ASKED = Federated(
    merging=Merging(NAME),
    rounds=8,
    local_epochs=(1,),
    local_learning_rate=(0.1, 0.2),
    server_optimizer="sgd",
    server_learning_rate=(0.5, 1.0),
    seeds=(0, 1),
)


def peaked(cell, where=(1.0, 0.1), quarter=True):
    """Return an accuracy that is greatest at a pair of rates."""
    distance = abs(math.log2(cell.server / where[0])) + abs(math.log2(cell.local / where[1]))
    return 0.9 - 0.1 * distance + 0.01 * (not quarter)


def measured(step, accuracy, asked=ASKED):
    """Return the rows that a unit leaves after some rounds."""
    unit, last = step
    rows = []
    for number in range(1, last + 1):
        values = {("cohort", "loss"): 1.0, ("test", "accuracy"): 0.5}
        if plan.validated(asked, unit.local_epochs, number):
            quarter = number < asked.rounds
            values["validation", "accuracy"] = accuracy(unit.cell, quarter=quarter)
            values["validation", "loss"] = 1.0
        if number == asked.rounds:
            values["traffic", "up"] = 4.0
        rows += [
            records.Row(**unit._asdict(), round=number, split=split, metric=metric, value=value)
            for (split, metric), value in values.items()
        ]
    return rows


def play(asked, accuracy):
    """Run a plan to its end; return all steps and rows."""
    rows, steps = [], []
    while (step := plan.following(asked, rows)) is not None:
        assert len(steps) < 300
        steps.append(step)
        rows = [row for row in rows if row.unit != step.unit] + measured(step, accuracy, asked)
    return steps, rows


def test_cells_run_a_quarter_with_one_seed_and_three_all_rounds_with_all_seeds():
    steps, rows = play(ASKED, peaked)
    first = [step for step in steps if step.rounds == 2]
    whole = [step for step in steps if step.rounds == 8]
    assert {step.unit.seed for step in first} == {0}
    assert len(first) + len(whole) == len(steps)
    assert [sum(s.unit.seed == seed for s in whole) for seed in (0, 1)] == [3, 3]
    assert plan.select(ASKED, rows) == {("fedavg", 1): Cell(1.0, 0.1)}


@pytest.mark.parametrize("where", [(1.0, 0.1), (4.0, 0.4), (0.125, 0.05), (0.5, 0.8)])
def test_a_grid_is_widened_until_the_choice_is_inside_of_it(where):
    _, rows = play(ASKED, lambda cell, quarter: peaked(cell, where, quarter))
    chosen = plan.select(ASKED, rows)["fedavg", 1]
    assert chosen == pytest.approx(where)
    tried = {plan.Unit(*row.unit).cell for row in rows}
    for place, best in enumerate(chosen):
        rates = {cell[place] for cell in tried}
        assert min(rates) < best < max(rates)


def test_a_grid_without_an_end_stops_being_widened():
    steps, _ = play(ASKED, lambda cell, quarter: cell.local * cell.server)
    rates = {step.unit.cell.local for step in steps}
    assert len(rates) == 2 + 5


def test_without_a_server_only_local_rates_are_widened():
    asked = dataclasses.replace(ASKED, server_optimizer="none", server_learning_rate=(1.0,))
    steps, rows = play(asked, peaked)
    assert {step.unit.server_learning_rate for step in steps} == {1.0}
    assert plan.select(asked, rows)["fedavg", 1].local == 0.1


def test_rows_that_are_there_are_not_computed_again():
    steps, rows = play(ASKED, peaked)
    assert plan.following(ASKED, rows) is None
    one = steps[-1].unit
    assert plan.following(ASKED, [r for r in rows if r.unit != one]) == steps[-1]


def test_the_choice_is_that_of_all_rounds_and_seeds():
    """The cell that leads after a quarter falls behind."""

    def late(cell, quarter):
        good = peaked(cell)
        return good if quarter else 1 - good

    _, rows = play(ASKED, late)
    tried = grid.score(rows, 0, 2)
    first, *_, third = grid.best(tried, tried)
    chosen = plan.select(ASKED, rows)["fedavg", 1]
    assert tried[chosen] == tried[third] < tried[first]
    shown = grid.table(ASKED, rows, 8, chosen)
    cells = [cell for line in shown.lines for cell in line]
    assert sum(cell.endswith("\\*") for cell in cells) == 3
    assert sum(cell.endswith("\\*\\*") for cell in cells) == 1


def validation(values):
    return [
        records.Row(
            *("fedavg", 0, number, "validation", "accuracy", value),
            local_epochs=1,
            server_learning_rate=1.0,
        )
        for number, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("values", "stops"),
    [([0.1, 0.2, 0.2], False), ([0.1, 0.2, 0.2, 0.1], True), ([math.nan, 0.1], False)],
)
def test_a_run_stops_when_its_best_is_as_long_ago_as_its_patience(values, stops):
    asked = Federated(merging=Merging(NAME), patience=2)
    assert plan.stopped(asked, validation(values)) == stops
    assert not plan.stopped(dataclasses.replace(asked, patience=None), validation(values))


def test_equal_compute_is_equal_and_half_is_half():
    asked = Federated(local_epochs=(1, 4, 16), rounds=32, personal_points=4)
    assert {epochs * plan.equal_compute(asked, epochs) for epochs in (1, 4, 16)} == {32}
    assert all({16, 32, 32 // e} <= plan.milestones(asked, e) for e in (1, 4, 16))
    fixed = dataclasses.replace(asked, total_epochs=32)
    assert all(plan.equal_compute(fixed, e) == plan.number(fixed, e) for e in (1, 4, 16))


def test_rates_that_differ_have_units_of_other_names():
    units = [plan.Unit("fedavg", 1, rate, 0) for rate in (0.1, 0.1 + 1e-9, 1.0, 10)]
    assert len({unit.name for unit in units}) == 4
    assert units[2].name == "fedavg-1epochs-server1-seed0"


def row(name, number, split, metric, value, **more):
    more = {"local_epochs": 1, "server_learning_rate": 1.0} | more
    return records.Row(name, 0, number, split, metric, value, **more)


def test_barriers_are_compared_in_equal_rounds():
    asked = Federated(local_epochs=(1,))
    rows = [row("fedavg", n, "cohort", "barrier_accuracy", 0.3) for n in (1, 2, 3)]
    rows += [row("fedfish", n, "cohort", "barrier_accuracy", n / 10) for n in (1, 2, 3, 4)]
    rows += [r._replace(metric="barrier_loss") for r in rows]
    found = barriers.pairs(asked, rows, "barrier_accuracy")
    assert found == {("fedfish", 1): [(0.3, 0.1), (0.3, 0.2), (0.3, 0.3)]}
    assert "| FedFish | 1 | 2 | 2 | 3 |" in barriers.words(asked, rows)
    assert barriers.words(asked, rows[:3]) == ""


def test_the_table_has_the_accuracies_of_its_rounds():
    asked = Federated(merging=Merging(NAME), local_epochs=(1, 2), rounds=4, personal_points=2)
    rows = [
        row("fedavg", n, split, "accuracy", (n + add) / 100, local_epochs=e, fraction=fraction)
        for e in (1, 2)
        for n in (1, 2, 3, 4)
        for split, fraction, add in (("test", None, 0), ("held_out", 0.5, 10))
    ]
    each, table = personal.tables_of(asked, rows)
    assert each.headings[2:] == ("1", "2", "3", "4")
    assert [line[2:] for line in each.lines] == [("1.0", "2.0", "3.0", "4.0")] * 2
    numbers = [line[2:] for line in table.lines]
    assert numbers == [
        ("4.0 (4)", "4.0 (4)", "2.0 (2)", "14.0", "14.0", "12.0"),
        ("2.0 (2)", "4.0 (4)", "2.0 (2)", "12.0", "14.0", "12.0"),
    ]
    assert np.isfinite([float(x.split()[0]) for line in numbers for x in line]).all()


@pytest.mark.slow
def test_a_grid_whose_rows_are_cut_goes_on_to_the_same_rows(tmp_path):
    words = (*SMALL, "--rounds", "4", "--local-learning-rate", "0.02", "0.05", "--no-keep-models")
    words += ("--personal-points", "2", "--personal-epochs", "2", "--out", str(tmp_path))
    assert main([*words]) == 0
    found = rows_of(tmp_path)
    text = (tmp_path / "summary.md").read_text()
    assert "### FedAvg, 1 local epoch a round" in text
    assert "\\*\\* |" in text
    assert all((tmp_path / f"{name}.png").exists() for name in ("personal", "tuning", "bytes"))
    rounds = {row["learning_rate"]: {r["round"] for r in found if r == row} for row in found}
    assert {"0.02", "0.05"} <= rounds.keys()
    lines = (tmp_path / "results.csv").read_text().splitlines(keepends=True)
    (tmp_path / "results.csv").write_text("".join(lines[:-3]))
    assert main([*words]) == 0
    assert rows_of(tmp_path) == found
    # Without a grid there are other columns.
    assert main([*SMALL, "--rounds", "4", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_a_run_that_stops_early_is_finished_and_each_round_was_tracked(tmp_path):
    words = (*SMALL, "--rounds", "6", "--patience", "1", "--learning-rate", "1e-9")
    words += ("--learning-rate-schedule", "cosine", "--tracker", "csv", "--out", str(tmp_path))
    assert main([*words]) == 0
    found = rows_of(tmp_path)
    assert {row["round"] for row in found} == {"1", "2"}
    (path,) = (tmp_path / "tracked").iterdir()
    tracked = path.read_text()
    values = [float(line.rpartition(",")[2]) for line in tracked.splitlines()]
    assert values == [float(row["value"]) for row in found]
    text = (tmp_path / "results.csv").read_text()
    assert main([*words]) == 0
    assert (tmp_path / "results.csv").read_text() == text
    # Rows that are lost come from the checkpoint, and so do those that were tracked.
    (tmp_path / "results.csv").write_text("".join(text.splitlines(keepends=True)[:-1]))
    assert main([*words]) == 0
    assert path.read_text() == tracked
