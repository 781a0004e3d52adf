"""Run one unit of an experiment in rounds, with measurements and checkpoints."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.federated import grid, plan, streamed, trackers
from experiments.federated.plan import FRACTIONS, Step, Unit, measured, number
from experiments.federated.tasks import Rounds
from experiments.harness import checkpoints, records, tables, tasks
from experiments.harness.config import Federated
from experiments.harness.methods import check_full, methods
from fisherjax.metrics import Performance
from fisherjax.rounds import Round, State
from fisherjax.typing import Examples, Key

CHECKPOINTS = "checkpoints"
LEAST_RATE = 0.01
"""Share of the first learning rate that an exponential schedule has in the last round."""
Measures = dict[tuple[str, str, float | None], Any]
"""Numbers by split, metric and fraction."""
# optax.adam's epsilon is 1e-8; the framework of FedFish's experiments has 1e-7.
_SERVERS = {
    "none": None,
    "sgd": optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
    "momentum": optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9),
    "adam": optax.inject_hyperparams(optax.adam)(learning_rate=1.0, eps=1e-7),
    "yogi": optax.inject_hyperparams(optax.yogi)(learning_rate=1.0),
    "adagrad": optax.inject_hyperparams(optax.adagrad)(learning_rate=1.0),
}


def prepare(task: Rounds) -> dict[tuple[str, int], fj.rounds.Federated]:
    """Make the rounds of each algorithm and number of local epochs, which all units share.

    Models that would not fit into memory, and layers that no structure covers, are refused here.
    """
    config, params = task.config, jax.eval_shape(task.init, jax.random.key(0))
    check_full(config.merging.algorithms, params, config.cohort)
    training, server = config.training, _SERVERS[config.server_optimizer]
    how = {"cohort": config.cohort, "batch_size": training.batch_size}
    how["clients_per_chunk"] = training.clients_per_chunk
    how["must_improve"] = config.must_improve
    # The rate of a grid is in the state, so that all cells run one program.
    how["optimizer"] = _optimizer(task, 1.0) if grid.asked(config) else task.optimizer
    chosen_by = validation(task)
    made = {}
    built = methods(config.merging, task.model, training.batch_size, task.images)
    for name, method in built.items():
        for epochs in config.local_epochs:
            algorithm = method.server(chosen_by)
            if grid.asked(config) or config.learning_rate_schedule != "constant":
                over = schedule(config.learning_rate_schedule, number(config, epochs))
                algorithm = fj.algorithms.with_learning_rates(algorithm, over)
            if server is not None:
                algorithm = fj.algorithms.with_server_optimizer(algorithm, server)
            own = fj.rounds.federated(task.model, algorithm, epochs=epochs, **how)
            own.traffic(params, task.test)
            if config.data.stream:
                fj.rounds.stream.refuse_memory(own, params, task.train.num_clients)
            made[name, epochs] = own
    return made


def validation(task: Rounds) -> Examples | None:
    """Return the images by which a server chooses a step or a model, as in one round; None else."""
    merging = task.config.merging
    chooses = merging.choose == "validation" and task.images is not None
    if merging.solver != "adam" and not chooses:
        return None
    inputs, targets, indices, sizes = map(np.asarray, task.train[:4])
    own = np.sort(indices[np.arange(indices.shape[1]) < sizes[:, None]])
    return tasks.draw_validation(Examples(inputs, targets), task.config.partition_seed, own)


@lru_cache(maxsize=64)
def schedule(name: str, rounds: int) -> Callable[[Any], Any]:
    """Return the factor of the clients' learning rate, a function of the number of the round."""
    return {
        "constant": optax.constant_schedule(1.0),
        "cosine": optax.cosine_decay_schedule(1.0, rounds),
        "linear": optax.linear_schedule(1.0, 0.0, rounds),
        "exponential": optax.exponential_decay(1.0, rounds, LEAST_RATE),
    }[name]


def _optimizer(task: Rounds, rate: float | None) -> optax.GradientTransformation:
    """Return the clients' optimiser with another learning rate, unless that is None."""
    if rate is None:
        return task.optimizer
    return tasks.optimizer(dataclasses.replace(task.config.training, learning_rate=rate))


