"""What an experiment in one round shows, of made-up rows: tables, summary, labels, figures."""

import dataclasses
import io
import re

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from experiments.harness import (
    accuracies,
    commands,
    figures,
    folders,
    memory,
    tables,
    titles,
)
from experiments.harness.config import Data, Merging, OneShot
from experiments.harness.steps import row_of

PROGRAM = "experiments.one_shot"
NAMES = ("fedprox", "regmean", "fedlpa")


def printed(thing: object, width: int = 80) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


@pytest.fixture
def reported(tmp_path, rows_of):
    """Report a made-up run; return what was asked, what was printed, and summary.md."""

    def report(asked: OneShot) -> tuple[OneShot, str, str]:
        asked = dataclasses.replace(asked, out=tmp_path)
        folders.write_config(tmp_path, asked, PROGRAM)
        console = Console(width=100, file=io.StringIO(), highlight=False)
        accuracies.report(asked, titles.title(asked.data), rows_of(asked), PROGRAM, console)
        return asked, console.file.getvalue(), (tmp_path / "summary.md").read_text()

    return report


# Tables


def test_splits_stand_beside_each_other_with_the_median_and_the_worst_run(rows_of, reported):
    asked = OneShot(merging=Merging(NAMES), partition_seeds=(3, 7), seeds=(0, 1, 2))
    found = accuracies.lines(rows_of(asked), NAMES)
    shown = accuracies.split_table(found)
    assert shown.headings == ("partition seed", "median", "worst", "3", "7")
    assert "central" not in [name for name, *_ in shown.lines]  # all data have no split
    by_name = {line.algorithm: line for line in found}
    for name, median, worst, *means in shown.lines:
        units = by_name[name].units
        values = np.array([[units[split, seed] for seed in asked.seeds] for split in (3, 7)])
        expected = [np.median(values), values.min(), *values.mean(axis=1)]
        assert [median, worst, *means] == [f"{value:.1f}" for value in expected]
    _, printed, written = reported(asked)
    assert shown.title in " ".join(printed.split())
    assert f"## {shown.title}" in written
    assert (
        accuracies.split_table(accuracies.lines(rows_of(OneShot(partition_seeds=(3,))), NAMES))
        is None
    )


def test_exchanges_without_training_have_lines_of_their_own(rows_of):
    asked = OneShot(merging=Merging(NAMES), then_rounds=2)
    rows = rows_of(asked)
    more = [
        row._replace(algorithm=f"{row.algorithm}+analytic_head", round=2, value=0.96)
        for row in rows
        if row.algorithm in NAMES and row.round == 1
    ]
    found = accuracies.lines([*rows, *more], NAMES)
    exchanged = [f"{name}+analytic_head" for name in NAMES]
    # What was exchanged on is better here; the rest are equal, and stay in the order asked.
    references = ["local", "ensemble", "central"]
    assert [x.algorithm for x in found] == [*exchanged, *NAMES, *references]
    assert {x.mean for x in found if x.algorithm in exchanged} == {96.0}


def test_of_several_exchanges_the_table_has_the_last_and_the_curves_have_all(rows_of):
    asked = OneShot(merging=Merging(NAMES), then_rounds=2)
    rows = rows_of(asked)
    more = [
        row._replace(algorithm=f"{row.algorithm}+natural_gradient", round=number, value=number / 10)
        for row in rows
        if row.algorithm == "fedlpa" and row.round == 1
        for number in (2, 3, 4, 5)
    ]
    found = {x.algorithm: x.mean for x in accuracies.lines([*rows, *more], NAMES)}
    assert found["fedlpa+natural_gradient"] == 50.0
    curves = accuracies.curves([*rows, *more], NAMES)
    # Both go on from the same merge.
    exchanged, averaged = curves["fedlpa+natural_gradient"], curves["fedlpa"]
    assert exchanged[0] == averaged[0]
    assert [set(values) for values in exchanged[1:]] == [{20.0}, {30.0}, {40.0}, {50.0}]
    assert list(accuracies.curves(more, NAMES)) == ["fedlpa+natural_gradient"]
    shown = accuracies.curve_table(curves)
    assert {len(line) for line in shown.lines} == {len(shown.headings)} == {6}
    assert next(line for line in shown.lines if line[0] == "fedlpa")[-2:] == ("-", "-")


def test_the_table_averages_local_models_over_clients_and_everything_over_runs(rows_of):
    asked = OneShot(Data(num_clients=3), partition_seeds=(0, 1), seeds=(0,))
    names = asked.merging.algorithms
    table = {line.algorithm: line for line in accuracies.lines(rows_of(asked), names)}
    assert list(table) == [*names, "local", "ensemble", "central"]
    assert np.allclose(table["fedavg"].accuracies, [25, 26])
    assert np.allclose(table["local"].accuracies, [35, 36])
    assert table["central"].accuracies == (50.0,)


