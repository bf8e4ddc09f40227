"""Compares seconds and memory from process start to mp4 with diffusers and the official code.

    python -m benchmarks.against --rounds 5 --json results/against.json
    python -m benchmarks.against --task ti2v-5B --rounds 5 --cache warm
    python -m benchmarks.against --folder ./Wan2.2-T2V-A14B-Diffusers --task t2v-A14B
    python -m benchmarks.against --official ./Wan2.2 --official_folder ./Wan2.2-T2V-A14B ...

Each side makes the same video from the same weights, prompt and noise in a separate process: "ours"
is generate.py, "theirs" diffusers' WanPipeline (on a GPU with its model offload), "official" the
generate.py of a clone of the official code, which needs a GPU and a checkpoint in the official
layout. Every round runs each side once, in alternating order. Without --folder the program writes a
randomly initialized checkpoint of the published sizes in diffusers' layout (the DiT and the text
encoder in bfloat16, the VAE in float32). The pages of the checkpoint are dropped from the page
cache before a cold run, and read into it before a warm one.

The times of the stages text, denoising and decoding include the loading of their networks. The
remaining time is "start". Memory is sampled from /proc (Linux) every 10 ms: "resident" is all
resident memory, "anonymous" the part that is not backed by files, "read" the bytes read from the
disk; "cached" are the bytes of the weights in the page cache before the run. The program prints
medians and the ratios of each round; the JSON file has all runs. The file is written after each
run; with the same file and settings, an interrupted program resumes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from transformers import UMT5Config, UMT5EncoderModel

from benchmarks.common import add_json_option, compute_ratios, read_earlier_runs, write_json
from benchmarks.random_weights import save_network
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.presets import PRESETS
from wan.settings.values import integer, read_frame_num, read_size, real
from wan.testing.measuring import CPU
from wan.testing.random_checkpoint import VAE_22, train_tokenizer, write_tokenizer
from wan.testing.random_checkpoint import write_json as write_object
from wan.utils.files import write_folder

SIZES: dict[str, dict[str, int]] = {
    "t2v-1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "ti2v-5B": {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30}
    | {"in_channels": 48, "out_channels": 48},
}
SIDES = ("ours", "theirs", "official")
STAGES = ("start", "text", "denoising", "decoding", "writing")
PROMPT = "a red balloon over a green field"
OURS = """
import runpy
import sys
from contextlib import contextmanager

from wan.utils.log import StageTimer

call = StageTimer.__call__


@contextmanager
def within():  # loading counts toward the stage that needs it
    yield


StageTimer.__call__ = lambda self, name: within() if name == "loading" else call(self, name)
runpy.run_path("generate.py", run_name="__main__")
"""
THEIRS = """
import json
import sys
import time
import torch
from transformers import UMT5Config, UMT5EncoderModel
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.utils import export_to_video
from transformers import AutoTokenizer, UMT5EncoderModel

folder, out, precision, prompt, negative, width, height, frames, steps, *guidance = sys.argv[1:]
dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
seconds = dict.fromkeys(("text", "denoising", "decoding", "writing"), 0.0)


def timed(stage, work):
    def run(*args, **more):
        begun = time.perf_counter()
        try:
            return work(*args, **more)
        finally:
            seconds[stage] += time.perf_counter() - begun

    return run


def load(stage, kind, name, dtype):
    return timed(stage, kind.from_pretrained)(folder, subfolder=name, torch_dtype=dtype)


index = json.load(open(folder + "/model_index.json"))
parts = {"vae": load("decoding", AutoencoderKLWan, "vae", torch.float32)}
parts["text_encoder"] = load("text", UMT5EncoderModel, "text_encoder", torch.bfloat16)
for name in ("transformer", "transformer_2"):
    if index.get(name, [None])[0]:
        parts[name] = load("denoising", WanTransformer3DModel, name, dtype)
