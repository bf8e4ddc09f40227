"""Stores the demo checkpoint's DiTs as GGUF, FP8 and int8 files, and scores their videos.

    python -m tools.demo.weights --out FOLDER [--prompts 100]

The GGUF kinds with blocks of 256 values are written by the tests' simple quantizers, which are
worse than the published ones. FOLDER keeps the checkpoints, for use by `generate.py --ckpt_dir`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.demo.evaluate import format_run_rows
from tools.gguf_files import make_gguf_folders
from tools.quantize_dit import quantize_checkpoint
from wan import WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.w8a8_export import FOLDERS
from wan.settings.values import integer
from wan.utils import log
from wan.utils.files import write_folder

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "t2v-A14B"
KINDS = ("Q8_0", "Q6_K", "Q4_K", "Q3_K")
_VIDEO = {"shift": 12.0, "guide_scale": 3.0, "sampling_steps": 20}


def write_fp8_copy(source: Path, out: Path) -> Path:
    """Writes a copy whose blocks' matrices are FP8 with a scale each, as in ComfyUI's files."""
    with write_folder(out) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        for file in unfinished.rglob("diffusion_pytorch_model.safetensors"):
            state = load_file(file)
            for name in [n for n, x in state.items() if x.dim() == 2 and n.startswith("blocks.")]:
                weight = state[name].float()
                scale = weight.abs().max() / 448
                state[name] = (weight / scale).to(torch.float8_e4m3fn)
                state[name.replace(".weight", ".scale_weight")] = scale
            save_file(state, file)
    return out


def list_checkpoints(out: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Writes missing checkpoints; yields each one's name, folder and loading keywords."""
    yield "bfloat16, as it is published", DEMO, {}
    for kind in KINDS:
        folder = out / kind / "gguf" / DEMO.name
        yield kind, folder if folder.is_dir() else make_gguf_folders(DEMO, kind, out / kind)[0], {}
    folder = out / "fp8"
    yield "FP8", folder if folder.is_dir() else write_fp8_copy(DEMO, folder), {}
    yield "FP8, `--stored_weights multiply`", folder, {"stored_weights": "multiply"}
    q8_0 = out / "Q8_0" / "gguf" / DEMO.name
    for suffix, source in {"": DEMO, " from Q8_0": q8_0}.items():
        folder = out / f"int8{suffix}"
        quantised = folder if folder.is_dir() else quantize_checkpoint(source, folder)
        yield f"int8 (W8A8_DYNAMIC){suffix}", source, {"quant_dit_path": str(quantised)}


def count_weight_bytes(checkpoint: Path, loading: dict[str, Any]) -> int:
    """Returns the bytes of both DiTs' weight files."""
    folder = Path(loading.get("quant_dit_path", checkpoint))
    experts = [folder / name for name in FOLDERS.values() if name != "."]
    files = [*folder.rglob("*.gguf"), *(f for e in experts for f in e.glob("*.safetensors"))]
    return sum(file.stat().st_size for file in files)


@log.silence_thread()
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=make_argument_type(integer(1, 10_000)), default=100)
    options = parser.parse_args(argv)
    runs = (
        (
            f"{name}, {count_weight_bytes(folder, loading) / 1e6:.1f} MB",
            WanT2V("t2v-A14B", folder, precision="fp32", **loading),
            _VIDEO,
        )
        for name, folder, loading in list_checkpoints(options.out)
    )
    for line in format_run_rows(runs, options.prompts):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