def run(
    task: Rounds,
    method: fj.rounds.Federated,
    step: Step,
    show: Callable[[int, float | None], None],
    warn: Callable[[str], None],
) -> list[records.Row]:
    """Run the rounds of a unit, from its newest checkpoint if there is one; return all rows.

    `method` is what `prepare` made for the unit. After each round, `show` is called with its number
    and the test accuracy, or None if that was not measured. The final params are in the newest
    checkpoint and, with `keep_models`, in models/.
    """
    config, (unit, last) = task.config, step
    whole = last == number(config, unit.local_epochs)
    folder = config.out / CHECKPOINTS / unit.name
    init_key, key, personal_key = jax.random.split(jax.random.key(unit.seed), 3)
    state = first = _at_rates(streamed.init(task, method, task.init(init_key)), unit)
    rows: list[records.Row] = []
    found = checkpoints.restore(folder, state, warn)
    if found is not None:
        state, rows = found.state, [records.Row(*row) for row in found.rows]
        # The last round of a folder that goes on had more measurements.
        if found.number < last and not plan.stopped(config, rows):
            rows = [row for row in rows if _during(config, row)]
        if _lacks(config, unit, found.number, rows):  # it was measured at other rounds
            shutil.rmtree(folder)
            state, rows = first, []
        elif found.number > last:
            return [row for row in rows if row.round <= last]
        show(int(state.number), None)
    saved, left = time.monotonic(), last - int(state.number)
    if plan.stopped(config, rows):
        left = 0

    def save() -> None:
        if int(state.number) > max(checkpoints.saved(folder), default=0):
            checkpoints.save(folder, int(state.number), state, rows)

    going = streamed.rounds(task, method, state, key, left, warn, save) if left else ()
    with trackers.tracker(config.tracker, config.out / "tracked", unit.name) as log:
        # A tracker begins anew, and a run that goes on has rounds behind it.
        for count, before in tables.gathered((row.round, row) for row in rows).items():
            log(count, {_words(row): row.value for row in before})
        for state, done in going:
            count = int(state.number)
            if left_out := done.left_out.by_client(done.cohort):
                names = "; ".join(f"client {k} for leaf '{leaf}'" for k, leaf in left_out.items())
                warn(f"{unit.name}, round {count}: left out, as updates not finite: {names}.")
            measures = _after_round(task, unit, state, done, (key, personal_key))
            new = _rows(unit, count, measures)
            ends = count == last or plan.stopped(config, [*rows, *new])
            if ends and whole:
                new += _rows(unit, count, _at_the_end(task, method, unit, state, personal_key))
                if config.held_out_clients and not any(row.split == "held_out" for row in new):
                    new += _rows(unit, count, _tuned(task, unit, state, personal_key))
            rows += new
            log(count, {_words(row): row.value for row in new})
            tested = (r.value for r in new if (r.split, r.metric) == ("test", "accuracy"))
            show(count, next(tested, None))
            if ends or time.monotonic() - saved >= config.checkpoint_seconds:
                checkpoints.save(folder, count, state, rows)
                saved = time.monotonic()
            if ends:
                break
    if config.keep_models and whole:
        path = config.out / "models" / f"{unit.name}.safetensors"
        with records.naming(path):
            path.parent.mkdir(exist_ok=True)
            fj.files.save_arrays(path, state.params)
    return rows


def _rows(unit: Unit, count: int, measures: Measures) -> list[records.Row]:
    own, rows = unit._asdict() | {"round": count}, []
    for (split, metric, fraction), found in measures.items():
        value = round(float(np.asarray(found)), 6)
        where = {"split": split, "metric": metric, "fraction": fraction}
        rows.append(records.Row(**own, **where, value=value))
    return rows


def _words(row: records.Row) -> str:
    share = "" if row.fraction is None else f", {100 * row.fraction:g} % tuned"
    return f"{row.split} {row.metric}{share}"


def _lacks(config: Federated, unit: Unit, count: int, rows: list[records.Row]) -> bool:
    """Return whether the rows of so many rounds lack a measurement on validation clients."""
    there = {row.round for row in rows if row.split == "validation"}
    epochs, last = unit.local_epochs, number(config, unit.local_epochs)
    return any(
        n not in there for n in range(1, min(count + 1, last)) if plan.validated(config, epochs, n)
    )


