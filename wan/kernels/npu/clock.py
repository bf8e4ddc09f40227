"""The clock of the NPU's compute cores around a piece of work, through mindiesd."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any


class FrequencyCap:
    """`with cap:` runs at `cap` MHz and leaves `restore` MHz behind, also when the work fails.

    It holds no state, so one object serves any number of uses. There is no way to read the clock,
    so `restore` has to be told. Each of the two calls waits for the stream (mindiesd 3.1.0 copies
    the operator's status to the host): once per block is affordable, once per chunk is not.

    Making one restores the clock, in case a killed run has left it low, and sees to it that
    SIGTERM, with which torchrun ends ranks, restores it before the process ends. SIGKILL leaves it.
    """

    def __init__(self, cap: int, restore: int) -> None:
        from mindiesd import frequency_regulator

        self.cap, self.restore = cap, restore
        self._set = frequency_regulator
        self._set(restore)
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, _: Any) -> None:
        self._set(self.restore)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def __enter__(self) -> None:
        try:
            self._set(self.cap)
        except BaseException:  # whether the clock has changed is unknown, and __exit__ is not run
            self._set(self.restore)
            raise

    def __exit__(self, *_: object) -> None:
        self._set(self.restore)
