"""Plots as inline SVG: axes, lines, bars, whiskers, points, marks.

Knows geometry and escaping. Colours are classes (`s0`, `s1`, … for series) that the page's style
sheet defines for light and dark; nothing here is fetched or scripted.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 42
Point = tuple[float, float]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from low to high, at most about `most`."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade between low and high, fewer if there are many decades.

    Within less than a decade, round values.
    """
    if high < 12 * low:
        return ticks(low, high, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]


def short(value: float) -> str:
    """A tick's label."""
    if value and (abs(value) >= 100_000 or abs(value) < 0.001):
        return f"{value:.0e}"
    return f"{value:,.10g}"


@dataclass(slots=True)
class Plot:
    """One plot: give it ranges, add series, then `render`."""

    x_label: str
    y_label: str
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    whole_x: bool = False
    """Ticks at whole numbers only."""
    x_names: Sequence[str] = ()
    """Names for x = 0, 1, …; then there are no numeric ticks on that axis."""
    width: int = WIDTH
    height: int = HEIGHT
    _parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x = _widened(self.x, log=self.log_x)
        self.y = _widened(self.y, log=False)

    def line(self, points: Iterable[Point], series: int, title: str = "") -> None:
        """A line through the points."""
        path = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in points)
        if path:
            self._add(f'<polyline class="line s{series}" points="{path}">', title, "polyline")

    def steps(self, points: Sequence[Point], series: int, title: str = "") -> None:
        """A line that keeps its height until the next point."""
        path: list[Point] = []
        for x, y in points:
            if path:
                path.append((x, path[-1][1]))
            path.append((x, y))
        self.line(path, series, title)

    def dots(self, points: Iterable[Point], series: int, *, radius: float = 2.2) -> None:
        """A dot at each point."""
        for x, y in points:
            self._parts.append(
                f'<circle class="dot s{series}" cx="{self._px(x):.1f}" cy="{self._py(y):.1f}" '
                f'r="{radius}"/>'
            )

    def bar(self, x: float, width: float, y: float, series: int, title: str = "") -> None:
        """A bar from 0 to y, centred at x."""
        left, right = self._px(x - width / 2), self._px(x + width / 2)
        top, foot = self._py(y), self._py(max(0.0, self.y[0]))
        self._add(
            f'<rect class="bar s{series}" x="{left:.1f}" y="{min(top, foot):.1f}" '
            f'width="{right - left:.1f}" height="{abs(foot - top):.1f}">',
            title,
            "rect",
        )

    def whisker(self, x: float, low: float, high: float) -> None:
        """An interval."""
        px, a, b = self._px(x), self._py(low), self._py(high)
        self._parts.append(
            f'<path class="whisker" d="M{px:.1f} {a:.1f}V{b:.1f}M{px - 5:.1f} {a:.1f}h10'
            f'M{px - 5:.1f} {b:.1f}h10"/>'
        )

    def text(self, x: float, y: float, words: str) -> None:
        """Words above a point."""
        self._parts.append(
            f'<text class="value" x="{self._px(x):.1f}" y="{self._py(y) - 6:.1f}">'
            f"{html.escape(words)}</text>"
        )

    def across(self, y: float) -> None:
        """A dashed line at a height that matters."""
        self._parts.append(
            f'<path class="mark" d="M{_LEFT} {self._py(y):.1f}H{self.width - _RIGHT}"/>'
        )

    def mark(self, x: float, words: str, row: int = 0) -> None:
        """A vertical mark with words at its top; `row` keeps neighbours apart."""
        px, right = self._px(x), self._px(x) > self.width * 0.75
        self._parts.append(
            f'<path class="mark" d="M{px:.1f} {_TOP}V{self.height - _BOTTOM}"/>'
            f'<text class="event" x="{px + (-4 if right else 4):.1f}" y="{_TOP + 10 + 13 * row}" '
            f'text-anchor="{"end" if right else "start"}">{html.escape(words)}</text>'
        )

    def render(self) -> str:
        """The `<svg>` element."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{html.escape(self.y_label)} by {html.escape(self.x_label)}">'
            f"{self._axes()}{''.join(self._parts)}</svg>"
        )

    def _axes(self) -> str:
        foot, right = self.height - _BOTTOM, self.width - _RIGHT
        parts = []
        for value in ticks(*self.y):
            y = self._py(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            label = f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            parts.append(f"{label}{short(value)}</text>")
        for value, label in self._x_ticks():
            x = self._px(value)
            parts.append(f'<path class="grid" d="M{x:.1f} {foot}v4"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{foot + 17}" text-anchor="middle">'
                f"{html.escape(label)}</text>"
            )
        middle_x, middle_y = (_LEFT + right) / 2, (_TOP + foot) / 2
        parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{foot}H{right}"/>')
        parts.append(
            f'<text class="label" x="{middle_x:.0f}" y="{self.height - 6}" text-anchor="middle">'
            f"{html.escape(self.x_label)}</text>"
            f'<text class="label" transform="translate(13 {middle_y:.0f}) rotate(-90)" '
            f'text-anchor="middle">{html.escape(self.y_label)}</text>'
        )
        return "".join(parts)

    def _x_ticks(self) -> list[tuple[float, str]]:
        if self.x_names:
            return [(float(i), name) for i, name in enumerate(self.x_names)]
        values = log_ticks(*self.x) if self.log_x else ticks(*self.x)
        if self.whole_x:
            values = [value for value in values if value.is_integer()]
        return [(value, short(value)) for value in values]

    def _px(self, x: float) -> float:
        low, high = self.x
        if self.log_x:
            low, high, x = math.log(low), math.log(high), math.log(max(x, self.x[0]))
        share = min(1.0, max(0.0, (x - low) / (high - low)))
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def _py(self, y: float) -> float:
        low, high = self.y
        share = min(1.0, max(0.0, (y - low) / (high - low)))
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def _add(self, element: str, title: str, tag: str) -> None:
        inside = f"<title>{html.escape(title)}</title>" if title else ""
        self._parts.append(f"{element}{inside}</{tag}>")


def _widened(ends: tuple[float, float], *, log: bool) -> tuple[float, float]:
    """A range of which both ends differ, above 0 for a logarithm."""
    low, high = ends
    if log:
        low = max(low, 1e-3)
        return (low, high) if high > low * 1.01 else (low / 2, low * 2)
    return (low, high) if high > low else (low, low + 1.0)
