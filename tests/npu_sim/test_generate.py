"""generate.py --device npu from prompt to latents and to the video, on 1, 2 and 4 ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.conftest import slow
from tests.dist import run_on_ranks
from tests.distributed.topology import ROWS, Topology
from tests.npu_sim import checkpoint
from tests.npu_sim.latents import (
    LONG,
    MODES,
    WAYS,
    Way,
    build_run,
    make_arguments,
    make_latents,
    refuse_demo,
)
from tests.npu_sim.oracles import relative_rms_error
from tests.tasks.tasks import write_moving_box as control_video
from tools.make_character import write_character_folder as draw
from tools.make_sound import write_wav
from wan import device as devices
from wan.app import flag_parser as flags
from wan.app.resolve import resolve_command_line
from wan.pipeline import build
from wan.pipeline.clips import generate_clips

pytestmark = pytest.mark.dist

MODES_OF_ONE_BLOCK = [mode for mode, row in ROWS.items() if row.blocks == 1]
LAYOUTS = (Topology(2, 2), Topology(4, 1), Topology(2, 1), Topology(2, 2, "bidirectional"))


@cache
def make_single_process_latents(rig: Path, way: Way) -> Tensor:
    """Make the latents in one process, without exchanges."""
    flags = tuple(flag for flag in way.flags if flag != "--quant_alltoall")
    return run_on_ranks(1, make_latents, make_arguments(rig, way._replace(flags=flags)), way.chip)[
        0
    ]


def check_modes(rig: Path, name: str, way: Way, layout: Topology, modes: list[str]) -> None:
    topology_flags = ["--ulysses_size", str(layout.ulysses), "--ring_size", str(layout.ring)]
    topology_flags += ["--ring_type", layout.ring_type] if layout.ring > 1 else []
    latents_by_mode = {}
    for mode in modes:
        command_line = [*make_arguments(rig, way), *topology_flags, *MODES[mode]]
        ranks = run_on_ranks(layout.world, make_latents, command_line, way.chip, timeout=300)
        assert all(torch.equal(ranks[0], other) for other in ranks)
        latents_by_mode[mode] = ranks[0]
    errors = {
        "one process": relative_rms_error(
            latents_by_mode["0"], make_single_process_latents(rig, way)
        )
    }
    for mode in modes:
        if ROWS[mode].blocks == 1 or name not in ("dense", "laser"):
            assert torch.equal(latents_by_mode[mode], latents_by_mode["0"]), mode
        errors[mode] = relative_rms_error(latents_by_mode[mode], latents_by_mode["0"])
    assert all(error < 1e-2 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, LAYOUTS[i % 4]) for i, name in enumerate(sorted(set(WAYS) - {"laser"}))],
    ids=str,
)
def test_latents_of_all_modes(rig: Path, name: str, layout: Topology) -> None:
    check_modes(rig, name, WAYS[name], layout, list(MODES))


def test_latents_of_the_pytorch_kernel(rig: Path) -> None:
    """--attention_backend sdpa, in one process and on a ring, against the vendor's kernel."""
    way = WAYS["dense"]
    command_line = [*make_arguments(rig, way), "--attention_backend", "sdpa"]
    single_latents = run_on_ranks(1, make_latents, command_line, way.chip)[0]
    ring_latents = run_on_ranks(2, make_latents, [*command_line, "--ring_size", "2"], way.chip)[0]
    errors = [
        relative_rms_error(actual, make_single_process_latents(rig, way))
        for actual in (single_latents, ring_latents)
    ]
    assert all(0 < error < 1e-2 for error in errors), errors


