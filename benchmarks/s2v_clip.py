"""What a clip of s2v-14B costs, with and without computing once what depends on the clip alone.

    python -m benchmarks.s2v_clip --json results/s2v.json

Counted are the operators and the floating-point operations of a forward of the published network on
tensors without data: "anew" computes everything, as the official code does; "first" is the forward
that fills what is kept, "next" each one after it. Measured are seconds of forwards of a smaller
network on this CPU, "anew" and "next" in every round.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import CPU, busy, interleave, ratios, spread, write_json
from wan.checkpoint.config import published_config
from wan.modules.interfaces import Collaborators
from wan.modules.networks import network
from wan.settings.presets import PRESETS

SMALL = {"dim": 1024, "ffn_dim": 2752, "num_heads": 8, "num_layers": 8}
LAYERS = (0, 2, 4, 6)


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def arguments(frames: int, rows: int, columns: int, channels: int) -> dict[str, Any]:
    """A forward of a later clip, with poses."""

    def latents(count: int) -> list[Tensor]:
        return [torch.randn(16, count, rows, columns)]

    return {
        "x": latents(frames),
        "t": torch.tensor([500.0], device="cpu"),
        "context": [torch.randn(512, 4096)],
        "seq_len": 0,
        "ref_latents": latents(1),
        "motion_latents": latents(19),
        "cond_states": latents(frames),
        "audio_input": torch.randn(1, 25, channels, 4 * frames),
    }


def counted(frames: int, rows: int, columns: int) -> dict[str, dict[str, float]]:
    """Operators and TFLOP of a forward of the published network."""
    found = {}
    for kept in (False, True):
        with torch.device("meta"):
            config = published_config(PRESETS["s2v-14B"])
            model = network(config, Collaborators(text_kv_cache=kept)).requires_grad_(False)
            given = arguments(frames, rows, columns, 1024)
        for name in ("first", "next") if kept else ("anew",):
            flops, operators = FlopCounterMode(display=False), Operators()
            with torch.no_grad(), flops, operators:
                model(**given)
            tflop = flops.get_total_flops() / 1e12
            found[name] = {"operators": operators.count, "TFLOP": round(tflop, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--load", type=int, default=1, help="busy processes in the second part")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for size, sides in (("832*448", (56, 104)), ("1024*704", (88, 128))):
        found = counted(20, *sides)
        rows.append({"size": size, **found})
        for name, values in found.items():
            print(f"{size}, 80 frames, {name:5}: {values}")
    torch.manual_seed(0)
    config = {**published_config(PRESETS["s2v-14B"]), **SMALL, "audio_inject_layers": LAYERS}
    anew = network(config).requires_grad_(False)
    nexts = network(config, Collaborators(text_kv_cache=True)).requires_grad_(False)
    nexts.load_state_dict(anew.state_dict(), assign=True)
    given = arguments(20, 16, 24, 1024)
    variants = {"anew": lambda: anew(**given), "next": lambda: nexts(**given)}
    for load in (0, options.load):
        with torch.no_grad(), busy(load):
            times = interleave(variants, options.rounds)
        row: dict[str, Any] = {name: spread(found) for name, found in times.items()}
        row |= {"load": load, "next / anew": ratios(times["next"], times["anew"])}
        rows.append(row)
        print(f"8 layers of 1024 channels, {load} busy processes: {row}")
    write_json(options.json, CPU, rows)


if __name__ == "__main__":
    main()
