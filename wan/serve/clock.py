"""A clock for durations within one run of the service."""

import time

_OFFSET = time.time() - time.monotonic()


def now() -> float:
    """Returns seconds since 1970 that go on evenly when the clock of the system is set."""
    return _OFFSET + time.monotonic()
