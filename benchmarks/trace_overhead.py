"""Measures the cost of a schedule trace's ranges, with and without a recorder.

    python -m benchmarks.trace_overhead --tokens 256 --json results/trace.json

Forwards of a small DiT in InsertComm's ten chunks are timed on one device, with and without a
recorder in turn. Without a recorder a range is one comparison. The program prints the time of all
ranges of an unrecorded forward (measured separately) as a share of that forward, and the ratio of a
recorded forward to an unrecorded one; the JSON file has the same figures. Small shapes are the
worst case.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from benchmarks import common
from wan import device as devices
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.settings.values import integer
from wan.utils import trace
from wan.utils.trace import Event, Recorder


def make_model(options: argparse.Namespace) -> WanModel:
    layer = FAPowerCapAttention(SimpleNamespace(comm_type=1), None)
    return WanModel(
        dim=128 * options.heads,
        ffn_dim=512 * options.heads,
        num_heads=options.heads,
        num_layers=options.layers,
        text_len=64,
        text_dim=64,
        components=ModelComponents(lambda _: layer),
    )


def measure_range() -> float:
    """Returns the seconds of one range without a recorder, including its arguments."""
    x, calls = torch.zeros(1), 200_000

    def enter_range() -> None:
        with trace.span("a2a", x, what="q", beside=False):
            pass

    return min(timeit.repeat(enter_range, number=calls, repeat=5)) / calls


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=make_argument_type(integer(1, 100_000)), default=256)
    parser.add_argument("--heads", type=make_argument_type(integer(1, 1000)), default=10)
    parser.add_argument("--layers", type=make_argument_type(integer(1, 1000)), default=4)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=common.results_file)
    options = parser.parse_args(argv)
    device = devices.select_device(options.device)
    torch_device = device.torch_device
    with torch_device:
        net = make_model(options).eval().requires_grad_(False)
        x, context = [torch.randn(16, 1, 2, 2 * options.tokens)], [torch.randn(64, 64)]
    events = list[Event]()
    recorder = Recorder((0,), device.make_clock(), events.extend)

    def run_forward() -> None:
        with torch.inference_mode(), trace.record_step(0, "dit"):
            net(x, torch.tensor([500]), context, options.tokens)

    def run_recorded_forward() -> None:
        with trace.use_recorder(recorder):
            run_forward()

    run_forward()
    run_recorded_forward()
    count = len(events)
    seconds = common.time_interleaved(
        {"off": run_forward, "recorded": run_recorded_forward}, options.rounds, torch_device
    )
    alone = measure_range()
    share = alone * count / min(seconds["off"])
    ratio = common.compute_ratios(seconds["recorded"], seconds["off"])
    print(f"{count} ranges in a forward pass of {min(seconds['off']) * 1e3:.1f} ms")
    print(f"off: {alone * 1e9:.0f} ns each, {share:.3%} of the pass")
    print(f"recorded / off: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
    result = {"ranges": count, "off_seconds": alone, "off_share": share, "recorded": ratio}
    common.write_json(options.json, torch_device, [result])


if __name__ == "__main__":
    sys.exit(run_program(main))