def test_latents_of_laser(rig: Path) -> None:
    """2048 tokens, and so no second block of queries."""
    check_modes(rig, "laser", WAYS["laser"], Topology(2, 1), ["0", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_latents_of_all_layouts(rig: Path, name: str, layout: Topology) -> None:
    """Laser's second block of queries needs 4096 tokens, twice that on a ring."""
    if name != "laser":
        check_modes(rig, name, WAYS[name], layout, list(MODES))
    elif layout.ring == 1:
        check_modes(rig, name, WAYS[name]._replace(size=LONG), layout, list(MODES))
    else:
        check_modes(rig, name, WAYS[name]._replace(size=LONG), layout, MODES_OF_ONE_BLOCK)


@pytest.mark.parametrize("task", ["i2v-14B", "flf2v-14B"])
def test_image_conditioned_networks(task: str, tmp_path: Path) -> None:
    folder, images = checkpoint.make_rig_checkpoint(tmp_path / "checkpoint", task, heads=4), []
    for name in ("image", "last_image")[: 1 if task == "i2v-14B" else 2]:
        Image.effect_noise((96, 64), 80).convert("RGB").save(tmp_path / f"{name}.png")
        images += [f"--{name}", str(tmp_path / f"{name}.png")]
    command_line = [
        "--task",
        task,
        "--ckpt_dir",
        str(folder),
        "--size",
        "96*64",
        "--frame_num",
        "5",
    ]
    command_line += ["--sample_steps", "2", "--base_seed", "7", *images]
    (expected,) = run_on_ranks(1, make_all_clips, command_line, "A2", "cpu")
    for ranks, topology_flags in ((1, []), (2, ["--ulysses_size", "2", "--comm_type", "1"])):
        latents_by_rank = run_on_ranks(
            ranks, make_all_clips, [*command_line, *topology_flags, "--device", "npu"], "A2", "npu"
        )
        assert (
            torch.equal(latents_by_rank[0], latents_by_rank[-1])
            and relative_rms_error(latents_by_rank[0], expected) < 1e-2
        )


def make_all_clips(argv: list[str], chip: str, device: str) -> Tensor:
    """Make the latents of all clips of a command line."""
    if device == "npu":
        run_settings, pipeline = build_run(argv, chip)
    else:
        run_settings = resolve_command_line(
            flags.parse_flags([*argv, "--device", "cpu", "--precision", "bf16"]), refuse_demo
        )
        pipeline = build.build_pipeline(run_settings.setup, devices.select_device("cpu"))
    if not run_settings.params.has_clips:
        return pipeline.generate_latents(run_settings.params, run_settings.load_inputs()).cpu()
    video_clips = generate_clips(pipeline, run_settings.params, run_settings.load_inputs())
    return torch.cat([clip.latents.cpu() for clip in video_clips], dim=1)


@pytest.mark.parametrize(
    ("clip_count", "ways"),
    [
        (1, [["block", "--ring_size", "2"]]),
        slow(2, [["true", "--ulysses_size", "2", "--comm_type", "1"], ["block"]]),
    ],
)
def test_a_speech_video(clip_count: int, ways: list[list[str]], tmp_path: Path) -> None:
    """Close to the CPU, also with block offload and on two ranks."""
    folder = checkpoint.make_rig_checkpoint(tmp_path / "checkpoint", "s2v-14B", heads=4)
    Image.new("RGB", (96, 64), "gray").save(tmp_path / "gray.png")
    audio_file = write_wav(tmp_path / "voice.wav", 0.65 * clip_count)
    command_line = [
        "--task",
        "s2v-14B",
        "--ckpt_dir",
        str(folder),
        "--image",
        str(tmp_path / "gray.png"),
    ]
    command_line += ["--audio", str(audio_file), "--size", "64*64"]
    command_line += ["--infer_frames", "12", "--sample_steps", "2", "--base_seed", "7"]
    (expected,) = run_on_ranks(1, make_all_clips, command_line, "A2", "cpu", timeout=300)
    assert expected.shape == (16, 3 * clip_count, 8, 8)
    for way in ways:
        ranks = 2 if "2" in way else 1
        device_flags = ["--device", "npu", "--offload_model", *way]
        latents_by_rank = run_on_ranks(
            ranks, make_all_clips, [*command_line, *device_flags], "A2", "npu", timeout=300
        )
        assert (
            torch.equal(latents_by_rank[0], latents_by_rank[-1])
            and relative_rms_error(latents_by_rank[0], expected) < 2e-2
        )


@pytest.mark.slow
def test_an_animated_character(tmp_path: Path) -> None:
    """Two clips: close to the CPU, and two ranks close to one."""
    folder = checkpoint.make_rig_checkpoint(tmp_path / "checkpoint", "animate-14B")
    animate_dir = tmp_path / "moves"
    draw(animate_dir, (128, 64), 8)
    command_line = [
        "--task",
        "animate-14B",
        "--ckpt_dir",
        str(folder),
        "--src_root_path",
        str(animate_dir),
    ]
    command_line += [
        "--frame_num",
        "5",
        "--sample_steps",
        "2",
        "--base_seed",
        "7",
        "--replace_flag",
    ]
    (expected,) = run_on_ranks(1, make_all_clips, command_line, "A2", "cpu", timeout=300)
    command_line += ["--device", "npu"]
    (actual,) = run_on_ranks(1, make_all_clips, command_line, "A2", "npu", timeout=300)
    assert actual.shape == (16, 6, 8, 16) and relative_rms_error(actual, expected) < 2e-2
    latents_by_rank = run_on_ranks(
        2, make_all_clips, [*command_line, "--ulysses_size", "2", "--comm_type", "1"], "A2", "npu"
    )
    assert torch.equal(*latents_by_rank) and relative_rms_error(latents_by_rank[0], actual) < 1e-2


def test_a_video_under_control(tmp_path: Path) -> None:
    """With mask and image: close to the CPU; with block offload two ranks are close to one."""
    folder, picture = tmp_path / "checkpoint", tmp_path / "gray.png"
    checkpoint.make_rig_checkpoint(folder, "vace-A14B", heads=4)
    Image.new("RGB", (96, 64), "gray").save(picture)
    command_line = [
        "--task",
        "vace-A14B",
        "--ckpt_dir",
        str(folder),
        "--src_ref_images",
        str(picture),
    ]
    for name in ("video", "mask"):
        command_line += [f"--src_{name}", str(control_video(tmp_path / f"{name}.mp4", (64, 64)))]
    command_line += [
        "--size",
        "64*64",
        "--frame_num",
        "9",
        "--sample_steps",
        "3",
        "--base_seed",
        "7",
    ]
    (expected,) = run_on_ranks(1, make_all_clips, command_line, "A2", "cpu", timeout=300)
    command_line += ["--device", "npu", "--offload_model", "block"]
    (actual,) = run_on_ranks(1, make_all_clips, command_line, "A2", "npu", timeout=300)
    assert actual.shape == (16, 3, 8, 8) and relative_rms_error(actual, expected) < 2e-2
    latents_by_rank = run_on_ranks(
        2, make_all_clips, [*command_line, "--ring_size", "2"], "A2", "npu", timeout=300
    )
    assert relative_rms_error(latents_by_rank[0], actual) < 1e-2
