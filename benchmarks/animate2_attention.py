"""Animate-2's self-attention of one layer: frames merged by log-sum-exp, and other ways.

    python -m benchmarks.animate2_attention --json results/animate2_attention.json

"merged" is the way of `wan`. "flex" is that of diffusers: queries, keys and values are placed in a
padded layout, and a compiled FlexAttention applies a block mask. "flex, eager" and "dense mask"
need no compiler. All ways run in every round. The program prints seconds, the ratio to "flex"
inside a round, peak bytes beyond the inputs, the distance from "dense mask", and the bytes of the
kept keys and values of a clip of the published network on each rank; the JSON file has every round.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import common
from wan import device as devices
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.kernels.sdpa import SdpaKernel
from wan.modules.reference_kv import ReferenceKV, ReferenceLayout, ReferencePass
from wan.settings.presets import PRESETS
from wan.settings.values import integer
from wan.utils.torch_private import use_private_compiler_cache

BLOCK = 128  # rows of a block of FlexAttention's masks
TARGET = 0.8  # of the time of FlexAttention
QKV = tuple[Tensor, Tensor, Tensor]


def make_layout(frames: int, height: int, width: int) -> ReferenceLayout:
    """Makes the layout of a clip of `frames` reference frames on one rank."""
    generated = frames + 1, height, width
    return ReferenceLayout(
        (frames, height, width), generated, math.prod(generated), frames + 1, width
    )


def sees(layout: ReferenceLayout, q_row: Tensor, k_row: Tensor, reference_start: int) -> Tensor:
    """Returns which keys a query sees: those generated, and the reference's of its frame."""
    size, rows = layout.frame_size, math.prod(layout.generated)
    reference_row = k_row - reference_start
    is_reference = (reference_row >= 0) & (reference_row < math.prod(layout.grid))
    is_own_frame = q_row // size == reference_row // size + 1
    return (q_row < rows) & ((k_row < rows) | (is_reference & is_own_frame))


def make_merged(layout: ReferenceLayout, qkv: QKV, reference: tuple[Tensor, Tensor]) -> common.Run:
    kv = ReferenceKV(layout, qkv[0].device)
    kv.record(0, 0, *reference, (0, 1))
    kv.is_complete = True
    layer, kernel = ReferencePass(kv, 0.0, [0]).get_layer(0), SdpaKernel()
    q, k, v = qkv
    return lambda: layer.attend(kernel, [(0, q)], [(0, k, v)], [k.shape[1]])[0]


