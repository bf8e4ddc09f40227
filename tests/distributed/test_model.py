"""WanModel on several ranks predicts what it predicts in one process, whatever mode and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import slow
from tests.dist import run
from tests.distributed.topology import ROWS, Topology, attention_layer, blocks_of
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import StepInfo
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import Collaborators
from wan.modules.model import WanModel
from wan.modules.vace import VaceWanModel
from wan.settings.schedule import MODES

pytestmark = pytest.mark.dist

CHANNELS = {"t2v": 16, "i2v": 36, "ti2v": 48, "vace": 16}
TEXT_DIM = 16


@dataclass(frozen=True)
class Job:
    """What a model is called with."""

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

    def model(self, attention: FAPowerCapAttention | None = None, **collaborators: Any) -> WanModel:
        """The same random weights every time. collaborators: fields of `Collaborators`."""
        if attention is not None:
            collaborators["attention"] = blocks_of(attention)
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
            collaborators=Collaborators(text_kv_cache=self.text_cache, **collaborators),
        )
        return net.eval().requires_grad_(False)

    def velocities(self, net: WanModel) -> list[Tensor]:
        """One step with each context, a second one where text is cached."""
        generator = torch.Generator().manual_seed(1)
        f, h, w = self.grid

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        x = [noise(48 if self.kind == "ti2v" else 16, f, 2 * h, 2 * w) for _ in range(self.batch)]
        y = [noise(20, f, 2 * h, 2 * w) for _ in x] if self.kind == "i2v" else None
        control = [noise(96, f, 2 * h, 2 * w) for _ in x] if self.kind == "vace" else []
        prompts = [[noise(length, TEXT_DIM) for _ in x] for length in self.contexts]
        found = []
        for index, t in enumerate((900, 300) if self.text_cache else (900,)):
            for context in prompts:
                step = StepInfo(index, 2, "cond", "dit", self.grid, self.tokens)
                times = self._timesteps(t)
                if control:
                    found += net(x, times, control, context, self.tokens, step=step)
                else:
                    found += net(x, times, context, self.tokens, y, step=step)
        return found

    def _timesteps(self, t: int) -> Tensor:
        """ti2v: one per token, those of the given first frame are at 0."""
        if self.kind != "ti2v":
            return torch.tensor([t - 100 * i for i in range(self.batch)])
        _, h, w = self.grid
        return torch.full((self.batch, self.tokens), t).index_fill(1, torch.arange(h * w), 0)


@torch.inference_mode()
def compare(job: Job, topologies: list[Topology], modes: Sequence[str]) -> float:
    """All calls first, so that a difference leaves no other rank waiting; the largest velocity."""
    expected = torch.stack(job.velocities(replace(job, text_cache=False).model()))
    found = {
        (topology, mode): torch.stack(
            job.velocities(
                job.model(attention=attention_layer(topology, mode), tokens=ShardedTokens(None))
            )
        )
        for topology in topologies
        for mode in modes
    }
    for case, velocities in found.items():
        off = (velocities - expected).abs().max()
        assert off <= 2e-5, f"off by {off} with {case}"
    for (topology, mode), velocities in found.items():
        assert ROWS[mode].blocks > 1 or torch.equal(velocities, found[topology, "0"])
    return expected.abs().max().item()


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
QUICK = {(2, "t2v-batch"), (2, "i2v"), (2, "ti2v-batch"), (4, "t2v-no-padding")}
LAYOUTS = {
    2: [Topology(2, 1), Topology(1, 2)],
    4: [Topology(4, 1), Topology(2, 2, "bidirectional"), Topology(1, 4, "ring")],
    8: [Topology(8, 1), Topology(2, 4), Topology(4, 2, "bidirectional")],
}


@pytest.mark.parametrize(
    ("world", "job"),
    [case if case in QUICK else slow(*case) for case in product((2, 4), JOBS)],
)
def test_the_same_velocities(world: int, job: str) -> None:
    for largest in run(world, compare, JOBS[job], LAYOUTS[world], list(ROWS)):
        assert largest > 0.5, "a model that says nothing would always agree"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2v", "ti2v", "vace"])
def test_eight_ranks(kind: str) -> None:
    run(8, compare, Job(kind, heads=24), LAYOUTS[8][:2], ("0", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_eight_ranks_all_modes(job: Job) -> None:
    run(8, compare, replace(job, heads=24), LAYOUTS[8], list(ROWS))


def test_three_ranks_and_the_official_text_length() -> None:
    """512 rows of text are no multiple of 3: they are never sharded."""
    job = Job(heads=24, contexts=(500,), text_len=512)
    run(3, compare, job, [Topology(3, 1), Topology(1, 3, "bidirectional")], ("0", "1"))


@pytest.mark.parametrize("kind", [slow("t2v"), "ti2v"])
def test_ranks_that_hold_only_padding(kind: str) -> None:
    """5 tokens on 4 ranks: 2, 2, 1 and none."""
    job = Job(kind, grid=(5, 1, 1))
    run(4, compare, job, [Topology(4, 1), Topology(2, 2), Topology(1, 4)], list(ROWS))


@torch.inference_mode()
def call_twice() -> None:
    """A model's second run of a job has the bits of its first."""
    job = Job("ti2v", text_cache=True)
    layer = attention_layer(Topology(2, 1), "2")
    net = job.model(attention=layer, tokens=ShardedTokens(None))
    first, second = (torch.stack(job.velocities(net)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_same_bits_every_time() -> None:
    run(2, call_twice)


@pytest.mark.parametrize("value", [max(MODES) + 1, -1, "1", "nonsense", None])
def test_unknown_comm_type(value: object) -> None:
    legal = [str(comm_type) for comm_type in MODES]
    with pytest.raises(ValueError) as refusal:
        FAPowerCapAttention(SimpleNamespace(comm_type=value), None)
    assert str(refusal.value) == (
        f"comm_type must be {', '.join(legal[:-1])}, or {legal[-1]}, but got {value}."
    )


def attend_with_one_head() -> None:
    for mode in ROWS:
        layer = attention_layer(Topology(2, 1), mode)
        with pytest.raises(ValueError) as refusal:
            layer(*torch.zeros(3, 1, 4, 1, 8))
        assert str(refusal.value) == (
            "head_count must be at least ulysses world size, but got head_count=1, world_size=2."
        )


def test_heads_that_cannot_be_shared() -> None:
    run(2, attend_with_one_head)


def test_by_keyword() -> None:
    layer = FAPowerCapAttention(comm_type=2, layer=3)
    assert (layer.comm_type, layer.ulysses_pg, layer.layer, layer.mode) == (2, None, 3, MODES[2])
    for given in ({}, {"args": SimpleNamespace(comm_type=1), "comm_type": 1}):
        with pytest.raises(ValueError, match="either args or comm_type"):
            FAPowerCapAttention(**given)


@pytest.mark.parametrize("mode", MODES)
def test_alone_in_one_process(mode: int) -> None:
    """FAPowerCapAttention(args, None) is complete; chunks and blocks are still made."""
    job = Job()
    args = SimpleNamespace(comm_type=mode)
    layer = FAPowerCapAttention(args, None)
    assert (layer.args, layer.ulysses_pg, layer.comm_type) == (args, None, mode)
    assert layer.fa_alltoall_overlap is False
    with torch.inference_mode():
        found, expected = (
            torch.stack(job.velocities(net)) for net in (job.model(attention=layer), job.model())
        )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert set(job.model(attention=layer).state_dict()) == set(job.model().state_dict())
