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

from tests.conftest import Tiny
from tests.dist import REPO, run_on_ranks
from tests.distributed.topology import Topology
from tests.npu_sim import oracles
from tests.npu_sim.latents import SMALL, WAYS, arguments, composed, latents
from tests.npu_sim.oracles import far
from tests.npu_sim.ranks import KINDS, Grid, Kind, arranged, layer_of, step_info
from tests.npu_sim.ranks import composed as parts_of
from wan.kernels.base import StepInfo
from wan.modules.model import WanModel
from wan.settings.attention import Attention
from wan.settings.attention_modes import TokenPlan

pytestmark = pytest.mark.dist


class Theirs:
    """mindiesd.sparse_attention as self-attention of a network with tokens in raster order."""

    def __init__(self, kind: Kind, grid: Grid) -> None:
        self.kind, self.grid = kind, grid

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /, **_: Any) -> Tensor:
        return oracles.rainfusion(self.kind, q, k, v, self.grid).to(q.dtype)


def velocity(network: WanModel, grid: Grid) -> Tensor:
    frames, height, width = grid
    x = oracles.made(16, frames, 2 * height, 2 * width, dtype=torch.float32)
    text = oracles.made(9, 64, seed=1, dtype=torch.float32)
    step = StepInfo(1, 2, "cond", "high_noise", grid, prod(grid))
    with torch.inference_mode():
        return network([x], torch.tensor([900.0]), [text], prod(grid), step=step)[0]


def sparse_steps(rig: Path, name: str, frames: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return the errors of a sparse step against mindiesd and dense, per number of frames."""
    way, kind, found = WAYS[name], KINDS["v3-A5" if name == "v3" else name], []
    ours = composed(arguments(rig, way), way.chip)[1].experts.load_editable("high_noise")
    plain = composed(arguments(rig, WAYS["dense"]), way.chip)[1].experts.load_editable("high_noise")
    for count in frames:
        grid = (count, 11, 13)
        dense = velocity(plain, grid)
        with mock.patch.object(plain.blocks[0].self_attn, "attention", Theirs(kind, grid)):
            theirs = velocity(plain, grid)
        out = velocity(ours, grid)
        found.append((far(out, theirs), far(out, dense)))
    return found


@pytest.mark.parametrize("name", ["v2", "v3", "v3-fp8"])
def test_a_sparse_step_of_a_network_is_that_of_mindiesd(name: str, rig: Path) -> None:
    """Built from the command line, with even and odd numbers of latent frames in turn.

    mindiesd's class for v2 needs an odd number.
    """
    found = run_on_ranks(1, sparse_steps, rig, name, (3, 4, 2))[0]
    assert all(error < 1e-3 < effect for error, effect in found), found


def dense_steps_of_laser() -> set[str]:
    import torch_npu

    rain = Attention(attention_algo="laser", use_rainfusion=True, sparse_start_step=4)
    kind, grid = Kind("v2-before", "laser", "A2", rain), (4, 16, 32)
    chosen = parts_of(kind)
    torch_npu.calls.clear()
    layer = layer_of(Topology(1, 1), "0", chosen)
    layer(*arranged(chosen, 1, grid), valid_len=prod(grid), step=step_info(kind, grid), layer=0)
    return {call.name for call in torch_npu.calls}


def test_dense_steps_before_rainfusion_take_the_kernel_asked_for() -> None:
    assert run_on_ranks(1, dense_steps_of_laser) == [{"mindiesd.la"}]
    # the fused kernel is tested in test_event_order


def two_shapes(argv: list[str], sizes: list[tuple[str, ...]]) -> list[Tensor]:
    """Make latents of all sizes with one pipeline, then with a new pipeline for each size."""
    requests = [composed([*argv, *size], "A2")[0].params for size in sizes]
    pipeline = composed([*argv, *sizes[0]], "A2")[1]
    together = [pipeline.generate_latents(request) for request in requests]
    return [*together, *(latents([*argv, *size], "A2") for size in sizes)]


@pytest.mark.parametrize("task", ["ti2v-5B", "t2v-A14B"])
def test_a_second_video_of_another_shape(task: str, tiny: Tiny) -> None:
    argv = ["--task", task, "--ckpt_dir", str(tiny(task)), "--device", "npu"]
    argv += ["--sample_steps", "2", "--base_seed", "7"]
    sizes = [("--size", "64*96", "--frame_num", "5"), ("--size", "96*64", "--frame_num", "9")]
    first, second, fresh, other = run_on_ranks(1, two_shapes, argv, sizes)[0]
    assert torch.equal(first, fresh) and torch.equal(second, other)


@contextmanager
def traced(seen: set[str]) -> Iterator[None]:
    """Record constructor calls of wan and of streams, and reads of the environment by wan."""

    def look(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call":
            return
        file = Path(code.co_filename)
        ours = file.is_relative_to(REPO / "wan") or file.name == "npu.py"
        if ours and code.co_name == "__init__":
            seen.add(code.co_qualname)
        asks = caller is not None and Path(caller.f_code.co_filename).is_relative_to(REPO / "wan")
        if asks and (code.co_name == "getenv" or code.co_qualname.startswith("_Environ")):
            seen.add(f"{code.co_qualname} by {caller.f_code.co_qualname}")  # type: ignore[union-attr]

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def made_in_a_call(name: str, mode: str) -> set[str]:
    """Collect constructors in the second call of a layer; the first one may move rotations."""
    kind, grid, seen = KINDS[name], (4, 16, 16), set()
    chosen = parts_of(kind)
    layer = layer_of(Topology(2, 2), mode, chosen)
    plan = TokenPlan(prod(grid), 4, kind.attention.row_multiple(2))
    own = [x[:, : plan.shard_len] for x in arranged(chosen, 4, grid)]
    for recorded in (set(), seen):
        with traced(recorded):
            layer(*own, valid_len=prod(grid), step=step_info(kind, grid), layer=0)
    return seen


@pytest.mark.parametrize("name", ["dense", "fp8-transport", "v2", "v3-fp8"])
def test_a_call_makes_no_group_stream_or_kernel(name: str) -> None:
    """A call makes only exchanges, send buffers and a merger; it reads no environment."""
    made = {"PendingExchange.__init__", "PackedBuffer.__init__"}
    made |= {"LseMerger.__init__"} if name == "dense" else set()
    for mode in ("0", "overlap"):
        assert run_on_ranks(4, made_in_a_call, name, mode) == [made] * 4, mode


def on_a_lonely_ring(argv: list[str]) -> tuple[Tensor, list[tuple[int, ...]]]:
    import torch_npu

    torch_npu.calls.clear()
    found = latents(argv, "A2")
    return found, [c.shapes[0] for c in torch_npu.calls if c.name == "npu_fusion_attention"]


def test_a_ring_without_ulysses_shares_the_tokens(rig: Path) -> None:
    """429 tokens on two ranks: 215 and 214 rows of queries each, against both ranks' keys."""
    argv = arguments(rig, WAYS["dense"])
    assert WAYS["dense"].size == SMALL
    shared = run_on_ranks(2, on_a_lonely_ring, [*argv, "--ulysses_size", "1", "--ring_size", "2"])
    assert far(shared[0][0], run_on_ranks(1, latents, argv, "A2")[0]) < 1e-2
    for (_, shapes), rows in zip(shared, (215, 214), strict=True):
        text, block = shapes[-1][1], {shape[1] for shape in shapes[:2]}
        assert block == {rows} and text == 215
