"""Steps 4 and 5: two layers of a published network, as they are and compiled.

Legend: B batch, S tokens, N heads, D head size, C channels.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import common
from tools.device_check.bench import Bench, distance
from tools.device_check.steps import (
    SLOW,
    Figure,
    Measured,
    absent,
    error,
    gigabytes,
    line,
    milliseconds,
    share,
)
from wan.checkpoint.layout import published
from wan.checkpoint.load import dit_dtypes
from wan.distributed.mesh import Team
from wan.kernels.base import Kernel, StepInfo, Target
from wan.kernels.select import Selected, select
from wan.modules.interfaces import Collaborators, LocalAttention
from wan.modules.model import WanModel
from wan.pipeline import build
from wan.pipeline.setup import Setup
from wan.planner.measure import Planner
from wan.settings.attention import Attention
from wan.settings.devices import CHIPS
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.settings.presets import PRESETS
from wan.settings.request import Request, make_request

LAYERS = 2
LIMIT = 2e-2  # of the whole result in bfloat16 against float32, in relative rms
COMPILED_LIMIT = 1e-2  # of the same in bfloat16, other roundings
PLAN = 1.1  # most that is measured, over what was planned
SMALL = (3, 8, 12)  # a grid of tokens that a host computes in float32, too


@dataclass(frozen=True)
class Case:
    """Two layers of a network of published width, and a video for them."""

    setup: Setup
    request: Request

    @property
    def config(self) -> dict[str, object]:
        """What makes the network."""
        return {**self.setup.checkpoint.config, "num_layers": LAYERS}


def case(bench: Bench, parallel: Parallel | None = None) -> Case:
    """The 14B at 720p x 81 frames in bfloat16; on a CPU the 1.3B and a small video."""
    preset = PRESETS["t2v-A14B" if bench.large else "t2v-1.3B"]
    kind, name = bench.device.type, bench.device.can.name
    setup = Setup(
        preset,
        published(preset),
        Execution(device=kind, precision="bf16", text_kv_cache=False),
        Parallel() if parallel is None else parallel,
        Attention(),
        chip=name if name in CHIPS else None,
    )
    size, frames = ((1280, 720), 81) if bench.large else ((192, 128), 9)
    values = {"size": size, "frame_num": frames, "prompt": "", "base_seed": 0}
    return Case(setup, make_request(preset, values))


def selected(bench: Bench, of: Case) -> Selected:
    """What a run would take."""
    return select(of.setup.attention, Target(bench.device, 128, torch.bfloat16), {})


def network(bench: Bench, of: Case, team: Team | None = None) -> WanModel:
    """Random weights, the same on every rank, composed as for a run."""
    shared = build.collaborators(of.setup, selected(bench, of), team)
    return with_weights(bench, of, shared)


def with_weights(bench: Bench, of: Case, shared: Collaborators) -> WanModel:
    """As `network`, of other collaborators."""
    with torch.device("meta"):
        model = WanModel(**of.config, collaborators=shared)  # type: ignore[arg-type]
    dtype_of, random = dit_dtypes(torch.bfloat16, False), torch.Generator().manual_seed(0)
    drawn = {
        name: 0.02 * torch.randn(parameter.shape[-1], generator=random)
        for name, parameter in model.named_parameters()
    }
    model = model.to_empty(device=bench.place).eval().requires_grad_(False)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, parameter.dtype))
        if parameter.dim() == 1:  # biases, and weights of norms about 1
            values = drawn[name] + (1.0 if "norm" in name and "weight" in name else 0.0)
            parameter.copy_(values)
        else:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


@dataclass(frozen=True)
class Inputs:
    """The arguments of a forward."""

    x: Tensor
    t: Tensor
    text: Tensor
    grid: tuple[int, int, int]

    def call(self, model: WanModel) -> Tensor:
        """The velocity."""
        step = StepInfo(0, 40, "cond", "dit", self.grid, prod(self.grid))
        found = model([self.x], self.t, [self.text], prod(self.grid), step=step)
        return found[0]

    def on_host(self) -> Inputs:
        return replace(self, x=self.x.cpu(), text=self.text.cpu())


def inputs(bench: Bench, of: Case, grid: tuple[int, int, int]) -> Inputs:
    """Random latents and text, the same on every rank. grid: tokens along each axis."""
    config, random = of.setup.checkpoint.config, torch.Generator().manual_seed(1)
    sizes = [n * p for n, p in zip(grid, of.setup.preset.patch_size, strict=True)]
    x = torch.randn(config["in_dim"], *sizes, generator=random)
    text = torch.randn(config["text_len"], config["text_dim"], generator=random)
    text = text.to(bench.place, torch.bfloat16)
    return Inputs(x.to(bench.place), torch.tensor([500.0]), text, grid)


def apart(found: Tensor, want: Tensor) -> float:
    """Relative rms of the difference; NaN where anything is not finite."""
    return distance(found.flatten()[None], want.cpu().double().flatten()[None])


class _Recorded:
    """Implements `wan.kernels.base.Kernel`: another one, whose calls are kept while `keeps`."""

    can_return_lse = False

    def __init__(self, kernel: Kernel) -> None:
        self.name, self._kernel, self.keeps = kernel.name, kernel, True
        self.calls: list[common.Call] = []

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        if self.keeps:
            self.calls.append((self._kernel, (q_BSND, k_BSND, v_BSND)))
        return self._kernel(q_BSND, k_BSND, v_BSND)

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        return self._kernel.with_lse(q_BSND, k_BSND, v_BSND)


def forward(bench: Bench) -> Measured:
    """Error against the host in float32, memory against the plan, time of products, host waits."""
    of = case(bench)
    model = network(bench, of)
    what = f"against float32 on the host, {prod(SMALL)} tokens"
    yield what, partial(_on_host, bench, of, model)
    given = inputs(bench, of, of.request.grid)
    tokens = f"{prod(given.grid)} tokens"
    yield f"memory beside weights, {tokens}", partial(_memory, bench, of, model, given)
    del model
    yield f"time, {tokens}", partial(_time, bench, of, given)
    if bench.device.type == "cuda":
        yield "host waits", partial(_waits, bench, of, given)
    else:
        yield absent("host waits", "only CUDA can tell")


def _on_host(bench: Bench, of: Case, model: WanModel) -> list[Figure]:
    given = inputs(bench, of, SMALL)
    with torch.device("meta"):
        plain = WanModel(**of.config)  # type: ignore[arg-type]
    weights = {name: x.cpu().float() for name, x in model.state_dict().items()}
    plain.load_state_dict(weights, assign=True)
    there = given.on_host()
    want = replace(there, text=there.text.float()).call(plain.eval())
    return [error(apart(given.call(model), want), LIMIT)]


def _memory(bench: Bench, of: Case, model: WanModel, given: Inputs) -> list[Figure]:
    """The first forward, which makes what is kept (the rotary table), as the plan counts it."""
    held = bench.peak(lambda: given.call(model))
    (planned, *_) = Planner(of.setup, of.request).forwards(of.setup.parallel)
    most = (planned.size.activations + planned.size.kept).total()
    figures = [gigabytes("planned", most), gigabytes("measured", held)]
    if held is not None:
        figures.append(Figure("measured / planned", held / most, "", PLAN))
    return figures


def _time(bench: Bench, of: Case, given: Inputs) -> list[Figure]:
    """A forward and its products alone, in turn: what is not a product is the rest."""
    kinds = selected(bench, of)
    kernel, text = _Recorded(kinds.dense), _Recorded(kinds.text)
    shared = build.collaborators(of.setup, kinds, None)
    shared = replace(shared, attention=lambda _: LocalAttention(kernel), kernel=text)
    model = with_weights(bench, of, shared)
    with torch.compiler.set_stance("force_eager"), common.RecordProducts() as record:
        given.call(model)
    kernel.keeps = text.keeps = False
    calls = [*kernel.calls, *text.calls]
    flops = sum(2 * x.numel() * len(weight) for _, (x, weight, *_) in record.linear)
    flops += sum(4 * q.numel() * k.shape[1] for _, (q, k, _) in calls)
    runs: dict[str, common.Run] = {
        "forward": lambda: given.call(model),
        "linear": lambda: common.replay(record.linear),
        "attention": lambda: common.replay(calls),
    }
    times = common.interleave(runs, 3, bench.place)
    taken, products, attention = (statistics.median(times[name]) for name in runs)
    rate, _ = bench.rates(torch.bfloat16)
    return [
        milliseconds(taken / LAYERS, "a layer"),
        share("linear layers", products / taken),
        share("attention", attention / taken),
        share("all else", 1 - (products + attention) / taken),
        Figure("rate", flops / taken / 1e12, "TFLOP/s"),
        share("of a product's rate", flops / taken / rate),
    ]


def _waits(bench: Bench, of: Case, given: Inputs) -> list[Figure]:
    """Every place where the host waits for the GPU raises an error; the loop should have none."""
    model = network(bench, of)
    given.call(model)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given.call(model)
    except RuntimeError as found:
        first = Figure("the first", str(found).splitlines()[0])
        return [Figure("of a forward", 1, "", 0, verdict=SLOW), first]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return [Figure("of a forward", 0, "", 0, verdict=SLOW)]


def compiled(bench: Bench) -> Measured:
    """Blocks compiled as --compile does: graphs, another length, error, milliseconds."""
    of = case(bench)
    eager, fast = network(bench, of), network(bench, of)
    for block in fast.blocks:
        block.compile()
    f, h, w = of.request.grid
    grids = [(f, h, w), (f, h - 1, w), (f - 1, h, w)]
    counters.clear()
    for number, grid in enumerate(grids):
        given = inputs(bench, of, grid)
        taken = common.seconds(partial(given.call, fast), bench.place)
        far = apart(given.call(fast), given.call(eager))
        yield line(
            f"{prod(grid)} tokens",
            error(far, COMPILED_LIMIT, "error against eager"),
            Figure("first call", taken, "s"),
            Figure("graphs so far", counters["stats"]["unique_graphs"]),
        )
        if number == 0:
            times = [bench.seconds(partial(given.call, model)) for model in (eager, fast)]
            yield line(
                "time",
                milliseconds(times[1] / LAYERS, "a layer"),
                Figure("times eager", times[1] / times[0]),
            )
    # One for a block's first length, and one for all others.
    breaks = sum(counters["graph_break"].values())
    graphs = counters["stats"]["unique_graphs"]
    yield line(
        "graphs",
        Figure("in all", graphs, "", 2, verdict=SLOW),
        Figure("breaks", breaks, "", 0, verdict=SLOW),
    )
