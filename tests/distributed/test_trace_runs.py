"""Traces of ranks: the recorded order is the planned one in every mode, layout and backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests import animate2_network
from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs, run_on_ranks
from tests.distributed.methods import GatheringKernel, make_small_methods
from tests.distributed.test_model import Job
from tests.distributed.topology import ROWS, Topology, attention_layer, make_block_attention
from wan.cli import main as generate
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.rainfusion_masks import make_window_order
from wan.metering.exchange_order import (
    ExchangePlan,
    Trace,
    list_planned_items,
    list_recorded_items,
)
from wan.modules.attnlayer import FAPowerCapAttention
from wan.power.__main__ import main as power
from wan.power.report import RankReport, analyze_trace
from wan.settings.attention_modes import (
    MODES,
    Mode,
    TokenPlan,
    count_heads_per_chunk,
    order_with_overlap,
)
from wan.settings.parallel import EXCHANGES
from wan.utils import trace
from wan.utils.trace import HostClock, Recorder

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]

JOB = Job(grid=(3, 9, 10), heads=8)  # 270 tokens: on 4 ranks some hold padding
KINDS = {  # name -> multiple of a rank's tokens
    "dense": 1,
    "gathered": 1,  # a kernel without log-sum-exp
    "fp8": 128,
    "fp8 exchange": 256,
    "v3": 128,
    "v3-fp8": 128,
}
LAYOUTS = {
    2: [Topology(2, 1)],
    3: [Topology(1, 3, "bidirectional")],
    4: [Topology(2, 2, "bidirectional"), Topology(4, 1), Topology(1, 4), Topology(2, 2)],
}


def make_plan(topology: Topology, mode: str, kind: str) -> ExchangePlan:
    return ExchangePlan(
        rank=dist.get_rank(),
        comm_type=int(mode) if mode.isdigit() else 0,
        overlap=mode == "overlap",
        chunks=None,
        heads=JOB.heads,
        layers=2,
        tokens=JOB.tokens,
        multiple=1 if topology.ring == 1 and kind == "fp8" else KINDS[kind],
        sizes=(1, topology.ring, topology.ulysses),
        ring_type=topology.ring_type,
        merges=kind != "gathered",
        fp8=kind.startswith("fp8"),
        fp8_exchange=kind == "fp8 exchange",
        sparse_from=0 if kind[0] == "v" else None,
        steps={0: "dit"},
    )


def velocities(layer: FAPowerCapAttention, plan: ExchangePlan) -> Tensor:
    """Predict velocities of a model with the plan's token order and padding."""
    sparse = make_window_order if plan.sparse_from == 0 else None
    net = JOB.model(attention=layer, sequence_shard=ShardedSequence(None, plan.multiple, sparse))
    return torch.stack(JOB.velocities(net))


@contextmanager
def record_step(branch: str = "cond") -> Iterator[None]:
    with trace.record_step(0, "dit"), trace.span("branch", branch=branch):
        yield


def record_layers(
    plan: ExchangePlan,
    run: Callable[[], object],
    context: AbstractContextManager[object] | None = None,
) -> RankReport:
    """Trace a forward pass in one step. context: instead of that of a whole step."""
    events: list[trace.Event] = []
    with trace.use_recorder(Recorder((0,), HostClock(), events.extend)), context or record_step():
        run()
    return analyze_trace(Trace(plan, events, {}))


Way = tuple[Topology, str, str]
"""(ranks, mode, kind)."""


@torch.inference_mode()
def trace_all_modes(layouts: list[Topology]) -> list[tuple[Way, RankReport]]:
    """Trace every mode and backend of these layouts; tracing must not change any bit."""
    figures, different = [], []
    for way in product(layouts, ROWS, KINDS):
        topology, mode, kind = way
        if (kind == "fp8 exchange" and topology.ulysses == 1) or (
            kind == "gathered" and topology.ring == 1
        ):
            continue
        kernel = GatheringKernel() if kind == "gathered" else None
        layer = attention_layer(
            topology, mode, kernel, make_small_methods("dense" if kernel else kind)
        )
        plan = make_plan(*way)
        results: list[Tensor] = []

        def run(layer: Any = layer, plan: Any = plan, results: Any = results) -> None:
            results.append(velocities(layer, plan))

        report = record_layers(plan, run)
        figures.append((way, report))
        if kind == "dense" or (kind == "v3-fp8" and mode == "overlap"):
            different += [] if torch.equal(velocities(layer, plan), results[0]) else [way]
    assert not different
    return figures


