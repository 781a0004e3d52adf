"""Draw the loss of a merged network, its sources, and the quantities of FedFisher's theorem."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import figures

SERVER_STEPS = (10**4, 10**5, 10**6)
"""Steps of the server's gradient descent; the paper does not give their number."""
NUM_EXAMPLES = 200
"""Number of examples of both clients."""
SHOWN = 10**5
"""Number of server steps whose loss is drawn term by term."""

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


def label(way: str) -> str:
    """Return the label of a merging method."""
    return LOOKS[way][0] if way in LOOKS else figures.label(way)


def look(way: str) -> dict[str, Any]:
    """Return the colour, the line style and the label of a merging method."""
    if way not in LOOKS:
        return figures.style(way)
    words, colour = LOOKS[way]
    return {"color": colour, "label": words, "linestyle": LINES.get(way, "-")}


def draw(
    axis: str, points: Sequence[int], losses: dict[str, Any], shown: dict[str, Any], path: Path
) -> None:
    """Draw losses [points, seeds] by merge over the width or local steps, and their sources.

    `shown` has what is measured by name, of the merge by `SHOWN` steps.
    """
    figure, panels = figures.canvas(8, 12.8, rows=4, grid="both")
    first, second, third, fourth = panels
    for way, loss in losses.items():
        own = look(way)
        _band(first, points, loss, **own)
        first.plot(points, loss.mean(1), color=own["color"], linewidth=0.8, linestyle=":")
    band = {"color": "#0b4f8a", "label": "the whole loss", "marker": "o"}
    _band(second, points, shown["loss"], **band)
    for (term, (words, colour)), marker in zip(TERMS.items(), "s^D", strict=True):
        own = {"color": colour, "label": words, "linestyle": "--", "marker": marker}
        _band(second, points, shown[term], **own)
        if f"{term}_term" in shown:
            own = {"color": colour, "label": f"what the theorem says\nof {words}"}
            _band(second, points, shown[f"{term}_term"], **own, linestyle=":")
    for term, (words, colour, marker) in {
        "distance": ("clients' distance\nfrom the start", "#0b4f8a", "o"),
        "furthest": ("R_0, furthest unit\nof a client", "#57b894", "s"),
        "r_1": ("R_1, furthest unit\nof the merged network", "#1a1a1a", "v"),
        "switched": ("share of gates\nthat switch", "#c4501b", "^"),
    }.items():
        _band(third, points, shown[term], color=colour, label=words, marker=marker)
    # The theorem divides by lambda_0, of infinite width. At the start of these networks the
    # smallest eigenvalue is zero up to rounding, so their rank is drawn instead.
    for values, words, colour, marker in (
        (shown["lambda_0"], "lambda_0 of H^inf", "#8b1e6b", "o"),
        (shown["r_0_allowed"], "what it allows R_0\nto be", "#57b894", "s"),
        (
            shown["rank"] / NUM_EXAMPLES,
            f"rank of the Gram\nmatrix, over {NUM_EXAMPLES}",
            "#d98200",
            "D",
        ),
    ):
        _band(fourth, points, values, color=colour, label=words, marker=marker)
    titles = (
        f"loss of the merged network over the {axis} (medians of {len(shown['loss'][0])} seeds, "
        "quartiles; dotted: means)",
        f"where the loss of “{label(f'descent_{SHOWN}')}” comes from",
        "how far networks move from their start",
        "what the theorem divides by",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set(xscale="log", yscale="log", xlabel=axis)
        axes.set_xticks(points, map(str, points))
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figures.save(figure, path)


def _band(axes: Any, points: Sequence[int], values: np.ndarray, **look: Any) -> None:
    """Draw medians over seeds, with quartiles as a band."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
    axes.plot(points, middle, markersize=5, **look)
    axes.fill_between(points, low, high, color=look["color"], alpha=0.12, linewidth=0)
