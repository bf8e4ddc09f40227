"""Measures time, power and clock of one rank's share of a layer in the order of each mode.

    python -m benchmarks.powercap_gpu --json docs/results/powercap_gpu.json
    python -m benchmarks.powercap_gpu --device cpu --tokens 2048 --hidden 256 --seconds 2  (trial)

The share is that of 4 ranks at 720p x 161 frames: 147 600 tokens, 10 heads of 128, random bfloat16.
A layer is the projections and the feed-forward of a rank's tokens, the exchanges, and attention.
One device has no peer to exchange with. An exchange is therefore simulated by its packing and
unpacking copies with an idle time between them, as long as its bytes would take over a link of
--link_gbs (assumed, not measured). Blocks of --seconds run in random order. There are two controls:
the baseline's exchanges followed by head chunks with idle times of the same length between them,
and the baseline with a locked clock, where that is permitted (--keep_clock skips it). The program
prints milliseconds, power and clock of each block and the ratios to the baseline; the JSON file
also has the raw series of power and clock.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.device import Device, select_device
from wan.kernels.interfaces import Kernel, Target
from wan.kernels.registry import make_dense_kernel
from wan.metering.meter import Meter, PowerMeasurement, open_power_source
from wan.metering.nvml import ClockLock
from wan.metering.power_source import MeterError
from wan.settings.attention import Attention
from wan.settings.attention_modes import MODES, q_ranges, split_evenly
from wan.settings.values import integer, real

RANKS = 4


@dataclass(frozen=True)
class Share:
    """A rank's share of a layer, and the device that computes it.

    Attributes:
        kernel: Dense attention.
        qkv: Queries, keys and values of all tokens and the rank's heads, [B,S,N,D] each.
        linear: Runs the matrix products of the rank's tokens.
        link: Bandwidth of the link, bytes per second.
    """

    device: Device
    kernel: Kernel
    qkv: tuple[Tensor, Tensor, Tensor]
    linear: Callable[[], None]
    link: float

    def exchange(self, x_BSND: Tensor) -> Tensor:
        """Simulates an exchange: pack, idle for the time of the transfer, unpack."""
        packed = x_BSND.transpose(1, 2).contiguous()
        self.device.idle(x_BSND.nbytes * (RANKS - 1) / RANKS / self.link)
        return packed.transpose(1, 2).contiguous()


Layer = Callable[[Share], None]


def make_mode_layer(number: int) -> Layer:
    """Makes a layer with the exchanges and attention calls in a mode's order."""
    row = MODES[number]

    def layer(share: Share) -> None:
        heads = share.qkv[0].shape[2]
        for first, last in split_evenly(heads, min(row.chunks, heads)):
            q, k, v = (share.exchange(x[:, :, first:last]) for x in share.qkv)
            blocks = q_ranges(q.shape[1], row.blocks)
            share.exchange(torch.cat([share.kernel(q[:, a:b], k, v) for a, b in blocks], dim=1))

    return layer


def run_rests_control(share: Share) -> None:
    """Runs the baseline's exchanges, and head chunks with InsertComm's idle times between them."""
    q, k, v = (share.exchange(x) for x in share.qkv)
    heads = q.shape[2]
    parts: list[Tensor] = []
    for first, last in split_evenly(heads, min(MODES[1].chunks, heads)):
        if parts:
            share.device.idle(4 * parts[-1].nbytes * (RANKS - 1) / RANKS / share.link)
        parts.append(share.kernel(*(x[:, :, first:last].contiguous() for x in (q, k, v))))
    share.exchange(torch.cat(parts, dim=2))


LAYERS: dict[str, Layer] = {
    **{row.name: make_mode_layer(number) for number, row in MODES.items()},
    "control: rests without exchanges": run_rests_control,
}
LOCKED = "control: baseline, locked clock"


