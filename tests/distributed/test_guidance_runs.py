"""Guidance and EasyCache in whole runs of several ranks, against one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs
from wan.cli import main as generate

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("torchrun")]  # it takes no pools
QUICK = ["--size", "64*48", "--frame_num", "5", "--base_seed", "7", "--save_latents"]
KINDS = {
    "NAG": "--nag_scale 11 --sample_steps 4 --recipe lightning-4step",
    "NAG beside CFG": "--nag_scale 5 --nag_norm l2 --sample_steps 4",
    "CFG-Zero*": "--guider cfg_zero --sample_steps 9",
    "APG": "--guider apg --sample_steps 4",
    "skipped blocks": "--slg_blocks 1 --slg_start 0 --sample_steps 4",
    "one expert": "--guider apg --slg_blocks 0 --nag_scale 5 --sample_guide_scale 1,4",
    "easy": "--step_cache easy --step_cache_threshold 0.3 --sample_steps 16",
    "all and a cache": "--guider cfg_zero --slg_blocks 1 --nag_scale 5 --sample_steps 12 "
    "--step_cache first_block --step_cache_threshold 0.9",
}
LAYOUTS = {
    "two": (2, "--ulysses_size 2 --comm_type 1"),
    "branches": (2, "--cfg_size 2"),
    "four": (4, "--ulysses_size 2 --ring_size 2"),
    "four, branches": (4, "--cfg_size 2 --ulysses_size 2 --fa_alltoall_overlap --dit_fsdp"),
}
DEFAULT = {("all and a cache", "four, branches")}


def make_latents(ranks: int, arguments: list[str], out: Path) -> torch.Tensor:
    """Runs generate.py and returns the latents."""
    variables = make_rank_envs(ranks) if ranks > 1 else [{}]
    with Ranks(variables, generate.main, [*arguments, "--save_file", str(out)]) as processes:
        assert not any(processes.wait_for_exit(180)), processes.format_outputs()
    return load_file(out.with_suffix(".latents.safetensors"))["latents"]


def list_arguments(kind: str, folder: Path) -> list[str]:
    return ["--task", "t2v-A14B", "--ckpt_dir", str(folder), *QUICK, *KINDS[kind].split()]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pair if pair in DEFAULT else slow(*pair)
        for pair in product(KINDS, LAYOUTS)
        if pair[0] != "NAG" or "branches" not in pair[1]  # one branch
    ],
)
def test_ranks_make_what_one_process_does(kind: str, layout: str, tiny, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    arguments = list_arguments(kind, tiny("t2v-A14B"))
    expected = make_latents(1, arguments, tmp_path / "alone.mp4")
    actual = make_latents(ranks, [*arguments, *flags.split()], tmp_path / "v.mp4")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_modes_change_no_bit(kind: str, tiny, tmp_path: Path) -> None:
    arguments = [*list_arguments(kind, tiny("t2v-A14B")), "--ulysses_size", "2"]
    modes = ("--comm_type 0", "--comm_type 1", "--comm_type 2", "--fa_alltoall_overlap")
    first, *others = (
        make_latents(2, [*arguments, *mode.split()], tmp_path / "v.mp4") for mode in modes
    )
    assert all(torch.equal(first, latents) for latents in others)
