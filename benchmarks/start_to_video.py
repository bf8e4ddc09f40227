"""Seconds and memory from the start of a process to its mp4: this command line and diffusers.

    python -m benchmarks.start_to_video --rounds 5 --json results/start.json
    python -m benchmarks.start_to_video --task ti2v-5B --rounds 5 --cache warm

The program writes a randomly initialised checkpoint of the published sizes in diffusers' layout
(the DiT and the text encoder in bfloat16, the VAE in float32). Then each of the two makes the same
video from it in a process of its own: "ours" is generate.py, "theirs" is diffusers' WanPipeline
with its defaults. Every round runs each once, in alternating order. The pages of the checkpoint are
dropped from the page cache before a cold run; a warm run finds them as the run before left them.

Memory is sampled from /proc (Linux) every 10 ms: "resident" is all of it, "anonymous" is what is
not pages of a file. The program prints medians and the ratios of each round; the JSON file has all
runs, with the command line's own stages. It is written after each run; with the same file and
settings, a program that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import torch

from benchmarks.common import CPU, ratios, write_json
from benchmarks.residency import drawn
from tools.safetensors_stream import write
from wan.pipeline import text
from wan.pipeline.tiny import VAE_22, train_tokenizer, write_tokenizer
from wan.pipeline.tiny import write_json as write_object

SIZES: dict[str, dict[str, int]] = {
    "t2v-1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "ti2v-5B": {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30}
    | {"in_channels": 48, "out_channels": 48},
}
PROMPT = "a red balloon over a green field"
THEIRS = """
import sys
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.utils import export_to_video

folder, out, prompt, width, height, frames, steps, guidance = sys.argv[1:]
vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
pipe = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=torch.bfloat16)
video = pipe(
    prompt=prompt,
    width=int(width),
    height=int(height),
    num_frames=int(frames),
    num_inference_steps=int(steps),
    guidance_scale=float(guidance),
    generator=torch.Generator().manual_seed(0),
).frames[0]
export_to_video(video, out, fps=16)
"""


def make(task: str, folder: Path) -> None:
    """Writes the checkpoint tensor by tensor: no network is ever whole in memory."""
    folder.mkdir(parents=True)
    vae: Any = {"base_dim": 160, "decoder_base_dim": 256, **VAE_22} if task == "ti2v-5B" else {}
    with torch.device("meta"):
        networks: dict[str, tuple[Any, torch.dtype, str]] = {
            "transformer": (
                diffusers.WanTransformer3DModel(**SIZES[task]),
                torch.bfloat16,
                "blocks",
            ),
            "text_encoder": (text.published(), torch.bfloat16, "block"),
            "vae": (diffusers.AutoencoderKLWan(**vae), torch.float32, "no layers"),
        }
    for name, (network, dtype, layer) in networks.items():
        form = {key: (dtype, tuple(x.shape)) for key, x in network.named_parameters()}
        values = ((key, x.to(dtype)) for key, x in drawn(network, layer, len(form)))
        (folder / name).mkdir()
        if name == "text_encoder":
            network.config.save_pretrained(folder / name)
            write(folder / name / "model.safetensors", form, values, name)
        else:
            network.save_config(folder / name)
            write(folder / name / "diffusion_pytorch_model.safetensors", form, values, name)
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
    """Drops the files from the page cache, which nobody must have mapped."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(process: int) -> dict[str, int]:
    """Bytes of a process; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        lines = []
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}
    return {"anonymous": found.get("RssAnon", 0), "resident": found.get("VmRSS", 0)}


def watch(command: list[str]) -> dict[str, Any]:
    """Runs a command; seconds to its end and its peaks of memory."""
    start, peaks = time.perf_counter(), {"anonymous": 0, "resident": 0}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peaks = {name: max(peaks[name], size) for name, size in memory(process.pid).items()}
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode} of: {' '.join(command)}")
    return {"seconds": time.perf_counter() - start, **peaks}


def run(who: str, folder: Path, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Makes one video."""
    video = out / f"{who}.mp4"
    frames, steps, guidance = str(options.frames), str(options.steps), str(options.guidance)
    if who == "theirs":
        size = options.size.split("*")
        values = [str(folder), str(video), PROMPT, *size, frames, steps, guidance]
        return watch([sys.executable, "-c", THEIRS, *values])
    flags = ["--task", options.task, "--ckpt_dir", str(folder), "--prompt", PROMPT]
    flags += ["--size", options.size, "--frame_num", frames, "--sample_steps", steps]
    flags += ["--sample_guide_scale", guidance, "--base_seed", "0", "--save_file", str(video)]
    found = watch([sys.executable, "generate.py", *flags, "--precision", "bf16", *options.given])
    record = json.loads(video.with_suffix(".json").read_text())
    return {**found, "stages": record["seconds"]}


def main() -> None:
    own, given = sys.argv[1:], list[str]()
    if "--" in own:
        own, given = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=SIZES, default="t2v-1.3B")
    parser.add_argument("--size", default="320*192")
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoint, used again")
    parser.add_argument("--json")
    options = parser.parse_args(own, argparse.Namespace(given=given))
    names = ("task", "size", "frames", "steps", "guidance")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    results = continued(options.json)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)) / options.task
        if not folder.is_dir():
            with get_context("spawn").Pool(1) as pool:
                pool.apply(make, (options.task, folder))
        for cache in options.cache:
            for number in range(options.rounds):
                for who in ("ours", "theirs")[:: -1 if number % 2 else 1]:
                    key = settings | {"cache": cache, "round": number, "who": who}
                    if any(key.items() <= one.items() for one in results):
                        continue
                    if cache == "cold":
                        drop_pages(folder)
                    found = run(who, folder, options, Path(temporary))
                    results.append(key | found)
                    print(results[-1], flush=True)
                    write_json(options.json, CPU, results)
            of_cache = (settings | {"cache": cache}).items()
            summarise(cache, [one for one in results if of_cache <= one.items()])


def continued(path: str | None) -> list[dict[str, Any]]:
    """The runs of earlier calls, also those with other settings."""
    if path is None or not Path(path).is_file():
        return []
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["results"]
    return found


def summarise(cache: str, results: list[dict[str, Any]]) -> None:
    """Prints the medians of both and the ratios of the rounds."""
    results = sorted(results, key=lambda one: one["round"])
    for name, unit in (("seconds", 1.0), ("resident", 1e9), ("anonymous", 1e9)):
        ours, theirs = (
            [one[name] / unit for one in results if one["who"] == who] for who in ("ours", "theirs")
        )
        ratio = ratios(ours, theirs)
        print(
            f"{cache}, {name}{'' if unit == 1 else ' GB'}: ours {statistics.median(ours):.1f}, "
            f"theirs {statistics.median(theirs):.1f}, "
            f"ratio {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        )


if __name__ == "__main__":
    main()
