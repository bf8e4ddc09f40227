"""Compares the seconds of a denoising step on a CPU with stable-diffusion.cpp, from the same files.

    python -m benchmarks.stable_diffusion_cpp --sd_cli ./sd-cli --keep ./files --json results.json
    python -m benchmarks.stable_diffusion_cpp --sd_cli ./sd-cli --weights Q8_0 --steps 8 --compiled

"ours" is generate.py in bfloat16, "theirs" stable-diffusion.cpp's sd-cli. Both run t2v-1.3B as a
process of its own, with the same size, frames, steps, shift, guidance (two forwards a step), number
of threads and the Euler solver. The DiT's weights are random; sd-cli itself quantizes them into one
GGUF file of each kind, which both sides read. Every round runs each side once, in alternating
order. The text encoder is in bfloat16 for ours and Q8_0 for theirs; the VAE is one file. Seeds are
the same, but not the noise, and theirs multiplies in int8 with activations that it quantizes.

Seconds of a step are the mean over the steps after the first one, which may include the reading of
weights: for theirs from sd-cli's output, which has the seconds of all steps and of the first, for
ours between the ends of the first and the last step. Ours dequantizes eagerly in its first 25
steps and compiled in later ones; --compiled compiles it in the first step, as a long video has it.
Seconds of the processes include reading, text encoding and decoding; memory is sampled from /proc
(Linux). The files take 25 GB of disk. The JSON file is written after each run; with the same file
and settings, an interrupted program resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.against import PROMPT, measure_command
from benchmarks.common import (
    add_json_option,
    compute_ratios,
    compute_spread,
    read_earlier_runs,
    write_json,
)
from benchmarks.random_weights import save_network
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.config import make_reference_dit_config
from wan.checkpoint.names.keymaps import rename_vae_to_official
from wan.modules import t5
from wan.modules.model import WanModel
from wan.modules.vae import video_vae
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.values import integer, read_frame_num, read_size, real
from wan.testing.measuring import CPU
from wan.testing.random_checkpoint import train_tokenizer, write_tokenizer
from wan.utils.files import write_folder

TASK = "t2v-1.3B"
SIDES = ("ours", "theirs")
KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
DIT, TEXT_ENCODER, VAE = f"{TASK}.safetensors", "umt5-xxl.safetensors", "vae.safetensors"
QUANTIZED_TEXT_ENCODER = "umt5-xxl-Q8_0.gguf"
OURS = """
import json
import runpy
import sys
import time
from contextlib import contextmanager

from wan.kernels import compiled_dequantise
from wan.utils import trace

path, compiled = sys.argv.pop(1), sys.argv.pop(1) == "True"
record_step, ends = trace.record_step, []


@contextmanager
def record_end(*arguments):
    with record_step(*arguments):
        yield
    ends.append(time.perf_counter())


trace.record_step = record_end
if compiled:
    compiled_dequantise.CompiledDequantizer.__init__.__defaults__ = (0,)
try:
    runpy.run_path("generate.py", run_name="__main__")  # which exits
finally:
    json.dump(ends, open(path, "w"))
"""


def locate(folder: Path, name: str) -> Path:
    """Returns the path of a file, which has a folder of its own."""
    return folder / name.rpartition(".")[0] / name


def make_file(path: Path, write: Callable[[Path], None]) -> None:
    """Makes a file and its folder unless they exist; an interrupted call leaves neither."""
    if not path.exists():
        with write_folder(path.parent) as part:
            write(part / path.name)


def write_networks(folder: Path) -> None:
    """Writes the networks with random weights in bfloat16, under names that both sides read."""
    with torch.device("meta"):
        dit = WanModel(**make_reference_dit_config(PRESETS[TASK]))
        encoder = t5.build_published_text_encoder()
        autoencoder = video_vae.build_published_vae(PRESETS[TASK].vae)
    rename = partial(rename_vae_to_official, residual=False)
    make_file(locate(folder, DIT), partial(save_network, dit, layer="blocks"))
    make_file(locate(folder, TEXT_ENCODER), partial(save_network, encoder, layer="block"))
    make_file(
        locate(folder, VAE), partial(save_network, autoencoder, layer="no layers", rename=rename)
    )
    make_file(folder / "google" / "umt5-xxl", lambda p: write_tokenizer(p, train_tokenizer()))


def quantize_file(sd_cli: Path, source: Path, target: Path, kind: str) -> None:
    """Lets sd-cli quantize all weights of a file into a GGUF file."""
    label = f"q{kind[1:]}"  # as sd-cli spells it: q8_0, q4_K

    def convert(part: Path) -> None:
        command = [str(sd_cli), "-M", "convert", "-m", str(source), "-o", str(part)]
        measure_command([*command, "--type", label])

    make_file(target, convert)


def read_step_seconds(output: str, steps: int) -> dict[str, float]:
    """Reads the seconds of a step from sd-cli's output.

    Returns:
        "first": Seconds of the first step. "step": mean seconds of the later ones.

    Raises:
        InputError: The output has no progress or no end of the sampling.
    """
    rates = re.findall(rf"\b1/{steps} - ([\d.]+)(s/it|it/s)", output)
    total = re.findall(r"sampling completed, taking ([\d.]+)s", output)
    if not rates or not total:
        remedy = (
            "give a version that prints them, such as that of stable-diffusion-cpp-python 0.4.7"
        )
        raise InputError("--sd_cli", None, "printed no seconds of the sampling", remedy)
    value, unit = rates[-1]
    first = float(value) if unit == "s/it" else 1 / float(value)
    return {"first": first, "step": (float(total[-1]) - first) / (steps - 1)}


def run_side(who: str, kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Makes one video with one side; returns its seconds and peak memory."""
    dit, steps = locate(folder, f"{TASK}-{kind}.gguf"), str(options.steps)
    scale, shift = f"{options.guidance:g}", f"{options.shift:g}"
    width, height = options.size.split("*")
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "output"
        if who == "theirs":
            command = [str(options.sd_cli.absolute()), "-M", "vid_gen", *options.sd_flags.split()]
            command += ["--diffusion-model", str(dit), "--vae", str(locate(folder, VAE))]
            command += ["--t5xxl", str(locate(folder, QUANTIZED_TEXT_ENCODER)), "-p", PROMPT]
            command += ["-n", PRESETS[TASK].negative_prompt, "-W", width, "-H", height]
            command += ["--video-frames", str(options.frames), "--steps", steps, "-s", "0"]
            command += ["--cfg-scale", scale, "--flow-shift", shift, "--sampling-method", "euler"]
            command += ["-t", str(torch.get_num_threads()), "-o", f"{temporary}/video.avi"]
            usage = measure_command(command, output=output)
            return usage | read_step_seconds(output.read_text(errors="replace"), options.steps)
        flags = ["--task", TASK, "--ckpt_dir", str(folder), "--dit", str(dit), "--prompt", PROMPT]
        flags += [
            "--text_encoder",
            str(locate(folder, TEXT_ENCODER)),
            "--vae",
            str(locate(folder, VAE)),
        ]
        flags += ["--size", options.size, "--frame_num", str(options.frames)]
        flags += ["--sample_steps", steps, "--sample_guide_scale", scale, "--sample_shift", shift]
        flags += ["--sample_solver", "euler", "--precision", "bf16", "--device", "cpu"]
        flags += ["--base_seed", "0", "--save_file", f"{temporary}/video.mp4"]
        own = [sys.executable, "-c", OURS, str(output), str(options.compiled)]
        usage = measure_command([*own, *flags])
        ends = json.loads(output.read_text())
        return usage | {"step": (ends[-1] - ends[0]) / (len(ends) - 1)}


