"""Rules of mindiesd that `wan` follows."""

from __future__ import annotations

import mindiesd
import torch

from wan.app import flag_parser
from wan.app.resolve import ResolveContext, resolve_video


def list_computed_steps(steps: int, start: int, end: int, interval: int) -> list[int]:
    """List the steps in which mindiesd computes attention."""
    limits = {"step_start": start, "step_end": end, "step_interval": interval}
    config = mindiesd.CacheConfig("attention_cache", blocks_count=1, steps_count=steps, **limits)
    agent, computed_steps = mindiesd.CacheAgent(config), list[int]()

    def attend(step: int) -> torch.Tensor:
        computed_steps.append(step)
        return torch.zeros(1)

    for step in range(steps):
        agent.apply(attend, step)
    return computed_steps


def test_steps_of_the_attention_cache_are_those_of_mindiesd() -> None:
    for start, end, interval in ((3, 9, 3), (0, 11, 4), (2, 11, 2), (5, 7, 1), (1, 10, 5)):
        cache_flags = (
            f"--use_attentioncache --start_step {start} --end_step {end} --sample_steps 12"
        )
        command_line = ["--plan", *cache_flags.split(), "--attentioncache_interval", str(interval)]
        run = resolve_video(
            ResolveContext(plan=True, make_demo=lambda *_: None),
            flag_parser.parse_flags(command_line),
        )
        assert run.setup.policy is not None
        lists = run.setup.policy.select_steps(run.params, None)
        expected = list_computed_steps(12, start, end, interval)
        assert lists and len(expected) < 12 + (interval == 1)
        for row in lists.values():
            assert [step for step in range(12) if row[step]] == expected
