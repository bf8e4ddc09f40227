"""Steps 4, 5, 11, 12: two layers of a published network: eager, compiled, on several ranks in every
mode, in a ring, for a minute in each mode, and with sharded weights.

Legend: B batch, S tokens, N heads, D head size, C channels.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from benchmarks import common
from tools.device_check import steps
from tools.device_check.bench import Bench, distance, ranks_text
from tools.device_check.steps import SLOW, Figure, Measured, error, gigabytes, line, milliseconds
from wan.checkpoint.layout import make_reference_checkpoint
from wan.checkpoint.load import UNSHARDED, load_weights, make_dit_dtype_rule
from wan.checkpoint.source import TensorSource
from wan.distributed import mesh
from wan.distributed.fsdp import FsdpSharding
from wan.distributed.mesh import ParallelGroups
from wan.distributed.ring import RING_TYPES
from wan.kernels.base import Kernel, StepInfo, Target
from wan.kernels.select import SelectedKernels, select_kernels
from wan.modules.model import WanModel
from wan.pipeline import build
from wan.pipeline.setup import Setup
from wan.planner.measure import Planner
from wan.settings.attention import Attention
from wan.settings.attention_modes import MODES, OVERLAP
from wan.settings.devices import CHIPS
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel, enumerate_topologies
from wan.settings.presets import PRESETS
from wan.settings.request import VideoParams, make_video_params

Grid = tuple[int, int, int]
Weights = dict[str, Tensor]

LAYERS = 2
LIMIT = 2e-2  # relative rms of the result in bfloat16 against float32
COMPILED_LIMIT = 1e-2  # the same between eager and compiled, both in bfloat16
PLAN = 1.1  # largest measured memory over planned memory
SMALL = (3, 8, 12)  # token grid for the comparison with float32 on the host
FORWARDS = 20
LOOP = 60.0  # seconds in each mode
WINDOW = 10.0  # seconds at the beginning and end of a loop that are compared
GROWN = 1.05  # largest peak memory of many forwards over that of one
POWER = "not measured here yet; run `nvidia-smi dmon` or `npu-smi` during this step"


@dataclass(frozen=True)
class Inputs:
    """The arguments of a forward: latents [C,F,H,W], timestep [1], text [tokens, C], token grid."""

    x: Tensor
    t: Tensor
    text: Tensor
    grid: Grid

    def call(self, model: WanModel) -> Tensor:
        """Run a forward and return the velocity."""
        step = StepInfo(0, 40, "cond", "dit", self.grid, prod(self.grid))
        return model([self.x], self.t, [self.text], prod(self.grid), step=step)[0]


@dataclass(frozen=True)
class Case:
    """Two layers of a network of published width, and a video for them."""

    bench: Bench
    setup: Setup
    request: VideoParams

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of the network."""
        return {**self.setup.checkpoint.config, "num_layers": LAYERS}

    @property
    def selected(self) -> SelectedKernels:
        """Kernels that a run would use."""
        target = Target(self.bench.device, 128, torch.bfloat16)
        return select_kernels(self.setup.attention, target, {})

    def weights(self) -> Weights:
        """Make random weights on the device, equal on all ranks: norms near 1, biases near 0."""
        with torch.device("meta"):
            parameters = WanModel(**self.config).named_parameters()
        dtype_of, found = make_dit_dtype_rule(torch.bfloat16, False), Weights()
        torch.manual_seed(0)
        for name, given in parameters:
            values = self.bench.randn(*given.shape, dtype=dtype_of(name, given.dtype))
            is_matrix = given.dim() > 1
            found[name] = values.mul_(given[0].numel() ** -0.5 if is_matrix else 0.02)
            if not is_matrix and "norm" in name and "weight" in name:
                found[name] += 1
        return found

    def empty(
        self, team: ParallelGroups | None = None, selected: SelectedKernels | None = None
    ) -> WanModel:
        """Make the network as in a run, on the meta device. selected: replaces its kernels."""
        shared = build.build_components(self.setup, selected or self.selected, team)
        with torch.device("meta"):
            return WanModel(**self.config, components=shared)

    def model(self, weights: Weights, selected: SelectedKernels | None = None) -> WanModel:
        """Make the network with these weights, on one device."""
        return _with(self.empty(selected=selected), weights)

    def on_ranks(
        self, parallel: Parallel, weights: Weights, team: ParallelGroups | None = None
    ) -> WanModel:
        """Make the network of a rank. team: groups of this topology; None forms them."""
        if team is None and self.bench.team is not None:
            team = mesh.make_parallel_groups(self.bench.device, parallel.mesh_shape)
        setup = replace(self.setup, parallel=parallel)
        return _with(replace(self, setup=setup).empty(team), weights)

    def inputs(self, grid: Grid | None = None) -> Inputs:
        """Make random latents and text, equal on all ranks. grid: tokens along each axis."""
        grid = grid or self.request.grid
        config, random = self.config, torch.Generator().manual_seed(1)
        sizes = [n * p for n, p in zip(grid, self.setup.preset.patch_size, strict=True)]
        x = torch.randn(config["in_dim"], *sizes, generator=random)
        text = torch.randn(config["text_len"], config["text_dim"], generator=random)
        text = text.to(self.bench.place, torch.bfloat16)
        return Inputs(x.to(self.bench.place), torch.tensor([500.0]), text, grid)


