"""Scores guiders, guidance in attention and EasyCache on the demo checkpoint.

    python -m tools.demo.guidance --prompts 50

Prints a table for 4, 8 and 20 steps of text to video, one of the four-step LoRAs without guidance,
and one of step caches at 40 steps; docs/sampling.md has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.demo.evaluate import format_run_rows
from wan import WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.configs import WAN_CONFIGS
from wan.settings.values import integer
from wan.utils import log

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
TASK = "t2v-A14B"
GUIDANCE: dict[str, dict[str, Any]] = {
    "cfg": {},
    "no guidance": {"guide_scale": 1.0},
    "cfg_zero, no zero step": {"guider": "cfg_zero", "zero_init_steps": 0},
    "cfg_zero, one zero step": {"guider": "cfg_zero", "zero_init_steps": 1},
    "apg": {"guider": "apg"},
    "apg, momentum -0.5": {"guider": "apg", "apg_momentum": -0.5},
    "slg_blocks 1": {"slg_blocks": (1,)},
    "nag_scale 5": {"nag_scale": 5.0},
}
CACHES: dict[str, dict[str, Any]] = {
    "no cache": {},
    "easy": {"step_cache": "easy"},
    "easy, threshold 0.1": {"step_cache": "easy", "step_cache_threshold": 0.1},
    "easy, threshold 0.2": {"step_cache": "easy", "step_cache_threshold": 0.2},
    "first_block": {"step_cache": "first_block", "step_cache_threshold": 0.2},
}
WITHOUT_CFG: dict[str, dict[str, Any]] = {
    "no guidance": {},
    "nag_scale 5": {"nag_scale": 5.0},
    "nag_scale 11": {"nag_scale": 11.0},
    "nag_scale 11, l2": {"nag_scale": 11.0, "nag_norm": "l2"},
    "cfg, scale 3": {"guide_scale": 3.0},
}


def load_model(**settings: Any) -> Any:
    return WanT2V(WAN_CONFIGS[TASK], DEMO / TASK, **settings)


def list_tables(prompts: int) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields the title and the lines of each table."""
    base: dict[str, Any] = {"guide_scale": 3.0, "shift": 12.0}
    few_step = load_model(lora_dir=DEMO / "T2V-A14B-4steps-lora")
    unguided = {"recipe": "lightning-4step", "guide_scale": 1.0}
    runs = [(name, few_step, unguided | settings) for name, settings in WITHOUT_CFG.items()]
    yield "four-step LoRAs", format_run_rows(runs, prompts)
    model = load_model()
    for steps in (20, 8, 4):
        plain = base | {"sampling_steps": steps}
        runs = [(name, model, plain | settings) for name, settings in GUIDANCE.items()]
        yield f"{steps} steps", format_run_rows(runs, prompts)
    plain = base | {"sampling_steps": 40}
    cached = [(name, load_model(**settings), plain) for name, settings in CACHES.items()]
    yield "40 steps, step caches", format_run_rows(cached, prompts)


@log.silence_thread()
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=make_argument_type(integer(1, 10_000)), default=50)
    options = parser.parse_args(argv)
    for title, lines in list_tables(options.prompts):
        print(f"\n{title}\n")
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
