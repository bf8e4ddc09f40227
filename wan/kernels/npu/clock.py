"""The clock of the NPU's compute cores around a piece of work, through mindiesd.

    python clock.py DEVICE MHZ

is the process that restores it when the one that writes to its standard input is gone.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from typing import Any


class FrequencyCap:
    """`with cap:` runs at `cap` MHz and leaves `restore` MHz behind, also when the work fails.

    It holds no state, so one object serves any number of uses. There is no way to read the clock,
    so `restore` has to be told. Each of the two calls waits for the stream (mindiesd 3.1.0 copies
    the operator's status to the host): once per block is affordable, once per chunk is not.

    Making one restores the clock, in case an earlier run has left it low, and sees to it that
    SIGTERM, with which torchrun ends ranks, restores it before the process ends. Python does not
    hear of that while it waits for the device, nor ever of SIGKILL: then a small process of its own
    restores the clock.
    """

    def __init__(self, cap: int, restore: int) -> None:
        from mindiesd import frequency_regulator

        self.cap, self.restore = cap, restore
        self._set = frequency_regulator
        self._set(restore)
        self._guard = _guard(restore)
        atexit.register(self._dismiss)
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, _: Any) -> None:
        self._set(self.restore)
        self._dismiss()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _dismiss(self) -> None:
        """The clock is as it was: nothing is left to restore."""
        guard = self._guard.stdin
        if guard is not None and not guard.closed:
            try:
                guard.write(b"done")
                guard.close()
            except BrokenPipeError:  # somebody has ended it
                pass

    def __enter__(self) -> None:
        try:
            self._set(self.cap)
        except BaseException:  # whether the clock has changed is unknown, and __exit__ is not run
            self._set(self.restore)
            raise

    def __exit__(self, *_: object) -> None:
        self._set(self.restore)


def _guard(restore: int) -> subprocess.Popen[bytes]:
    """In a session of its own, so that what ends this one's processes does not end it."""
    import torch_npu

    device = str(torch_npu.npu.current_device())
    # By its file: it needs nothing of wan, which may not be installed. -P: nor what lies beside it.
    command = [sys.executable, "-P", __file__, device, str(restore)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main(device: int, mhz: int) -> None:
    """Wait until the writer is gone; restore the clock unless it has said that all is done."""
    if sys.stdin.buffer.read() == b"done":
        return
    import torch_npu
    from mindiesd import frequency_regulator

    torch_npu.npu.set_device(device)
    frequency_regulator(mhz)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
