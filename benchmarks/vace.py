"""Compares forwards of VACE: hints computed one at a time, all hints in memory, and diffusers'.

    python -m benchmarks.vace --json vace.json

The networks share random weights in bfloat16: the width and blocks of the published 1.3B. The
program prints a forward's peak memory without the weights, the bytes of a hint, the ratio of times
to diffusers' inside each round, and the distance of the velocities.

Legend: C channels, F H W latent frames/height/width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import WanVACETransformer3DModel
from torch import Tensor, nn

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.config import make_reference_dit_config
from wan.checkpoint.keymaps import rename_dit_to_diffusers
from wan.modules.vace import VaceWanModel
from wan.settings.numerics import keeps_fp32
from wan.settings.presets import PRESETS
from wan.settings.values import integer
from wan.utils import system

DTYPE, CPU = torch.bfloat16, common.CPU


def make_networks(layers: int) -> tuple[VaceWanModel, Any]:
    """Makes our network and diffusers' with the same weights, in each library's dtypes."""
    config: dict[str, Any] = {**make_reference_dit_config(PRESETS["vace-1.3B"])}
    interval = config["num_layers"] // len(config["vace_layers"])
    config |= {"num_layers": layers, "vace_layers": [*range(0, layers, interval)]}
    del config["image_dim"], config["image_positions"]
    ours = VaceWanModel(**config)
    for name, parameter in ours.named_parameters():
        if not keeps_fp32(name):
            parameter.data = parameter.data.to(DTYPE)
    theirs: Any = WanVACETransformer3DModel(
        num_attention_heads=config["num_heads"],
        ffn_dim=config["ffn_dim"],
        num_layers=layers,
        vace_layers=config["vace_layers"],
    )
    fp32_modules = {*theirs._keep_in_fp32_modules}
    named = {rename_dit_to_diffusers(name): tensor for name, tensor in ours.state_dict().items()}
    cast = {
        k: v.float() if fp32_modules & {*k.split(".")} else v.to(DTYPE) for k, v in named.items()
    }
    theirs.load_state_dict(cast, assign=True)
    return ours.eval(), theirs.eval()


@torch.no_grad()
def measure_forwards(grid: tuple[int, int, int], layers: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    ours, theirs = make_networks(layers)
    sides = grid[0], 2 * grid[1], 2 * grid[2]
    x, control = torch.randn(16, *sides), torch.randn(96, *sides)
    text, t, tokens = torch.randn(512, 4096, dtype=DTYPE), torch.tensor([500.0]), math.prod(grid)
    hints: list[Tensor] = []

    def forward_hint_by_hint() -> Tensor:
        return ours([x], t, [control], [text], tokens)[0]

    def forward_keeping_hints() -> Tensor:
        def keep_hint(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
            hints.append(output[1])

        hooks = [block.register_forward_hook(keep_hint) for block in ours.vace_blocks]
        velocity = forward_hint_by_hint()
        hints.clear()
        for hook in hooks:
            hook.remove()
        return velocity

    def forward_diffusers() -> Tensor:
        arguments = x[None].to(DTYPE), t, text[None], None, control[None].to(DTYPE)
        velocity: Tensor = theirs(*arguments, return_dict=False)[0][0]
        return velocity

    runs: dict[str, common.Run] = {
        "one at a time": forward_hint_by_hint,
        "all kept": forward_keeping_hints,
        "diffusers": forward_diffusers,
    }
    velocities, peaks = dict[str, Tensor](), dict[str, int]()

    def run_once(name: str) -> None:
        velocities[name] = runs[name]()

    for name in runs:
        peaks[name] = common.measure_peak_bytes(partial(run_once, name), CPU)
    expected = velocities["one at a time"].float()
    times = common.time_interleaved(runs, rounds)
    return {
        "tokens": tokens,
        "layers": layers,
        "hints": len(ours.vace_blocks),
        "hint_bytes": tokens * ours.dim * DTYPE.itemsize,
        "peak_bytes": peaks,
        "seconds": times,
        "time": common.compute_ratios(times["one at a time"], times["diffusers"]),
        "difference": {
            name: (velocity.float() - expected).abs().max().item()
            for name, velocity in velocities.items()
        },
        "size": expected.abs().max().item(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--grid", type=common.parse_token_grid, default=(3, 15, 26), metavar="F,H,W"
    )
    parser.add_argument("--layers", type=make_argument_type(integer(1, 1000)), default=30)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=2)
    parser.add_argument("--json", type=common.results_file)
    options = parser.parse_args(argv)
    record = measure_forwards(options.grid, options.layers, options.rounds)
    print(
        f"{system.read_cpu_name()}, {torch.get_num_threads()} threads: {record['tokens']} tokens, "
        f"{record['layers']} blocks, {record['hints']} hints of {record['hint_bytes'] / 1e6:.1f} MB"
    )
    for name, peak in record["peak_bytes"].items():
        median = common.compute_spread(record["seconds"][name])["median"]
        off = record["difference"][name]
        print(f"  {name:14} {peak / 1e6:8.1f} MB {median:8.2f} s, off by {off:.1e}")
    print("  time / diffusers: {median:.3f} ({min:.3f} to {max:.3f})".format(**record["time"]))
    common.write_json(options.json, CPU, [record])


if __name__ == "__main__":
    sys.exit(run_program(main))