pipe = WanPipeline.from_pretrained(folder, torch_dtype=dtype, **parts)
if torch.cuda.is_available():
    pipe.enable_model_cpu_offload()
pipe.encode_prompt = timed("text", pipe.encode_prompt)
parts["vae"].decode = timed("decoding", parts["vae"].decode)
before = dict(seconds)
guide = {"guidance_scale": float(guidance[-1])}
if len(guidance) == 2:
    guide["guidance_scale_2"] = float(guidance[0])
video = timed("denoising", pipe)(
    prompt=prompt,
    negative_prompt=negative,
    width=int(width),
    height=int(height),
    num_frames=int(frames),
    num_inference_steps=int(steps),
    generator=torch.Generator().manual_seed(0),
    **guide,
).frames[0]
seconds["denoising"] -= sum(seconds[name] - before[name] for name in ("text", "decoding"))
timed("writing", export_to_video)(video, out, fps=16)
json.dump(seconds, open(out + ".seconds", "w"))
"""


UMT5_XXL: dict[str, Any] = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


def write_diffusers_checkpoint(task: str, folder: Path) -> None:
    """Writes the checkpoint one tensor at a time; no complete network is held in memory."""
    vae: Any = {"base_dim": 160, "decoder_base_dim": 256, **VAE_22} if task == "ti2v-5B" else {}
    with torch.device("meta"):
        networks: dict[str, tuple[Any, torch.dtype, str]] = {
            "transformer": (
                diffusers.WanTransformer3DModel(**SIZES[task]),
                torch.bfloat16,
                "blocks",
            ),
            "text_encoder": (UMT5EncoderModel(UMT5Config(**UMT5_XXL)), torch.bfloat16, "block"),
            "vae": (diffusers.AutoencoderKLWan(**vae), torch.float32, "no layers"),
        }
    for name, (network, dtype, layer) in networks.items():
        (folder / name).mkdir()
        if name == "text_encoder":
            network.config.save_pretrained(folder / name)
            file = "model.safetensors"
        else:
            network.save_config(folder / name)
            file = "diffusion_pytorch_model.safetensors"
        save_network(network, folder / name / file, layer, dtype)
    write_tokenizer(folder / "tokenizer", train_tokenizer())
    scheduler: Any = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "expand_timesteps": task == "ti2v-5B",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    write_object(folder / "model_index.json", index)


def drop_pages(folder: Path) -> None:
    """Drops the files from the page cache. No process may have mapped them."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_pages(folder: Path) -> None:
    """Reads the files into the page cache until it holds all of them, four times at most.

    A system that reclaims memory proactively (Linux with DAMON) drops pages that no process maps
    after about a minute, although memory is free.
    """
    paths = list(folder.rglob("*.safetensors"))
    for _ in range(4):
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
        if sum(map(count_cached_bytes, paths)) >= sum(path.stat().st_size for path in paths):
            return


def count_cached_bytes(path: Path) -> int:
    """Returns the size of the pages of a file that are in the page cache (Linux)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        is_cached = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        size = ctypes.c_size_t(len(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), size, is_cached.ctypes.data_as(ctypes.c_void_p)):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((is_cached & 1).sum()) * mmap.PAGESIZE


def read_process_usage(process: int) -> dict[str, int]:
    """Returns a process's anonymous, resident and read bytes; zeros if it has ended."""
    fields: dict[str, int] = {}
    for name, scale in (("status", 1024), ("io", 1)):
        try:
            lines = Path(f"/proc/{process}/{name}").read_text().splitlines()
        except OSError:
            continue
        pairs = (line.split() for line in lines)
        fields |= {p[0]: int(p[1]) * scale for p in pairs if len(p) > 1 and p[1].isdecimal()}
    names = {"anonymous": "RssAnon:", "resident": "VmRSS:", "read": "read_bytes:"}
    return {key: fields.get(name, 0) for key, name in names.items()}


