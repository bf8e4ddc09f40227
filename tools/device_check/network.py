"""Steps 4, 5, 11, 12: two layers of a published network: eager, compiled, on several ranks in every
mode, in a ring, for a minute in each mode, and with sharded weights.

Legend: B batch, S tokens, N heads, D head size, C channels.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from tools.device_check import steps
from tools.device_check.bench import HEAD, Bench, compute_rms_distance, format_ranks
from tools.device_check.steps import (
    SLOW,
    Figure,
    Measurements,
    make_error,
    make_line,
    make_memory,
    make_time,
)
from wan.checkpoint.formats.tensor_source import TensorSource
from wan.checkpoint.layout import make_reference_checkpoint
from wan.checkpoint.load import UNSHARDED, load_weights, make_dit_dtype_rule
from wan.distributed import mesh
from wan.distributed.fsdp import FsdpSharding
from wan.distributed.mesh import ParallelGroups
from wan.distributed.ring import RING_TYPES
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import Target
from wan.kernels.registry import select_kernels
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
from wan.tasks.base import VideoParams, make_video_params
from wan.testing import measuring
from wan.utils.torch_private import use_private_compiler_cache

Grid = tuple[int, int, int]
Weights = dict[str, Tensor]

LAYERS = 2
LIMIT = 2e-2  # relative rms of the result in bfloat16 against float32
COMPILED_LIMIT = 1e-2  # the same between eager and compiled, both in bfloat16
PLAN = 1.1  # largest measured memory over planned memory
SMALL = (3, 8, 12)  # token grid for the comparison with float32 on the host
FORWARDS = 20
LOOP = 60.0  # seconds in each mode
GROWN = 1.05  # largest peak memory of many forwards over that of one


@dataclass(frozen=True)
class ForwardInputs:
    """The arguments of a forward: latents [C,F,H,W], timestep [1], text [tokens, C], token grid."""

    x: Tensor
    t: Tensor
    text: Tensor
    grid: Grid

    def run(self, model: WanModel) -> Tensor:
        """Runs a forward and returns the velocity."""
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

    def make_weights(self) -> Weights:
        """Makes random weights on the device, equal on all ranks: norms near 1, biases near 0."""
        with torch.device("meta"):
            parameters = WanModel(**self.config).named_parameters()
        dtype_of, weights = make_dit_dtype_rule(torch.bfloat16, False), Weights()
        torch.manual_seed(0)
        for name, parameter in parameters:
            values = self.bench.randn(*parameter.shape, dtype=dtype_of(name, parameter.dtype))
            is_matrix = parameter.dim() > 1
            weights[name] = values.mul_(parameter[0].numel() ** -0.5 if is_matrix else 0.02)
            if not is_matrix and "norm" in name and "weight" in name:
                weights[name] += 1
        return weights

    def make_empty_model(self, team: ParallelGroups | None = None) -> WanModel:
        """Makes the network as in a run, on the meta device, with the kernels of a run."""
        target = Target(self.bench.device, HEAD, torch.bfloat16)
        selected = select_kernels(self.setup.attention, target, {})
        shared = build.build_components(self.setup, selected, team)
        with torch.device("meta"):
            return WanModel(**self.config, components=shared)

    def make_model(self, weights: Weights) -> WanModel:
        """Makes the network with these weights, on one device."""
        return _load_weights(self.make_empty_model(), weights)

    def make_rank_model(
        self, parallel: Parallel, weights: Weights, team: ParallelGroups | None = None
    ) -> WanModel:
        """Makes the network of a rank. team: groups of this topology; None forms them."""
        if team is None and self.bench.team is not None:
            team = mesh.make_parallel_groups(self.bench.device, parallel.mesh_shape)
        setup = replace(self.setup, parallel=parallel)
        return _load_weights(replace(self, setup=setup).make_empty_model(team), weights)

    def make_inputs(self, grid: Grid | None = None) -> ForwardInputs:
        """Makes random latents and text, equal on all ranks. grid: tokens along each axis."""
        grid = grid or self.request.grid
        config, random = self.config, torch.Generator().manual_seed(1)
        sizes = [n * p for n, p in zip(grid, self.setup.preset.patch_size, strict=True)]
        x = torch.randn(config["in_dim"], *sizes, generator=random)
        text = torch.randn(config["text_len"], config["text_dim"], generator=random)
        text = text.to(self.bench.torch_device, torch.bfloat16)
        return ForwardInputs(x.to(self.bench.torch_device), torch.tensor([500.0]), text, grid)


def make_case(bench: Bench) -> Case:
    """Makes the case: the 14B at 720p x 81 frames in bfloat16; on a CPU the 1.3B, small."""
    preset = PRESETS["t2v-A14B" if bench.large else "t2v-1.3B"]
    kind, name = bench.device.type, bench.device.capabilities.name
    execution = Execution(device=kind, precision="bf16")
    chip = name if name in CHIPS else None
    setup = Setup(
        preset, make_reference_checkpoint(preset), execution, Parallel(), Attention(), chip=chip
    )
    size, frames = ((1280, 720), 81) if bench.large else ((192, 128), 9)
    values = {"size": size, "frame_num": frames, "prompt": "", "base_seed": 0}
    return Case(bench, setup, make_video_params(preset, values))


def _load_weights(model: WanModel, weights: Weights) -> WanModel:
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def check_forward(bench: Bench) -> Measurements:
    """Checks error against the host, memory against the plan, time and rate, host waits."""
    case = make_case(bench)
    weights, inputs = case.make_weights(), case.make_inputs()
    model, tokens = case.make_model(weights), f"{prod(inputs.grid)} tokens"

    def compare_with_host() -> list[Figure]:
        small = case.make_inputs(SMALL)
        with torch.device("meta"):
            plain = WanModel(**case.config)
        plain = _load_weights(plain, {name: x.cpu().float() for name, x in weights.items()})
        want = replace(small, x=small.x.cpu(), text=small.text.cpu().float()).run(plain)
        return [make_error(compute_rms_distance(small.run(model), want), LIMIT)]

    def measure_memory() -> list[Figure]:
        """Measures the first forward, whose cached tensors (RoPE table) the plan includes."""
        held = bench.measure_peak(lambda: inputs.run(model))
        (planned, *_) = Planner(case.setup, case.request).measure_forwards(case.setup.parallel)
        most = (planned.size.activations + planned.size.cached).total()
        figures = [make_memory("planned", most), make_memory("measured", held)]
        if held is not None:
            figures.append(Figure("measured / planned", held / most, "", PLAN))
        return figures

    yield f"against float32 on the host, {prod(SMALL)} tokens", compare_with_host
    yield f"memory without weights, {tokens}", measure_memory
    yield f"time, {tokens}", partial(_measure_time, case, model, inputs)
    if bench.device.type == "cuda":
        yield "host waits", partial(_check_host_waits, model, inputs)
    else:
        yield steps.make_absent("host waits", "only CUDA reports them")


def _measure_time(case: Case, model: WanModel, inputs: ForwardInputs) -> list[Figure]:
    """Times a forward, and compares its rate with that of one large matrix product."""
    tokens = prod(inputs.grid)
    seconds = case.bench.measure_seconds(lambda: inputs.run(model))
    text, dim, hidden = len(inputs.text), case.config["dim"], case.config["ffn_dim"]
    products = tokens * (6 * dim + 2 * hidden) * dim + 2 * text * dim**2
    flops = LAYERS * (2 * products + 4 * tokens * (tokens + text) * dim)
    rate, _ = case.bench.measure_matmul(torch.bfloat16)
    return [
        make_time(seconds / LAYERS, "a layer"),
        Figure("rate", flops / seconds / 1e12, "TFLOP/s"),
        steps.make_share("of a product's rate", flops / seconds / rate),
    ]


def _check_host_waits(model: WanModel, inputs: ForwardInputs) -> list[Figure]:
    """Checks that a forward never synchronizes the host with the GPU, by making it an error."""
    inputs.run(model)
    torch.cuda.synchronize()
    previous_mode, waits = torch.cuda.get_sync_debug_mode(), list[Figure]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.run(model)
    except RuntimeError as failure:
        waits.append(Figure("the first", str(failure).splitlines()[0]))
    finally:
        torch.cuda.set_sync_debug_mode(previous_mode)
    return [Figure("of a forward", len(waits), "", 0, verdict=SLOW), *waits]


def check_compiled(bench: Bench) -> Measurements:
    """Checks blocks compiled as by --compile: graphs, several sequence lengths, error, time."""
    case = make_case(bench)
    weights = case.make_weights()
    eager, fast = case.make_model(weights), case.make_model(weights)
    use_private_compiler_cache()
    graphs, inductor = 0, lookup_backend("inductor")

    def count_graphs(graph: GraphModule, example: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return inductor(graph, example)

    for block in fast.blocks:
        block.compile(backend=count_graphs)
    f, h, w = case.request.grid
    for grid in ((f, h, w), (f, h - 1, w), (f - 1, h, w)):
        inputs = case.make_inputs(grid)
        seconds = measuring.measure_seconds(partial(inputs.run, fast), bench.torch_device)
        far = compute_rms_distance(inputs.run(fast), inputs.run(eager))
        yield make_line(
            f"{prod(grid)} tokens",
            make_error(far, COMPILED_LIMIT, "error against eager"),
            Figure("first call", seconds, "s"),
            Figure("graphs so far", graphs),
        )
        if grid == (f, h, w):
            plain, quick = (
                bench.measure_seconds(partial(inputs.run, model)) for model in (eager, fast)
            )
            ratio = Figure("times eager", quick / plain)
            yield make_line("time", make_time(quick / LAYERS, "a layer"), ratio)
    # One graph for the first length and one for all others; graph breaks add more.
    yield make_line("graphs", Figure("in all", graphs, "", 2, verdict=SLOW))


def list_topologies(bench: Bench, heads: int) -> list[Parallel]:
    """Lists all topologies with --full, else those without CFG: Ulysses, mixed, ring."""
    world, topologies = dist.get_world_size(), []
    for cfg, ring, ulysses in enumerate_topologies(world, heads):
        if cfg == 1 or (bench.full and ring * ulysses > 1):
            kinds = RING_TYPES[: 1 if ring == 1 or not bench.full else None]
            topologies += [Parallel(world, cfg, ring, ulysses, ring_type=kind) for kind in kinds]
    return (
        topologies
        if bench.full or len(topologies) <= 3
        else [topologies[0], topologies[len(topologies) // 2], topologies[-1]]
    )


def check_layers(bench: Bench) -> Measurements:
    """Checks two layers on every topology in every mode against one device; times a layer."""
    case = make_case(bench)
    weights, inputs = case.make_weights(), case.make_inputs()
    model = case.make_model(weights)
    want = inputs.run(model).cpu()
    alone = bench.measure_seconds(lambda: inputs.run(model), 1)
    yield make_line("one device", make_time(alone / LAYERS, "a layer"))
    for parallel in list_topologies(bench, case.setup.checkpoint.num_heads):
        team = mesh.make_parallel_groups(bench.device, parallel.mesh_shape)
        variants = {MODES[0].name: parallel}
        if parallel.ulysses_size > 1:
            variants = {row.name: replace(parallel, comm_type=mode) for mode, row in MODES.items()}
            variants[OVERLAP.name] = replace(parallel, fa_alltoall_overlap=True)
        ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
        for name, variant in variants.items():
            model = case.make_rank_model(variant, weights, team)
            run = partial(inputs.run, model)
            far, held = compute_rms_distance(run(), want), bench.measure_peak(run)
            dist.barrier()
            seconds = bench.measure_seconds(run)
            yield make_line(
                f"{format_ranks(variant.mesh_shape)}{ring}, {name}",
                make_error(far, LIMIT, "error against one device"),
                make_time(seconds / LAYERS, "a layer"),
                Figure("of one device's time", 100 * seconds / alone, "%"),
                make_memory("memory", held),
            )


def check_ring(bench: Bench) -> Measurements:
    """Checks that a ring frees passed blocks: memory over many forwards."""
    case, world, count = make_case(bench), dist.get_world_size(), FORWARDS if bench.large else 3
    weights, inputs = case.make_weights(), case.make_inputs()

    def measure_repeated(model: WanModel) -> list[Figure]:
        """Runs forwards without synchronization, as in a denoising loop; compares the memory."""

        def run_many() -> None:
            for _ in range(count):
                inputs.run(model)

        held, more = bench.measure_peak(lambda: inputs.run(model)), bench.measure_peak(run_many)
        figures = [make_memory("one forward", held), make_memory(f"{count} forwards", more)]
        if held is not None and more is not None:
            figures.append(Figure("ratio", more / held, "", GROWN, verdict=SLOW))
        return figures

    for kind in RING_TYPES:
        model = case.make_rank_model(Parallel(world, 1, world, 1, ring_type=kind), weights)
        yield f"{kind} of {world}", partial(measure_repeated, model)


def check_loops(bench: Bench) -> Measurements:
    """Runs each mode for a minute, to find modes in which the device slows down."""
    case = make_case(bench)
    weights, inputs = case.make_weights(), case.make_inputs()
    world = 1 if bench.team is None else dist.get_world_size()
    for mode, row in MODES.items():
        model = case.make_rank_model(Parallel(world, 1, 1, world, comm_type=mode), weights)
        yield make_line(row.name, *_run_minute(bench, model, inputs))


def _run_minute(bench: Bench, model: WanModel, inputs: ForwardInputs) -> list[Figure]:
    """Runs the same number of forwards on all ranks; rank 0 broadcasts the end."""
    inputs.run(model)
    start, times = time.perf_counter(), list[float]()
    is_running = torch.ones(1, device=bench.torch_device)
    while bool(is_running):
        times.append(measuring.measure_seconds(lambda: inputs.run(model), bench.torch_device))
        is_running.fill_(time.perf_counter() - start < LOOP)
        if bench.team is not None:
            dist.broadcast(is_running, src=0)
    count = -(-len(times) // 6)  # those of about ten seconds
    first, last = statistics.mean(times[:count]), statistics.mean(times[-count:])
    return [
        Figure("forwards", len(times)),
        make_time(first / LAYERS, "a layer at first"),
        make_time(last / LAYERS, "a layer at last"),
        Figure("last / first", last / first),
    ]


def check_fsdp(bench: Bench) -> Measurements:
    """Checks that sharded weights give the same bits as unsharded weights."""
    case = make_case(bench)
    inputs = case.make_inputs((5, 16, 16) if bench.large else SMALL)
    weights = {name: x.cpu() for name, x in case.make_weights().items()}
    stored = {
        name: TensorSource(x.dtype, tuple(x.shape), x.__getitem__) for name, x in weights.items()
    }

    def count_differing(convert: bool) -> list[Figure]:
        assert bench.team is not None, "the step is carried out together"
        outs, dtype_of = [], make_dit_dtype_rule(torch.bfloat16, convert)
        sharding = FsdpSharding(bench.team.world_mesh(), lambda network: network.blocks)
        for where in (UNSHARDED, sharding):
            model, device = case.make_empty_model(), bench.torch_device
            load_weights(
                model, stored, device=device, dtype_of=dtype_of, label="DiT", sharding=where
            )
            outs.append(inputs.run(model).cpu())
        return [Figure("values that differ", int((outs[0] != outs[1]).sum()), "", 0)]

    yield "float32 and bfloat16", partial(count_differing, False)
    yield "--convert_model_dtype", partial(count_differing, True)
