"""The plan's formulas: against numbers worked out by hand, and against the code they describe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from wan.cli import flags, planned
from wan.cli import planned as machine
from wan.distributed.ring import RING_TYPES, hops
from wan.modules.model import WanModel
from wan.planner.forward import Forward
from wan.planner.network import Network, text_bytes, weights
from wan.planner.planner import T5_BYTES, T5_TABLE, Planner
from wan.planner.report import check, lines, topologies
from wan.planner.ways import ring_blocks
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32
from wan.settings.parallel import Parallel

A14B = Network(5120, 13824, 40, 40, 16, 16)
EIGHT = Parallel(8, 1, 1, 8)
TOKENS = 75600  # 21 x 45 x 80: 81 frames of 1280*720
VOXELS = 4 * TOKENS
HD720 = ["--plan", "--task", "t2v-A14B", "--size", "1280*720", "--frame_num", "81"]


def forward(parallel: Parallel, net: Network = A14B, tokens: int = TOKENS, e: int = 2) -> Forward:
    return Forward(net, tokens, VOXELS, parallel, e)


def part(planned_forward: Forward, moment: str, name: str) -> int:
    moments = {found.name: dict(found.parts) for found in planned_forward.moments()}
    return moments[moment][name]


def planner(*argv: str) -> Planner:
    return Planner(planned.resolve(flags.parse([*HD720, *argv])))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(planned, "gpu_memory", lambda: None)
    monkeypatch.chdir(tmp_path)  # no ./Wan2.2-... here


def test_tokens_and_exchanges_of_the_real_model() -> None:
    f = forward(replace(EIGHT, comm_type=1))
    assert (f.plan.shard_len, f.plan.padded, f.chunk(1).rows) == (9450, 75600, 75600)
    assert f.chunks == (1, 1, 1, 1, 1)
    assert f.chunk(1).tensor == 19_353_600  # 75600 rows x 1 head x 128 x 2 bytes
    assert f.exchanged() == 20 * 19_353_600
    assert f.chunk(1).sent == 3 * 19_353_600


@pytest.mark.parametrize(
    ("parallel", "name", "size"),
    [
        # 3 exchanged tensors and the result of one head, and 75600 float32 log-sum-exps
        (replace(EIGHT, comm_type=1), "exchange buffers and chunk", 4 * 19_353_600 + 302_400),
        # the two blocks' results and their join
        (replace(EIGHT, comm_type=2), "exchange buffers and chunk", 5 * 19_353_600 + 302_400),
        # all five heads at once
        (EIGHT, "exchange buffers and chunk", 5 * (4 * 19_353_600 + 302_400)),
        # the next chunk sent and received, the last one's result sent and received
        (
            replace(EIGHT, fa_alltoall_overlap=True),
            "exchange buffers and chunk",
            12 * 19_353_600 + 302_400,
        ),
        (EIGHT, "q, k, v", 3 * 9450 * 5120 * 2),
        (EIGHT, "residual stream", 9450 * 5120 * 4),
        (EIGHT, "positions", 2 * 9450 * 128 * 4),
        (EIGHT, "latents", 16 * 21 * 90 * 160 * 4),
        # made when the first chunk is back; the baseline has no other
        (EIGHT, "attention result", 0),
        (replace(EIGHT, comm_type=1), "attention result", 9450 * 5120 * 2),
    ],
)
def test_what_lives_during_attention(parallel: Parallel, name: str, size: int) -> None:
    assert part(forward(parallel), "self-attention", name) == size


def test_what_lives_elsewhere() -> None:
    f = forward(EIGHT)
    assert part(f, "feed-forward", "FFN hidden") == 9450 * 13824 * 2
    assert part(f, "patch embedding", "own tokens") == 9450 * 5120 * 6
    assert part(f, "patch embedding", "patches") == (75600 * 4 + 9450 * 2) * 64
    assert part(f, "gathered head output", "head output") == (9450 + 2 * 75600) * 64 * 4
    assert f.peak().name == "self-attention"
    stream = 9450 * 5120
    parts = 4 * stream + 4 * 2 * stream + 4 * 2 * stream + 9450 * 40 * 4  # residual, qkv, chunk
    assert f.peak().total == 19_353_600 + 9_676_800 + parts


def test_a_ring_of_two() -> None:
    f = forward(Parallel(8, 1, 2, 4, comm_type=1))
    block = 37800 * 128 * 2  # a chunk is one head; each card of the ring attends from half
    assert f.chunks == (1,) * 10
    assert f.chunk(1).hop == 2 * block
    # q, k, v; the other card's K/V; float32 sum, new part, its upcast and difference; statistics
    work = 3 * block + 2 * block + 37800 * 128 * (4 + 2 + 4 + 4) + 37800 * 40
    assert part(f, "self-attention", "exchange buffers and chunk") == work


def test_padding_is_joined() -> None:
    assert forward(EIGHT, tokens=75601).plan.shard_len == 9451
    padded = part(forward(EIGHT, tokens=75601), "self-attention", "exchange buffers and chunk")
    tensor = 8 * 9451 * 5 * 128 * 2
    assert padded == 5 * tensor + 8 * 9451 * 5 * 4


def test_one_card_exchanges_nothing() -> None:
    f = forward(Parallel())
    assert (f.exchanged(), f.chunks) == (0, (40,))
    assert part(f, "patch embedding", "patches") == 75600 * 64 * (4 + 2)


@pytest.mark.parametrize("ring_type", RING_TYPES)
@pytest.mark.parametrize("size", range(2, 10))
def test_ring_blocks_in_memory_are_those_of_the_ring(ring_type: str, size: int) -> None:
    most = 0
    for rank in range(size):
        counts = [0, *(len(hop.receives) for hop in hops(ring_type, rank, size)), 0]
        most = max(most, *(a + b for a, b in zip(counts, counts[1:], strict=False)))
    assert ring_blocks(Parallel(size, 1, size, 1, ring_type=ring_type)) == most


@pytest.mark.parametrize(
    ("kind", "net"),
    [
        ("t2v", A14B),
        ("i2v", replace(A14B, in_dim=36)),
        ("ti2v", Network(3072, 14336, 24, 30, 48, 48)),
        ("t2v", Network(1536, 8960, 12, 30, 16, 16)),
    ],
)
def test_weights_are_the_models(kind: str, net: Network) -> None:
    with torch.device("meta"):
        model = WanModel(
            kind,
            in_dim=net.in_dim,
            dim=net.dim,
            ffn_dim=net.ffn_dim,
            out_dim=net.out_dim,
            num_heads=net.heads,
            num_layers=net.layers,
        )
    real = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert net.shapes() == real
    count = {name: p.numel() for name, p in model.named_parameters()}
    bytes_ = sum(n * (4 if keeps_fp32(name) else 2) for name, n in count.items())
    assert weights(real, 2, convert_all=False, cards=1).whole == bytes_
    assert weights(real, 2, convert_all=True, cards=1).whole == 2 * sum(count.values())
    assert weights(real, 4, convert_all=False, cards=1).gathered == 0


def test_cut_weights_round_rows_up() -> None:
    shapes = {"blocks.0.ffn.0.weight": (10, 3), "blocks.1.ffn.0.weight": (8, 3), "a.weight": (5,)}
    cut = weights(shapes, 2, convert_all=False, cards=4)
    assert cut.whole == 2 * (30 + 24 + 5)
    assert cut.share == 2 * (3 * 3 + 2 * 3 + 2)
    assert cut.gathered == cut.whole  # two blocks and what is outside: all there is


def test_text() -> None:
    assert text_bytes(A14B, 2, contexts=1, cached=True) == 512 * 5120 * 2 * 81
    assert text_bytes(A14B, 2, contexts=2, cached=True) == 2 * 512 * 5120 * 2 * 81
    assert text_bytes(A14B, 2, contexts=2, cached=False) == 512 * 5120 * 2 * 5


def test_text_encoder_as_published() -> None:
    table, dim, ffn, layers, heads = 256384 * 4096, 4096, 10240, 24, 64
    layer = 4 * dim * dim + 3 * dim * ffn + 2 * dim + 32 * heads
    assert 2 * (table + layers * layer + dim) == T5_BYTES
    assert 2 * table == T5_TABLE


def test_the_fullest_card_of_eight() -> None:
    plan = planner("--ulysses_size", "8", "--comm_type", "1", "--offload_model", "false")
    card = plan.card(plan.planned.parallel)
    one = weights(A14B.shapes(), 2, convert_all=False, cards=1).whole
    prompts = 4 * 512 * 5120 * 2 * 81 + 2 * 512 * 4096 * 2  # two prompts, two networks
    assert card.total == T5_BYTES + 2 * one + prompts + 6 * 19_353_600 + card.forward.total
    offloaded = plan.card(plan.planned.parallel, offload=True)
    assert offloaded.total == one + prompts - 2 * 512 * 5120 * 2 * 81 + 6 * 19_353_600 + (
        card.forward.total
    )


def test_the_text_encoder_can_be_the_most() -> None:
    plan = planner("--task", "t2v-1.3B", "--size", "832*480", "--frame_num", "5")
    card = plan.card(plan.planned.parallel)
    assert card.denoising < card.total == T5_BYTES


def test_refusal_names_flags_where_no_topology_helps() -> None:
    plan = planner("--ulysses_size", "8", "--device_memory", "64", "--offload_model", "false")
    with pytest.raises(InputError) as refused:
        check(plan)
    assert str(refused.value) == (
        "The run needs 72.09 GB on its fullest card, and a card has 64.00 GB; no topology of up to "
        "64 cards fits by itself; the same topology fits with --offload_model true (30.92 GB)."
    )


def test_refusal_names_the_nearest_topology() -> None:
    """A card short by what sharing the tokens saves; default offloading ends with one card."""
    with pytest.raises(InputError) as refused:
        check(planner("--device_memory", "34"))
    assert str(refused.value) == (
        "The run needs 35.45 GB on its fullest card, and a card has 34.00 GB; the nearest topology "
        "that fits is --ring_size 1 --ulysses_size 2 on 2 cards (33.86 GB)."
    )


def test_refusal_names_topology_and_flags_where_only_both_help() -> None:
    with pytest.raises(InputError, match="no topology of up to 8 cards fits by itself") as refused:
        check(planner("--device_memory", "25"))
    assert "--dit_fsdp --t5_fsdp on 2 cards" in str(refused.value)


def test_refusal_of_what_nothing_helps() -> None:
    with pytest.raises(InputError, match="choose a smaller --size or --frame_num"):
        check(planner("--device_memory", "2"))


def test_same_cards_come_first_and_only_what_is_legal() -> None:
    plan = planner("--ring_size", "4", "--ulysses_size", "2", "--comm_type", "1")
    found = [
        (p.cfg_size, p.ring_size, p.ulysses_size)
        for p in topologies(plan, plan.planned.parallel)
        if p.world_size == 8
    ]
    assert found == [(1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2)]  # never ulysses 1
    assert [p.world_size for p in topologies(plan, plan.planned.parallel)] == sorted(
        p.world_size for p in topologies(plan, plan.planned.parallel)
    )


def test_a_topology_on_the_same_cards_is_found() -> None:
    """fp32, a ring of eight: attention over all heads does not fit, exchanging heads does."""
    argv = ("--precision", "fp32", "--offload_model", "true", "--t5_cpu")
    ring = planner(*argv, "--ring_size", "8", "--ulysses_size", "1")
    best = min(
        ring.card(p).total for p in topologies(ring, ring.planned.parallel) if p.world_size == 8
    )
    need = ring.card(ring.planned.parallel).total
    assert best < need
    memory = f"{(best + need) / 2e9}"
    tight = planner(*argv, "--ring_size", "8", "--ulysses_size", "1", "--device_memory", memory)
    with pytest.raises(InputError, match=r"fits is --ring_size \d .* on 8 cards"):
        check(tight)


def test_the_smallest_gpu_counts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_memory() is None  # no such program
    program.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    program.chmod(0o755)
    assert machine.gpu_memory() == 81559 * 2**20
    program.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    assert machine.gpu_memory() is None


def test_what_the_plan_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(planner()).startswith("Not compared")
    monkeypatch.setattr(planned, "gpu_memory", lambda: 80 * 10**9)
    assert check(planner()) == "Fits: 35.45 GB of 80.00 GB per card."
    assert check(planner("--device", "cpu")).startswith("Not compared")
    assert planner("--device_memory", "64").planned.device_memory == 64 * 10**9


def test_guidance_decides_forwards_and_prompts() -> None:
    both, half = planner("--ulysses_size", "4"), planner("--cfg_size", "2", "--ulysses_size", "4")
    assert both.forwards_per_step(both.planned.parallel) == 2
    assert half.forwards_per_step(half.planned.parallel) == 1
    distilled = planner("--ulysses_size", "4", "--sample_guide_scale", "1")
    assert distilled.forwards_per_step(distilled.planned.parallel) == 1
    assert all(p.cfg_size == 1 for p in topologies(distilled, distilled.planned.parallel))


def test_lines() -> None:
    text = "\n".join(lines(planner("--ulysses_size", "8", "--comm_type", "1")))
    for fact in (
        "on 8 cards: cfg 1 x ring 1 x ulysses 8, InsertComm",
        "75600 + 0 padding, 9450 per card",
        "5 x 1 heads per card",
        "19.35 MB each, 20 per layer with 0.39 GB, 30.97 GB per step and card",
        "Memory of the fullest card: 30.71 GB",
        "not counted: the VAE",
    ):
        assert fact in text
    assert "Ring: 19.35 MB" in "\n".join(
        lines(planner("--ring_size", "2", "--ulysses_size", "4", "--comm_type", "1"))
    )
