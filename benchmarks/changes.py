"""Compares videos made with caches, few steps, sparsity, FP8 or smaller weights with plain ones.

    python -m benchmarks.changes --json results/changes.json [--only "GGUF Q4_K"]

The demo checkpoint makes the same six videos with each variant, from the same seeds, and
tools/compare_videos.py compares them with those of the plain run: medians over the videos of VMAF,
XPSNR, SSIM and PSNR, and suspicious properties that the plain video lacks. The variant with another
seed gives the scores of an unrelated video. Seconds are those of denoising.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, results_file, write_json
from tests.dist import GENERATE, REPO, TORCHRUN
from tools import compare_videos
from tools.gguf_files import make_gguf_folders
from tools.quantize_dit import quantize_checkpoint
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer
from wan.utils.files import check_output, make_marked_kind, write_output

DEMO = REPO / "examples" / "demo"
PROMPTS = (
    "a large green square moves up on a gray background",
    "a small red star bounces on a brown background",
    "a small blue circle moves right on a brown background",
    "a large yellow triangle rotates on a gray background",
    "a purple circle grows on a gray background",
    "a small white square moves diagonally on a brown background",
)
VARIANTS: dict[str, str] = {
    "plain": "",
    "another seed": "",
    "bfloat16": "--precision bf16",
    "10 of 20 steps": "--sample_steps 10",
    "--step_cache first_block": "--step_cache first_block:threshold=0.2",
    "--step_cache mag": "--step_cache mag:threshold=0.08",
    "--step_cache cfg": "--step_cache cfg",
    "LoRA of 4 steps": f"--lora_dir {DEMO / 'T2V-A14B-4steps-lora'}",
    "--fa_quant fp8": "--fa_quant fp8",
    "--use_rainfusion": "--use_rainfusion --frame_num 33",
    "plain, 33 frames": "--frame_num 33",
    "GGUF Q8_0": "--ckpt_dir Q8_0",
    "GGUF Q4_K": "--ckpt_dir Q4_K",
    "int8 (W8A8_DYNAMIC)": "--quant_dit_path int8",
}
REFERENCES = {"--use_rainfusion": "plain, 33 frames"}
"""Variant -> its reference variant; all others are compared with the plain run."""

PROMPT_FILE = make_marked_kind(
    "prompts of benchmarks.changes", json.dumps({"prompt": PROMPTS[0]})[:-1].encode()
)


def make_variant_checkpoint(name: str, work: Path) -> Path:
    """Writes a variant's checkpoint if it is missing, and returns its folder."""
    folder = work / "weights" / name
    if not folder.is_dir():
        source = DEMO / "t2v-A14B"
        return (
            quantize_checkpoint(source, folder)
            if name == "int8"
            else make_gguf_folders(source, name, folder)[0]
        )
    return folder if name == "int8" else folder / "gguf" / "t2v-A14B"


def make_videos(name: str, work: Path, prompts: int) -> Path:
    """Makes the videos of a variant, and returns their folder."""
    out = work / f"{[*VARIANTS].index(name):02}"
    lines = work / "prompts.jsonl"
    first = 1000 if name == "another seed" else 0
    listed = [{"prompt": p, "base_seed": first + n} for n, p in enumerate(PROMPTS[:prompts])]
    with write_output(lines, PROMPT_FILE) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in listed))
    flags = VARIANTS[name].split()
    for index, flag in enumerate(flags):
        if flag in ("--ckpt_dir", "--quant_dit_path"):
            flags[index + 1] = str(make_variant_checkpoint(flags[index + 1], work))
    if "--frame_num" not in flags:
        flags += ["--frame_num", "17"]
    command = [sys.executable, GENERATE, "--prompt_file", str(lines), "--save_file", str(out)]
    command += ["--skip_existing"]  # in a folder of an earlier run
    subprocess.run(
        [*command, *flags], env=os.environ | TORCHRUN, cwd=REPO, check=True, capture_output=True
    )
    return out


def compare_variant(name: str, folder: Path, reference: Path) -> dict[str, Any]:
    """Returns a variant's median measures and the suspicious properties of its videos."""
    pairs = compare_videos.pair_videos(reference, folder)
    comparisons = [compare_videos.compare_pair(*pair) for pair in pairs]
    records = [json.loads(video.with_suffix(".json").read_text()) for _, video in pairs]
    suspicions = [
        f"{Path(comparison['videos'][1]).name}: {text}"
        for comparison in comparisons
        for text in comparison["suspicious"][1]
        if text.split(":")[0]
        not in {reference_text.split(":")[0] for reference_text in comparison["suspicious"][0]}
    ]
    medians = {
        measure: statistics.median(comparison["means"][measure] for comparison in comparisons)
        for measure in compare_videos.FULL_REFERENCE_MEASURES
    }
    seconds = statistics.median(record["seconds"]["denoising"] for record in records)
    return {"way": name, **medians, "seconds": seconds, "suspicious": suspicions}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--prompts", type=make_argument_type(integer(1, len(PROMPTS))), default=len(PROMPTS)
    )
    parser.add_argument("--keep", type=Path, help="folder that keeps the videos")
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.keep or Path(temporary)
        check_output(work / "prompts.jsonl", PROMPT_FILE, "--keep")
        work.mkdir(parents=True, exist_ok=True)
        needed = {"plain", *(REFERENCES.get(name, "plain") for name in options.only), *options.only}
        folders = {
            name: make_videos(name, work, options.prompts) for name in VARIANTS if name in needed
        }
        results = [
            compare_variant(name, folders[name], folders[REFERENCES.get(name, "plain")])
            for name in options.only
            if name not in ("plain", *REFERENCES.values())
        ]
    print("| Way | VMAF | XPSNR | SSIM | PSNR | Denoising, s | Suspicious |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        values = f"{result['vmaf']:.1f} | {result['xpsnr']:.1f} | {result['ssim']:.3f}"
        values += f" | {result['psnr']:.1f}"
        suspicions = "; ".join(result["suspicious"])
        print(f"| {result['way']} | {values} | {result['seconds']:.2f} | {suspicions} |")
    write_json(options.json, CPU, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
