"""Few-step sampling: levels, steps and experts against their formulas, and recipes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.pipelines import build_quick_pipeline, resolve_plan
from tests.refusals import check_refusals, get_refusal
from wan.app.run import Run
from wan.checkpoint.layout import inspect_checkpoint
from wan.pipeline.pipeline import make_base_inputs
from wan.pipeline.scheduler import make_solver
from wan.settings import recipes
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.tasks.base import VideoParams, make_video_params


def plan_run(arguments: str) -> Run:
    return resolve_plan(*arguments.split())


def request(task: str = "t2v-A14B", **values: Any) -> VideoParams:
    return make_video_params(
        PRESETS[task], {"prompt": "", "size": (64, 64), "frame_num": 5, **values}
    )


def euler(steps: int, shift: float) -> list[float]:
    return [shift * x / (1 + (shift - 1) * x) for x in (1 - i / steps for i in range(steps))]


def test_euler_levels() -> None:
    for steps, shift in ((4, 5.0), (1, 3.0), (8, 12.0)):
        plan = make_noise_schedule(
            request(sample_solver="euler", sample_steps=steps, sample_shift=shift)
        )
        expected = euler(steps, shift)
        np.testing.assert_allclose(plan.sigmas, [*expected, 0], atol=1e-15)
        np.testing.assert_allclose(plan.timesteps, [1000 * s for s in expected], atol=1e-12)
        high = sum(1000 * s >= 875 for s in expected)
        assert plan.high_noise_steps == high and plan.experts[0] == "high_noise"


def test_the_first_latents_are_noise_of_the_first_level() -> None:
    """The share of noise of the official solvers and of Euler's is taken for 1."""
    text = torch.zeros(1, 4)
    for solver, level in (("rcm", 0.9877), ("euler", 1), ("unipc", 1)):
        params = request(sample_solver=solver, sample_steps=4, base_seed=1)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(params.latent_shape, generator=generator)
        latents = make_base_inputs(params, (text, text), torch.device("cpu")).initial_latents
        torch.testing.assert_close(latents, level * noise, rtol=1e-4, atol=0)


def test_rcm_levels() -> None:
    """A run starts from noise of the first level."""
    four = {"sample_solver": "rcm", "sample_steps": 4}
    table = {("t2v-A14B", 80): 0.9877, ("t2v-A14B", 200): 0.9950, ("t2v-A14B", 1600): 0.9994}
    table |= {("t2v-A14B", None): 0.9877, ("i2v-A14B", None): 0.9950}
    for (task, first), share in table.items():
        plan = make_noise_schedule(request(task, **four, sigma_max=first))
        np.testing.assert_allclose(plan.sigmas, [share, 0.9338, 0.8529, 0.6090, 0], atol=5e-5)
        two = make_noise_schedule(request(task, **four | {"sample_steps": 2}, sigma_max=first))
        assert two.sigmas == (*plan.sigmas[:2], 0)
        if first is not None:
            angles = (math.atan(first), 1.5, 1.4, 1.0)
            expected = [math.sin(t) / (math.sin(t) + math.cos(t)) for t in angles]
            np.testing.assert_allclose(plan.sigmas[:-1], expected, atol=1e-15)


def test_steps_of_rcms_ode() -> None:
    """Euler steps between the levels of rCM; other solvers are compared in tests/numerics."""
    params = request(sample_solver="rcm", sample_steps=3, ode=True)
    plan, generator = make_noise_schedule(params), torch.Generator().manual_seed(0)
    x, *velocities = torch.randn(4, 3, 4, generator=generator)
    solver, _ = make_solver(params, plan)
    for index, v in enumerate(velocities):
        sigma, next_sigma = plan.sigmas[index : index + 2]
        expected = x.double() + (next_sigma - sigma) * v.double()
        x = solver.step(x, v)
        assert torch.allclose(x.double(), expected, rtol=1e-7, atol=1e-7), index
    dmd = request(sample_solver="dmd", timesteps=(1000.0, 757.0, 522.0))
    assert make_noise_schedule(dmd).sigmas == (1.0, 0.757, 0.522, 0.0)


