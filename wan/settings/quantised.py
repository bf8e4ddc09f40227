"""A folder of quantised DiT weights (--quant_dit_path), checked before any weight is read.

Two experts have one folder each, named as in an official checkpoint; a single network's files are
directly inside. What an export leaves FLOAT comes from the checkpoint.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from wan.settings.checkpoint import Checkpoint
from wan.settings.errors import InputError
from wan.settings.files import is_folder
from wan.settings.quant_export import EVERYWHERE, FP8_DYNAMIC, Export, read_export

MODE = 0o640  # mindiesd reads no file that more people may read
FOLDERS = {"high_noise": "high_noise_model", "low_noise": "low_noise_model", "dit": "."}


@dataclass(frozen=True)
class QuantisedDit:
    """A folder of quantised weights; experts: by the checkpoint's names of its networks."""

    folder: Path
    experts: dict[str, Export]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms of the linear layers, sorted."""
        layers = (layer for export in self.experts.values() for layer in export.linears.values())
        return tuple(sorted({layer.algorithm for layer in layers}))

    def files(self) -> list[Path]:
        """Descriptions and weights, in a fixed order."""
        exports = self.experts.values()
        return sorted(path for export in exports for path in (export.description, export.weights))


def resolve(
    folder: Path, checkpoint: Checkpoint, *, device: str, dit_fsdp: bool, fa_quant: str | None
) -> QuantisedDit:
    """What the folder brings for the checkpoint's networks.

    device: --device; "auto" leaves its rules to `check_device`. Raises InputError for a folder that
    is incomplete, of another network, or that this run cannot use; no weight is read.
    """
    if not is_folder(folder):
        raise InputError(f"--quant_dit_path {folder} is not a folder; give the exported folder.")
    quantised = QuantisedDit(
        folder,
        {
            name: read_export(folder / FOLDERS[name], dit)
            for name, dit in checkpoint.experts.items()
        },
    )
    if dit_fsdp:
        raise InputError(
            "--dit_fsdp cuts parameters, and quantised weights are none; drop it, or drop "
            "--quant_dit_path."
        )
    exports = quantised.experts.values()
    others = {a.algorithm for export in exports for a in export.attentions.values()} - {FP8_DYNAMIC}
    if fa_quant is not None and others:
        raise InputError(
            f"{folder} quantises attention as {min(others)}, but --fa_quant {fa_quant} is built "
            f"for {FP8_DYNAMIC}; drop --fa_quant, or export with {FP8_DYNAMIC}."
        )
    if device != "auto":
        check_device(quantised, device)
    return quantised


def check_device(quantised: QuantisedDit, device: str) -> None:
    """device: the type, "cpu", "cuda" or "npu". InputError where the export cannot run on it.

    Which NPU it is, is for `wan.settings.chips`.
    """
    if device != "npu":
        for algorithm in quantised.algorithms:
            if algorithm != EVERYWHERE:
                raise InputError(
                    f"{quantised.folder} holds {algorithm} weights, which run on NPUs only; use "
                    f"--device npu, or an export in {EVERYWHERE}."
                )
        return
    for export in quantised.experts.values():
        for path in (export.description, export.weights):
            _check_mode(path)


def _check_mode(path: Path) -> None:
    """mindiesd's rules for files it reads: no link, of the user or its group, not open to all."""
    if path.is_symlink():
        raise InputError(
            f"{path} is a symbolic link, which mindiesd does not read; put a copy there."
        )
    status = path.stat()
    if os.geteuid() not in (0, status.st_uid) and os.getgid() != status.st_gid:
        raise InputError(
            f"{path} belongs to another user and group, whose files mindiesd does not read; "
            f"run chown $(id -u) {path}."
        )
    if stat.S_IMODE(status.st_mode) & 0o777 & ~MODE:
        raise InputError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, but mindiesd reads files of mode "
            f"{MODE:04o} or stricter only; run chmod {MODE:04o} {path}."
        )
