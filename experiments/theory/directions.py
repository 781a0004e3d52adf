"""Measure the test error of averaging over each number of the theorem's signal strength.

The theorem bounds the error by exp(-c s) with the strength s = n chi^2 SNR^4 d / M. Points that
differ in examples n, dimensions d, clients M and clients chi with the same signal are trained at
the same strengths, so that the theorem predicts one curve for all of them. The lemmas predict that
the learned signal, divided by the memorised noise, grows with chi SNR^2.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import figures, records, tables
from experiments.theory import parallel_runs, phases
from fisherjax.theory import feature_learning, signal_noise
from fisherjax.typing import Array, Key

# What is varied: its words, and the power with which the theorem's boundary falls.
DIRECTIONS = {
    "examples": ("n, examples a client", "-1/4"),
    "dimensions": ("d, dimensions", "-1/4"),
    "clients": ("M, clients with one signal", "-1/4"),
    "similar": ("chi, clients with the signal", "-1/2"),
}


class Errors(NamedTuple):
    """Results of one point, [strengths, seeds]: see the module.

    Attributes:
        error: Share of test examples that are wrong.
        learned: Sum of the signal's coefficients over that of a client's own noise.
    """

    error: np.ndarray
    learned: np.ndarray


Found = dict[str, dict[int, Errors]]
"""Results by direction and value."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Values along each direction, from a point in the middle, and the strengths."""

    examples: tuple[int, ...] = (5, 10, 20, 40)
    dimensions: tuple[int, ...] = (200, 400, 800, 1600)
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    similar: tuple[int, ...] = (1, 2, 4, 8)
    total: int = 8
    """Clients of the direction `similar`; those without the signal have one each."""
    middle: tuple[int, int, int] = (20, 400, 4)
    """Examples, dimensions and clients where they are not varied."""
    strengths: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 4.8, 6.4)
    seeds: int = 3
    width: int = 20
    num_test: int = 10_000
    scale: float = 0.01
    rounds: int = 100
    local_steps: int = 5


class _Shape(NamedTuple):
    """Shapes of a point; `parallel_runs.draw` reads the first four."""

    num_examples: int
    dim: int
    num_test: int
    width: int
    owners: tuple[int, ...]
    scale: float
    rounds: int
    local_steps: int


FIGURES = {
    "directions": (
        Setting(),
        Setting(
            *((4, 8), (40, 80), (1, 2), (1, 2), 2, (4, 60, 2), (0.4, 1.6)),
            **{"seeds": 2, "width": 3, "num_test": 100, "rounds": 8},
        ),
    )
}
"""The directions, and quick ones."""


def points(setting: Setting) -> list[tuple[str, int, int, int, tuple[int, ...]]]:
    """List direction, value, examples, dimensions and the clients' signals of each point."""
    examples, dim, count = setting.middle
    alike = count * (0,)
    found = [("examples", value, value, dim, alike) for value in setting.examples]
    found += [("dimensions", value, examples, value, alike) for value in setting.dimensions]
    found += [("clients", value, examples, dim, value * (0,)) for value in setting.clients]
    for value in setting.similar:
        others = tuple(range(1, setting.total - value + 1))
        found.append(("similar", value, examples, dim, value * (0,) + others))
    return found


def ratio(strength: float, examples: int, dim: int, owners: tuple[int, ...]) -> float:
    """Return the signal-to-noise ratio at which a point has a strength."""
    of_one = signal_noise.strength(examples, owners.count(0), len(owners), 1.0, dim)
    return float((strength / of_one) ** 0.25)


def compute(setting: Setting, each: parallel_runs.Each = iter) -> Found:
    """Compute every point at all strengths, all seeds of it in one program."""
    found: Found = {}
    keys = jax.vmap(jax.random.key)(jnp.arange(setting.seeds))
    shape = len(setting.strengths), setting.seeds
    for direction, value, examples, dim, owners in each(points(setting)):
        ratios = [ratio(strength, examples, dim, owners) for strength in setting.strengths]
        norms = jnp.repeat(jnp.array(ratios) * dim**0.5, setting.seeds)
        own = _Shape(
            *(examples, dim, setting.num_test, setting.width, owners, setting.scale),
            *(setting.rounds, setting.local_steps),
        )
        one = partial(_measured, own)
        of_all = parallel_runs.compute(one, (jnp.tile(keys, shape[0]), norms))
        values = Errors(*(np.reshape(x, shape) for x in of_all))
        found.setdefault(direction, {})[value] = values
    return found


def _measured(shape: _Shape, given: tuple[Key, Array]) -> Errors:
    key, norm = given
    start, data, test = parallel_runs.draw(shape, shape.owners, key, norm, shape.scale)
    # Training looks at its test examples in each round; only the last model is tested here.
    unseen = test._replace(labels=test.labels[:, :1], noise=test.noise[:, :1])
    how = {"rounds": shape.rounds, "local_steps": shape.local_steps}
    mean = feature_learning.average(len(shape.owners))
    state, _ = feature_learning.train(start, data, unseen, mean, **how)
    _, accuracy = feature_learning.performance(
        state.weights[:1], test._replace(owners=data.owners[:1])
    )
    # Of the mean, the noise that makes filters answer their label more: positive coefficients.
    agrees = jnp.sign(jnp.asarray(signal_noise.signs(shape.width)))[:, None] * data.labels[0]
    noise = jnp.where(agrees > 0, jnp.abs(state.noise[0, :, 0]), 0)
    return Errors(1 - accuracy[0], state.signal[0, :, 0].sum() / noise.sum())


