"""Networks of further tasks predict the same velocities on several ranks as in one process.

Token counts are arbitrary; the official sequence parallelism of Animate is wrong, or fails, where
padding does not divide by frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist import run_on_ranks
from tests.distributed.topology import (
    ROWS,
    Collectives,
    Topology,
    attention_layer,
    make_block_attention,
)
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.forward_context import StepInfo
from wan.modules.animate import WanAnimateModel
from wan.modules.interfaces import ModelComponents
from wan.modules.s2v import WanModel_S2V
from wan.settings.parallel import EXCHANGES

pytestmark = pytest.mark.dist

# Six heads give few chunks: thousands of exchanges would take long.
SIZES: dict[str, Any] = {
    "dim": 48,
    "ffn_dim": 64,
    "freq_dim": 32,
    "num_heads": 6,
    "text_dim": 16,
    "text_len": 20,
}
Case = tuple[Topology, str, str]
"""(ranks, mode, exchange)."""
Noise = Callable[..., Tensor]
"""Draws a tensor of a shape."""


@dataclass(frozen=True)
class Scene:
    """Frames, rows and columns of patches. first: of S2V, whether it is the first clip."""

    frames: int
    rows: int
    columns: int
    first: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.frames, self.rows, self.columns

    @property
    def latents(self) -> tuple[int, int, int]:
        return self.frames, 2 * self.rows, 2 * self.columns


class PoolingMotionEncoder(nn.Module):
    """Replaces the slow motion encoder, whose result is the same on every rank."""

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(faces_P3HW, (1, 22)).flatten(1)[:, :64]


def make_animate(components: ModelComponents) -> nn.Module:
    motion_sizes: dict[str, Any] = {"image_dim": 24, "motion_encoder_dim": 64}
    net: Any = WanAnimateModel(num_layers=5, components=components, **SIZES, **motion_sizes)
    net.motion_encoder = PoolingMotionEncoder()
    return net


def make_animate_inputs(scene: Scene, noise: Noise) -> dict[str, dict[str, Any]]:
    common = {
        "seq_len": math.prod(scene.grid),
        "clip_fea": noise(1, 5, 24),
        "y": [noise(20, *scene.latents)],
        "pose_latents": noise(1, 16, scene.frames - 1, *scene.latents[1:]),
    }
    pictures = 4 * (scene.frames - 2) + 1
    faces = noise(1, 3, pictures, 1, 512).expand(-1, -1, -1, 512, -1)
    faces_by_branch = {"cond": faces, "uncond": torch.full_like(faces, -1.0)}
    return {
        branch: {**common, "face_pixel_values": face} for branch, face in faces_by_branch.items()
    }


def make_s2v(components: ModelComponents) -> nn.Module:
    audio_sizes: dict[str, Any] = {"audio_dim": 8, "audio_inject_layers": (0, 1)}
    return WanModel_S2V(num_layers=2, components=components, **SIZES, **audio_sizes)


def make_s2v_inputs(scene: Scene, noise: Noise) -> dict[str, dict[str, Any]]:
    common = {
        "seq_len": 0,
        "ref_latents": [noise(16, 1, *scene.latents[1:])],
        "motion_latents": [noise(16, 19, *scene.latents[1:])],
        "cond_states": None if scene.first else [noise(16, *scene.latents)],
        "drop_motion_frames": scene.first,
    }
    audio_features = noise(1, 25, 8, 4 * scene.frames)
    audio_by_branch = {"cond": audio_features, "uncond": torch.zeros_like(audio_features)}
    return {
        branch: {**common, "audio_input": audio_input}
        for branch, audio_input in audio_by_branch.items()
    }


class Task(NamedTuple):
    """A network and its inputs besides latents and text. blocks: includes control blocks."""

    network: Callable[[ModelComponents], nn.Module]
    inputs: Callable[[Scene, Noise], dict[str, dict[str, Any]]]
    blocks: int
    scenes: Sequence[Scene]


TASKS = {  # with 105, 30, 5; 185, 175, 83 and 12 tokens
    "animate": Task(
        make_animate, make_animate_inputs, 5, (Scene(3, 5, 7), Scene(2, 3, 5), Scene(5, 1, 1))
    ),
    "s2v": Task(
        make_s2v,
        make_s2v_inputs,
        2,
        (Scene(3, 5, 7), Scene(4, 5, 7, True), Scene(1, 5, 5), Scene(2, 2, 2, True)),
    ),
}
LAYOUTS = {
    2: [Topology(2, 1), Topology(1, 2)],
    3: [Topology(3, 1), Topology(1, 3, "bidirectional")],
    4: [Topology(4, 1), Topology(2, 2, "bidirectional"), Topology(1, 4)],
    8: [Topology(4, 2), Topology(2, 4, "bidirectional")],  # there are six heads
}
CALLS = [(0, 900, "cond"), (0, 900, "uncond"), (1, 300, "cond")]
TEXTS = {"cond": 7, "uncond": 20}


@cache
def make_weights(task: str) -> dict[str, Tensor]:
    """Make random weights from a fixed seed, scaled so that activations are near 1."""
    with torch.device("meta"):
        state = TASKS[task].network(ModelComponents()).state_dict()
    # torch would take a second for ten million values
    random, tensors = np.random.default_rng(0), {}
    for name, parameter in state.items():
        tensors[name] = torch.from_numpy(random.standard_normal(parameter.shape, np.float32))
        if parameter.dim() == 1:
            tensors[name] = 0.1 * tensors[name] + name.endswith("weight")
        else:
            entries = parameter.shape[-1] if "modulation" in name else parameter[0].numel()
            tensors[name] *= entries**-0.5
    return tensors


@torch.inference_mode()
def predict_velocities(task: str, scene: Scene, **components: Any) -> Tensor:
    """Predict the velocities of `CALLS`. components: of a rank, with caching of clip features."""
    components["text_kv_cache"] = bool(components)
    with torch.device("meta"):
        net = TASKS[task].network(ModelComponents(**components)).eval()
    net.load_state_dict(make_weights(task), assign=True)
    random = torch.Generator().manual_seed(math.prod(scene.grid))
    texts = {branch: torch.randn(n, 16, generator=random) for branch, n in TEXTS.items()}
    inputs = TASKS[task].inputs(scene, lambda *shape: torch.randn(shape, generator=random))
    x, velocities = torch.randn(16, *scene.latents, generator=random), []
    for index, t, branch in CALLS:
        step = StepInfo(index, 2, branch, "dit", scene.grid, math.prod(scene.grid))
        model_inputs = inputs[branch] | {"x": [x], "context": [texts[branch]]}
        velocities += net(t=torch.tensor([t]), step=step, **model_inputs)
    return torch.stack(velocities)


def predict_on_rank(task: str, scene: Scene, cases: Sequence[Case]) -> dict[Case, Tensor]:
    """On one rank: predict the velocities of each case."""
    return {
        (topology, mode, exchange): predict_velocities(
            task,
            scene,
            attention=make_block_attention(attention_layer(topology, mode, exchange=exchange)),
            sequence_shard=ShardedSequence(None),
        )
        for topology, mode, exchange in cases
    }


def check_velocities(
    task: str, world: int, scene: Scene, cases: Sequence[Case]
) -> list[dict[Case, Tensor]]:
    """Compare with one process; return the velocities of each rank."""
    expected = predict_velocities(task, scene)
    assert expected.abs().max() > 0.5, "a model that says nothing would always agree"
    ranks = run_on_ranks(world, predict_on_rank, task, scene, cases, timeout=500)
    for results in ranks:
        errors = {case: float((x - expected).abs().max()) for case, x in results.items()}
        assert not {case: error for case, error in errors.items() if not error <= 2e-5}, scene
    return ranks


@pytest.mark.parametrize(("world", "task"), [(2, "animate"), (2, "s2v"), (3, "s2v")])
def test_the_same_velocities(world: int, task: str) -> None:
    """Each layout with one mode and exchange, in turn, so that each task uses all of them."""
    cases, shift = list[Case](), list(TASKS).index(task)
    for turn, layout in enumerate(
        layout for world_size in (2, 3, 4) for layout in LAYOUTS[world_size]
    ):
        mode = [*ROWS][(turn + shift) % 4]
        case = layout, mode, EXCHANGES[(turn + turn // 4 + shift) % 2]
        cases += [case] if layout.world == world else []
    check_velocities(task, world, TASKS[task].scenes[world - 2], cases)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("world", LAYOUTS)
def test_the_same_velocities_in_all_ways(world: int, task: str) -> None:
    """Also bit for bit those of mode 0, except for modes with several query blocks."""
    for scene in TASKS[task].scenes:
        cases = list(product(LAYOUTS[world], ROWS, EXCHANGES))
        for results in check_velocities(task, world, scene, cases):
            for (topology, mode, exchange), x in results.items():
                same = x.equal(results[topology, "0", "split"])
                assert same or ROWS[mode].blocks > 1, (scene, topology, mode, exchange)


def count_collectives(task: str) -> dict[str, int]:
    """On one rank: count the collectives of mode 0 with split exchanges."""
    with Collectives() as counter:
        predict_on_rank(task, TASKS[task].scenes[0], [(Topology(2, 1), "0", "split")])
    return dict(counter.counts)


def test_what_a_task_adds_needs_no_exchange() -> None:
    """Four all-to-alls in each block and one gather of the velocities in each forward."""
    for task, task_spec in TASKS.items():
        expected = {"alltoall_base_": 4 * task_spec.blocks * 3, "_allgather_base_": 3}
        assert run_on_ranks(2, count_collectives, task) == [expected] * 2, task
