"""Generate a video with Wan2.2: `python generate.py --help`."""

from __future__ import annotations

import sys

from wan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
