"""Scores guiders, guidance in attention and EasyCache on the demo checkpoint.

    python -m tools.demo.guidance --prompts 50

Prints a table for 4, 8 and 20 steps of text to video, and one of the four-step LoRAs without
guidance; docs/sampling.md has both.
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
    "cfg, scale 5": {"guide_scale": 5.0},
    "cfg_zero": {"guider": "cfg_zero"},
    "cfg_zero, 0 zero steps": {"guider": "cfg_zero", "zero_init_steps": 0},
    "cfg_zero, 1 zero step": {"guider": "cfg_zero", "zero_init_steps": 1},
    "apg": {"guider": "apg"},
    "apg, eta 1, momentum -0.5": {"guider": "apg", "apg_eta": 1.0, "apg_momentum": -0.5},
    "apg, momentum -0.5": {"guider": "apg", "apg_momentum": -0.5},
    "apg, scale 5, momentum -0.5": {"guider": "apg", "apg_momentum": -0.5, "guide_scale": 5.0},
    "slg_blocks 1": {"slg_blocks": (1,)},
    "slg_blocks 2": {"slg_blocks": (2,)},
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
    model = load_model()
    for steps in (4, 8, 20):
        base = {"sampling_steps": steps, "guide_scale": 3.0, "shift": 12.0}
        runs = [(name, model, base | settings) for name, settings in GUIDANCE.items()]
        yield f"{steps} steps", format_run_rows(runs, prompts)
    base = {"sampling_steps": 40, "guide_scale": 3.0, "shift": 12.0}
    cached = [(name, load_model(**settings), base) for name, settings in CACHES.items()]
    yield "40 steps, step caches", format_run_rows(cached, prompts)
    lora = DEMO / "T2V-A14B-4steps-lora"
    few = load_model(lora_dir=lora)
    few_step: dict[str, Any] = {"recipe": "lightning-4step", "guide_scale": 1.0}
    runs = [(name, few, few_step | settings) for name, settings in WITHOUT_CFG.items()]
    yield "four-step LoRAs", format_run_rows(runs, prompts)


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
