"""Previews: predicted clean latents, the frames that are shown, and the same run without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pipelines import QUICK, build_quick_pipeline, make_experts, resolve_argv, resolve_plan
from wan.kernels.forward_context import StepInfo
from wan.media.video_writer import save_preview
from wan.pipeline.batch import Batch, Job
from wan.pipeline.denoise import DenoisingLoop
from wan.pipeline.preview import Preview, find_preview_window
from wan.planner.measure import Planner
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.settings.solvers import SOLVERS
from wan.tasks.base import DenoiseInputs, VideoParams, make_video_params
from wan.utils.torch_private import StorageTracker

SOLVER_FLAGS: dict[str, dict[str, Any]] = {
    **{name: {"sample_solver": name, "sample_steps": 4} for name in SOLVERS},
    "rcm's ODE": {"sample_solver": "rcm", "sample_steps": 4, "ode": True},
    "VACE's images": {"task": "vace-14B", "num_reference_images": 2, "sample_steps": 4},
}


@pytest.fixture(scope="session")
def tiny(usual_tiny: Any) -> Any:
    return usual_tiny


def make_params(task: str, image_size: tuple[int, int] | None = None, **values: Any) -> VideoParams:
    sizes = {"size": (64, 64), "frame_num": 1, "preview": 1}
    return make_video_params(PRESETS[task], {"prompt": "", **sizes, **values}, image_size)


@pytest.mark.parametrize("name", SOLVER_FLAGS)
def test_every_step_predicts_the_clean_latents(name: str) -> None:
    """A network that predicts noise - z exactly, after guidance, has z in every preview.

    With solvers that mix new noise with earlier noise it predicts (x - z) / sigma.
    """
    flags = {"task": "t2v-A14B", **SOLVER_FLAGS[name]}
    params = make_params(sample_guide_scale=(2.0, 4.0), **flags)
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(params.latent_shape, generator=generator)
    samples: list[Tensor] = []

    def sample_noise() -> Tensor:
        samples.append(torch.rand(params.latent_shape, generator=generator))
        return samples[-1]

    def network(x: list[Tensor], *_: object, step: StepInfo, **__: object) -> list[Tensor]:
        scale = 4.0 if step.expert == "high_noise" else 2.0
        shift = 1.0 if step.branch == "uncond" else 1 - 1 / scale  # guidance removes it
        if params.sample_solver in ("euler_ancestral", "dpm++_sde"):
            return [(x[0] - z) / sigmas[step.index] + shift]
        return [samples[-1] - z + shift]

    sigma, *_ = sigmas = make_noise_schedule(params).sigmas
    start = (1 - sigma) * z + sigma * sample_noise()
    shown: list[Tensor] = []
    preview = Preview(params, lambda latents: latents.clone(), shown.append)
    inputs = DenoiseInputs(start, torch.zeros(0), torch.zeros(0), sample_noise=sample_noise)
    DenoisingLoop(params, inputs, preview=preview).advance(make_experts(network))
    assert len(shown) == (7 if name == "res_2s" else 4)
    for frame in shown:  # the first one of the video, behind the images
        torch.testing.assert_close(frame, z[:, -1], rtol=0, atol=1e-6)


def test_fixed_frames_are_shown_as_they_are() -> None:
    """As ti2v's image, of which the prediction is another one."""
    params = make_params("t2v-A14B", sample_steps=2, sample_guide_scale=(1.0, 1.0))
    inputs = DenoiseInputs(
        torch.ones(params.latent_shape),
        *[torch.zeros(0)] * 2,
        restore_fixed_frames=lambda latents: torch.full_like(latents, 5.0),
    )
    shown: list[Tensor] = []
    preview = Preview(params, lambda latents: latents.clone(), shown.append)
    network = lambda x, *_, **__: [torch.ones_like(x[0])]  # noqa: E731
    DenoisingLoop(params, inputs, preview=preview).advance(make_experts(network))
    assert [frame.unique().tolist() for frame in shown] == [[5.0], [5.0]]