def measure_command(
    command: list[str], folder: Path | None = None, output: Path = Path(os.devnull)
) -> dict[str, Any]:
    """Runs a command, writes what it prints to a file, returns its seconds and peak memory."""
    start, peaks = time.perf_counter(), {"anonymous": 0, "resident": 0, "read": 0}
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)
    while process.poll() is None:
        peaks = {
            name: max(peaks[name], size) for name, size in read_process_usage(process.pid).items()
        }
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode} of: {' '.join(command)}")
    return {"seconds": time.perf_counter() - start, **peaks}


def run_side(who: str, folder: Path, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Makes one video with one side and returns its seconds, peak memory and stages."""
    file = out / f"{who}.mp4"
    frames, steps = str(options.frames), str(options.steps)
    scales = [f"{scale:g}" for scale in options.guidance]
    if who == "theirs":
        request = [PROMPT, PRESETS[options.task].negative_prompt, *options.size.split("*")]
        values = [str(folder), str(file), options.precision, *request, frames, steps, *scales]
        usage = measure_command([sys.executable, "-c", THEIRS, *values])
        stages = json.loads(Path(f"{file}.seconds").read_text())
        return {**usage, "stages": _split_stages(stages, usage["seconds"])}
    flags = ["--task", options.task, "--prompt", PROMPT, "--size", options.size]
    flags += ["--frame_num", frames, "--sample_steps", steps, "--base_seed", "0"]
    flags += ["--save_file", str(file)]
    if who == "official":
        flags += ["--ckpt_dir", str(options.official_folder.absolute())]
        flags += ["--sample_guide_scale", scales[-1], "--offload_model", "True"]
        return measure_command([sys.executable, "generate.py", *flags], options.official)
    flags += ["--ckpt_dir", str(folder), "--sample_guide_scale", ",".join(scales)]
    usage = measure_command(
        [sys.executable, "-c", OURS, *flags, "--precision", options.precision, *options.given]
    )
    record = json.loads(file.with_suffix(".json").read_text())
    return {**usage, "stages": _split_stages(record["seconds"], usage["seconds"])}


def _split_stages(seconds: dict[str, float], total_seconds: float) -> dict[str, float]:
    """Returns the seconds of each stage; "start" is the time outside all other stages."""
    stages = {name: seconds.get(name, 0.0) for name in STAGES[1:]}
    return {"start": total_seconds - sum(stages.values()), **stages}


def main(argv: Sequence[str] | None = None) -> None:
    arguments, extra_flags = list(sys.argv[1:] if argv is None else argv), list[str]()
    if "--" in arguments:
        arguments, extra_flags = (
            arguments[: arguments.index("--")],
            arguments[arguments.index("--") + 1 :],
        )
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--task",
        default="t2v-1.3B",
        help="task of --folder; without it one of " + ", ".join(SIZES),
    )
    parser.add_argument("--folder", type=Path, help="a checkpoint in diffusers' layout")
    parser.add_argument("--official", type=Path, help="a clone of the official code")
    parser.add_argument(
        "--official_folder", type=Path, help="the same weights in the official layout"
    )
    parser.add_argument("--size", default="320*192")
    parser.add_argument("--frames", type=make_argument_type(read_frame_num), default=17)
    parser.add_argument("--steps", type=make_argument_type(integer(1, 1000)), default=8)
    parser.add_argument(
        "--guidance",
        type=make_argument_type(real(0, 100, exclude_min=True)),
        nargs="+",
        default=[5.0],
        help="guidance scales LOW HIGH, or one for both",
    )
    help_text = "of the DiT; diffusers' text encoder stays in bf16"
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help=help_text)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=5)
    parser.add_argument("--cache", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument(
        "--keep", type=Path, help="folder that keeps the written checkpoint for later runs"
    )
    add_json_option(parser)
    options = parser.parse_args(arguments, argparse.Namespace(given=extra_flags))
    read_size("--size", options.size)
    if options.folder is None and options.task not in SIZES:
        parser.error(f"--task {options.task} needs --folder")
    if (options.official is None) != (options.official_folder is None):
        parser.error("--official and --official_folder need each other")
    names = ("task", "size", "frames", "steps", "precision")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings["guidance"] = options.guidance[0] if len(options.guidance) == 1 else options.guidance
    sides = ["ours", "theirs"] + ["official"] * (options.official is not None)
    results = read_earlier_runs(options.json, is_run_record)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or (options.keep or Path(temporary)) / options.task
        if not folder.is_dir():
            with write_folder(folder) as part, get_context("spawn").Pool(1) as pool:
                pool.apply(write_diffusers_checkpoint, (options.task, part))
        for cache in options.cache:
            for number in range(options.rounds):
                for who in sides[:: -1 if number % 2 else 1]:
                    key = settings | {"cache": cache, "round": number, "who": who}
                    if any(key.items() <= run_record.items() for run_record in results):
                        continue
                    weights = options.official_folder if who == "official" else folder
                    (drop_pages if cache == "cold" else fill_pages)(weights)
                    cached = sum(map(count_cached_bytes, weights.rglob("*.safetensors")))
                    figures = run_side(who, folder, options, Path(temporary))
                    results.append(key | {"cached": cached} | figures)
                    print(results[-1], flush=True)
                    write_json(options.json, CPU, results)
            of_cache = (settings | {"cache": cache}).items()
            print_medians(
                cache, [run_record for run_record in results if of_cache <= run_record.items()]
            )


def is_run_record(run_record: dict[str, Any]) -> bool:
    """Whether a JSON object has the fields of a run, with numbers where numbers belong."""
    stages, rounds = run_record.get("stages") or {}, run_record.get("round")
    numbers = [
        run_record.get("seconds"),
        rounds,
        *(stages.values() if isinstance(stages, dict) else ""),
    ]
    numbers += [
        run_record[name] for name in ("resident", "anonymous", "read") if name in run_record
    ]
    return run_record.get("who") in SIDES and all(isinstance(x, int | float) for x in numbers)


def print_medians(cache: str, results: list[dict[str, Any]]) -> None:
    """Prints the medians of each side, and the ratios of ours to each other side within rounds."""
    results = sorted(results, key=lambda run_record: run_record["round"])
    for name, unit in (("seconds", 1.0), ("resident", 1e9), ("anonymous", 1e9), ("read", 1e9)):
        values = {
            who: _select_figure(results, who, lambda run_record, n=name: run_record.get(n))
            for who in SIDES
        }
        _print_ratios(f"{cache}, {name}{'' if unit == 1 else ' GB'}", values, unit)
    for stage in STAGES:
        values = {
            who: _select_figure(
                results, who, lambda run_record, n=stage: (run_record.get("stages") or {}).get(n)
            )
            for who in SIDES
        }
        _print_ratios(f"{cache}, seconds of {stage}", values, 1.0)


def _select_figure(results: list[dict[str, Any]], who: str, figure: Any) -> dict[int, float]:
    """Returns one figure of one side: round -> value, for the rounds that have it."""
    figures = {
        run_record["round"]: figure(run_record)
        for run_record in results
        if run_record["who"] == who
    }
    return {number: value for number, value in figures.items() if value is not None}


def _print_ratios(name: str, values: dict[str, dict[int, float]], unit: float) -> None:
    ours = values["ours"]
    for who in SIDES[1:]:
        both = sorted(ours.keys() & values[who].keys())
        if not both:
            continue
        mine, other = ([side[n] / unit for n in both] for side in (ours, values[who]))
        line = f"{name}: ours {statistics.median(mine):.1f}, {who} {statistics.median(other):.1f}"
        if all(other):
            ratio = compute_ratios(mine, other)
            line += f", ratio {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        print(line)


if __name__ == "__main__":
    sys.exit(run_program(main))