@torch.inference_mode()
def trace_control_modes(skipped: bool) -> list[RankReport]:
    """Trace every mode with one control block. skipped: all blocks but the first are skipped."""
    job, reports = replace(JOB, kind="vace"), []

    def run_first_block(x: Tensor, blocks: Any, *_: object) -> Any:
        x = yield from blocks(x, 0, 1)
        trace.record_marker("cache", what="blocks", decision="skipped", first=1)
        return x

    step_cache = SimpleNamespace(iterate=run_first_block)
    model_components = {"step_cache": step_cache} if skipped else {}
    for mode in ROWS:
        plan = replace(make_plan(Topology(2, 1), mode, "dense"), control=(0,))
        layer = attention_layer(Topology(2, 1), mode)
        net = job.model(attention=layer, sequence_shard=ShardedSequence(None), **model_components)
        reports.append(record_layers(plan, partial(job.velocities, net)))
    return reports


@torch.inference_mode()
def trace_reference_attention(_: bool) -> list[RankReport]:
    """Trace every mode of Animate-2, whose guidance branch leaves out a block."""
    case, reports = animate2_network.CASES["equal grids"], []
    sizes = animate2_network.SIZES
    for topology, mode in zip((Topology(2, 1), Topology(1, 2)) * 2, ROWS, strict=True):
        plan = replace(
            make_plan(topology, mode, "dense"),
            heads=sizes["num_heads"],
            layers=sizes["num_layers"],
            tokens=prod(case.generated),
        )
        model = animate2_network.make_network(
            attention=make_block_attention(attention_layer(topology, mode)),
            sequence_shard=ShardedSequence(None),
        )
        run = partial(
            animate2_network.compute_velocity,
            *(model, case, (animate2_network.SKIPPED,), -1.3, record_step("uncond")),
        )
        reports.append(record_layers(plan, run, nullcontext()))
    return reports


@pytest.mark.parametrize(
    ("work", "skipped", "layers"),
    [
        (trace_control_modes, False, (3, 0)),
        (trace_control_modes, True, (2, 1)),
        (trace_reference_attention, False, (2, 1)),
    ],
)
def test_further_layers_are_as_planned(
    work: Callable[[bool], list[RankReport]], skipped: bool, layers: tuple[int, int]
) -> None:
    """Control blocks count as layers after the others, and are skipped with their main block.

    The parts of Animate-2's keys belong to the attention of a query block.
    """
    for reports in run_on_ranks(2, work, skipped):
        for order in (report.order for report in reports):
            assert order.difference is None, order.difference
            assert (order.layers, order.skipped) == layers


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[2], *map(slow, (LAYOUTS[4], [Topology(1, 2)], LAYOUTS[3]))],
)
def test_every_way_is_as_planned(layouts: list[Topology]) -> None:
    for figures in run_on_ranks(layouts[0].world, trace_all_modes, layouts):
        for (topology, mode, kind), rank in figures:
            case = f"{topology}, mode {mode}, {kind}"
            assert rank.order.difference is None, f"{case}: {rank.order.difference}"
            assert rank.order.layers == 2, case
            assert (rank.duty > 0) == (rank.counts["FA"] > 0), f"{case}: padding attends nowhere"
            if topology == Topology(2, 1):
                chunks = len(count_heads_per_chunk(JOB.heads, 2, ROWS[mode].chunks))
                scales = 3 * chunks if kind == "fp8 exchange" else 0
                expected = {"A2A": 4 * chunks, "FA": chunks * ROWS[mode].blocks, "scales": scales}
                assert {key: rank.counts[key] for key in expected} == expected, case
                assert (rank.hidden > 0) == ROWS[mode].overlaps, case


NEW_ROW = Mode("new", 3, 2, order_with_overlap)


