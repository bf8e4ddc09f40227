"""Draws one layer of each traced run as a timeline, with lanes for exchanges and attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.metering.exchange_order import Trace
from wan.settings.errors import InputError
from wan.utils.files import make_marked_kind, write_output
from wan.utils.trace import Event

PLOT_METADATA = {"Software": "wan.power"}
PLOT_KIND = make_marked_kind("a plot of wan.power", b"Software\0wan.power")
_NS_PER_MS = 1e6  # nanoseconds
QUANTIZE_OPERATIONS = ("quantise", "prepare", "mask")
"""Operations of quantized and sparse attention."""


@dataclass(frozen=True)
class Bar:
    """A bar in a lane; begin, relative to the layer, and length are milliseconds."""

    lane: str
    color: str
    begin: float
    length: float
    label: str = ""


_LANES = ("exchange", "attention", "rotate, quantise", "other")
_COLORS = {  # Okabe and Ito's colorblind-safe palette
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


def find_async_spans(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Finds the (begin, end) of asynchronous ring hops and all-to-alls, in nanoseconds.

    They last from the end of their call to the beginning of their wait.
    """
    spans: list[tuple[int, int]] = []
    begin_times: dict[object, int] = {}
    for event in events:
        attributes = event.attributes
        key = tuple(attributes.get(name) for name in ("layer", "chunk", "what"))
        if event.operation == "hop" or (event.operation == "a2a" and attributes.get("beside")):
            begin_times[key] = event.end
        elif event.operation in ("hop wait", "a2a wait") and key in begin_times:
            spans.append((begin_times.pop(key), event.begin))
    return spans


def collect_layer_spans(events: Iterable[Event]) -> list[tuple[Event, list[Event]]]:
    """Pairs each layer's event with the events inside it; events are sorted by begin."""
    layers: list[tuple[Event, list[Event]]] = []
    for event in events:
        if event.operation == "layer":
            layers.append((event, []))
        elif layers and "layer" in event.attributes:
            layers[-1][1].append(event)
    return layers


LayerSpan = tuple[Event, list[Event]]
"""The event of a layer, and the events inside it."""
LayerKey = tuple[object, ...]
"""Step, branch and index of a layer."""


def select_layers(traces: Sequence[Trace]) -> list[LayerSpan]:
    """Selects the layer of median duration of the first trace, and the same of the others.

    Only layers with attention are selected. If not all traces have the same layer, that of median
    duration of each is selected.

    Raises:
        InputError: A trace has no layer that computes attention.
    """
    spans_of_traces = [_list_attending_layers(trace) for trace in traces]
    common = set.intersection(*({*spans} for spans in spans_of_traces))
    if common:
        key = _find_median_layer(spans_of_traces[0], common)
        return [spans[key] for spans in spans_of_traces]
    return [spans[_find_median_layer(spans, {*spans})] for spans in spans_of_traces]


