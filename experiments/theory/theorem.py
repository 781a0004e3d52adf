"""Draw FedFisher's theorem: the loss and its sources over the width and over local steps."""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.harness import records, tables
from experiments.theory import parallel_runs, theorem_figure
from experiments.theory.theorem_figure import NUM_EXAMPLES, SERVER_STEPS, SHOWN, TERMS, label
from fisherjax.theory import bounds, laplace, two_layer
from fisherjax.typing import Array, Key

LEARNING_RATE, SERVER_RATE = 0.1, 0.001


class Judged(NamedTuple):
    """The sources of a merged network's loss, and what the theorem says of them."""

    sources: laplace.Decomposition
    theorem: bounds.Terms

    @property
    def loss(self) -> Array:
        """Training loss of the merged network."""
        return self.sources.loss

    def columns(self) -> dict[str, Array]:
        """Return all quantities by name."""
        own = self.theorem._asdict()
        del own["r_0"]  # it is `furthest`
        return self.sources._asdict() | own


Found = dict[str, Judged]
"""What is measured by merging method, with leaves [points, seeds]."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Widths of the networks, numbers of local steps, and the number of seeds."""

    widths: tuple[int, ...] = tuple(2**power for power in range(5, 13))
    steps: tuple[int, ...] = (2048,)
    seeds: int = 50
    variance: float = 0.5
    """Variance of the initial weights, the paper's kappa."""

    @property
    def is_over_width(self) -> bool:
        """Whether points differ in width; otherwise they differ in local steps."""
        return len(self.widths) > 1

    @property
    def points(self) -> tuple[int, ...]:
        """The widths, or the numbers of local steps."""
        return self.widths if self.is_over_width else self.steps


FIGURES = {
    "fedfisher1a": (Setting(), Setting(widths=(16, 64), steps=(128,), seeds=3)),
    "fedfisher1b": (
        Setting(widths=(512,), steps=tuple(2**power for power in range(4, 15)), seeds=10),
        Setting(widths=(64,), steps=(16, 64, 256), seeds=3),
    ),
}
"""The paper's figures, each as in the paper and quick."""


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Compute in float64, because Gram matrices of inputs on a circle are close to singular."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def compute(setting: Setting, each: parallel_runs.Each = iter) -> Found:
    """Compute the losses of all points and seeds, for each width.

    One program computes all seeds and all numbers of local steps of a width.
    """
    found = []
    with float64():
        keys = jax.vmap(jax.random.key)(jnp.arange(setting.seeds))
        for width in each(setting.widths):
            one = partial(_seed, width, setting.steps)
            found.append(parallel_runs.compute(one, keys, jnp.asarray(setting.variance)))
    # Those of one width have leaves [seeds, steps]; the result has leaves [points, seeds].
    return jax.tree.map(lambda *leaves: np.concatenate([x.T for x in leaves]), *found)


def _seed(width: int, steps: tuple[int, ...], key: Key, variance: Array) -> Found:
    for_data, for_start = jax.random.split(key)
    federation = two_layer.draw(for_data)
    start = two_layer.initial(for_start, width, variance=variance)
    kept = two_layer.descend(start, federation, steps, LEARNING_RATE)
    lambda_0 = jnp.linalg.eigvalsh(bounds.infinite_width(federation))[0]
    one = partial(_judged, start, federation, lambda_0)
    return jax.lax.map(one, (kept, jnp.array(steps)))


