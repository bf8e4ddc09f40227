"""WanModel predicts the same velocities on several ranks as in one process, in all modes.

In RainFusion's token order a model with sparsity 0 is the dense model, and a sparse one on ranks
is compared with the sparse one in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist import run_on_ranks
from tests.distributed.methods import make_small_methods
from tests.distributed.topology import ROWS, Topology, attention_layer, make_block_attention
from tests.refusals import check_refusals
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.forward_context import StepInfo
from wan.kernels.rainfusion_masks import make_window_order
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.vace import VaceWanModel
from wan.settings.attention_modes import MODES
from wan.settings.parallel import EXCHANGES

pytestmark = pytest.mark.dist

CHANNELS = {"t2v": 16, "i2v": 36, "ti2v": 48, "vace": 16}
TEXT_DIM = 16


@dataclass(frozen=True)
class Job:
    """The sizes and inputs of a model."""

    kind: str = "t2v"
    heads: int = 12
    grid: tuple[int, int, int] = (3, 5, 3)
    batch: int = 1
    contexts: tuple[int, ...] = (7,)
    text_len: int = 45
    text_cache: bool = False

    @property
    def tokens(self) -> int:
        return prod(self.grid)

    def model(self, attention: FAPowerCapAttention | None = None, **components: Any) -> WanModel:
        """Make the model, always with the same weights. components: fields of `ModelComponents`."""
        if attention is not None:
            components["attention"] = make_block_attention(attention)
        torch.manual_seed(0)
        net: WanModel = (VaceWanModel if self.kind == "vace" else WanModel)(
            model_type=self.kind,
            in_dim=CHANNELS[self.kind],
            out_dim=48 if self.kind == "ti2v" else 16,
            dim=8 * self.heads,
            ffn_dim=128,
            freq_dim=32,
            num_heads=self.heads,
            num_layers=2,
            text_dim=TEXT_DIM,
            text_len=self.text_len,
            **({"image_dim": 24, "image_positions": 20} if self.kind == "i2v" else {}),
            components=ModelComponents(text_kv_cache=self.text_cache, **components),
        )
        return net.eval().requires_grad_(False)

    def velocities(self, net: WanModel) -> list[Tensor]:
        """Run one step with each context, and a second one if text is cached.

        i2v has two images of ten tokens, to which every rank attends.
        """
        generator = torch.Generator().manual_seed(1)
        f, h, w = self.grid

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        x = [noise(48 if self.kind == "ti2v" else 16, f, 2 * h, 2 * w) for _ in range(self.batch)]
        y = [noise(20, f, 2 * h, 2 * w) for _ in x] if self.kind == "i2v" else None
        images = {"clip_fea": noise(2, 10, 24)} if y else {}
        control = [noise(96, f, 2 * h, 2 * w) for _ in x] if self.kind == "vace" else []
        prompts = [[noise(length, TEXT_DIM) for _ in x] for length in self.contexts]
        outputs = []
        for index, t in enumerate((900, 300) if self.text_cache else (900,)):
            for context in prompts:
                step = StepInfo(index, 2, "cond", "dit", self.grid, self.tokens)
                times = self._timesteps(t)
                if control:
                    outputs += net(x, times, control, context, self.tokens, step=step)
                else:
                    outputs += net(x, times, context, self.tokens, y, **images, step=step)
        return outputs

    def _timesteps(self, t: int) -> Tensor:
        """Return one timestep per sample; for ti2v one per token, 0 in the first frame."""
        if self.kind != "ti2v":
            return torch.tensor([t - 100 * i for i in range(self.batch)])
        _, h, w = self.grid
        return torch.full((self.batch, self.tokens), t).index_fill(1, torch.arange(h * w), 0)


Way = tuple[Topology, str, str]
"""(ranks, mode, exchange)."""
DENSE = ""


def make_components(attention: str, sparsity: float = 0.6) -> dict[str, Any]:
    """Make a rank's token order and backends. attention: DENSE, v3 or v3-fp8."""
    if attention == DENSE:
        return {"methods": (), "sequence_shard": ShardedSequence(None)}
    order = ShardedSequence(None, 128, make_window_order)
    return {"methods": make_small_methods(attention, sparsity), "sequence_shard": order}


@torch.inference_mode()
def compute_velocities(job: Job, ways: Sequence[Way], attention: str) -> dict[Way, Tensor]:
    """On one rank: return the velocities of each layout, mode and exchange."""
    results = {}
    for topology, mode, exchange in ways:
        components = make_components(attention)
        layer = attention_layer(
            topology, mode, methods=components.pop("methods"), exchange=exchange
        )
        results[topology, mode, exchange] = torch.stack(
            job.velocities(job.model(layer, **components))
        )
    return results


@torch.inference_mode()
def compute_alone(job: Job, attention: str = DENSE, sparsity: float = 0.6) -> Tensor:
    """In one process: return the velocities."""
    uncached = replace(job, text_cache=False)
    if attention == DENSE:
        return torch.stack(job.velocities(uncached.model()))
    methods = make_components(attention, sparsity)["methods"]
    layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=methods)
    order = ShardedSequence(None, 1, make_window_order)
    return torch.stack(job.velocities(uncached.model(layer, sequence_shard=order)))


