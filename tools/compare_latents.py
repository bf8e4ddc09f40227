"""Compares the latents of two runs after each step, and finds the first step that departs.

    python generate.py ... --save_latents steps --save_file a.mp4      (and b.mp4)
    python tools/compare_latents.py a.steps b.steps [--least 0.999] [--json FILE]

Use it after changing a kernel, precision, number of ranks or device: rounding grows slowly from
step to step, a mistake appears suddenly in one step. The cosine and the largest difference,
relative to the largest value of A, are computed in float64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.media.video_writer import load_latents
from wan.settings.errors import InputError
from wan.settings.values import real
from wan.utils.files import make_json_kind, write_output

RESULTS = make_json_kind("results of compare_latents.py", "steps", "least", "departs")


def compare_steps(a: Path, b: Path) -> list[dict[str, Any]]:
    """Returns for each step its number, cosine, and largest relative difference.

    Raises:
        InputError: The folders do not have the same steps and shapes.
    """
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (a, b)]
    if not names[0]:
        raise InputError(f"{a} has no latents", remedy="make them with --save_latents steps")
    for folder, step_names, other in ((a, names[0], names[1]), (b, names[1], names[0])):
        missing = sorted({*other} - {*step_names})
        if missing:
            raise InputError(f"{folder} has no {missing[0]}", remedy="compare equal steps")
    steps = []
    for name in names[0]:
        x, y = (load_latents(folder / name).double() for folder in (a, b))
        if x.shape != y.shape:
            shapes = f"{[*x.shape]} and {[*y.shape]}"
            raise InputError(f"{name} has the shapes {shapes}", remedy="compare equal sizes")
        cosine = torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)
        most = (x - y).abs().max() / x.abs().max()
        steps.append({"step": int(Path(name).stem), "cosine": float(cosine), "most": float(most)})
    return steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("compare_latents.py", description="Compare runs by step.")
    parser.add_argument("a", type=Path, help="folder of the reference run")
    parser.add_argument("b", type=Path, help="folder of the other run")
    least = "cosine below which a step departs (0.999)"
    parser.add_argument("--least", type=make_argument_type(real(-1, 1)), default=0.999, help=least)
    parser.add_argument("--json", type=make_output_path_type(RESULTS))
    options = parser.parse_args(argv)
    steps = compare_steps(options.a, options.b)
    departs = next((step["step"] for step in steps if not step["cosine"] >= options.least), None)
    for step in steps:
        mark = "  <- departs" if step["step"] == departs else ""
        figures = f"1 - {1 - step['cosine']:.1e}, largest difference {step['most']:.1e}"
        print(f"step {step['step']:4}: cosine {figures}{mark}")
    if options.json:
        record = {"steps": steps, "least": options.least, "departs": departs}
        with write_output(options.json, RESULTS) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_program(main))
