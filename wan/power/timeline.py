"""Draws one layer of each traced run as a timeline, with lanes for exchanges and attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.evidence.order import Trace
from wan.output_files import marked_kind, write_output
from wan.settings.errors import InputError
from wan.trace import Event

PLOT_METADATA = {"Software": "wan.power"}
PLOT = marked_kind("a plot of wan.power", b"Software\0wan.power")
_MS = 1e6  # nanoseconds
QUANTISES = ("quantise", "prepare", "mask")
"""Event kinds of quantized and sparse attention."""


@dataclass(frozen=True)
class Bar:
    """A bar in a lane; begin, relative to the layer, and length are milliseconds."""

    lane: str
    colour: str
    begin: float
    length: float
    label: str = ""


_LANES = ("exchange", "attention", "rotate, quantise", "other")
_COLOURS = {  # Okabe and Ito's colorblind-safe palette
    "all-to-all of q, k, v": "#E69F00",
    "all-to-all of the result": "#D55E00",
    "exchange under way": "#F6DFB0",
    "packed, copied": "#F0E442",
    "ring": "#CC79A7",
    "attention": "#0072B2",
    "rotate, quantise": "#009E73",
    "projections": "#999999",
    "cross-attention": "#56B4E9",
    "feed-forward": "#555555",
}


def under_way(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Finds the (begin, end) of asynchronous ring hops and all-to-alls, in nanoseconds.

    They last from the end of their call to the beginning of their wait.
    """
    found: list[tuple[int, int]] = []
    begun: dict[object, int] = {}
    for event in events:
        facts = event.facts
        key = tuple(facts.get(name) for name in ("layer", "chunk", "what"))
        if event.kind == "hop" or (event.kind == "a2a" and facts.get("beside")):
            begun[key] = event.end
        elif event.kind in ("hop wait", "a2a wait") and key in begun:
            found.append((begun.pop(key), event.begin))
    return found


def by_layer(events: Iterable[Event]) -> list[tuple[Event, list[Event]]]:
    """Pairs each layer's event with the events inside it; events are sorted by begin."""
    found: list[tuple[Event, list[Event]]] = []
    for event in events:
        if event.kind == "layer":
            found.append((event, []))
        elif found and "layer" in event.facts:
            found[-1][1].append(event)
    return found


def layer_of(trace: Trace) -> tuple[Event, list[Event]]:
    """Returns the event of the layer with attention of median duration, and the events inside it.

    Raises:
        InputError: No layer computes attention.
    """
    layers = by_layer(trace.events)
    found = [pair for pair in layers if any(one.kind == "attention" for one in pair[1])]
    if not found:
        raise InputError(f"No layer of rank {trace.plan.rank} computes attention: nothing to draw.")
    return sorted(found, key=lambda pair: pair[0].length)[len(found) // 2]


def bars(layer: Event, inside: Sequence[Event]) -> Iterator[Bar]:
    """Yields the bars of a layer."""

    def at(lane: str, colour: str, begin: int, end: int, label: str = "") -> Bar:
        return Bar(lane, colour, (begin - layer.begin) / _MS, (end - begin) / _MS, label)

    for begin, end in under_way(inside):
        yield at("exchange", "exchange under way", begin, end)
    for event in inside:
        times, what = (event.begin, event.end), str(event.facts.get("what", ""))
        if event.kind in ("a2a", "a2a wait"):
            whose = "the result" if what == "out" else "q, k, v"
            label = what if event.kind == "a2a" else ""
            yield at("exchange", f"all-to-all of {whose}", *times, label)
        elif event.kind in ("pack", "copy"):
            yield at("exchange", "packed, copied", *times)
        elif event.kind in ("hop", "hop wait", "gather"):
            yield at("exchange", "ring", *times)
        elif event.kind == "attention":
            yield at("attention", "attention", *times, str(event.facts.get("chunk", "")))
        elif event.kind in QUANTISES:
            yield at("rotate, quantise", "rotate, quantise", *times)
        elif event.kind in ("cross-attention", "feed-forward"):
            yield at("other", event.kind, *times)
        elif event.kind == "project":
            yield at("other", "projections", *times)


def draw(runs: Sequence[tuple[str, Trace]], path: Path) -> None:
    """Draws a PNG with one panel per run; all panels have the same time axis.

    Args:
        named_traces: The name of each run and the trace of one of its ranks.

    Raises:
        InputError: matplotlib is not installed, or a trace has no attention.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "The image needs matplotlib (pip install -r requirements-power.txt); all else is done."
        ) from error
    panels = [(name, trace, *layer_of(trace)) for name, trace in runs]
    figure: Any = Figure(figsize=(10, 0.7 + 1.35 * len(panels)), dpi=130, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    longest, colours = max(layer.length for _, _, layer, _ in panels) / _MS, set[str]()
    for axis, (name, trace, layer, inside) in zip(axes, panels, strict=True):
        drawn = list(bars(layer, inside))
        colours |= {bar.colour for bar in drawn}
        _titles(axis, name, trace, layer, drawn)
        _panel(axis, drawn, longest)
        axis.axvline(layer.length / _MS, color="black", linewidth=0.6)
    axes[-1].set_xlim(0, longest * 1.005)
    axes[-1].set_xlabel(
        "milliseconds from the beginning of the layer; numbers: head chunks", fontsize=8
    )
    _legend(figure, [colour for colour in _COLOURS if colour in colours])
    with write_output(path, PLOT) as temporary:
        figure.savefig(temporary, format="png", metadata=PLOT_METADATA)


def _titles(axis: Any, name: str, trace: Trace, layer: Event, drawn: Sequence[Bar]) -> None:
    total, facts = layer.length / _MS, layer.facts
    where = f"rank {trace.plan.rank}, step {facts.get('step')}, layer {facts.get('layer')}"
    busy = sum(bar.length for bar in drawn if bar.lane == "attention")
    axis.set_title(f"{trace.plan.mode.name}  ({name}; {where})", loc="left", fontsize=9)
    axis.set_title(f"{total:.3g} ms, attention {busy / total:.0%}", loc="right", fontsize=9)


def _panel(axis: Any, drawn: Sequence[Bar], longest: float) -> None:
    """Draws the bars of a layer; bars too short for their label have none.

    Args:
        longest: Length of the time axis, milliseconds.
    """
    lanes = [lane for lane in _LANES if any(bar.lane == lane for bar in drawn)]
    for bar in drawn:
        row = lanes.index(bar.lane)
        style = {"facecolor": _COLOURS[bar.colour], "edgecolor": "white", "linewidth": 0.3}
        axis.broken_barh([(bar.begin, bar.length)], (row - 0.4, 0.8), **style)
        if bar.label and bar.length > longest * 0.011 * len(bar.label):
            middle = bar.begin + bar.length / 2
            axis.text(middle, row, bar.label, ha="center", va="center", color="white", fontsize=7)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _legend(figure: Any, colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=_COLOURS[name], label=name) for name in colours]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False
    )