def test_experts_by_step() -> None:
    """With shift 16, three of four levels are above 0.9; boundary_step 2 limits them to two."""
    four = {"sample_solver": "euler", "sample_steps": 4, "sample_shift": 16.0}
    assert make_noise_schedule(request("i2v-A14B", **four)).high_noise_steps == 3
    two = make_noise_schedule(request("i2v-A14B", **four, boundary_step=2))
    assert two.experts == ("high_noise", "high_noise", "low_noise", "low_noise")
    assert make_noise_schedule(request(**four, boundary_step=0)).high_noise_steps == 0
    assert make_noise_schedule(request(**four, boundary_step=4)).high_noise_steps == 4


def test_flags_that_are_refused() -> None:
    eight = "1000,700,600,500,400,300,200,100"
    table = {
        "rising": "--timesteps 500,1000",
        "twice the same": "--timesteps 1000,500,500",
        "not numbers": "--timesteps a,b",
        "beyond": "--timesteps 1001,5",
        "shift beside": "--timesteps 1000,500 --sample_shift 5",
        "steps beside": "--timesteps 1000,500 --sample_steps 2",
        "unipc": "--timesteps 1000,500",
        "dense": "--task t2v-1.3B --boundary_step 2",
        "late": "--boundary_step 41",
        "many": "--sample_solver rcm",
        "ode": "--ode",
        "sigma_max": "--sigma_max 80 --sample_solver dmd",
        "quiet start": "--sample_solver rcm --sample_steps 4 --sigma_max 10",
        "sigma_max beside": "--sample_solver rcm --timesteps 900,500 --sigma_max 80",
        "rcm's shift": "--sample_solver rcm --sample_steps 4 --sample_shift 3",
        "recipe": "--task ti2v-5B --recipe lightning-4step",
        "mag": f"--timesteps {eight} --sample_solver dmd --step_cache mag",
    }
    messages = {name: get_refusal(plan_run, arguments) for name, arguments in table.items()}
    check_refusals("few steps: flags", messages)


def test_recipes() -> None:
    run = plan_run("--recipe lightning-4step").params
    assert (run.sample_solver, run.sample_steps, run.sample_shift) == ("euler", 4, 5.0)
    assert run.sample_guide_scale == (1.0, 1.0) and not run.uses_guidance
    assert make_noise_schedule(run).high_noise_steps == 2
    more = plan_run("--recipe distill-4step --sample_steps 8 --sample_guide_scale 2")
    assert more.params.sample_steps == 8 and more.params.boundary_step is None
    assert any("guidance blurs" in line for line in more.notices)
    fast = plan_run("--task ti2v-5B --recipe fastwan-3step").params
    assert fast.timesteps == (1000, 757, 522) and fast.sample_steps == 3
    five = plan_run("--task ti2v-5B --recipe fastwan-3step --sample_steps 5").params
    assert five.timesteps is None and five.sample_solver == "dmd" and five.sample_steps == 5
    rcm = plan_run("--recipe rcm-4step --sigma_max 1600 --ode").params
    assert rcm.ode and rcm.first_sigma == 1600


def test_recipes_are_recognised_by_names() -> None:
    """The name of a folder around a base model is not its own."""
    lightning = "Wan2.2-Lightning/Wan2.2-T2V-A14B-4steps-lora-rank64-V1/x"
    for name, task, *expected in (
        (lightning, "t2v-A14B", "lightning-4step"),
        ("wan2.2_i2v_A14b_high_noise_lightx2v_4step.safetensors", "i2v-A14B", "distill-4step"),
        ("Wan2.2-Distill-Models", "t2v-A14B", "distill-4step"),
        ("FastWan2.2-TI2V-5B-FullAttn-Diffusers", "ti2v-5B", "fastwan-3step"),
        ("TurboWan2.2-I2V-A14B-720P", "i2v-A14B", "rcm-4step"),
        ("Wan2.2-T2V-A14B", "t2v-A14B"),
        ("Wan2.2-Lightning", "ti2v-5B"),
        ("Wan2.2-Lightning/Wan2.2-T2V-A14B", "t2v-A14B"),
        ("rCM-Wan/Wan2.2-T2V-A14B", "t2v-A14B"),
    ):
        path, preset = Path("/models") / name, PRESETS[task]
        locations = ([], [path]) if "lora" in name else ([path], [])
        assert recipes.choose_recipes("auto", *locations, preset)[0] == (*expected,), name
        assert recipes.choose_recipes("none", *locations, preset) == ((), {}), name


