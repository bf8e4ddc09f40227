"""Times one forward of the DiT: ours, ours compiled, diffusers', and its matrix products alone.

    python benchmarks/dit_forward.py --case 12x128
    python benchmarks/dit_forward.py --case 12x128 --load 1 --json results/dit.json
    python benchmarks/dit_forward.py --gpu-case

All models share their weights and get the same input. "ours" fuses small operations, "plain" fuses
none, "compiled" compiles blocks (`--compile`). "linear" and "attention" replay those calls of our
forward alone, on its recorded activations: with these kernels no forward can be faster than their
sum, "products"; the time beyond it is a forward's "rest". Every model computes the text's keys and
values; only the row "ours, text cache" reuses them, as our model does in every step after the
first. The program prints seconds, ratios taken inside a round, the rate, and a forward's peak
memory without the weights; the JSON file has every round. `--load` starts processes that keep one
core each busy.

Legend: C channels, F H W latent frames/height/width.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers
from wan.kernels.compiled_ops import STEPS_BY_OP, CompiledOps
from wan.modules.fused_ops import BlockOps
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.settings.numerics import keeps_fp32
from wan.settings.values import integer
from wan.testing import measuring
from wan.utils import system
from wan.utils.torch_private import use_private_compiler_cache

CHANNELS, TEXT_DIM, TEXT_LEN, PATCH, HEAD_DIM = 16, 4096, 512, (1, 2, 2), 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = ("ours", "plain", "diffusers", "ours, text cache", "compiled")
RATIOS = (
    ("ours", "products"),
    ("ours", "diffusers"),
    ("ours", "plain"),
    ("plain", "diffusers"),
    ("ours, text cache", "ours"),
    ("compiled", "ours"),
)


@dataclass(frozen=True)
class Case:
    """Sizes of a network with heads of 128 channels, and the token grid of one video."""

    heads: int
    ffn: int
    layers: int
    grid: tuple[int, int, int]


CASES = {
    "12x128": Case(heads=12, ffn=8960, layers=2, grid=(5, 26, 30)),
    "40x128": Case(heads=40, ffn=13824, layers=1, grid=(5, 15, 20)),
}
GPU_CASE = Case(heads=40, ffn=13824, layers=4, grid=(21, 45, 80))


@dataclass(frozen=True)
class Bench:
    """Makes the models and inputs of a case in one dtype on one device."""

    case: Case
    dtype: torch.dtype
    device: torch.device

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def make_model(self, text_kv_cache: bool = False, fused: bool = False) -> WanModel:
        return WanModel(
            in_dim=CHANNELS,
            dim=self.case.heads * HEAD_DIM,
            ffn_dim=self.case.ffn,
            text_dim=TEXT_DIM,
            text_len=TEXT_LEN,
            out_dim=CHANNELS,
            num_heads=self.case.heads,
            num_layers=self.case.layers,
            components=ModelComponents(
                ops=BlockOps(run_op=CompiledOps(STEPS_BY_OP), fuses_gelu=True)
                if fused
                else BlockOps(),
                text_kv_cache=text_kv_cache,
            ),
        )

    def make_our_model(self, weights: dict[str, Tensor], **model_options: bool) -> WanModel:
        """Makes our model with these weights; tensors that need no cast are shared."""
        with torch.device("meta"):
            model = self.make_model(**model_options)
        cast = {k: v if keeps_fp32(k) else v.to(self.dtype) for k, v in weights.items()}
        model.load_state_dict(cast, assign=True)
        return model

    def make_diffusers_model(self, weights: dict[str, Tensor]) -> Any:
        """Makes diffusers' model with these weights, cast as by `from_pretrained`."""
        model: Any = WanTransformer3DModel(
            num_attention_heads=self.case.heads,
            attention_head_dim=HEAD_DIM,
            ffn_dim=self.case.ffn,
            num_layers=self.case.layers,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
        )
        fp32_modules = set(model._keep_in_fp32_modules)
        named = {rename_dit_to_diffusers(name): tensor for name, tensor in weights.items()}
        cast = {
            k: v if fp32_modules & set(k.split(".")) else v.to(self.dtype) for k, v in named.items()
        }
        model.load_state_dict(cast, assign=True)
        model.rope.to(self.device)
        return model.eval()

    def make_forwards(self) -> dict[str, measuring.Work]:
        """Returns each model's forward of the same input to a [C,F,H,W] output."""
        with self.device:
            weights = self.make_model().state_dict()
        size = [n * p for n, p in zip(self.case.grid, PATCH, strict=True)]
        latent, context = self.randn(CHANNELS, *size), self.randn(TEXT_LEN, TEXT_DIM)
        t = torch.tensor([500.0], device=self.device)

        plain, theirs = self.make_our_model(weights), self.make_diffusers_model(weights)
        shared = plain.state_dict()
        ours, compiled = self.make_our_model(shared, fused=True), self.make_our_model(shared)
        cached = self.make_our_model(shared, fused=True, text_kv_cache=True)
        use_private_compiler_cache()
        for block in compiled.blocks:
            block.compile(fullgraph=True)

        def run(model: WanModel) -> measuring.Work:
            return lambda: model([latent], t, [context], math.prod(self.case.grid))[0]

        return {
            "ours": run(ours),
            "ours, text cache": run(cached),
            "plain": run(plain),
            "compiled": run(compiled),
            "diffusers": lambda: theirs(latent[None], t, context[None], return_dict=False)[0][0],
        }


