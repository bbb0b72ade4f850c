"""Charts as inline SVG: steps under a limit, stacked bars, a filled bar. Colours are CSS classes, so the page decides
them.

::

     GB                    title of the upright axis, with its unit
     4 |   ____________    limit
     2 |  |~~~~~~~~~~~~    a value holds until the next
     0 +---------------
       12:00     13:00
         local time        title of the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cachetool.core.markup import Markup, element, joined
from cachetool.report.axes import Axis

__all__ = ["legend", "share", "stacked", "steps"]

WIDTH, HEIGHT = 440, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, WIDTH - 14.0, 26.0, HEIGHT - 44.0
# The browser chooses the font, so widths cannot be measured here and the widest usual one is
# assumed.
_CHARACTER = 7.2
"""Maximum width of a character of the small print, in units of the picture."""


def steps(x: Axis, y: Axis, points: Sequence[tuple[float, float]], limit: Sequence[tuple[float, float]]) -> Markup:
    """Return an area under the line of ``points``, each of which holds until the next, and the dashed line of a
    ``limit``."""
    along = _stairs(x, y, points)
    ends = [f"{_x(x, points[-1][0]):.1f},{_BOTTOM:.1f}", f"{_x(x, points[0][0]):.1f},{_BOTTOM:.1f}"]
    return _picture(
        x,
        y,
        element("polygon", points=" ".join(along + ends), class_="area"),
        element("polyline", points=" ".join(along), class_="line"),
        element("polyline", points=" ".join(_stairs(x, y, limit)), class_="limit"),
    )


def _stairs(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> list[str]:
    before, corners = points[0][1], []
    for at, value in points:
        along = f"{_x(x, at):.1f}"
        corners += [f"{along},{_y(y, level):.1f}" for level in dict.fromkeys((before, value))]
        before = value
    return corners


def stacked(
    x: Axis,
    y: Axis,
    edges: Sequence[float],
    series: Mapping[str, tuple[str, Sequence[float]]],
    names: Sequence[str],
) -> Markup:
    """Return bars between neighbouring ``edges``, one above the other.

    ``series`` has for each name the class of its colour and a value for each bar. ``names`` are shown when a bar is
    pointed at.
    """
    bars = []
    for number, name in enumerate(names):
        left, right = _x(x, edges[number]), _x(x, edges[number + 1])
        # A gap between bars, but none between narrow ones, of which it would leave nothing.
        gap = 1.0 if right - left > 4 else 0.0
        floor = 0.0
        for colour, values in series.values():
            value = float(values[number])
            top, bottom = _y(y, floor + value), _y(y, floor)
            # Bars lower than a twentieth of a unit cannot be seen, and would only make the page
            # larger.
            if bottom - top >= 0.05:
                shape = {"x": left, "y": top, "width": max(0.6, right - left - gap), "height": bottom - top}
                bars.append(element("rect", element("title", name), class_=colour, **shape))
            floor += value
    return _picture(x, y, *bars)


def share(part: float, colour: str) -> Markup:
    """Return a bar that is filled to a part of 0 to 1."""
    return element(
        "svg",
        element("rect", width=100, height=8, class_="rest"),
        element("rect", width=100.0 * min(1.0, max(0.0, part)), height=8, class_=colour),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="share",
        aria_hidden="true",
    )


def legend(colours: Mapping[str, str]) -> Markup:
    """Return the list of names with their colours, each given by its class."""
    entries = [element("li", element("span", class_=f"key {colour}"), name) for name, colour in colours.items()]
    return element("ul", *entries, class_="legend")


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.share(value) * (_RIGHT - _LEFT)


def _y(axis: Axis, value: float) -> float:
    return _BOTTOM - axis.share(value) * (_BOTTOM - _TOP)


def _picture(x: Axis, y: Axis, *shapes: Markup) -> Markup:
    rules = [
        element("line", x1=_LEFT, x2=_RIGHT, y1=_y(y, value), y2=_y(y, value), class_="rule") for value, _ in y.ticks
    ]
    beside = [element("text", text, x=_LEFT - 6, y=_y(y, value) + 4, text_anchor="end") for value, text in y.ticks]
    return element(
        "svg",
        *rules,
        *shapes,
        element("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis"),
        *beside,
        element("text", y.title, x=4, y=12, class_="unit"),
        joined(_below(x)),
        element("text", x.title, x=(_LEFT + _RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle", class_="unit"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"chart: {y.title} by {x.title}",
    )


def _below(x: Axis) -> list[Markup]:
    """Return ticks and words of the lower axis. A word that would overlap the one before is left out."""
    marks, free = [], 0.0
    for value, text in x.ticks:
        at, half = _x(x, value), len(text) * _CHARACTER / 2
        centre = min(max(at, half), WIDTH - half)
        marks.append(element("line", x1=at, x2=at, y1=_BOTTOM, y2=_BOTTOM + 4, class_="axis"))
        if centre - half >= free:
            marks.append(element("text", text, x=centre, y=_BOTTOM + 17, text_anchor="middle"))
            free = centre + half + _CHARACTER
    return marks
