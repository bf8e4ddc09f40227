"""Command lines with --device npu, run by the real torchrun: videos, settings, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.dist import run, torchrun
from tests.npu_sim import measured
from tests.npu_sim.latents import SMALL, WAYS, Way, arguments, far, latents
from tests.npu_sim.ranks import SOC
from tools.quantize_dit import quantize

pytestmark = pytest.mark.dist

OPERATORS = {
    "dense": "npu_fusion_attention",
    "laser": "mindiesd.la",
    "fp8": "mindiesd.fused_infer_attention_score_v2",
    "fp8-transport": "mindiesd.fused_infer_attention_score_v2",
    "v2": "mindiesd.rainfusionattention",
    "v3": "mindiesd.block_sparse_attention",
    "v3-fp8": "mindiesd.block_sparse_attention",
}


class Command:
    """generate.py under torchrun with its log, latents and frames."""

    def __init__(self, folder: Path, ranks: int, chip: str, *argv: object, **env: str) -> None:
        self.video = folder / "v.mp4"
        self.log = folder / "log"
        env |= {"NPU_SIM_SOC": SOC[chip], "NPU_SIM_LOG": str(self.log)}
        flags = ["--save_latents", "--save_file", self.video]
        self.done = torchrun(ranks, *argv, *flags, timeout=300, **env)

    @property
    def latents(self) -> Tensor:
        assert self.done.returncode == 0, self.done.stdout[-3000:] + self.done.stderr[-6000:]
        return load_file(self.video.with_suffix(".latents.safetensors"))["latents"]

    def frames(self) -> tuple[int, ...]:
        """(frames, height, width) of the video as it is read back."""
        frames = list(imageio.get_reader(self.video).iter_data())
        return len(frames), *frames[0].shape[:2]

    def calls(self, rank: int) -> list[dict[str, Any]]:
        lines = self.log.with_name(f"log.{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines]


ULYSSES = ["--ulysses_size", "2"]
RING = [*ULYSSES, "--ring_size", "2"]
BOTH_WAYS = [*RING, "--ring_type", "bidirectional"]
ALGO_3 = {"ALGO": "3", "QUANT_ALLTOALL": "1", "PRECISION": "1", "T5_LOAD_CPU": "1"}
Case = tuple[str, int, list[str], list[str], dict[str, str]]
"""(way, ranks, topology, mode, environment): the environment stands for the way's flags."""
FEW: list[Case] = [
    ("dense", 4, RING, ["--comm_type", "1"], {}),
    ("laser", 2, ULYSSES, ["--comm_type", "1"], {"ALGO": "1"}),
    ("fp8-transport", 2, ULYSSES, ["--comm_type", "1"], ALGO_3),
    ("v2", 4, BOTH_WAYS, ["--comm_type", "2"], {}),
    ("v3-fp8", 2, ULYSSES, [], {"OVERLAP": "1"}),
]
MORE: list[Case] = [
    ("dense", 1, [], [], {}),
    ("fp8", 4, RING, ["--comm_type", "2"], {"ALGO": "3"}),
    ("v3", 4, ["--ulysses_size", "4"], ["--comm_type", "1"], {}),
]


def check(case: Case, rig: Path, folder: Path) -> None:
    """The video is there, made by the right kernel; its latents are mode 0's, bit for bit."""
    name, ranks, topology, mode, env = case
    way = WAYS[name]
    given = way._replace(flags=()) if "ALGO" in env else way
    command = Command(folder, ranks, way.chip, *arguments(rig, given), *topology, *mode, **env)
    plain = run(ranks, latents, [*arguments(rig, way), *topology], way.chip, timeout=300)[0]
    assert torch.equal(command.latents, plain)
    flags = tuple(flag for flag in way.flags if flag != "--quant_alltoall")
    one = run(1, latents, arguments(rig, way._replace(flags=flags)), way.chip)[0]
    error = far(command.latents, one)
    measured.note(f"videos, {name}", 1, {"ranks from one": error})
    assert error < 1e-2
    assert command.frames() == ((9, 176, 208) if way.size == SMALL else (1, 512, 1024))
    for rank in range(ranks):
        assert OPERATORS[name] in {call["name"] for call in command.calls(rank)}