def check_velocities(job: Job, ways: Sequence[Way], attention: str = DENSE) -> None:
    """Compare with one process, and bit for bit with the first way of the same layout.

    Dense attention in several query blocks rounds differently.
    """
    expected = compute_alone(job, attention)
    assert expected.abs().max() > 0.5, "a model that says nothing would always agree"
    firsts = {way[0]: way for way in reversed(ways)}
    for results in run_on_ranks(
        ways[0][0].world, compute_velocities, job, ways, attention, timeout=300
    ):
        errors = {way: float((x - expected).abs().max()) for way, x in results.items()}
        assert not {way: error for way, error in errors.items() if not error <= 2e-5}, job
        for way, x in results.items():
            may_differ = attention == DENSE and ROWS[way[1]].blocks > 1
            assert may_differ or x.equal(results[firsts[way[0]]]), (job, way)


JOBS = {
    "t2v": Job(contexts=(7, 45)),
    "t2v-cached-text": Job(contexts=(7, 45), text_cache=True),
    "t2v-batch": Job(batch=2),
    "t2v-no-padding": Job(grid=(2, 4, 3)),
    "i2v": Job("i2v"),
    "ti2v": Job("ti2v", text_cache=True),
    "ti2v-batch": Job("ti2v", batch=2),
    "vace": Job("vace", text_cache=True),
    "vace-batch": Job("vace", batch=2),
}
LAYOUTS = {
    2: [Topology(2, 1), Topology(1, 2)],
    3: [Topology(3, 1), Topology(1, 3, "bidirectional")],
    4: [Topology(4, 1), Topology(2, 2, "bidirectional"), Topology(1, 4, "ring")],
    8: [Topology(8, 1), Topology(2, 4), Topology(4, 2, "bidirectional")],
}


SPARSE_JOBS = {
    "t2v": Job(heads=4, grid=(3, 9, 10)),
    "i2v": Job("i2v", heads=4, grid=(2, 16, 8)),
    "ti2v": Job("ti2v", heads=4, grid=(3, 10, 9)),
    "vace": Job("vace", heads=4, grid=(3, 9, 10)),
    "vace-batch": Job("vace", heads=4, batch=2, grid=(2, 9, 17)),
    "ti2v-batch": Job("ti2v", heads=4, batch=2, grid=(2, 9, 17)),
}


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_velocities(world: int) -> None:
    """Every kind of model on 2 or 4 ranks, in mode 0 and one other mode; the batch of VACE."""
    for turn, (name, job) in enumerate(JOBS.items()):
        if name in ("t2v", "t2v-batch", "ti2v-batch"):
            continue
        ways = ("0", "split"), (["1", "2", "overlap"][turn % 3], EXCHANGES[turn % 2])
        if world == (4 if name in ("t2v-no-padding", "ti2v") else 2):
            layouts = [(layout, *way) for layout, way in product(LAYOUTS[world], ways)]
            check_velocities(replace(job, heads={2: 6, 4: 8}[world]), layouts)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_same_velocities_in_all_modes(world: int, job: Job) -> None:
    heads = 24 if world == 8 else job.heads
    check_velocities(replace(job, heads=heads), list(product(LAYOUTS[world], ROWS, EXCHANGES)))


@torch.inference_mode()
def test_nothing_left_out_is_the_dense_model() -> None:
    """With sparsity above 0 the result differs."""
    dense = {name: compute_alone(job) for name, job in SPARSE_JOBS.items()}
    errors = {
        name: float((compute_alone(job, "v3", 0) - dense[name]).abs().max())
        for name, job in SPARSE_JOBS.items()
    }
    assert not {name: error for name, error in errors.items() if not error <= 2e-5}
    assert (compute_alone(SPARSE_JOBS["t2v"], "v3") - dense["t2v"]).abs().max() > 1e-3


@torch.inference_mode()
def test_timesteps_of_single_tokens_follow_their_tokens() -> None:
    job = Job("ti2v", grid=(2, 9, 10))
    t = torch.full((1, job.tokens), 700).index_fill(1, torch.arange(3, job.tokens, 7), 0)
    x, context = torch.randn(48, 2, 18, 20), torch.randn(5, 16)
    methods = make_small_methods("v3", 0)
    layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=methods)
    ordered = job.model(layer, sequence_shard=ShardedSequence(None, 1, make_window_order))
    step = StepInfo(0, 2, "cond", "dit", job.grid, job.tokens)
    actual, dense = (
        net([x], t, [context], job.tokens, step=step)[0] for net in (ordered, job.model())
    )
    torch.testing.assert_close(actual, dense, atol=2e-5, rtol=0)


