"""The schedule trace: recorded events, the planned order, and the report."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines import resolve_plan
from tests.refusals import check_refusals
from wan.cli import main as generate
from wan.metering import exchange_order
from wan.metering.exchange_order import ExchangePlan, Trace
from wan.metering.recording import make_exchange_plan, select_nth_steps
from wan.power.__main__ import main as power
from wan.power.report import RunReport, analyze_trace
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.utils import trace
from wan.utils.trace import Event, HostClock, Recorder

PLAN = ExchangePlan(
    rank=0,
    comm_type=1,
    overlap=False,
    chunks=None,
    heads=4,
    layers=2,
    tokens=10,
    multiple=1,
    sizes=(1, 1, 2),
    ring_type="ring",
    merges=True,
    fp8=False,
    fp8_exchange=False,
    sparse_from=None,
    steps={0: "dit"},
)
DENSE_RING = {"sizes": (1, 2, 1), "comm_type": 0}
RING_OF_3 = {"sizes": (1, 3, 1), "comm_type": 0, "rank": 1}
FP8 = {"fp8": True, "fp8_exchange": True}
INPUT_SENDS = "A2A q, A2A k, A2A v"
INPUT_WAITS = "wait q, wait k, wait v"
OUTPUT_ITEMS = "A2A out, wait out"


def list_planned_names(plan: ExchangePlan) -> str:
    """Returns the items of the first chunk in the planned order."""
    items = exchange_order.list_planned_items(plan, 0)
    return ", ".join(name for chunk, name in items if chunk == 0)


ALONE = f"{INPUT_SENDS}, {INPUT_WAITS}, FA 0, {OUTPUT_ITEMS}"
TWO_BLOCKS = f"{INPUT_SENDS}, {INPUT_WAITS}, FA 0, FA 1, {OUTPUT_ITEMS}"
SCALES = "A2A q scale, A2A k scale, A2A v scale"
SCALE_WAITS = "wait q scale, wait k scale, wait v scale"
CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"comm_type": 0}, ALONE),
    ({"comm_type": 1}, ALONE),
    ({"comm_type": 2}, TWO_BLOCKS),
    ({"comm_type": 2, "tokens": 1}, ALONE),  # one row is one block
    ({"sizes": (1, 1, 1), "comm_type": 0}, "FA 0"),
    (DENSE_RING, "hop, FA 0 of 0, in, FA 0 of 1"),
    ({**DENSE_RING, "merges": False}, "gather k, gather v, FA 0"),
    ({**DENSE_RING, "fp8": True}, "gather k, gather v, FA 0"),
    ({**DENSE_RING, "tokens": 1}, "hop, FA 0 of 0, in"),  # one rank has only padding
    ({**DENSE_RING, "tokens": 1, "rank": 1}, "hop, in"),
    (
        {**RING_OF_3, "ring_type": "bidirectional"},
        "hop, FA 0 of 1, in, hop, FA 0 of 0, FA 0 of 2, in",
    ),
    (RING_OF_3, "hop, FA 0 of 1, in, hop, FA 0 of 0, in, FA 0 of 2"),
    (FP8, f"{INPUT_SENDS}, {SCALES}, {INPUT_WAITS}, {SCALE_WAITS}, FA 0, {OUTPUT_ITEMS}"),
    ({**FP8, "fused": True}, f"A2A qkv, wait qkv, FA 0, {OUTPUT_ITEMS}"),
    # 10 tokens: a sparse or quantised call divides queries at multiples of 128 rows.
    ({"comm_type": 2, "sparse_from": 0}, ALONE),
    ({"comm_type": 2, "sparse_from": 1}, TWO_BLOCKS),
]


def test_the_order_of_a_chunk() -> None:
    orders = [(changed, list_planned_names(replace(PLAN, **changed))) for changed, _ in CHANGED]
    assert orders == CHANGED
    assert {chunk for chunk, _ in exchange_order.list_planned_items(PLAN, 0)} == {0, 1}


def test_the_order_of_overlap() -> None:
    """One chunk ahead, and no further."""
    plan = replace(PLAN, comm_type=0, overlap=True, heads=6)
    items = exchange_order.list_planned_items(plan, 0)
    assert [(chunk, name) for chunk, name in items if "q" in name or "F" in name] == [
        *((0, "A2A q"), (1, "A2A q"), (0, "wait q"), (0, "FA 0")),
        *((2, "A2A q"), (1, "wait q"), (1, "FA 0")),
        *((2, "wait q"), (2, "FA 0")),
    ]


def test_one_warm_step_of_each_expert_is_traced() -> None:
    experts = ("high_noise",) * 3 + ("low_noise",) * 2
    assert select_nth_steps(experts, 0) == (0, 3) and select_nth_steps(experts, 1) == (1, 4)
    assert select_nth_steps(("dit",), 1) == (0,)


def test_steps_of_a_video_from_a_source_have_their_own_experts() -> None:
    """Of ten steps the first five are left out, and the others keep their numbers."""
    run = resolve_plan("--task", "t2v-A14B", "--sample_steps", 10, "--sample_shift", 12)
    experts = make_noise_schedule(run.params).experts
    assert experts[5] != experts[9]
    params = replace(run.params, strength=0.5)
    for traced in ((5, 6), (9,)):
        plan = make_exchange_plan(run.setup, params, traced, False, "cpu")
        assert plan.steps == {step: experts[step] for step in traced}


class Ticks(HostClock):
    """A clock that a test advances, in milliseconds."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> Callable[[], int]:
        nanoseconds = round(self.time * 1e6)
        return lambda: nanoseconds