@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case[0]}-{case[1]}")
def test_videos(case: Case, rig: Path, tmp_path: Path) -> None:
    check(case, rig, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: f"{case[0]}-{case[1]}")
def test_more_videos(case: Case, rig: Path, tmp_path: Path) -> None:
    check(case, rig, tmp_path)


def test_variables_for_fused_operations(rig: Path, tmp_path: Path) -> None:
    """FAST_LAYERNORM=1 and ROPE_OPT=1 together are the bits of --fused_ops rope,layer_norm."""
    asked = arguments(rig, WAYS["dense"])
    command = Command(tmp_path, 1, "A2", *asked, FAST_LAYERNORM="1", ROPE_OPT="1")
    expected = run(1, latents, [*asked, "--fused_ops", "rope,layer_norm"], "A2")[0]
    assert torch.equal(command.latents, expected)
    names = {call["name"] for call in command.calls(0)}
    assert {"npu_rotary_mul", "mindiesd.layernorm"} <= names
    assert not {"npu_rms_norm", "mindiesd.adaln"} & names


def test_quantised_weights_fused_operations_and_the_clock(rig: Path, tmp_path: Path) -> None:
    """W8A8 on two ranks; the clock is capped before a block's first exchange until its last."""
    exported = quantize(rig, tmp_path / "w8a8")
    way = WAYS["dense"]._replace(flags=("--sample_steps", "2"))
    flags = ["--quant_dit_path", exported, "--fa_freq_cap", "1400", "--comm_type", "1"]
    flags += ["--fused_ops", "rope,rms_norm,layer_norm,scale_shift"]
    command = Command(tmp_path, 2, "A2", *arguments(rig, way), *flags)
    one = run(1, latents, arguments(rig, way), "A2")[0]
    error = far(command.latents, one)
    measured.note("videos, W8A8 and fused operations", 1, {"ranks from one in bf16": error})
    assert 1e-4 < error < 0.05
    for rank in range(2):
        calls = command.calls(rank)
        names = [call["name"] for call in calls]
        fused = {"npu_rotary_mul", "npu_rms_norm", "mindiesd.layernorm", "mindiesd.adaln"}
        assert fused | {"npu_quant_matmul"} <= set(names)
        exchanges = [i for i, name in enumerate(names) if name == "all_to_all_single"]
        clock = [i for i, name in enumerate(names) if name == "mindiesd.frequency_regulator"]
        said = [calls[i]["facts"]["freq"] for i in clock]
        assert said == [1650] + [1400, 1650] * 2  # before the run, then once per step's one block
        connecting = [i for i in exchanges if i < clock[0]]
        assert len(connecting) == 2  # the Ulysses group, and that of all who share the tokens
        assert len(exchanges) - len(connecting) == 2 * 4 * 10  # steps, four, chunks
        inside = [sum(a < i < b for i in exchanges) for a, b in zip(clock, clock[1:], strict=False)]
        assert inside == [0, 40, 0, 40]


@pytest.mark.parametrize(
    ("chip", "name", "words"),
    [
        ("A2", "fp8", "--fa_quant fp8 needs a CPU, CUDA GPU or A5; this device is an A2"),
        ("A5", "v2", "--rainfusion_type v2 needs a CPU, CUDA GPU, A2 or A3; this device is an A5"),
        ("A5", "laser", "--attention_algo laser needs an A2 or A3; this device is an A5"),
    ],
)
def test_a_chip_refuses(chip: str, name: str, words: str, rig: Path, tmp_path: Path) -> None:
    """In one sentence for all ranks, before any weight is read; exit code 2 of each rank."""
    way: Way = WAYS[name]
    done = Command(tmp_path, 2, chip, *arguments(rig, way)).done
    said = [line for line in done.stderr.splitlines() if line.startswith("generate.py: ")]
    assert len(said) == 1 and words in said[0] and said[0].endswith("."), done.stderr
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("generate.py: ")[0]
    assert not list(tmp_path.glob("v.*"))
