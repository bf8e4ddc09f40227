"""Whole runs of several ranks make the latents of one process: guidance, samplers, caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import Tiny, slow
from tests.dist import Ranks, make_rank_envs
from tests.gguf_files import make_gguf_folders
from tests.lora_files import save_lycoris
from tools.quantize_dit import quantize_checkpoint
from wan.cli import main as generate

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("torchrun")]  # it takes no pools
QUICK = ["--size", "64*48", "--frame_num", "5", "--base_seed", "7", "--save_latents"]


class Run(NamedTuple):
    """A run: the flags of one process, and those that several ranks have besides them."""

    flags: str
    ranks: int
    rank_flags: str
    task: str = "t2v-A14B"


FIRST_BLOCK = "--sample_steps 9 --step_cache first_block:threshold=0.6"
CALM = "--step_cache first_block:threshold=0.9"  # far from the measured differences
STEPS = "--sample_steps 9 --step_cache steps:0,2,5-6"
REUSED = "--sample_steps 9 --use_attentioncache --start_step 1 --end_step 7"
REUSED += " --attentioncache_interval 3"
TEA = "--sample_steps 9 --step_cache tea:coefficients=1,0,threshold=1"
MAG = "--sample_steps 9 --step_cache mag:threshold=1,retention=0"
ALL = f"--sample_steps 9 --guider cfg_zero --slg_blocks 1 --nag_scale 5 {CALM}"
SOLVER = "--sample_solver"
SQUARE, HALVES = "--ulysses_size 2 --ring_size 2", "--cfg_size 2 --comm_type 1"
DEFAULT = Run(f"{ALL} {SOLVER} euler_ancestral --sigmas beta", 4, f"{HALVES} --dit_fsdp --t5_fsdp")
RUNS = {
    "NAG": Run("--nag_scale 11 --sample_steps 4 --recipe lightning-4step", 4, SQUARE),
    "NAG beside CFG": Run("--nag_scale 5:norm=l2 --sample_steps 4", 2, "--cfg_size 2"),
    "APG": Run("--guider apg --sample_steps 4", 4, f"{HALVES} --dit_fsdp"),
    "skipped blocks": Run("--slg_blocks 1:start=0 --sample_steps 4", 2, "--cfg_size 2"),
    "one guided expert": Run(
        "--guider apg --slg_blocks 0 --nag_scale 5 --sample_guide_scale 1,4 --sample_steps 4",
        2,
        "--cfg_size 2",
    ),
    "easy": Run("--step_cache easy:threshold=1 --sample_steps 16", 4, SQUARE),
    "dmd": Run(f"{SOLVER} dmd --timesteps 1000,757,522", 4, HALVES),
    "rcm": Run(f"{SOLVER} rcm --sample_steps 4", 2, "--comm_type 1"),
    "rcm, ode": Run(f"{SOLVER} rcm --sample_steps 3 --ode --boundary_step 1", 2, "--cfg_size 2"),
    "res_2s": Run(f"{SOLVER} res_2s --sample_steps 3 --sigmas beta57 --boundary_step 1", 4, HALVES),
    "res_multistep": Run(
        f"{SOLVER} res_multistep --sample_steps 4 --sigmas beta", 2, "--cfg_size 2"
    ),
    "lcm": Run(f"{SOLVER} lcm --sample_steps 3 --sigmas simple", 2, "--cfg_size 2"),
    "dpm++_sde": Run(f"{SOLVER} dpm++_sde --sample_steps 4", 4, HALVES),
    "ring both ways": Run(FIRST_BLOCK, 4, "--ring_size 2 --ring_type bidirectional"),
    "overlap": Run(FIRST_BLOCK, 2, "--fa_alltoall_overlap"),
    "order 1": Run(f"{FIRST_BLOCK},order=1", 2, "--comm_type 2"),
    "image": Run(FIRST_BLOCK, 2, "--comm_type 1", "i2v-A14B"),
    "offload": Run(FIRST_BLOCK, 2, "--offload_model true --t5_cpu --dit_fsdp"),
    "blocks": Run(FIRST_BLOCK, 2, "--offload_model block --resident_blocks 0"),
    "FP8": Run(f"--sample_steps 9 --fa_quant fp8 {CALM}", 2, "--comm_type 1", "ti2v-5B"),
    "compiled": Run(FIRST_BLOCK, 2, "--compile --comm_type 1"),
    "fused": Run(FIRST_BLOCK, 2, "--fused_ops modulated_norm,norm_rope,add_norm,gelu"),
    "int8": Run(f"{FIRST_BLOCK} --quant_dit_path EXPORT", 2, "--comm_type 1"),
    "two passes a step": Run(
        f"{SOLVER} res_2s --sample_steps 5 --step_cache first_block:threshold=0.6",
        2,
        "--comm_type 1",
    ),
    "tea": Run(TEA, 2, "--ring_size 2", "ti2v-5B"),
    "mag": Run(MAG, 4, "--cfg_size 2 --dit_fsdp", "ti2v-5B"),
    "list": Run(STEPS, 4, "--cfg_size 2 --comm_type 2"),
    "attention": Run(REUSED, 2, "--dit_fsdp --comm_type 1"),
    "attention, halves": Run(REUSED, 4, "--cfg_size 2", "ti2v-5B"),
    "cfg": Run("--sample_steps 9 --step_cache cfg", 2, "--ring_size 2 --dit_fsdp"),
    "ring of four": Run("--sample_steps 3", 4, "--ulysses_size 1 --ring_type bidirectional"),
    "eight": Run("--sample_steps 3", 8, "--ulysses_size 8 --comm_type 1"),
    "first task": Run("--sample_steps 3", 4, "--comm_type 1", "t2v-1.3B"),
    "clip": Run("--sample_steps 3", 4, "--cfg_size 2 --comm_type 2 --dit_fsdp", "i2v-14B"),
    "two images": Run("--sample_steps 3", 3, "--ring_size 3 --dit_fsdp", "flf2v-14B"),
    "LoRA": Run("--sample_steps 2 LORAS", 2, "--comm_type 1 --dit_fsdp", "t2v-1.3B"),
    "LoRA, blocks": Run(
        "--sample_steps 2 LORAS", 4, "--cfg_size 2 --ring_size 2 --offload_model block", "t2v-1.3B"
    ),
    "GGUF": Run(
        "--sample_steps 2 GGUF --stored_weights upcast LORAS",
        2,
        "--dit_fsdp --comm_type 2",
        "t2v-1.3B",
    ),
    "GGUF, kept": Run(
        "--sample_steps 2 GGUF --stored_weights keep",
        4,
        "--cfg_size 2 --ring_size 2 --offload_model block",
        "t2v-1.3B",
    ),
}
LORA_LAYERS = {  # kind -> layer; DoRA's norms need the rows of all ranks
    "LoRA": "blocks.0.self_attn.q",
    "DoRA": "blocks.0.self_attn.k",
    "LoHa": "blocks.1.cross_attn.o",
    "LoKr": "blocks.0.ffn.0",
    "GLoRA": "blocks.1.ffn.2",
}


def write_loras(checkpoint: Path, folder: Path) -> str:
    """Writes a LoRA of each kind; returns the flags with paths and strengths."""
    weights, flags = load_file(checkpoint / "diffusion_pytorch_model.safetensors"), list[str]()
    folder.mkdir()
    for kind, layer in LORA_LAYERS.items():
        path = folder / f"{kind.replace(' ', '-')}.safetensors"
        save_lycoris(kind, weights, path, (layer,), "lycoris_")
        flags.append(f"--lora {path}=0.05")
    return " ".join(flags)


def list_arguments(run: Run, tiny: Tiny, image: Path, tmp_path: Path) -> list[str]:
    """Returns the arguments of one process."""
    flags = run.flags
    if "EXPORT" in flags:
        folder = quantize_checkpoint(tiny(run.task), tmp_path / "export")
        flags = flags.replace("EXPORT", str(folder))
    if "LORAS" in flags:
        flags = flags.replace("LORAS", write_loras(tiny(run.task), tmp_path / "loras"))
    checkpoint = tiny(run.task)
    if "GGUF" in flags:
        checkpoint, _ = make_gguf_folders(checkpoint, "Q8_0", tmp_path / "gguf")
        flags = flags.replace("GGUF ", "")
    arguments = ["--task", run.task, "--ckpt_dir", str(checkpoint), *QUICK]
    if run.task == "ti2v-5B":  # its tokens are twice as large
        arguments += ["--size", "64*96"]
    if run.task.startswith(("i2v", "flf2v")):
        arguments += ["--image", str(image)]
    if run.task == "flf2v-14B":
        arguments += ["--last_image", str(image)]
    return [*arguments, *flags.split()]


def make_latents(ranks: int, arguments: list[str], out: Path) -> tuple[Tensor, Any, str]:
    """Runs generate.py; returns the latents, the record, and the output of rank 0."""
    variables = make_rank_envs(ranks) if ranks > 1 else [{}]
    with Ranks(variables, generate.main, [*arguments, "--save_file", str(out)]) as processes:
        assert not any(processes.wait_for_exit(180)), processes.format_outputs()
    latents = load_file(out.with_suffix(".latents.safetensors"))["latents"]
    return latents, json.loads(out.with_suffix(".json").read_text()), processes.texts[0]


def check_run(run: Run, arguments: list[str], tmp_path: Path) -> str:
    """Compares ranks with one process, which repeats the steps that two guidance halves chose."""
    rank_arguments = [*arguments, *run.rank_flags.split()]
    actual, record, text = make_latents(run.ranks, rank_arguments, tmp_path / "v.mp4")
    suffixes = {path.suffix for path in tmp_path.glob("v.*")}
    assert suffixes == {".mp4", ".json", ".safetensors"}, "only rank 0 writes"
    cache, halves = record.get("step_cache"), "--cfg_size" in run.rank_flags
    if cache is not None:
        computed = cache["computed"]
        assert not halves or computed["cond"] == computed["uncond"] or cache["policy"] == "cfg"
        if halves and "first_block" in run.flags:
            steps = ",".join(map(str, computed["cond"]))
            arguments = [*replace_policy(arguments), f"steps:{steps}"]
    expected, single_record, _ = make_latents(1, arguments, tmp_path / "alone.mp4")
    if cache is not None:
        num_steps = record["settings"]["sample_steps"]
        assert 0 < min(map(len, computed.values())) < num_steps, "some steps are skipped"
        assert single_record["step_cache"]["computed"] == computed
    # Products of other sizes round differently, so FP8 values may differ by one step.
    assert (actual - expected).abs().max() <= (5e-3 if "fp8" in run.flags else 1e-4)
    return text


def replace_policy(arguments: list[str]) -> Iterator[str]:
    """Yields the arguments without the flags of a first-block cache; a list of steps follows."""
    words = iter(arguments)
    for word in words:
        if word.startswith("--step_cache"):
            next(words)
        else:
            yield word
    yield "--step_cache"


def test_guidance_sampler_and_cache_together(tiny: Tiny, image_path: Path, tmp_path: Path) -> None:
    """Guidance halves with all weights sharded, InsertComm, and noise between steps."""
    text = check_run(DEFAULT, list_arguments(DEFAULT, tiny, image_path, tmp_path), tmp_path)
    assert text.count("InsertComm, 10 head chunks of 2 per rank; ulysses 2 x ring 1 x cfg 2") == 1


@pytest.mark.parametrize("name", [slow(name) for name in RUNS])
def test_ranks_make_what_one_process_does(
    name: str, tiny: Tiny, image_path: Path, tmp_path: Path
) -> None:
    text = check_run(RUNS[name], list_arguments(RUNS[name], tiny, image_path, tmp_path), tmp_path)
    assert ("Guidance is 1 for the low-noise expert" in text) == (name == "one guided expert")


@pytest.mark.slow
def test_modes_and_exchanges_change_no_bit(tiny: Tiny, image_path: Path, tmp_path: Path) -> None:
    arguments = list_arguments(DEFAULT, tiny, image_path, tmp_path)
    ways = ("--comm_type 0", "--comm_type 1", "--comm_type 2", "--fa_alltoall_overlap")
    more = ("--comm_type 2 --exchange fused", "--fa_alltoall_overlap --exchange fused --dit_fsdp")
    first, *others = (
        make_latents(2, [*arguments, "--ulysses_size", "2", *way.split()], tmp_path / "v.mp4")[0]
        for way in (*ways, *more)
    )
    assert all(torch.equal(first, latents) for latents in others)


@pytest.mark.slow
def test_a_record_repeats_a_cached_run(tiny: Tiny, tmp_path: Path) -> None:
    """A record repeats the run, and so does its list of computed steps."""
    plain = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK, "--sample_steps", "9"]
    first, record, _ = make_latents(1, [*plain, *CALM.split()], tmp_path / "first.mp4")
    repeated = ["--from_json", str(tmp_path / "first.json"), "--save_latents"]
    second, second_record, _ = make_latents(1, repeated, tmp_path / "again.mp4")
    assert torch.equal(second, first) and second_record["step_cache"] == record["step_cache"]
    steps = ",".join(map(str, record["step_cache"]["computed"]["cond"]))
    replayed, _, _ = make_latents(
        1, [*plain, "--step_cache", f"steps:{steps}"], tmp_path / "list.mp4"
    )
    assert torch.equal(replayed, first)
