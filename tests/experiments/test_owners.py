"""Data whose clients are their own: which are read, and what the command refuses."""

import dataclasses

import numpy as np
import pytest

import fisherjax as fj
from experiments.federated import owners
from experiments.federated.__main__ import main
from experiments.harness import config, limits, tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Domains of C4: 12 with 1 to 12 pages of 150 characters, and one whose text is too short."""
    path = tmp_path_factory.mktemp("data")
    pages = [(f"d{k:02}.org", f"{k}" * 150) for k in range(1, 13) for _ in range(k)]
    fj.datasets.group([*pages, ("short.org", "x")], path / "c4", shards=2)
    return path


def asked(folder, **who):
    small = {"num_clients": 8, "client_examples": 3} | who
    default = config.federated("c4")
    data = dataclasses.replace(default.data, data_dir=folder, **small)
    who = {"validation_clients": 2, "held_out_clients": 2, "cohort": 3, "partition_seed": 0}
    return dataclasses.replace(default, data=data, **who)


def test_only_the_clients_of_the_experiment_are_read_and_capped(folder):
    own = owners.read(asked(folder))
    assert [len(group) for group in own.groups] == [8, 2, 2]
    assert len(own.rows) == 12
    assert max(map(len, own.rows)) == 3
    np.testing.assert_array_equal(np.concatenate(own.rows), np.arange(len(own.data[1])))
    again = owners.read(asked(folder))
    np.testing.assert_array_equal(own.data[0], again.data[0])
    assert own.words == "c4, 12 of 13 domains are read"


def test_more_clients_than_there_are_are_refused(folder):
    with pytest.raises(ValueError, match="are 14 together, but c4 has 13 clients"):
        owners.read(asked(folder, num_clients=10))


def test_a_group_without_any_example_is_named(tmp_path):
    fj.datasets.group([(f"d{k}", "short") for k in range(12)], tmp_path / "c4", shards=1)
    with pytest.raises(ValueError, match="that train and that validate and that are held out have"):
        owners.read(asked(tmp_path))


@pytest.mark.parametrize("name", ["emnist", "stack_overflow", "c4"])
def test_data_that_are_not_there_are_named(tmp_path, name):
    default = config.federated(name)
    data = dataclasses.replace(default.data, data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist"):
        owners.read(dataclasses.replace(default, data=data))


@pytest.mark.parametrize("name", ["emnist", "cifar100", "stack_overflow", "c4", "cc_news"])
def test_the_constants_of_fedfish_can_be_run(name):
    limits.check_federated(config.federated(name))


def test_pachinko_is_for_coarse_classes_alone():
    default = config.federated("cifar10")
    data = dataclasses.replace(default.data, partition="pachinko")
    with pytest.raises(ValueError, match="only cifar100 has coarse classes"):
        limits.check_federated(dataclasses.replace(default, data=data))


def test_the_command_splits_cifar100_by_pachinko():
    default = config.federated("cifar100")
    targets = np.repeat(np.arange(100), 500)
    data = fj.datasets.Dataset(targets, targets, 100, 1.0, (0.0,), (1.0,), "cifar100")
    rows = tasks.partition(default.data, data, 500, 3)
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(50_000))


@pytest.mark.slow
def test_the_command_runs_domains(folder, tmp_path):
    words = [
        *("--dataset", "c4", "--data-dir", str(folder), "--num-clients", "8", "--cohort", "3"),
        *("--validation-clients", "2", "--held-out-clients", "2", "--rounds", "2"),
        *("--local-epochs", "1", "--personal-epochs", "1", "--algorithms", "fedavg"),
        *("--client-examples", "3", "--eval-every", "1", "--out", str(tmp_path / "out")),
    ]
    assert main(words) == 0
    assert "c4" in (tmp_path / "out" / "summary.md").read_text()
