"""Steps 11 and 12: layers of real width on several ranks, a ring's memory, minutes of each mode,
and sharded weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.device_check.bench import Bench, attempted, gigabytes, ranks_text
from tools.device_check.groups import joined
from tools.device_check.network import LIMIT, Case, Inputs, apart, case, inputs, network, selected
from tools.device_check.steps import (
    OK,
    SLOW,
    Figure,
    Line,
    UnavailableError,
    absent,
    error,
    line,
)
from wan.checkpoint.load import WHOLE, Source, dit_dtypes, fill
from wan.distributed import mesh
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.modules.model import WanModel
from wan.modules.schedule import MODES, OVERLAP
from wan.pipeline import build
from wan.settings.parallel import RING_TYPES, Parallel, legal

FORWARDS = 20
LOOP = 60.0  # seconds of each mode
WINDOW = 10.0  # at the beginning and the end of a minute that are compared
GROWN = 1.05  # most memory after many forwards, over that after the second
POWER = "nothing here measures them yet; read `nvidia-smi dmon` or `npu-smi` beside this step"


def topologies(bench: Bench, heads: int) -> list[Parallel]:
    """All of them with --full, else those of one sequence: all Ulysses, mixed, all ring."""
    world, found = dist.get_world_size(), []
    for cfg, ring, ulysses in legal(world, heads):
        if cfg == 1 or (bench.full and ring * ulysses > 1):
            kinds = RING_TYPES[: 1 if ring == 1 or not bench.full else None]
            found += [Parallel(world, cfg, ring, ulysses, ring_type=kind) for kind in kinds]
    return found if bench.full or len(found) <= 3 else [found[0], found[len(found) // 2], found[-1]]


def ways(parallel: Parallel) -> list[Parallel]:
    """The modes that a topology can run in."""
    modes = MODES if parallel.ulysses_size > 1 else [0]
    found = [replace(parallel, comm_type=mode) for mode in modes]
    return [*found, replace(parallel, fa_alltoall_overlap=True)] if len(found) > 1 else found


def layers(bench: Bench) -> Iterator[Line]:
    """Two layers on every topology in every mode, against one device; milliseconds of a layer."""
    joined(bench)
    of = case(bench)
    given = inputs(bench, of, of.request.grid)
    model = network(bench, of)
    want = given.call(model).cpu()
    alone = bench.seconds(lambda: given.call(model), 1)
    weights = model.state_dict()
    yield line("one device", Figure("a layer", 1e3 * alone / 2, "ms"))
    for parallel in topologies(bench, of.setup.checkpoint.heads):
        team = mesh.form(bench.device, parallel.sizes)
        for way in ways(parallel):
            name = OVERLAP.name if way.fa_alltoall_overlap else MODES[way.comm_type].name
            ring = f" ({way.ring_type})" if way.ring_size > 1 else ""
            what = f"{ranks_text(way.sizes)}{ring}, {name}"
            shared = _of_ranks(of, way)
            model = _sharing(bench, shared, team, weights)
            yield _against_one(bench, model, given, want, alone, what)
    if bench.device.type == "cuda":
        yield attempted("exchanges of mode 1", partial(_in_one_stream, bench, of, given, weights))
    else:
        yield absent("gaps between kernels", "only CUDA's profiler is read")


def _of_ranks(of: Case, parallel: Parallel) -> Case:
    return replace(of, setup=replace(of.setup, parallel=parallel))


def _sharing(bench: Bench, of: Case, team: Team, weights: dict[str, Tensor]) -> WanModel:
    """The network of a rank, with these weights."""
    model = _composed(bench, of, team)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _composed(bench: Bench, of: Case, team: Team | None) -> WanModel:
    shared = build.collaborators(of.setup, selected(bench, of), team)
    with torch.device("meta"):
        return WanModel(**of.config, collaborators=shared)  # type: ignore[arg-type]


def _against_one(
    bench: Bench, model: WanModel, given: Inputs, want: Tensor, alone: float, what: str
) -> Line:
    far = apart(given.call(model), want)
    held = bench.peak(lambda: given.call(model))
    dist.barrier()
    taken = bench.seconds(lambda: given.call(model))
    return line(
        what,
        error(far, LIMIT, "error against one device"),
        Figure("a layer", 1e3 * taken / 2, "ms"),
        Figure("of one device's time", 100 * taken / alone, "%"),
        gigabytes("memory", held),
    )


def _in_one_stream(bench: Bench, of: Case, given: Inputs, weights: dict[str, Tensor]) -> Line:
    """In mode 1 exchanges and attention must follow each other: one stream, and a gap between."""
    world = dist.get_world_size()
    parallel = Parallel(world, 1, 1, world, comm_type=1)
    team = mesh.form(bench.device, parallel.sizes)
    model = _sharing(bench, _of_ranks(of, parallel), team, weights)
    given.call(model)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        given.call(model)
        bench.device.synchronize()
    events = [
        e
        for e in trace.profiler.kineto_results.events()
        if e.device_type() == DeviceType.CUDA and not e.name().startswith("Mem")
    ]
    sent = [e for e in events if "nccl" in e.name().lower()]
    flash = [e for e in events if any(x in e.name() for x in ("flash", "fmha", "sdpa"))]
    if not sent or not flash:
        raise UnavailableError("the profiler names no such kernels")
    streams = {e.device_resource_id() for e in (*sent, *flash)}
    flash.sort(key=lambda e: e.start_ns())
    gaps = [
        (b.start_ns() - a.start_ns() - a.duration_ns()) / 1e6
        for a, b in zip(flash, flash[1:], strict=False)
    ]
    return line(
        "exchanges of mode 1",
        Figure("streams", len(streams), "", 1, verdict=SLOW),
        Figure("median gap between attention kernels", sorted(gaps)[len(gaps) // 2], "ms"),
    )


def ring(bench: Bench) -> Iterator[Line]:
    """Memory of one ring over many forwards: blocks that were passed on must be freed."""
    joined(bench)
    of, world = case(bench), dist.get_world_size()
    weights = network(bench, of).state_dict()
    given = inputs(bench, of, of.request.grid)
    for kind in RING_TYPES:
        parallel = Parallel(world, 1, world, 1, ring_type=kind)
        team = mesh.form(bench.device, parallel.sizes)
        model = _sharing(bench, _of_ranks(of, parallel), team, weights)
        yield attempted(kind, partial(_repeated, bench, model, given, f"{kind} of {world}"))


def _repeated(bench: Bench, model: WanModel, given: Inputs, what: str) -> Line:
    """The host runs ahead of the device, as in a sampling loop."""
    count = FORWARDS if bench.large else 3

    def many() -> None:
        for _ in range(count):
            given.call(model)

    held, more = bench.peak(lambda: given.call(model)), bench.peak(many)
    figures = [gigabytes("one forward", held), gigabytes(f"{count} forwards", more)]
    if held is not None and more is not None:
        figures.append(Figure("ratio", more / held, "", GROWN, verdict=SLOW))
    return line(what, *figures)


def loops(bench: Bench) -> Iterator[Line]:
    """A minute of each mode: does the device slow down, and in which mode does it not?"""
    of = case(bench)
    given = inputs(bench, of, of.request.grid)
    world = 1 if bench.team is None else dist.get_world_size()
    weights = network(bench, of).state_dict()
    for mode, row in MODES.items():
        parallel = Parallel(world, 1, 1, world, comm_type=mode)
        team = None if bench.team is None else mesh.form(bench.device, parallel.sizes)
        model = _composed(bench, _of_ranks(of, parallel), team)
        model.load_state_dict(weights, assign=True)
        yield _minute(bench, model.eval().requires_grad_(False), given, row.name)
    yield absent("power and clock", POWER)


def _minute(bench: Bench, model: WanModel, given: Inputs, name: str) -> Line:
    """All ranks make as many forwards; the first tells the others when to stop."""
    given.call(model)
    bench.device.synchronize()
    start, times = time.perf_counter(), list[float]()
    goes_on = torch.ones(1, device=bench.place)
    while bool(goes_on):
        before = time.perf_counter()
        given.call(model)
        bench.device.synchronize()
        times.append(time.perf_counter() - before)
        goes_on.fill_(time.perf_counter() - start < LOOP)
        if bench.team is not None:
            dist.broadcast(goes_on, src=0)
    first, last = _mean_within(times, WINDOW), _mean_within(times[::-1], WINDOW)
    return Line(
        name,
        OK,
        (
            Figure("forwards", len(times)),
            Figure("a layer at first", 1e3 * first / 2, "ms"),
            Figure("a layer at last", 1e3 * last / 2, "ms"),
            Figure("last / first", last / first),
        ),
    )


def _mean_within(times: list[float], seconds: float) -> float:
    """Of the first forwards, as many as end within this time."""
    kept, total = 0, 0.0
    for one in times:
        if kept and total + one > seconds:
            break
        kept, total = kept + 1, total + one
    return total / kept


def fsdp(bench: Bench) -> Iterator[Line]:
    """Sharded weights against whole ones: not one bit may differ."""
    joined(bench)
    of = case(bench)
    weights = {name: x.cpu() for name, x in network(bench, of).state_dict().items()}
    given = inputs(bench, of, (3, 8, 12) if not bench.large else (5, 16, 16))
    for convert, what in ((False, "float32 and bfloat16"), (True, "--convert_model_dtype")):
        yield attempted(what, partial(_sharded, bench, of, given, weights, convert, what))


def _sharded(
    bench: Bench,
    of: Case,
    given: Inputs,
    weights: dict[str, Tensor],
    convert: bool,
    what: str,
) -> Line:
    sources = {name: Source(x.dtype, tuple(x.shape), x.__getitem__) for name, x in weights.items()}
    place = Sharded(joined(bench).world_mesh(), lambda network: network.blocks)
    outs = []
    for where in (WHOLE, place):
        model = _composed(bench, of, None)
        dtype_of = dit_dtypes(torch.bfloat16, convert)
        fill(model, sources, device=bench.place, dtype_of=dtype_of, label="DiT", place=where)
        outs.append(given.call(model).cpu())
    whole, sharded = outs
    return line(what, Figure("values that differ", int((whole != sharded).sum()), "", 0))
