"""Steps for tests of the device check: steps that pass, and one for each way to fail.

Run as a program under torchrun, the file checks the device with these steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.device_check.steps import Figure, Line, Measurements, Step, make_line
from wan.settings.errors import InputError

HANG_LIMIT = 1.5  # seconds of limit


def good(bench: object) -> Iterator[Line]:
    yield make_line("it", Figure("is", 1.0, "GB/s"))


def raises(bench: object) -> Iterator[Line]:
    yield make_line("known before", Figure("figure", 7.0))
    raise ValueError("this is broken\nin two lines")


def hangs(bench: object) -> Iterator[Line]:
    yield make_line("known before")
    time.sleep(60)


def interrupts(bench: object) -> Iterator[Line]:
    """Ends the program that started this step."""
    os.kill(os.getppid(), signal.SIGTERM)
    yield from hangs(bench)


def crashes(bench: object) -> Iterator[Line]:
    yield make_line("known before")
    os.kill(os.getpid(), signal.SIGSEGV)


def stops(bench: object) -> Iterator[Line]:
    yield make_line("known before")
    os._exit(3)


def unavailable(bench: object) -> Iterator[Line]:
    raise InputError("it does not exist yet")


def refused(bench: object) -> Iterator[Line]:
    raise InputError("This device cannot do that.")


def nan(bench: object) -> Iterator[Line]:
    yield make_line("result", Figure("error", float("nan"), "", 1.0))


def memory(bench: object) -> Iterator[Line]:
    raise MemoryError


def measurement_fails(bench: object) -> Measurements:
    """One measurement fails; the next one still runs."""

    def broken() -> list[Figure]:
        raise ValueError("this is broken")

    yield "broken", broken
    yield "good", lambda: [Figure("is", 1.0, "GB/s")]


def forgetful(*_: object) -> object:
    """Returns a kernel that ignores the last key."""
    from wan.kernels.sdpa import SdpaKernel

    class Forgetful(SdpaKernel):
        def __call__(self, q, k, v, /):
            return super().__call__(q, k[:, :-1], v[:, :-1])

    return Forgetful()


def wrong_kernel(bench: object) -> Measurements:
    """The real step, with one of the two kernels of this machine replaced by a wrong one."""
    from tools.device_check import attention
    from wan.settings.kernels import DENSE_KERNELS

    wrong = {"cpu": "tests.check_steps:forgetful"}
    DENSE_KERNELS["fused"] = replace(DENSE_KERNELS["fused"], factories=wrong)  # type: ignore[index]
    yield from attention.check_dense(bench)  # type: ignore[arg-type]


def second_rank_raises(bench: object) -> Iterator[Line]:
    """Rank 1 raises while the other ranks wait in a collective."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the second rank is broken")
    dist.all_reduce(torch.ones(1))
    yield make_line("never")


def second_rank_dies(bench: object) -> Iterator[Line]:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    yield make_line("never")


def adds(bench: object) -> Iterator[Line]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    yield make_line("ranks", Figure("sum", float(total), "", 1.0))


def make_step(work: object, limit: float = 60, ranks: str = "one") -> Step:
    name = work.__name__  # type: ignore[attr-defined]
    return Step(1, name, name, f"tests.check_steps:{name}", limit, ranks)


SINGLE_RANK_STEPS = tuple(
    make_step(work, HANG_LIMIT if work is hangs else 60)
    for work in (
        *(good, raises, good, hangs, crashes, stops, unavailable, refused, nan, memory),
        *(measurement_fails, good),
    )
)
SEVERAL_RANK_STEPS = tuple(
    make_step(work, ranks="several") for work in (adds, second_rank_raises, second_rank_dies, adds)
)

if __name__ == "__main__":
    from tools.check_device import main

    sys.exit(main(sys.argv[1:], SEVERAL_RANK_STEPS))
