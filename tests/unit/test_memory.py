"""Runs that cannot fit into this machine's memory are refused; how free memory is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.pipelines import estimate_run, resolve_plan
from tests.refusals import get_refusal
from wan.app.resolve import make_setup
from wan.checkpoint.layout import make_reference_checkpoint
from wan.pipeline import memory_estimate
from wan.pipeline.setup import Setup
from wan.planner.measure import Planner
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.run_options import read_run_options
from wan.tasks.base import VideoParams, make_video_params
from wan.utils import system

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def has_huge_pages() -> bool:
    """Whether a program may ask for huge pages and does not get them unasked."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[madvise]" in path.read_text() and os.sysconf("SC_PAGESIZE") == 4096


def make_hd_setup(device: str) -> tuple[Setup, VideoParams]:
    preset = PRESETS["t2v-A14B"]
    setup, _ = make_setup(
        read_run_options({"device": device}),
        preset,
        make_reference_checkpoint(preset),
        world_size=1,
    )
    return setup, make_video_params(preset, {"prompt": "", "size": (1280, 720)})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_least_that_a_run_takes_must_be_free(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, request = make_hd_setup(device)
    sizes = memory_estimate.estimate_network_sizes(setup, request)
    stages = memory_estimate.compute_stage_memory(setup, request, sizes)
    least = max(usage.total() for usage in stages.values())

    def refuse(free: int | None, ranks: int = 1) -> str:
        monkeypatch.setattr(memory_estimate, "get_free_memory", lambda _: free)
        return get_refusal(memory_estimate.check_memory, setup, request, ranks)

    assert not refuse(least) and not refuse(None)
    assert re.search(r"needs at least .* GB \(denoising\).*with plan\.", refuse(least - 1))
    ranks_share_memory = device == "cpu"
    refusal = refuse(2 * stages["denoising"].total() - 1, ranks=2)
    assert ("this machine has" in refusal) == ranks_share_memory


@pytest.mark.parametrize(
    ("gpu", "host", "where"), [(0, 0, "a GPU has"), (0, None, ""), (10**12, 0, "")]
)
def test_a_device_that_torch_chooses(
    gpu: int, host: int | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU here may be one that torch cannot use: the run is refused where nothing can hold it."""
    free = {"cuda": gpu, "cpu": host}
    monkeypatch.setattr(memory_estimate, "query_gpu_memory", lambda _: [gpu])
    monkeypatch.setattr(memory_estimate, "get_free_memory", free.get)
    if not where:
        memory_estimate.check_memory(*make_hd_setup("auto"), ranks_here=1)
        return
    with pytest.raises(InputError, match=where):
        memory_estimate.check_memory(*make_hd_setup("auto"), ranks_here=1)


def test_memory_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answers = (("echo 10; echo 30", 30 * 2**20), ("echo none", None), ("exit 9", None))
    for clock, (script, free) in zip((10, 20, 30), answers, strict=True):
        monkeypatch.setattr("time.monotonic", lambda now=clock: now)  # an answer holds 10 seconds
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert memory_estimate.get_free_memory("cuda") == free
    assert memory_estimate.get_free_memory("npu") is None


GROUPS = {  # of version 2, and of version 1
    "0::/a/b\n": ("sys/fs/cgroup/a", "memory.max", "memory.current", "file"),
    "4:memory:/a\n3:cpu:/z\n": (
        *("sys/fs/cgroup/memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_cache",
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_memory_of_a_host(group: str, tmp_path: Path) -> None:
    """The limit of a control group counts, without page cache, where it is below free memory."""
    assert system.read_available_memory(tmp_path) is None
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(group)
    assert system.read_available_memory(tmp_path) == 7 * 1024
    folder, limit, usage, cache = GROUPS[group]
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / limit).write_text("5000\n")
    (tmp_path / folder / usage).write_text("4000\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 1\n{cache} 500\n")
    assert system.read_available_memory(tmp_path) == 1500
    (tmp_path / folder / limit).write_text("max\n")
    assert system.read_available_memory(tmp_path) == 7 * 1024


PEAKS = """
import mmap, sys, time
from pathlib import Path
from wan.utils import system

def now(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

def wait(index, least):
    end = time.monotonic() + 20
    while system._PEAK_BYTES[index] < least and time.monotonic() < end:
        time.sleep(0.01)

with system.sample_peak_memory():
    before = now("RssAnon"), now("RssFile")
    allocated = b"x" * (80 << 20)
    wait(0, before[0] + (80 << 20))
    del allocated
    with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert not any(view[at] for at in range(0, len(view), mmap.PAGESIZE))
        wait(1, before[1] + (48 << 20))
peak = system.read_peak_memory()
print(peak.anonymous - before[0], peak.mapped - before[1], peak.resident >= peak.anonymous)
print(peak.summary())
print(peak.to_record())
pieces = [bytearray(b"x") * 100_000 for _ in range(1000)]
last = bytearray(b"x") * 100_000  # allocated last, so that the end of the heap stays in use
del pieces
freed = now("RssAnon")
system.trim_heap()
print(freed - now("RssAnon"))
"""


def test_memory_of_a_process(tmp_path: Path) -> None:
    """Peaks tell allocated from mapped memory, and include what is freed later, which goes back.

    /proc/self/status has current values only.
    """
    file = tmp_path / "file"
    file.write_bytes(bytes(48 << 20))
    command = [sys.executable, "-c", PEAKS, str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    anonymous, mapped, holds = lines[0].split()
    assert int(anonymous) == pytest.approx(80 << 20, rel=0.03)
    assert int(mapped) == pytest.approx(48 << 20, rel=0.03)
    assert holds == "True" and "allocated" in lines[1] and "host_mapped" in lines[2]
    assert int(lines[3]) > 80_000_000


def vace_bytes(resident: int) -> float:
    """Counts by hand: 8 of the 40 blocks move with a control block, so a buffer holds both."""
    c, f, layers, controls = 5120, 13824, 40, 8
    norms, modulation = 6 * c, 6 * c  # of q and k in both attentions, and norm3
    block = 8 * (c * c + c) + 2 * c * f + f + c + norms + modulation
    control, first = block + c * c + c, c * c + c
    block_weights = layers * block + controls * control + first
    outside = (4096 * c + c) + (c * c + c) + (256 * c + c) + (c * c + c) + 6 * (c * c + c)
    outside += 64 * (c + 1) + 2 * c + 64 * c + c + 384 * c + c  # head and patches
    return 2 * (outside + resident * block_weights / layers + 2 * (block + control + first))


def test_the_largest_block_of_vace_has_two_buffers() -> None:
    flags = ("--task", "vace-14B", "--size", "64*64", "--frame_num", "5", "--device", "cuda")
    flags += ("--convert_model_dtype", "--offload_model", "block", "--resident_blocks")
    for resident in (0, 4):
        expected, run = vace_bytes(resident), resolve_plan(*flags, resident)
        estimated = estimate_run(run)["denoising"]["DiT weights"]
        assert 0.95 * expected <= estimated <= expected


def estimate_stages(*flags: object) -> dict[str, memory_estimate.Usage]:
    """Estimates the stages of a 320 x 192 video on one GPU in bfloat16."""
    base_flags = ["--size", "320*192", "--device", "cuda", "--convert_model_dtype"]
    return estimate_run(resolve_plan(*base_flags, *flags))


PARAMETERS = {  # of the published files
    "t2v-A14B": 14_288_491_584,
    "i2v-A14B": 14_288_901_184,
    "s2v-14B": 16_295_755_609,
    "animate-14B": 17_274_816_884,
}


def test_weights_are_estimated_a_little_below() -> None:
    for task, parameters in PARAMETERS.items():
        for offload, networks in (("true", 1), ("false", len(PRESETS[task].experts))):
            estimate = estimate_stages("--task", task, "--offload_model", offload)["denoising"][
                "DiT weights"
            ]
            assert 0.98 <= estimate / (2 * networks * parameters) <= 1, (task, offload)


def test_stage_memory_outside_the_weights() -> None:
    """Compares with sums by hand: text keys and values, streams, faces, and earlier frames."""
    plain, vace = (estimate_stages("--task", t, "--frame_num", 9) for t in ("t2v-A14B", "vace-14B"))
    tokens, layer_bytes = 3 * 12 * 20, 2 * 2 * 512 * 5120 * 2  # of a layer: branches, and K and V
    assert plain["denoising"]["text K/V"] == 40 * layer_bytes
    assert vace["denoising"]["text K/V"] == (40 + 8) * layer_bytes
    split = estimate_stages("--task", "t2v-A14B", "--frame_num", 9, "--cfg_size", 2)
    assert split["denoising"]["text K/V"] == 40 * layer_bytes // 2, "of the branch of a rank"
    stream = vace["denoising"]["activations"] - plain["denoising"]["activations"]
    assert stream == tokens * 5120 * 4, "the control has a residual stream of its own"
    both = estimate_stages("--task", "t2v-A14B", "--frame_num", 9, "--offload_model", "false")
    assert both["denoising"]["text K/V"] == 2 * 40 * layer_bytes, "of each network that stays"
    nag = estimate_stages("--task", "t2v-A14B", "--frame_num", 9, "--nag_scale", 5)
    assert nag["denoising"]["text K/V"] == 40 * layer_bytes * 3 // 2, "of the negative prompt, too"
    animate = estimate_stages("--task", "animate-14B", "--vae_tiling")
    assert animate["denoising"]["pictures of the face"] == 3 * 77 * 512 * 512 * 4
    assert animate["decoding"]["activations"] == 3 * 77 * 320 * 192 * 4
    s2v = estimate_stages("--task", "s2v-14B", "--vae_tiling")  # 19 latent frames precede its 20
    assert s2v["decoding"]["activations"] == 3 * (4 * (19 + 20) - 3) * 320 * 192 * 4
    s2v_cpu = estimate_stages("--task", "s2v-14B", "--device", "cpu")
    for stage in ("denoising", "decoding"):
        assert s2v_cpu[stage]["frames of the clip before"] == 3 * 73 * 320 * 192 * 4


def test_overlapped_decoding_adds_to_denoising() -> None:
    """The last clip overlaps with no other clip, and there is one VAE."""
    flags = ("--task", "i2v-A14B", "--chain", "latent", "--num_clip", 3, "--frame_num", 9)
    for offload in ("true", "false"):
        sequential, overlapped = (
            estimate_stages(*flags, "--offload_model", offload, *more)
            for more in ((), ("--overlap_decoding",))
        )
        decoding = sequential["decoding"]
        if offload == "false":  # the networks stay, also the VAE since the image was encoded
            decoding = memory_estimate.Usage(activations=decoding["activations"])
        assert overlapped["decoding"] == sequential["decoding"]
        assert overlapped["denoising"] == sequential["denoising"] + decoding, offload


def test_loras_of_a_video_stay_in_the_memory_of_a_cpu(tiny, tmp_path: Path) -> None:
    """They are cached for the next video; an accelerator has them while it denoises.

    Resident blocks leave room for the largest LoRA of the folder, which a later video may have.
    """
    for rank in (2, 20):
        pair = {"lora_up": torch.ones(96, rank), "lora_down": torch.ones(rank, 96)}
        tensors = {f"blocks.0.self_attn.q.{name}.weight": x for name, x in pair.items()}
        save_file(tensors, tmp_path / f"x{rank}.safetensors")
    flags = ("--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), "--size", "64*64")
    chosen, num_elements = ("--lora_folder", tmp_path, "--video_lora", "x2"), 2 * 2 * 96
    for device, in_decoding in (("cpu", 2 * num_elements), ("cuda", 0)):  # in bfloat16
        stages = estimate_stages(*flags, *chosen, "--device", device)
        loras = [stages[name]["LoRAs"] for name in ("denoising", "decoding")]
        assert loras == [2 * num_elements, in_decoding]
    without, with_loras = (
        memory_estimate.estimate_denoising_bytes_without_blocks(run.setup, run.params)
        for run in (resolve_plan(*flags, *more) for more in ((), chosen))
    )
    assert 10 * 4 * num_elements <= with_loras - without < 20 * 4 * num_elements


def test_a_preview_is_no_reason_to_refuse_a_run() -> None:
    """A run continues without previews where memory is short, and decodes in tiles."""
    flags = ["--task", "t2v-1.3B", "--size", "1280*720", "--device", "cpu"]
    plain, preview = (resolve_plan(*flags, *more) for more in ((), ("--preview", 1)))
    totals = [estimate_run(run)["denoising"].total() for run in (plain, preview)]
    assert totals[0] < totals[1]
    assert memory_estimate.find_fullest_stage(
        preview.setup, preview.params
    ) == memory_estimate.find_fullest_stage(plain.setup, plain.params)


@pytest.mark.parametrize("task", ["s2v-14B", "animate-14B"])
def test_weights_that_are_used_where_they_are_mapped_take_nothing(task: str, tiny) -> None:
    """This includes attention to the sound or the face, which is not named as a block."""
    flags = ("--task", task, "--ckpt_dir", tiny(task), "--device", "cpu", "--precision", "bf16")
    assert not estimate_stages(*flags)["denoising"]["DiT weights"]


def test_host_memory_of_networks_that_wait() -> None:
    """By hand: both experts and the text encoder in bfloat16."""
    flags = ["--task", "t2v-A14B", "--size", "64*64", "--frame_num", "5", "--device", "cuda"]
    for offload, parameters in (("cpu", 2 * 14_288_491_584 + 5_680_910_336), ("true", 0)):
        run = resolve_plan(*flags, "--convert_model_dtype", "--offload_model", offload)
        assert Planner(run.setup, run.params).compute_host_bytes() == 2 * parameters


def test_reference_keys_are_in_host_memory_if_blocks_are_streamed() -> None:
    """By definition 2 x 40 layers x 3 frames of 10 x 10 tokens x 5120 channels x 2 bytes."""
    argv = ("--task", "animate2-14B", "--device", "cuda", "--size", "160*160", "--frame_num", 9)
    kept = 2 * 40 * 3 * 100 * 5120 * 2
    whole, streamed = (resolve_plan(*argv, "--offload_model", mode) for mode in ("false", "block"))
    for run, on_device in ((whole, kept), (streamed, kept * 3 // 40)):
        stages = estimate_run(run)
        assert stages["denoising"]["kept K/V"] == on_device
        assert "kept K/V" not in stages["decoding"]
    planner = Planner(streamed.setup, streamed.params)
    assert planner.compute_stage_memory()["denoising"]["kept K/V"] == on_device
    blocks = planner.measure_forwards(streamed.setup.parallel)[0].size.weights.all_blocks
    assert planner.compute_host_bytes() == blocks + kept


@pytest.mark.skipif(not has_huge_pages(), reason="needs a system with transparent huge pages")
@pytest.mark.parametrize(("setting", "fewest", "most"), [(None, 0, 2000), ("0", 16000, 20000)])
def test_large_tensors_take_huge_pages(setting: str | None, fewest: int, most: int) -> None:
    """64 MiB are 16 384 pages of 4 KiB; a variable that the user sets is kept."""
    script = """
import resource, wan.pipeline.build, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environ = {key: value for key, value in os.environ.items() if key != HUGE_PAGES}
    environ |= {} if setting is None else {HUGE_PAGES: setting}
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=240)
    assert fewest <= int(output.stdout) <= most