@torch.inference_mode()
def find_deviations(layouts: list[Topology]) -> dict[str, str]:
    """On one rank: return the calls whose order or bits are not those of the row."""
    deviations, outputs = {}, dict[tuple[Topology, int], Tensor]()
    for topology, mode, chunks, exchange in product(layouts, (*ROWS, "3"), (None, 1, 3), EXCHANGES):
        if mode == "0" and chunks is not None:
            continue
        with patch.dict(MODES, {3: NEW_ROW}):
            layer = attention_layer(topology, mode, exchange=exchange, chunks=chunks)
            plan = replace(make_plan(topology, mode, "dense"), chunks=chunks)
            plan = replace(plan, fused=exchange == "fused" and topology.ulysses > 1)
            planned = list_planned_items(plan, 0)
        rows = TokenPlan(JOB.tokens, topology.world).shard_len
        qkv = torch.randn(3, 1, rows, JOB.heads, 8, generator=torch.Generator().manual_seed(0))
        events = list[trace.Event]()
        recorder = Recorder((0,), HostClock(), events.extend)
        with trace.use_recorder(recorder), trace.record_step(0, "dit"):
            output = layer(*qkv.unbind(0), valid_len=JOB.tokens)
        recorded = list_recorded_items(events)
        name = f"{topology}, mode {mode}, {chunks} chunks, {exchange}"
        if recorded != planned:
            deviations[name] = f"{recorded} instead of {planned}"
        elif not output.equal(outputs.setdefault((topology, layer.mode.blocks), output)):
            deviations[name] = "other bits"
    return deviations


@pytest.mark.parametrize(
    "layouts",
    [[*LAYOUTS[2], Topology(1, 2)], slow(LAYOUTS[3]), LAYOUTS[4][:1], slow(LAYOUTS[4][1:])],
    ids=str,
)
def test_any_row_of_the_table_is_followed(layouts: list[Topology]) -> None:
    """Also a row that is not in the guide, other numbers of chunks, and fused exchanges."""
    ranks = layouts[0].world
    assert run_on_ranks(ranks, find_deviations, layouts) == [{}] * ranks


RUNS: dict[str, tuple[int, str]] = {
    "halves": (4, "--cfg_size 2 --comm_type 1 --chunks 3 --step_cache steps:0,3"),
    "attention cache": (
        2,
        "--fa_alltoall_overlap --use_attentioncache --start_step 1 --end_step 7 "
        "--attentioncache_interval 3",
    ),
    "no branch": (2, "--comm_type 1 --step_cache cfg --dit_fsdp"),
    "sparse": (2, "--ring_size 2 --use_rainfusion"),
}


@pytest.mark.slow
@pytest.mark.xdist_group("torchrun")  # it takes no pools
@pytest.mark.parametrize("name", RUNS)
def test_whole_runs(name: str, tiny: Any, tmp_path: Path, capsys: Any) -> None:
    """A trace does not change latents, and steps skipped by caches are no difference."""
    ranks, flags = RUNS[name]
    arguments = ["--ckpt_dir", str(tiny("t2v-A14B")), "--size", "64*48", "--frame_num", "5"]
    arguments += ["--sample_steps", "9", "--base_seed", "7", "--save_latents", *flags.split()]
    latents, folder = [], tmp_path / "trace"
    for trace_flags in (
        [],
        ["--trace", str(folder), "--trace_steps", "0-8", "--log_level", "debug"],
    ):
        video = tmp_path / f"{len(latents)}.mp4"
        rank_arguments = [*arguments, *trace_flags, "--save_file", str(video)]
        with Ranks(make_rank_envs(ranks), generate.main, rank_arguments) as processes:
            assert not any(processes.wait_for_exit(180)), processes.format_outputs()
        latents.append(load_file(video.with_suffix(".latents.safetensors"))["latents"])
    assert torch.equal(*latents)
    assert "step 0 cond layer 0" in processes.texts[0]
    assert not any("layer 0" in text for text in processes.texts[1:])

    assert power(["report", str(folder)]) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert ("skipped by a step cache" in output) == (
        "cache" in flags and "step_cache cfg" not in flags
    )
    (report,) = json.loads((folder / "report.json").read_text())
    assert len(report["ranks"]) == ranks
    first_events = [json.loads(path.read_text())["traceEvents"][2] for path in folder.glob("rank*")]
    assert {row["name"] for row in first_events} == {"step 0"}
    starts = [row["ts"] for row in first_events]
    assert max(starts) - min(starts) < 60e6 and min(starts) >= 0, "one common time"