def record_work(work: Callable[[Ticks], None], steps: Sequence[int] = (0,)) -> list[Event]:
    """Returns the recorded events of a step's work."""
    clock, events = Ticks(), list[Event]()
    with trace.use_recorder(Recorder(steps, clock, events.extend)), trace.record_step(0, "dit"):
        work(clock)
    return events


def test_nothing_is_recorded_where_nobody_asks() -> None:
    x = torch.zeros(2, 3)
    no_span = trace.span("a2a", x, what="q")
    assert trace.span("layer", layer=1) is no_span is trace.add_context(chunk=1)
    assert trace.record_step(0, "dit") is no_span
    assert not record_work(lambda _: trace.record_marker("cache"), steps=(1,)), "of another step"


def test_a_range_knows_where_it_is_and_what_it_holds() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    late = list[int]()

    def work(clock: Ticks) -> None:
        with trace.span("branch", branch="cond"), trace.span("layer", layer=3):
            with trace.add_context(chunk=1), trace.span("a2a", x, what="q"):
                clock.time += 2
            with trace.span("project", what="o"):
                clock.time += 1
            trace.record_marker("cache", distance=lambda: late[0])
        late.append(7)

    step, branch, layer, a2a, project, cache = record_work(work)
    assert step.attributes == {"step": 0, "expert": "dit"} and step.duration == 3_000_000
    assert branch.attributes == {**step.attributes, "branch": "cond"}
    assert layer.attributes == {**branch.attributes, "layer": 3}
    payload = {"what": "q", "bytes": 12, "shape": [2, 3], "dtype": "bfloat16"}
    assert (
        a2a.attributes == {**layer.attributes, "chunk": 1, **payload} and a2a.duration == 2_000_000
    )
    assert project.attributes == {**layer.attributes, "what": "o"} and project.begin == a2a.end
    assert cache.attributes == {**layer.attributes, "distance": 7} and cache.duration == 0


def test_a_failing_step_leaves_no_open_spans() -> None:
    events = list[Event]()
    recorder = Recorder((0, 1), Ticks(), events.extend)

    def fail(_: Ticks) -> None:
        with trace.record_step(0, "dit"), trace.span("layer", layer=3):
            raise RuntimeError("out of memory")

    with trace.use_recorder(recorder):
        with pytest.raises(RuntimeError):
            fail(Ticks())
        with trace.use_recorder(None):  # the outer one records again after it
            assert trace.record_step(1, "dit") is trace.span("step")
        assert not events and trace.span("layer") is trace.add_context()
        with trace.record_step(1, "dit"), trace.span("layer", layer=0):
            pass
    assert [event.operation for event in events] == ["step", "layer"]
    assert "chunk" not in events[1].attributes


KINDS = {"A2A": "a2a", "wait": "a2a wait", "FA": "attention", "in": "hop wait"}


