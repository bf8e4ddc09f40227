"""What a new machine runs first: does its device compute what it should, and how fast?

    python tools/check_device.py [--full] [--device auto|cpu|cuda|npu] [--only STEP[,STEP]]
    torchrun --nproc_per_node=8 tools/check_device.py

Ends in a table and a JSON file to attach to a report. Exit codes: 0 nothing is wrong, 1 something
is, 2 refused, 130 interrupted. docs/devices.md says how to read it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.device_check.command import main

if __name__ == "__main__":
    sys.exit(main())
