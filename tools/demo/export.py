"""Writes the trained networks as two checkpoint folders in the official layout, in bfloat16.

    python -m tools.demo.export --state STATE --out OUT

OUT/t2v-A14B is complete; OUT/i2v-A14B links to its VAE, text encoder and tokenizer. i2v is left out
until it is trained.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.demo.dit import CONFIG, IN_DIM
from tools.demo.text import load_encoder_weights, make_tokenizer
from tools.demo.training import load_averaged_weights
from tools.run_demo import I2V_PROMPT, PROMPTS
from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.checkpoint.names import keymaps
from wan.settings.errors import InputError
from wan.testing.random_checkpoint import write_json, write_tokenizer
from wan.utils.files import is_output, make_json_kind, write_folder

SHARED_SETTINGS: dict[str, Any] = {
    "size": "64*64",
    "frame_num": 9,
    "sample_steps": 20,
    "sample_guide_scale": 3.0,
    "fps": 8,
}
TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "t2v": {"sample_shift": 12.0, "prompt": PROMPTS[0]},
    "i2v": {"sample_shift": 5.0, "prompt": I2V_PROMPT},
}
_VAE, _TEXT, _TOKENIZER = (
    "Wan2.1_VAE.safetensors",
    "models_t5_umt5-xxl-enc-bf16.safetensors",
    "google/umt5-xxl",
)
_TEXTS = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
OTHER_FILES = {"t2v": [f"{_TOKENIZER}/{name}" for name in _TEXTS], "i2v": [_TOKENIZER]}
"""Task -> files and links of its folder that are not in `EXPORTED`."""
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
_DIT = "diffusion_pytorch_model.safetensors"


def check_export(folder: Path, more: Collection[str]) -> None:
    """Refuses a folder that is neither absent, empty, nor an earlier export.

    Args:
        more: Files and links of this export that are not in `EXPORTED`.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError("--out", folder, "is no folder", "give another name")
    entries = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    allowed = EXPORTED | {*more, _CURVE}
    is_ours = EXPORTED <= entries <= allowed
    if entries and not (is_ours and is_output(folder / "generation_config.json", _SETTINGS)):
        why = "exists and is no earlier export of the demo"
        raise InputError("--out", folder, why, "give another name, or move it away")


def remove_export(folder: Path, more: Collection[str]) -> None:
    """Removes an earlier export, which `check_export` recognises."""
    check_export(folder, more)
    if folder.exists():
        shutil.rmtree(folder)


def export_checkpoints(state: Path, out: Path) -> list[Path]:
    """Writes and returns the folders of the trained tasks, replacing earlier exports."""
    kinds = ["t2v"] + ["i2v"] * (state / "i2v_low_noise.pt").exists()
    folders = {kind: out / f"{kind}-A14B" for kind in kinds}
    for kind, folder in folders.items():
        check_export(folder, OTHER_FILES[kind])
    for kind, folder in folders.items():
        remove_export(folder, OTHER_FILES[kind])
        with write_folder(folder) as unfinished:
            _write_dits(state, unfinished, kind)
            if kind == "t2v":
                _write_shared(state, unfinished)
            else:
                link_shared(unfinished)
            write_json(unfinished / "configuration.json", {"framework": "Pytorch"})
            write_json(unfinished / "generation_config.json", SHARED_SETTINGS | TASK_SETTINGS[kind])
    return [*folders.values()]


def _write_dits(state: Path, folder: Path, kind: str) -> None:
    config = {"_class_name": "WanModel", "_diffusers_version": "0.33.0", **CONFIG}
    for expert in ("high_noise", "low_noise"):
        weights = load_averaged_weights(state / f"{kind}_{expert}.pt")
        to = folder / f"{expert}_model"
        to.mkdir(parents=True)
        write_json(to / "config.json", {**config, "in_dim": IN_DIM[kind], "model_type": kind})
        _save_weights(weights, to / _DIT)


def _write_shared(state: Path, folder: Path) -> None:
    vae = torch.load(state / "vae_official.pt", weights_only=True)
    _save_weights(
        vae, folder / _VAE, lambda name: keymaps.rename_vae_to_official(name, residual=False)
    )
    _save_weights(load_encoder_weights(state), folder / _TEXT, keymaps.rename_t5_to_official)
    write_tokenizer(folder / _TOKENIZER, make_tokenizer())


def link_shared(folder: Path) -> None:
    (folder / "google").mkdir()
    for name in (_VAE, _TEXT):
        (folder / name).symlink_to(Path("..", "t2v-A14B", name))
    (folder / _TOKENIZER).symlink_to(Path("..", "..", "t2v-A14B", _TOKENIZER))


def _save_weights(
    weights: dict[str, Tensor], file: Path, official_name: Callable[[str], str] = str
) -> None:
    tensors = {official_name(n): t.bfloat16().contiguous() for n, t in weights.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder with the trained states")
    parser.add_argument("--out", type=Path, required=True, help="folder to write both to")
    options = parser.parse_args(argv)
    for folder in export_checkpoints(options.state, options.out):
        files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
        print(f"{folder}: {sum(p.stat().st_size for p in files) / 1e6:.2f} MB")


if __name__ == "__main__":
    sys.exit(run_program(main))
