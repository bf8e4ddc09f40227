"""Measures forwards of a clip with and without caching the features that depend on the clip alone.

    python -m benchmarks.clip --task animate-14B --json results/animate.json

The program counts operators and floating-point operations of a forward of the published network on
meta tensors: "anew" computes everything, as the official code does; "first" is the forward that
fills the cache, "next" each later one. It also times forwards of a smaller network on this CPU,
"anew" and "next" in every round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import (
    CPU,
    compute_ratios,
    compute_spread,
    keep_cores_busy,
    results_file,
    time_interleaved,
    write_json,
)
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.config import make_reference_dit_config
from wan.modules.interfaces import ModelComponents
from wan.settings.presets import FACE_SIZE, PRESETS
from wan.settings.values import integer
from wan.tasks.base import build_dit

SMALL = {"dim": 1024, "ffn_dim": 2752, "num_heads": 8}
LAYERS = (0, 2, 4, 6)  # of 8; S2V injects audio after these
CLIP_SIZES = {  # task -> size of a clip -> latent frames, rows, columns
    "s2v-14B": {"832*448, 80 frames": (20, 56, 104), "1024*704, 80 frames": (20, 88, 128)},
    "animate-14B": {"832*480, 77 frames": (21, 60, 104), "1280*720, 77 frames": (21, 90, 160)},
}


class OperatorCounter(TorchDispatchMode):
    """Counts operator calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_forward_arguments(task: str, frames: int, rows: int, columns: int) -> dict[str, Any]:
    """Makes the arguments of a forward of a second or later clip, with poses."""

    def make_latents(count: int, channels: int = 16) -> list[Tensor]:
        return [torch.randn(channels, count, rows, columns)]

    model_kwargs = {
        "x": make_latents(frames),
        "t": torch.tensor([500.0], device="cpu"),
        "context": [torch.randn(512, 4096)],
    }
    if task == "animate-14B":
        pictures = 4 * (frames - 2) + 1
        return model_kwargs | {
            "seq_len": frames * rows * columns // 4,
            "y": make_latents(frames, 20),
            "clip_fea": torch.randn(1, 257, 1280),
            "pose_latents": make_latents(frames - 1)[0][None],
            "face_pixel_values": torch.rand(1, 3, pictures, FACE_SIZE, FACE_SIZE) * 2 - 1,
        }
    return model_kwargs | {
        "seq_len": 0,
        "ref_latents": make_latents(1),
        "motion_latents": make_latents(19),
        "cond_states": make_latents(frames),
        "audio_input": torch.randn(1, 25, 1024, 4 * frames),
    }


def count_operators(task: str, frames: int, rows: int, columns: int) -> dict[str, dict[str, float]]:
    """Counts operators and TFLOP of the published network's "anew", "first" and "next" forward."""
    counts = {}
    for text_kv_cache in (False, True):
        with torch.device("meta"):
            config = make_reference_dit_config(PRESETS[task])
            model = build_dit(config, ModelComponents(text_kv_cache=text_kv_cache)).requires_grad_(
                False
            )
            model_kwargs = make_forward_arguments(task, frames, rows, columns)
        for name in ("first", "next") if text_kv_cache else ("anew",):
            flops, operators = FlopCounterMode(display=False), OperatorCounter()
            with torch.no_grad(), flops, operators:
                model(**model_kwargs)
            tflop = flops.get_total_flops() / 1e12
            counts[name] = {"operators": operators.count, "TFLOP": round(tflop, 3)}
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=CLIP_SIZES, default="s2v-14B")
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=7)
    parser.add_argument(
        "--load",
        type=make_argument_type(integer(0, 1000)),
        default=1,
        help="processes that keep one core each busy during the timed forwards (1)",
    )
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    rows = []
    for clip, sides in CLIP_SIZES[options.task].items():
        figures = count_operators(options.task, *sides)
        rows.append({"task": options.task, "clip": clip, **figures})
        for name, values in figures.items():
            print(f"{clip}, {name:5}: {values}")
    torch.manual_seed(0)
    config = {**make_reference_dit_config(PRESETS[options.task]), **SMALL, "num_layers": 10}
    if options.task == "s2v-14B":
        config |= {"num_layers": 8, "audio_inject_layers": LAYERS}
    uncached = build_dit(config).requires_grad_(False)
    cached = build_dit(config, ModelComponents(text_kv_cache=True)).requires_grad_(False)
    cached.load_state_dict(uncached.state_dict(), assign=True)
    model_kwargs = make_forward_arguments(
        options.task, 20 if options.task == "s2v-14B" else 5, 16, 24
    )
    variants = {"anew": lambda: uncached(**model_kwargs), "next": lambda: cached(**model_kwargs)}
    for load in (0, options.load):
        with torch.no_grad(), keep_cores_busy(load):
            times = time_interleaved(variants, options.rounds)
        row: dict[str, Any] = {name: compute_spread(figures) for name, figures in times.items()}
        row |= {"load": load, "next / anew": compute_ratios(times["next"], times["anew"])}
        rows.append(row)
        layers = config["num_layers"]
        print(f"{layers} layers of 1024 channels, {load} busy processes: {row}")
    write_json(options.json, CPU, rows)


if __name__ == "__main__":
    sys.exit(run_program(main))
