"""Video to video against diffusers' `WanVideoToVideoPipeline` and against a known flow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import WanPipeline, WanVideoToVideoPipeline
from PIL import Image
from torch import Tensor

import wan
from tests.conftest import Tiny, slow
from tests.numerics.recorded import make_prompt_embeds, pad_prompt_embeds
from tests.numerics.test_diffusers import TOLERANCE, make_official_scheduler
from tests.tasks.tasks import write_moving_box
from wan.configs import WAN_CONFIGS
from wan.media.video_reader import read_video
from wan.media.video_writer import save_latents
from wan.pipeline.denoise import DenoisingLoop
from wan.pipeline.pipeline import make_base_inputs
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.noise_tables import NOISE_TABLES, OFFICIAL_TABLE
from wan.settings.presets import PRESETS
from wan.settings.solvers import SOLVERS
from wan.tasks.base import VideoParams, get_task, make_video_params
from wan.tasks.video2video import SourceInputs, fit_latents, read_frames_at_size

SIZE, FRAMES, STEPS = (64, 48), 9, 10
CPU = torch.device("cpu")


class ExpertsByTimestep(torch.nn.Module):
    """Stands for diffusers' transformer: the pipeline has one, and A14B has two."""

    def __init__(self, high_noise: Any, low_noise: Any) -> None:
        super().__init__()
        self.high_noise, self.low_noise = high_noise, low_noise
        self.config, self.dtype = low_noise.config, low_noise.dtype
        self.device = low_noise.device

    def forward(self, *, timestep: Tensor, **inputs: Any) -> Any:
        expert = self.high_noise if float(timestep) >= 875 else self.low_noise
        return expert(timestep=timestep, **inputs)


@pytest.fixture(scope="module")
def make_both(
    tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Tensor, Tensor]]:
    """make_both(task, solver, strength): latents of this package and of diffusers."""
    source = write_moving_box(tmp_path_factory.mktemp("source") / "box.mp4", SIZE, FRAMES)
    frames = [Image.fromarray(frame) for frame in read_video(source, "source").iter_frames()]
    models: dict[str, Any] = {}

    def make(task: str, solver: str, strength: float) -> tuple[Tensor, Tensor]:
        if task not in models:
            pipe = WanPipeline.from_pretrained(tiny(task, "diffusers"), torch_dtype=torch.float32)
            if task == "t2v-A14B":
                pipe.transformer = ExpertsByTimestep(pipe.transformer, pipe.transformer_2)
            models[task] = wan.WanT2V(WAN_CONFIGS[task], tiny(task)), pipe
        model, pipe = models[task]
        actual = model.generate(
            "",
            size=SIZE,
            frame_num=FRAMES,
            sample_solver=solver,
            sampling_steps=STEPS,
            shift=5.0,
            guide_scale=4.0,
            seed=3,
            **make_prompt_embeds(),
            output_type="latent",
            src_video=str(source),
            strength=strength,
        )
        oracle = WanVideoToVideoPipeline(
            tokenizer=pipe.tokenizer,
            text_encoder=pipe.text_encoder,
            transformer=pipe.transformer,
            vae=pipe.vae,
            scheduler=make_official_scheduler(solver, 5.0, begin_index=None),
        )
        oracle.set_progress_bar_config(disable=True)
        expected = oracle(
            video=frames,
            **pad_prompt_embeds(make_prompt_embeds()),
            width=SIZE[0],
            height=SIZE[1],
            num_inference_steps=STEPS,
            guidance_scale=4.0,
            strength=strength,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
        ).frames[0]
        return actual, expected

    return make


