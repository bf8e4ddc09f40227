"""Step caches on ranks: a common decision, no hang, and the results of one process."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist import run_on_ranks
from wan.cache import policy as policies
from wan.cache.policy import StepLists
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.forward_context import StepInfo
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.settings.attention_modes import MODES
from wan.settings.parallel import Parallel
from wan.settings.presets import PRESETS
from wan.settings.step_cache import StepCache

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]
HEADS, GRID, STEPS = 4, (3, 3, 5), 8
TOKENS = 45  # padded on 2 and 4 ranks
BRANCHES = policies.BRANCHES
NO_STEPS: StepLists = dict.fromkeys(BRANCHES, (False,) * STEPS)
SOME_STEPS: StepLists = dict.fromkeys(
    BRANCHES, (True, False, True, False, False, True, True, False)
)


@dataclass(frozen=True)
class Case:
    """A step-cache policy and its precomputed lists of steps."""

    name: str
    lists: StepLists
    order: int = 0
    threshold: float | None = None

    def cache(self, agree: Any = None) -> Any:
        separator = "," if ":" in self.name else ":"
        order = "" if self.name in ("attention", "cfg", "easy") else f"order={self.order},"
        threshold = "" if self.threshold is None else f"threshold={self.threshold},"
        settings = StepCache(f"{self.name}{separator}{threshold}{order}force=true")
        policy = policies.make_policy(settings, PRESETS["t2v-1.3B"])
        assert policy is not None
        return policy.make_cache(all_agree=agree)

    def with_lists(self, computed: dict[str, list[int]]) -> Case:
        """Return the case that computes these steps instead of deciding at run time."""
        lists = {name: tuple(s in steps for s in range(STEPS)) for name, steps in computed.items()}
        return Case("steps:0" if self.name == "first_block" else self.name, lists, self.order)


POLICIES = {
    "first_block": Case("first_block", NO_STEPS, threshold=0.1),
    "order 1": Case("first_block", NO_STEPS, 1, threshold=0.1),
    "all blocks": Case("tea", SOME_STEPS),
}


@dataclass(frozen=True)
class Layout:
    """The parallel layout and the attention mode."""

    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    comm_type: int = 0

    @property
    def parallel(self) -> Parallel:
        world = self.cfg * self.ring * self.ulysses
        return Parallel(world, self.cfg, self.ring, self.ulysses, comm_type=self.comm_type)


def velocities(
    case: Case, layout: Layout | None, has_noisy_sums: bool = False
) -> tuple[Tensor, Any]:
    """Return the guided velocities of all steps, and the steps that each branch computed.

    layout: None for one process. has_noisy_sums: multiply the sums of each rank by random factors.
    """
    from wan import device as devices
    from wan.distributed.mesh import make_parallel_groups
    from wan.distributed.ring import Ring
    from wan.pipeline.denoise import run_both_branches

    components, branches, cache = ModelComponents(), run_both_branches, case.cache()
    if layout is not None:
        parallel = layout.parallel
        team = make_parallel_groups(devices.select_device("cpu"), parallel.mesh_shape)
        branches = team.compute_branches if layout.cfg == 2 else run_both_branches
        agree = team.all_agree
        if has_noisy_sums:
            noise = torch.Generator().manual_seed(team.rank)

            def agree(sums: Tensor, threshold: float) -> bool:
                factor = 10 ** torch.randn(2, generator=noise)
                return team.all_agree(sums * factor, threshold)

        cache = case.cache(agree)
        layer = FAPowerCapAttention(
            SimpleNamespace(comm_type=layout.comm_type),
            team.group("ulysses"),
            ring=Ring(team.group("ring"), "ring"),
        )
        components = ModelComponents(
            lambda _: layer, sequence_shard=ShardedSequence(team.group("ring", "ulysses"))
        )
    torch.manual_seed(0)
    model = WanModel(
        "t2v",
        dim=HEADS * 12,
        ffn_dim=96,
        num_heads=HEADS,
        num_layers=3,
        text_dim=16,
        text_len=8,
        components=replace(components, step_cache=cache),
    )
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(16, 3, 6, 10, generator=generator)
    texts = {name: torch.randn(8, 16, generator=generator) for name in ("cond", "uncond")}
    cache.start_run(case.lists)
    outputs, x = [], start
    with torch.no_grad():
        for index in range(STEPS):
            t = torch.tensor([900.0 - 50 * index])

            def branch(name: str, index: int = index, t: Tensor = t, x: Tensor = x) -> Tensor:
                at = StepInfo(index, STEPS, name, "dit", GRID, TOKENS)
                return model([x], t, [texts[name]], TOKENS, step=at)[0]

            cond, uncond = branches(branch)
            guided = uncond + 2 * (cond - uncond)
            outputs.append(guided)
            x = x - guided * (0.02 if index % 3 else 0.6)  # some steps change x much, others little
    return torch.stack(outputs), cache.computed_indices


LAYOUTS = [
    Layout(*sizes, comm_type)
    for *sizes, comm_type in product((1, 2), (1, 2), (1, 2, 4), MODES)
    if 1 < sizes[0] * sizes[1] * sizes[2] <= 8 and (comm_type == 0 or sizes[2] > 1)
]
FAST = {  # each layout of two ranks once, each policy once
    "first_block": Layout(1, 2, 1),
    "order 1": Layout(2, 1, 1),
    "all blocks": Layout(1, 1, 2, 1),
}


def check_skips(layout: Layout, policy: str) -> None:
    case = single_case = POLICIES[policy]
    results = run_on_ranks(layout.parallel.world_size, velocities, case, layout)
    computed = [steps for _, steps_by_branch in results for steps in steps_by_branch.values()]
    if layout.cfg == 2:
        assert all(steps == computed[0] for steps in computed), "the branches agree"
        single_case = case.with_lists(dict.fromkeys(BRANCHES, computed[0]))
    expected, steps = velocities(single_case, None)
    assert 2 <= len(steps["cond"]) < STEPS, "some are skipped"
    for result, steps_by_branch in results:
        assert all(steps_by_branch[branch] == steps[branch] for branch in steps_by_branch)
        assert (result - expected).abs().max() <= 5e-5


def check_disagreement(layout: Layout, policy: str) -> None:
    """All ranks compute the same steps, without a hang; one process gives the same results."""
    case = POLICIES[policy]
    results = run_on_ranks(layout.parallel.world_size, velocities, case, layout, True, timeout=60)
    agreed_steps: dict[str, list[int]] = {}
    for _, steps_by_branch in results:
        for branch, steps in steps_by_branch.items():
            for name in ("cond", "uncond") if layout.cfg == 2 else (branch,):
                assert agreed_steps.setdefault(name, steps) == steps
    expected, _ = velocities(case.with_lists(agreed_steps), None)
    for result, _ in results:
        assert (result - expected).abs().max() <= 5e-5


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_skip_together_and_compute_what_one_does(policy: str) -> None:
    check_skips(FAST[policy], policy)


def test_ranks_that_disagree_decide_together() -> None:
    check_disagreement(Layout(1, 2, 1), "first_block")
    check_disagreement(Layout(2, 1, 1), "order 1")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_of_ranks(layout: Layout, policy: str) -> None:
    check_skips(layout, policy)
    if policy != "all blocks":
        check_disagreement(layout, policy)


def run_with_killed_rank(case: Case, layout: Layout) -> None:
    """The last rank dies in the third step, while the others wait for its sums."""
    from wan.distributed import mesh

    agree, count = mesh.ParallelGroups.all_agree, 0

    def die_in_decision(team: mesh.ParallelGroups, sums: Tensor, threshold: float) -> bool:
        nonlocal count
        count += 1
        if count == 5 and team.rank == layout.parallel.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(team, sums, threshold)

    mesh.ParallelGroups.all_agree = die_in_decision
    velocities(case, layout)


def test_a_rank_killed_in_a_decision_ends_the_others() -> None:
    with pytest.raises(AssertionError, match="the process ended") as caught:
        run_on_ranks(2, run_with_killed_rank, POLICIES["first_block"], Layout(1, 2, 1), timeout=30)
    assert "no answer" not in str(caught.value)
