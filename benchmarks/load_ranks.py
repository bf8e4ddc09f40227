"""Loading a DiT on several ranks: all read all of it, or each a part and the rest from the others.

    python benchmarks/load_ranks.py --ranks 4 --stored fp32 --precision bf16

The files are those of `load_memory.py`. "cold": the system has been told to drop them from its
cache before each run, which it need not obey. "read ahead": as the program itself does it.
"together": each rank fills its share of the tensors, then every tensor is broadcast by the rank
that has it, over gloo. Bytes are those of the files; the time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, ranks
from benchmarks.load_memory import DTYPES, blueprint, write_in_another_process
from wan import host
from wan.checkpoint.load import Whole, dit_dtypes


class Together(Whole):
    """Every rank reads every P-th tensor."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        owner = len(self.tensors) % dist.get_world_size()
        self.tensors.append(parameter)
        return parameter, slice(None) if owner == dist.get_rank() else slice(0, 0)

    def exchange(self) -> None:
        for number, tensor in enumerate(self.tensors):
            dist.broadcast(tensor, src=number % dist.get_world_size())


def load(folder: Path, precision: str, together: bool) -> nn.Module:
    place = Together() if together else Whole()
    device, dtypes = torch.device("cpu"), dit_dtypes(DTYPES[precision], convert_all=False)
    model = blueprint(folder).load(device=device, dtype_of=dtypes, place=place)
    if isinstance(place, Together):
        place.exchange()
    return model


def drop(folder: Path) -> None:
    if dist.get_rank() == 0:
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def work(folder: Path, precision: str, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    times: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        for cold, ahead, together in product((True, False), (False, True), (False, True)):
            if not cold and ahead:
                continue
            if cold:
                drop(folder)
            dist.barrier()
            if ahead:
                files = sorted(folder.glob("*.safetensors"))
                threading.Thread(target=host.read_ahead, args=(files,)).start()
            taken = common.seconds(partial(load, folder, precision, together), ranks.CPU)
            if number >= 0:
                name = f"{'cold' if cold else 'hot'}{', read ahead' if ahead else ''}, "
                times.setdefault(name + ("together" if together else "each all"), []).append(taken)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the files")
    parser.add_argument("--stored", choices=DTYPES, default="fp32")
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        size = write_in_another_process(Path(name), options.gigabytes, options.stored)
        given = (Path(name), options.precision, options.threads, options.repeats)
        times = ranks.slowest(ranks.launch(options.ranks, work, *given))
    print(f"{options.ranks} ranks x {options.threads} threads, {size / 1e9:.2f} GB")
    print(host.cpu())
    for what, seconds in times.items():
        middle = common.spread(seconds)["median"]
        print(f"  {what:28}{middle:7.2f} s  {size / middle / 1e9:6.2f} GB/s per rank")
    common.write_json(options.json, ranks.CPU, [{"options": vars(options), "seconds": times}])


if __name__ == "__main__":
    main()
