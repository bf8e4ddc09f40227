"""Causal tasks: files of students, settings, prompts, the image, the plan, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.checkpoint_files import add_prefix, are_equal, load_tensors, read_values
from tests.frames import read_frames
from tests.pipelines import (
    build_quick_pipeline,
    estimate_run,
    plan_stages,
    resolve_argv,
    resolve_plan,
)
from tests.refusals import check_refusals, get_refusal
from tests.tasks.tasks import write_picture
from wan.app.failures import describe_error
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.cli import main as generate
from wan.media.video_writer import Mp4Encoder, load_latents
from wan.modules.causal import WanCausalModel
from wan.pipeline import memory_estimate
from wan.pipeline.memory_estimate import check_memory, estimate_network_sizes, place_kept_kv
from wan.planner.measure import Planner
from wan.settings.command import NetworkFiles
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.tasks.textimage2video import make_first_frame

CAUSAL = (PRESETS["causal-1.3B"],)
Make = Callable[..., Path]


@pytest.fixture
def folder(tiny: Make) -> Path:
    return tiny("causal-1.3B")


def save_student(weights: dict[str, Tensor], path: Path, **content: Any) -> Path:
    """Saves a file as the distillations publish it, in the wrappers of FSDP and of the model."""
    torch.save({"generator_ema": add_prefix(weights, "model."), **content}, path)
    return path


def test_students_are_read_from_their_dictionaries(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The averaged weights are taken before those of the last step.

    In other files nothing tells a student from a model of whole videos: a line in the log says so.
    The config.json of a checkpoint that is written here does.
    """
    caplog.set_level(logging.INFO, "wan")
    weights = load_tensors(folder / "diffusion_pytorch_model.safetensors")
    later = {name: x + 1 for name, x in weights.items()}
    wrapped = add_prefix(later, "model._fsdp_wrapped_module.")
    files = {
        "ema.pt": {"generator_ema": add_prefix(weights, "model.")},
        "both.pt": {
            "generator": wrapped,
            "generator_ema": add_prefix(weights, "model."),
            "critic": add_prefix(later, "model."),
        },
        "one.pt": {"generator": add_prefix(weights, "model."), "step": 3},
    }
    for name, content in files.items():
        path = tmp_path / name
        torch.save(content, path)
        run = resolve_argv(
            ["--task", "causal-1.3B", "--ckpt_dir", folder, "--dit", path, "--device", "cpu"]
        )
        tensors = run.setup.checkpoint.experts["dit"].tensors
        assert are_equal(read_values(tensors), {n: x.float() for n, x in weights.items()}), name
    assert caplog.text.count("does not say") == 1 and "one.pt does not say" in caplog.text
    files_of_any_task = NetworkFiles(dit=tmp_path / "ema.pt")
    assert inspect_checkpoint(folder, files_of_any_task).kind == "causal"
    assert inspect_checkpoint(folder, presets=CAUSAL).kind == "causal"
    assert inspect_checkpoint(folder).kind == "causal"
    assert caplog.text.count("does not say") == 1


