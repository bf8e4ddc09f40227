"""Scores samplers and noise tables on the demo checkpoint, for few and many steps.

    python -m tools.demo.samplers --prompts 50 --strips docs/samplers.png

Each row of the printed table is a sampler with a noise table; its scores are the percent of shapes
with the right colour / shape / motion, over held-out prompts, with guidance 3 and shift 12. The
picture shows one prompt, with the same noise in each row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.demo.evaluate import (
    SIDE,
    compute_rates,
    judge_shapes,
    list_held_out_scenes,
    to_pixels,
)
from tools.demo.outputs import PICTURE, save_labelled_strips
from tools.demo.scenes import make_caption
from tools.demo.score import detect_shapes
from wan import WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.settings.solvers import SOLVERS
from wan.settings.values import integer
from wan.utils import log

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "t2v-A14B"
STEPS = (4, 8, 20)
ROWS = (
    *((solver, "official") for solver in SOLVERS if solver not in ("rcm", "dmd")),  # dmd is lcm
    *((solver, table) for table in ("beta", "beta57") for solver in ("euler", "res_multistep")),
)
"""Sampler and noise table; simple has the sigmas of the official one for these steps."""
SHOWN = 3  # number of the prompt in the picture


def score_row(
    model: Any, solver: str, table: str, prompts: int
) -> tuple[list[str], dict[int, np.ndarray]]:
    """Returns the cells of a row, and the strip of the shown prompt for each number of steps."""
    cells, strips = [], {}
    for steps in STEPS:
        verdicts = []
        for number, scene in list_held_out_scenes(prompts):
            frames: Any = model.generate(
                make_caption(scene),
                size=(SIDE, SIDE),
                frame_num=9,
                seed=number,
                shift=12.0,
                guide_scale=3.0,
                sampling_steps=steps,
                sample_solver=solver,
                sigmas=table,
                offload_model=False,
            )
            clip = to_pixels(frames)
            verdicts.append(judge_shapes(scene, detect_shapes(clip)))
            if number == SHOWN:
                strips[steps] = np.concatenate([*clip[::2]], axis=1)  # for a small picture
        rates = compute_rates(verdicts)
        cells.append(" / ".join(f"{rates[key]:.0f}" for key in ("colour", "shape", "motion")))
    return cells, strips


@log.silence_thread()
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--prompts", type=make_argument_type(integer(SHOWN + 1, 10_000)), default=50
    )
    parser.add_argument("--strips", type=make_output_path_type(PICTURE), help="PNG to write")
    options = parser.parse_args(argv)
    model = WanT2V("t2v-A14B", DEMO, precision="fp32")
    groups: dict[int, list[tuple[str, np.ndarray]]] = {steps: [] for steps in STEPS}
    print("| Sampler | `--sigmas` |", " | ".join(f"{steps} steps" for steps in STEPS), "|")
    print("|---|---|" + "---|" * len(STEPS))
    for solver, table in ROWS:
        cells, strips = score_row(model, solver, table, options.prompts)
        print(f"| `{solver}` | {table} |", " | ".join(cells), "|", flush=True)
        for steps, strip in strips.items() if table == "official" else ():
            groups[steps].append((solver, strip))
    if options.strips:
        titles = [(f"{steps} steps", strips) for steps, strips in groups.items()]
        save_labelled_strips(titles, options.strips)


if __name__ == "__main__":
    sys.exit(run_program(main))
