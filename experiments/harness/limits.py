"""Check the values of options before anything runs; refuse those that cannot be run."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import fisherjax as fj
from experiments.harness import config as configs
from experiments.harness.commands import check, check_list, check_name, contents
from experiments.harness.config import IMAGES, OWNERS, PLAYS, SLANTED, WRITERS, Federated, OneShot
from experiments.harness.names import STUDENT, distils, is_vote, merged_first

_COUNTS = (
    *("num_clients", "cohort", "classes_per_client"),
    *("batch_size", "epochs", "local_epochs", "personal_epochs", "rounds", "eval_every"),
    *("channels", "gan_epochs", "judge_epochs", "images", "restarts", "steps", "draws"),
    *("clients", "pilots", "terms", "open_epochs", "dense_epochs", "num_seeds", "num_points"),
    *("width", "fedfish_batch", "num_examples", "examples", "tested", "choosing_rounds"),
    *("table3", "table3_rounds", "repeats", "patience", "personal_points", "nodes"),
)
_FROM_ZERO = (
    *("min_size", "then_rounds", "then_epochs", "exchanges", "held_out_plays", "max_examples"),
    *("client_examples", "validation_clients", "held_out_clients"),
    *("counts", "ranks", "seed", "weight_decay", "checkpoint_seconds", "factor_weight"),
    *("noise_multiplier", "noise_multipliers", "noise_damping", "ridge", "noise"),
)
_ABOVE_ZERO = (
    *("alpha", "alphas", "beta", "learning_rate", "server_learning_rate", "learning_rate_of_noise"),
    *("clip", "sizes", "trust", "dampings", "temperatures", "label_alpha", "local_learning_rate"),
)
_ACCEPTED: tuple[tuple[str, Callable[[float], bool], Sequence[str]], ...] = (
    ("1 or more", lambda x: x >= 1, _COUNTS),
    ("0 or more", lambda x: 0 <= x < math.inf, _FROM_ZERO),
    ("a number above 0", lambda x: 0 < x < math.inf, _ABOVE_ZERO),
    ("0 or more and below 1", lambda x: 0 <= x < 1, ("momentum", "label_smoothing")),
    ("above 0 and below 1", lambda x: 0 < x < 1, ("delta",)),
    ("0 to 2**32 - 1", lambda x: 0 <= x < 2**32, ("partition_seed", "partition_seeds", "seeds")),
)
"""What options may be, whichever command has them: in words, and as a function of each value."""
_MAY_BE_EMPTY = ("calibrate", "table3", "betas", "classes", "imports", "local_learning_rate")
_MAY_REPEAT = ("channels",)


def check_options(config: Any) -> None:
    """Refuse values that no command accepts for an option of that name."""
    values = contents(config)
    options = SimpleNamespace(**values)
    lists = [name for name, value in values.items() if isinstance(value, list)]
    lists = [name for name in lists if values[name] or name not in _MAY_BE_EMPTY]
    check_list(options, *(name for name in lists if name not in _MAY_REPEAT))
    for expected, accept, names in _ACCEPTED:
        for name in names:
            if values.get(name) is not None:
                check(options, name, expected, accept)


def check_one_shot(config: OneShot) -> None:
    """Refuse values that no experiment in one round can have."""
    _check(config, IMAGES, config.data.num_clients)


def check_federated(config: Federated) -> None:
    """Refuse values that no experiment in rounds can have."""
    _check(config, (*IMAGES, SLANTED, *OWNERS), config.cohort)
    for algorithm in filter(is_vote, map(merged_first, config.merging.algorithms)):
        raise ValueError(
            f"--algorithms names {algorithm}, a vote of models that are not merged into one which "
            "clients could train on: use experiments.one_shot"
        )
    check_name("server_optimizer", config.server_optimizer, configs.SERVER_OPTIMIZERS)
    check_name("learning_rate_schedule", config.learning_rate_schedule, configs.SCHEDULES)
    check_name("tracker", config.tracker, configs.TRACKERS)
    if config.server_optimizer == "none":
        expected = "1.0 alone, as --server-optimizer none takes no step"
        check(config, "server_learning_rate", expected, lambda rate: rate == 1)
    if config.local_learning_rate:
        _check_grid(config)
    if config.total_epochs is not None:
        each = config.local_epochs
        expected = f"a multiple of each of --local-epochs {' '.join(map(str, each))}"
        fits = all(config.total_epochs % epochs == 0 for epochs in each)
        check(config, "total_epochs", expected, lambda epochs: epochs >= 1 and fits)
    if config.data.dataset not in (PLAYS, WRITERS):
        number = config.data.num_clients
        check(config, "cohort", f"1 to the {number} clients", lambda cohort: cohort <= number)
    _check_others(config)
    if config.data.stream:
        _check_stream(config)
    if config.data.dataset != PLAYS:
        check(config, "held_out_plays", "0: these data have no plays", lambda plays: plays == 0)


def _check_others(config: Federated) -> None:
    """Refuse to have no validation or held-out clients where something is measured on them."""
    chooses = len(config.server_learning_rate) > 1 or config.local_learning_rate
    if chooses or config.patience is not None:
        expected = "1 or more, as they choose among learning rates or stop early"
        check(config, "validation_clients", expected, lambda number: number >= 1)
    if config.personal_points > 1 or (config.data.dataset in OWNERS and not config.held_out_plays):
        expected = "1 or more, as they are fine-tuned at several rounds, or give the test data"
        check(config, "held_out_clients", expected, lambda number: number >= 1)


def _check_stream(config: Federated) -> None:
    """Refuse clients on disk where their examples are needed in memory."""
    data, one_of = config.data, ", ".join(configs.ON_DISK)
    expected = f"one of {one_of} with --stream, which reads clients on disk"
    check(data, "dataset", expected, lambda name: name in configs.ON_DISK)
    expected = "1 or more with --stream, as a cohort's arrays have room for so many"
    check(data, "client_examples", expected, lambda most: most >= 1)
    expected = "cg or gd with --stream, as adam validates on training images in memory"
    check(config.merging, "solver", expected, lambda solver: solver != "adam")


def _check_grid(config: Federated) -> None:
    """Refuse a grid of learning rates that has nothing to choose from."""
    rates = "local_learning_rate", "server_learning_rate"
    for name in rates[: 1 if config.server_optimizer == "none" else 2]:
        one = len(getattr(config, name)) == 1
        expected = "several for a grid; without one, --learning-rate is the clients' rate"
        check(config, name, expected, lambda _, one=one: not one)
    check(config, "patience", "none, as the cells of a grid run equally long", lambda x: x is None)


def _check(config: OneShot | Federated, datasets: Sequence[str], side_by_side: int) -> None:
    data, merging = config.data, config.merging
    check_name("dataset", data.dataset, datasets)
    check_name("model", data.model, configs.networks(data.dataset))
    check_name("partition", data.partition, configs.PARTITIONS)
    if data.partition == "pachinko":
        expected = "another split: only cifar100 has coarse classes"
        check(data, "partition", expected, lambda _: data.dataset == "cifar100")
    for algorithm in merging.algorithms:
        first = merged_first(algorithm)
        check_name("algorithms", first, (*fj.algorithms.merges(), STUDENT))
        if first != algorithm and (distils(first) or is_vote(first)):
            last = algorithm.rpartition("+")[2]
            raise ValueError(f"--algorithms is {algorithm}, expected {last} behind a merged model")
    check_options(config)
    options = SimpleNamespace(**contents(config))
    for option, _ in merging.options:
        check(options, option, "0 or more", lambda x: x is None or 0 <= x < math.inf)
    expected = f"1 to the {side_by_side} clients side by side"
    fits = (None, *range(1, side_by_side + 1))
    check(options, "clients_per_chunk", expected, lambda chunk: chunk in fits)
