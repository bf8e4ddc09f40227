"""Measures anonymous memory and seconds of runs of the published sizes, by `--offload_model`.

    python -m benchmarks.residency --task ti2v-5B --ways true block "block --resident_blocks 10"
    python -m benchmarks.residency --task t2v-A14B --layers 8 --ways block -- --sample_steps 2
    python -m benchmarks.residency --weights bf16 Q8_0 Q4_K

The program writes a randomly initialized checkpoint of the task's sizes in bfloat16 (the VAE in
float32) into a temporary folder, with --weights also its DiT as GGUF files. It runs generate.py
for each value of --ways in turn and samples RssAnon of /proc (Linux) during the run. Pages of
mapped files are not anonymous: the system drops them when memory is short. A run that exceeds
--limit is killed and has no result. Arguments after `--` are passed to generate.py. For each run
the program prints the exit code, the peak, the seconds, and the bytes that such a run copies to a
GPU according to `--plan --device cuda`; the stages' seconds are those of the run's record. The
JSON file has the same figures.

All layers of a network have the same values. --layers N writes only N layers to the DiT's file; the
others are holes in the file, which read as zeros and take no disk space. Both experts link to one
file. Such a run needs the memory of the complete network, but its seconds exclude disk reads.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.common import results_file, write_json
from tools.gguf_files import get_quant_type, quantize
from tools.safetensors_stream import stream_safetensors
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint import lora
from wan.checkpoint.keymaps import rename_t5_to_official, rename_vae_to_official
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import copy_rows, open_sources
from wan.checkpoint.merge_lora import merge_loras
from wan.modules import t5 as text
from wan.modules.model import WanModel
from wan.modules.vae import video_vae
from wan.settings.command import Loras
from wan.settings.presets import PRESETS
from wan.settings.values import integer, real
from wan.testing.random_checkpoint import train_tokenizer, write_tokenizer
from wan.utils.files import write_folder

try:
    import gguf
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)

SIZES: dict[str, dict[str, Any]] = {
    "t2v-1.3B": {"model_type": "t2v", "in_dim": 16, "out_dim": 16, "num_heads": 12},
    "ti2v-5B": {"model_type": "ti2v", "in_dim": 48, "out_dim": 48, "num_heads": 24},
    "t2v-A14B": {"model_type": "t2v", "in_dim": 16, "out_dim": 16, "num_heads": 40},
}
LAYERS = {"t2v-1.3B": 30, "ti2v-5B": 30, "t2v-A14B": 40}
QUICK = ["--size", "320*192", "--frame_num", "9", "--sample_steps", "2"]
QUICK += ["--precision", "bf16", "--device", "cpu", "--base_seed", "0"]


def draw_parameters(network: nn.Module, layer: str, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yields names and random values of parameters; all layers share one layer's values."""
    torch.manual_seed(0)
    cached: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        match = re.search(rf"{layer}\.(\d+)\.", name)
        if match is not None and int(match[1]) >= layers:
            continue
        key = name if match is None else name.replace(match[0], "")
        if key not in cached:
            mean = parameter.dim() == 1 and name.endswith("weight")
            std = 0.1 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            cached[key] = torch.randn(parameter.shape) * std + mean
        yield name, cached[key]
        if match is None:
            del cached[key]


def save_network(network: nn.Module, path: Path, rename: Any = str, **draw_options: Any) -> None:
    form = {rename(n): (torch.bfloat16, tuple(p.shape)) for n, p in network.named_parameters()}
    tensors = ((rename(name), x.bfloat16()) for name, x in draw_parameters(network, **draw_options))
    stream_safetensors(path, form, tensors, path.name)
    size = sum(2 * torch.Size(shape).numel() for _, shape in form.values())
    with path.open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        file.truncate(8 + header + size)


