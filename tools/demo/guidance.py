"""Scores guiders, guidance in attention and EasyCache on the demo checkpoint.

    python -m tools.demo.guidance --prompts 50

Prints tables for 4, 8 and 20 steps of text to video, for the four-step LoRAs without guidance, and
for step caches at 40 steps; docs/sampling.md has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.demo.evaluate import SIDE, format_run_rows, to_pixels
from tools.demo.scenes import BACKGROUNDS, SHAPES
from tools.demo.score import DetectedShape, detect_shapes
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
    "cfg_zero, no zero step": {"guider": "cfg_zero:zero_init_steps=0"},
    "cfg_zero, one zero step": {"guider": "cfg_zero:zero_init_steps=1"},
    "apg": {"guider": "apg"},
    "apg, momentum -0.5": {"guider": "apg:momentum=-0.5"},
    "slg_blocks 1": {"slg_blocks": (1,)},
    "nag_scale 5": {"nag_scale": 5.0},
}
CACHES: dict[str, dict[str, Any]] = {
    "no cache": {},
    "easy": {"step_cache": "easy"},
    "easy, threshold 0.1": {"step_cache": "easy:threshold=0.1"},
    "easy, threshold 0.2": {"step_cache": "easy:threshold=0.2"},
    "first_block": {"step_cache": "first_block:threshold=0.2"},
}
WITHOUT_CFG: dict[str, dict[str, Any]] = {
    "no guidance": {},
    "nag_scale 5": {"nag_scale": 5.0},
    "nag_scale 11": {"nag_scale": 11.0},
    "nag_scale 11, l2": {"nag_scale": "11:norm=l2"},
    "cfg, scale 3": {"guide_scale": 3.0},
}


FEW_STEP: dict[str, Any] = {"recipe": "lightning-4step", "guide_scale": 1.0}
AVOIDING: dict[str, dict[str, Any]] = {
    "no NAG": {},
    "nag_scale 5": {"nag_scale": 5.0},
    "nag_scale 11": {"nag_scale": 11.0},
    "nag_scale 11, nag_alpha 0.5": {"nag_scale": "11:alpha=0.5"},
    "nag_scale 11, l2": {"nag_scale": "11:norm=l2"},
}


def load_model(**settings: Any) -> Any:
    return WanT2V(WAN_CONFIGS[TASK], DEMO / TASK, **settings)


def format_avoided_rows(model: Any, prompts: int) -> Iterator[str]:
    """Yields the lines of a table: how often NAG avoids a negative prompt without guidance.

    The prompts name no color; the negative prompt names that of the video without NAG.
    """
    verdicts: dict[str, list[tuple[bool, bool]]] = {name: [] for name in AVOIDING}
    for number in range(prompts):
        shape, background = SHAPES[number % len(SHAPES)], BACKGROUNDS[number % len(BACKGROUNDS)]
        prompt = f"a large {shape} moves up on a {background} background"

        detect = partial(_detect_largest_shape, model, prompt, number)
        plain = detect({})
        if plain is None:
            continue
        for name, settings in AVOIDING.items():
            avoided = f"a large {plain.colour} {shape}"
            shown = detect({"n_prompt": avoided, **settings})
            is_other = shown is not None and shown.colour != plain.colour
            verdicts[name].append((is_other, shown is not None and shown.shape == shape))
    yield "| Run | Another color, % | The shape of the prompt, % |"
    yield "|---|---|---|"
    for name, pairs in verdicts.items():
        other, same = (100 * sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        yield f"| {name} | {other:.0f} | {same:.0f} |"


def _detect_largest_shape(
    model: Any, prompt: str, seed: int, settings: Mapping[str, Any]
) -> DetectedShape | None:
    """Makes a video and returns its largest shape."""
    video = model.generate(
        prompt,
        size=(SIDE, SIDE),
        frame_num=9,
        seed=seed,
        offload_model=False,
        **(FEW_STEP | dict(settings)),
    )
    return next(iter(detect_shapes(to_pixels(video))), None)


def list_tables(prompts: int) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields the title and the lines of each table."""
    base: dict[str, Any] = {"guide_scale": 3.0, "shift": 12.0}
    few_step = load_model(lora_dir=DEMO / "T2V-A14B-4steps-lora")
    runs = [(name, few_step, FEW_STEP | settings) for name, settings in WITHOUT_CFG.items()]
    yield "four-step LoRAs", format_run_rows(runs, prompts)
    yield "four-step LoRAs, negative prompt", format_avoided_rows(few_step, prompts)
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
