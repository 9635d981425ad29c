"""Draw boxes and arrows on a grid as SVG, with no font or script of its own."""

from __future__ import annotations

import dataclasses
from html import escape

CELL_WIDTH, CELL_HEIGHT = 216, 96
BOX_WIDTH, LINE_HEIGHT, PADDING = 158, 16, 12
FILL = {"step": "#eef3fb", "store": "#eaf5ea", "choice": "#fdf3df", "end": "#f3f3f3"}
STROKE = {"step": "#4a6fa5", "store": "#4f8a4f", "choice": "#b5832a", "end": "#8a8a8a"}
INK = "#222222"


@dataclasses.dataclass(frozen=True)
class Box:
    """A box around the middle of a cell.

    Attributes:
        column: Column of its cell, which may be fractional.
        row: Row of its cell, which may be fractional.
        text: Lines of text.
        kind: ``step``, ``store``, ``choice`` or ``end``.
        width: Width in pixels.
    """

    column: float
    row: float
    text: str
    kind: str = "step"
    width: int = BOX_WIDTH

    @property
    def middle(self) -> tuple[float, float]:
        return (self.column + 0.5) * CELL_WIDTH, (self.row + 0.5) * CELL_HEIGHT

    @property
    def height(self) -> float:
        return LINE_HEIGHT * len(self.text.splitlines()) + PADDING

    def border(self, towards: tuple[float, float]) -> tuple[float, float]:
        """Return the point at which a line from the middle of the box leaves the box."""
        (x, y), (there_x, there_y) = self.middle, towards
        dx, dy = there_x - x, there_y - y
        share = min(
            self.width / 2 / abs(dx) if dx else float("inf"),
            self.height / 2 / abs(dy) if dy else float("inf"),
        )
        return x + share * dx, y + share * dy


@dataclasses.dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes, given by their names; dashed for a step that happens at another time."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


def draw(title: str, boxes: dict[str, Box], arrows: list[Arrow]) -> str:
    """Return the picture as SVG.

    Args:
        title: Alternative text for readers who do not see the picture.
        boxes: The boxes, keyed by name.
        arrows: The arrows between these boxes.

    Raises:
        KeyError: An arrow names a box that is not in ``boxes``.
    """
    width = round((max(box.column for box in boxes.values()) + 1) * CELL_WIDTH)
    height = round((max(box.row for box in boxes.values()) + 1) * CELL_HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    parts += [_box(box) for box in boxes.values()]
    parts += [_arrow(boxes[arrow.start], boxes[arrow.end], arrow) for arrow in arrows]
    return "\n".join([*parts, "</svg>\n"])


def _box(box: Box) -> str:
    x, y = box.middle
    radius = {"choice": box.height / 2, "store": 2}.get(box.kind, 6)
    lines = box.text.splitlines()
    first = y - LINE_HEIGHT * (len(lines) - 1) / 2 + 4
    text = "".join(
        f'<tspan x="{x:g}" y="{first + LINE_HEIGHT * number:g}">{escape(line)}</tspan>'
        for number, line in enumerate(lines)
    )
    stroke = f'fill="{FILL[box.kind]}" stroke="{STROKE[box.kind]}" stroke-width="{2 if box.kind == "store" else 1.2}"'
    return (
        f'<rect x="{x - box.width / 2:g}" y="{y - box.height / 2:g}" width="{box.width}" height="{box.height:g}" '
        f'rx="{radius:g}" {stroke}/>\n<text text-anchor="middle" fill="{INK}">{text}</text>'
    )


def _arrow(start: Box, end: Box, arrow: Arrow) -> str:
    (x1, y1), (x2, y2) = start.border(end.middle), end.border(start.middle)
    dash = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    line = (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-width="1.2"{dash} '
        'marker-end="url(#head)"/>'
    )
    if not arrow.label:
        return line
    flat = abs(x2 - x1) > abs(y2 - y1)
    x, y = (x1 + x2) / 2 + (0 if flat else 6), (y1 + y2) / 2 + (-5 if flat else 4)
    anchor = "middle" if flat else "start"
    return f'{line}\n<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(arrow.label)}</text>'