WINDOWS: dict[str, tuple[VideoParams, int, int, slice]] = {
    # parameters, clip, latent frames to decode, those of the preview
    "t2v": (make_params("t2v-A14B", frame_num=81), 0, 21, slice(0, 1)),
    "i2v": (make_params("i2v-A14B", (64, 64), frame_num=81), 0, 21, slice(8, 11)),
    "short i2v": (make_params("i2v-A14B", (64, 64), frame_num=5), 0, 2, slice(0, 2)),
    "ti2v": (make_params("ti2v-5B", frame_num=81), 0, 21, slice(0, 1)),
    "ti2v, image": (make_params("ti2v-5B", (64, 64), frame_num=81), 0, 21, slice(8, 11)),
    "vace": (make_params("vace-14B", frame_num=81, num_reference_images=2), 0, 21, slice(0, 1)),
    "s2v": (make_params("s2v-14B", (64, 64), infer_frames=80), 1, 19 + 20, slice(27, 30)),
    "animate": (make_params("animate-14B", frame_num=77, num_clip=2), 0, 20, slice(0, 1)),
    "animate, clip 2": (make_params("animate-14B", frame_num=77), 1, 20, slice(8, 11)),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_a_known_first_frame_is_not_shown(case: str) -> None:
    """The last frame of the window is shown."""
    params, clip, num_latents, window = WINDOWS[case]
    assert find_preview_window(params, clip, num_latents) == window
    shown: list[Tensor] = []
    preview = Preview(params, lambda latents: latents, shown.append)
    preview.start_clip(clip, lambda index, latents: latents + 100 * index)
    preview.update(torch.arange(num_latents).view(1, -1, 1, 1))
    assert [frame.item() for frame in shown] == [window.stop - 1 + 100 * clip]


@pytest.mark.usefixtures("one_thread")
def test_a_preview_is_the_first_frame_and_changes_no_bit(tiny, caplog) -> None:
    """Euler's last step ends at the prediction. Two videos share the experts; one preview fails."""
    argv = ("--task", "t2v-A14B", "--size", "32*32", "--frame_num", "5", "--sample_steps", "4")
    argv += ("--sample_solver", "euler", "--boundary_step", "1")
    run, pipeline = build_quick_pipeline(tiny("t2v-A14B"), *argv, "--preview", "1")
    plain_params = replace(run.params, preview=0)
    inputs = replace(run.load_inputs(), show_preview=lambda _: None)
    latents = pipeline.generate_latents(plain_params, inputs)
    assert "preview" not in pipeline.stage_timer.seconds
    assert pipeline.decode(latents) is not None
    shown: dict[str, list[Tensor]] = {"a": [], "b": []}

    def fail(frame: Tensor) -> None:
        shown["b"].append(frame)
        raise OSError("no space")

    jobs = [
        Job("a", run.params, replace(inputs, show_preview=shown["a"].append)),
        Job("b", replace(run.params, preview=2), replace(inputs, show_preview=fail)),
    ]
    batch = Batch(pipeline, jobs, group_by_expert=True)
    for result in batch.generate_videos(lambda _, get_latents: get_latents()):
        assert torch.equal(result, latents)
    video = pipeline.decode(latents)
    assert video is not None
    assert [len(frames) for frames in shown.values()] == [4, 1]
    assert torch.equal(shown["a"][-1], video[:, 0])
    assert not torch.equal(shown["a"][0], video[:, 0])
    assert torch.equal(shown["b"][0], shown["a"][1])
    assert caplog.text.count("no more previews") == 1 and "no space" in caplog.text
    assert jobs[0].stages["preview"] > 0


@pytest.mark.usefixtures("one_thread")
def test_the_plan_includes_the_vae_between_steps(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("--size", "128*128", "--frame_num", "9", "--sample_steps", "1")
    run, pipeline = build_quick_pipeline(tiny("t2v-1.3B"), "--task", "t2v-1.3B", *argv)
    plan = resolve_plan("--ckpt_dir", tiny("t2v-1.3B"), "--task", "t2v-1.3B", *argv[:4])
    texts = torch.zeros(2, *pipeline.text_size)
    inputs = replace(run.load_inputs(), prompt_embeds=texts[0], negative_prompt_embeds=texts[1])
    params, live = replace(run.params, preview=1), StorageTracker("cpu")
    live.exclude([texts])
    with live:
        pipeline.generate_latents(params, replace(inputs, show_preview=lambda _: None))
    planned = Planner(plan.setup, params).compute_stage_memory()["denoising"]
    assert live.peak_bytes.total() <= planned.total()


def test_an_image_is_not_replaced_by_a_preview(tiny, tmp_path, monkeypatch) -> None:
    """The preview of an earlier video may be the image of a new one."""
    monkeypatch.chdir(tmp_path)
    argv = ["--task", "ti2v-5B", "--ckpt_dir", tiny("ti2v-5B"), *QUICK, "--save_file", "v.mp4"]
    argv += ["--prompt", "x", "--image", "v.preview.jpg"]
    save_preview(torch.zeros(3, 64, 64), tmp_path / "v.preview.jpg")
    resolve_argv(argv)
    with pytest.raises(InputError, match=r"v\.preview\.jpg would be replaced by an output"):
        resolve_argv([*argv, "--preview", "1"])
