"""generate.py with a fault in the second step: `failing.py KIND RANK arguments...`.

FAIL_AT: The forward of the DiT that fails, if not the third.

KIND: raise (an exception), kill (kill -9), memory (more than there is), wait (until a signal),
pause (for a second, in which a test breaks something else).
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from wan.cli import main as generate
from wan.modules.model import WanModel


def fail(kind: str) -> None:
    os.write(1, b"fault\n")  # unbuffered: the process may be killed next
    if kind == "raise":
        raise RuntimeError("this rank was told to fail")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        torch.empty(1 << 60, dtype=torch.uint8)
    if kind == "pause":
        return time.sleep(1)
    signal.pause()


def main(kind: str, rank: str, *arguments: str) -> int:
    """Runs generate.py, which fails in the third forward of the DiT on one rank (two per step)."""
    forwards, failing = 0, int(os.environ.get("FAIL_AT", "3"))

    def count(module: torch.nn.Module, _: object) -> None:
        nonlocal forwards
        if isinstance(module, WanModel):
            forwards += 1
            if forwards == failing:
                fail(kind)

    if os.environ.get("RANK", "0") == rank:
        register_module_forward_pre_hook(count)
    return generate.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
