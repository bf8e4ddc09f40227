"""Generate a video with Wan2.2: `python generate.py --help`."""

from __future__ import annotations

import sys

from wan.__main__ import run_command_line

if __name__ == "__main__":
    sys.exit(run_command_line())
