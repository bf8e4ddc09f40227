"""Defects of the existing Ascend adaptation of Wan2.2 that no other test covers.

Legend: B batch, S all tokens, N heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.dist import REPO, run_on_ranks
from tests.distributed.topology import Topology
from tests.npu_sim import oracles
from tests.npu_sim.latents import WAYS, build_run, make_arguments
from tests.npu_sim.oracles import relative_rms_error
from tests.npu_sim.ranks import KINDS, Grid, Kind, make_layer, make_ordered_qkv, make_step_info
from tests.npu_sim.ranks import select_kernels_for as parts_of
from wan.kernels.forward_context import StepInfo
from wan.modules.interfaces import TensorCall
from wan.modules.model import WanModel
from wan.settings.attention import Attention
from wan.settings.attention_modes import TokenPlan

pytestmark = pytest.mark.dist


class MindiesdSparseAttention:
    """mindiesd.sparse_attention as self-attention of a network with tokens in raster order."""

    def __init__(self, kind: Kind, grid: Grid) -> None:
        self.kind, self.grid = kind, grid

    def start(self, *_: Any, **__: Any) -> TensorCall:
        return TensorCall(self._attend)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracles.compute_rainfusion(self.kind, q, k, v, self.grid).to(q.dtype)


def velocity(network: WanModel, grid: Grid) -> Tensor:
    frames, height, width = grid
    x = oracles.make_random(16, frames, 2 * height, 2 * width, dtype=torch.float32)
    text = oracles.make_random(9, 64, seed=1, dtype=torch.float32)
    step = StepInfo(1, 2, "cond", "high_noise", grid, prod(grid))
    with torch.inference_mode():
        return network([x], torch.tensor([900.0]), [text], prod(grid), step=step)[0]


def compare_sparse_steps(
    rig: Path, name: str, frames: tuple[int, ...]
) -> list[tuple[float, float]]:
    """Return the errors of a sparse step against mindiesd and dense, per number of frames."""
    way, kind, errors = WAYS[name], KINDS["v3-A5" if name == "v3" else name], []
    wan_model = build_run(make_arguments(rig, way), way.chip)[1].experts.load_editable("high_noise")
    plain = build_run(make_arguments(rig, WAYS["dense"]), way.chip)[1].experts.load_editable(
        "high_noise"
    )
    for count in frames:
        grid = (count, 11, 13)
        dense = velocity(plain, grid)
        with mock.patch.object(
            plain.blocks[0].self_attn, "attention", MindiesdSparseAttention(kind, grid)
        ):
            expected = velocity(plain, grid)
        out = velocity(wan_model, grid)
        errors.append((relative_rms_error(out, expected), relative_rms_error(out, dense)))
    return errors


@pytest.mark.parametrize("name", ["v2", "v3", "v3-fp8"])
def test_a_sparse_step_of_a_network_is_that_of_mindiesd(name: str, rig: Path) -> None:
    """Built from the command line, with even and odd numbers of latent frames in turn.

    mindiesd's class for v2 needs an odd number.
    """
    errors = run_on_ranks(1, compare_sparse_steps, rig, name, (3, 4, 2))[0]
    assert all(error < 1e-3 < effect for error, effect in errors), errors


def record_dense_steps_of_laser() -> set[str]:
    import torch_npu

    rain = Attention(attention_backend="laser", use_rainfusion=True, sparse_start_step=4)
    kind, grid = Kind("v2-before", "laser", "A2", rain), (4, 16, 32)
    kernels = parts_of(kind)
    torch_npu.calls.clear()
    layer = make_layer(Topology(1, 1), "0", kernels)
    layer(
        *make_ordered_qkv(kernels, 1, grid),
        valid_len=prod(grid),
        step=make_step_info(kind, grid),
        layer=0,
    )
    return {call.name for call in torch_npu.calls}


def test_dense_steps_before_rainfusion_use_the_selected_kernel() -> None:
    assert run_on_ranks(1, record_dense_steps_of_laser) == [{"mindiesd.la"}]
    # the fused kernel is tested in test_event_order


@contextmanager
def record_constructors(traced_calls: set[str]) -> Iterator[None]:
    """Record constructor calls of wan and of streams, and reads of the environment by wan."""

    def record_call(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call":
            return
        file = Path(code.co_filename)
        is_wan_code = file.is_relative_to(REPO / "wan") or file.name == "npu.py"
        if is_wan_code and code.co_name == "__init__":
            traced_calls.add(code.co_qualname)
        is_called_by_wan = caller is not None and Path(caller.f_code.co_filename).is_relative_to(
            REPO / "wan"
        )
        if is_called_by_wan and (
            code.co_name == "getenv" or code.co_qualname.startswith("_Environ")
        ):
            traced_calls.add(f"{code.co_qualname} by {caller.f_code.co_qualname}")  # type: ignore[union-attr]

    sys.setprofile(record_call)
    try:
        yield
    finally:
        sys.setprofile(None)


def collect_constructors(name: str, mode: str) -> set[str]:
    """Collect constructors in the second call of a layer; the first one may move rotations."""
    kind, grid, second_calls = KINDS[name], (2, 16, 16), set()
    kernels = parts_of(kind)
    layer = make_layer(Topology(2, 2), mode, kernels)
    plan = TokenPlan(prod(grid), 4, kind.attention.row_multiple(2))
    local_qkv = [x[:, : plan.shard_len] for x in make_ordered_qkv(kernels, 4, grid)]
    for constructors in (set(), second_calls):
        with record_constructors(constructors):
            layer(*local_qkv, valid_len=prod(grid), step=make_step_info(kind, grid), layer=0)
    return second_calls


@pytest.mark.parametrize("name", ["dense", "v3-fp8"])
def test_a_call_makes_no_group_stream_or_kernel(name: str) -> None:
    """A call makes only exchanges, send buffers and a merger; it reads no environment."""
    constructors = {"PendingExchange.__init__", "PackedBuffer.__init__"}
    constructors |= {"LseMerger.__init__"} if name == "dense" else set()
    assert run_on_ranks(4, collect_constructors, name, "overlap") == [constructors] * 4
