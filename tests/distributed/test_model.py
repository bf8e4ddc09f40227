"""WanModel predicts the same velocities on several ranks as in one process, in all modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
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
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.vace import VaceWanModel
from wan.settings.attention_modes import MODES

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
        f, h, w = self.grid
        return f * h * w

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
            components=ModelComponents(text_kv_cache=self.text_cache, **components),
        )
        return net.eval().requires_grad_(False)

    def velocities(self, net: WanModel) -> list[Tensor]:
        """Run one step with each context, and a second one if text is cached."""
        generator = torch.Generator().manual_seed(1)
        f, h, w = self.grid

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        x = [noise(48 if self.kind == "ti2v" else 16, f, 2 * h, 2 * w) for _ in range(self.batch)]
        y = [noise(20, f, 2 * h, 2 * w) for _ in x] if self.kind == "i2v" else None
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
                    outputs += net(x, times, context, self.tokens, y, step=step)
        return outputs

    def _timesteps(self, t: int) -> Tensor:
        """Return one timestep per sample; for ti2v one per token, 0 in the first frame."""
        if self.kind != "ti2v":
            return torch.tensor([t - 100 * i for i in range(self.batch)])
        _, h, w = self.grid
        return torch.full((self.batch, self.tokens), t).index_fill(1, torch.arange(h * w), 0)


Way = tuple[Topology, str]
"""(ranks, mode)."""


@torch.inference_mode()
def compute_velocities(job: Job, layout_modes: Sequence[Way]) -> dict[Way, Tensor]:
    """On one rank: return the velocities of each layout and mode."""
    results = {}
    for topology, mode in layout_modes:
        net = job.model(attention_layer(topology, mode), sequence_shard=ShardedSequence(None))
        results[topology, mode] = torch.stack(job.velocities(net))
    return results


def check_velocities(job: Job, layout_modes: Sequence[Way]) -> None:
    """Compare with one process, and bit for bit with mode 0 of the same layout."""
    with torch.inference_mode():
        expected = torch.stack(job.velocities(replace(job, text_cache=False).model()))
    assert expected.abs().max() > 0.5, "a model that says nothing would always agree"
    for results in run_on_ranks(
        layout_modes[0][0].world, compute_velocities, job, layout_modes, timeout=300
    ):
        errors = {way: float((x - expected).abs().max()) for way, x in results.items()}
        assert not {way: error for way, error in errors.items() if not error <= 2e-5}, job
        for (topology, mode), x in results.items():
            assert ROWS[mode].blocks > 1 or x.equal(results[topology, "0"]), (job, topology, mode)


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


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_velocities(world: int) -> None:
    """Every kind of model on 2 or 4 ranks, in mode 0 and one other mode; the batch of VACE."""
    for turn, (name, job) in enumerate(JOBS.items()):
        if name in ("t2v-batch", "ti2v-batch"):
            continue
        mode = ["1", "2", "overlap"][turn % 3]
        if world == (4 if name in ("t2v-no-padding", "ti2v") else 2):
            check_velocities(job, list(product(LAYOUTS[world], ("0", mode))))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_same_velocities_in_all_modes(world: int, job: Job) -> None:
    heads = 24 if world == 8 else job.heads
    check_velocities(replace(job, heads=heads), list(product(LAYOUTS[world], ROWS)))


def test_three_ranks_and_the_official_text_length() -> None:
    """512 rows of text are no multiple of 3: they are never sharded."""
    job = Job(heads=24, contexts=(500,), text_len=512)
    check_velocities(job, list(product(LAYOUTS[3], ("0", "1"))))


def test_ranks_that_hold_only_padding() -> None:
    """5 tokens on 4 ranks: 2, 2, 1 and none."""
    other_modes = {Topology(4, 1): "1", Topology(2, 2): "2", Topology(1, 4): "overlap"}
    layout_modes = [
        (layout, mode) for layout, other in other_modes.items() for mode in ("0", other)
    ]
    check_velocities(Job("ti2v", grid=(5, 1, 1)), layout_modes)


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
        layer.start(torch.zeros(1, 4, 8), 1, reference=reference)
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
