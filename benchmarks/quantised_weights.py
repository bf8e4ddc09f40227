"""Times a step of the DiT with quantized weights beside the same step in bfloat16.

    python -m benchmarks.quantised_weights --model 5B --size 320*192 --frames 9
    python -m benchmarks.quantised_weights --model 5B --layers 4 --tokens 720 --rounds 3 --eager

A step is the forward passes of both guidance branches, as the pipeline runs them; the keys and
values of the text are cached. Every layer has the published size and random weights; all blocks
share one block's weights, which are larger than a CPU's caches, so that all variants fit in memory
together. Every round runs each variant once. The program prints seconds of a step, ratios to
bfloat16 taken inside a round, and the bytes of all blocks; the JSON file has every round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from copy import copy
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.formats.tensor_info import E4M3, GGUF
from wan.checkpoint.load import DTYPES
from wan.checkpoint.quant.dequantise import TO_FLOAT
from wan.kernels.compiled_dequantise import MIN_VALUES, CompiledDequantizer
from wan.kernels.compiled_ops import STEPS_BY_OP, CompiledOps
from wan.kernels.forward_context import StepInfo
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.weight_only_linear import UpcastMemory, WeightOnlyLinear
from wan.modules.fused_ops import BlockOps
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.pipeline.denoise import StepPrediction
from wan.settings.numerics import keeps_fp32
from wan.settings.presets import PRESETS, Preset
from wan.settings.values import integer, read_size
from wan.tasks.base import DenoiseInputs
from wan.testing import measuring
from wan.utils import system

MODELS = {"1.3B": "t2v-1.3B", "5B": "ti2v-5B"}
SCALES = {"Q8_0": (0,), "Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2), "Q3_K": (108,)}
"""GGUF type -> offsets of a block's float16 scales, which must be numbers of ordinary size."""
VARIANTS = ("bf16", *SCALES, "FP8", "int8")