def test_the_table_is_of_the_first_round_and_the_curves_are_of_all(rows_of):
    asked = OneShot(merging=Merging(NAMES), then_rounds=2)
    rows = rows_of(asked)
    (line,) = [x for x in accuracies.lines(rows, NAMES) if x.algorithm == "fedlpa"]
    curves = accuracies.curves(rows, NAMES)
    assert list(curves) == list(NAMES)
    assert line.accuracies == curves["fedlpa"][0]
    assert {len(curve) for curve in curves.values()} == {1 + asked.then_rounds}
    written = tables.markdown(accuracies.curve_table(curves))
    (own,) = [x for x in written.splitlines() if x.startswith("| fedlpa |")]
    assert own.endswith(f"{np.mean(curves['fedlpa'][-1]):.1f} |")


def test_rounds_that_nobody_asked_for_make_no_curves(rows_of, reported, tmp_path):
    asked = OneShot(merging=Merging(NAMES))
    assert accuracies.curves(rows_of(asked), NAMES) == {}
    reported(asked)
    assert not (tmp_path / "rounds.png").exists()


def test_the_summary_holds_the_table_as_printed_and_the_command(reported):
    asked, shown, summary = reported(OneShot(then_rounds=1))
    assert commands.write(asked, PROGRAM) in summary
    assert f"jax {folders.environment()['jax']}" in summary
    plain = [re.sub("[|*]", " ", line).split() for line in summary.splitlines()]
    names = ("local", "ensemble", "central", *asked.merging.algorithms)
    own = [line for line in shown.splitlines() if line.split()[:1] in [[name] for name in names]]
    # All in the first table, all with splits in the second, and methods in that of rounds.
    assert len(own) == 2 * len(names) - 1 + len(asked.merging.algorithms)
    assert all(line.split() in plain for line in own)


def test_the_best_way_of_merging_stands_out_and_no_reference_does(rows_of):
    rows = [
        row._replace(value=0.9 if row.algorithm in ("central", "regmean") else row.value)
        for row in rows_of(OneShot())
    ]
    table = accuracies.table(accuracies.lines(rows, OneShot().merging.algorithms), "title")
    bold = [line for line in tables.markdown(table).splitlines() if "**" in line]
    assert [line.split()[1] for line in bold] == ["**regmean**"]


GAINS = (
    row_of("fedavg", (0, 0), 0.40, seconds=0.5, upload_bytes=100_000),
    row_of("fedlpa", (0, 0), 0.70, seconds=1.5, upload_bytes=400_000),
    row_of("regmean", (0, 0), 0.90, seconds=0.02, upload_bytes=150_000),
    row_of("fedprox", (0, 0), 0.35, seconds=5.0, upload_bytes=100_000),
    row_of("local", (0, 0), 0.99, seconds=9.0, client=0),
    row_of("ensemble", (0, 0), 0.80, upload_bytes=100_000),
    row_of("central", (None, 0), 0.98, seconds=9.0),
)


def test_the_table_leads_with_what_wins_and_ends_with_the_references():
    names = ("fedavg", "fedlpa", "fedprox", "regmean")
    table = accuracies.table(accuracies.lines(GAINS, names), "title")
    merged = ["regmean", "fedlpa", "fedavg", "fedprox"]
    assert [line[0] for line in table.lines] == [*merged, "local", "ensemble", "central"]
    assert (table.best, list(table.dim), list(table.sections)) == (0, [4, 5, 6], [3])


def test_gains_are_points_above_fedavg_for_each_megabyte_more_and_each_second():
    names = ("fedavg", "fedlpa", "fedprox", "regmean")
    table = accuracies.table(accuracies.lines(GAINS, names), "title")
    assert table.headings[-2:] == ("points/MB", "points/s")
    found = {line[0]: tuple(line[-2:]) for line in table.lines}
    assert found.pop("fedlpa") == ("100", "20.0")  # 30 points, 0.3 MB more, 1.5 s
    assert found.pop("regmean") == ("1000", "2500")
    assert found.pop("fedprox") == ("-", "-1.00")  # it sends what FedAvg's clients do
    assert set(found.values()) == {("-", "-")}
    assert "Gains are from fedavg's mean" in accuracies.footnote(names)


def test_without_fedavg_there_are_no_gains():
    names = ("fedlpa", "regmean")
    table = accuracies.table(accuracies.lines(GAINS, names), "title")
    assert table.headings[-1] == "seconds"
    assert {len(line) for line in table.lines} == {len(table.headings)}
    assert "Gains" not in accuracies.footnote(names)


