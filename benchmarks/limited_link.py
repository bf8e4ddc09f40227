"""Times the attention layer over a rate-limited link and compares it with predictions.

    sudo python benchmarks/limited_link.py --ranks 2 --json results/limited_link.json

Each rank runs in a separate network namespace, connected to the others by a switch; all frames
leave one device of the switch, whose rate the kernel limits (`tc tbf`). Needs Linux, root, `ip` and
`tc`; the namespaces are deleted at the end. For each rate the program times every mode, the overlap
and the ring, with fused and with split exchanges, interleaved. It also prints the time predicted
from two measurements of the same run: attention alone, and the exchanges of a layer alone. (The
ring's prediction uses bytes / rate.) Rates are multiples of the one at which exchanges take as long
as attention. Traces of the baseline and of the overlap at that rate go to --out.

"hidden" is the share of the exchanges' time that the layer did not wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.distributed.ring import Ring
from wan.distributed.ulysses import SINGLE_RANK
from wan.kernels.sdpa import SdpaKernel
from wan.metering.exchange_order import (
    TRACE_KIND,
    ExchangePlan,
    Trace,
    make_trace_path,
    write_trace,
)
from wan.modules.attnlayer import FAPowerCapAttention
from wan.settings.attention_modes import MODES, OVERLAP, Mode, count_heads_per_chunk
from wan.settings.parallel import EXCHANGES
from wan.settings.values import integer, real
from wan.testing import measuring
from wan.utils import trace
from wan.utils.files import check_output

LAYER_MODES: dict[str, tuple[int, bool, int | None]] = {  # comm_type, overlap, chunks
    **{f"mode {key}": (key, False, None) for key in MODES},
    "overlap": (0, True, None),
    "overlap, 20 chunks": (0, True, 20),
}
TRACED = ("mode 0, split", "mode 0, fused", "overlap, fused", "overlap, 20 chunks, fused")
_PAYLOAD = 1448 / 1514  # TCP payload per byte of an Ethernet frame
DEVICE, ADDRESS = "ranks", "10.201.77.10{}"  # in each rank's namespace
PORTS, LINK = ["port0", "port1", "port2", "port3"], "shared"  # in the switch's
_ROUTER = "10.201.77.1"


def run_command(*command: str) -> str:
    """Runs a command and returns its output; CalledProcessError if it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def create_namespaces(ranks: int) -> Iterator[tuple[list[str], str]]:
    """Creates a network namespace for each rank and one for the switch; yields their names."""
    names = [f"wan{os.getpid()}-{rank}" for rank in range(ranks)]
    switch = f"wan{os.getpid()}-s"
    with ExitStack() as stack:
        for name in (*names, switch):
            run_command("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        run_command("ip", "-n", switch, "link", "add", "hub", "type", "bridge")
        run_command("ip", "-n", switch, "link", "set", "hub", "up")
        for rank, (name, port) in enumerate(zip(names, PORTS, strict=False)):
            peer = ("peer", "name", port, "netns", switch)
            run_command("ip", "-n", name, "link", "add", "name", DEVICE, "type", "veth", *peer)
            run_command("ip", "-n", switch, "link", "set", port, "master", "hub", "up")
            address = f"{ADDRESS.format(rank)}/24"
            run_command("ip", "-n", name, "address", "add", address, "dev", DEVICE)
            for device in ("lo", DEVICE):
                run_command("ip", "-n", name, "link", "set", device, "up")
        yield names, switch


def share_one_link(names: Sequence[str], switch: str) -> None:
    """Routes all frames between the ranks through one device of the switch's namespace, `LINK`.

    Both directions then share one rate. With a rate for each direction, the times of equal
    exchanges would differ by up to 2x, because gloo does not always send and receive at once.
    """
    run_command(
        "ip", "-n", switch, "link", "add", "name", LINK, "type", "veth", "peer", "name", "bend"
    )
    run_command("ip", "-n", switch, "link", "set", "bend", "master", "hub", "up")
    run_command("ip", "-n", switch, "link", "set", LINK, "up")
    run_command("ip", "-n", switch, "address", "add", f"{_ROUTER}/24", "dev", LINK)
    for setting in ("ip_forward=1", f"conf.{LINK}.send_redirects=0", "conf.all.send_redirects=0"):
        name, _, value = setting.partition("=")
        file = "/proc/sys/net/ipv4/" + name.replace(".", "/")
        run_command("ip", "netns", "exec", switch, "sh", "-c", f"echo {value} > {file}")
    for rank, (name, port) in enumerate(zip(names, PORTS, strict=False)):
        run_command(
            "ip", "-n", switch, "link", "set", port, "type", "bridge_slave", "isolated", "on"
        )
        run_command("ip", "-n", name, "address", "flush", "dev", DEVICE)
        run_command("ip", "-n", name, "address", "add", f"{ADDRESS.format(rank)}/32", "dev", DEVICE)
        run_command("ip", "-n", name, "route", "add", _ROUTER, "dev", DEVICE)
        run_command("ip", "-n", name, "route", "add", "default", "via", _ROUTER)


def limit_rate(namespace: str, device: str, rate: float) -> None:
    """Limits a device to `rate` bytes of payload per second."""
    bucket = ("rate", f"{rate * 8 / _PAYLOAD:.0f}bit", "burst", "256kb", "latency", "20ms")
    run_command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def run_in_namespaces(names: Sequence[str], job: dict[str, Any]) -> Any:
    """Runs a job with one torchrun in each namespace; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"]
        torchrun += [f"--nnodes={len(names)}", f"--master_addr={ADDRESS.format(0)}"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # there is no name server
        worker = __file__, "--job", json.dumps(job | {"answer": str(answer)})
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, f"--node_rank={rank}", *worker],
                env=environment,
            )
            for rank, name in enumerate(names)
        ]
        try:
            failed = [process.wait(900) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(failed):
            raise SystemExit(f"A rank failed: exit codes {failed}.")
        return json.loads(answer.read_text())


def make_layer(name: str, group: Any) -> FAPowerCapAttention:
    """Makes an attention layer. name: "MODE, EXCHANGE", with a key of LAYER_MODES or "ring"."""
    mode, _, exchange = name.rpartition(", ")
    if mode == "ring":
        return FAPowerCapAttention(comm_type=0, ulysses_pg=SINGLE_RANK, ring=Ring(None))
    comm_type, overlap, chunks = LAYER_MODES[mode]
    return FAPowerCapAttention(
        None, group, overlap, comm_type=comm_type, chunks=chunks, exchange=exchange
    )


class NoAttention(SdpaKernel):
    """Returns the queries, so that only the exchanges of a layer are left."""

    can_return_lse = False

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        return q_BSND


def run_rank(job: dict[str, Any]) -> None:
    """Times attention alone, exchanges alone and all variants of the layer on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, heads, width = job["tokens"], job["heads"], job["head_dim"]
    torch.manual_seed(rank)
    qkv = torch.randn(3, 1, tokens // ranks, heads, width).unbind(0)
    gathered = torch.randn(3, 1, tokens, heads // ranks, width).unbind(0)
    attention = FAPowerCapAttention(comm_type=0, ulysses_pg=SINGLE_RANK)
    names = [f"{mode}, {exchange}" for mode in LAYER_MODES for exchange in EXCHANGES]
    runs = {name: partial(make_layer(name, None), *qkv) for name in (*names, "ring, hops")}
    if not job["rounds"]:
        runs = {}
    with torch.inference_mode():
        runs["attention"] = partial(attention, *gathered)
        runs["exchange"] = partial(FAPowerCapAttention(comm_type=0, kernel=NoAttention()), *qkv)
        times = measuring.time_interleaved(runs, job["rounds"] or 10)
        for name in job["traced"]:
            trace_layer(name, Path(job["out"]), tokens, heads, qkv)
    times_by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(times_by_rank, times)
    if rank == 0:
        Path(job["answer"]).write_text(json.dumps(common.take_slowest_rank(times_by_rank)))
    dist.barrier()
    dist.destroy_process_group()


def trace_layer(name: str, out: Path, tokens: int, heads: int, qkv: Any) -> None:
    """Writes the trace of one call of a layer, for `wan.power report`."""
    layer, events = make_layer(name, None), list[trace.Event]()
    mode, _, exchange = name.rpartition(", ")
    comm_type, overlap, chunks = LAYER_MODES[mode]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = ExchangePlan(
        rank=rank,
        comm_type=comm_type,
        overlap=overlap,
        chunks=chunks,
        heads=heads,
        layers=1,
        tokens=tokens,
        multiple=1,
        sizes=(1, 1, ranks),
        ring_type="ring",
        merges=True,
        fp8=False,
        fp8_exchange=False,
        sparse_from=None,
        steps={0: "dit"},
        fused=exchange == "fused",
    )
    dist.barrier()
    recorder = trace.Recorder((0,), trace.HostClock(), events.extend)
    with (
        trace.use_recorder(recorder),
        trace.record_step(0, "dit"),
        trace.span("branch", branch="cond"),
        trace.span("layer", layer=0),
    ):
        layer(*qkv)
    folder = out / name.replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"clock": "host clock", "kernel": layer.kernel.name, "device": "CPU", "run": name}
    write_trace(Trace(plan, events, about), folder, events[0].begin)


def predict_seconds(
    name: str, ranks: int, heads: int, attention: float, exchange: float, by_rate: float
) -> float:
    """Predicts the layer's seconds from one compute lane and one link lane, in the mode's order.

    Args:
        attention: Seconds of all heads of a rank.
        exchange: Measured seconds of all exchanges of a layer.
        by_rate: Seconds of these exchanges by their bytes and the link's rate.
    """
    mode_name, _, _ = name.rpartition(", ")
    if mode_name == "ring":  # K and V hop while attention to the present block runs
        hop, part = by_rate / 2 * ranks / (ranks - 1), attention / ranks
        return max(hop, part) * (ranks - 1) + part
    comm_type, overlap, chunks = LAYER_MODES[mode_name]
    mode: Mode = OVERLAP if overlap else MODES[comm_type]
    sizes = count_heads_per_chunk(heads, ranks, mode.chunks if chunks is None else chunks)
    now = lane = 0.0
    arrived, returned = dict[int, float](), dict[int, float]()
    for verb, chunk in mode.order(len(sizes)):
        share = sizes[chunk] / sum(sizes)
        if verb == "start":
            arrived[chunk] = lane = max(lane, now) + 0.75 * share * exchange
            now = now if mode.overlaps else lane
        elif verb == "attend":
            now = max(now, arrived[chunk]) + share * attention
            returned[chunk] = lane = max(lane, now) + 0.25 * share * exchange
        else:
            now = max(now, returned[chunk])
    return now


def measure_rates(
    names: Sequence[str], switch: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measures all rates; returns the rows of results."""
    size = {name: getattr(options, name) for name in ("tokens", "heads", "head_dim")}
    ranks, rows = len(names), []
    sent = 4 * 4 * options.tokens * options.heads * options.head_dim * (ranks - 1) / ranks
    job = {**size, "rounds": 0, "traced": [], "out": str(options.out)}
    attention = median(run_in_namespaces(names, job)["attention"])
    for multiple in options.rates:
        rate = sent / attention * multiple
        limit_rate(switch, LINK, rate)
        job |= {"rounds": options.rounds, "traced": TRACED if multiple == 1 else []}
        times = run_in_namespaces(names, job)
        alone, exchange = (median(times.pop(name)) for name in ("attention", "exchange"))
        figures = ranks, options.heads, alone, exchange, sent / rate
        print(
            f"\n{ranks} ranks, {rate * 8 / 1e6:.0f} Mbit/s ({multiple:g} x balanced): attention "
            f"{alone:.3f} s, exchanges {exchange:.3f} s ({sent / 1e6:.1f} MB / rate: "
            f"{sent / rate:.3f} s)"
        )
        print(
            f"{'':26}{'seconds':>9}{'predicted':>11}{'off':>7}{'hidden':>8}{'gain':>8}{'pred.':>8}"
        )
        base = median(times["mode 0, split"]), predict_seconds("mode 0, split", *figures)
        for name, seconds in times.items():
            measured_seconds, predicted_seconds = median(seconds), predict_seconds(name, *figures)
            row = {
                "rate": rate,
                "way": name,
                "seconds": measured_seconds,
                "predicted": predicted_seconds,
            }
            row |= {"hidden": 1 - (measured_seconds - alone) / exchange, "all": seconds}
            row |= {
                "gain": base[0] / measured_seconds,
                "predicted_gain": base[1] / predicted_seconds,
            }
            rows.append(row | {"ranks": ranks, "attention": alone, "exchange": exchange})
            error = measured_seconds / predicted_seconds - 1
            print(
                f"{name:26}{measured_seconds:9.3f}{predicted_seconds:11.3f}{error:7.0%}"
                f"{row['hidden']:8.0%}{row['gain']:8.2f}{row['predicted_gain']:8.2f}",
                flush=True,
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", type=make_argument_type(integer(1, 64)), default=2, choices=(2, 4)
    )
    parser.add_argument("--tokens", type=make_argument_type(integer(1, 1_000_000)), default=4096)
    parser.add_argument("--heads", type=make_argument_type(integer(1, 1000)), default=40)
    parser.add_argument("--head_dim", type=make_argument_type(integer(1, 1024)), default=64)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=3)
    parser.add_argument(
        "--rates",
        type=make_argument_type(real(0, 1e6, exclude_min=True)),
        nargs="+",
        default=[4.0, 1.0, 0.25],
    )
    parser.add_argument(
        "--out", type=Path, default=Path("limited_link"), help="folder of the traces (limited_link)"
    )
    common.add_json_option(parser)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.job:
        return run_rank(json.loads(options.job))
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if platform.system() != "Linux" or os.geteuid() or lacking:
        parser.error(f"needs Linux, root, ip and tc{'; there is no ' if lacking else ''}{lacking}")
    for path in options.out.glob(f"*/{make_trace_path(Path(), 0)}"):
        check_output(path, TRACE_KIND, "--out")
    with create_namespaces(options.ranks) as (names, switch):
        share_one_link(names, switch)
        rows = measure_rates(names, switch, options)
    common.write_json(options.json, measuring.CPU, rows)
    folders = [
        str(path.parent) for path in sorted(options.out.glob(f"*/{make_trace_path(Path(), 0)}"))
    ]
    report = [sys.executable, "-m", "wan.power", "report", *folders, "--out", str(options.out)]
    print(subprocess.run(report, capture_output=True, text=True).stdout.rpartition("Side")[2])


if __name__ == "__main__":
    sys.exit(run_program(main))
