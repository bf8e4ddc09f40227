"""generate.py --device npu from prompt to latents, on 1, 2 and 4 ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.dist import run_on_ranks
from tests.distributed.topology import ROWS, Topology
from tests.npu_sim import checkpoint
from tests.npu_sim.latents import (
    MODES,
    WAYS,
    Way,
    build_run,
    make_arguments,
    make_latents,
    refuse_demo,
)
from tests.npu_sim.oracles import relative_rms_error
from tests.tasks.tasks import write_moving_box
from tools.make_character import write_character_folder
from tools.make_sound import write_wav
from wan import device as devices
from wan.app import flag_parser as flags
from wan.app.resolve import ResolveContext, resolve_video
from wan.pipeline import build
from wan.pipeline.clips import generate_clips

pytestmark = pytest.mark.dist

LAYOUTS = (Topology(2, 2), Topology(4, 1), Topology(2, 1), Topology(2, 2, "bidirectional"))


@cache
def make_single_process_latents(rig: Path, way: Way) -> Tensor:
    """Make the latents in one process, without exchanges."""
    way = way._replace(flags=tuple(flag for flag in way.flags if flag != "--quant_alltoall"))
    return run_on_ranks(1, make_latents, make_arguments(rig, way), way.chip)[0]


@pytest.mark.parametrize(
    ("name", "layout", "mode"),
    [
        ("dense", LAYOUTS[0], "2"),
        ("fp8", LAYOUTS[1], "overlap"),
        ("fp8-transport", LAYOUTS[2], "1"),
        ("v2", LAYOUTS[3], "overlap"),
        ("v3", LAYOUTS[2], "1"),
        ("v3-fp8", LAYOUTS[1], "2"),
    ],
    ids=str,
)
def test_latents_of_modes_in_turn(rig: Path, name: str, layout: Topology, mode: str) -> None:
    """Compare a mode with mode 0, and mode 0 with one process; `test_matrix` has all layouts."""
    way = WAYS[name]
    topology_flags = ["--ulysses_size", str(layout.ulysses), "--ring_size", str(layout.ring)]
    topology_flags += ["--ring_type", layout.ring_type] if layout.ring > 1 else []
    outputs = []
    for mode_flags in (MODES["0"], MODES[mode]):
        command_line = [*make_arguments(rig, way), *topology_flags, *mode_flags]
        plain, *others = run_on_ranks(
            layout.world, make_latents, command_line, way.chip, timeout=300
        )
        assert all(torch.equal(plain, other) for other in others)
        outputs.append(plain)
    plain, actual = outputs
    assert torch.equal(actual, plain) or (ROWS[mode].blocks > 1 and name == "dense")
    for output, expected in ((actual, plain), (plain, make_single_process_latents(rig, way))):
        assert relative_rms_error(output, expected) < 1e-2


def test_latents_of_the_pytorch_kernel(rig: Path) -> None:
    """--attention_backend sdpa, in one process and on a ring, against the vendor's kernel."""
    way = WAYS["dense"]
    command_line = [*make_arguments(rig, way), "--attention_backend", "sdpa"]
    for ranks, more in ((1, []), (2, ["--ring_size", "2"])):
        latents = run_on_ranks(ranks, make_latents, [*command_line, *more], way.chip)[0]
        assert 0 < relative_rms_error(latents, make_single_process_latents(rig, way)) < 1e-2


def make_all_clips(argv: list[str], chip: str, device: str) -> Tensor:
    """Make the latents of all clips of a command line."""
    if device == "npu":
        run, pipeline = build_run([*argv, "--device", "npu"], chip)
    else:
        cpu_flags = ["--device", "cpu", "--precision", "bf16"]
        run = resolve_video(
            ResolveContext(make_demo=refuse_demo), flags.parse_flags([*argv, *cpu_flags])
        )
        pipeline = build.build_pipeline(run.setup, devices.select_device("cpu"))
    if not run.params.has_clips:
        return pipeline.generate_latents(run.params, run.load_inputs()).cpu()
    video_clips = generate_clips(pipeline, run.params, run.load_inputs())
    return torch.cat([clip.latents.cpu() for clip in video_clips], dim=1)


def write_inputs(folder: Path) -> None:
    """Write the files that the flags of TASKS name."""
    Image.effect_noise((96, 64), 80).convert("RGB").save(folder / "picture.png")
    write_wav(folder / "voice.wav", 0.65)
    write_wav(folder / "long.wav", 1.3)
    for name in ("video", "mask"):
        write_moving_box(folder / f"{name}.mp4", (64, 64))
    write_character_folder(folder / "moves", (128, 64), 8)


class TaskRun(NamedTuple):
    """Flags of a task, with files of `write_inputs`, the shape of its latents, and NPU runs."""

    task: str
    flags: str
    shape: tuple[int, ...]
    ways: tuple[str, ...]
    bound: float = 2e-2
    heads: int = 4


SPEECH = "--image picture.png --size 64*64 --infer_frames 12 --sample_steps 2 --audio"
CONTROL = "--src_ref_images picture.png --src_video video.mp4 --src_mask mask.mp4"
ULYSSES, RING, BLOCK = "--ulysses_size 2 --comm_type 1", "--ring_size 2", "--offload_model block"
TASKS = {
    "picture": TaskRun(
        "i2v-14B",
        "--image picture.png --size 96*64 --frame_num 5 --sample_steps 2",
        (16, 2, 8, 12),
        (ULYSSES,),
        bound=1e-2,
    ),
    "speech": TaskRun("s2v-14B", f"{SPEECH} voice.wav", (16, 3, 8, 8), (f"{RING} {BLOCK}",)),
    "control": TaskRun(
        "vace-A14B",
        f"{CONTROL} --size 64*64 --frame_num 9 --sample_steps 3",
        (16, 3, 8, 8),
        (f"{RING} {BLOCK}",),
    ),
    "two clips of speech": TaskRun(
        "s2v-14B", f"{SPEECH} long.wav", (16, 6, 8, 8), (f"{ULYSSES} --offload_model true", BLOCK)
    ),
    "two clips of a character": TaskRun(
        "animate-14B",
        "--src_root_path moves --frame_num 5 --sample_steps 2 --replace_flag",
        (16, 6, 8, 16),
        ("", ULYSSES),
        heads=8,
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] if "two clips" in x else []) for x in TASKS],
)
def test_other_tasks_are_close_to_the_cpu(name: str, tmp_path: Path) -> None:
    """Image conditioned networks, speech and control, also with block offload and on two ranks."""
    run = TASKS[name]
    folder = checkpoint.make_rig_checkpoint(tmp_path / "checkpoint", run.task, heads=run.heads)
    write_inputs(tmp_path)
    command_line = ["--task", run.task, "--ckpt_dir", str(folder), "--base_seed", "7"]
    command_line += [
        str(tmp_path / word) if (tmp_path / word).exists() else word for word in run.flags.split()
    ]
    (expected,) = run_on_ranks(1, make_all_clips, command_line, "A2", "cpu", timeout=300)
    assert expected.shape == run.shape
    for way in run.ways:
        arguments = [*command_line, *way.split()], "A2", "npu"
        first, *others = run_on_ranks(1 + ("2" in way), make_all_clips, *arguments, timeout=300)
        assert all(torch.equal(first, other) for other in others)
        assert relative_rms_error(first, expected) < run.bound, way