def _find_median_layer(spans: Mapping[LayerKey, LayerSpan], keys: Set[LayerKey]) -> LayerKey:
    """Returns the layer of median duration of those with these keys."""
    candidates = [key for key in spans if key in keys]
    return sorted(candidates, key=lambda key: spans[key][0].duration)[len(candidates) // 2]


def _list_attending_layers(trace: Trace) -> dict[LayerKey, LayerSpan]:
    """Returns the layers that compute attention."""
    spans: dict[LayerKey, LayerSpan] = {}
    for layer, events in collect_layer_spans(trace.events):
        if any(event.operation == "attention" for event in events):
            key = tuple(layer.attributes.get(name) for name in ("step", "branch", "layer"))
            spans.setdefault(key, (layer, events))
    if not spans:
        raise InputError(f"No layer of rank {trace.plan.rank} computes attention: nothing to draw.")
    return spans


def make_bars(layer: Event, layer_events: Sequence[Event]) -> Iterator[Bar]:
    """Yields the bars of a layer."""

    def make_bar(lane: str, color: str, begin: int, end: int, label: str = "") -> Bar:
        return Bar(
            lane, color, (begin - layer.begin) / _NS_PER_MS, (end - begin) / _NS_PER_MS, label
        )

    for begin, end in find_async_spans(layer_events):
        yield make_bar("exchange", "exchange under way", begin, end)
    for event in layer_events:
        times, tensor_name = (event.begin, event.end), str(event.attributes.get("what", ""))
        if event.operation in ("a2a", "a2a wait"):
            tensors_text = "the result" if tensor_name == "out" else "q, k, v"
            label = tensor_name if event.operation == "a2a" else ""
            yield make_bar("exchange", f"all-to-all of {tensors_text}", *times, label)
        elif event.operation in ("pack", "copy"):
            yield make_bar("exchange", "packed, copied", *times)
        elif event.operation in ("hop", "hop wait", "gather"):
            yield make_bar("exchange", "ring", *times)
        elif event.operation == "attention":
            yield make_bar("attention", "attention", *times, str(event.attributes.get("chunk", "")))
        elif event.operation in QUANTIZE_OPERATIONS:
            yield make_bar("rotate, quantise", "rotate, quantise", *times)
        elif event.operation in ("cross-attention", "feed-forward"):
            yield make_bar("other", event.operation, *times)
        elif event.operation == "project":
            yield make_bar("other", "projections", *times)


def draw_timeline(named_traces: Sequence[tuple[str, Trace]], path: Path) -> None:
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
    ordered_traces = sorted(named_traces, key=_get_panel_order)
    layers = select_layers([trace for _, trace in ordered_traces])
    panels = [(*named, *layer) for named, layer in zip(ordered_traces, layers, strict=True)]
    figure: Any = Figure(figsize=(10, 0.7 + 1.35 * len(panels)), dpi=130, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    longest, colors = max(layer.duration for _, _, layer, _ in panels) / _NS_PER_MS, set[str]()
    caption = "milliseconds from the beginning of the layer"
    for axis, (name, trace, layer, layer_events) in zip(axes, panels, strict=True):
        layer_bars = list(make_bars(layer, layer_events))
        colors |= {bar.color for bar in layer_bars}
        _set_titles(axis, name, trace, layer, layer_bars)
        if any(label.isdigit() for label in _draw_panel(axis, layer_bars, longest)):
            caption = "milliseconds from the beginning of the layer; numbers: head chunks"
        axis.axvline(layer.duration / _NS_PER_MS, color="black", linewidth=0.6)
    axes[-1].set_xlim(0, longest * 1.005)
    axes[-1].set_xlabel(caption, fontsize=8)
    _draw_legend(figure, [color for color in _COLORS if color in colors])
    with write_output(path, PLOT_KIND) as temporary:
        figure.savefig(temporary, format="png", metadata=PLOT_METADATA)


def _get_panel_order(named_trace: tuple[str, Trace]) -> tuple[bool, int, int]:
    """Sorts runs by mode, the overlap last, and by the number of head chunks."""
    plan = named_trace[1].plan
    return plan.overlap, plan.comm_type, plan.mode.chunks


def _set_titles(
    axis: Any, name: str, trace: Trace, layer: Event, layer_bars: Sequence[Bar]
) -> None:
    total, attrs = layer.duration / _NS_PER_MS, layer.attributes
    position = f"rank {trace.plan.rank}, step {attrs.get('step')}, layer {attrs.get('layer')}"
    busy = sum(bar.length for bar in layer_bars if bar.lane == "attention")
    axis.set_title(f"{trace.plan.mode.name}  ({name}; {position})", loc="left", fontsize=9)
    axis.set_title(f"{_format_ms(total)} ms, attention {busy / total:.0%}", loc="right", fontsize=9)


def _format_ms(milliseconds: float) -> str:
    """Formats a duration with three significant digits, without an exponent."""
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _draw_panel(axis: Any, layer_bars: Sequence[Bar], longest: float) -> list[str]:
    """Draws the bars of a layer; bars too short for their label have none.

    Args:
        longest: Length of the time axis, milliseconds.

    Returns:
        The labels that were drawn.
    """
    labels: list[str] = []
    lanes = [lane for lane in _LANES if any(bar.lane == lane for bar in layer_bars)]
    for bar in layer_bars:
        row = lanes.index(bar.lane)
        style = {"facecolor": _COLORS[bar.color], "edgecolor": "white", "linewidth": 0.3}
        axis.broken_barh([(bar.begin, bar.length)], (row - 0.4, 0.8), **style)
        if bar.label and bar.length > longest * 0.011 * len(bar.label):
            middle = bar.begin + bar.length / 2
            axis.text(middle, row, bar.label, ha="center", va="center", color="white", fontsize=7)
            labels.append(bar.label)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return labels


def _draw_legend(figure: Any, colors: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=_COLORS[name], label=name) for name in colors]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False
    )