def test_a_recipe_replaces_the_schedule_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    settings = plan_run("--sample_steps 30 --frame_num 33 --fps 9").settings
    path.write_text(json.dumps({"settings": settings}))
    replayed = plan_run(f"--from_json {path} --recipe lightning-4step")
    kept = replayed.params.frame_num, replayed.output.fps  # which the recipe does not set
    assert kept == (33, 9)
    run = plan_run(f"--from_json {path} --recipe rcm-4step --ode").params
    assert (run.sample_solver, run.sample_steps, run.uses_guidance) == ("rcm", 4, False)
    path.write_text(json.dumps({"settings": plan_run("--recipe lightning-4step").settings}))
    replayed = plan_run(f"--from_json {path}").params
    assert (replayed.sample_solver, replayed.sample_steps) == ("euler", 4)
    off = plan_run(f"--from_json {path} --recipe none").params
    demo = "unipc", 20, 12.0
    assert (off.sample_solver, off.sample_steps, off.sample_shift) == demo


def test_a_recipes_own_value_changes_nothing() -> None:
    arguments = "--task ti2v-5B --recipe fastwan-3step"
    assert plan_run(f"{arguments} --sample_solver dmd").params.timesteps == (1000, 757, 522)
    other = plan_run(f"{arguments} --sample_solver euler").params
    assert other.timesteps is None and (other.sample_steps, other.sample_shift) == (3, 5.0)


def test_last_images(tiny: Any, image_path: Path) -> None:
    image, last = f"--image {image_path}", f"--last_image {image_path}"
    table = {
        "t2v-A14B": last,
        "ti2v-5B": f"{image} {last}",
        "i2v-14B": f"--ckpt_dir {tiny('i2v-14B')} {image} {last}",
        "flf2v-14B": image,
        "i2v-A14B": f"{image} {last} --frame_num 1",
    }
    messages = {
        task: get_refusal(plan_run, f"--task {task} {images}") for task, images in table.items()
    }
    flf2v = f"--task flf2v-14B --ckpt_dir {tiny('i2v-14B')} {image}"
    messages["flf2v-14B of one image"] = get_refusal(plan_run, flf2v)
    check_refusals("images: last ones", messages)


def test_the_folder_decides_which_image_model_it_is(tiny: Any, image_path: Path) -> None:
    for folder, task, extra_flags in (
        ("i2v-A14B", "i2v-A14B", ""),
        ("i2v-14B", "i2v-14B", ""),
        ("flf2v-14B", "flf2v-14B", f" --last_image {image_path}"),
    ):
        arguments = f"--task i2v-14B --ckpt_dir {tiny(folder)} --image {image_path}{extra_flags}"
        run = plan_run(f"{arguments} --size 832*480")
        assert run.params.preset.task == task
        if folder == "i2v-14B":
            assert (run.params.sample_shift, run.params.sample_steps) == (3.0, 4)
            assert run.params.negative_prompt.startswith("镜头晃动，")
            assert plan_run(f"{arguments} --size 1280*720").params.sample_shift == 5.0


def test_networks_that_need_more_are_named(tiny: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "checkpoint"))
    file = folder / "diffusion_pytorch_model.safetensors"
    state, messages = load_file(file), {}
    for name in ("blocks.0.self_attn.gate_compress.weight", "time_embedding_r.0.weight"):
        save_file({**state, name: torch.zeros(2, 2)}, file)
        messages[name] = get_refusal(build_quick_pipeline, folder, "--task", "t2v-1.3B")
    check_refusals("checkpoints: networks that need more", messages)


def test_turbo_weights_attend_densely(tiny: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "TurboWan2.1-T2V-1.3B"))
    file = folder / "diffusion_pytorch_model.safetensors"
    plain = inspect_checkpoint(folder).experts["dit"]
    name = "blocks.0.self_attn.attn_op.proj_l.weight"
    save_file({**load_file(file), name: torch.zeros(2, 2)}, file)
    turbo = inspect_checkpoint(folder).experts["dit"]
    assert turbo.sparse_linear and not plain.sparse_linear
    assert turbo.tensors.keys() == plain.tensors.keys()