def play(
    plan: ExchangePlan, items: Callable[[int], list[exchange_order.OrderItem]] | None = None
) -> Trace:
    """A trace in which each exchange takes 2 ms, attention 5, a wait 1, the rest of a layer 3.

    items: what each layer does; None: as planned.
    """

    def layer_of(clock: Ticks, layer: int) -> None:
        with trace.span("layer", layer=layer):
            for chunk, name in (
                exchange_order.list_planned_items(plan, 0) if items is None else items(layer)
            ):
                word, _, operand = name.partition(" ")
                attributes = (
                    {"block": 0} if word == "FA" else {"what": operand, "beside": plan.overlap}
                )
                with trace.add_context(chunk=chunk), trace.span(KINDS[word], **attributes):
                    clock.time += {"A2A": 2, "FA": 5, "wait": 1}[word]
            with trace.span("cross-attention"), trace.span("project", what="q"):
                clock.time += 3

    def work(clock: Ticks) -> None:
        with trace.span("branch", branch="cond"):
            for layer in range(plan.layers):
                layer_of(clock, layer)
        clock.time += 4

    about = {"clock": "ticks", "run": "1", "device": "none", "kernel": "none"}
    return Trace(plan, record_work(work), about)


def test_figures_of_a_rank() -> None:
    """Two layers of two chunks: (3 x 2 + 3 x 1) + 5 + (2 + 1) ms each, and 3 ms after them."""
    rank = analyze_trace(play(PLAN))
    assert rank.order == exchange_order.OrderComparison(layers=2, skipped=0, difference=None)
    assert rank.counts == {"A2A": 8, "scales": 0, "FA": 2, "hops": 0, "gathers": 0}
    assert rank.step == 2 * (2 * 17 + 3) + 4 and rank.parts["attention"] == 20
    assert rank.exposed == 48 and rank.hidden == 0 and rank.duty == 20 / 78
    assert rank.parts["cross-attention"] == 6 and rank.parts["projections"] == 0
    assert rank.parts["other"] == 4
    assert (rank.within.count, rank.within.median) == (2, 12)
    assert (rank.across.count, rank.across.longest) == (1, 15)
    trace = play(replace(PLAN, steps={0: "dit", 1: "dit"}))
    report = RunReport("two steps", [trace], [rank])
    assert report.format_mean(lambda rank: rank.step) == "39"


def test_gaps_end_with_a_step() -> None:
    """The gap between the last attention of a step and the first one of the next is none."""
    first = play(replace(PLAN, layers=1)).events
    second = [
        Event(e.operation, e.attributes | {"step": 1}, e.begin + 10**9, e.end + 10**9, e.issued)
        for e in first
    ]
    rank = analyze_trace(Trace(PLAN, [*first, *second], {}))
    assert (rank.within.count, rank.within.longest, rank.across.count) == (2, 12, 0)


def test_a_changed_order_is_reported() -> None:
    """Layers are counted up to the first deviation."""
    plan = replace(PLAN, layers=3)
    planned = exchange_order.list_planned_items(plan, 0)
    swapped = [*planned[:6], planned[7], planned[6], *planned[8:]]  # sent before it is computed
    for changed, difference in (
        (swapped, "position 6: expected FA 0 of chunk 0, found A2A out of chunk 0"),
        (planned[:-1], "position 17: expected wait out of chunk 1, found the end of the layer"),
    ):
        played = play(plan, lambda layer, items=changed: items if layer else planned)
        order = analyze_trace(played).order
        assert str(order.difference) == f"rank 0, step 0 (cond), layer 1, {difference}"
        assert (order.layers, order.skipped) == (2, 0)
    empty = Trace(PLAN, [], {})
    assert "expected a step, found nothing" in str(analyze_trace(empty).order.difference)


def test_layers_that_a_cache_leaves_out_are_no_difference() -> None:
    def skip_blocks(_: Ticks) -> None:
        with trace.span("branch", branch="cond"):
            trace.record_marker("cache", what="blocks", decision="skipped", first=0)

    def skip_attention(_: Ticks) -> None:
        with trace.span("branch", branch="cond"):
            for layer in range(2):
                with trace.span("layer", layer=layer):
                    trace.record_marker("cache", what="attention", decision="skipped")

    for work in (skip_blocks, skip_attention):
        comparison = exchange_order.compare_with_plan(PLAN, record_work(work))
        assert comparison == exchange_order.OrderComparison(layers=0, skipped=2, difference=None)


