"""Charts as inline SVG: lines with intervals, pairs of bars, steps, and lanes.

A chart is 400 units wide, so that its text is legible on a phone without scaling. Colors are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34
COLORS = 6
"""Number of colors of series, `--c0` and on."""


@dataclass(frozen=True)
class Series:
    """Points of one line. `widths`: half of each point's 95 % interval, or None."""

    name: str
    points: Sequence[tuple[float, float]]
    widths: Sequence[float | None] = ()
    color: str = ""
    steps: bool = False
    """Whether each value holds until the next point."""


@dataclass(frozen=True)
class Bars:
    """A row of a bar chart: a published value and ours."""

    name: str
    paper: float | None
    ours: float
    width: float | None = None


@dataclass
class Axis:
    """A linear scale from values to units of the picture."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def axis(values: Sequence[float], start: float, end: float, zero: bool = True, count: int = 5) -> Axis:
    """Return a scale that holds all values between round ticks."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12:
        high = low + 1.0
    step = _round((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def _round(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def lines(title: str, x_name: str, y_name: str, series: Sequence[Series], zero: bool = True) -> str:
    """Draw lines over linear axes, with a legend."""
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    for each in series:
        for (_, y), width in zip(each.points, each.widths, strict=False):
            ys += [] if width is None else [_low(y, width), y + width]
    across = axis(xs, LEFT, WIDTH - RIGHT, zero=False)
    across.low, across.high = min(xs), max(max(xs), min(xs) + 1e-9)
    across.ticks = [tick for tick in across.ticks if across.low <= tick <= across.high]
    up = axis(ys, HEIGHT - BOTTOM, TOP, zero)
    parts = [_grid(up, across)]
    for number, each in enumerate(series):
        color = each.color or f"var(--c{number % COLORS})"
        path = _path(each, across, up)
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for index, (x, y) in enumerate(each.points if not each.steps else ()):
            width = each.widths[index] if index < len(each.widths) else None
            if width is not None:
                top, low = up.at(y + width), up.at(_low(y, width))
                at = across.at(x)
                parts.append(f'<path d="M{at:.1f} {top:.1f}V{low:.1f}" stroke="{color}" opacity=".6"/>')
            parts.append(f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="2.2" fill="{color}"/>')
    parts.append(_names(x_name, y_name, HEIGHT))
    return _figure(title, HEIGHT, parts, [(each.name, each.color or f"var(--c{number % COLORS})")
                                          for number, each in enumerate(series)])  # fmt: skip


def _low(value: float, width: float) -> float:
    """Return the interval's lower end. It is drawn down to zero at most, for a value above zero."""
    return max(value - width, 0.0) if value >= 0 else value - width


def _path(each: Series, across: Axis, up: Axis) -> str:
    text: list[str] = []
    last = ""
    for x, y in each.points:
        at, height = f"{across.at(x):.1f}", f"{up.at(y):.1f}"
        if not text:
            text.append(f"M{at} {height}")
        elif each.steps:
            text.append(f"H{at}" + ("" if height == last else f"V{height}"))
        else:
            text.append(f"L{at} {height}")
        last = height
    return "".join(text)


def bars(title: str, unit: str, rows: Sequence[Bars], reference: str = "paper") -> str:
    """Draw a pair of horizontal bars for each row: the reference above ours, with ours' interval."""
    row_h = 44
    height = TOP + row_h * len(rows) + BOTTOM
    values = [0.0]
    for row in rows:
        values += [row.ours, *([row.paper] if row.paper is not None else [])]
        values += [] if row.width is None else [_low(row.ours, row.width), row.ours + row.width]
    across = axis(values, 8, WIDTH - 44, count=4)
    parts = [_vertical(across, height)]
    zero = across.at(0.0)
    for number, row in enumerate(rows):
        top = TOP + number * row_h
        parts.append(f'<text x="8" y="{top + 11}">{escape(row.name)}</text>')
        # The number of ours stands beside the end of its interval.
        pair = ((row.paper, 0.0, "var(--paper)"), (row.ours, row.width or 0.0, "var(--c0)"))
        for index, (value, width, color) in enumerate(pair):
            if value is None:
                continue
            at, y = across.at(value), top + 15 + index * 12
            wide, right = max(abs(at - zero), 1.0), max(across.at(value + width), zero) + 4
            parts.append(
                f'<rect x="{min(at, zero):.1f}" y="{y}" width="{wide:.1f}" height="9" fill="{color}"/>'
                f'<text x="{right:.1f}" y="{y + 8}" class="v">{number_of(value)}</text>'
            )
        if row.width is not None:
            low, high = across.at(_low(row.ours, row.width)), across.at(row.ours + row.width)
            parts.append(
                f'<path d="M{low:.1f} {top + 31.5}H{high:.1f}" stroke="var(--fg)" stroke-width="1.2"/>'
            )
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">{escape(unit)}</text>')
    keys = [(reference, "var(--paper)"), ("ours, 95 % interval", "var(--c0)")]
    return _figure(title, height, parts, keys)


@dataclass(frozen=True)
class Span:
    """A session on a worker for a time."""

    row: int
    color: int
    begins_s: float
    ends_s: float


def lanes(title: str, rows: int, spans: Sequence[Span], ends_s: float, y_name: str,
          marks: Sequence[tuple[float, int]] = ()) -> str:  # fmt: skip
    """Draw a line for each span in its row, and a dot for each mark (time, row)."""
    height = 300
    across = axis([0.0, ends_s], LEFT, WIDTH - RIGHT)
    across.high = ends_s
    across.ticks = [tick for tick in across.ticks if tick <= ends_s]
    up = Axis(0, max(rows, 1), TOP, height - BOTTOM)
    parts = [_vertical(across, height)]
    paths: dict[int, list[str]] = {}
    for span in spans:
        begin, end = across.at(span.begins_s), across.at(span.ends_s)
        paths.setdefault(span.color, []).append(f"M{begin:.1f} {up.at(span.row + 0.5):.1f}H{end:.1f}")
    thick = max(min((height - TOP - BOTTOM) / max(rows, 1) - 0.2, 4.0), 0.5)
    for color, found in sorted(paths.items()):
        hue = color * 47 % 360
        parts.append(
            f'<path d="{"".join(found)}" stroke="hsl({hue} 60% 52%)" stroke-width="{thick:.2f}" fill="none"/>'
        )
    dots = "".join(f"M{across.at(at):.1f} {up.at(row + 0.5):.1f}h0" for at, row in marks)
    if dots:
        parts.append(f'<path d="{dots}" stroke="var(--fg)" stroke-width="2.4" stroke-linecap="round"/>')
    parts.append(_names("seconds", y_name, height))
    legend = [("migration", "var(--fg)")] if marks else []
    return _figure(title, height, parts, legend)


def _grid(up: Axis, across: Axis) -> str:
    parts = []
    for tick in up.ticks:
        y = up.at(tick)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="g"/>'
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{number_of(tick)}</text>'
        )
    for tick in across.ticks:
        x = across.at(tick)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 19}" text-anchor="middle">{number_of(tick)}</text>')
    return "".join(parts)


def _vertical(across: Axis, height: int) -> str:
    return "".join(
        f'<path d="M{across.at(tick):.1f} {TOP}V{height - BOTTOM}" class="g"/>'
        f'<text x="{across.at(tick):.1f}" y="{height - 19}" text-anchor="middle">{number_of(tick)}</text>'
        for tick in across.ticks
    )


def _names(x_name: str, y_name: str, height: int) -> str:
    middle = (TOP + height - BOTTOM) / 2
    center = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<text x="{center}" y="{height - 4}" text-anchor="middle">{escape(x_name)}</text>'
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>'
    )


def _figure(title: str, height: int, parts: Sequence[str], legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in legend)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<div class="keys">{keys}</div></figure>'
    )


def number_of(value: float) -> str:
    """Format a number for a label."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if value % 1000 == 0 else f"{value / 1000:.1f}k"
    if abs(value) >= 100 or value == round(value):
        return f"{value:.0f}"
    return f"{value:.3g}"
