"""Whole runs with each sampler on several ranks, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import slow
from tests.distributed.test_lora_runs import QUICK, make_latents

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("torchrun")]  # it takes no pools
CFG, BOTH = (2, "--cfg_size 2"), (4, "--cfg_size 2 --comm_type 1")
SEQUENCE = (2, "--comm_type 1")
SCHEDULES = (
    "dmd --timesteps 1000,757,522",
    "rcm --sample_steps 4",
    "rcm --sample_steps 3 --ode --boundary_step 1",
    "res_2s --sample_steps 3 --sigmas beta57 --boundary_step 1",
    "res_multistep --sample_steps 4 --sigmas beta",
    "lcm --sample_steps 3 --sigmas simple",
    "dpm++_sde --sample_steps 4",
    "euler_ancestral --sample_steps 3 --dit_fsdp",
)


@pytest.mark.parametrize(
    ("schedule", "topologies"),
    [
        ("euler_ancestral --sample_steps 3 --sigmas beta", (CFG,)),
        *(slow(schedule, (CFG, SEQUENCE, BOTH)) for schedule in SCHEDULES),
    ],
)
def test_noise_between_steps_is_the_same_on_all_ranks(
    schedule: str, topologies: tuple[tuple[int, str], ...], tiny: Any, tmp_path: Path
) -> None:
    flags = f"--sample_solver {schedule}".split()
    arguments = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK, *flags]
    alone = [flag for flag in arguments if flag != "--dit_fsdp"]
    expected = make_latents(1, alone, tmp_path / "alone.mp4")
    for ranks, more in topologies:
        latents = make_latents(ranks, [*arguments, *more.split()], tmp_path / "v.mp4")
        assert (latents - expected).abs().max() <= 1e-4, more


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["euler_ancestral", "res_2s", "dpm++_sde"])
def test_modes_have_the_same_bits(solver: str, tiny: Any, tmp_path: Path) -> None:
    arguments = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK, "--sample_solver", solver]
    arguments += ["--sample_steps", "4", "--ulysses_size", "2", "--comm_type"]
    first, *others = (
        make_latents(2, [*arguments, mode], tmp_path / f"{mode}.mp4") for mode in "012"
    )
    assert all(torch.equal(first, latents) for latents in others)
