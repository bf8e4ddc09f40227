"""Few-step sampling: levels, steps and experts against their formulas, and recipes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import wan
from wan.checkpoint.layout import describe
from wan.cli import flags
from wan.cli.resolve import resolve
from wan.pipeline.conditioning import noise
from wan.pipeline.solvers import make_solver
from wan.run import Run
from wan.settings import recipes
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.request import Request, make_request
from wan.settings.solvers import SOLVERS
from wan.settings.timesteps import schedule


def planned(words: str) -> Run:
    return resolve(flags.parse(["--plan", *words.split()]), lambda *_: None, plan=True)


def request(task: str = "t2v-A14B", **values: Any) -> Request:
    return make_request(PRESETS[task], {"prompt": "", "size": (64, 64), "frame_num": 5, **values})


def euler(steps: int, shift: float) -> list[float]:
    return [shift * x / (1 + (shift - 1) * x) for x in (1 - i / steps for i in range(steps))]


@pytest.mark.parametrize(("steps", "shift"), [(4, 5.0), (1, 3.0), (8, 12.0)])
def test_euler_levels(steps: int, shift: float) -> None:
    plan = schedule(request(sample_solver="euler", sample_steps=steps, sample_shift=shift))
    wanted = euler(steps, shift)
    np.testing.assert_allclose(plan.sigmas, [*wanted, 0], atol=1e-15)
    np.testing.assert_allclose(plan.timesteps, [1000 * s for s in wanted], atol=1e-12)
    high = sum(1000 * s >= 875 for s in wanted)
    assert plan.high_noise_steps == high and plan.experts[0] == "high_noise"


@pytest.mark.parametrize(("first", "share"), [(80, 0.9877), (200, 0.9950), (1600, 0.9994)])
def test_rcm_levels(first: float, share: float) -> None:
    plan = schedule(request(sample_solver="rcm", sample_steps=4, sigma_max=first))
    np.testing.assert_allclose(plan.sigmas, [share, 0.9338, 0.8529, 0.6090, 0], atol=5e-5)
    angles = (math.atan(first), 1.5, 1.4, 1.0)
    wanted = [math.sin(t) / (math.sin(t) + math.cos(t)) for t in angles]
    np.testing.assert_allclose(plan.sigmas[:-1], wanted, atol=1e-15)
    two = schedule(request(sample_solver="rcm", sample_steps=2, sigma_max=first))
    assert two.sigmas == (*plan.sigmas[:2], 0)
    # what a run starts with is noise of the first level
    one = request(sample_solver="rcm", sample_steps=4)
    assert schedule(one).sigmas[0] == pytest.approx(0.9877, abs=5e-5)
    assert schedule(request("i2v-A14B", sample_solver="rcm", sample_steps=4)).sigmas[
        0
    ] == pytest.approx(0.995, abs=5e-5)


def stepped(asked: Request, velocities: Tensor, start: Tensor, draw: Any = None) -> list[Tensor]:
    solver, told = make_solver(asked, schedule(asked), draw)
    found = [start]
    for t, v in zip(told, velocities, strict=True):
        found.append(solver.step(v, t.float(), found[-1], return_dict=False)[0])
    return found[1:]


STEPS = {
    "euler": {"sample_solver": "euler", "sample_steps": 4, "sample_shift": 5.0},
    "listed": {"sample_solver": "euler", "timesteps": (1000.0, 700.5, 3.25)},
    "rcm's ODE": {"sample_solver": "rcm", "sample_steps": 3, "ode": True},
    "dmd": {"sample_solver": "dmd", "timesteps": (1000.0, 757.0, 522.0)},
    "rcm": {"sample_solver": "rcm", "sample_steps": 4},
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_against_the_formulas_in_float64(name: str) -> None:
    asked = request(**STEPS[name])
    generator = torch.Generator().manual_seed(0)
    plan, count = schedule(asked), asked.sample_steps
    velocities = torch.randn(count, 3, 4, generator=generator)
    start, fresh = torch.randn(3, 4, generator=generator), torch.randn(9, 3, 4, generator=generator)
    drawn: Iterator[Tensor] = iter(fresh)
    found = stepped(asked, velocities, start, lambda: next(drawn))
    x = start.double()
    for index in range(count):
        sigma, after = plan.sigmas[index : index + 2]
        v = velocities[index].double()
        if asked.sample_solver == "euler" or asked.ode:
            wanted = x + (after - sigma) * v
        else:
            wanted = (1 - after) * (x - sigma * v) + after * fresh[index].double()
        torch.testing.assert_close(found[index].double(), wanted, rtol=1e-7, atol=1e-7)
        x = found[index].double()
    if "dmd" in name:
        assert plan.sigmas == (1.0, 0.757, 0.522, 0.0)


def test_euler_is_diffusers() -> None:
    asked = request(**STEPS["euler"])
    velocities, start = torch.randn(4, 2, 3), torch.randn(2, 3)
    theirs = diffusers.FlowMatchEulerDiscreteScheduler()
    theirs.set_timesteps(sigmas=schedule(asked).sigmas[:-1])
    x, found = start, stepped(asked, velocities, start)
    for index, t in enumerate(theirs.timesteps):
        x = theirs.step(velocities[index], t, x, return_dict=False)[0]
        assert torch.equal(found[index], x)


def test_noise_is_drawn_anew() -> None:
    draw, again = (noise(request(base_seed=3), torch.device("cpu")) for _ in range(2))
    first, second = draw(), draw()
    assert torch.equal(again(), first) and not torch.equal(first, second)
    assert torch.equal(again(), second) and first.shape == (16, 2, 8, 8)


def test_experts_by_step() -> None:
    """Shift 16 has three of four levels above 0.9: two are wanted."""
    four = {"sample_solver": "euler", "sample_steps": 4, "sample_shift": 16.0}
    assert schedule(request("i2v-A14B", **four)).high_noise_steps == 3
    two = schedule(request("i2v-A14B", **four, boundary_step=2))
    assert two.experts == ("high_noise", "high_noise", "low_noise", "low_noise")
    assert schedule(request(**four, boundary_step=0)).high_noise_steps == 0
    assert schedule(request(**four, boundary_step=4)).high_noise_steps == 4


REFUSED = {
    "rising": ("--timesteps 500,1000", "must be falling timesteps"),
    "twice the same": ("--timesteps 1000,500,500", "must be falling timesteps"),
    "not numbers": ("--timesteps a,b", "must be a number"),
    "beyond": ("--timesteps 1001,5", "above 0 and at most 1000"),
    "shift beside": ("--timesteps 1000,500 --sample_shift 5", "drop it, or --sample_shift"),
    "steps beside": ("--timesteps 1000,500 --sample_steps 2", "drop it, or --sample_steps"),
    "unipc": ("--timesteps 1000,500", "use euler, dmd or rcm"),
    "dense": ("--task t2v-1.3B --boundary_step 2", "has one network"),
    "late": ("--boundary_step 41", "more than the 40 steps"),
    "many": ("--sample_solver rcm", "at most 4"),
    "ode": ("--ode", "belongs to --sample_solver rcm"),
    "sigma_max": ("--sigma_max 80 --sample_solver dmd", "belongs to --sample_solver rcm"),
    "quiet start": ("--sample_solver rcm --sample_steps 4 --sigma_max 10", "second level of"),
    "sigma_max beside": (
        "--sample_solver rcm --timesteps 900,500 --sigma_max 80",
        "no effect with --timesteps",
    ),
    "rcm's shift": ("--sample_solver rcm --sample_steps 4 --sample_shift 3", "no effect"),
    "recipe": ("--task ti2v-5B --recipe lightning-4step", "is for t2v-A14B, i2v-A14B, not"),
    "mag": (
        "--timesteps 1000,700,600,500,400,300,200,100 --sample_solver dmd --step_cache mag",
        "not for (--)?timesteps",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    words, sentence = REFUSED[name]
    with pytest.raises(InputError, match=sentence):
        planned(words)


def test_recipes() -> None:
    run = planned("--recipe lightning-4step").request
    assert (run.sample_solver, run.sample_steps, run.sample_shift) == ("euler", 4, 5.0)
    assert run.sample_guide_scale == (1.0, 1.0) and not run.guided
    assert schedule(run).high_noise_steps == 2
    more = planned("--recipe distill-4step --sample_steps 8 --sample_guide_scale 2")
    assert more.request.sample_steps == 8 and more.request.boundary_step is None
    assert any("guidance blurs" in line for line in more.notices)
    fast = planned("--task ti2v-5B --recipe fastwan-3step").request
    assert fast.timesteps == (1000, 757, 522) and fast.sample_steps == 3
    five = planned("--task ti2v-5B --recipe fastwan-3step --sample_steps 5").request
    assert five.timesteps is None and five.sample_solver == "dmd" and five.sample_steps == 5
    rcm = planned("--recipe rcm-4step --sigma_max 1600 --ode").request
    assert rcm.ode and rcm.first_sigma == 1600


@pytest.mark.parametrize(
    ("name", "task", "recipe"),
    [
        ("Wan2.2-Lightning/Wan2.2-T2V-A14B-4steps-lora-rank64-V1/x", "t2v-A14B", "lightning-4step"),
        ("wan2.2_i2v_A14b_high_noise_lightx2v_4step.safetensors", "i2v-A14B", "distill-4step"),
        ("Wan2.2-Distill-Models", "t2v-A14B", "distill-4step"),
        ("FastWan2.2-TI2V-5B-FullAttn-Diffusers", "ti2v-5B", "fastwan-3step"),
        ("TurboWan2.2-I2V-A14B-720P", "i2v-A14B", "rcm-4step"),
        ("Wan2.2-T2V-A14B", "t2v-A14B", None),
        ("Wan2.2-Lightning", "ti2v-5B", None),
    ],
)
def test_recipes_are_recognised_by_names(name: str, task: str, recipe: str | None) -> None:
    path = Path("/models") / name
    where = ([], [path]) if "ora" in name or "Lightning" in name else ([path], [])
    found = () if recipe is None else (recipe,)
    assert recipes.choose("auto", *where, PRESETS[task])[0] == found
    assert recipes.choose("none", *where, PRESETS[task]) == ((), {})


def test_a_folder_around_a_base_model_shows_no_recipe() -> None:
    for name in ("Wan2.2-Lightning/Wan2.2-T2V-A14B", "rCM-Wan/Wan2.2-T2V-A14B"):
        assert recipes.choose("auto", [Path(name)], [], PRESETS["t2v-A14B"])[0] == ()


def test_a_recipe_is_asked_for_anew_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"settings": planned("--sample_steps 30").settings}))
    settings = planned("--sample_steps 30 --frame_num 33 --fps 9").settings
    path.write_text(json.dumps({"settings": settings}))
    again = planned(f"--from_json {path} --recipe lightning-4step")
    assert (again.request.frame_num, again.output.fps) == (33, 9)  # which it does not set
    run = planned(f"--from_json {path} --recipe rcm-4step --ode").request
    assert (run.sample_solver, run.sample_steps, run.guided) == ("rcm", 4, False)
    path.write_text(json.dumps({"settings": planned("--recipe lightning-4step").settings}))
    again = planned(f"--from_json {path}").request
    assert (again.sample_solver, again.sample_steps) == ("euler", 4)
    off = planned(f"--from_json {path} --recipe none").request
    assert (off.sample_solver, off.sample_steps, off.sample_shift) == (
        "unipc",
        20,
        12.0,
    )  # the demo's


def test_a_recipes_own_value_changes_nothing() -> None:
    given = "--task ti2v-5B --recipe fastwan-3step"
    assert planned(f"{given} --sample_solver dmd").request.timesteps == (1000, 757, 522)
    other = planned(f"{given} --sample_solver euler").request
    assert other.timesteps is None and (other.sample_steps, other.sample_shift) == (3, 5.0)


def test_a_record_keeps_the_schedule_and_steps_take_it_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    run = planned("--sample_solver dmd --timesteps 1000,757,522 --boundary_step 1")
    path.write_text(json.dumps({"settings": run.settings}))
    again = planned(f"--from_json {path}").request
    assert again == run.request and again.timesteps == (1000, 757, 522)
    other = planned(f"--from_json {path} --sample_steps 6").request
    assert other.timesteps is None and other.boundary_step is None and other.sample_steps == 6
    listed = planned(f"--from_json {path} --timesteps 900,300").request
    assert listed.sample_steps == 2 and listed.boundary_step is None


@pytest.mark.slow
def test_python_classes_take_a_recipe(tiny: Any) -> None:
    """It sets what is not given, and nothing else."""
    model = wan.WanT2V("t2v-A14B", tiny("t2v-A14B"))
    common: dict[str, Any] = {"size": (32, 32), "frame_num": 1, "seed": 2, "output_type": "latent"}
    found = model.generate("a cat", **common, recipe="lightning-4step")
    four = {"sample_solver": "euler", "sampling_steps": 4, "shift": 5.0, "guide_scale": 1.0}
    assert torch.equal(found, model.generate("a cat", **common, **four))
    three = model.generate("a cat", **common, recipe="lightning-4step", sampling_steps=3)
    assert torch.equal(three, model.generate("a cat", **common, **four | {"sampling_steps": 3}))
    given = {"sampling_steps": 50, "guide_scale": 5.0, "shift": 5.0}  # generate's own defaults
    fifty = model.generate("a cat", **common, recipe="lightning-4step", **given)
    assert torch.equal(fifty, model.generate("a cat", **common, **given, sample_solver="euler"))
    with pytest.raises(InputError, match="recipe=fastwan-3step is for ti2v-5B, not for t2v-A14B"):
        model.generate("a cat", **common, recipe="fastwan-3step")


@pytest.mark.parametrize(
    ("task", "images", "sentence"),
    [
        ("t2v-A14B", "--last_image IMAGE", "--last_image is not for the task"),
        ("ti2v-5B", "--image IMAGE --last_image IMAGE", "--last_image is not for the task"),
        ("i2v-14B", "--image IMAGE --last_image IMAGE", "--last_image is not for the task"),
        ("flf2v-14B", "--image IMAGE", "ends with an image; add --last_image"),
        ("i2v-A14B", "--image IMAGE --last_image IMAGE --frame_num 1", "more than one frame"),
    ],
)
def test_last_images(task: str, images: str, sentence: str, tiny: Any, image_path: Path) -> None:
    words = f"--task {task} --ckpt_dir {tiny(task)} {images.replace('IMAGE', str(image_path))}"
    with pytest.raises(InputError, match=sentence):
        planned(words)


def test_the_folder_decides_which_image_model_it_is(tiny: Any, image_path: Path) -> None:
    for folder, task, more in (
        ("i2v-A14B", "i2v-A14B", ""),
        ("i2v-14B", "i2v-14B", ""),
        ("flf2v-14B", "flf2v-14B", f" --last_image {image_path}"),
    ):
        given = f"--task i2v-14B --ckpt_dir {tiny(folder)} --image {image_path}{more}"
        run = planned(f"{given} --size 832*480")
        assert run.request.preset.task == task
        if folder == "i2v-14B":
            assert (run.request.sample_shift, run.request.sample_steps) == (3.0, 4)
            assert run.request.negative_prompt.startswith("镜头晃动，")
            assert planned(f"{given} --size 1280*720").request.sample_shift == 5.0
    with pytest.raises(InputError, match="looks at 1 images"):
        planned(f"--task flf2v-14B --ckpt_dir {tiny('i2v-14B')} --image {image_path}")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "blocks.0.self_attn.gate_compress.weight",
            "video sparse attention, which is not supported",
        ),
        ("time_embedding_r.0.weight", "a second timestep"),
    ],
)
def test_networks_that_need_more_are_named(
    name: str, sentence: str, tiny: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "checkpoint"))
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2, 2)}, file)
    with pytest.raises(InputError, match=f"has {name}.*{sentence}"):
        describe(folder)


def test_turbo_weights_attend_densely(tiny: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "TurboWan2.1-T2V-1.3B"))
    file = folder / "diffusion_pytorch_model.safetensors"
    plain, name = describe(folder).experts["dit"], "blocks.0.self_attn.attn_op.proj_l.weight"
    save_file({**load_file(file), name: torch.zeros(2, 2)}, file)
    turbo = describe(folder).experts["dit"]
    assert turbo.sparse_linear and not plain.sparse_linear
    assert turbo.tensors.keys() == plain.tensors.keys()


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_ends_where_a_known_flow_ends(solver: str) -> None:
    """All noise flows straight to one video: velocity (x - video) / sigma, for any latents x."""
    generator = torch.Generator().manual_seed(3)
    video, x = torch.randn(2, 4, 3, 5, 5, generator=generator).double()
    steps = 4 if solver == "rcm" else 12
    asked = request(sample_solver=solver, sample_steps=steps)
    levels = schedule(asked)
    stepper, told = make_solver(
        asked, levels, lambda: torch.randn(x.shape, generator=generator, dtype=x.dtype)
    )
    for timestep, sigma in zip(told, levels.sigmas, strict=False):
        velocity = (x - video) / sigma
        (x,) = stepper.step(velocity, timestep, x, return_dict=False)
        assert x.isfinite().all()
    assert torch.allclose(x, video, atol=1e-5)
