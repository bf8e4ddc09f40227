"""A checkpoint's DiTs in bfloat16: half the bytes to keep, read and send to a device.

    python tools/convert_checkpoint.py --ckpt_dir Wan2.2-T2V-A14B --out Wan2.2-T2V-A14B-bf16

A run with --precision bf16 computes the same bits from either folder: what it keeps in float32
(norms, modulation, time embedding, head) stays float32. The layout stays as well; text encoder,
VAE, tokenizer and settings are linked, or copied to another file system. Started again after an
interruption it goes on with the first file that is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import SafetensorError
from torch import Tensor

from tools.safetensors_stream import write
from wan.checkpoint.files import (
    TensorInfo,
    fingerprint,
    read_json,
    safetensors_header,
    whole_file,
)
from wan.checkpoint.layout import describe
from wan.checkpoint.load import mapped
from wan.cli.flags import Parser
from wan.log import setup
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32

UNFINISHED = "unfinished_conversion.json"
_INDEX = ".safetensors.index.json"


def convert(ckpt_dir: Path, out: Path) -> Path:
    """Write the folder `out` and return it.

    Raises:
        InputError: `ckpt_dir` is no checkpoint, or `out` holds something other than an unfinished
            conversion of it.
        OSError: `out` cannot be written.
    """
    checkpoint = describe(ckpt_dir)
    by_file: dict[Path, dict[str, TensorInfo]] = {}
    for dit in checkpoint.experts.values():
        for name, info in dit.tensors.items():
            by_file.setdefault(info.file, {})[name] = info
    _begin(out, {"from": fingerprint(sorted(by_file)), "dtype": "bf16"})
    for file in sorted(path for path in ckpt_dir.rglob("*") if path.is_file()):
        target = out / file.relative_to(ckpt_dir)
        if target.exists():
            continue
        with whole_file(target) as temporary:
            if file in by_file:
                _convert(temporary, by_file[file], str(file.relative_to(ckpt_dir)))
            elif file.name.endswith(_INDEX) and file.parent in {path.parent for path in by_file}:
                temporary.write_text(_index(file, target.parent), encoding="utf-8")
            else:
                _link(file, temporary)
    (out / UNFINISHED).unlink()
    return out


def _begin(out: Path, state: dict[str, str]) -> None:
    mark = out / UNFINISHED
    if mark.is_file() and read_json(mark) == state:
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"{out} exists and is no unfinished conversion of this checkpoint; name a new folder."
        )
    with whole_file(mark) as temporary:
        temporary.write_text(json.dumps(state), encoding="utf-8")


def _dtype(name: str, stored: torch.dtype) -> torch.dtype:
    return stored if keeps_fp32(name) else torch.bfloat16


def _convert(path: Path, tensors: dict[str, TensorInfo], label: str) -> None:
    """A file of weights under its own names."""
    sources = mapped(tensors)
    form = {tensors[name].name: (_dtype(name, s.dtype), s.shape) for name, s in sources.items()}

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, source in sources.items():
            yield tensors[name].name, source.read(slice(None)).to(_dtype(name, source.dtype))

    write(path, form, converted(), f"converting {label}")


def _index(file: Path, folder: Path) -> str:
    """The index with the bytes of the files that it now names, which are written by then."""
    index = read_json(file)
    headers = [safetensors_header(folder / name) for name in set(index["weight_map"].values())]
    total = sum(info.nbytes for header in headers for info in header.values())
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    return json.dumps(index, indent=2) + "\n"


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system
        shutil.copyfile(file, target)


def main(argv: list[str] | None = None) -> int:
    """0; with one sentence on stderr 2 where the request is refused, 130 where interrupted."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ckpt_dir", required=True, type=Path, help="a checkpoint folder")
    parser.add_argument("--out", required=True, type=Path, help="a new folder, or one begun before")
    setup()
    options: argparse.Namespace = parser.parse_args(argv)
    try:
        print(convert(options.ckpt_dir, options.out))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        print(f"{error}; see whether both folders can be used, and start again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is unfinished is removed
    sys.exit(main())
