"""Write a complete Wan checkpoint folder with tiny, randomly initialised networks.

python tools/make_tiny_checkpoint.py --task t2v-A14B --out tiny [--layout diffusers]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wan.pipeline.tiny import main

if __name__ == "__main__":
    sys.exit(main())