def case(bench: Bench) -> Case:
    """Make the case: the 14B at 720p x 81 frames in bfloat16; on a CPU the 1.3B, small."""
    preset = PRESETS["t2v-A14B" if bench.large else "t2v-1.3B"]
    kind, name = bench.device.type, bench.device.capabilities.name
    execution = Execution(device=kind, precision="bf16", text_kv_cache=False)
    chip = name if name in CHIPS else None
    setup = Setup(
        preset, make_reference_checkpoint(preset), execution, Parallel(), Attention(), chip=chip
    )
    size, frames = ((1280, 720), 81) if bench.large else ((192, 128), 9)
    values = {"size": size, "frame_num": frames, "prompt": "", "base_seed": 0}
    return Case(bench, setup, make_video_params(preset, values))


def _with(model: WanModel, weights: Weights) -> WanModel:
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def apart(found: Tensor, want: Tensor) -> float:
    """Compute the relative rms of the difference; NaN if a value is not finite."""
    return distance(found.flatten()[None], want.cpu().double().flatten()[None])


class _Recorded:
    """Implements `wan.kernels.base.Kernel`: wraps a kernel and records its calls."""

    can_return_lse = False

    def __init__(self, kernel: Kernel, calls: list[common.Call]) -> None:
        self.name, self._kernel, self._calls, self.keeps = kernel.name, kernel, calls, True

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        if self.keeps:
            self._calls.append((self._kernel, (q_BSND, k_BSND, v_BSND)))
        return self._kernel(q_BSND, k_BSND, v_BSND)

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        return self._kernel.with_lse(q_BSND, k_BSND, v_BSND)


def forward(bench: Bench) -> Measured:
    """Check error against the host, memory against the plan, time of products, host waits."""
    of = case(bench)
    weights, given = of.weights(), of.inputs()
    model, tokens = of.model(weights), f"{prod(given.grid)} tokens"

    def on_host() -> list[Figure]:
        small = of.inputs(SMALL)
        with torch.device("meta"):
            plain = WanModel(**of.config)
        plain = _with(plain, {name: x.cpu().float() for name, x in weights.items()})
        want = replace(small, x=small.x.cpu(), text=small.text.cpu().float()).call(plain)
        return [error(apart(small.call(model), want), LIMIT)]

    def memory() -> list[Figure]:
        """Measure the first forward, whose cached tensors (RoPE table) the plan includes."""
        held = bench.peak(lambda: given.call(model))
        (planned, *_) = Planner(of.setup, of.request).measure_forwards(of.setup.parallel)
        most = (planned.size.activations + planned.size.cached).total()
        figures = [gigabytes("planned", most), gigabytes("measured", held)]
        if held is not None:
            figures.append(Figure("measured / planned", held / most, "", PLAN))
        return figures

    yield f"against float32 on the host, {prod(SMALL)} tokens", on_host
    yield f"memory without weights, {tokens}", memory
    yield f"time, {tokens}", partial(_time, of, weights, given)
    if bench.device.type == "cuda":
        yield "host waits", partial(_waits, model, given)
    else:
        yield steps.absent("host waits", "only CUDA reports them")


