"""Draw the inner workings of OTFusion, PFNM, DENSE and FedOV, and tabulate the numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.baselines import runs
from experiments.baselines.runs import Config, Drawn, Fused, Voted, Widened
from experiments.harness import figures, tables
from experiments.harness.figures import GRID, INK, label

_STAYS, _MOVES = "#2b78ad", "#d98200"
_SHARED = {1: _MOVES, 2: "#cfe3f2", 3: "#94c4e0", 4: "#4f93c4", 5: "#0b4f8a"}
_GREY = {"cmap": "gray_r", "vmin": 0, "vmax": 1}
_NAMES = {"dense1": "first hidden layer", "dense2": "second hidden layer"}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _halves(height: float, ratios: tuple[float, float]) -> Any:
    """Return a figure, its upper part, and its lower part with one panel."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.6, height), layout="constrained")
    above, below = drawn.subfigures(2, 1, height_ratios=ratios)
    panel = below.subplots()
    panel.spines[["top", "right"]].set_visible(False)
    return drawn, above, below, panel


def otfusion(found: list[Fused], path: Path) -> str:
    """Draw the new places of the second client's units: a dot for each, blue if it stays."""
    names = [*found[0].transports]
    drawn, panels = figures.canvas(8, 8.2, len(found), len(names), squeeze=False)
    lines = []
    for column, (fused, axes) in enumerate(zip(found, panels.T, strict=True)):
        what = "one start" if fused.same_start else "two starts"
        mean, matched = (_percent(x) for x in fused.accuracies.values())
        stay = {name: int(np.trace(moves)) for name, moves in fused.transports.items()}
        lines.append((what, mean, matched, *map(str, stay.values())))
        for panel, name in zip(axes, names, strict=True):
            unit, place = np.nonzero(fused.transports[name])
            units = len(fused.transports[name])
            stays, moves = unit == place, unit != place
            kinds = (("it stays", stays, _STAYS, "s"), ("it moves", moves, _MOVES, "o"))
            for words, chosen, colour, marker in kinds:
                points = {"s": 14, "marker": marker, "color": colour, "label": words}
                panel.scatter(place[chosen], unit[chosen], **points)
            panel.set(xlim=(-1, units), ylim=(units, -1), aspect="equal")
            panel.set_xlabel("place in client 1's network")
            if not column:
                panel.set_ylabel(f"{_NAMES[name]}\nunit of client 2")
            panel.set_title(f"{stay[name]} of {units} units stay", fontsize="medium")
        title = f"Clients of {what}\naveraged {mean}, matched first {matched}"
        axes[0].set_title(f"{title}\n\n{axes[0].get_title()}", fontsize="medium")
    drawn.suptitle("OTFusion: where do the units of client 2 belong?", fontsize="large")
    figures.save_with_legend(drawn, path, title="a unit of client 2", markerscale=1.6)
    headings = ("clients of", label("fedavg"), label("otfusion"), *(f"stay in {n}" for n in names))
    return tables.markdown(tables.Table("", headings, lines))


def pfnm(found: list[Widened], path: Path) -> str:
    """Draw how many clients share the units of the merged layers, for 2, 3, ... clients."""
    names = [*found[0].shared]
    drawn, panels = figures.canvas(9, 4.9, len(names), sharey=True)
    lines = []
    for panel, name in zip(panels, names, strict=True):
        for place, wide in enumerate(found):
            below = 0
            counts = [(n, units) for n, units in enumerate(wide.shared[name], 1) if units]
            for number, units in reversed(counts):
                words = "of one client alone" if number == 1 else f"shared by {number} clients"
                panel.bar(place, units, 0.7, below, color=_SHARED[number], label=words)
                how = {"ha": "center", "va": "center", "color": "white" if number >= 4 else INK}
                panel.text(place, below + units / 2, str(units), **how)
                below += units
            panel.text(place, below + 1, f"{below}", ha="center", weight="bold")
        width = found[0].width
        # Behind the bars, whose numbers it would strike out.
        how = {"color": INK, "linestyle": "--", "zorder": 0}
        panel.axhline(width, label=f"a client's width, {width}", **how)
        panel.set_title(_NAMES[name].capitalize(), fontsize="medium")
        ticks = [
            f"{wide.clients} clients\n{label('fedavg')} {100 * wide.accuracies['fedavg']:.0f} %\n"
            f"{label('pfnm')} {100 * wide.accuracies['pfnm']:.0f} %"
            for wide in found
        ]
        panel.set_xticks(range(len(found)), ticks, fontsize="small")
        panel.set_ylim(0, 1.2 * max(sum(wide.shared[n]) for wide in found for n in names))
    panels[0].set_ylabel("units of the merged network")
    for wide in found:
        accuracies = map(_percent, wide.accuracies.values())
        units = (f"{sum(x)} ({x[0]} of one client alone)" for x in wide.shared.values())
        lines.append((str(wide.clients), *accuracies, *units))
    drawn.suptitle("PFNM: a merged network as wide as there are different units", fontsize="large")
    figures.save_with_legend(drawn, path, columns=3)
    headings = ("clients", label("fedavg"), label("pfnm"), *(f"units of {n}" for n in names))
    return tables.markdown(tables.Table("", headings, lines))


