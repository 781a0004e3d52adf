"""Draw the core time of each method."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.harness import figures
from experiments.scale import costs

_DRAWN, _COLOUR = 10**6, "#2b78ad"


def draw(path: Path, sizes: Mapping[str, Sequence[costs.Sent]], known: costs.Coefficients) -> None:
    """Draw the core time of each method for 10^6 devices, to which it is proportional."""
    drawn, panels = figures.canvas(8, 4, columns=2, grid="x", sharey=True)
    names = dict.fromkeys(one.name for own in sizes.values() for one in own)
    for panel, (network, own) in zip(panels, sizes.items(), strict=True):
        hours = [_DRAWN * costs.core_seconds(one, known) / 3600 for one in own]
        bars = panel.barh([figures.label(one.name) for one in own], hours, color=_COLOUR)
        panel.bar_label(bars, [f"{x:.2g}" if x < 100 else f"{x:,.0f}" for x in hours], padding=3)
        panel.set(xlabel="hours of a core (log scale)", xscale="log")
        panel.set_title(network, fontsize="medium", loc="left")
        # Room for the number beside the longest bar.
        panel.set_xlim(min(hours) / 3, 30 * max(hours))
        for name in names.keys() - {one.name for one in own}:
            panel.text(min(hours) / 2, figures.label(name), "not for this network", va="center")
    panels[0].invert_yaxis()
    drawn.suptitle("What the server computes to merge a million uploads", fontsize="medium")
    figures.save(drawn, path)