def _time(of: Case, weights: Weights, given: Inputs) -> list[Figure]:
    """Time a forward and its matrix products alone, in turn; derive the other operations' share."""
    selected, calls = of.selected, list[common.Call]()
    kernels = [_Recorded(kernel, calls) for kernel in (selected.dense_kernel, selected.text_kernel)]
    model = of.model(weights, replace(selected, dense_kernel=kernels[0], text_kernel=kernels[1]))
    with torch.compiler.set_stance("force_eager"), common.RecordProducts() as record:
        given.call(model)
    for kernel in kernels:
        kernel.keeps = False
    flops = sum(2 * x.numel() * len(weight) for _, (x, weight, *_) in record.linear)
    flops += sum(4 * q.numel() * k.shape[1] for _, (q, k, _) in calls)
    runs: dict[str, common.Run] = {
        "forward": lambda: given.call(model),
        "linear": lambda: common.replay(record.linear),
        "attention": lambda: common.replay(calls),
    }
    times = common.interleave(runs, 3, of.bench.place)
    taken, products, attention = (statistics.median(times[name]) for name in runs)
    rate, _ = of.bench.rates(torch.bfloat16)
    return [
        milliseconds(taken / LAYERS, "a layer"),
        steps.share("linear layers", products / taken),
        steps.share("attention", attention / taken),
        steps.share("all else", 1 - (products + attention) / taken),
        Figure("rate", flops / taken / 1e12, "TFLOP/s"),
        steps.share("of a product's rate", flops / taken / rate),
    ]


def _waits(model: WanModel, given: Inputs) -> list[Figure]:
    """Check that a forward never synchronizes the host with the GPU, by making it an error."""
    given.call(model)
    torch.cuda.synchronize()
    before, waits = torch.cuda.get_sync_debug_mode(), list[Figure]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given.call(model)
    except RuntimeError as found:
        waits.append(Figure("the first", str(found).splitlines()[0]))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return [Figure("of a forward", len(waits), "", 0, verdict=SLOW), *waits]


