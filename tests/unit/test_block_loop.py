"""The loop over the blocks of a causal video against a loop in float64 with one masked pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.causal_network import CASES, Case, History, MaskedNetwork, make_network
from tests.pipelines import make_experts
from wan.kernels.forward_context import StepInfo
from wan.pipeline.block_loop import BlockLoop
from wan.pipeline.pipeline import make_base_inputs
from wan.settings.errors import NotFiniteError
from wan.settings.presets import PRESETS
from wan.tasks.base import Inputs, VideoParams, make_video_params
from wan.tasks.causal import CausalInputs

SEED = 5
SIGMAS = [5 * u / (1 + 4 * u) for u in (1.0, 0.75, 0.5, 0.25)]
CPU = torch.device("cpu")


def make_params(case: Case, **values: Any) -> VideoParams:
    sizes = {
        "size": (48, 32),
        "frame_num": 4 * (case.size * case.num_blocks - 1) + 1,
        "num_frame_per_block": case.size,
        "local_attn_size": case.window,
        "sink_size": case.sink,
        "base_seed": SEED,
    }
    if case.change is not None:
        sizes["clip_prompts"] = ("one",) * case.change + ("two",) * (case.num_blocks - case.change)
    return make_video_params(PRESETS["causal-1.3B"], sizes | values)


def make_inputs(params: VideoParams, image: Tensor | None = None) -> CausalInputs:
    """Returns what the task makes of prompts and an image, with these latents of the image."""
    generator = torch.Generator().manual_seed(2)
    one, two = (torch.randn(n, 24, generator=generator) for n in (5, 8))
    encoders: Any = SimpleNamespace(
        encode_video=lambda _: image, encode_prompt=lambda _: (two, two), torch_device=CPU
    )
    base = make_base_inputs(params, (one, one), CPU)
    picture = None if image is None else Image.new("RGB", params.size)
    made = params.task.make_denoise_inputs(params, base, Inputs(image=picture), encoders)
    assert isinstance(made, CausalInputs)
    return made


class Step:
    """The steps of a block in float64, by the formulas of the papers, or by diffusers."""

    def __init__(self, solver: str, generator: torch.Generator) -> None:
        self.solver, self.generator, self.sigmas = solver, generator, [*SIGMAS, 0.0]
        self.timesteps = [1000 * sigma for sigma in SIGMAS]
        if solver == "unipc":
            self.scheduler = diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
            )
            ratios = [0.9990000128746033 * (1 - i / 4) for i in range(4)]
            self.sigmas = [5 * u / (1 + 4 * u) for u in ratios] + [0.0]
            self.timesteps = [float(int(1000 * sigma)) for sigma in self.sigmas[:-1]]
            self.scheduler.set_timesteps(4)
            self.scheduler.sigmas = torch.tensor(self.sigmas, dtype=torch.float32)
            self.scheduler.timesteps = torch.tensor(self.timesteps).long()

    def step(self, index: int, x: Tensor, v: Tensor) -> Tensor:
        sigma, following = self.sigmas[index : index + 2]
        if self.solver == "unipc":
            return self.scheduler.step(v, self.scheduler.timesteps[index], x).prev_sample
        if self.solver == "euler":
            return x + (following - sigma) * v
        clean = x - sigma * v
        if not following:
            return clean
        noise = torch.randn(x.shape, generator=self.generator)
        return (1 - following) * clean + following * noise


def generate_plainly(params: VideoParams, inputs: CausalInputs, case: Case, image: Any) -> Tensor:
    network, history, done = MaskedNetwork(), History(case), list[Tensor]()
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(params.latent_shape, generator=generator)
    for block in range(case.num_blocks):
        frames = range(block * case.size, (block + 1) * case.size)
        text = inputs.contexts[block * len(inputs.contexts) // case.num_blocks]
        x = noise[:, frames.start : frames.stop].double()
        if block == case.change:
            history.renew(frames.start, torch.cat(done, dim=1), text)
        fixed = image is not None and block == 0
        solver = Step(params.sample_solver, generator)
        for index in range(4):
            if fixed:
                x[:, :1] = image
            times = [solver.timesteps[index]] * case.size
            times[0] = 0.0 if fixed else times[0]
            own = history.add(frames, x, times, text)
            velocity = network.compute_velocities(history.entries)[:, own]
            del history.entries[own[0] :]
            x = solver.step(index, x, velocity)
        if fixed:
            x[:, :1] = image
        history.keep(frames, x, text)
        done.append(x)
    return torch.cat(done, dim=1)


@dataclass(frozen=True)
class Video:
    case: Case
    solver: str = "dmd"
    has_image: bool = False


VIDEOS = {
    **{name: Video(case) for name, case in CASES.items()},
    "image": Video(CASES["window"], "euler", has_image=True),
    "multistep solver": Video(CASES["window and sink"], "unipc"),
}


@pytest.mark.parametrize("name", VIDEOS)
@torch.inference_mode()
def test_a_video_equals_a_plain_loop(name: str) -> None:
    video = VIDEOS[name]
    case, image = video.case, None
    if video.has_image:
        image = torch.randn(16, 1, 4, 6, generator=torch.Generator().manual_seed(3))
    params = make_params(case, sample_solver=video.solver)
    inputs = make_inputs(params, image)
    latents = BlockLoop(params, inputs).advance(make_experts(make_network()))
    expected = generate_plainly(params, inputs, case, image)
    assert latents.shape == params.latent_shape
    assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.inference_mode()
def test_blocks_are_there_before_the_next_one() -> None:
    """A block takes its steps, and the next one the clean pass before them."""
    case, calls, network = CASES["window and sink"], list[float](), make_network()
    params = make_params(case)

    def forward(x: list[Tensor], t: Tensor, **kwargs: Any) -> list[Tensor]:
        calls.append(float(t))
        return network(x, t, **kwargs)

    blocks = list[Tensor]()
    for block in BlockLoop(params, make_inputs(params)).iterate_blocks(make_experts(forward)):
        blocks.append(block.clone())
        assert len(calls) == 5 * len(blocks) - 1 and calls[-1] == 625
        assert calls.count(0) == len(blocks) - 1
    latents = BlockLoop(params, make_inputs(params)).advance(make_experts(network))
    assert len(blocks) == case.num_blocks and torch.equal(torch.cat(blocks, dim=1), latents)
    assert not torch.is_grad_enabled()


def count_clean_passes(case: Case, num_finished: int) -> int:
    """Counts the passes whose keys a denoised block attends to, of its prompt or of the sink."""
    change = case.num_blocks if case.change is None else case.change
    denoised, count = range(num_finished, case.num_blocks), 0
    for block in range(case.num_blocks):
        later = [x for x in denoised if x > block]
        same_prompt = [x for x in later if (x < change) == (block < change)]
        count += bool(later if block * case.size < case.sink else same_prompt)
    if any(x >= change for x in denoised):
        first = max(case.sink, change * case.size - (case.window - case.sink))
        count += len({frame // case.size for frame in range(first, change * case.size)})
    return count


@pytest.mark.parametrize("name", VIDEOS)
@torch.inference_mode()
def test_a_resumed_video_has_the_same_bits(name: str) -> None:
    """After any number of finished blocks. Finished blocks take no step, and no pass is in vain."""
    video, network, calls = VIDEOS[name], make_network(), list[float]()
    case, params = video.case, make_params(video.case, sample_solver=video.solver)
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(16, 1, 4, 6, generator=generator) if video.has_image else None

    def forward(x: list[Tensor], t: Tensor, **kwargs: Any) -> list[Tensor]:
        calls.append(float(t.max()))
        return network(x, t, **kwargs)

    expected = BlockLoop(params, make_inputs(params, image)).advance(make_experts(network))
    for num_finished in range(case.num_blocks + 1):
        calls.clear()
        stored = list[tuple[int, Tensor]]()
        inputs = replace(
            make_inputs(params, image),
            finished_latents=expected[:, : num_finished * case.size] if num_finished else None,
            callback_on_block_end=lambda *block, stored=stored: stored.append(block),
        )
        latents = BlockLoop(params, inputs).advance(make_experts(forward))
        assert torch.equal(latents, expected), num_finished
        assert sum(t > 0 for t in calls) == 4 * (case.num_blocks - num_finished)
        assert calls.count(0) == count_clean_passes(case, num_finished), num_finished
        assert [index for index, _ in stored] == [*range(num_finished, case.num_blocks)]
        blocks = expected.split(case.size, dim=1)
        assert all(torch.equal(blocks[index], block) for index, block in stored)


@torch.inference_mode()
def test_passes_are_counted_over_the_whole_video() -> None:
    """A clean pass belongs to the last step of its block."""
    case, network, steps = CASES["all"], make_network(), list[StepInfo]()
    params = make_params(case)

    def forward(x: list[Tensor], t: Tensor, *, step: StepInfo, **kwargs: Any) -> list[Tensor]:
        steps.append(step)
        return network(x, t, step=step, **kwargs)

    BlockLoop(params, make_inputs(params)).advance(make_experts(forward))
    assert {step.count for step in steps} == {4 * case.num_blocks}
    expected = [i for b in range(4) for i in (*range(4 * b, 4 * b + 4), 4 * b + 3)]
    assert [step.index for step in steps] == expected[:-1]


@torch.inference_mode()
def test_a_block_that_is_not_finite_is_not_stored() -> None:
    case, network, num_forwards, stored = CASES["all"], make_network(), [0], list[int]()
    params = make_params(case)

    def forward(x: list[Tensor], t: Tensor, **kwargs: Any) -> list[Tensor]:
        num_forwards[0] += 1
        return [y / (num_forwards[0] != 9) for y in network(x, t, **kwargs)]

    inputs = replace(
        make_inputs(params), callback_on_block_end=lambda index, _: stored.append(index)
    )
    with pytest.raises(NotFiniteError):
        BlockLoop(params, inputs).advance(make_experts(forward))
    assert stored == [0]
