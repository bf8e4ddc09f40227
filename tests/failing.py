"""generate.py with a fault on one rank: `failing.py KIND RANK arguments...`, under torchrun.

KIND: raise (an exception in the second step), kill (kill -9 there), sleep (stay there for long).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from wan.cli import main as generate
from wan.pipeline import denoise as sampler

kind, rank = sys.argv[1], sys.argv[2]
original = sampler.guided_velocity


def faulty(*args: Any, **kwargs: Any) -> Any:
    step = args[4]("cond")
    if os.environ["RANK"] == rank and step.index == 1:
        print(f"fault on rank {rank}", flush=True)
        if kind == "raise":
            raise RuntimeError("this rank was told to fail")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(120)
    return original(*args, **kwargs)


sampler.guided_velocity = faulty
sys.exit(generate.main(sys.argv[3:]))
