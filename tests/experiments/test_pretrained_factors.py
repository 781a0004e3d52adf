"""The picture of factors of the changes, drawn from the recorded table."""

import shutil

import numpy as np
import pytest

from experiments.harness import records
from experiments.pretrained import factors
from experiments.pretrained.text_table import Measurement


def recorded():
    return records.read_rows(factors.RECORD / records.RESULTS, Measurement._fields, Measurement)


def test_means_are_over_all_seeds_and_domains_of_a_factor():
    rows = recorded()
    for name in factors.SHOWN:
        found = factors.means(rows, name)
        assert [*found] == sorted(found)
        own = np.array([(row.scale, row.accuracy) for row in rows if row.algorithm == name])
        for scale, mean in found.items():
            assert mean == pytest.approx(100 * own[own[:, 0] == scale, 1].mean())


def test_levels_have_no_factor():
    assert [len(factors.means(recorded(), name)) for name in factors.LEVELS] == [1, 1]


@pytest.mark.long
def test_the_picture_is_drawn_beside_the_record(tmp_path):
    shutil.copy(factors.RECORD / records.RESULTS, tmp_path)
    factors.main(tmp_path)
    assert (tmp_path / "factors.png").read_bytes().startswith(b"\x89PNG")
