"""Times this CPU's attention kernel beside PyTorch's, in bfloat16.

    python -m benchmarks.cpu_attention --json results/cpu_attention.json

Every round runs both kernels once on the same random tensors with heads of 128 channels: the
self-attention of a small video of the 1.3B (12 heads) and of the 5B (24 heads), cross-attention to
the 512 text tokens, and one head of longer videos. The program prints milliseconds, the rate, and
the ratio inside a round; the error, in the first three cases, is the distance to float32, relative
to the result. The JSON file has every round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.device import Device
from wan.kernels.avx512_attention import make_cpu_kernel
from wan.kernels.interfaces import Kernel, Target
from wan.kernels.sdpa import SdpaKernel
from wan.settings.devices import get_capabilities
from wan.settings.values import integer
from wan.utils import system

HEAD_DIM = 128
CASES = {  # queries, keys, heads
    "1.3B, 320*192, 17 frames": (1200, 1200, 12),
    "1.3B, cross-attention": (1200, 512, 12),
    "5B, 320*192, 49 frames": (780, 780, 24),
    "one head, 8 190 tokens": (8190, 8190, 1),
    "one head, 32 760 tokens": (32760, 32760, 1),
}
MAX_SCORES = 1 << 25  # of cases that are also computed in float32


def measure_case(
    kernels: dict[str, Kernel], rows: int, keys: int, heads: int, rounds: int
) -> dict[str, Any]:
    """Measures the seconds of both kernels in every round, and their errors."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, HEAD_DIM, generator=generator).bfloat16()
        for n in (rows, keys, keys)
    )
    runs = {name: partial(kernel, q, k, v) for name, kernel in kernels.items()}
    record: dict[str, Any] = {"queries": rows, "keys": keys, "heads": heads}
    record["seconds"] = common.time_interleaved(runs, rounds)
    record["ratio"] = common.compute_ratios(record["seconds"]["ours"], record["seconds"]["PyTorch"])
    if heads * rows * keys <= MAX_SCORES:
        exact = SdpaKernel()(q.float(), k.float(), v.float())
        record["error"] = {
            name: compute_error(kernel(q, k, v), exact) for name, kernel in kernels.items()
        }
    return record


def compute_error(x: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference, relative to the exact result."""
    return ((x.float() - exact).norm() / exact.norm()).item()


def print_record(name: str, record: dict[str, Any]) -> None:
    """Prints a case."""
    flops = 4 * record["queries"] * record["keys"] * record["heads"] * HEAD_DIM
    print(name)
    for kernel, values in record["seconds"].items():
        seconds = common.compute_spread(values)["median"]
        error = f", error {record['error'][kernel]:.5f}" if "error" in record else ""
        print(f"  {kernel:8}{1e3 * seconds:9.1f} ms {flops / seconds / 1e9:6.0f} GFLOP/s{error}")
    ratio = record["ratio"]
    print(f"  ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description="Time this CPU's attention kernel beside PyTorch's.")
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 1000)), default=9)
    parser.add_argument("--json", type=common.results_file)
    options = parser.parse_args(argv)
    device = Device(common.CPU, get_capabilities("cpu"))
    ours = make_cpu_kernel(Target(device, HEAD_DIM, torch.bfloat16))
    kernels: dict[str, Kernel] = {"ours": ours, "PyTorch": SdpaKernel()}
    print(f"{system.read_cpu_name()}, {torch.get_num_threads()} threads; ours: {ours.name}")
    records = []
    for name, sizes in CASES.items():
        record = {"case": name, "kernel": ours.name}
        record |= measure_case(kernels, *sizes, options.rounds)
        records.append(record)
        print_record(name, record)
    common.write_json(options.json, common.CPU, records)


if __name__ == "__main__":
    sys.exit(run_program(main))
