"""FP8 and RainFusion on every layout of ranks: all modes have the bits of one process.

Legend: B batch, S all tokens, N heads, D head size. Padding that is not exchanged holds NaN,
so a result computed from padding is NaN too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import Tiny
from tests.dist import run_on_ranks
from tests.distributed.methods import KINDS, Kind, attend_whole_sequence, make_methods
from tests.distributed.topology import (
    ROWS,
    Topology,
    attention_layer,
    check_on_ranks,
    collect_failures,
    shard,
    topologies,
)
from wan.checkpoint.layout import inspect_checkpoint
from wan.device import select_device
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import AttendRows, AttentionInput
from wan.pipeline import build
from wan.pipeline.setup import Setup
from wan.settings.attention import Attention
from wan.settings.attention_modes import TokenPlan
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.settings.presets import PRESETS

pytestmark = pytest.mark.dist

Case = tuple[Topology, Kind, int, tuple[int, int, int], str]
"""(ranks, kind, heads, grid, dtype)."""

HEADS = (12, 24, 40)
GRIDS = ((3, 16, 10), (2, 8, 16), (5, 11, 13))  # windows with a rest; windows only, 2 blocks; odd
DTYPES = ("float32", "bfloat16")
HEAD_DIM = 16


@lru_cache(4)
def make_qkv(heads: int, tokens: int, dtype: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(heads * tokens)
    shape = (3, 1, tokens, heads, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).unbind(0)


def make_step_info(grid: tuple[int, int, int], index: int = 3) -> StepInfo:
    return StepInfo(index, 8, "cond", "dit", grid, prod(grid))


def run_attention(case: Case, mode: str) -> Tensor:
    """Return this rank's rows of the result."""
    topology, kind, heads, grid, dtype = case
    plan = TokenPlan(prod(grid), topology.world, kind.multiple)
    methods = make_methods(kind, getattr(torch, dtype))
    layer = attention_layer(topology, mode, methods=methods)
    local_qkv = [shard(x, plan, torch.nan) for x in make_qkv(heads, prod(grid), dtype)]
    return layer(*local_qkv, valid_len=prod(grid), step=make_step_info(grid), layer=0)


def compare_modes(case: Case, expected: Tensor) -> None:
    topology, kind, _, grid, dtype = case
    plan = TokenPlan(prod(grid), topology.world, kind.multiple)
    out = {mode: run_attention(case, mode) for mode in ROWS}
    local_expected = shard(expected, plan, 0)
    error = (out["0"].float() - local_expected.float()).abs().max()
    limit = 2e-5 if dtype == "float32" else 2**-7 * expected.float().abs().max()
    assert error <= limit, f"mode 0 is off by {error} at {case}"
    for mode, output in out.items():
        rows = plan.count_valid_tokens(dist.get_rank())
        assert output.dtype == local_expected.dtype and not output[:, rows:].any(), (
            f"mode {mode} at {case}"
        )
        assert torch.equal(output, out["0"]), f"mode {mode} has other bits at {case}"


def compute_reference(case: Case) -> Tensor:
    """Run the backend on the full sequence in one process, without padding or chunks."""
    _, kind, heads, grid, dtype = case
    q, k, v = make_qkv(heads, prod(grid), dtype)
    return attend_whole_sequence(kind, q, k, v, grid)