def test_control_blocks_before_the_skipped_layers_are_computed() -> None:
    """VACE: a cache that skips layers from 1 on skips their control blocks, numbered 4 and 5."""
    plan = replace(PLAN, layers=3, control=(0, 1, 2))
    items = exchange_order.list_planned_items(plan, 0)

    def compare(computed: tuple[int, ...]) -> exchange_order.OrderComparison:
        played = play(replace(plan, layers=6), lambda layer: items if layer in computed else [])
        attributes = {"step": 0, "branch": "cond", "decision": "skipped", "first": 1}
        events = [*played.events, Event("cache", attributes, 0, 0, 0)]
        return exchange_order.compare_with_plan(plan, events)

    assert compare((0, 3)) == exchange_order.OrderComparison(layers=2, skipped=4, difference=None)
    assert "layer 4, position 0: expected the end" in str(compare((0, 3, 4)).difference)
    assert "layer 3, position 0: expected A2A q" in str(compare((0,)).difference)


def test_the_line_of_a_layer() -> None:
    overlapped = (
        "0: A2A q k v | 1: A2A q k v | 0: wait q k v, FA 0, A2A out | "
        "1: wait q k v, FA 0, A2A out | 0: wait out | 1: wait out"
    )
    for plan, line in (
        (PLAN, "0: A2A q k v, FA 0, A2A out | 1: A2A q k v, FA 0, A2A out"),
        (replace(PLAN, comm_type=0, overlap=True), overlapped),
    ):
        events = exchange_order.group_by_layer(play(plan).events)[0]
        assert exchange_order.format_layer_order(events) == line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Traces of two ranks."""
    for rank in range(2):
        exchange_order.write_trace(play(replace(PLAN, rank=rank)), tmp_path / "run", origin_ns=0)
    return tmp_path / "run"


def ranges(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text())["traceEvents"]
    return [row for row in rows if row["ph"] == "X"]


def assert_chrome(path: Path) -> None:
    """Checks for named ranges with times that nest or follow one another, as viewers need."""
    rows = ranges(path)
    assert len(rows) > 10
    open_: list[float] = []
    for row in rows:
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= row.keys()
        assert math.isfinite(row["ts"]) and row["dur"] >= 0
        while open_ and row["ts"] >= open_[-1] - 1e-3:
            open_.pop()
        end = row["ts"] + row["dur"]
        assert not open_ or end <= open_[-1] + 1e-3, row
        if row["dur"]:
            open_.append(end)
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(rows))


def test_the_file_is_chromes_and_comes_back(folder: Path) -> None:
    assert_chrome(folder / "rank1.json")
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
    loaded, expected = exchange_order.read_traces(folder)[1], play(replace(PLAN, rank=1))
    assert (loaded.plan, loaded.metadata) == (expected.plan, expected.metadata)
    times = [(event.operation, event.attributes, event.begin, event.end) for event in loaded.events]
    assert times == [(e.operation, e.attributes, e.begin, e.end) for e in expected.events]


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, out = tmp_path / "overlap", tmp_path / "out"
    plan = replace(PLAN, comm_type=0, overlap=True)
    for rank in range(2):
        exchange_order.write_trace(play(replace(plan, rank=rank)), other, origin_ns=0)
    assert power(["report", str(folder), str(other), "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert output.count("\n\nOrder: as planned\n") == 2
    assert "a layer, each rank: A2A 8, FA 2" in output
    assert "run (InsertComm)" in output and "overlap (A2A/FA overlap)" in output
    first, second = json.loads((out / "report.json").read_text())
    assert first["order"] == second["order"] == "as planned"
    assert first["ranks"][1]["duty"] == 20 / 78 and second["ranks"][0]["hidden"] == 20


def test_an_edited_trace_is_caught(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two exchanges' times are exchanged: the viewer would show them so, and so does the report."""

    def swap_times(content: dict[str, Any]) -> None:
        a, b, *_ = (row for row in content["traceEvents"] if row.get("cat") == "a2a")
        a["ts"], b["ts"] = b["ts"], a["ts"]

    damage_trace(swap_times)(folder)
    assert power(["report", str(folder)]) == 1
    difference = (
        "rank 1, step 0 (cond), layer 0, position 0: expected A2A q of chunk 0, found A2A k of "
        "chunk 0"
    )
    assert f"Order: {difference}" in capsys.readouterr().out
    planned = folder.parent / "planned" / folder.name
    for rank in range(2):
        exchange_order.write_trace(play(replace(PLAN, rank=rank)), planned, origin_ns=0)
    assert power(["report", str(folder), str(planned)]) == 1
    output = capsys.readouterr().out
    assert f"== {folder}: " in output and f"== {planned}: " in output, "their names are equal"
    assert json.loads((folder / "report.json").read_text())[0]["order"] == difference


