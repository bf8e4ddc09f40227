"""Steps 10 to 12 on several ranks: exchanges, layers of real width, a ring's memory, a minute of
each mode, and sharded weights.

Legend: B batch, s this rank's tokens, S the group's, N all heads, h heads of a rank, D head size.
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

from benchmarks import common
from tools.device_check.bench import HEAD, Bench, ranks_text
from tools.device_check.network import LIMIT, Case, Inputs, apart, case, inputs, network, selected
from tools.device_check.steps import (
    SLOW,
    Figure,
    Line,
    Measured,
    UnavailableError,
    absent,
    error,
    gigabytes,
    line,
    milliseconds,
)
from wan.checkpoint.load import UNSHARDED, Source, dit_dtypes, fill
from wan.distributed import mesh
from wan.distributed.exchange import Group, all_gather_tokens, all_to_all_4D, group_rank, group_size
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.distributed.ring import RING_TYPES, Ring
from wan.modules.model import WanModel
from wan.pipeline import build
from wan.settings.parallel import Parallel, legal
from wan.settings.schedule import MODES, OVERLAP

HEADS = 40
LATE = 2.0  # seconds; with --full longer than HCCL waits for a link by default
LATE_FULL = 130.0
AXES = (("ulysses",), ("ring",), ("cfg",), ("ring", "ulysses"))
FORWARDS = 20
LOOP = 60.0  # seconds of each mode
WINDOW = 10.0  # at the beginning and the end of a minute that are compared
GROWN = 1.05  # most memory after many forwards, over that after the second
POWER = "nothing here measures them yet; read `nvidia-smi dmon` or `npu-smi` beside this step"


def joined(bench: Bench) -> Team:
    """All ranks of a step that they carry out together."""
    assert bench.team is not None, "the step is carried out together"
    return bench.team


def groups(bench: Bench) -> Measured:
    """All-to-all, all-gather and P2P along every axis of every topology: what arrives, how fast."""
    world = dist.get_world_size()
    joined(bench)
    for sizes in legal(world, HEADS * world):  # heads that every size divides
        team = mesh.form(bench.device, sizes)
        for axes in AXES:
            if group_size(team.group(*axes)) > 1:
                yield from _group(
                    bench, team.group(*axes), f"{ranks_text(sizes)}: {'+'.join(axes)}"
                )


def _group(bench: Bench, group: Group, what: str) -> Iterator[Line]:
    ranks, rank = group_size(group), group_rank(group)
    tokens = 75_600 // ranks if bench.large else 512 // ranks
    x_BsND = _coded(bench, rank, tokens, ranks)

    def there() -> Tensor:
        return all_to_all_4D(x_BsND, 2, 1, group)

    arrived = there()
    wanted = torch.cat([_coded(bench, r, tokens, ranks) for r in range(ranks)], 1)
    mine = slice(rank * 8, (rank + 1) * 8)
    wrong = _different(arrived, wanted[:, :, mine])
    back = _different(all_to_all_4D(arrived, 1, 2, group), x_BsND)
    sent = x_BsND.nbytes * (ranks - 1) / ranks
    yield _exchange(f"{what}, all-to-all", bench, there, sent, wrong + back)
    gathered = _different(all_gather_tokens(x_BsND, group), wanted)
    yield _exchange(
        f"{what}, all-gather",
        bench,
        lambda: all_gather_tokens(x_BsND, group),
        x_BsND.nbytes * (ranks - 1),
        gathered,
    )
    for kind in RING_TYPES:
        ring = Ring(group, kind)

        blocks = ring.blocks(x_BsND, x_BsND)
        wrong = sum(_different(k, _coded(bench, r, tokens, ranks)) for r, k, _ in blocks)
        moved = 2 * x_BsND.nbytes * len(ring.hops)
        yield _exchange(f"{what}, P2P, {kind}", bench, partial(_pass, ring, x_BsND), moved, wrong)


def _pass(ring: Ring, x_BsND: Tensor) -> None:
    for _ in ring.blocks(x_BsND, x_BsND):
        pass


def _coded(bench: Bench, rank: int, tokens: int, ranks: int) -> Tensor:
    """[1,s,N,D] bfloat16, 8 heads for each rank: values that say whose, which token and head."""
    token = torch.arange(tokens, device=bench.place, dtype=torch.float32) % 7
    head = torch.arange(8 * ranks, device=bench.place, dtype=torch.float32) % 7
    values = 64 * (rank % 4) + 8 * token[:, None] + head  # whole numbers below 256 are exact
    return values.bfloat16()[None, :, :, None].expand(-1, -1, -1, HEAD).contiguous()


def _different(found: Tensor, wanted: Tensor) -> int:
    return int((found != wanted).sum())


def _exchange(what: str, bench: Bench, run: common.Run, sent: float, wrong: int) -> Line:
    dist.barrier()
    taken = bench.seconds(run)
    return line(
        what,
        Figure("wrong values", wrong, "", 0),
        Figure("time", 1e3 * taken, "ms"),
        Figure("sent by a rank", sent / taken / 1e9, "GB/s"),
    )


def slow_rank(bench: Bench) -> Measured:
    """The last rank comes late to the first exchange of a new group; the others must wait."""
    rank, ranks = joined(bench).rank, dist.get_world_size()
    late = LATE_FULL if bench.full else LATE
    for axis, sizes in (("ulysses", (1, 1, ranks)), ("ring", (1, ranks, 1))):
        group = mesh.form(bench.device, sizes).group(axis)
        dist.barrier()
        if rank == ranks - 1:
            time.sleep(late)
        start = time.perf_counter()
        x = _coded(bench, rank, 16, ranks)
        if axis == "ulysses":
            wrong = _different(all_to_all_4D(all_to_all_4D(x, 2, 1, group), 1, 2, group), x)
        else:
            blocks = Ring(group).blocks(x, x)
            wrong = sum(_different(k, _coded(bench, r, 16, ranks)) for r, k, _ in blocks)
        bench.device.synchronize()
        yield line(
            f"{axis}, a rank {late:g} s late",
            Figure("wrong values", wrong, "", 0),
            Figure("the first rank waited", time.perf_counter() - start, "s"),
        )


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


def layers(bench: Bench) -> Measured:
    """Two layers on every topology in every mode, against one device; milliseconds of a layer."""
    joined(bench)
    of = case(bench)
    given = inputs(bench, of, of.request.grid)
    model = network(bench, of)
    want = given.call(model).cpu()
    alone = bench.seconds(lambda: given.call(model), 1)
    weights = model.state_dict()
    yield line("one device", milliseconds(alone / 2, "a layer"))
    for parallel in topologies(bench, of.setup.checkpoint.heads):
        team = mesh.form(bench.device, parallel.sizes)
        for way in ways(parallel):
            name = OVERLAP.name if way.fa_alltoall_overlap else MODES[way.comm_type].name
            ring = f" ({way.ring_type})" if way.ring_size > 1 else ""
            what = f"{ranks_text(way.sizes)}{ring}, {name}"
            model = _sharing(bench, _of_ranks(of, way), team, weights)
            yield line(what, *_against_one(bench, model, given, want, alone))
    if bench.device.type == "cuda":
        yield "exchanges of mode 1", partial(_in_one_stream, bench, of, given, weights)
    else:
        yield absent("gaps between kernels", "only CUDA's profiler is read")


def _of_ranks(of: Case, parallel: Parallel) -> Case:
    return replace(of, setup=replace(of.setup, parallel=parallel))


def _sharing(bench: Bench, of: Case, team: Team | None, weights: dict[str, Tensor]) -> WanModel:
    """The network of a rank, with these weights."""
    model = _composed(bench, of, team)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _composed(bench: Bench, of: Case, team: Team | None) -> WanModel:
    shared = build.collaborators(of.setup, selected(bench, of), team)
    with torch.device("meta"):
        return WanModel(**of.config, collaborators=shared)  # type: ignore[arg-type]


def _against_one(
    bench: Bench, model: WanModel, given: Inputs, want: Tensor, alone: float
) -> list[Figure]:
    far = apart(given.call(model), want)
    held = bench.peak(lambda: given.call(model))
    dist.barrier()
    taken = bench.seconds(lambda: given.call(model))
    return [
        error(far, LIMIT, "error against one device"),
        milliseconds(taken / 2, "a layer"),
        Figure("of one device's time", 100 * taken / alone, "%"),
        gigabytes("memory", held),
    ]


def _in_one_stream(
    bench: Bench, of: Case, given: Inputs, weights: dict[str, Tensor]
) -> list[Figure]:
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
    return [
        Figure("streams", len(streams), "", 1, verdict=SLOW),
        Figure("median gap between attention kernels", sorted(gaps)[len(gaps) // 2], "ms"),
    ]


def ring(bench: Bench) -> Measured:
    """Memory of one ring over many forwards: blocks that were passed on must be freed."""
    joined(bench)
    of, world = case(bench), dist.get_world_size()
    weights = network(bench, of).state_dict()
    given = inputs(bench, of, of.request.grid)
    for kind in RING_TYPES:
        parallel = Parallel(world, 1, world, 1, ring_type=kind)
        team = mesh.form(bench.device, parallel.sizes)
        model = _sharing(bench, _of_ranks(of, parallel), team, weights)
        yield f"{kind} of {world}", partial(_repeated, bench, model, given)


def _repeated(bench: Bench, model: WanModel, given: Inputs) -> list[Figure]:
    """The host runs ahead of the device, as in a sampling loop."""
    count = FORWARDS if bench.large else 3

    def many() -> None:
        for _ in range(count):
            given.call(model)

    held, more = bench.peak(lambda: given.call(model)), bench.peak(many)
    figures = [gigabytes("one forward", held), gigabytes(f"{count} forwards", more)]
    if held is not None and more is not None:
        figures.append(Figure("ratio", more / held, "", GROWN, verdict=SLOW))
    return figures


def loops(bench: Bench) -> Measured:
    """A minute of each mode: does the device slow down, and in which mode does it not?"""
    of = case(bench)
    given = inputs(bench, of, of.request.grid)
    world = 1 if bench.team is None else dist.get_world_size()
    weights = network(bench, of).state_dict()
    for mode, row in MODES.items():
        parallel = Parallel(world, 1, 1, world, comm_type=mode)
        team = None if bench.team is None else mesh.form(bench.device, parallel.sizes)
        model = _sharing(bench, _of_ranks(of, parallel), team, weights)
        yield line(row.name, *_minute(bench, model, given))
    yield absent("power and clock", POWER)


def _minute(bench: Bench, model: WanModel, given: Inputs) -> list[Figure]:
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
    return [
        Figure("forwards", len(times)),
        milliseconds(first / 2, "a layer at first"),
        milliseconds(last / 2, "a layer at last"),
        Figure("last / first", last / first),
    ]


def _mean_within(times: list[float], seconds: float) -> float:
    """Of the first forwards, as many as end within this time."""
    kept, total = 0, 0.0
    for one in times:
        if kept and total + one > seconds:
            break
        kept, total = kept + 1, total + one
    return total / kept


def fsdp(bench: Bench) -> Measured:
    """Sharded weights against whole ones: not one bit may differ."""
    joined(bench)
    of = case(bench)
    weights = {name: x.cpu() for name, x in network(bench, of).state_dict().items()}
    given = inputs(bench, of, (3, 8, 12) if not bench.large else (5, 16, 16))
    for convert, what in ((False, "float32 and bfloat16"), (True, "--convert_model_dtype")):
        yield what, partial(_sharded, bench, of, given, weights, convert)


def _sharded(
    bench: Bench, of: Case, given: Inputs, weights: dict[str, Tensor], convert: bool
) -> list[Figure]:
    sources = {name: Source(x.dtype, tuple(x.shape), x.__getitem__) for name, x in weights.items()}
    sharding = Sharded(joined(bench).world_mesh(), lambda network: network.blocks)
    outs = []
    for where in (UNSHARDED, sharding):
        model = _composed(bench, of, None)
        dtype_of = dit_dtypes(torch.bfloat16, convert)
        fill(model, sources, device=bench.place, dtype_of=dtype_of, label="DiT", sharding=where)
        outs.append(given.call(model).cpu())
    whole, sharded = outs
    return [Figure("values that differ", int((whole != sharded).sum()), "", 0)]