def test_the_token_order_of_the_last_grid_is_kept() -> None:
    """A service makes videos of many sizes."""
    orders = []

    def reverse(grid: tuple[int, int, int]) -> Tensor:
        order = torch.arange(prod(grid)).flip(0)
        orders.append(weakref.ref(order))
        return order

    sequence, x = ShardedSequence(None, 1, reverse), torch.randn(1, 6, 2)
    for grid in ((1, 2, 3), (1, 2, 3), (1, 3, 2), (1, 2, 3)):
        assert torch.equal(sequence.permute(x, grid), x.flip(1))
    assert [order() is None for order in orders] == [True, True, False]


def test_sparse_ranks_predict_what_one_process_does() -> None:
    """Kinds of models on both layouts in two modes; t2v in FP8 with each mode in one layout."""
    modes = [*ROWS]
    for turn, name in enumerate(("t2v", "vace-batch", "ti2v-batch")):
        both = modes[turn], modes[turn + 1]
        check_velocities(SPARSE_JOBS[name], list(product(LAYOUTS[2], both, ("split",))), "v3")
    fp8 = [(LAYOUTS[2][turn % 2], mode, "split") for turn, mode in enumerate(modes)]
    check_velocities(SPARSE_JOBS["t2v"], fp8, "v3-fp8")


@pytest.mark.slow
@pytest.mark.parametrize("job", SPARSE_JOBS.values(), ids=SPARSE_JOBS)
@pytest.mark.parametrize("world", [2, 4])
def test_sparse_ranks_in_all_modes(world: int, job: Job) -> None:
    check_velocities(job, list(product(LAYOUTS[world][:2], ROWS, ("split",))), "v3")


def test_three_ranks_and_the_official_text_length() -> None:
    """512 rows of text are no multiple of 3: they are never sharded."""
    job = Job(heads=24, contexts=(500,), text_len=512)
    check_velocities(job, list(product(LAYOUTS[3], ("0", "1"), ("split",))))


def test_ranks_that_hold_only_padding() -> None:
    """5 tokens on 4 ranks: 2, 2, 1 and none."""
    other_modes = {Topology(4, 1): "1", Topology(2, 2): "2", Topology(1, 4): "overlap"}
    ways = [
        (layout, mode, "split") for layout, other in other_modes.items() for mode in ("0", other)
    ]
    check_velocities(Job("ti2v", grid=(5, 1, 1)), ways)


@torch.inference_mode()
def call_twice() -> None:
    """A model's second run of a job has the bits of its first."""
    job = Job("ti2v", text_cache=True)
    layer = attention_layer(Topology(2, 1), "2")
    net = job.model(attention=layer, sequence_shard=ShardedSequence(None))
    first, second = (torch.stack(job.velocities(net)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_same_bits_every_time() -> None:
    run_on_ranks(2, call_twice)


def attend_with_one_head() -> list[str]:
    """On one rank: return the refusal of each mode."""
    messages = []
    for mode in ROWS:
        layer = attention_layer(Topology(2, 1), mode)
        with pytest.raises(ValueError) as refusal:
            layer(*torch.zeros(3, 1, 4, 1, 8))
        messages.append(str(refusal.value))
    return messages


def test_refusals_of_the_layer() -> None:
    args = SimpleNamespace(comm_type=1)
    arguments: dict[str, dict[str, Any]] = {"nothing": {}, "both": {"args": args, "comm_type": 1}}
    for value in (max(MODES) + 1, -1, "1", "nonsense", None):
        arguments[f"comm_type {value!r}"] = {"args": SimpleNamespace(comm_type=value)}
    messages = {}
    for name, keywords in arguments.items():
        with pytest.raises(ValueError) as refusal:
            FAPowerCapAttention(**keywords)
        messages[name] = str(refusal.value)
    layer = FAPowerCapAttention(comm_type=0, methods=make_small_methods("fp8"))
    reference: Any = object()
    with pytest.raises(ValueError) as refusal:
        layer.start(torch.zeros(1, 4, 8), 1, further_keys=reference)
    messages["reference with FP8"] = str(refusal.value)
    (messages["one head"],) = {
        text for texts in run_on_ranks(2, attend_with_one_head) for text in texts
    }
    check_refusals("ranks: the attention layer", messages)


def test_by_keyword() -> None:
    layer = FAPowerCapAttention(comm_type=2, layer=3)
    assert (layer.comm_type, layer.ulysses_pg, layer.layer, layer.mode) == (2, None, 3, MODES[2])


@torch.inference_mode()
def test_alone_in_one_process() -> None:
    """FAPowerCapAttention(args, None) works without a group, with the mode's chunks and blocks."""
    job = Job()
    expected = torch.stack(job.velocities(job.model()))
    for mode in MODES:
        args = SimpleNamespace(comm_type=mode)
        layer = FAPowerCapAttention(args, None)
        assert (layer.args, layer.ulysses_pg, layer.comm_type) == (args, None, mode)
        assert layer.fa_alltoall_overlap is False
        net = job.model(attention=layer)
        actual = torch.stack(job.velocities(net))
        assert (actual - expected).abs().max() <= 2e-5, mode
        assert set(net.state_dict()) == set(job.model().state_dict())
