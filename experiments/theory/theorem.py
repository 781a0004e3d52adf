"""Draw FedFisher's theorem: the loss and its sources over the width and over local steps."""

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.harness import figures, records, tables
from experiments.theory import parallel_runs
from fisherjax.theory import laplace, two_layer
from fisherjax.typing import Array, Key

SERVER_STEPS = (10**4, 10**5, 10**6)
"""Steps of the server's gradient descent; the paper does not give their number."""
LEARNING_RATE, SERVER_RATE = 0.1, 0.001
NUM_EXAMPLES = 200
"""Number of examples of both clients."""
SHOWN = 10**5
"""Number of server steps whose loss is drawn term by term."""

Found = dict[str, fj.theory.laplace.Decomposition]
"""Terms of the loss by merging method, with leaves [points, seeds]."""


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
    return jax.lax.map(partial(_judged, start, federation), kept)


def _judged(start: Array, federation: fj.clients.Federation, models: Array) -> Found:
    quadratic = laplace.gram(models, federation)
    # The paper's quadratic is a sum over clients, and this one a mean, whose gradient is smaller.
    rate = SERVER_RATE * len(models)
    merged = {f"descent_{steps}": laplace.descent(quadratic, steps, rate) for steps in SERVER_STEPS}
    merged |= {"optimum": laplace.optimum(quadratic)}
    model = two_layer.network(start.shape[-1])
    for name in ("fedavg", "fedfisher_diag", "fedfisher_kfac"):
        merged[name] = parallel_runs.merge(name, model, start, models, federation)
    return {
        name: laplace.decompose(w, start, models, quadratic, federation)
        for name, w in merged.items()
    }


# Labels and colours of merges that are no methods of the registry.
LOOKS = {
    **{f"descent_{steps}": (f"full Fisher, {steps:,} steps", "#0b4f8a") for steps in SERVER_STEPS},
    "optimum": ("full Fisher, exact optimum", "#1a1a1a"),
}
LINES = dict(zip([f"descent_{steps}" for steps in SERVER_STEPS], ("--", "-", "-."), strict=True))
# Terms of the loss in the theorem, with their labels and colours.
TERMS = {
    "laplace": ("Laplace approximation", "#8b1e6b"),
    "server": ("server's descent", "#2b78ad"),
    "local": ("local training", "#d98200"),
}


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write a figure's numbers and picture into a folder; return a description in Markdown."""
    records.write_text(out / f"{name}.csv", _csv(setting, found))
    _draw(setting, found, out / f"{name}.png")
    axis = "width" if setting.is_over_width else "local steps"
    fixed = (
        f"{setting.steps[0]} local steps" if setting.is_over_width else f"width {setting.widths[0]}"
    )
    lines = [(label(way), *_medians(of.loss, ".4f")) for way, of in found.items()]
    table = tables.Table("", ("loss, median", *map(str, setting.points)), lines)
    shown = found[f"descent_{SHOWN}"]
    sources = [
        (words, *_medians(getattr(shown, term), ".3g"))
        for term, words in {
            **{term: words for term, (words, _) in TERMS.items()},
            "distance": "distance of clients from the start",
            "furthest": "of the unit that went furthest",
            "moved": "distance of the server from the mean",
            "switched": "share of gates that switch",
            "smallest": "smallest eigenvalue at the start",
            "rank": f"eigenvalues that are not zero, of {NUM_EXAMPLES}",
        }.items()
    ]
    sources_table = tables.Table("", ("median", *map(str, setting.points)), sources)
    claim = _falls(setting, found) if setting.is_over_width else _turns(setting, found)
    return f"""## {name}: loss over the {axis}

Two clients of 100 examples, {fixed}, {setting.seeds} seeds, initial variance \
{setting.variance:g}; the training loss of the merged network over the {axis}.

{tables.markdown(table)}
{claim}

Where the loss of {label(f"descent_{SHOWN}")} comes from, and what the theorem is about:

{tables.markdown(sources_table)}
![{name}]({name}.png)
"""


def _medians(values: np.ndarray, form: str) -> list[str]:
    return [format(statistics.median(x), form) for x in values]


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


def label(way: str) -> str:
    """Return the label of a merging method."""
    return LOOKS[way][0] if way in LOOKS else figures.label(way)


def look(way: str) -> dict[str, Any]:
    """Return the colour, the line style and the label of a merging method."""
    if way not in LOOKS:
        return figures.style(way)
    words, colour = LOOKS[way]
    return {"color": colour, "label": words, "linestyle": LINES.get(way, "-")}


def _csv(setting: Setting, found: Found) -> str:
    fields = fj.theory.laplace.Decomposition._fields
    lines = (
        (way, point, seed, *(f"{getattr(of, field)[place, seed]:.6g}" for field in fields))
        for way, of in found.items()
        for place, point in enumerate(setting.points)
        for seed in range(setting.seeds)
    )
    axis = "width" if setting.is_over_width else "local_steps"
    return tables.csv_text(("merge", axis, "seed", *fields), lines)


def _draw(setting: Setting, found: Found, path: Path) -> None:
    figure, panels = figures.canvas(8, 9.6, rows=3, grid="both")
    first, second, third = panels
    for way, of in found.items():
        _band(first, setting.points, of.loss, **look(way))
    shown = found[f"descent_{SHOWN}"]
    _band(second, setting.points, shown.loss, color="#0b4f8a", label="the whole loss", marker="o")
    for (term, (words, colour)), marker in zip(TERMS.items(), "s^D", strict=True):
        look_of = {"color": colour, "label": words, "linestyle": "--", "marker": marker}
        _band(second, setting.points, getattr(shown, term), **look_of)
    for term, (words, colour, marker) in {
        "distance": ("clients' distance\nfrom the start", "#0b4f8a", "o"),
        "furthest": ("furthest unit", "#57b894", "s"),
        "switched": ("share of gates\nthat switch", "#c4501b", "^"),
    }.items():
        _band(third, setting.points, getattr(shown, term), color=colour, label=words, marker=marker)
    # The theorem divides by the smallest eigenvalue. It is zero up to rounding, so the rank is
    # drawn instead.
    share = shown.rank / NUM_EXAMPLES
    words = f"rank of the Gram\nmatrix at the start,\ndivided by {NUM_EXAMPLES}"
    _band(third, setting.points, share, color="#8b1e6b", label=words, marker="D")
    axis = "width" if setting.is_over_width else "local steps"
    titles = (
        f"loss of the merged network over the {axis} (medians of {setting.seeds} seeds, quartiles)",
        f"where the loss of “{label(f'descent_{SHOWN}')}” comes from",
        "how far networks move from their start",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set(xscale="log", yscale="log", xlabel=axis)
        axes.set_xticks(setting.points, map(str, setting.points))
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figures.save(figure, path)


def _band(axes: Any, points: Sequence[int], values: np.ndarray, **look: Any) -> None:
    """Draw medians over seeds, with quartiles as a band."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
    axes.plot(points, middle, markersize=5, **look)
    axes.fill_between(points, low, high, color=look["color"], alpha=0.12, linewidth=0)
