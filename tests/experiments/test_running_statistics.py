"""The study of running statistics that are computed again, on fewer epochs."""

import pytest

from experiments.one_shot import running_statistics


def cells(table):
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {label: numbers for label, *numbers in rows}


@pytest.mark.slow
def test_an_average_gains_and_the_table_has_every_merge(tmp_path):
    running_statistics.main(tmp_path, splits=2, epochs=2)
    found = cells((tmp_path / "table.md").read_text())
    assert [*found] == [*cells((running_statistics.RECORD / "table.md").read_text())]
    merged, after = (float(cell.split(" ± ")[0]) for cell in found["FedAvg"])
    assert after > merged


def test_the_table_has_means_and_deviations_over_splits():
    runs = [(60.0, 70.0), (62.0, 74.0)]
    found = cells(running_statistics.table(dict.fromkeys(running_statistics.METHODS, runs)))
    assert found["FedAvg"] == ["61.0 ± 1.4", "72.0 ± 2.8"]
    assert len(found) == 2 + len(running_statistics.METHODS)