def save_gguf(network: nn.Module, path: Path, kind: str, layers: int) -> None:
    """Writes a GGUF file: matrices of the blocks in this kind, all else in float32.

    A layer is quantized once, since all layers share their values.
    """
    writer = gguf.GGUFWriter(path, "wan")
    quantized: dict[int, Any] = {}
    for name, value in draw_parameters(network, "blocks", layers):
        if value.dim() != 2 or not name.startswith("blocks."):
            writer.add_tensor(name, value.float().numpy())
            continue
        if value.data_ptr() not in quantized:
            quantized[value.data_ptr()] = quantize(value, kind)
        writer.add_tensor(name, quantized[value.data_ptr()], raw_dtype=get_quant_type(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf_folder(task: str, source: Path, kind: str, out: Path) -> None:
    """Writes a folder with the DiT as a GGUF file, and links to the other files."""
    for path in source.iterdir():
        if not path.name.startswith("diffusion_pytorch_model"):
            (out / path.name).symlink_to(path)
    with torch.device("meta"):
        dit = WanModel(**make_config(task), text_dim=4096)
    save_gguf(dit, out / f"Wan2.2-{task}-{kind}.gguf", kind, LAYERS[task])


def make_config(task: str) -> dict[str, Any]:
    preset = PRESETS[task]
    config = {**SIZES[task], "dim": preset.dim, "ffn_dim": preset.ffn_dim, "freq_dim": 256}
    return config | {"num_layers": LAYERS[task], "text_len": 512, "eps": 1e-6}


def write_official_checkpoint(task: str, out: Path, layers: int | None) -> None:
    """Writes the checkpoint in the official layout."""
    preset, config = PRESETS[task], make_config(task)
    with torch.device("meta"):
        dit = WanModel(**config, text_dim=4096)
        encoder, autoencoder = (
            text.build_published_text_encoder(),
            video_vae.build_published_vae(preset.vae),
        )
    names = ["."] if len(preset.experts) == 1 else ["high_noise_model", "low_noise_model"]
    (out / names[0]).mkdir(exist_ok=True)
    (out / names[0] / "config.json").write_text(json.dumps(config))
    file = out / names[0] / "diffusion_pytorch_model.safetensors"
    save_network(dit, file, layer="blocks", layers=layers or LAYERS[task])
    for other in names[1:]:
        (out / other).symlink_to(out / names[0])
    stem = out / "models_t5_umt5-xxl-enc-bf16.safetensors"
    save_network(encoder, stem, rename_t5_to_official, layer="block", layers=24)
    residual = autoencoder.version.shortcuts
    state = {
        rename_vae_to_official(n, residual): x
        for n, x in draw_parameters(autoencoder, "no layers", 1)
    }
    torch.save(state, out / f"Wan{preset.vae}_VAE.pth")
    write_tokenizer(out / "google" / "umt5-xxl", train_tokenizer())


def read_rss_anon(process: int) -> int:
    """Returns a process's anonymous bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def read_cpu_seconds() -> float:
    """Returns the CPU time of all reaped child processes, which other load does not distort."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_generate(folder: Path, way: str, arguments: list[str], limit: float) -> dict[str, Any]:
    """Runs generate.py and samples its memory; kills it where its memory exceeds the limit."""
    video = folder / "video.mp4"
    command = [sys.executable, "generate.py", *arguments, "--save_file", str(video)]
    command += ["--offload_model", *way.split()]
    start, worked, peak = time.perf_counter(), read_cpu_seconds(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, read_rss_anon(process.pid))
        if peak > limit:
            process.kill()
        time.sleep(0.01)
    result: dict[str, Any] = {"way": way, "code": process.returncode, "anonymous_bytes": peak}
    result |= {"seconds": time.perf_counter() - start, "cpu_seconds": read_cpu_seconds() - worked}
    if process.returncode == 0:
        record = json.loads(video.with_suffix(".json").read_text())
        result |= {"stages": record["seconds"], "resident_bytes": record["peak_memory_bytes"]}
    return result


def read_planned_copies(arguments: list[str], way: str) -> str:
    """Returns the plan's line of the bytes copied to a GPU per step; "" without copies."""
    flags = [*arguments, "--device", "cuda", "--offload_model", *way.split(), "--plan"]
    command = [sys.executable, "generate.py", *flags]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next((line for line in text.splitlines() if line.startswith("Copied per step")), "")


def time_lora_merge(folder: Path, out: Path, rank: int) -> dict[str, float]:
    """Times reading one block into memory, without and with a LoRA on all its linear layers."""
    checkpoint = inspect_checkpoint(folder)
    name, files = next(iter(checkpoint.experts.items()))
    linears = {n: i for n, i in files.tensors.items() if n.startswith("blocks.0.")}
    pairs = {}
    for key, info in linears.items():
        if len(info.shape) == 2:
            layer, (rows, columns) = key.removesuffix(".weight"), info.shape
            pairs[f"{layer}.lora_A.weight"] = torch.randn(rank, columns).bfloat16()
            pairs[f"{layer}.lora_B.weight"] = torch.randn(rows, rank).bfloat16()
    save_file(pairs, out / "lora.safetensors")
    loras = lora.resolve_loras(Loras((str(out / "lora.safetensors"),)), checkpoint)
    plain = {key: source for key, source in open_sources(linears).items() if len(source.shape) == 2}
    with_lora = {key: merge_loras(plain, loras[name])[key] for key in plain}
    seconds = {}
    for label, sources in (("first", plain), ("plain", plain), ("with LoRA", with_lora)):
        memory = [torch.empty(source.shape, dtype=torch.bfloat16) for source in sources.values()]
        start = time.perf_counter()
        for target, source in zip(memory, sources.values(), strict=True):
            copy_rows(target, source)
        seconds[label] = time.perf_counter() - start
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    program_arguments, generate_flags = list(sys.argv[1:] if argv is None else argv), list[str]()
    if "--" in program_arguments:
        program_arguments, generate_flags = (
            program_arguments[: program_arguments.index("--")],
            program_arguments[program_arguments.index("--") + 1 :],
        )
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=SIZES, default="ti2v-5B")
    parser.add_argument(
        "--layers", type=make_argument_type(integer(1, 1000)), help="layers in the DiT's file (all)"
    )
    parser.add_argument("--weights", nargs="+", default=["bf16"], help="bf16 or kinds of GGUF")
    parser.add_argument("--ways", nargs="+", default=["true", "block"])
    parser.add_argument(
        "--limit",
        type=make_argument_type(real(0, 1e5, exclude_min=True)),
        default=14,
        help="GB of anonymous memory",
    )
    parser.add_argument(
        "--keep", type=Path, help="folder that keeps the written checkpoint for later runs"
    )
    parser.add_argument(
        "--lora",
        type=make_argument_type(integer(1, 10_000)),
        metavar="RANK",
        help="only time the merging of a LoRA of this rank",
    )
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(program_arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / options.task
        if not folder.is_dir():
            with write_folder(folder) as part, get_context("spawn").Pool(1) as pool:
                pool.apply(write_official_checkpoint, (options.task, part, options.layers))
        folders = {"bf16": folder}
        for kind in {*options.weights} - {"bf16"}:
            folders[kind] = folder.with_name(f"{folder.name}-{kind}")
            if not folders[kind].is_dir():
                with write_folder(folders[kind]) as part, get_context("spawn").Pool(1) as pool:
                    pool.apply(write_gguf_folder, (options.task, folder, kind, part))
        results: list[dict[str, Any]] = []
        if options.lora:
            options.ways = []
            results.append(time_lora_merge(folder, Path(temporary), options.lora))
            print("Seconds of a block:", results[0])
        for kind, way in product(options.weights, options.ways):
            arguments = [
                "--task",
                options.task,
                "--ckpt_dir",
                str(folders[kind]),
                *QUICK,
                *generate_flags,
            ]
            os.sync()
            file = next(iter([*folders[kind].glob("*.gguf"), *folders[kind].rglob("diffusion*")]))
            results.append(run_generate(Path(temporary), way, arguments, options.limit * 1e9))
            results[-1] |= {"weights": kind, "file_bytes": file.stat().st_size}
            results[-1] |= {"plan": read_planned_copies(arguments, way)}
            stages = ", ".join(f"{n} {s:.1f}" for n, s in results[-1].get("stages", {}).items())
            code, size, seconds, worked = (
                results[-1][key] for key in ("code", "anonymous_bytes", "seconds", "cpu_seconds")
            )
            print(
                f"{kind} ({results[-1]['file_bytes'] / 1e9:.2f} GB), {way}: exit code {code}, "
                f"anonymous peak {size / 1e9:.2f} GB, {seconds:.1f} s, "
                f"CPU {worked:.1f} s ({stages}) {results[-1]['plan']}",
                flush=True,
            )
    write_json(options.json, torch.device("cpu"), results)


if __name__ == "__main__":
    sys.exit(run_program(main))