def damage_trace(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "rank1.json").read_text())
        change(content)
        (folder / "rank1.json").write_text(json.dumps(content))

    return edit


def damage_metadata(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return damage_trace(lambda content: change(content["otherData"]))


BROKEN: dict[str, Callable[[Path], object]] = {
    "no folder": lambda folder: folder.rename(f"{folder}-gone"),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a rank is missing": lambda folder: (folder / "rank1.json").unlink(),
    "cut off": lambda folder: (folder / "rank1.json").write_text('{"traceEvents": ['),
    "other JSON": lambda folder: (folder / "rank0.json").write_text("[1]"),
    "not text": lambda folder: (folder / "rank0.json").write_bytes(b"\xff"),
    "no plan": damage_metadata(lambda content: content.pop("plan")),
    "a plan of later days": damage_metadata(lambda content: content["plan"].update(more=1)),
    "an unknown mode": damage_metadata(lambda content: content["plan"].update(comm_type=9)),
    "no time": damage_trace(lambda content: content["traceEvents"][5].update(ts=float("nan"))),
    "another run": damage_metadata(lambda content: content["about"].update(run="2")),
}


def test_broken_traces(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = {}
    for name, breaks in BROKEN.items():
        traces = Path(shutil.copytree(folder, tmp_path / name))
        breaks(traces)
        assert power(["report", str(traces)]) == 2, name
        captured = capsys.readouterr()
        assert not captured.out, name
        messages[name] = captured.err
    check_refusals("trace: broken", messages, hide=[r"(?<=--trace) \(.*\)(?=;)"])
    assert power(["report", str(folder), "--out", "/proc/nowhere"]) == 2
    assert "--out /proc/nowhere" in capsys.readouterr().err


ODD_VALUES = (None, True, -1, 10**19, 1e300, float("nan"), "x", "", [], [[1]], {}, {"a": []})


def test_damaged_values_are_one_sentence(folder: Path) -> None:
    """Every value of a trace in turn is replaced by a value that no trace has."""
    path = folder / "rank1.json"
    content = json.loads(path.read_text())

    def list_entries(node: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items)[: 10 if depth else 100]:
            yield node, key
            if isinstance(value, dict | list):
                yield from list_entries(value, depth + 1)

    entries = [*list_entries(content)]
    assert len(entries) > 80
    for (node, key), value in zip(entries, cycle(ODD_VALUES), strict=False):
        original, node[key] = node[key], value
        path.write_text(json.dumps(content))
        try:
            for trace_ in exchange_order.read_traces(folder):
                json.dumps(asdict(analyze_trace(trace_)))
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
        node[key] = original


@pytest.mark.usefixtures("one_thread")
def test_one_process(tiny: Callable[[str], Path], tmp_path: Path, capfd: Any) -> None:
    """A run that leaves blocks out, printed and traced; the report finds nothing wrong."""
    arguments = ["--ckpt_dir", str(tiny("t2v-A14B")), "--size", "32*32", "--frame_num", "1"]
    arguments += ["--sample_steps", "4", "--step_cache", "steps:0,2,force=true"]
    arguments += ["--trace", str(tmp_path / "trace"), "--trace_steps", "0-1"]
    arguments += ["--trace_kernels", "--log_level", "debug", "--save_file", str(tmp_path / "v.mp4")]
    assert generate.main(arguments) == 0
    assert "step 0 cond layer 0 baseline: 0: FA 0" in capfd.readouterr().out
    assert_chrome(tmp_path / "trace" / "rank0.json")
    kernel_names = {row["name"] for row in ranges(tmp_path / "trace" / "rank0.step0.kernels.json")}
    assert {"step 0", "layer 1", "attention", "aten::scaled_dot_product_attention"} <= kernel_names
    rows = ranges(tmp_path / "trace" / "rank0.json")
    decisions = [row["args"] for row in rows if row["cat"] == "cache"]
    assert [(x["step"], x["branch"], x["decision"]) for x in decisions] == [
        *((0, branch, "computed") for branch in ("cond", "uncond")),
        *((1, branch, "skipped") for branch in ("cond", "uncond")),
    ]
    assert power(["report", str(tmp_path / "trace")]) == 0
    assert "skipped by a step cache" in capfd.readouterr().out
    assert "trace" not in json.loads((tmp_path / "v.json").read_text())["settings"]