def is_run_record(run: dict[str, Any]) -> bool:
    """Whether a JSON object has the fields of a run."""
    return {"who", "weights", "round", "step"} <= run.keys()


def print_medians(kind: str, runs: list[dict[str, Any]]) -> None:
    """Prints the medians of both sides, and their ratios within the rounds."""
    for name, label, unit in (
        ("step", "seconds of a step", 1.0),
        ("seconds", "seconds of the process", 1.0),
        ("resident", "resident GB", 1e9),
        ("anonymous", "anonymous GB", 1e9),
    ):
        values = {
            who: {run["round"]: run[name] / unit for run in runs if run["who"] == who}
            for who in SIDES
        }
        rounds = sorted(values["ours"].keys() & values["theirs"].keys())
        ours, theirs = ([values[who][number] for number in rounds] for who in SIDES)
        ratio = compute_ratios(ours, theirs)
        print(
            f"{kind}, {label}: ours {compute_spread(ours)['median']:.2f}, "
            f"theirs {compute_spread(theirs)['median']:.2f}, ratio {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f})"
        )


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    positive = make_argument_type(real(0, 100, exclude_min=True))
    parser.add_argument("--sd_cli", type=Path, required=True, help="the program sd-cli")
    parser.add_argument(
        "--sd_flags", default="--diffusion-fa", help="more flags of sd-cli (--diffusion-fa)"
    )
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=["Q8_0", "Q4_K"])
    parser.add_argument("--size", default="320*192")
    parser.add_argument("--frames", type=make_argument_type(read_frame_num), default=9)
    parser.add_argument("--steps", type=make_argument_type(integer(2, 1000)), default=4)
    parser.add_argument("--guidance", type=positive, default=5.0)
    parser.add_argument("--shift", type=positive, default=5.0)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=3)
    parser.add_argument(
        "--compiled", action="store_true", help="ours compiles its dequantizing in the first step"
    )
    parser.add_argument("--keep", type=Path, help="folder that keeps the files for later runs")
    add_json_option(parser)
    options = parser.parse_args(argv)
    read_size("--size", options.size)
    if not os.access(options.sd_cli, os.X_OK) or not options.sd_cli.is_file():
        raise InputError("--sd_cli", options.sd_cli, "is no program", "give the built sd-cli")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    names = ("size", "frames", "steps", "guidance", "shift", "sd_flags", "compiled")
    settings = {name: getattr(options, name) for name in names}
    settings["threads"] = torch.get_num_threads()
    results = read_earlier_runs(options.json, is_run_record)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with get_context("spawn").Pool(1) as pool:
            pool.apply(write_networks, (folder,))
        sd_cli = options.sd_cli.absolute()
        quantize_file(
            sd_cli, locate(folder, TEXT_ENCODER), locate(folder, QUANTIZED_TEXT_ENCODER), "Q8_0"
        )
        for kind in options.weights:
            quantize_file(sd_cli, locate(folder, DIT), locate(folder, f"{TASK}-{kind}.gguf"), kind)
        for number in range(options.rounds):
            for kind in options.weights:
                for who in SIDES[:: -1 if number % 2 else 1]:
                    key = settings | {"weights": kind, "round": number, "who": who}
                    if any(key.items() <= run.items() for run in results):
                        continue
                    results.append(key | run_side(who, kind, folder, options))
                    print(results[-1], flush=True)
                    write_json(options.json, CPU, results)
    for kind in options.weights:
        wanted = (settings | {"weights": kind}).items()
        print_medians(kind, [run for run in results if wanted <= run.items()])


if __name__ == "__main__":
    sys.exit(run_program(main))