def make_flex(
    layout: ReferenceLayout,
    qkv: QKV,
    reference: tuple[Tensor, Tensor],
    attend: Callable[..., Tensor],
) -> common.Run:
    rows, q = math.prod(layout.generated), qkv[0]
    padded = -(-rows // BLOCK) * BLOCK
    reference_padded = -(-math.prod(layout.grid) // BLOCK) * BLOCK
    mask = create_block_mask(
        lambda b, h, q_row, k_row: sees(layout, q_row, k_row, padded),
        None,
        None,
        padded,
        padded + reference_padded,
        device=q.device,
    )

    def place(x: Tensor, length: int, start: int = 0, y: Tensor | None = None) -> Tensor:
        packed = x.new_zeros(1, length, *x.shape[2:])
        packed[:, : x.shape[1]] = x
        if y is not None:
            packed[:, start : start + y.shape[1]] = y
        return packed.transpose(1, 2)

    def run() -> Tensor:
        q, k, v = qkv
        keys, values = (
            place(x, padded + reference_padded, padded, y)
            for x, y in zip((k, v), reference, strict=True)
        )
        out = attend(place(q, padded), keys, values, block_mask=mask)
        return out.transpose(1, 2)[:, :rows]

    return run


def make_dense(layout: ReferenceLayout, qkv: QKV, reference: tuple[Tensor, Tensor]) -> common.Run:
    device, rows = qkv[0].device, math.prod(layout.generated)
    q_row = torch.arange(rows, device=device)[:, None]
    k_row = torch.arange(rows + math.prod(layout.grid), device=device)
    mask = sees(layout, q_row, k_row, rows)

    def run() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        keys, values = (
            torch.cat((x, y.transpose(1, 2)), dim=2) for x, y in zip((k, v), reference, strict=True)
        )
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2)

    return run


def count_kept_bytes(frames: int, size: tuple[int, int], ranks: tuple[int, int]) -> list[int]:
    """Counts the bytes of a clip's keys and values on each rank of a ring; 16 bits, all layers.

    ranks: Of Ulysses and of the ring.
    """
    preset, (ulysses, ring) = PRESETS["animate2-14B"], ranks
    latents = (frames - 1) // preset.vae_stride[0] + 1
    width, height = (side // preset.size_multiple for side in size)
    tokens = (latents + 1) * height * width
    world = ulysses * ring
    layout = ReferenceLayout(
        (latents, height, width),
        (latents + 1, height, width),
        -(-tokens // world) * world,
        latents + 1,
        width,
    )
    bytes_per_token = 2 * 2 * preset.num_layers * preset.dim // ulysses
    return [
        len(layout.find_frames(rank, ring)) * layout.reference_frame_size * bytes_per_token
        for rank in range(ring)
    ]


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    number = make_argument_type(integer(1, 100_000))
    for name, default in (("frames", 10), ("height", 20), ("width", 16), ("heads", 2)):
        parser.add_argument(f"--{name}", type=number, default=default)
    parser.add_argument("--rounds", type=number, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=common.results_file)
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    device = devices.select_device(options.device).torch_device
    layout = make_layout(options.frames, options.height, options.width)
    lengths = [math.prod(layout.generated)] * 3 + [math.prod(layout.grid)] * 2
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tensors = [torch.randn(1, n, options.heads, 128, device=device, dtype=dtype) for n in lengths]
    (q, k, v), reference = tensors[:3], (tensors[3], tensors[4])
    use_private_compiler_cache()
    runs = {
        "merged": make_merged(layout, (q, k, v), reference),
        "flex": make_flex(layout, (q, k, v), reference, torch.compile(flex_attention)),
        "flex, eager": make_flex(layout, (q, k, v), reference, flex_attention),
        "dense mask": make_dense(layout, (q, k, v), reference),
    }
    expected = runs["dense mask"]()
    seconds = common.time_interleaved(runs, options.rounds, device)
    results, ratios = [], {}
    for name, run in runs.items():
        distance = (run() - expected).abs().max().item()
        ratios[name] = ratio = common.compute_ratios(seconds[name], seconds["flex"])
        peak = common.measure_peak_bytes(run, device)
        spread = common.compute_spread(seconds[name])
        print(
            f"{name:12}{spread['median']:9.4f} s ({spread['min']:.4f} to {spread['max']:.4f}), "
            f"{ratio['median']:6.3f} of flex, {peak / 1e6:8.1f} MB, distance {distance:.1e}"
        )
        results.append(
            {"name": name, "seconds": seconds[name], "of_flex": ratio}
            | {"peak_bytes": peak, "distance": distance}
        )
    verdict = "met" if ratios["merged"]["median"] <= TARGET else "MISSED"
    print(f"merged / flex: target <= {TARGET}, {verdict}")
    kept = {}
    for frames, ranks in product((37, 81), ((1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (4, 2))):
        key = f"{frames} frames, ulysses {ranks[0]} x ring {ranks[1]}"
        kept[key] = count_kept_bytes(frames, (640, 800), ranks)
        print(f"{key}: {', '.join(f'{count / 1e9:.2f}' for count in kept[key])} GB a rank")
    common.write_json(options.json, device, [{**vars(layout)}, *results, {"kept_bytes": kept}])


if __name__ == "__main__":
    sys.exit(run_program(main))