def quantize_randomly(
    variant: str, linear: nn.Linear, memory: UpcastMemory, dequantizer: CompiledDequantizer
) -> nn.Module:
    """Makes a layer of the same size with random quantized weights."""
    rows, columns, bias = linear.out_features, linear.in_features, linear.bias
    if variant == "int8":
        weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        scale = torch.full((rows,), 0.02 / 127)
        return W8A8Linear(weight, scale, bias, dtype=torch.bfloat16)
    if variant == "FP8":
        return WeightOnlyLinear(
            torch.randn(rows, columns).to(DTYPES[E4M3]),
            TO_FLOAT[E4M3],
            bias,
            in_features=columns,
            scale=torch.full((1,), 0.02),
            memory=memory,
            try_fill=partial(dequantizer.fill, E4M3),
        )
    block_values, block_bytes = GGUF[variant]
    blocks = torch.randint(256, (rows * columns // block_values, block_bytes), dtype=torch.uint8)
    for offset in SCALES[variant]:
        blocks[:, offset : offset + 2] = torch.tensor([1e-3], dtype=torch.half).view(torch.uint8)
    stored = blocks.view(rows, -1)
    try_fill = partial(dequantizer.fill, variant)
    return WeightOnlyLinear(
        stored, TO_FLOAT[variant], bias, in_features=columns, memory=memory, try_fill=try_fill
    )


def make_network(
    preset: Preset,
    num_layers: int,
    variant: str,
    weights: dict[str, nn.Parameter],
    dequantizer: CompiledDequantizer,
) -> WanModel:
    """Makes a network in bfloat16 whose blocks share the weights of the first one.

    weights: Those that all variants share, by name; the first variant adds them.
    """
    ops = BlockOps(run_op=CompiledOps(STEPS_BY_OP))
    with torch.device("meta"):
        network = WanModel(
            preset.kind,
            in_dim=preset.in_dim,
            out_dim=preset.in_dim,
            dim=preset.dim,
            ffn_dim=preset.ffn_dim,
            num_heads=preset.num_heads,
            num_layers=num_layers,
            components=ModelComponents(ops=ops, text_kv_cache=True),
        )
    for name, parameter in network.named_parameters():
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            dtype = torch.float32 if keeps_fp32(name) else torch.bfloat16
            if name not in weights:
                values = (torch.randn(parameter.shape) * 0.02).to(dtype)
                weights[name] = nn.Parameter(values, requires_grad=False)
            module_name, _, parameter_name = name.rpartition(".")
            module = network.get_submodule(module_name)
            setattr(module, parameter_name, weights[name])
    memory, first_block = UpcastMemory(), network.blocks[0]
    if variant != "bf16":
        for name, module in list(first_block.named_modules()):
            if isinstance(module, nn.Linear):
                layer = quantize_randomly(variant, module, memory, dequantizer)
                first_block.set_submodule(name, layer)
        network.hold_weights = None if variant == "int8" else memory.hold
        network.register_forward_hook(memory.free)
    for block in network.blocks[1:]:
        for name, module in first_block.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                setattr(block.get_submodule(name), key, parameter)
            if isinstance(module, WeightOnlyLinear | W8A8Linear):
                block.set_submodule(name, copy(module))
    return network.eval()


def count_block_bytes(network: WanModel) -> int:
    """Counts the bytes of all blocks as if each had its own weights."""
    block = network.blocks[0]
    tensors = (*block.parameters(), *block.buffers())
    return len(network.blocks) * sum(tensor.nbytes for tensor in tensors)


def make_step(network: WanModel, grid: tuple[int, int, int]) -> measuring.Work:
    """Returns a function that computes both guidance branches of a step."""
    frames, height, width = grid
    latents = torch.randn(network.in_dim, frames, 2 * height, 2 * width)
    cond, uncond = torch.randn(2, network.text_len, network.text_dim).bfloat16()
    inputs = DenoiseInputs(latents, cond, uncond)
    info = StepInfo(0, 1, "cond", "dit", grid, prod(grid))
    return StepPrediction(network, latents, torch.tensor([500.0]), inputs, info).compute_branches


@torch.no_grad()
def measure_variants(
    preset: Preset,
    num_layers: int,
    grid: tuple[int, int, int],
    variants: Sequence[str],
    rounds: int,
    eager: bool,
) -> dict[str, Any]:
    """Measures the seconds of a step of every variant in every round."""
    torch.manual_seed(0)
    weights = dict[str, nn.Parameter]()
    dequantizer = CompiledDequantizer(MIN_VALUES if eager else 0)
    networks = {
        name: make_network(preset, num_layers, name, weights, dequantizer) for name in variants
    }
    seconds = measuring.time_interleaved(
        {name: make_step(network, grid) for name, network in networks.items()}, rounds
    )
    return {
        "task": preset.task,
        "layers": num_layers,
        "grid": grid,
        "tokens": prod(grid),
        "threads": torch.get_num_threads(),
        "eager": eager,
        "block_bytes": {name: count_block_bytes(network) for name, network in networks.items()},
        "seconds": seconds,
        "ratios": {
            name: common.compute_ratios(values, seconds["bf16"]) for name, values in seconds.items()
        },
    }


def print_record(record: dict[str, Any]) -> None:
    """Prints a record."""
    print(
        f"\n{record['task']}, {record['layers']} layers, {record['tokens']} tokens, "
        f"{record['threads']} threads\n{'':8}  seconds   ratio (least to most)      GB"
    )
    for name, values in record["seconds"].items():
        ratio = record["ratios"][name]
        print(
            f"  {name:6}{common.compute_spread(values)['median']:10.3f}{ratio['median']:8.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f}){record['block_bytes'][name] / 1e9:9.2f}"
        )


def parse_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, tuple[int, int, int]]:
    """Parses the options; returns them and the token grid."""
    parser = Parser(description="Time a step of the DiT with quantized weights.")
    positive = make_argument_type(integer(1, 1_000_000))
    parser.add_argument("--model", choices=MODELS, default="5B")
    parser.add_argument("--layers", type=positive, help="blocks (as published)")
    parser.add_argument("--size", default="320*192")
    parser.add_argument("--frames", type=positive, default=9, help="frames of the video (9)")
    parser.add_argument("--tokens", type=positive, help="instead of --size and --frames")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (5)")
    parser.add_argument("--eager", action="store_true", help="do not compile the dequantizing")
    common.add_json_option(parser)
    options = parser.parse_args(argv)
    preset = PRESETS[MODELS[options.model]]
    if options.tokens:
        return options, (1, 1, options.tokens)
    width, height = read_size("--size", options.size)
    temporal, side = preset.vae_stride[0], 2 * preset.vae_stride[1]
    return options, ((options.frames - 1) // temporal + 1, height // side, width // side)


def main(argv: Sequence[str] | None = None) -> None:
    options, grid = parse_options(argv)
    preset = PRESETS[MODELS[options.model]]
    print(f"{system.read_cpu_name()}, {torch.get_num_threads()} threads")
    variants = list(dict.fromkeys(("bf16", *options.variants)))
    layers = options.layers or preset.num_layers
    record = measure_variants(preset, layers, grid, variants, options.rounds, options.eager)
    print_record(record)
    common.write_json(options.json, measuring.CPU, [record])


if __name__ == "__main__":
    sys.exit(run_program(main))