def make_share(options: argparse.Namespace) -> Share:
    device = select_device(options.device)
    torch_device = device.torch_device
    generator = torch.Generator(torch_device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=torch_device).to(torch.bfloat16)

    q, k, v = (draw(1, options.tokens, options.heads, options.head_dim) for _ in range(3))
    wide = options.hidden * 27 // 10 // 64 * 64 or 64  # the feed-forward's 13 824 of 5 120
    activations = draw(options.tokens // RANKS, options.hidden)
    square, up = draw(options.hidden, options.hidden), draw(options.hidden, wide)

    def linear() -> None:
        for _ in range(8):  # self- and cross-attention's
            activations @ square
        (activations @ up) @ up.T

    kernel = make_dense_kernel(Attention(), Target(device, options.head_dim, torch.bfloat16))
    return Share(device, kernel, (q, k, v), linear, options.link_gbs * 1e9)


def measure_block(
    share: Share, layer: Layer, seconds: float
) -> tuple[list[float], PowerMeasurement]:
    """Runs layers for a number of seconds; returns the time of each and the metered power."""
    times: list[float] = []
    share.device.synchronize()
    with Meter(open_power_source(share.device), period=0.02) as meter:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            share.linear()
            layer(share)
            share.device.synchronize()
            times.append(time.perf_counter() - start)
    return times, meter.stop()


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    common.add_json_option(parser)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=make_argument_type(integer(1, 1_000_000)), default=147_600)
    parser.add_argument("--heads", type=make_argument_type(integer(1, 1000)), default=10)
    parser.add_argument("--head_dim", type=make_argument_type(integer(1, 1024)), default=128)
    parser.add_argument("--hidden", type=make_argument_type(integer(1, 1_000_000)), default=5120)
    parser.add_argument(
        "--link_gbs",
        type=make_argument_type(real(0, 1e6, exclude_min=True)),
        default=20.0,
        help="assumed bandwidth of the link, GB/s (20)",
    )
    parser.add_argument(
        "--seconds",
        type=make_argument_type(real(0, 1e6, exclude_min=True)),
        default=40.0,
        help="duration of a block",
    )
    parser.add_argument(
        "--rounds",
        type=make_argument_type(integer(1, 10_000)),
        default=3,
        help="blocks of each variant",
    )
    parser.add_argument("--keep_clock", action="store_true", help="skip the locked-clock control")
    options = parser.parse_args(argv)
    share, order = make_share(options), random.Random(0)
    _, warm = measure_block(share, LAYERS[MODES[0].name], options.seconds / 4)
    names, lock = list(LAYERS), None
    try:
        if not options.keep_clock:
            with ClockLock(share.device, warm.mean_mhz) as lock:
                pass
            names.append(LOCKED)
    except MeterError as reason:
        print(f"No locked clock: {reason}.")
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in order.sample(names, len(names)):
            if name == LOCKED and lock is not None:
                with lock:
                    times, power = measure_block(share, LAYERS[MODES[0].name], options.seconds)
            else:
                times, power = measure_block(share, LAYERS[name], options.seconds)
            blocks[name].append(
                {"layers": times, "power": power.to_record(), "series": power.series}
            )
            middle = statistics.median(times[len(times) // 2 :])  # the clock has settled
            print(f"{name}: {1e3 * middle:.2f} ms a layer, {len(times)} layers. {power.summary()}")
    base = _take_settled_medians(blocks[MODES[0].name])
    for name in names:
        ratios = common.compute_ratios(_take_settled_medians(blocks[name]), base)
        spread = f"{ratios['median']:.4f} ({ratios['min']:.4f} to {ratios['max']:.4f})"
        print(f"{name} / baseline: {spread}")
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    results = [{"options": settings, "variants": blocks}]
    common.write_json(options.json, share.device.torch_device, results)


def _take_settled_medians(blocks: list[dict[str, Any]]) -> list[float]:
    """Returns each block's median seconds of a layer, over its second half."""
    return [
        statistics.median(measured_block["layers"][len(measured_block["layers"]) // 2 :])
        for measured_block in blocks
    ]


if __name__ == "__main__":
    sys.exit(run_program(main))