@pytest.mark.parametrize(
    ("task", "solver", "strength"),
    [
        ("t2v-14B", "dpm++", 0.3),
        ("t2v-A14B", "unipc", 0.6),
        *(slow("t2v-A14B", "euler", tenths / 10) for tenths in range(1, 11)),
    ],
)
def test_latents_are_those_of_diffusers(
    task: str, solver: str, strength: float, make_both: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    actual, expected = make_both(task, solver, strength)
    assert (actual - expected).abs().max() <= TOLERANCE


def make_params(task: str = "t2v-A14B", **values: Any) -> VideoParams:
    return make_video_params(
        PRESETS[task], {"prompt": "", "size": (64, 32), "frame_num": 5, "base_seed": 1, **values}
    )


class KnownFlow:
    """A network and its loader. At each sigma it predicts the velocity towards `clean`."""

    def __init__(self, clean: Tensor, noise: Tensor | None) -> None:
        """Stores the latents. noise: None: the noise that leads from them to the input."""
        self._clean, self._noise = clean, noise
        self.steps: list[tuple[str, int, int]] = []

    def get(self, _: str) -> KnownFlow:
        return self

    def prefetch(self, _: str) -> None: ...

    def __call__(self, x: list[Tensor], t: Tensor, *_: Any, step: Any, **__: Any) -> list[Tensor]:
        self.steps.append((step.expert, step.index, step.count))
        if self._noise is not None:
            return [self._noise - self._clean]
        return [(x[0] - self._clean) / (t.reshape(-1)[-1] / 1000)]


def run_known_flow(params: VideoParams, clean: Tensor, path: Path) -> tuple[Tensor, KnownFlow]:
    """Denoises from these latents with a network that knows them."""
    save_latents(clean, path, {})
    base = make_base_inputs(params, (torch.zeros(1, 4), torch.zeros(1, 4)), CPU)
    inputs = SourceInputs(size=params.size, num_frames=params.frame_num, latents_path=path)
    encoders: Any = SimpleNamespace(torch_device=CPU)
    started = get_task(params.preset.kind).make_denoise_inputs(params, base, inputs, encoders)
    noise = torch.randn(params.latent_shape, generator=torch.Generator().manual_seed(1))
    is_stochastic = SOLVERS[params.sample_solver].adds_noise  # which replaces the noise
    network = KnownFlow(clean, None if is_stochastic else noise)
    return DenoisingLoop(params, started).advance(network), network


FLOWS = (  # task, steps, shift, strength
    ("t2v-A14B", 10, 5.0, 0.55),
    ("t2v-14B", 4, 1.0, 0.3),
    ("ti2v-5B", 7, 12.0, 1.0),
    ("t2v-14B", 50, 3.0, 0.58),
    ("t2v-A14B", 3, 3.0, 0.3),  # no step, which a rule refuses
)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_known_flow_leads_back_to_the_source(solver: str, tmp_path: Path) -> None:
    """The latents that are mixed with noise have the share of the first sigma, to rounding."""
    passes = SOLVERS[solver].forwards_per_step  # of a step; the last one has one
    for (task, steps, shift, strength), table in product(FLOWS, (OFFICIAL_TABLE, *NOISE_TABLES)):
        num_steps = min(steps, 4) if solver == "rcm" else steps
        values = {"sample_steps": num_steps, "sample_shift": shift, "strength": strength}
        params = make_params(task, sample_solver=solver, sigmas=table, **values)
        kept = int(num_steps * strength)
        first, total = (num_steps - kept) * passes, (num_steps - 1) * passes + 1
        assert params.step_range == range(first, total if kept else first)
        if kept:
            clean = torch.randn(params.latent_shape, generator=torch.Generator().manual_seed(2))
            latents, network = run_known_flow(params, clean, tmp_path / "clean.safetensors")
            assert (latents - clean).abs().max() < 2e-5, (task, steps, table)
            assert [step[1:] for step in network.steps[::2]] == [
                (i, total) for i in params.step_range
            ]


def test_experts_follow_the_noise() -> None:
    """A14B with shift 12 has its boundary, 0.875, at a strength of 0.368."""
    values: dict[str, Any] = {"sample_steps": 40, "sample_shift": 12.0}
    experts = {s: get_experts(strength=s, **values) for s in (0.3, 0.36, 0.4, 1.0)}
    assert experts == {
        0.3: ["low_noise"] * 12,
        0.36: ["low_noise"] * 14,
        0.4: ["high_noise", "high_noise", *["low_noise"] * 14],
        1.0: ["high_noise"] * 26 + ["low_noise"] * 14,
    }
    assert get_experts(refine=True, **values) == ["low_noise"] * 14
    assert get_experts(refine=True, strength=0.5, **values) == ["low_noise"] * 20
    assert get_experts(refine=True, boundary_step=30, **values) == ["low_noise"] * 10


def get_experts(**values: Any) -> list[str]:
    return [*make_noise_schedule(make_params(**values)).experts]


def test_frames_cover_the_size() -> None:
    """A frame of a color per half is cropped to its center, also of the turned size."""
    for rows, columns in ((48, 64), (64, 48), (32, 32), (96, 96), (24, 64), (480, 64)):
        frame = np.zeros((rows, columns, 3), np.uint8)
        frame[: rows // 2, :, 0], frame[:, : columns // 2, 1] = 255, 255
        frames = read_frames_at_size(
            lambda indices, x=frame: np.stack([x for _ in indices]), 2, SIZE
        )
        assert frames.shape == (2, SIZE[1], SIZE[0], 3) and frames.dtype == torch.uint8
        if (columns, rows) == SIZE:
            assert np.array_equal(frames[0], frame)
        bright = frames[0, :23, :, 0], frames[0, :, :31, 1]
        dark = frames[0, 25:, :, 0], frames[0, :, 33:, 1]
        assert all((half > 127).all() for half in bright), (rows, columns)
        assert all((half < 128).all() for half in dark), (rows, columns)


def test_latents_are_fitted() -> None:
    """Scaled to cover the size and cropped to the center, each frame by itself."""
    ramp = torch.arange(6.0).expand(2, 3, 4, 6)
    assert torch.equal(fit_latents(ramp, (2, 2, 4, 6)), ramp[:, :2])
    scaled = fit_latents(ramp, (2, 3, 8, 8))
    expected = F.interpolate(ramp, size=(8, 12), mode="bilinear")[..., 2:10]
    assert torch.equal(scaled, expected)