def _judged(
    start: Array, federation: fj.clients.Federation, lambda_0: Array, after: tuple[Array, Array]
) -> Found:
    models, steps = after
    how = {"steps": steps, "learning_rate": LEARNING_RATE, "lambda_0": lambda_0}
    quadratic = laplace.gram(models, federation)
    # The paper's quadratic is a sum over clients, and this one a mean, whose gradient is smaller.
    rate = SERVER_RATE * len(models)
    merged = {
        f"descent_{number}": laplace.descent(quadratic, number, rate) for number in SERVER_STEPS
    }
    merged |= {"optimum": laplace.optimum(quadratic)}
    model = two_layer.network(start.shape[-1])
    for name in ("fedavg", "fedfisher_diag", "fedfisher_kfac"):
        merged[name] = parallel_runs.merge(name, model, start, models, federation)
    return {
        name: Judged(
            laplace.decompose(w, start, models, quadratic, federation),
            bounds.terms(w, start, models, federation, **how),
        )
        for name, w in merged.items()
    }


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write a figure's numbers and picture into a folder; return a description in Markdown."""
    records.write_text(out / f"{name}.csv", _csv(setting, found))
    axis = "width" if setting.is_over_width else "local steps"
    losses = {way: of.loss for way, of in found.items()}
    shown = found[f"descent_{SHOWN}"].columns()
    theorem_figure.draw(axis, setting.points, losses, shown, out / f"{name}.png")
    fixed = (
        f"{setting.steps[0]} local steps" if setting.is_over_width else f"width {setting.widths[0]}"
    )
    loss_tables = [
        tables.Table(
            "",
            (f"loss, {words}", *map(str, setting.points)),
            [(label(way), *_of_seeds(mean, loss, ".4f")) for way, loss in losses.items()],
        )
        for words, mean in {"median": statistics.median, "mean": statistics.fmean}.items()
    ]
    sources = [
        (words, *_of_seeds(statistics.median, shown[term], ".3g"))
        for term, words in {
            **{term: words for term, (words, _) in TERMS.items()},
            "distance": "distance of clients from the start",
            "furthest": "R_0: of the unit that went furthest",
            "r_1": "R_1: the same of the merged network",
            "moved": "distance of the server from the mean",
            "switched": "share of gates that switch",
            "smallest": "smallest eigenvalue at the start",
            "rank": f"eigenvalues that are not zero, of {NUM_EXAMPLES}",
            "lambda_0": "lambda_0: smallest eigenvalue of H^inf",
            "r_0_allowed": "what lambda_0 allows R_0 to be",
            "local_term": "the theorem's first term, above local training",
            "laplace_term": "its second, above the Laplace approximation",
        }.items()
    ]
    sources_table = tables.Table("", ("median", *map(str, setting.points)), sources)
    claim = _falls(setting, found) if setting.is_over_width else _turns(setting, found)
    return f"""## {name}: loss over the {axis}

Two clients of 100 examples, {fixed}, {setting.seeds} seeds, initial variance \
{setting.variance:g}; the training loss of the merged network over the {axis}.

{chr(10).join(map(tables.markdown, loss_tables))}
{claim}

Where the loss of {label(f"descent_{SHOWN}")} comes from, and what the theorem is about:

{tables.markdown(sources_table)}
![{name}]({name}.png)
"""


def _of_seeds(mean: Callable[[Any], float], values: np.ndarray, form: str) -> list[str]:
    return [format(mean(x), form) for x in values]


def _falls(setting: Setting, found: Found) -> str:
    """Test the claim of figure 1a that the loss falls with the width."""
    lines = []
    for way, of in found.items():
        loss = np.median(of.loss, 1)
        slope = np.polyfit(np.log(setting.widths), np.log(loss), 1)[0]
        lower = np.mean(of.loss[-1] < of.loss[0])
        shown = f"{slope:+.2f}", f"{loss[-1] / loss[0]:.2f}", f"{100 * lower:.0f}"
        lines.append((label(way), *shown))
    headings = ("claim: it falls", "slope of log loss", "widest / narrowest", "lower, % of seeds")
    return tables.markdown(tables.Table("", headings, lines))


def _turns(setting: Setting, found: Found) -> str:
    """Test the claim of figure 1b that the loss over local steps has a minimum inside."""
    lines = []
    for way, of in found.items():
        loss = np.median(of.loss, 1)
        best = int(loss.argmin())
        # Points are compared within each seed, because seeds differ more than points do.
        rises = np.mean(of.loss[-1] > of.loss[best])
        shown = setting.steps[best], loss[0] / loss[best], loss[-1] / loss[best], 100 * rises
        lines.append((label(way), *(f"{x:.3g}" for x in shown)))
    headings = (
        *("claim: a U", "steps at the minimum", "fewest / minimum", "most / minimum"),
        "rises after it, % of seeds",
    )
    return tables.markdown(tables.Table("", headings, lines))


def _csv(setting: Setting, found: Found) -> str:
    named = {way: of.columns() for way, of in found.items()}
    fields = next(iter(named.values())).keys()
    lines = (
        (way, point, seed, *(f"{values[place, seed]:.6g}" for values in of.values()))
        for way, of in named.items()
        for place, point in enumerate(setting.points)
        for seed in range(setting.seeds)
    )
    axis = "width" if setting.is_over_width else "local_steps"
    return tables.csv_text(("merge", axis, "seed", *fields), lines)
