"""Kept clients: merged without training, and trained again if a byte or an option changed."""

import dataclasses

import numpy as np
import pytest

from experiments.harness import checkpoints, kept_clients, one_round, records, steps, tasks
from experiments.harness.config import Data, Merging, OneShot, Training

ASKED = OneShot(
    Data(num_clients=2, alpha=1.0),
    Training(learning_rate=0.1, momentum=0.0, batch_size=64),
    Merging(("fedavg", "fedprox")),
    epochs=1,
    partition_seeds=(0,),
    seeds=(0,),
    central=False,
)
UNIT = (0, 0)


def run(asked: OneShot, wanted: tuple[str, ...]) -> tuple[list[records.Row], int]:
    """Compute methods; return their accuracies and the number of epochs of training."""
    told = []
    rows = one_round.run(one_round.only(tasks.one_round(asked), wanted), UNIT, told.append)
    accuracies = [row._replace(seconds=None) for row in rows if row.metric == "accuracy"]
    return accuracies, sum(isinstance(one, float) for one in told)


@pytest.mark.long
def test_kept_clients_are_merged_without_training_until_something_changed(tmp_path, capsys):
    plain, _ = run(ASKED, ("fedavg", "fedprox", one_round.REFERENCES))
    kept = dataclasses.replace(ASKED, keep_clients=True, out=tmp_path)
    assert run(kept, ("fedavg", "fedprox", one_round.REFERENCES)) == (plain, 2)
    folders = {path.name: path for path in (tmp_path / kept_clients.FOLDER).iterdir()}
    assert len(folders) == 2
    # Another method and another option of a method: nothing is trained.
    merging = Merging(("regmean", "fisher_merge"), options=(("regmean.shrink", 0.5),))
    other = dataclasses.replace(kept, merging=merging)
    expected, epochs = run(dataclasses.replace(other, keep_clients=False), ("regmean",))
    assert epochs == 1
    assert run(other, ("regmean",)) == (expected, 0)
    # The seconds are those of the training.
    rows = one_round.run(one_round.only(tasks.one_round(kept), (one_round.REFERENCES,)), UNIT)
    assert all(row.seconds > 0 for row in rows if row.algorithm == "local")
    # A method that trains its own is another training, and again with another option.
    assert run(kept, ("fedprox",))[1] == 0
    merging = Merging(("fedavg", "fedprox"), options=(("fedprox.mu", 0.5),))
    assert run(dataclasses.replace(kept, merging=merging), ("fedprox",))[1] == 1
    assert run(dataclasses.replace(kept, epochs=2), ("fedavg",))[1] == 2
    capsys.readouterr()
    # One changed bit.
    base = next(
        path
        for path in folders.values()
        if "method" not in (path / "0/default" / checkpoints.RECORD).read_text()
    )
    file = base / "0/default" / checkpoints.ARRAYS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run(kept, ("fedavg",)) == ([row for row in plain if row.algorithm == "fedavg"], 1)
    assert "is corrupt" in capsys.readouterr().out
    assert run(kept, ("fedavg",))[1] == 0


@pytest.mark.long
def test_the_size_is_said_before_the_run_and_is_that_of_the_files(tmp_path):
    kept = dataclasses.replace(ASKED, keep_clients=True, out=tmp_path)
    task = one_round.only(tasks.one_round(kept), ("fedavg",))
    said = kept_clients.announce(tmp_path, [(task, [UNIT])])
    params, key = steps.start(task, 0)
    given = task, UNIT, params, key, lambda _: None, task.optimizer
    trained, _ = kept_clients.trained(*given)
    numbers = 2 * (64 * 64 * 2 + 64 * 10) + 64 * 64 * 2 + 64 * 10  # two models and their start
    assert 4 * numbers < 106_100 < 4 * numbers + 200
    assert said == "Trained clients are kept in clients/: up to 106 kB of 1 trainings."
    (file,) = tmp_path.rglob(checkpoints.ARRAYS)
    assert 105_500 < file.stat().st_size < 107_500
    again, _ = kept_clients.trained(*given)
    for one, other in zip(*map(np.asarray, (trained.loss, again.loss)), strict=True):
        assert np.array_equal(one, other)
    assert kept_clients.announce(tmp_path, [(task._replace(config=ASKED), [UNIT])]) == ""


ABOUT = {"epochs": 1, "seed": 0}


@pytest.mark.parametrize(
    ("leaf", "rows"),
    [
        (np.zeros(3), [{"training": ABOUT | {"seed": 1}, "seconds": 1.0}]),
        (np.zeros(4), [{"training": ABOUT, "seconds": 1.0}]),  # a network of another size
        (np.zeros(3), []),
        (np.zeros(3), [5]),
        (np.zeros(3), [{"training": ABOUT}]),
    ],
)
def test_clients_of_another_training_are_trained_again_with_one_line(tmp_path, capsys, leaf, rows):
    folder, like = tmp_path / "split0-seed0-0", {"w": np.zeros(3)}
    checkpoints.save(folder, 0, {"w": leaf}, rows)
    assert kept_clients._kept(folder, like, ABOUT) is None
    said = f"{folder} holds clients of another training: they are trained again.\n"
    assert capsys.readouterr().out == said
    # There is room for the clients that are trained now, which are then read.
    checkpoints.save(folder, 0, like, [{"training": ABOUT, "seconds": 2.0}])
    state, seconds = kept_clients._kept(folder, like, ABOUT)
    assert (state["w"].shape, seconds) == ((3,), 2.0)
    assert capsys.readouterr().out == ""