def list_pairwise_cases() -> list[Case]:
    """List every layout of up to 4 ranks with every kind; heads, grids and dtypes take turns."""
    return [
        (
            topology,
            kind,
            (2, 3, 12)[(i + j) % 3] * topology.ulysses,
            GRIDS[(i + j // 2) % 3],
            DTYPES[(i + j // 3) % 2],
        )
        for i, topology in enumerate(topologies(1, 2, 4))
        for j, kind in enumerate(KINDS)
        if not (kind.transport and topology.ulysses == 1)
    ]


def find_differences(cases: Sequence[Case], expected: Sequence[Tensor]) -> dict[str, str]:
    """On one rank: map each failing case to its error message."""
    outputs = dict(zip(cases, expected, strict=True))
    return collect_failures(cases, lambda case: compare_modes(case, outputs[case]))


def check_cases(cases: Sequence[Case]) -> None:
    check_on_ranks(find_differences, cases, list(map(compute_reference, cases)))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_selected_combinations(world: int) -> None:
    check_cases([case for case in list_pairwise_cases()[1::4] if case[0].world == world])


@pytest.mark.slow
@pytest.mark.parametrize("topology", topologies(1, 2, 4, 8), ids=str)
def test_all_combinations(topology: Topology) -> None:
    """All combinations, a superset of those above."""
    heads = [h for h in HEADS if h % topology.ulysses == 0]
    for kind in KINDS:
        if not (kind.transport and topology.ulysses == 1):
            check_cases([(topology, kind, *sizes) for sizes in product(heads, GRIDS, DTYPES)])


def compare_modes_over_steps(kind: Kind) -> None:
    """Run the layer over several steps and branches: cached masks must not differ by mode."""
    grid = GRIDS[0]
    topology = Topology(2, 1)
    plan = TokenPlan(prod(grid), 2, kind.multiple)
    layers = {
        m: attention_layer(topology, m, methods=make_methods(kind, torch.float32)) for m in ROWS
    }
    for index in range(6):
        for branch in ("cond", "uncond"):
            local_qkv = [
                shard(x * (1 + 0.1 * index), plan, 0) for x in make_qkv(12, prod(grid), "float32")
            ]
            info = StepInfo(index, 6, branch, "dit", grid, prod(grid))
            outputs = [
                layer(*local_qkv, valid_len=prod(grid), step=info, layer=1)
                for layer in layers.values()
            ]
            for other in outputs[1:]:
                assert torch.equal(outputs[0], other), (index, branch)


@pytest.mark.slow
def test_masks_kept_over_steps_do_not_depend_on_the_mode() -> None:
    for kind in ("v2", "v3"):
        run_on_ranks(2, compare_modes_over_steps, Kind(kind, start=1, refresh=3))


def compute_alone(folder: Path) -> bool:
    """Only one of two ranks runs a model: an exchange would wait for the other without end."""
    if dist.get_rank():
        return True
    execution, fp8 = Execution(device="cpu"), Attention(fa_quant="fp8")
    setup = Setup(PRESETS["t2v-1.3B"], inspect_checkpoint(folder), execution, Parallel(), fp8)
    net = build.build_pipeline(setup, select_device("cpu")).experts.get("dit")
    x, context = torch.randn(net.in_dim, 2, 4, 8), torch.randn(5, net.text_dim)
    with torch.inference_mode():
        (velocity,) = net([x], torch.tensor([500.0]), [context], 16)
    return bool(velocity.isfinite().all())


def test_a_process_that_shares_nothing_exchanges_nothing(tiny: Tiny) -> None:
    assert run_on_ranks(2, compute_alone, tiny("t2v-1.3B")) == [True] * 2


class PositionCheckingBackend:
    """A backend that checks positions: each value is its row + 1 / 64 of its head.

    Attributes:
        checks: Whether the step's heads, rows and layer match the tensors, for each call.
    """

    name, q_multiple, always_applies, quantizes_before_exchange = "places", 1, False, True

    def __init__(self) -> None:
        self.checks: list[bool] = []

    def applies_to(self, step: StepInfo | None) -> bool:
        return step is not None and step.index == 3

    def quantize(
        self, q: Tensor, k: Tensor, v: Tensor, valid: int, step: StepInfo | None
    ) -> tuple[AttentionInput, AttentionInput, AttentionInput]:
        """Check that the first `valid` rows are finite and the padding rows are NaN."""
        for x in (q, k, v):
            self.checks.append(not x[:, :valid].isnan().any() and bool(x[:, valid:].isnan().all()))
        return AttentionInput(q), AttentionInput(k), AttentionInput(v)

    def prepare_kv(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, step: StepInfo | None
    ) -> AttendRows:
        assert step is not None
        heads, rows = q.values.shape[2], q.values.shape[1]
        head_ids = torch.arange(step.first_head, step.first_head + heads)
        expected = torch.arange(step.first_row, step.first_row + rows)[:, None] + head_ids / 64
        self.checks += [step.layer == 5, torch.equal(q.values[0, ..., 0], expected)]
        expected = torch.arange(step.valid_len)[:, None] + head_ids / 64
        self.checks += [torch.equal(x.values[0, ..., 0], expected) for x in (k, v)]
        return lambda block, first: (
            block.values
            + torch.equal(
                block.values[0, :, 0, 0] - head_ids[0] / 64,
                torch.arange(first, first + block.values.shape[1]) + float(step.first_row),
            )
        )


def check_positions(topology: Topology, tokens: int) -> list[bool]:
    heads, step_info = 5, StepInfo(3, 8, "cond", "dit", (1, 1, 1), tokens)
    rows = torch.arange(tokens)[:, None] + torch.arange(heads) / 64
    plan = TokenPlan(tokens, topology.world, 1)
    local_values = shard(rows[None, ..., None].expand(1, -1, -1, 4), plan, torch.nan)
    checks, valid = list[bool](), plan.count_valid_tokens(dist.get_rank())
    for mode, exchange in product(ROWS, ("split", "fused")):
        method = PositionCheckingBackend()
        layer = attention_layer(topology, mode, methods=[method], exchange=exchange)
        layer.layer = 5
        out = layer(local_values, local_values, local_values, valid_len=tokens, step=step_info)
        checks += [*method.checks, torch.equal(out[:, :valid], local_values[:, :valid] + 1)]
    return checks


def test_a_backend_gets_the_right_heads_and_rows() -> None:
    """First row, first head and layer of each call in every mode; the last rank has padding."""
    for topology in (Topology(2, 1), Topology(1, 2), Topology(2, 2)):
        for checks in run_on_ranks(topology.world, check_positions, topology, 13):
            assert len(checks) > 40 and all(checks), topology
