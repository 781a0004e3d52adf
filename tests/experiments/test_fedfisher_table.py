"""FedFisher's table: its cells, its numbers, its resumption, and how long it says it will take."""

import csv
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.fedfisher_table import __main__ as fedfisher_table
from experiments.fedfisher_table import table as fedfisher
from experiments.fedfisher_table.table import Cell, Grid
from experiments.harness import forecast, grids, one_round, records, steps, tasks, votes
from experiments.harness.config import IMAGES, Merging
from experiments.harness.grid_runs import WALL
from experiments.harness.records import ONE_SHOT, Row

TINY = [
    *("--datasets", "digits", "--num-clients", "3", "4", "--alphas", "0.5", "--epochs", "1"),
    *("--seeds", "0", "1", "--algorithms", "regmean", "fednova", "fedavg"),
]


def read(folder):
    return records.read_rows(folder / records.RESULTS, ONE_SHOT)


def lines_of(folder):
    with open(folder / "table.csv", newline="") as file:
        return {(int(x["num_clients"]), x["algorithm"]): x for x in csv.DictReader(file)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    assert fedfisher_table.main([*TINY, "--out", str(out)]) == 0
    return out


def row(algorithm, value, metric="accuracy", **more):
    return Row(algorithm, 0, more.pop("round", 1), "test", metric, value, partition_seed=3, **more)


# Content


@pytest.mark.slow
def test_every_cell_and_seed_leaves_its_run_and_its_label_table(finished):
    folders = {path.name for path in (finished / "digits").iterdir()}
    assert folders == {f"m{number}-alpha0.5-seed{seed}" for number in (3, 4) for seed in (0, 1)}
    for folder in (finished / "digits").iterdir():
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.json", "results.csv", "label_counts.csv"}


def test_the_table_holds_what_the_runs_measured(finished):
    text, lines = (finished / "table.md").read_text(), lines_of(finished)
    assert len(lines) == 6
    for (number, algorithm), line in lines.items():
        rows = [
            own
            for seed in (0, 1)
            for own in read(finished / "digits" / f"m{number}-alpha0.5-seed{seed}")
            if (own.algorithm, own.metric) == (algorithm, "accuracy")
        ]
        values = [100 * own.value for own in rows]
        assert line["runs"] == str(len(values)) == "2"
        assert np.isclose(float(line["mean"]), np.mean(values), atol=0.006)
        assert np.isclose(float(line["std"]), np.std(values, ddof=1), atol=0.006)
        assert int(line["upload_bytes"]) == rows[0].upload_bytes
        assert np.isclose(float(line["seconds"]), np.mean([own.seconds for own in rows]), atol=1e-3)
        assert f"| {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} |" in text


def test_columns_are_in_the_papers_order_and_others_follow(finished):
    assert "|  | FedAvg | RegMean | FedNova |" in (finished / "table.md").read_text()
    names = fedfisher.columns(Grid(calibrate=("ccvr",)))
    assert names[""] == list(Grid().merging.algorithms)
    assert names[""][0] == "fedavg"
    assert names[""][-2:] == ["fedfisher_kfac", "fedfisher_sequential"]
    assert names["ccvr"] == [f"{name}+ccvr" for name in names[""]]


def test_several_numbers_of_clients_are_drawn(finished):
    assert (finished / "clients.png").read_bytes().startswith(b"\x89PNG")
    assert "clients.png" in (finished / "table.md").read_text()


def test_uploads_are_told_as_multiples_of_a_model(finished):
    lines = lines_of(finished)
    sent = {name: int(lines[3, name]["upload_bytes"]) for name in ("fedavg", "regmean")}
    times = sent["regmean"] / sent["fedavg"]
    wanted = rf"\| RegMean \| {sent['regmean'] / 1000:.1f} \| {times:.2f} \|"
    assert re.search(wanted, (finished / "table.md").read_text())


def test_the_halves_of_a_round_are_told_apart_where_they_were_timed_apart():
    rows = [
        row("local", 0.5, client=0, seconds=3.0),
        row("local", 0.5, client=1, seconds=3.0),
        row("fedavg", 0.5, seconds=5.0, upload_bytes=8),
        row("fedavg", 2.0, metric="server_seconds"),
        row("regmean", 0.6, seconds=5.0),
        row("fedavg+ccvr", 0.7, round=2, seconds=6.0),
    ]
    found = fedfisher.measured(rows)
    assert found["fedavg"] == ((50.0,), 8, 5.0, 2.0)
    assert found["fedavg"].clients == 3.0
    assert found["regmean"].clients is None
    assert found["fedavg+ccvr"].accuracies == (70.0,)
    assert found["local"].seconds == 3.0
    grid = Grid(datasets=("digits",), alphas=(0.1,), seeds=(0,), calibrate=("ccvr",))
    done = {unit: rows for unit in grids.units(grid)}
    _, after = fedfisher.tables(grid, "digits", done)
    assert after.lines[0][:2] == ("5 clients, α = 0.1", "70.0")
    cost = {line[0]: line[1:] for line in fedfisher.costs(grid, "digits", 5, done).lines}
    assert cost["FedAvg"][2:] == ("5.00", "3.00", "2.00")
    assert cost["RegMean"][2:] == ("5.00", "-", "-")
    assert cost["training"][2:] == ("3.00", "3.00", "-")


# The paper


def test_the_papers_numbers_are_those_of_its_table():
    paper = fedfisher.published()
    assert len(paper) == 4 * 3 * 8
    assert paper[Cell("cifar10", 5, 0.1), "fedfisher_kfac"] == (47.01, 1.87)
    assert paper[Cell("svhn_cropped", 5, 0.2), "dense"] == (77.73, 2.07)
    assert paper[Cell("fashion_mnist", 5, 0.05), "fedavg"] == (36.02, 2.77)
    assert paper[Cell("cinic10", 5, 0.05), "fedfisher_kfac"] == (32.90, 2.60)
    assert all(0 < own.spread < own.accuracy < 100 for own in paper.values())
    assert {cell.dataset for cell, _ in paper} < {*IMAGES}


def test_theirs_stand_in_brackets_where_they_have_some():
    grid = Grid(datasets=("cifar10",), num_clients=(5, 10), alphas=(0.1,), seeds=(0,))
    done = {unit: [row("fedavg", 0.25)] for unit in grids.units(grid)}
    (table,) = fedfisher.tables(grid, "cifar10", done)
    cells = [dict(zip(table.headings, line, strict=True)) for line in table.lines]
    assert [own["FedAvg"] for own in cells] == ["25.0 (36.4)", "25.0"]
    assert [own["RegMean"] for own in cells] == ["- (36.6)", "-"]


def test_every_cell_of_the_default_grid_is_split_as_in_the_authors_code():
    for (cell, seed), asked in grids.units(Grid(datasets=IMAGES)).items():
        assert (asked.data.partition, asked.data.alpha) == ("dirichlet_of_client", cell.alpha)
        assert (asked.partition_seeds, asked.seeds, asked.central) == ((3,), (seed,), False)
        assert (asked.data.num_clients, asked.epochs) == (5, 10)
    assert len({asked.out for asked in grids.units(Grid()).values()}) == 2 * 3 * 3


# Continued


@pytest.mark.long
def test_a_finished_grid_computes_nothing_and_an_unfinished_one_what_is_missing(
    finished, compilations, monkeypatch, capsys
):
    before = (finished / "table.csv").read_text()
    with compilations() as count:
        assert fedfisher_table.main([*TINY, "--out", str(finished)]) == 0
    assert count() == 0
    assert "Predicted" not in capsys.readouterr().out
    lost = finished / "digits" / "m4-alpha0.5-seed1"
    kept = finished / "digits" / "m4-alpha0.5-seed0" / records.RESULTS
    old, old_kept = read(lost), kept.read_bytes()
    (lost / records.RESULTS).unlink()
    calls = []
    run = one_round.run
    monkeypatch.setattr(one_round, "run", lambda *given: calls.append(given) or run(*given))
    monkeypatch.setattr(forecast, "probe", None)  # the run that is there tells how long
    assert fedfisher_table.main([*TINY, "--out", str(finished)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"digits, 4 clients: 1 to run, about \d+ s \(as those that are done\)", said)
    assert len(calls) == 1
    assert kept.read_bytes() == old_kept
    values = [[r.value for r in rows if r.metric == "accuracy"] for rows in (old, read(lost))]
    assert values[0] == values[1]
    took = re.compile(r",[^,]*,[^,]*$", re.MULTILINE)
    assert took.sub("", (finished / "table.csv").read_text()) == took.sub("", before)


@pytest.mark.long
def test_a_killed_grid_has_the_table_of_what_was_finished(finished, tmp_path, monkeypatch):
    run, calls = one_round.run, []

    def killed(*given):
        if calls:
            raise KeyboardInterrupt
        calls.append(given)
        return run(*given)

    monkeypatch.setattr(one_round, "run", killed)
    assert fedfisher_table.main([*TINY, "--out", str(tmp_path)]) == 130
    runs = {key: line["runs"] for key, line in lines_of(tmp_path).items()}
    assert runs[3, "fedavg"] == "1"
    assert runs[4, "fedavg"] == "0"
    monkeypatch.setattr(one_round, "run", run)
    assert fedfisher_table.main([*TINY, "--out", str(tmp_path)]) == 0
    ours, whole = (
        {key: (line["mean"], line["std"]) for key, line in lines_of(out).items()}
        for out in (tmp_path, finished)
    )
    assert ours == whole


# Foretold


@pytest.fixture(scope="module")
def ready():
    merging = Merging(("fedavg", "fisher_merge"))
    grid = Grid(merging, datasets=("digits",), alphas=(0.1, 0.5), seeds=(0,), epochs=3)
    return tasks.one_rounds(list(grids.units(grid).values()))


@pytest.mark.long
def test_the_probe_compiles_what_the_runs_need(ready, compilations):
    found = forecast.probe(ready)
    assert min(found[:2]) > 0
    assert found.distillation == 0
    _, other = ready
    (federation,) = other.federations.values()
    params, key = steps.start(other, 0)
    how = {"key": key, "optimizer": other.optimizer, "progress": lambda *_: None}
    with compilations() as count:
        trained = fj.training.train(
            other.model, params, federation, **how, **steps.training_options(other, federation)
        )
        for method in other.methods.values():
            fj.merging.summarize(method.clients, trained, federation, key=key)
    assert count() == 0


class Work(NamedTuple):
    params: Any
    epoch: jax.Array


def test_a_merge_in_stages_is_foretold_from_the_first_of_them_and_the_last(ready, monkeypatch):
    now, played = [0.0], []

    def begin(_, received, params, *rest):
        return Work(params, jnp.zeros((), jnp.int32))

    def advance(_, work):
        played.append(int(work.epoch))
        now[0] += 1.0 + played[-1]  # as images gather, an epoch takes longer
        diverged = jax.tree.map(lambda leaf: leaf * jnp.nan, work.params)
        return Work(diverged, work.epoch + 1)

    def finish(work, state):
        return work.params, state, ()

    stages = fj.algorithms.Stages(20, begin, advance, finish)
    fedavg = ready[0].methods["fedavg"]
    slow = fedavg.clients._replace(reduce=None, aggregate=stages)
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now[0])
    task = ready[0]._replace(methods={"fedavg": fedavg._replace(server=lambda _: slow)})
    assert forecast.probe([task, ready[1]]).distillation == 2 * sum(range(1, 21))
    assert played == [0, 1, 19]


@pytest.fixture(scope="module")
def voting():
    merging = Merging(("fedavg", "fedov", "fedov+student"))
    grid = Grid(merging, datasets=("digits",), alphas=(0.1, 0.5), seeds=(0,), epochs=3)
    return tasks.one_rounds(list(grids.units(grid).values()))


@pytest.mark.long
def test_fedov_is_foretold_from_its_clients_and_a_few_epochs_of_its_student(voting, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now[0])
    batch = voting[0].config.training.batch_size

    def passes(federation):
        return int(fj.clients.num_batches(federation.sizes, batch).sum())

    def trained(_, federation, keys, *, epochs, **how):
        now[0] += 8.0 * epochs * passes(federation)  # seconds a minibatch
        params = jax.vmap(voting[0].voting.init)(jax.random.split(keys[0], 5))
        return fj.training.Trained(params)

    def taught(_, stacked, inputs, key, epochs):
        now[0] += 50.0 + 2.0 * epochs
        return ()

    monkeypatch.setattr(forecast.votes, "trained", trained)
    monkeypatch.setattr(forecast.votes, "distil", taught)
    found = forecast.probe(voting)
    key = steps.start(voting[0], 0)[1]
    # One chunk of one client: nobody waits for others.
    left = [votes.split(*own.federations.values(), key)[0] for own in voting]
    assert np.isclose(found.training, 8.0 * 3 * sum(map(passes, left)))
    assert np.isclose(found.distillation, 2 * (50.0 + 2.0 * 100))
    alone = [own._replace(voting=own.voting._replace(names=("fedov",))) for own in voting]
    found = forecast.probe(alone)
    whole = [next(iter(own.federations.values())) for own in voting]
    assert np.isclose(found.training, 8.0 * 3 * sum(map(passes, whole)))
    assert found.distillation == 0


@pytest.mark.slow
def test_the_probe_compiles_what_fedov_needs(voting, compilations):
    forecast.probe(voting)
    federation, aside = votes.split(*voting[1].federations.values(), jax.random.key(5))
    options = steps.training_options(voting[1], federation)
    options["epochs"] = 1  # another number compiles the cut of the losses anew, and nothing else
    own, key, inputs = voting[1].voting, jax.random.key(1), federation.inputs[aside]
    with compilations() as count:
        models = votes.trained(own, federation, (key, key), **options).params
        votes.distil(own, models, inputs, key, epochs=3)
    assert count() == 0


def test_twice_the_runs_take_twice_the_time():
    one = forecast.Forecast(30.0, 12.0)
    assert one.seconds == 42.0
    said = forecast.describe([("digits, 5 clients", 3, one), ("digits, 9 clients", 2, 600.0)])
    assert "digits, 5 clients: 3 to run, about 42 s (training 30 s, summaries 12 s)" in said
    assert "digits, 9 clients: 2 to run, about 20 min (as those that are done)" in said
    assert "Predicted: about 21 min in all" in said
    assert "compiling and the server's other merges come on top" in said


def test_the_time_is_said_before_the_first_run(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(one_round, "run", stopped)
    assert fedfisher_table.main([*TINY, "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().out
    assert re.search(r"digits, 3 clients: 2 to run, about \d+ s \(training", said)
    assert "Predicted: about" in said
    assert not list(tmp_path.rglob("results.csv"))


# Refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--datasets minst", "--datasets is 'minst', did you mean 'mnist'"),
        ("--datasets", "--datasets is empty, expected at least one"),
        ("--alphas 0", "--alphas is 0.0, expected a number above 0"),
        ("--alphas 0.1 0.1", "--alphas is 0.1 0.1, expected each only once"),
        ("--num-clients 0", "--num-clients is 0, expected 1 or more"),
        ("--num-clients 5 5", "expected each only once"),
        ("--num-clients 3 5 --clients-per-chunk 4", "--clients-per-chunk is 4"),
        ("--seeds", "--seeds is empty"),
        ("--seeds -1", "--seeds is -1"),
        ("--partition-seed -1", "--partition-seed is -1, expected 0 to 2**32 - 1"),
        ("--epochs 0", "--epochs is 0"),
        ("--algorithms fedfisher_kfca", "did you mean 'fedfisher_kfac'"),
        ("--calibrate ccvr ccvr", "--calibrate is ccvr ccvr, expected each only once"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path, capsys, words, message):
    arguments = ["--datasets", "digits", *words.split(), "--out", str(tmp_path / "out")]
    assert fedfisher_table.main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_another_experiment_in_the_same_folder_is_refused(finished, capsys):
    before = (finished / "table.csv").read_bytes()
    assert fedfisher_table.main([*TINY, "--epochs", "2", "--out", str(finished)]) == 1
    assert "epochs was 1, is 2" in capsys.readouterr().err
    assert (finished / "table.csv").read_bytes() == before


def test_the_wall_seconds_of_a_run_are_in_its_results(finished):
    rows = read(finished / "digits" / "m3-alpha0.5-seed0")
    assert [own.algorithm for own in rows if own.metric == WALL] == ["all"]
