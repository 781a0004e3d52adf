"""What options of an experiment may be; anything else is refused before it runs."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import fisherjax as fj
from experiments.harness.commands import check, check_list, check_name, contents
from experiments.harness.config import (
    IMAGES,
    OF_IMAGES,
    PARTITIONS,
    PLAYS,
    SERVER_OPTIMIZERS,
    Federated,
    OneShot,
)
from experiments.harness.names import STUDENT, distils, is_vote, merged_first

_COUNTS = (
    *("num_clients", "validation_clients", "held_out_clients", "cohort", "classes_per_client"),
    *("batch_size", "epochs", "local_epochs", "personal_epochs", "rounds", "eval_every"),
)
_ACCEPTED: tuple[tuple[str, Callable[[float], bool], Sequence[str]], ...] = (
    ("a whole number from 1 up", lambda x: x >= 1, _COUNTS),
    (
        "a whole number from 0 up",
        lambda x: x >= 0,
        ("min_size", "then_rounds", "then_epochs", "exchanges", "held_out_plays", "max_examples"),
    ),
    ("a number from 0 up", lambda x: 0 <= x < math.inf, ("weight_decay", "checkpoint_seconds")),
    ("a number from 0 to below 1", lambda x: 0 <= x < 1, ("momentum", "label_smoothing")),
    ("a number above 0", lambda x: 0 < x < math.inf, ("alpha", "beta", "learning_rate")),
    ("numbers above 0", lambda x: 0 < x < 1e9, ("server_learning_rate",)),
)
"""What options may be, in words and as a function of each value."""


def check_one_shot(config: OneShot) -> None:
    """Refuse values that no experiment in one round can have, and say what was expected."""
    _check(config, IMAGES, config.data.num_clients)
    expected = "a whole number from 1 up"
    check(config, "seeds_together", expected, lambda number: number is None or number >= 1)
    for option in ("partition_seeds", "seeds"):
        check(config, option, "0 to 2**32 - 1 each", lambda seed: 0 <= seed < 2**32)


def check_federated(config: Federated) -> None:
    """Refuse values that no experiment in rounds can have, and say what was expected."""
    _check(config, (*IMAGES, PLAYS), config.cohort)
    check_name("server_optimizer", config.server_optimizer, SERVER_OPTIMIZERS)
    if config.server_optimizer == "none":
        expected = "1.0 alone, as --server-optimizer none takes no step"
        check(config, "server_learning_rate", expected, lambda rate: rate == 1)
    if config.total_epochs is not None:
        expected = f"a multiple of each of --local-epochs {' '.join(map(str, config.local_epochs))}"
        fits = all(config.total_epochs % own == 0 for own in config.local_epochs)
        check(config, "total_epochs", expected, lambda epochs: epochs >= 1 and fits)
    if config.data.dataset != PLAYS:
        number = config.data.num_clients
        check(config, "cohort", f"1 to the {number} clients", lambda cohort: cohort <= number)
        check(config, "held_out_plays", "0: these data have no plays", lambda plays: plays == 0)


def _check(config: OneShot | Federated, datasets: Sequence[str], side_by_side: int) -> None:
    data, merging, asked = config.data, config.merging, SimpleNamespace(**contents(config))
    check_name("dataset", data.dataset, datasets)
    check_name("model", data.model, ["transformer"] if data.dataset == PLAYS else OF_IMAGES)
    check_name("partition", data.partition, PARTITIONS)
    for algorithm in merging.algorithms:
        own = merged_first(algorithm)
        check_name("algorithms", own, (*fj.algorithms.merges(), STUDENT))
        if own != algorithm and (distils(own) or is_vote(own)):
            last = algorithm.rpartition("+")[2]
            raise ValueError(f"--algorithms is {algorithm}, expected {last} behind a merged model")
    lists = {name: value for name, value in vars(asked).items() if isinstance(value, list)}
    # Nothing need follow a merge.
    check_list(asked, *(name for name, value in lists.items() if value or name != "calibrate"))
    for expected, accept, options in _ACCEPTED:
        for option in options:
            if hasattr(asked, option):
                check(asked, option, expected, accept)
    for option, _ in merging.options:
        check(asked, option, "a number from 0 up", lambda x: x is None or 0 <= x < math.inf)
    expected = f"a whole number from 1 to the {side_by_side} clients side by side"
    fits = (None, *range(1, side_by_side + 1))
    check(asked, "clients_per_chunk", expected, lambda chunk: chunk in fits)