def test_a_narrow_terminal_breaks_lines_but_no_cell(rows_of, tmp_path):
    asked = OneShot(out=tmp_path)
    name = "fedfisher_kfac+natural_gradient"
    more = [row_of(name, (0, 0), 0.9, seconds=0.5, upload_bytes=5000)]
    folders.write_config(tmp_path, asked, PROGRAM)
    console = Console(width=60, file=io.StringIO(), highlight=False)
    accuracies.report(asked, "title", [*rows_of(asked), *more], PROGRAM, console)
    shown = console.file.getvalue()
    assert name in shown
    assert "points/s" in shown
    assert "…" not in shown


def test_markdown_csv_and_the_terminal_show_the_same_cells():
    table = tables.Table("Title", ("name", "a", "b"), [("x", "1", "2"), ("y", "3", "4")])
    cells = ["name", "a", "b", "x", "1", "2", "y", "3", "4"]
    assert printed(tables.terminal(table)).replace("─", " ").split() == ["Title", *cells]
    heading, _, *lines = tables.markdown(table, 2).splitlines()
    assert heading == "## Title"
    assert lines.pop(1) == "| --- | ---: | ---: |"
    assert "".join(lines).replace("|", " ").split() == cells
    assert re.split("[,\n]", tables.csv_text(table.headings, table.lines).strip()) == cells


def test_numbers_are_rounded_for_reading():
    assert [tables.size(10**n * 35.328) for n in (0, 3, 6, 9)] == [
        *("35.3 B", "35.3 kB", "35.3 MB", "35.3 GB")
    ]
    assert (tables.duration(125), tables.duration(7200)) == ("2 min", "2.0 h")
    assert (tables.spread([1.0, 2.0]), tables.spread([0.5], digits=2)) == ("1.5 ± 0.7", "0.50")
    assert tables.spread([]) == "-"
    assert [tables.quotient(3, x) for x in (None, 0, -1, 2, 1e-3)] == [
        "-",
        "-",
        "-",
        "1.50",
        "3000",
    ]


def test_a_title_says_how_the_data_are_split():
    said = titles.title(Data(partition="niid_bench", beta=0.5))
    assert said == "digits, MLP, 5 clients (Dirichlet of each class, beta 0.5)"


# Labels


def test_label_tables_hold_every_count_in_80_columns():
    counts = np.full((5, 10), 5949)
    counts[0, 3] = 0
    cells = printed(accuracies.label_table(counts, partition_seed=3)).split()
    assert [cells.count(number) for number in ("5949", "·", "59490")] == [49, 1, 4]


def test_label_tables_of_many_clients_or_classes_stay_short():
    counts = np.random.default_rng(0).integers(500, size=(200, 100))
    shown = printed(accuracies.label_table(counts, partition_seed=0))
    assert len(shown.splitlines()) < 30
    assert "180 more clients" in shown
    assert "…" not in shown


# Figures


def colours_in(path) -> set[str]:
    pixels = np.uint8(255 * image.imread(path)[..., :3] + 0.5).astype(int)
    return {f"#{code:06x}" for code in np.unique(pixels @ [65536, 256, 1])}


def test_an_algorithm_keeps_its_colour_in_every_figure_and_any_order(tmp_path, rows_of):
    few = NAMES[1:]
    asked = OneShot(merging=Merging(NAMES), then_rounds=1, seeds=(0,), partition_seeds=(0,))
    rows = rows_of(asked)
    accuracies.figure(accuracies.lines(rows, NAMES), "title", tmp_path / "bars.png")
    curves = accuracies.curves(rows, few[::-1])
    accuracies.curve_figure(curves, "title", tmp_path / "curves.png")
    drawn = {name: figures.style(name)["color"] for name in NAMES}
    bars, lines = (colours_in(tmp_path / f"{name}.png") for name in ("bars", "curves"))
    assert {name for name in NAMES if drawn[name] in bars} == set(NAMES)
    assert {name for name in NAMES if drawn[name] in lines} == set(few)


def test_the_figure_is_a_picture_and_takes_a_single_run(tmp_path, rows_of):
    asked = OneShot(seeds=(0,), partition_seeds=(0,))
    table = accuracies.lines(rows_of(asked), asked.merging.algorithms)
    accuracies.figure(table, titles.title(asked.data), tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


# Memory


def test_a_run_that_exceeds_the_device_is_refused_with_the_chunk_that_fits():
    need = memory.Need("training", resident=600, scratch=4000, side_by_side=8)
    assert "8 side by side" in memory.check(need, 4600)
    assert "8 side by side" in memory.check(need, None)
    with pytest.raises(ValueError, match=r"training, 8 side by side\) of .*--clients-per-chunk 6"):
        memory.check(need, 3600)
    with pytest.raises(ValueError, match="Not even one client at a time would fit"):
        memory.check(need, 1000)
