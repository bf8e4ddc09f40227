"""The clock of the NPU's compute cores around a piece of work, through mindiesd."""

from __future__ import annotations


class FrequencyCap:
    """`with cap:` runs at `cap` MHz and leaves `restore` MHz behind, also when the work fails.

    It holds no state, so one object serves any number of uses. There is no way to read the clock,
    so `restore` has to be told. Each of the two calls waits for the stream (mindiesd 3.1.0 copies
    the operator's status to the host): once per block is affordable, once per chunk is not.
    """

    def __init__(self, cap: int, restore: int) -> None:
        from mindiesd import frequency_regulator

        self.cap, self.restore = cap, restore
        self._set = frequency_regulator

    def __enter__(self) -> None:
        try:
            self._set(self.cap)
        except BaseException:  # whether the clock has changed is unknown, and __exit__ is not run
            self._set(self.restore)
            raise

    def __exit__(self, *_: object) -> None:
        self._set(self.restore)