def _during(config: Federated, row: records.Row) -> bool:
    """Return whether a row is one that `_after_round` measures, if it is not the last round."""
    where = row.local_epochs or 1, row.round
    if row.split == "validation":
        return plan.validated(config, *where)
    if row.split == "held_out":
        return row.round in plan.milestones(config, row.local_epochs or 1)
    always = row.split == "cohort" and row.metric in ("loss", "diverged", "worse")
    return always or (row.split in ("cohort", "test") and measured(config, *where))


def _at_rates(state: State, unit: Unit) -> State:
    """Set the learning rates; they are arrays, so that all rates share one program."""
    server, rates = state.algorithm, fj.algorithms.wrappers
    if isinstance(server, rates.learning_rates.RateState) and unit.learning_rate is not None:
        server = _local(server, unit.learning_rate)
    if isinstance(server, rates.server_optimizer.ServerState):
        rate = optax.tree_utils.tree_get(server.optimizer, "learning_rate")
        rate = jnp.full_like(rate, unit.server_learning_rate)
        own = optax.tree_utils.tree_set(server.optimizer, learning_rate=rate)
        server = server._replace(optimizer=own)
        if unit.learning_rate is not None:
            server = server._replace(algorithm=_local(server.algorithm, unit.learning_rate))
    return state._replace(algorithm=server)


def _local(state: Any, rate: float) -> Any:
    return state._replace(scale=jnp.full_like(state.scale, rate))


def _after_round(
    task: Rounds, unit: Unit, state: State, done: Round, keys: tuple[Key, Key]
) -> Measures:
    config, where = task.config, (unit.local_epochs, int(state.number))
    key, personal_key = keys
    found: Measures = {
        ("cohort", "loss", None): done.loss / task.positions,
        ("cohort", "diverged", None): done.diverged.sum(),
    }
    if config.must_improve:
        found["cohort", "worse", None] = done.worse.sum()
    if measured(config, *where):
        found |= _means(task, "test", fj.metrics.performance(task.model, state.params, task.test))
        if config.barrier:
            cohort = streamed.cohort(task, done, key)
            models = state.params, done.trained.models
            barrier = fj.metrics.client_server_barrier(task.model, *models, cohort)
            found["cohort", "barrier_loss", None] = barrier.loss / task.positions
            found["cohort", "barrier_accuracy", None] = barrier.accuracy
    if plan.validated(config, *where):
        own = fj.metrics.performance(task.model, state.params, task.validation)
        found |= _means(task, "validation", own)
    if config.personal_points > 1 and where[1] in plan.milestones(config, unit.local_epochs):
        found |= _tuned(task, unit, state, personal_key)
    return found


def _at_the_end(
    task: Rounds, method: fj.rounds.Federated, unit: Unit, state: State, key: Key
) -> Measures:
    found = _means(task, "clients", streamed.performance(task, state.params))
    if task.config.personal_points > 1:
        for epochs in range(1, task.config.personal_epochs):
            some = _tuned(task, unit, state, key, epochs)
            found |= {(f"tuned_{epochs}", *what): x for (_, *what), x in some.items() if what[1]}
    traffic = method.traffic(state.params, task.test)
    return found | {("traffic", way, None): count for way, count in traffic._asdict().items()}


def _tuned(task: Rounds, unit: Unit, state: State, key: Key, epochs: int | None = None) -> Measures:
    """Fine-tune on held-out clients, with the learning rate of the unit."""
    how = {"key": key, "fractions": FRACTIONS, "optimizer": _optimizer(task, unit.learning_rate)}
    how |= {"epochs": epochs or task.config.personal_epochs}
    how |= {"batch_size": task.config.training.batch_size}
    personal = fj.personalization.personalize(task.model, state.params, task.held_out, **how)
    found: Measures = {}
    for fraction, own in zip(FRACTIONS, personal, strict=True):
        found |= _means(task, "held_out", own, fraction)
    return found


def _means(task: Rounds, split: str, found: Performance, fraction: float | None = None) -> Measures:
    mean = found.mean()
    loss = mean.loss / task.positions
    return {(split, "accuracy", fraction): mean.accuracy, (split, "loss", fraction): loss}