def compiled(bench: Bench) -> Measured:
    """Check blocks compiled as by --compile: graphs, several sequence lengths, error, time."""
    of = case(bench)
    weights = of.weights()
    eager, fast = of.model(weights), of.model(weights)
    graphs, inductor = 0, lookup_backend("inductor")

    def counted(graph: GraphModule, example: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return inductor(graph, example)

    for block in fast.blocks:
        block.compile(backend=counted)
    f, h, w = of.request.grid
    for grid in ((f, h, w), (f, h - 1, w), (f - 1, h, w)):
        given = of.inputs(grid)
        taken = common.seconds(partial(given.call, fast), bench.place)
        far = apart(given.call(fast), given.call(eager))
        yield line(
            f"{prod(grid)} tokens",
            error(far, COMPILED_LIMIT, "error against eager"),
            Figure("first call", taken, "s"),
            Figure("graphs so far", graphs),
        )
        if grid == (f, h, w):
            plain, quick = (bench.seconds(partial(given.call, model)) for model in (eager, fast))
            ratio = Figure("times eager", quick / plain)
            yield line("time", milliseconds(quick / LAYERS, "a layer"), ratio)
    # One graph for the first length and one for all others; graph breaks add more.
    yield line("graphs", Figure("in all", graphs, "", 2, verdict=SLOW))


def topologies(bench: Bench, heads: int) -> list[Parallel]:
    """List all topologies with --full, else those without CFG: Ulysses, mixed, ring."""
    world, found = dist.get_world_size(), []
    for cfg, ring, ulysses in enumerate_topologies(world, heads):
        if cfg == 1 or (bench.full and ring * ulysses > 1):
            kinds = RING_TYPES[: 1 if ring == 1 or not bench.full else None]
            found += [Parallel(world, cfg, ring, ulysses, ring_type=kind) for kind in kinds]
    return found if bench.full or len(found) <= 3 else [found[0], found[len(found) // 2], found[-1]]


def layers(bench: Bench) -> Measured:
    """Check two layers on every topology in every mode against one device; time a layer."""
    of = case(bench)
    weights, given = of.weights(), of.inputs()
    model = of.model(weights)
    want = given.call(model).cpu()
    alone = bench.seconds(lambda: given.call(model), 1)
    yield line("one device", milliseconds(alone / LAYERS, "a layer"))
    for parallel in topologies(bench, of.setup.checkpoint.num_heads):
        team = mesh.make_parallel_groups(bench.device, parallel.mesh_shape)
        ways = {MODES[0].name: parallel}
        if parallel.ulysses_size > 1:
            ways = {row.name: replace(parallel, comm_type=mode) for mode, row in MODES.items()}
            ways[OVERLAP.name] = replace(parallel, fa_alltoall_overlap=True)
        ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
        for name, way in ways.items():
            model = of.on_ranks(way, weights, team)
            run = partial(given.call, model)
            far, held = apart(run(), want), bench.peak(run)
            dist.barrier()
            taken = bench.seconds(run)
            yield line(
                f"{ranks_text(way.mesh_shape)}{ring}, {name}",
                error(far, LIMIT, "error against one device"),
                milliseconds(taken / LAYERS, "a layer"),
                Figure("of one device's time", 100 * taken / alone, "%"),
                gigabytes("memory", held),
            )
    if bench.device.type == "cuda":
        yield "exchanges of mode 1", partial(_in_one_stream, of, given, weights)
    else:
        yield steps.absent("gaps between kernels", "only CUDA's profiler is read")


def _in_one_stream(of: Case, given: Inputs, weights: Weights) -> list[Figure]:
    """Check that exchanges and attention of mode 1 alternate on one stream; measure the gaps."""
    world = dist.get_world_size()
    model = of.on_ranks(Parallel(world, 1, 1, world, comm_type=1), weights)
    given.call(model)
    events = of.bench.events(lambda: given.call(model))
    sent = [e for e in events if "nccl" in e.name().lower()]
    flash = [e for e in events if any(x in e.name() for x in ("flash", "fmha", "sdpa"))]
    if not sent or not flash:
        raise steps.UnavailableError("the profiler names no such kernels")
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
    """Check that a ring frees passed blocks: memory over many forwards."""
    of, world, count = case(bench), dist.get_world_size(), FORWARDS if bench.large else 3
    weights, given = of.weights(), of.inputs()

    def repeated(model: WanModel) -> list[Figure]:
        """Run forwards without synchronization, as in a denoising loop; compare the memory."""

        def many() -> None:
            for _ in range(count):
                given.call(model)

        held, more = bench.peak(lambda: given.call(model)), bench.peak(many)
        figures = [gigabytes("one forward", held), gigabytes(f"{count} forwards", more)]
        if held is not None and more is not None:
            figures.append(Figure("ratio", more / held, "", GROWN, verdict=SLOW))
        return figures

    for kind in RING_TYPES:
        model = of.on_ranks(Parallel(world, 1, world, 1, ring_type=kind), weights)
        yield f"{kind} of {world}", partial(repeated, model)


def loops(bench: Bench) -> Measured:
    """Run each mode for a minute, to find modes in which the device slows down."""
    of = case(bench)
    weights, given = of.weights(), of.inputs()
    world = 1 if bench.team is None else dist.get_world_size()
    for mode, row in MODES.items():
        model = of.on_ranks(Parallel(world, 1, 1, world, comm_type=mode), weights)
        yield line(row.name, *_minute(bench, model, given))
    yield steps.absent("power and clock", POWER)


def _minute(bench: Bench, model: WanModel, given: Inputs) -> list[Figure]:
    """Run the same number of forwards on all ranks; rank 0 broadcasts the end."""
    given.call(model)
    start, times = time.perf_counter(), list[float]()
    goes_on = torch.ones(1, device=bench.place)
    while bool(goes_on):
        times.append(common.seconds(lambda: given.call(model), bench.place))
        goes_on.fill_(time.perf_counter() - start < LOOP)
        if bench.team is not None:
            dist.broadcast(goes_on, src=0)
    first, last = _mean_within(times, WINDOW), _mean_within(times[::-1], WINDOW)
    return [
        Figure("forwards", len(times)),
        milliseconds(first / LAYERS, "a layer at first"),
        milliseconds(last / LAYERS, "a layer at last"),
        Figure("last / first", last / first),
    ]


def _mean_within(times: list[float], seconds: float) -> float:
    """Compute the mean time of the first forwards that end within `seconds`."""
    kept = [taken for taken, end in zip(times, accumulate(times), strict=True) if end <= seconds]
    return statistics.mean(kept or times[:1])


def fsdp(bench: Bench) -> Measured:
    """Check that sharded weights give the same bits as unsharded weights."""
    of = case(bench)
    given = of.inputs((5, 16, 16) if bench.large else SMALL)
    weights = {name: x.cpu() for name, x in of.weights().items()}
    stored = {
        name: TensorSource(x.dtype, tuple(x.shape), x.__getitem__) for name, x in weights.items()
    }

    def differ(convert: bool) -> list[Figure]:
        assert bench.team is not None, "the step is carried out together"
        outs, dtype_of = [], make_dit_dtype_rule(torch.bfloat16, convert)
        sharding = FsdpSharding(bench.team.world_mesh(), lambda network: network.blocks)
        for where in (UNSHARDED, sharding):
            model, place = of.empty(), bench.place
            load_weights(
                model, stored, device=place, dtype_of=dtype_of, label="DiT", sharding=where
            )
            outs.append(given.call(model).cpu())
        return [Figure("values that differ", int((outs[0] != outs[1]).sum()), "", 0)]

    yield "float32 and bfloat16", partial(differ, False)
    yield "--convert_model_dtype", partial(differ, True)
