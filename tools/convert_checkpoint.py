"""Converts a checkpoint's DiTs to bfloat16, which halves the bytes to store, read and copy.

    python tools/convert_checkpoint.py --ckpt_dir Wan2.2-T2V-A14B --out Wan2.2-T2V-A14B-bf16
    python tools/convert_checkpoint.py --ckpt_dir Wan2.2-I2V-A14B --out TurboWan2.2-I2V-A14B \
        --high_noise TurboWan2.2-I2V-A14B-high-720P.pth --low_noise TurboWan2.2-...-low-720P.pth

The second command takes the DiTs from other files, `.pth` as published for rCM and TurboDiffusion
(--dit if there is one network), and all other files from the folder.
A run with --precision bf16 computes the same bits from either folder: parameters that it uses in
float32 (norms, modulation, time embedding, head) stay float32. The layout stays as well; text
encoder, VAE, tokenizer and settings are linked, or copied to another file system. After an
interruption the same command resumes with the first missing file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import SafetensorError
from torch import Tensor

from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.checkpoint.formats.headers import (
    check_file_complete,
    compute_fingerprint,
    read_json,
)
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.formats.safetensors_stream import stream_safetensors
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.layout import SPARSE_LINEAR, DitFiles, inspect_checkpoint
from wan.checkpoint.load import open_sources, read_headers
from wan.checkpoint.names.keymaps import rename_dit_to_official
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32
from wan.utils.files import OutputKind, check_link, make_json_kind, remove_output, write_output
from wan.utils.log import set_up_logging

UNFINISHED = "unfinished_conversion.json"
NETWORKS = ("dit", "high_noise", "low_noise")
_INDEX = ".safetensors.index.json"
_STATE = make_json_kind("the state of a conversion", "from", "dtype")
_NEW_FILE = OutputKind("a new file", lambda _: False)
_PATCHES = "patch_embedding.weight"


def convert_checkpoint(
    ckpt_dir: Path, out: Path, networks: Mapping[str, Path] | None = None
) -> Path:
    """Writes the folder `out` and returns it.

    Args:
        ckpt_dir: A checkpoint.
        out: A new folder, or that of an unfinished conversion.
        networks: Files that replace its networks, by name ("high_noise", "low_noise", "dit").

    Raises:
        InputError: `ckpt_dir` is no checkpoint, `networks` are not as many or of another shape, or
            `out` holds something other than an unfinished conversion of this.
        OSError: `out` cannot be written.
    """
    experts = inspect_checkpoint(ckpt_dir).experts
    old = {info.file for dit in experts.values() for info in dit.tensors.values()}
    by_file: dict[Path, dict[str, TensorInfo]] = {}  # tensors to write, by their new file
    if networks:
        if networks.keys() != experts.keys():
            flags = " and ".join(f"--{name}" for name in experts)
            raise InputError(f"The networks of {ckpt_dir} are {flags}; give each of them once.")
        for name, file in networks.items():
            target = experts[name].folder / "diffusion_pytorch_model.safetensors"
            by_file[target] = _read_network(file, experts[name])
    else:
        for dit in experts.values():
            for name, info in dit.tensors.items():
                by_file.setdefault(info.file, {})[name] = info
    files = {*_list_files(ckpt_dir)} - old
    sources = {info.file for tensors in by_file.values() for info in tensors.values()}
    _mark_unfinished(out, {"from": compute_fingerprint(sorted(sources)), "dtype": "bf16"})
    for file in sorted(files | by_file.keys()):
        target = out / file.relative_to(ckpt_dir)
        indexes_old = file.name.endswith(_INDEX) and file.parent in {path.parent for path in old}
        if target.exists() or (networks and indexes_old):
            continue
        if file not in by_file and not indexes_old:
            _link_file(file, target)
            continue
        with write_output(target, _NEW_FILE) as temporary:
            if file in by_file:
                label = str(file.relative_to(ckpt_dir))
                _convert_file(temporary, by_file[file], label, official=bool(networks))
            else:  # sorted after the files of the index: "." comes after "-"
                temporary.write_text(_make_index(file, target.parent), encoding="utf-8")
    remove_output(out / UNFINISHED, _STATE)
    return out


def _list_files(folder: Path) -> list[Path]:
    """Returns all files in a folder and its subfolders, also in those that are links, sorted.

    Raises:
        InputError: A link leads to nothing, or to a folder that contains it.
    """
    files: list[Path] = []
    folders = [(folder, frozenset([folder.resolve()]))]
    while folders:
        current, outer_folders = folders.pop()
        for path in current.iterdir():
            check_link(path)
            if path.is_dir():
                target = path.resolve()
                if target in outer_folders:
                    why = f"is a link to {target}, which contains it"
                    raise InputError(f"{path}", None, why, "remove the link")
                folders.append((path, outer_folders | {target}))
            elif path.is_file():
                files.append(path)
    return sorted(files)


def _read_network(file: Path, dit: DitFiles) -> dict[str, TensorInfo]:
    """Reads the tensors of a file; refuses a file that does not have all tensors of `dit`."""
    tensors = read_headers(check_file_complete(file), rename_dit_to_official, "dit")
    selected = {name: info for name, info in tensors.items() if SPARSE_LINEAR not in name}
    for name in selected.keys() | dit.tensors.keys():
        if name not in selected or name not in dit.tensors:
            verb = "has" if name in selected else "lacks"
            raise InputError(f"{file} {verb} {name}, unlike {dit.folder}; give files of one task.")
        shapes = selected[name].shape, dit.tensors[name].shape
        # rCM stores the patch embedding as a matrix, with a patch's elements in a row.
        matrix = name == _PATCHES and prod(shapes[0]) == prod(shapes[1])
        if shapes[0] != shapes[1] and not matrix:
            raise InputError(
                f"{file}: {name} is {list(shapes[0])}, but {list(shapes[1])} in {dit.folder}; give "
                "files of one task."
            )
        selected[name] = replace(selected[name], shape=shapes[1])
    return selected


def _mark_unfinished(out: Path, state: dict[str, str]) -> None:
    mark = out / UNFINISHED
    if mark.is_file() and read_json(mark) == state:
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"{out} exists and is no unfinished conversion of this checkpoint; name a new folder."
        )
    with write_output(mark, _STATE) as temporary:
        temporary.write_text(json.dumps(state), encoding="utf-8")


def _choose_dtype(name: str, stored: torch.dtype) -> torch.dtype:
    if keeps_fp32(name) and stored != torch.bfloat16:
        return torch.float32
    return torch.bfloat16


def _convert_file(path: Path, tensors: dict[str, TensorInfo], label: str, official: bool) -> None:
    """Writes a file of converted weights under official names or the stored names."""
    sources = open_sources(tensors)
    names = {name: name if official else info.name for name, info in tensors.items()}
    form = {
        names[name]: (_choose_dtype(name, s.dtype), tensors[name].shape)
        for name, s in sources.items()
    }

    def convert_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, source in sources.items():
            values = source.read(slice(None)).to(_choose_dtype(name, source.dtype))
            if not bool(values.isfinite().all()):
                why = "holds NaN or infinity, or overflows in bfloat16"
                raise InputError(f"{tensors[name].file}: {name}", why=why, remedy="it is damaged")
            yield names[name], values.reshape(tensors[name].shape)

    stream_safetensors(path, form, convert_tensors(), f"converting {label}")


def _make_index(file: Path, folder: Path) -> str:
    """Returns the index with the total size of its files, which must exist."""
    index = read_json(file)
    headers = [read_safetensors_header(folder / name) for name in set(index["weight_map"].values())]
    total = sum(info.nbytes for header in headers for info in header.values())
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    return json.dumps(index, indent=2) + "\n"


def _link_file(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system
        with write_output(target, _NEW_FILE) as temporary:
            shutil.copyfile(file, temporary)


def main(argv: list[str] | None = None) -> int:
    """Converts a checkpoint; returns 0, 2 if the request is refused or 130 if interrupted."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ckpt_dir", required=True, type=Path, help="a checkpoint folder")
    for name in NETWORKS:
        parser.add_argument(
            f"--{name}", type=Path, metavar="FILE", help="file that replaces this network"
        )
    parser.add_argument("--out", required=True, type=Path, help="a new or an unfinished folder")
    set_up_logging()
    try:
        options: argparse.Namespace = parser.parse_args(argv)
        networks = {name: file for name in NETWORKS if (file := getattr(options, name)) is not None}
        print(convert_checkpoint(options.ckpt_dir, options.out, networks))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        print(f"{error}; check that both folders are accessible, and start again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the same command resumes.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that unfinished files are removed
    sys.exit(run_program(main))
