"""What a whole run would leave, made up: nothing is trained for it."""

from collections.abc import Callable

import pytest

from experiments.harness import one_round, steps
from experiments.harness.config import OneShot
from experiments.harness.records import Row


@pytest.fixture
def rows_of() -> Callable[[OneShot], list[Row]]:
    """Make up the rows of all units: 25 % and one more for each unit, 10 % more for a client."""

    def make(asked: OneShot) -> list[Row]:
        return [
            row
            for number, unit in enumerate(one_round.units(asked))
            for row in _rows(asked, unit, 0.25 + number / 100)
        ]

    return make


def _rows(asked: OneShot, unit: steps.Unit, value: float) -> list[Row]:
    if unit[0] is None:
        return [steps.row_of("central", unit, 0.5, seconds=2.5)]
    return [
        *(
            steps.row_of("local", unit, value + 0.1 * client, client=client, seconds=1.5)
            for client in range(asked.data.num_clients)
        ),
        *(
            steps.row_of(name, unit, value + after / 10, seconds=0.5, upload_bytes=4000)._replace(
                round=1 + after
            )
            for name in ("ensemble", *asked.merging.algorithms)
            for after in range(1 if name == "ensemble" else 1 + asked.then_rounds)
        ),
    ]