@torch.no_grad()
def measure_forwards(bench: Bench, rounds: int, rows: Sequence[str] = ROWS) -> dict[str, Any]:
    """Measures seconds, peak bytes, operations and the outputs' distances of every row."""
    torch.manual_seed(0)
    forwards = bench.make_forwards()
    graphs, first = {}, {}
    for name in ("ours", "compiled"):  # the other models warm up in the memory measurement
        counters.clear()
        first[name] = measuring.measure_seconds(forwards[name], bench.device)
        graphs[name] = counters["stats"]["unique_graphs"]
    forwards["ours, text cache"]()
    peaks = {
        name: measuring.measure_peak_bytes(run, bench.device) for name, run in forwards.items()
    }
    outputs = {name: run().float() for name, run in forwards.items()}
    with measuring.RecordProducts() as record:
        forwards["plain"]()

    side, count = (2048, 5) if bench.device.type == "cpu" else (8192, 50)
    a, b = bench.randn(side, side), bench.randn(side, side)
    alone: dict[str, measuring.Work] = {
        "linear": lambda: measuring.replay_calls(record.linear),
        "attention": lambda: measuring.replay_calls(record.attention),
        "matmul": lambda: measuring.replay_calls([(torch.mm, (a, b))] * count),
    }
    chosen = {name: forwards[name] for name in rows}
    times = measuring.time_interleaved({**chosen, **alone}, rounds, bench.device)
    times["products"] = [sum(x) for x in zip(times["linear"], times["attention"], strict=True)]
    return {
        "case": asdict(bench.case),
        "dtype": str(bench.dtype),
        "rounds": rounds,
        "seconds": times,
        "peak_bytes": peaks,
        "flops": {"forward": record.count_flops(), "matmul": 2 * count * side**3},
        "graphs": graphs,
        "first_seconds": first,
        "output_size": outputs["ours"].abs().max().item(),
        "difference": {
            name: (outputs["ours"] - output).abs().max().item() for name, output in outputs.items()
        },
    }


def summarize_record(record: dict[str, Any]) -> dict[str, Any]:
    """Computes ratios of times within rounds, ratios of memory, and the rate of our forward."""
    times, peaks, flops = record["seconds"], record["peak_bytes"], record["flops"]
    rate = flops["forward"] / common.compute_spread(times["ours"])["median"]
    rest_seconds = {}
    for name in {"ours", "plain", "diffusers"} & times.keys():
        pairs = zip(times[name], times["products"], strict=True)
        rest_seconds[name] = common.compute_spread([total - products for total, products in pairs])[
            "median"
        ]
    return {
        "rest_seconds": rest_seconds,
        "time": {
            f"{a} / {b}": common.compute_ratios(times[a], times[b])
            for a, b in RATIOS
            if {a, b} <= times.keys()
        },
        "memory": {name: peak / peaks["diffusers"] for name, peak in peaks.items()},
        "tflops": rate / 1e12,
        "share_of_matmul": rate
        * common.compute_spread(times["matmul"])["median"]
        / flops["matmul"],
    }