def dense(found: Drawn, path: Path) -> str:
    """Draw images that the server generated beside real ones, and the student's accuracy."""
    drawn, above, below, panel = _halves(7.6, (1.55, 1))
    rows = {f"drawn in\nepoch {epoch}": shown for epoch, shown in found.images.items()}
    rows["real\ndigits"] = found.real
    panels = above.subplots(len(rows), len(found.real.images), squeeze=False)
    for axes, (name, shown) in zip(panels, rows.items(), strict=True):
        for digit, one in enumerate(axes):
            figures.image(one, shown.images[digit], "" if digit else name, **_GREY)
            one.set_xlabel(f"{100 * shown.shares[digit]:.0f} %", fontsize="small", labelpad=2)
    for digit, one in enumerate(panels[0]):
        one.set_title(f"as a {digit}", fontsize="medium")
    title = "DENSE: images that the server drew, without any data\n"
    title += "below each: how sure the clients together are that it is this digit"
    above.suptitle(title, fontsize="medium")
    panel.grid(color=GRID, linewidth=0.8)
    values = [100 * x for x in found.accuracies]
    words = f"the student, from {values[0]:.1f} % (the clients' mean) to {values[-1]:.1f} %"
    panel.plot(range(len(values)), values, "o-", color=_STAYS, label=words, markersize=4)
    teacher = f"its teacher, all clients together: {_percent(found.teacher)}"
    panel.axhline(100 * found.teacher, color=INK, linestyle="--", label=teacher)
    panel.xaxis.get_major_locator().set_params(integer=True)
    low = min(values[0], *values, 100 * found.teacher)
    panel.set(xlabel="epochs of drawing and learning", ylabel="test accuracy, %")
    panel.set_ylim(max(low - 5, 0), 100)
    figures.legend(below, [panel], columns=2)
    figures.save(drawn, path)
    lines = [
        ("teacher: the clients' mean outputs", _percent(found.teacher)),
        ("student before the first epoch: FedAvg", _percent(found.accuracies[0])),
        *((f"student after epoch {n}", _percent(found.accuracies[n])) for n in found.images),
    ]
    return tables.markdown(tables.Table("", ("model", "test accuracy"), lines))


def fedov(found: Voted, path: Path) -> str:
    """Draw corrupted digits, and a client's p(unknown) of its own and of other classes."""
    drawn, above, below, panel = _halves(7.4, (1, 1.15))
    columns = {"as it is": found.digits, **found.broken}
    panels = above.subplots(len(found.digits), len(columns), squeeze=False)
    for place, (name, images) in enumerate(columns.items()):
        for one, image in zip(panels[:, place], images, strict=True):
            figures.image(one, image, **_GREY)
            if not place:
                one.spines[:].set(color=_STAYS, linewidth=2)
        panels[0, place].set_title(name, fontsize="medium")
    title = "FedOV: a client learns its digits, and that destroyed ones are “unknown”"
    above.suptitle(title, fontsize="large")
    bins = np.linspace(0, 1, 21)
    for words, values, colour, hatch in (
        (f"its own classes, 0 and 1 ({len(found.own)} images)", found.own, _STAYS, ""),
        (f"classes it never saw, 2 to 9 ({len(found.others)})", found.others, _MOVES, "///"),
    ):
        shares = np.full(len(values), 100 / len(values))
        look = {"color": colour, "alpha": 0.65, "hatch": hatch, "edgecolor": "white"}
        panel.hist(values, bins, weights=shares, label=words, **look)
    panel.set(xlabel="probability that the client of digits 0 and 1 gives “unknown”", xlim=(0, 1))
    panel.set_ylabel("share of test images, %")
    vote, ensemble, one = (_percent(x) for x in found.accuracies.values())
    title = f"Five clients of two classes each: the vote is right on {vote},\n"
    title += f"the mean of usual networks on {ensemble}, one of those alone on {one}"
    panel.set_title(title, fontsize="medium")
    figures.legend(below, [panel], columns=2)
    figures.save(drawn, path)
    medians = f"{np.median(found.own):.3f}", f"{np.median(found.others):.3f}"
    lines = [
        ("test accuracy of the vote", vote),
        ("test accuracy of the mean outputs of usual networks", ensemble),
        ("test accuracy of one usual network, mean", one),
        ("median p(unknown) of the client of 0 and 1, on 0 and 1", medians[0]),
        ("median p(unknown) of the client of 0 and 1, on 2 to 9", medians[1]),
    ]
    return tables.markdown(tables.Table("", ("what", "value"), lines))


_DESCRIPTIONS = {
    "otfusion": """Two clients have every other digit each; the second's units are matched with \
the first's. Accuracies are on the test images; a unit stays if its place is its own.""",
    "pfnm": f"""The first of {runs.CLIENTS} clients (Dirichlet {runs.ALPHA:g}), each \
from a start of its own.""",
    "dense": f"""{runs.CLIENTS} clients (Dirichlet {runs.ALPHA:g}) of one start. The \
server draws {runs.DISTILLATION.images} images an epoch; minibatches of \
{runs.DISTILLATION.batch_size} and a learning rate of \
{runs.DISTILLATION.learning_rate:g}, instead of the papers' 256 and 0.01, suit digits; they \
were chosen looking at the same test images.""",
    "fedov": f"""{runs.CLIENTS} clients of two classes each, none shared. Usual networks \
have ten outputs and the same data, starts and epochs.""",
}
_TITLES = {
    "otfusion": "units that changed places",
    "pfnm": "units that are shared",
    "dense": "images that the server drew",
    "fedov": "what is unknown",
}
_DRAW: dict[str, Callable] = {"otfusion": otfusion, "pfnm": pfnm, "dense": dense, "fedov": fedov}


def section(name: str, asked: Config) -> str:
    """Run a method, draw its inner workings, and return a description with the numbers."""
    path = asked.out / f"{name}.png"
    table = _DRAW[name](getattr(runs, name)(asked), path)
    return f"""## {label(name)}: {_TITLES[name]}

{_DESCRIPTIONS[name]}

{table}
![{label(name)}: {_TITLES[name]}]({path.name})
"""
