"""Kinds of output files of the demo's programs: exported checkpoints, pictures, LoRA files."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from wan.settings.errors import InputError
from wan.utils.files import (
    is_output,
    make_json_kind,
    make_marked_kind,
    make_safetensors_kind,
    write_output,
)

LORA_MARK = {"tools.demo": "a LoRA of the demo"}
LORA = make_safetensors_kind("a LoRA of tools.demo", *LORA_MARK)
PICTURE = make_marked_kind("a picture of tools.demo", b"Software\0tools.demo")
_SETTINGS = make_json_kind("the settings", "size", "frame_num", "sample_steps", "fps", "prompt")
_CURVE = "mag_curve.json"  # of tools/calibrate_mag.py, for the weights that are replaced
EXPORTED = {
    "configuration.json",
    "generation_config.json",
    "Wan2.1_VAE.safetensors",
    "models_t5_umt5-xxl-enc-bf16.safetensors",
    *(f"{part}_model/config.json" for part in ("high_noise", "low_noise")),
    *(f"{part}_model/diffusion_pytorch_model.safetensors" for part in ("high_noise", "low_noise")),
}
"""Files and links that every export has."""


def check_export(folder: Path, more: Collection[str], setting: str = "--out") -> None:
    """Refuses a folder that is neither absent, empty, nor an earlier export.

    Args:
        more: Files and links of this export that are not in `EXPORTED`.
        setting: Name of the folder's setting, for the refusal.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(setting, folder, "is no folder", "give another name")
    entries = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    allowed = EXPORTED | {*more, _CURVE}
    is_ours = EXPORTED <= entries <= allowed
    if entries and not (is_ours and is_output(folder / "generation_config.json", _SETTINGS)):
        why = "exists and is no earlier export of the demo"
        raise InputError(setting, folder, why, "give another name, or move it away")


def remove_export(folder: Path, more: Collection[str], setting: str = "--out") -> None:
    """Removes an earlier export, which `check_export` recognises."""
    check_export(folder, more, setting)
    if folder.exists():
        shutil.rmtree(folder)


def save_labelled_strips(
    groups: Sequence[tuple[str, Sequence[tuple[str, np.ndarray]]]], path: Path
) -> None:
    """Writes a PNG of groups of strips, one below the other, with their titles and labels.

    Args:
        groups: Title of a group, and its strips: label and pixels [H,W,3], all of one width.
    """
    font, line, gap = ImageFont.load_default(size=13), 20, 2
    labels = [label for _, strips in groups for label, _ in strips]
    margin = 8 + max(int(font.getlength(label)) for label in labels)
    heights = [line + sum(len(pixels) + gap for _, pixels in strips) for _, strips in groups]
    width = margin + groups[0][1][0][1].shape[1]
    sheet = Image.new("RGB", (width, sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for title, strips in groups:
        draw.text((4, top + 2), title, fill="black", font=font)
        top += line
        for label, pixels in strips:
            draw.text((4, top + len(pixels) // 2 - 8), label, fill="black", font=font)
            sheet.paste(Image.fromarray(pixels), (margin, top))
            top += len(pixels) + gap
    save_picture(np.asarray(sheet), path)


def save_picture(pixels: np.ndarray, path: Path) -> None:
    """Writes a PNG [H,W,3] with the mark of the demo's pictures."""
    mark = PngInfo()
    mark.add_text("Software", "tools.demo")
    with write_output(path, PICTURE) as temporary:
        Image.fromarray(pixels).save(temporary, "PNG", pnginfo=mark)
