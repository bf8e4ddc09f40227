"""Any topology and flags, valid or not: a refusal or the right result, never a hang."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import redirect_stderr
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from socket import gethostname
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.profiler import profile

from tests import dist
from tests.distributed.test_model import Job
from tests.refusals import check_refusals
from wan import device as devices
from wan.distributed.mesh import make_parallel_groups
from wan.distributed.ring import Ring
from wan.distributed.sequence_shards import ShardedSequence
from wan.modules.attnlayer import FAPowerCapAttention
from wan.pipeline.denoise import run_both_branches
from wan.settings.attention_modes import MODES
from wan.settings.errors import InputError
from wan.settings.parallel import Parallel, check_guidance, resolve_topology
from wan.utils import system

pytestmark = pytest.mark.dist
HEADS = 12
JOB = Job(heads=HEADS, grid=(3, 3, 4))


def velocities(parallel: Parallel | None) -> Any:
    """Predict both guidance branches of a small model on this rank of a topology."""
    components: dict[str, Any] = {}
    branches = run_both_branches
    if parallel is not None:
        team = make_parallel_groups(devices.select_device("cpu"), parallel.mesh_shape)
        branches = team.compute_branches if parallel.cfg_size == 2 else run_both_branches
        components["attention"] = FAPowerCapAttention(
            parallel,
            team.group("ulysses"),
            parallel.fa_alltoall_overlap,
            ring=Ring(team.group("ring"), parallel.ring_type),
        )
        components["sequence_shard"] = ShardedSequence(team.group("ring", "ulysses"))
    jobs = {name: replace(JOB, contexts=(n,)) for name, n in (("cond", 7), ("uncond", 20))}
    model = JOB.model(**components)
    with torch.no_grad():
        return torch.stack(branches(lambda name: jobs[name].velocities(model)[0]))


@pytest.fixture(scope="module")
def expected() -> Any:
    return velocities(None)


@given(
    world=st.sampled_from([1, 2, 3, 4]),
    flags=st.fixed_dictionaries(
        {},
        optional={
            "cfg_size": st.integers(1, 3),
            "ring_size": st.integers(1, 4),
            "ulysses_size": st.integers(1, 4),
            "ring_type": st.sampled_from(["ring", "bidirectional"]),
            "comm_type": st.sampled_from(sorted(MODES)),
            "fa_alltoall_overlap": st.booleans(),
        },
    ),
)
@example(world=2, flags={"cfg_size": 2})
@example(world=4, flags={"cfg_size": 2, "comm_type": 1})
@example(world=4, flags={"ring_size": 2, "ring_type": "bidirectional", "comm_type": 2})
@example(world=3, flags={"ulysses_size": 1})
@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_topologies(world: int, flags: dict[str, Any], expected: Any) -> None:
    try:
        parallel, _ = resolve_topology(flags, world, HEADS)
        check_guidance(parallel, (3.0, 4.0), HEADS)
    except InputError as error:
        assert "\n" not in str(error)
        return
    for rank, result in enumerate(dist.run_on_ranks(world, velocities, parallel, timeout=60)):
        assert (result - expected).abs().max() <= 2e-5, f"rank {rank}"


def count_exchanges() -> Counter[str]:
    """Count the gloo operations of connecting groups of 1 x 2 x 2, by name."""
    team = make_parallel_groups(devices.select_device("cpu"), (1, 2, 2))
    with profile() as trace:
        team.warm_up()
    return Counter(e.name for e in trace.events() if e.name.startswith("gloo:"))


def test_every_group_is_connected_before_weights_are_read() -> None:
    for counts in dist.run_on_ranks(4, count_exchanges):
        # one all-to-all each of the ring, Ulysses and common group; send and recv to ring neighbors
        assert counts["gloo:all_to_all"] == 3 and counts["gloo:send"] == counts["gloo:recv"] == 1
        assert counts["gloo:_all_gather_base"] + counts["gloo:all_gather"] == 3


def read_group_timeouts() -> list[float]:
    """Return the timeout of each group in seconds."""
    team = make_parallel_groups(devices.select_device("cpu"), (1, 2, 2), timedelta(seconds=47))
    groups = [
        team.group(*axes) for axes in (("cfg",), ("ring",), ("ulysses",), ("ring", "ulysses"))
    ]
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (*groups, team.world_mesh().get_group())
    ]


def test_every_group_waits_as_long() -> None:
    for seconds in dist.run_on_ranks(4, read_group_timeouts):
        assert seconds == [47.0] * 5


def read_common_times() -> list[tuple[int, int]]:
    """Return (this rank's clock before, the common time) on one and on two machines."""
    rank, clock, readings = torch.distributed.get_rank(), time.perf_counter_ns, []
    team = make_parallel_groups(devices.select_device("cpu"), (1, 1, 2))
    for machine in ("", f"machine {rank}"):
        with (
            patch.object(system, "read_machine_id", lambda machine=machine: machine),
            patch.object(time, "perf_counter_ns", lambda: clock() + rank * 10**15),
        ):
            readings.append((time.perf_counter_ns(), team.get_common_time()[0]))
    return readings


def test_ranks_have_a_common_time() -> None:
    """Ranks of another machine than that of rank 0 have another clock."""
    (same0, own0), (same1, own1) = dist.run_on_ranks(2, read_common_times)
    assert same0[1] == same1[1] and 0 < own0[1] - own0[0] < 10**14
    assert 0 < own1[1] - own1[0] < 10**14


def run_python_class(folder: str, init_kwargs: dict[str, Any]) -> Any:
    """Make a video of seed 1, and latents of a random seed."""
    import wan
    from wan.configs import WAN_CONFIGS

    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], folder, precision="fp32", **init_kwargs)
    common = {"size": (32, 32), "frame_num": 1, "sampling_steps": 2}
    video = model.generate("a cat", **common, seed=1)
    return video, model.generate("a cat", **common, seed=-1, output_type="latent")


