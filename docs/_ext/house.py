"""Draw the house of docs/development/design.md: its rooms, and which room imports which.

The order of the rooms is that of `tests/test_architecture.py`, their imports are read from the
code, and the storeys are those of the table on the page. `python docs/_ext/house.py` writes the
drawing.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fisherjax"
PAGE = ROOT / "docs/development/design.md"
DRAWING = PAGE.with_name("house.svg")

CELL, LEFT, NAMES, ROOF, FOOT = 14, 150, 150, 90, 130
COLOURS = ["#e8eef7", "#f7efe0"]  # of storeys, in turn


def order() -> list[str]:
    """Return the rooms from the foundation up, as the test of the architecture lists them."""
    source = ast.parse((ROOT / "tests/test_architecture.py").read_text())
    assigned = [x for x in source.body if isinstance(x, ast.Assign)]
    (found,) = [x.value for x in assigned if ast.unparse(x.targets[0]) == "ORDER"]
    return ast.literal_eval(found)


def imported(path: Path) -> Iterator[str]:
    """Yield the rooms that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("fisherjax."))


def imports(rooms: list[str]) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        found |= {(room, other) for other in imported(path)}
    return {(a, b) for a, b in found if a != b and {a, b} <= set(rooms)}


def storeys(text: str) -> list[tuple[str, list[str]]]:
    """Return each storey of the page's table with its rooms."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if title := re.match(r"^\| \*\*(.+)\*\* \|", line):
            found.append((title[1], []))
        elif found and (room := re.match(r"^\| `(\w+)` \|", line)):
            found[-1][1].append(room[1])
        elif found and not line.startswith("|"):
            break
    return found


def text(x: float, y: float, words: str, style: str = "", turned: bool = False) -> str:
    """Return a text whose baseline begins at (x, y)."""
    turn = f' transform="rotate(-60 {x} {y})" text-anchor="end"' if turned else ""
    return f'<text x="{x}" y="{y}"{turn}{style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {style}/>'


def drawing(house: list[tuple[str, list[str]]], pairs: set[tuple[str, str]]) -> str:
    """Return the house as SVG, its foundation at the bottom, beside a matrix of its imports."""
    rooms = [room for _, inside in house for room in inside]
    size, ground = len(rooms) * CELL, ROOF + len(rooms) * CELL
    wall = LEFT + NAMES
    place = {room: number for number, room in enumerate(rooms)}
    top = {room: ground - CELL * (place[room] + 1) for room in rooms}
    parts = [box(0, 0, wall + size + 10, ground + FOOT, 'fill="white"')]
    parts.append(
        f'<polygon points="0,{ROOF} {wall / 2},20 {wall},{ROOF}" fill="#a9563f"/>'
        + text(wall / 2 - 32, ROOF - 18, "fisherjax", ' fill="white" font-size="16"')
    )
    for number, (title, inside) in enumerate(house):
        high, height = top[inside[-1]], CELL * len(inside)
        colour = f'fill="{COLOURS[number % 2]}"'
        parts.append(box(0, high, wall + size, height, colour))
        parts.append(text(6, high + height / 2 + 4, title, ' font-weight="bold"'))
    for room in rooms:
        faint = ' fill="#777777"' if room.startswith("_") else ""
        column = wall + CELL * place[room]
        parts.append(text(LEFT, top[room] + 11, room, faint))
        parts.append(text(column + 10, ground + 10, room, faint, turned=True))
        parts.append(box(column + 2, top[room] + 2, 10, 10, 'fill="#c9c9c9"'))
    for room, other in sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]])):
        dot = f'cx="{wall + CELL * place[other] + 7}" cy="{top[room] + 7}"'
        parts.append(f'<circle {dot} r="4" fill="#1f4e8c"/>')
    walls = f"M0 {ground}V{ROOF}M{wall} {ground}V{ROOF}M0 {ground}H{wall + size}"
    parts.append(f'<path d="{walls}" stroke="#333"/>')
    view = f'viewBox="0 0 {wall + size + 10} {ground + FOOT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} font-family="sans-serif"'
    return "\n".join([f'{head} font-size="11">', *parts, "</svg>", ""])


def current() -> str:
    """Return the drawing of the code as it is."""
    return drawing(storeys(PAGE.read_text()), imports(order()))


if __name__ == "__main__":
    DRAWING.write_text(current())
