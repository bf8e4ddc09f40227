"""Step caches in whole runs of several ranks, against one process with the same list of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs
from tools.quantize_dit import quantize_checkpoint
from wan.cli import main as generate

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("torchrun")]  # it takes no pools
QUICK = ["--size", "64*48", "--frame_num", "5", "--sample_steps", "9", "--base_seed", "7"]
QUICK += ["--save_latents"]
FIRST_BLOCK = "--step_cache first_block --step_cache_threshold 0.6"
FIRST_BLOCK_CALM = (
    "--step_cache first_block --step_cache_threshold 0.9"  # far from the measured differences
)
STEPS = "--step_cache steps:0,2,5-6"
REUSED = "--use_attentioncache --start_step 1 --end_step 7 --attentioncache_interval 3"
TEA = "--step_cache tea --step_cache_coefficients 1,0 --step_cache_threshold 1"
MAG = "--step_cache mag --step_cache_threshold 1 --step_cache_retention 0"  # one list for both
RUNS: dict[str, tuple[str, int, str, str]] = {  # task, ranks, policy, all else
    "halves, sharded": (
        "t2v-A14B",
        4,
        FIRST_BLOCK,
        "--cfg_size 2 --dit_fsdp --t5_fsdp --comm_type 1",
    ),
    "ring both ways": ("t2v-A14B", 4, FIRST_BLOCK, "--ring_size 2 --ring_type bidirectional"),
    "overlap": ("t2v-A14B", 2, FIRST_BLOCK, "--fa_alltoall_overlap"),
    "order 1": ("t2v-A14B", 2, f"{FIRST_BLOCK} --step_cache_order 1", "--comm_type 2"),
    "image": ("i2v-A14B", 2, FIRST_BLOCK, "--comm_type 1"),
    "offload": ("t2v-A14B", 2, FIRST_BLOCK, "--offload_model true --dit_fsdp"),
    "blocks": ("t2v-A14B", 2, FIRST_BLOCK, "--offload_model block --resident_blocks 0"),
    "FP8": ("ti2v-5B", 2, FIRST_BLOCK_CALM, "--fa_quant fp8 --comm_type 1"),
    "compiled": ("t2v-A14B", 2, FIRST_BLOCK, "--compile --comm_type 1"),
    "fused": ("t2v-A14B", 2, FIRST_BLOCK, "--fused_ops modulated_norm,norm_rope,add_norm,gelu"),
    "int8": ("t2v-A14B", 2, FIRST_BLOCK, "--comm_type 1 --quant_dit_path EXPORT"),
    "two passes a step": (
        "t2v-A14B",
        2,
        f"{FIRST_BLOCK} --sample_solver res_2s --sample_steps 5",
        "--comm_type 1",
    ),
    "tea": ("ti2v-5B", 2, TEA, "--ring_size 2"),
    "mag": ("ti2v-5B", 4, MAG, "--cfg_size 2 --dit_fsdp"),
    "list": ("t2v-A14B", 4, STEPS, "--cfg_size 2 --comm_type 2"),
    "list, no text cache": ("t2v-A14B", 2, STEPS, "--text_kv_cache false"),
    "attention": ("t2v-A14B", 2, REUSED, "--dit_fsdp --comm_type 1"),
    "attention, ti2v": ("ti2v-5B", 4, REUSED, "--cfg_size 2"),
    "cfg": ("t2v-A14B", 2, "--step_cache cfg", "--ring_size 2 --dit_fsdp"),
}


def make_latents(
    ranks: int, arguments: list[str], out: Path
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run generate.py and return the latents and the record of the step cache."""
    variables = make_rank_envs(ranks) if ranks > 1 else [{}]
    with Ranks(variables, generate.main, [*arguments, "--save_file", str(out)]) as processes:
        assert not any(processes.wait_for_exit(180)), processes.format_outputs()
    latents = load_file(out.with_suffix(".latents.safetensors"))["latents"]
    record = json.loads(out.with_suffix(".json").read_text())
    return latents, record["step_cache"]


@pytest.mark.parametrize("name", [name if name == "overlap" else slow(name) for name in RUNS])
def test_ranks_make_what_one_process_does(name: str, tiny, image_path, tmp_path: Path) -> None:
    """The list that two guidance halves agreed on is passed to one process as `steps:LIST`."""
    task, ranks, policy, flags = RUNS[name]
    arguments = ["--task", task, "--ckpt_dir", str(tiny(task)), *QUICK]
    if task == "i2v-A14B":
        arguments += ["--image", str(image_path)]
    if task == "ti2v-5B":  # its tokens are twice as large
        arguments += ["--size", "64*96"]
    if "EXPORT" in flags:
        export = str(quantize_checkpoint(tiny(task), tmp_path / "export"))
        flags = flags.replace("EXPORT", export)
        arguments += ["--quant_dit_path", export]
    if "fp8" in flags:
        arguments += ["--fa_quant", "fp8"]
    actual, record = make_latents(
        ranks, [*arguments, *flags.split(), *policy.split()], tmp_path / "v.mp4"
    )
    computed = record["computed"]
    assert 0 < min(map(len, computed.values())) < 9, "some steps are skipped"
    if "--cfg_size" in flags:
        assert computed["cond"] == computed["uncond"]
    single_policy = policy
    if policy == FIRST_BLOCK and "--cfg_size" in flags:
        single_policy = f"--step_cache steps:{','.join(map(str, computed['cond']))}"
    expected, single_record = make_latents(
        1, [*arguments, *single_policy.split()], tmp_path / "alone.mp4"
    )
    assert single_record["computed"] == computed
    # Products of other sizes round differently, so FP8 values may differ by one step.
    assert (actual - expected).abs().max() <= (5e-3 if "fp8" in flags else 1e-4)


@pytest.mark.slow
def test_a_record_repeats_a_cached_run(tiny, tmp_path: Path) -> None:
    """A record repeats the run, and so does its list of computed steps."""
    plain = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK]
    first, record = make_latents(1, [*plain, *FIRST_BLOCK_CALM.split()], tmp_path / "first.mp4")
    repeated = ["--from_json", str(tmp_path / "first.json"), "--save_latents"]
    second, second_record = make_latents(1, repeated, tmp_path / "again.mp4")
    assert torch.equal(second, first) and second_record == record
    assert record["computed"]["cond"] == record["computed"]["uncond"]
    step_list = ",".join(map(str, record["computed"]["cond"]))
    replayed, _ = make_latents(
        1, [*plain, "--step_cache", f"steps:{step_list}"], tmp_path / "list.mp4"
    )
    assert torch.equal(replayed, first)
