"""A tree adds what one server adds, and the page's tables are what the command writes."""

import json
import math
from concurrent.futures import Executor
from pathlib import Path

import chex
import numpy as np
import pytest

import fisherjax as fj
from experiments.scale import __main__ as scale
from experiments.scale import costs, networks, tree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments/results/scale"
KNOWN = costs.Coefficients(costs.Line(0.0, 1e-9), costs.Line(0.0, 1e-9), 1e9, 1e3)


class Here(Executor):
    """Run tasks in this process: a tree of one process."""

    map = staticmethod(map)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return tree.write(tmp_path_factory.mktemp("uploads"), 3)


@pytest.mark.long
def test_a_tree_adds_what_one_server_adds_whatever_the_shards(paths):
    # Seven uploads of three files, the merge of which is known exactly.
    algorithm, params = tree.method()
    updates, records = zip(*(fj.files.load_update(paths[i % 3]) for i in range(7)), strict=True)
    weights = [record.examples for record in records]
    together, *_ = fj.merging.merge(algorithm, params, list(updates), weights)
    exact = tree.exact(paths, 7)
    for shard in (1, 3, 7):
        found = tree.run(Here(), paths, 7, shard)
        assert found.uploads == 7
        chex.assert_trees_all_close(found.merged, together, rtol=1e-5, atol=1e-6)
        assert tree.difference(found.merged, exact) < 1e-6
    other = tree.exact(paths, 6)  # one upload less is another merge
    assert tree.difference(found.merged, other) > 1e-4


@pytest.mark.long
def test_sizes_are_those_of_uploads_as_files_hold_them(paths):
    sizes = {one.name: one for one in costs.sent(networks.lenet())}
    update, _ = fj.files.load_update(paths[0])
    assert sizes[tree.METHOD].up == fj.compression.size(update)
    assert sizes["fedavg"].up == sizes["fedavg"].down
    # What a server of a tree passes on is as large as its sums, whatever the number of uploads.
    sums = tree.add_shard(paths, range(2)).sums
    assert sizes[tree.METHOD].sums == fj.compression.size(sums)
    assert sizes["fedfisher_kfac"].sums is None


def test_a_tree_has_the_servers_that_its_work_needs():
    one = costs.Sent("made up", 1, 10**6, 1, 10**6)
    assert costs.core_seconds(one, KNOWN) == pytest.approx(2e-3)
    small, middle, large = (costs.tree(one, KNOWN, devices) for devices in (10**4, 10**6, 10**9))
    assert (small.leaves, small.levels, small.seconds) == (1, 1, 0.0)
    assert (middle.leaves, middle.levels) == (math.ceil(2e-3 * 10**6 / 600), 2)
    assert middle.seconds == pytest.approx(4 * 1e-3)
    assert large.levels == 3


def test_a_group_fails_as_often_as_in_a_simulation():
    random = np.random.default_rng(0)
    stay = random.binomial(100, 0.7, 100_000)
    assert costs.failing(100, 0.3) == pytest.approx((stay < 67).mean(), abs=0.01)
    assert costs.failing(10, 0.0) == 0


@pytest.mark.slow
def test_the_command_compares_what_it_predicted(tmp_path, capsys):
    few = ("--uploads", "64", "--trial", "16", "--distinct", "4", "--processes", "2")
    assert scale.main([*few, "--out", str(tmp_path)]) == 0
    assert "64 uploads are predicted to take" in (tmp_path / scale.PREDICTION).read_text()
    assert "times the mean of before and after" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_the_tables_of_lenet_are_what_the_command_writes():
    decode, add, *others = json.loads((RESULTS / scale.MEASURED).read_text())
    known = costs.Coefficients(costs.Line(*decode), costs.Line(*add), *others)
    sizes = {network.name: list(costs.sent(network)) for network in [networks.lenet()]}
    written = scale.written(sizes, known)
    assert (RESULTS / scale.COSTS).read_text().startswith(written)
