"""Lowers the clock of the NPU's compute cores inside a `with` block, through mindiesd.

    python clock.py DEVICE MHZ

waits until its standard input is closed and then restores the clock, unless it has read "done".
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
    """Context manager: sets the clock to cap_mhz on entry and to restore_mhz on exit.

    The object can be entered any number of times. restore_mhz is an argument because the clock
    cannot be read. Entry and exit each wait for the stream (mindiesd 3.1.0 copies the operator's
    status to the host), which is affordable per block, but not per head chunk.

    The constructor sets restore_mhz, in case an earlier run ended with a lowered clock, and
    installs a SIGTERM handler (torchrun ends ranks by SIGTERM) that restores the clock. Python
    runs no handler while it waits for the device, and none for SIGKILL. Therefore the constructor
    also starts a process that restores the clock when this one ends without writing "done" to it.
    """

    def __init__(self, cap_mhz: int, restore_mhz: int) -> None:
        from mindiesd import frequency_regulator

        self.cap_mhz, self.restore_mhz = cap_mhz, restore_mhz
        self._set_frequency = frequency_regulator
        self._set_frequency(restore_mhz)
        self._restore_process = _start_restore_process(restore_mhz)
        atexit.register(self._stop_restore_process)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, _: Any) -> None:
        self._set_frequency(self.restore_mhz)
        self._stop_restore_process()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _stop_restore_process(self) -> None:
        """Ends the restore process without a change of the clock, which is already restored."""
        stdin = self._restore_process.stdin
        if stdin is not None and not stdin.closed:
            try:
                stdin.write(b"done")
                stdin.close()
            except BrokenPipeError:  # the restore process has been killed
                pass

    def __enter__(self) -> None:
        try:
            self._set_frequency(self.cap_mhz)
        except BaseException:  # the clock may have changed, and Python does not call __exit__
            self._set_frequency(self.restore_mhz)
            raise

    def __exit__(self, *_: object) -> None:
        self._set_frequency(self.restore_mhz)


def _start_restore_process(restore_mhz: int) -> subprocess.Popen[bytes]:
    """Starts this file as a process in a new session, so that no signal to this session ends it."""
    import torch_npu

    device = str(torch_npu.npu.current_device())
    # By its path, because wan may not be installed; -P keeps its directory out of sys.path.
    command = [sys.executable, "-P", __file__, device, str(restore_mhz)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main(device: int, mhz: int) -> None:
    """Restores the clock when standard input is closed, unless "done" was written to it."""
    if sys.stdin.buffer.read() == b"done":
        return
    import torch_npu
    from mindiesd import frequency_regulator

    torch_npu.npu.set_device(device)
    frequency_regulator(mhz)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