def test_a_lora_of_peft_is_merged(folder: Path, tmp_path: Path) -> None:
    """As LongLive's: names of PEFT, no alpha, in a dictionary of a PyTorch file."""
    weights = load_tensors(folder / "diffusion_pytorch_model.safetensors")
    layer, generator = "blocks.1.self_attn.q", torch.Generator().manual_seed(0)
    weight = weights[f"{layer}.weight"].float()
    down, up = (torch.randn(s, generator=generator) for s in ((4, len(weight)), (len(weight), 4)))
    prefix = f"base_model.model.{layer}"
    pair = {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    torch.save({"generator_lora": pair}, tmp_path / "lora.pt")
    base = save_student(weights, tmp_path / "longlive_base.pt")
    flags = ["--task", "causal-1.3B", "--ckpt_dir", folder, "--dit", base]
    run = resolve_argv([*flags, "--lora", tmp_path / "lora.pt", "--device", "cpu"])
    assert (run.params.local_attn_size, run.params.sink_size) == (12, 3)  # by its name
    tensors = run.setup.checkpoint.experts["dit"].tensors
    merged = merge_loras(open_sources(tensors), run.setup.loras["dit"])
    actual = merged[f"{layer}.weight"].read(slice(None)).float()
    assert (actual - (weight + up @ down)).abs().max() <= 1e-5


def test_prompts_share_the_blocks_and_an_image_begins_the_video(
    tiny: Make, folder: Path, tmp_path: Path
) -> None:
    def generate(folder: Path, *argv: str) -> Tensor:
        run, pipeline = build_quick_pipeline(folder, "--task", "causal-1.3B", *argv)
        return pipeline.generate_latents(run.params, run.inputs)

    size = ["--size", "32*32", "--frame_num", "45"]
    one, two = generate(folder, *size, "--prompt", "a"), generate(folder, *size, "--prompt", "b")
    both = generate(folder, *size, "--clip_prompts", "a", "b")
    assert torch.equal(both[:, :6], one[:, :6]) and not torch.equal(one[:, :6], two[:, :6])
    assert not torch.equal(both[:, 6:], one[:, 6:]) and not torch.equal(both[:, 6:], two[:, 6:])
    same = generate(folder, *size, "--clip_prompts", "a", "a")
    assert torch.equal(same, one)
    longer = generate(folder, *size[:2], "--frame_num", "45", "--local_attn_size", "6")
    assert longer.shape[1] == 12
    image = str(write_picture(tmp_path / "cat.png", size=(64, 64)))
    five = ["--task", "causal-5B", "--size", "64*64", "--frame_num", "29", "--image", image]
    run, pipeline = build_quick_pipeline(tiny("causal-5B"), *five)
    latents = pipeline.generate_latents(run.params, run.inputs)
    first = pipeline.encode_video(make_first_frame(run.inputs.image, run.params.video_size))
    assert torch.equal(latents[:, :1], first) and latents.shape[1] == 8


def test_a_stream_begins_before_the_second_block_is_generated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The video and its latents are those of a run that decodes all blocks at the end."""
    events: list[str] = []
    write_frames = Mp4Encoder.write_frames

    def record_frames(encoder: Mp4Encoder, frames: Tensor) -> None:
        events.append(f"{frames.shape[1]} frames")
        write_frames(encoder, frames)

    def record_forward(module: Any, _: object) -> None:
        if isinstance(module, WanCausalModel):
            events.append("forward")

    monkeypatch.setattr(Mp4Encoder, "write_frames", record_frames)
    argv = ["--task", "causal-1.3B", "--ckpt_dir", str(folder), "--size", "32*32", "--prompt", "a"]
    argv += ["--frame_num", "21", "--base_seed", "1", "--save_latents", "--save_file"]
    hook = register_module_forward_pre_hook(record_forward)
    steps, clean_pass = ["forward"] * 4, ["forward"]
    first, second = ["1 frames", "4 frames", "4 frames"], ["4 frames"] * 3
    try:
        assert generate.main([*argv, str(tmp_path / "once.mp4")]) == 0
        assert events == [*steps, *clean_pass, *steps, *first, *second]
        events.clear()
        assert generate.main([*argv, str(tmp_path / "stream.mp4"), "--stream"]) == 0
    finally:
        hook.remove()
    first, second = ([frames for frames in part for _ in range(2)] for part in (first, second))
    assert events == [*steps, *first, *clean_pass, *steps, *second]  # each in two encoders
    videos = [read_frames(tmp_path / f"{name}.mp4") for name in ("once", "stream")]
    assert np.array_equal(*videos)
    names = (f"{name}.latents.safetensors" for name in ("once", "stream"))
    assert torch.equal(*(load_latents(tmp_path / name) for name in names))


def test_the_plan_has_the_bytes_of_the_kept_keys(folder: Path, capfd: Any) -> None:
    """Ranks share them by heads; a window limits them, however long the video is."""
    flags = ["--task", "causal-1.3B", "--size", "832*480", "--precision", "bf16", "--device", "cpu"]
    kept = 2 * 30 * 12 * 1560 * 1536 * 2
    for ranks in (1, 2, 4):
        run = resolve_plan(
            *flags,
            *("--local_attn_size", 12, "--sink_size", 3, "--frame_num", 957),
            *("--ulysses_size", ranks),
        )
        assert plan_stages(run)["denoising"]["kept K/V"] == kept // ranks
        sizes = estimate_network_sizes(run.setup, run.params)
        assert sizes.dit.per_clip["kept K/V"] == kept // ranks
    assert any("the first 9 of 957 frames need 4" in notice for notice in run.notices)
    short = plan_stages(resolve_plan(*flags, "--frame_num", "9"))
    assert short["denoising"]["kept K/V"] == kept // 4


def test_keys_that_fit_only_into_host_memory_are_there(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """By definition those of three layers of 30 are on the device; the plan has the copies."""
    flags = ["--task", "causal-1.3B", "--device", "cuda", "--precision", "bf16", "--t5_cpu"]
    run, kept = resolve_plan(*flags, "--size", "832*480"), 2 * 30 * 21 * 1560 * 1536 * 2
    need = estimate_run(run)["denoising"].total()
    least = need - kept + kept * 3 // 30
    table = {  # bytes of the device, of the host (page-locked memory: up to twice the tensors)
        (need + (1 << 30), None): False,  # 1 GiB to spare
        (need + (1 << 30) - 1, None): True,
        (least, 2 * kept): True,
        (least - 1, None): False,
        (least, 2 * kept - 1): False,
    }
    for (free, host_memory), in_host_memory in table.items():
        setup = place_kept_kv(run.setup, run.params, "cuda", free, host_memory)
        assert setup.keeps_kv_in_host_memory == in_host_memory, (free, host_memory)
        monkeypatch.setattr(memory_estimate, "get_free_memory", lambda _, free=free: free)
        monkeypatch.setattr("wan.utils.system.read_available_memory", lambda x=host_memory: x)
        refused = bool(get_refusal(check_memory, run.setup, run.params, 1))
        assert refused == (free < need and not in_host_memory)
    planner = Planner(replace(run.setup, keeps_kv_in_host_memory=True), run.params)
    assert planner.compute_stage_memory()["denoising"]["kept K/V"] == kept * 3 // 30
    assert planner.compute_host_bytes() == kept
    for device_memory, is_moved in ((12, False), (7, True)):
        plan = [*flags, "--size", "832*480", "--device_memory", str(device_memory), "--plan"]
        assert generate.main(plan) == 0
        report = " ".join(capfd.readouterr().out.split())
        assert ("6.04 GB copied from the host per forward" in report) == is_moved
        assert "Fits" in report


def test_refusals(tiny: Make, folder: Path, tmp_path: Path) -> None:
    weights = load_tensors(folder / "diffusion_pytorch_model.safetensors")
    student = save_student(weights, tmp_path / "student.pt")
    other = tiny("t2v-1.3B")
    other_weights = load_tensors(other / "diffusion_pytorch_model.safetensors")
    save_file(
        load_file(next(tiny("i2v-14B").glob("*.safetensors"))), tmp_path / "image.safetensors"
    )
    torch.save({"generator": {"a": 1}}, tmp_path / "empty.pt")
    picture = write_picture(tmp_path / "cat.png")
    sizes = ["--size", "64*64"]
    cases: dict[str, list[object]] = {
        "partial block": ["--frame_num", 17],
        "partial block, shorter than one": ["--frame_num", 5],
        "end of the positions": ["--frame_num", 4101],
        "partial block at the end of the positions": ["--frame_num", 4093],
        "window of less than a block": ["--local_attn_size", 2],
        "window without room beside the sink": ["--local_attn_size", 6, "--sink_size", 4],
        "sink below zero": ["--sink_size", -1],
        "blocks of no frame": ["--num_frame_per_block", 0],
        "window that is a word": ["--local_attn_size", "all"],
        "guidance": ["--sample_guide_scale", 5],
        "guidance in cross-attention": ["--nag_scale", 11],
        "more prompts than blocks": ["--clip_prompts", "a", "b", "c"],
        "prompt and prompts": ["--clip_prompts", "a", "b", "--prompt", "c"],
        "image for 1.3B": ["--image", picture],
        "last image": ["--last_image", picture],
        "clips": ["--num_clip", 2],
        "source video": ["--src_video", picture],
        "step cache": ["--step_cache", "first_block"],
        "attention cache": ["--use_attentioncache"],
        "sparse attention": ["--use_rainfusion"],
        "FP8 attention": ["--fa_quant", "fp8"],
        "compile": ["--compile"],
        "skipped blocks": ["--slg_blocks", "1"],
        "two experts": ["--dit_high_noise", student],
        "network for images": ["--dit", tmp_path / "image.safetensors"],
        "no weights in the dictionary": ["--dit", tmp_path / "empty.pt"],
        "5B's task": ["--task", "causal-5B", "--frame_num", "29"],
    }
    sentences = {}
    for case, flags in cases.items():
        argv = ["--task", "causal-1.3B", "--ckpt_dir", folder, *sizes, "--device", "cpu", *flags]
        sentences[case] = refuse(argv)
    assert other_weights.keys() == weights.keys()
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", other, "--dit", student, *sizes]
    sentences["student for another task"] = refuse(argv)
    window = ["--task", "t2v-1.3B", "--ckpt_dir", other, *sizes, "--local_attn_size", 12]
    sentences["window for another task"] = refuse(window)
    ring = ["--task", "causal-1.3B", "--ring_size", 2, "--plan"]
    sentences["ring"] = get_refusal(resolve_plan, *ring[:-1], *sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_estimate, "get_free_memory", lambda _: 10**9)
        video = ["--frame_num", 237, "--local_attn_size", 60, "--precision", "bf16"]
        run = resolve_plan("--task", "causal-1.3B", "--device", "cpu", *video)
        sentences["too little memory"] = get_refusal(check_memory, run.setup, run.params, 1)
    assert sentences["partial block at the end of the positions"].endswith("use 4089.")
    check_refusals("causal tasks", sentences)


def refuse(argv: list[object]) -> str:
    try:
        resolve_argv(argv)
    except InputError as error:
        return describe_error(error)
    except SystemExit:
        return "exit"
    return ""