def decay(strengths: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """Fit log error = a - c s; return c, and the share of the variance that the line explains."""
    logs = np.log(errors)
    slope, level = np.polyfit(strengths, logs, 1)
    left = np.var(logs - level - slope * strengths)
    return float(-slope), float(1 - left / np.var(logs))


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write the numbers and the picture into a folder; return a description in Markdown."""
    records.write_text(out / f"{name}.csv", _csv(setting, found))
    _draw(setting, found, out / f"{name}.png")
    shapes = {(direction, value): rest for direction, value, *rest in points(setting)}
    strengths = np.array(setting.strengths)
    errors, boundary, laws = [], [], []
    for direction, of in found.items():
        words, power = DIRECTIONS[direction]
        known = []
        for value, got in of.items():
            row = got.error.mean(-1)
            errors.append((words, str(value), *(f"{100 * x:.3g}" for x in row)))
            ratios = tuple(ratio(s, *shapes[direction, value]) for s in setting.strengths)
            if (at := phases.threshold(ratios, 1 - row)) is not None:
                known.append((value, at))
        found_power = f"{phases.power(known):+.2f}" if len(known) > 2 else "-"
        ends = [f"{at:.3f}" for _, at in known]
        boundary.append((words, ", ".join(ends) or "-", found_power, power))
        laws.append((words, *_laws(strengths, of, [shapes[direction, v] for v in of])))
    shown = [
        tables.Table(
            "Test error in %, mean over seeds, at the same strengths s",
            ("varied", "value", *(f"s = {s:g}" for s in setting.strengths)),
            errors,
        ),
        tables.Table(
            f"Signal-to-noise ratio from which the accuracy is {phases.LEARNED:g}, over the values",
            ("varied", "ratios", "power", "theorem"),
            boundary,
        ),
        tables.Table(
            "log error = a - c s, and the learned signal over noise, divided by chi SNR^2",
            ("varied", "c of each value", "variance explained", "signal / noise / (chi SNR^2)"),
            laws,
        ),
    ]
    examples, dim, count = setting.middle
    return f"""## {name}

Federated averaging of clients with {examples} examples in d = {dim} dimensions, {count} clients \
with one signal, where these are not varied; chi of {setting.total} clients. {2 * setting.width} \
filters, {setting.rounds} rounds of {setting.local_steps} steps, {setting.seeds} seeds, \
{setting.num_test:,} test examples. The theorem bounds the error by exp(-c s), \
s = n chi^2 SNR^4 d / M. A line is fitted to errors between 0.001 and 0.4. \
Noise is that of a client's own examples in the mean.

{chr(10).join(tables.markdown(table, level=3) for table in shown)}
![{name}]({name}.png)
"""


def _laws(
    strengths: np.ndarray, of: dict[int, Errors], shapes: list[tuple]
) -> tuple[str, str, str]:
    """Return decays of errors, how well lines fit, and the range of signal over noise."""
    slopes, fits, learned = [], [], []
    for got, shape in zip(of.values(), shapes, strict=True):
        error = got.error.mean(-1)
        fitted = (error < 0.4) & (error > 1e-3)
        if fitted.sum() > 2:
            slope, fit = decay(strengths[fitted], error[fitted])
            slopes.append(f"{slope:.2f}")
            fits.append(fit)
        ratios = np.array([ratio(s, *shape) for s in strengths])
        learned.append(got.learned.mean(-1) / (shape[-1].count(0) * ratios**2))
    least = f"{min(fits):.3f} and more" if fits else "-"
    return ", ".join(slopes) or "-", least, f"{np.min(learned):.2f} to {np.max(learned):.2f}"


def _csv(setting: Setting, found: Found) -> str:
    shapes = {(direction, value): rest for direction, value, *rest in points(setting)}
    lines = (
        (
            *(direction, value, strength, f"{ratio(strength, *shapes[direction, value]):.6g}"),
            *(seed, *(f"{field[place, seed]:.6g}" for field in got)),
        )
        for direction, of in found.items()
        for value, got in of.items()
        for place, strength in enumerate(setting.strengths)
        for seed in range(setting.seeds)
    )
    columns = ("direction", "value", "strength", "snr", "seed", *Errors._fields)
    return tables.csv_text(columns, lines)


def _draw(setting: Setting, found: Found, path: Path) -> None:
    colours = dict(zip(found, ("#0b4f8a", "#d98200", "#1a1a1a", "#c4501b"), strict=True))
    figure, panels = figures.in_two_columns(len(found), 2.6, grid="both", sharex=True, sharey=True)
    for (direction, of), axes in zip(found.items(), panels, strict=True):
        for place, (value, got) in enumerate(of.items()):
            error = np.maximum(got.error.mean(-1), 0.1 / setting.num_test)
            look = {"marker": figures.MARKERS[place], "linestyle": figures.LINES[place % 4]}
            shade = 0.35 + 0.65 * (place + 1) / len(of)
            axes.plot(
                setting.strengths, error, color=colours[direction], alpha=shade, **look, label=value
            )
        axes.set(yscale="log", title=DIRECTIONS[direction][0])
        axes.legend(frameon=False, fontsize="small")
    for axes in panels[-2:]:
        axes.set_xlabel("n chi² SNR⁴ d / M")
    for axes in panels[::2]:
        axes.set_ylabel("test error")
    figures.save(figure, path)
