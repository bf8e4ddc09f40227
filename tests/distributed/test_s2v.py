"""S2V on several ranks predicts what it predicts in one process, at token counts of any kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import slow
from tests.dist import run
from tests.distributed.topology import ROWS, Topology, attention_layer, blocks_of
from tests.distributed.velocities import compare, randomised
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import StepInfo
from wan.modules.interfaces import Collaborators
from wan.modules.s2v import WanModel_S2V

pytestmark = pytest.mark.dist

SIZES = {"dim": 96, "ffn_dim": 128, "freq_dim": 32, "num_heads": 12, "num_layers": 3}
TEXT = {"text_dim": 16, "text_len": 20}
SOUND = {"audio_dim": 8, "audio_inject_layers": (0, 2)}


@dataclass(frozen=True)
class Clip:
    """Inputs of a forward: latent frames, rows and columns; whether it is the first clip."""

    frames: int
    rows: int
    columns: int
    first: bool = False

    @property
    def tokens(self) -> int:
        h, w = self.rows, self.columns
        behind = h // 2 * (w // 2)
        if not self.first:
            behind += h // 2 * (w // 2) + h // 4 * (w // 4) + 4 * (h // 8) * (w // 8)
        return self.frames * (h // 2) * (w // 2) + behind


CLIPS = {
    185: Clip(3, 10, 14),
    175: Clip(4, 10, 14, first=True),
    83: Clip(1, 10, 10),
    12: Clip(2, 4, 4, first=True),
}


def network(**collaborators: Any) -> WanModel_S2V:
    """The same random weights every time."""
    torch.manual_seed(0)
    given = Collaborators(text_kv_cache=True, **collaborators)
    net = WanModel_S2V(**SIZES, **TEXT, **SOUND, collaborators=given)
    randomised(net)
    return net


def velocities(net: WanModel_S2V, clip: Clip) -> Tensor:
    """Of two steps and both branches; what depends on the clip is kept from the first step."""
    random = torch.Generator().manual_seed(clip.tokens)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    sides = clip.rows, clip.columns
    x = noise(16, clip.frames, *sides)
    scene = {
        "ref_latents": [noise(16, 1, *sides)],
        "motion_latents": [noise(16, 19, *sides)],
        "cond_states": None if clip.first else [noise(16, clip.frames, *sides)],
        "drop_motion_frames": clip.first,
    }
    heard = noise(1, 25, 8, 4 * clip.frames)
    sounds = {"cond": heard, "uncond": torch.zeros_like(heard)}
    texts = {branch: noise(length, 16) for branch, length in (("cond", 7), ("uncond", 20))}
    grid, found = (clip.frames, clip.rows // 2, clip.columns // 2), []
    for index, t in enumerate((900, 300)):
        for branch, sound in sounds.items():
            step = StepInfo(index, 2, branch, "dit", grid, clip.tokens)
            timesteps, text = torch.tensor([t]), [texts[branch]]
            more: Any = {**scene, "audio_input": sound}
            found += net([x], timesteps, text, 0, **more, step=step)
    return torch.stack(found)


LAYOUTS = {
    2: [Topology(2, 1), Topology(1, 2)],
    3: [Topology(3, 1), Topology(1, 3, "bidirectional")],
    4: [Topology(4, 1), Topology(2, 2, "bidirectional"), Topology(1, 4)],
    8: [Topology(8, 1), Topology(4, 2), Topology(2, 4, "bidirectional")],
}


@pytest.mark.parametrize(
    ("world", "tokens", "modes"),
    [
        (2, [185], [*ROWS]),
        (3, [175, 12], ["0", "1"]),
        (4, [83], ["0", "2"]),
        slow(2, [*CLIPS], [*ROWS]),
        slow(3, [*CLIPS], [*ROWS]),
        slow(4, [*CLIPS], [*ROWS]),
        slow(8, [*CLIPS], [*ROWS]),
    ],
)
def test_the_same_velocities(world: int, tokens: list[int], modes: list[str]) -> None:
    chosen = {count: CLIPS[count] for count in tokens}
    assert all(clip.tokens == count for count, clip in chosen.items())
    for largest in run(
        world, compare, network, velocities, chosen, LAYOUTS[world], modes, "split", timeout=500
    ):
        assert largest > 0.5, "a model that says nothing would always agree"


@pytest.mark.parametrize("world", [2, slow(3), slow(8)])
def test_fused_exchanges(world: int) -> None:
    chosen = {count: CLIPS[count] for count in (185, 175)}
    modes, layouts = ["0", "1"], LAYOUTS[world][:1]
    run(world, compare, network, velocities, chosen, layouts, modes, "fused", timeout=300)


class Collectives(TorchDispatchMode):
    """Counts the operations between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func._opname] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def collectives(clip: Clip, sound: bool) -> dict[str, int]:
    """Of two steps with two branches each."""
    layer = attention_layer(Topology(2, 1), "0")
    net = network(attention=blocks_of(layer), tokens=ShardedTokens(None))
    if not sound:
        net.injected = {}
    with Collectives() as counted:
        velocities(net, clip)
    return dict(counted.found)


def test_hearing_needs_no_exchange() -> None:
    """Four all-to-alls in each layer and one gathering of velocities in each of four forwards."""
    layers, forwards = 3, 4
    for found in run(2, collectives, CLIPS[185], True):
        assert found == {"alltoall_base_": 4 * layers * forwards, "_allgather_base_": forwards}
    assert run(2, collectives, CLIPS[185], False)[0] == found
