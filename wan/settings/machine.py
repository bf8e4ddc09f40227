"""What can be known of this machine's devices without torch."""

from __future__ import annotations

import subprocess


def gpu_memory() -> int | None:
    """Bytes of the smallest NVIDIA GPU here, as its driver's own program reports them.

    None where there is no such program, no GPU, or no answer within five seconds.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return min(int(line) for line in done.stdout.split("\n") if line.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
