"""`python -m wan`: the same command as `generate.py`."""

from __future__ import annotations

import sys

from wan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