def print_record(record: dict[str, Any]) -> None:
    """Prints a record."""
    case, summary, peaks = record["case"], record["summary"], record["peak_bytes"]
    print(
        f"\n{case['heads']}x{HEAD_DIM}, ffn {case['ffn']}, layers {case['layers']}, "
        f"{math.prod(case['grid'])} tokens, {record['dtype']}, {record['rounds']} rounds\n"
        f"{'':20}seconds   fastest   peak MiB"
    )
    for name, values in record["seconds"].items():
        held = f"{peaks[name] / 2**20:11.1f}" if name in peaks else ""
        print(f"  {name:16}{common.compute_spread(values)['median']:9.3f} {min(values):9.3f}{held}")
    for name, ratio in summary["time"].items():
        print(
            f"  {name:36}{ratio['median']:.3f}  ({ratio['min']:.3f} to {ratio['max']:.3f}; "
            f"fastest {ratio['fastest']:.3f})"
        )
    memory, rest_seconds = summary["memory"], summary["rest_seconds"]
    print("  rest: " + ", ".join(f"{name} {value:.3f} s" for name, value in rest_seconds.items()))
    compiled = ", ".join(
        f"{name} {graphs} graphs, first forward {record['first_seconds'][name]:.1f} s"
        for name, graphs in record["graphs"].items()
    )
    print(
        f"  memory / diffusers: ours {memory['ours']:.3f}, plain {memory['plain']:.3f}, "
        f"compiled {memory['compiled']:.3f}\n"
        f"  {summary['tflops']:.3f} TFLOP/s, {summary['share_of_matmul']:.1%} of a matrix product\n"
        f"  {compiled}\n"
        f"  outputs to {record['output_size']:.2f}; largest distance from ours: "
        + ", ".join(f"{name} {d:.1e}" for name, d in record["difference"].items() if name != "ours")
    )


def parse_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Case]:
    """Parses the options; returns them and the case with its changed sizes."""
    parser = Parser(description="Time one DiT forward against diffusers.")
    parser.add_argument("--case", choices=CASES, default="12x128")
    parser.add_argument("--gpu-case", action="store_true", help="40x128, 75 600 tokens, bf16, cuda")
    parser.add_argument(
        "--heads", type=make_argument_type(integer(1, 1000)), help="heads of 128 channels"
    )
    parser.add_argument("--ffn", type=make_argument_type(integer(1, 1_000_000)))
    parser.add_argument("--layers", type=make_argument_type(integer(1, 1000)))
    parser.add_argument(
        "--grid", type=common.parse_token_grid, metavar="F,H,W", help="tokens on each axis"
    )
    parser.add_argument("--dtype", choices=DTYPES, nargs="+")
    parser.add_argument("--device")
    parser.add_argument(
        "--repeats",
        type=make_argument_type(integer(1, 10_000)),
        default=5,
        help="interleaved rounds (5)",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="timed models (all)")
    parser.add_argument(
        "--load",
        type=make_argument_type(integer(0, 1000)),
        default=0,
        help="processes that keep one core each busy (0)",
    )
    common.add_json_option(parser)
    options = parser.parse_args(argv)
    changes = {k: v for k in ("heads", "ffn", "layers", "grid") if (v := getattr(options, k))}
    options.dtype = options.dtype or (["bf16"] if options.gpu_case else list(DTYPES))
    options.device = torch.device(options.device or ("cuda" if options.gpu_case else "cpu"))
    return options, replace(GPU_CASE if options.gpu_case else CASES[options.case], **changes)


def main(argv: Sequence[str] | None = None) -> None:
    options, case = parse_options(argv)
    records = []
    threads = torch.get_num_threads()
    print(f"{system.read_cpu_name()}, {threads} threads, {options.load} busy processes")
    with common.keep_cores_busy(options.load):
        for dtype in options.dtype:
            bench = Bench(case, DTYPES[dtype], options.device)
            record = measure_forwards(bench, options.repeats, options.rows)
            record |= {"load": options.load, "summary": summarize_record(record)}
            records.append(record)
            print_record(record)
    common.write_json(options.json, options.device, records)


if __name__ == "__main__":
    sys.exit(run_program(main))
