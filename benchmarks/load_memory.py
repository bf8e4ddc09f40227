"""Anonymous host memory while a DiT is loaded, against the bytes that stay resident.

    python benchmarks/load_memory.py --stored fp32 --precision bf16

Writes a synthetic sharded checkpoint in a temporary folder, loads it with the code of generate.py
in this process, and samples RssAnon of /proc (Linux) every few milliseconds. The level after all
imports is subtracted from both the peak and the final value. Pages of the mapped files are not
anonymous: the system can drop them at any time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wan.checkpoint.layout import describe
from wan.checkpoint.load import Blueprint, dit_dtypes
from wan.modules.model import WanModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rss_anon() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status: this needs Linux")


def write_checkpoint(folder: Path, gigabytes: float, dtype: torch.dtype, shard_bytes: int) -> int:
    """A folder of shards with an index, written shard by shard; returns its bytes."""
    config: dict[str, Any] = {"model_type": "t2v", "dim": 1536, "ffn_dim": 8960, "num_heads": 12}
    per_layer = 8 * 1536**2 + 2 * 1536 * 8960
    layers = max(1, round(gigabytes * 1e9 / (per_layer * dtype.itemsize)))
    with torch.device("meta"):
        model = WanModel(**config, num_layers=layers)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    written, number = 0, 0

    def flush() -> None:
        nonlocal shard, number
        number += 1
        name = f"diffusion_pytorch_model-{number:05d}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard = {}

    for name, tensor in model.state_dict().items():
        shard[name] = torch.full(tensor.shape, 0.01, dtype=dtype)
        written += tensor.numel() * dtype.itemsize
        if sum(t.numel() * t.element_size() for t in shard.values()) > shard_bytes:
            flush()
    flush()
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": layers}))
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return written


def write_in_another_process(folder: Path, gigabytes: float, stored: str) -> int:
    """Memory that writing frees in this process would be reused and hide what loading takes."""
    arguments = (folder, gigabytes, DTYPES[stored], 300 << 20)
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(write_checkpoint, arguments)


def blueprint(folder: Path) -> Blueprint[WanModel]:
    """The one network of a folder."""
    files = describe(folder).experts["dit"]
    return Blueprint("DiT", lambda: WanModel(**files.config), files.tensors, folder)


class Sampler(threading.Thread):
    """Highest RssAnon while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.running = 0, True

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, rss_anon())
            time.sleep(0.003)


def measure(folder: Path, precision: str) -> dict[str, float]:
    dtype_of = dit_dtypes(DTYPES[precision], convert_all=False)
    base = rss_anon()
    sampler = Sampler()
    sampler.start()
    start = time.perf_counter()
    model = blueprint(folder).load(device=torch.device("cpu"), dtype_of=dtype_of)
    seconds = time.perf_counter() - start
    sampler.running = False
    sampler.join()
    resident = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "resident_bytes": resident,
        "peak_anonymous_bytes": sampler.peak - base,
        "final_anonymous_bytes": rss_anon() - base,
        "peak_over_resident": (sampler.peak - base) / resident,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the files")
    parser.add_argument("--stored", choices=DTYPES, default="fp32")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_in_another_process(Path(folder), options.gigabytes, options.stored)
        result: dict[str, Any] = {
            "command": sys.argv,
            "torch": torch.__version__,
            "file_bytes": size,
            **measure(Path(folder), options.precision),
        }
    print(
        f"files {size / 1e9:.2f} GB ({options.stored}), resident "
        f"{result['resident_bytes'] / 1e9:.2f} GB ({options.precision}), anonymous peak "
        f"{result['peak_anonymous_bytes'] / 1e9:.2f} GB = "
        f"{result['peak_over_resident']:.3f} x resident, {result['seconds']:.1f} s"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
