"""`python -m wan`: the same command as `generate.py` and `wan-generate`."""

from __future__ import annotations

import sys


def run() -> int:
    """`wan.cli.main.main`; also who interrupts its import is answered in one sentence."""
    try:
        from wan.cli.main import main
    except KeyboardInterrupt:
        print("generate.py: interrupted; the video was not written.", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
