"""Command lines with --device npu, on launched ranks: videos, settings, and refusals."""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

import imageio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs, run_on_ranks
from tests.npu_sim.latents import WAYS, make_arguments, make_latents
from tests.npu_sim.oracles import relative_rms_error
from tests.npu_sim.ranks import SOC
from tests.refusals import check_refusals
from tools.quantize_dit import quantize_checkpoint
from wan.cli import main as generate

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


def run_program(argv: list[str]) -> int:
    """Run generate.py and the exit handlers of the interpreter."""
    code = generate.main(argv)
    atexit._run_exitfuncs()
    return code


class Command:
    """A run of generate.py on ranks, with its log, latents and frames."""

    def __init__(self, folder: Path, ranks: int, chip: str, *argv: object, **env: str) -> None:
        self.video = folder / "v.mp4"
        self.log = folder / "log"
        env |= {"NPU_SIM_SOC": SOC[chip], "NPU_SIM_LOG": str(self.log)}
        command_line = [*map(str, argv), "--save_latents", "--save_file", str(self.video)]
        variables = make_rank_envs(ranks, **env) if ranks > 1 else [env]
        with Ranks(variables, run_program, command_line) as processes:
            self.codes = processes.wait_for_exit(300)
            self.printed_lines, self.output = processes.lines(), processes.format_outputs()

    @property
    def latents(self) -> Tensor:
        assert set(self.codes) == {0}, self.output[-9000:]
        return load_file(self.video.with_suffix(".latents.safetensors"))["latents"]

    def frames(self) -> tuple[int, ...]:
        """Read the video back and return (frames, height, width)."""
        frames = list(imageio.get_reader(self.video).iter_data())
        return len(frames), *frames[0].shape[:2]

    def calls(self, rank: int) -> list[dict[str, Any]]:
        lines = self.log.with_name(f"log.{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines]


QUICK = ("--size", "112*96", "--frame_num", "5")  # decoding takes longest
ULYSSES = ["--ulysses_size", "2"]
RING = [*ULYSSES, "--ring_size", "2"]
BOTH_WAYS = [*RING, "--ring_type", "bidirectional"]
ALGO_3 = {"ALGO": "3", "QUANT_ALLTOALL": "1", "PRECISION": "1", "T5_LOAD_CPU": "1"}


@pytest.mark.parametrize(
    ("name", "ranks", "topology", "mode", "env"),
    [  # environment variables replace the flags
        ("fp8-transport", 2, ULYSSES, ["--comm_type", "1"], ALGO_3),
        slow("v3-fp8", 4, BOTH_WAYS, [], {"OVERLAP": "1"}),
        slow("dense", 1, [], [], {}),
        slow("dense", 4, RING, ["--comm_type", "1"], {}),
        slow("laser", 2, ULYSSES, ["--comm_type", "1"], {"ALGO": "1"}),
        slow("fp8", 4, RING, ["--comm_type", "2"], {"ALGO": "3"}),
        slow("v2", 4, BOTH_WAYS, ["--comm_type", "2"], {}),
        slow("v3", 4, ["--ulysses_size", "4"], ["--comm_type", "1"], {}),
    ],
)
def test_videos(
    name: str,
    ranks: int,
    topology: list[str],
    mode: list[str],
    env: dict[str, str],
    rig: Path,
    tmp_path: Path,
) -> None:
    """The video is written, the right kernel runs, and latents are bit-equal to mode 0."""
    way = WAYS[name] if name == "laser" else WAYS[name]._replace(size=QUICK)
    command_way = way._replace(flags=()) if "ALGO" in env else way
    command = Command(
        tmp_path, ranks, way.chip, *make_arguments(rig, command_way), *topology, *mode, **env
    )
    plain = run_on_ranks(
        ranks, make_latents, [*make_arguments(rig, way), *topology], way.chip, timeout=300
    )[0]
    assert torch.equal(command.latents, plain)
    assert command.frames() == ((1, 512, 1024) if name == "laser" else (5, 96, 112))
    assert OPERATORS[name] in {call["name"] for call in command.calls(0)}


def test_quantized_weights_fused_operations_and_the_clock(rig: Path, tmp_path: Path) -> None:
    """W8A8 on two ranks; the clock is capped before a block's first exchange until its last."""
    export_dir = quantize_checkpoint(rig, tmp_path / "w8a8")
    way = WAYS["dense"]._replace(flags=("--sample_steps", "2"), size=QUICK)
    flags = ["--quant_dit_path", export_dir, "--fa_freq_cap", "1400", "--comm_type", "1"]
    flags += ["--fused_ops", "rope,rms_norm,layer_norm,scale_shift"]
    command = Command(tmp_path, 2, "A2", *make_arguments(rig, way), *flags)
    float_latents = run_on_ranks(1, make_latents, make_arguments(rig, way), "A2")[0]
    assert 1e-4 < relative_rms_error(command.latents, float_latents) < 0.05
    for rank in range(2):
        calls = command.calls(rank)
        names = [call["name"] for call in calls]
        fused = {"npu_rotary_mul", "npu_rms_norm", "mindiesd.layernorm", "mindiesd.adaln"}
        assert fused | {"npu_quant_matmul"} <= set(names)
        exchanges = [i for i, name in enumerate(names) if name == "all_to_all_single"]
        clock = [i for i, name in enumerate(names) if name == "mindiesd.frequency_regulator"]
        frequencies = [calls[i]["facts"]["freq"] for i in clock]
        assert (
            frequencies == [1650] + [1400, 1650] * 2
        )  # before the run, then once per step's one block
        connecting = [i for i in exchanges if i < clock[0]]
        assert len(connecting) == 2  # the Ulysses group, and that of all who share the tokens
        inside = [sum(a < i < b for i in exchanges) for a, b in zip(clock, clock[1:], strict=False)]
        assert inside == [0, 4 * 4, 0, 4 * 4]  # q, k, v and the result, in four chunks
        assert len(exchanges) == 2 + sum(inside)


def test_a_chip_refuses(rig: Path, tmp_path: Path) -> None:
    """One sentence for all ranks and exit code 2, before any weight is read."""
    command = Command(tmp_path, 2, "A2", *make_arguments(rig, WAYS["fp8"]))
    assert command.codes == [2, 2] and "Traceback" not in command.output
    check_refusals("npu: chips", {"fp8 on A2": "\n".join(command.printed_lines)})
    assert not list(tmp_path.glob("v.*"))
