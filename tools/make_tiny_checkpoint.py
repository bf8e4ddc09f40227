"""Writes a complete Wan checkpoint folder with tiny, randomly initialized networks.

python tools/make_tiny_checkpoint.py --task t2v-A14B --out tiny [--layout diffusers]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.presets import PRESETS
from wan.settings.values import integer
from wan.testing.random_checkpoint import DTYPES, WRITERS, make_checkpoint


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", required=True, choices=PRESETS)
    parser.add_argument("--out", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--layout", default="official", choices=WRITERS)
    parser.add_argument("--seed", default=0, type=make_argument_type(integer(0, 4_294_967_295)))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="dtype of the DiT (bf16)")
    print(make_checkpoint(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(run_program(main))