@pytest.mark.slow
def test_python_classes(tiny, one_thread: None) -> None:
    """use_sp splits a video over the processes of an existing group."""
    folder = str(tiny("t2v-A14B"))
    single_video, _ = run_python_class(folder, {})
    init_kwargs = {"use_sp": True, "comm_type": 1, "dit_fsdp": True, "t5_fsdp": True}
    (video, rank0_latents), (rank1_video, rank1_latents) = dist.run_on_ranks(
        2, run_python_class, folder, init_kwargs
    )
    assert rank1_video is None and (video - single_video).abs().max() <= 1e-3
    assert torch.equal(rank0_latents, rank1_latents), "ranks have drawn different seeds"


def draw_latents(folder: str) -> tuple[list[torch.Tensor], str]:
    """Make the latents of two calls with random seeds; also return the progress bars."""
    import wan

    model = wan.WanT2V(wan.configs.WAN_CONFIGS["t2v-A14B"], folder, use_sp=True)
    call = {"size": (32, 32), "frame_num": 1, "sampling_steps": 1, "output_type": "latent"}
    with redirect_stderr(StringIO()) as bars:
        latents = [model.generate("a cat", **call, guide_scale=1.0, seed=-1) for _ in range(2)]
    return latents, bars.getvalue()


def test_ranks_of_a_python_class_draw_one_seed(tiny) -> None:
    """Ranks use the same random seed, and another one for each call; rank 0 shows progress."""
    (first, bars), (second, other_bars) = dist.run_on_ranks(2, draw_latents, str(tiny("t2v-1.3B")))
    for rank0_latents, rank1_latents in zip(first, second, strict=True):
        assert torch.equal(rank0_latents, rank1_latents)
    assert not torch.equal(first[0], first[1])
    assert "1/1" in bars and not other_bars


def collect_refusals(folder: str, image_folder: str) -> dict[str, str]:
    """On one rank: collect refusals of keywords, and of arguments that differ between ranks."""
    import wan

    messages = {}
    for name in ("world_size", "ring_sizes"):
        with pytest.raises(ValueError) as error:
            run_python_class(folder, {"use_sp": True, name: 2})
        messages[f"keyword {name}"] = str(error.value)
    model = wan.WanI2V(wan.configs.WAN_CONFIGS["i2v-A14B"], image_folder, use_sp=True)
    call: dict[str, Any] = {
        "input_prompt": "a cat",
        "img": Image.new("RGB", (32, 32), "red"),
        "max_area": 32 * 32,
        "frame_num": 5,
        "sampling_steps": 2,
        "seed": 1,
    }
    rank1_kwargs = {
        "img": Image.new("RGB", (32, 32), "blue"),
        "input_prompt": "a dog",
        "frame_num": 6,
    }
    for name, value in rank1_kwargs.items():
        rank_kwargs = {name: value} if torch.distributed.get_rank() == 1 else {}
        with pytest.raises(ValueError) as error:
            model.generate(**(call | rank_kwargs))
        messages[f"other {name}"] = str(error.value)
    return messages


def test_refusals_of_python_classes(tiny) -> None:
    """All ranks refuse together; a rank that continued would wait for the others."""
    first, second = dist.run_on_ranks(
        2, collect_refusals, str(tiny("t2v-A14B")), str(tiny("i2v-A14B"))
    )
    host = [rf"(?<= on ){gethostname()}"]
    check_refusals("ranks: python classes, rank 0", first, host)
    check_refusals("ranks: python classes, rank 1", second, host)
