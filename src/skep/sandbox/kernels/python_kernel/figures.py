"""Matplotlib without a screen: `show()` and the end of a cell publish the open figures, with their data.

Chosen as the backend when a cell first imports pyplot.
"""

from __future__ import annotations

import functools
import io
import re
import sys
from typing import Any

from matplotlib import _pylab_helpers
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Wedge

from . import bounds

FigureCanvas = FigureCanvasAgg
FigureManager = FigureManagerBase
_UNIT = re.compile(r"[(\[]([^()\[\]]{1,20})[)\]]\s*$")

#: Set by the kernel: called with each figure.
publish: Any = None


def show(*_: Any, **__: Any) -> None:
    """Publish the open figures and close them, so that the next plot starts on a new one."""
    for manager in _pylab_helpers.Gcf.get_all_fig_managers():
        figure = manager.canvas.figure
        _pylab_helpers.Gcf.destroy(manager)
        if figure.get_axes() or figure.texts or figure.images:
            publish(figure)


def describe_figure(figure: Figure, notes: list[str]) -> dict[str, Any]:
    """Return a figure as a picture and as the data of its charts."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    for manager in _pylab_helpers.Gcf.get_all_fig_managers():
        if manager.canvas.figure is figure:
            _pylab_helpers.Gcf.destroy(manager)
    charts = [_chart(axes, notes) for axes in figure.get_axes()]
    found = {"text": repr(figure), "png": picture.getvalue()}
    return {**found, "charts": [chart for chart in charts if chart["series"]]}


def _chart(axes: Axes, notes: list[str]) -> dict[str, Any]:
    series = _pies(axes) or _boxes(axes) or [*_bars(axes), *_lines(axes), *_scatters(axes)]
    kinds = sorted({one["kind"] for one in series})
    legend = axes.get_legend()
    return {
        "kind": kinds[0] if len(kinds) == 1 else "mixed",
        "title": axes.get_title(),
        "x_label": axes.get_xlabel(),
        "y_label": axes.get_ylabel(),
        "x_unit": _unit(axes.get_xlabel()),
        "y_unit": _unit(axes.get_ylabel()),
        "x_scale": axes.get_xscale(),
        "y_scale": axes.get_yscale(),
        "legend": legend.get_title().get_text() if legend else "",
        "series": _bounded(series, notes),
    }


def _unit(label: str) -> str | None:
    found = _UNIT.search(label)
    return found[1] if found else None


def _pies(axes: Axes) -> list[dict[str, Any]]:
    wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
    points = [[_label(one) or f"{n}", bounds.plain((one.theta2 - one.theta1) / 360)] for n, one in enumerate(wedges, 1)]
    return [{"kind": "pie", "label": "", "points": points}] if points else []


def _boxes(axes: Axes) -> list[dict[str, Any]]:
    return [
        {
            "kind": "box",
            "label": str(box.get("label") or number),
            "box": {name: bounds.plain(box[key]) for name, key in _BOX.items() if key in box},
            "points": [[number, bounds.plain(one)] for one in box.get("fliers", [])],
        }
        for number, box in enumerate(getattr(axes, "_skep_boxes", ()), 1)
    ]


def _bars(axes: Axes) -> list[dict[str, Any]]:
    found = []
    for container in axes.containers:
        if isinstance(container, BarContainer):
            upright = container.orientation != "horizontal"
            names = _tick_names(axes.xaxis if upright else axes.yaxis)
            points = [_bar(patch, upright, names) for patch in container.patches]
            found.append({"kind": "bar", "label": _label(container), "points": points})
    return found


def _bar(patch: Any, upright: bool, names: dict[float, str]) -> list[Any]:
    start, size = (patch.get_x(), patch.get_width()) if upright else (patch.get_y(), patch.get_height())
    middle = round(float(start + size / 2), 9)
    length = patch.get_height() if upright else patch.get_width()
    return [names.get(middle, bounds.plain(middle)), bounds.plain(float(length))]


def _tick_names(axis: Any) -> dict[float, str]:
    """Return the words at an axis by position, for an axis of categories."""
    labels = [label.get_text() for label in axis.get_ticklabels()]
    numbers = all(re.fullmatch(r"[-\u2212+.,\d$\\{}e^]*", label) for label in labels)
    return {} if numbers else dict(zip((round(float(tick), 9) for tick in axis.get_ticklocs()), labels, strict=False))


def _lines(axes: Axes) -> list[dict[str, Any]]:
    found = []
    in_error_bars = {id(part) for one in axes.containers if not isinstance(one, BarContainer) for part in _parts(one)}
    for line in axes.get_lines():
        marks_only = line.get_linestyle() in ("None", "none", "", " ")
        if id(line) not in in_error_bars:
            xs, ys = _periods(axes, line.get_xdata(orig=True)), list(line.get_ydata(orig=True))
            points = [[bounds.plain(x), bounds.plain(y)] for x, y in zip(xs, ys, strict=False)]
            found.append({"kind": "scatter" if marks_only else "line", "label": _label(line), "points": points})
    return found


def _periods(axes: Axes, values: Any) -> list[Any]:
    """Return the dates that pandas draws as numbers, as dates."""
    few = list(values[: bounds.CHART_POINTS + 1])
    frequency, pandas = getattr(axes, "freq", None), sys.modules.get("pandas")
    if frequency is None or pandas is None or not all(hasattr(one, "__index__") for one in few):
        return few
    return [str(pandas.Period(ordinal=int(one), freq=frequency)) for one in few]


def _parts(container: Any) -> list[Any]:
    """Return the small lines at the ends of error bars: they are no series of their own."""
    return [part for group in list(container)[1:] for part in (group if isinstance(group, tuple) else (group,))]


def _scatters(axes: Axes) -> list[dict[str, Any]]:
    return [
        {
            "kind": "scatter",
            "label": _label(one),
            "points": [[bounds.plain(float(x)), bounds.plain(float(y))] for x, y in one.get_offsets()],
        }
        for one in axes.collections
        if isinstance(one, PathCollection)
    ]


def _label(artist: Any) -> str:
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") else label


def _bounded(series: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    if len(series) > bounds.CHART_SERIES:
        notes.append(f"charts: the first {bounds.CHART_SERIES} of {len(series):,} series")
    for one in series[: bounds.CHART_SERIES]:
        if len(one["points"]) > bounds.CHART_POINTS:
            notes.append(f"charts: the first {bounds.CHART_POINTS:,} points of a series")
            del one["points"][bounds.CHART_POINTS :]
    return series[: bounds.CHART_SERIES]


_BOX = {"low": "whislo", "q1": "q1", "median": "med", "q3": "q3", "high": "whishi"}
_draw_boxes = Axes.bxp


@functools.wraps(_draw_boxes)
def _bxp(axes: Axes, bxpstats: Any, *rest: Any, **options: Any) -> Any:
    # A box plot leaves only loose lines behind; what they mean is known here alone.
    stats = list(bxpstats)
    axes._skep_boxes = [*getattr(axes, "_skep_boxes", ()), *stats]
    return _draw_boxes(axes, stats, *rest, **options)


Axes.bxp = _bxp
