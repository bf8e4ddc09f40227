"""Step 9: loading of weights from files to the device, read-ahead, and switching of experts."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.device_check.bench import Bench
from tools.device_check.steps import (
    SLOW,
    Figure,
    Measurements,
    make_error,
    make_line,
    make_share,
)
from wan.checkpoint.load import ModelSpec, make_dit_dtype_rule, read_headers
from wan.modules.model import WanModel
from wan.pipeline.pipeline import Experts
from wan.settings.errors import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_SHARE = 0.25  # of the rate of a plain copy to the device, for files in the page cache
RESIDENT = 0.95  # share of a prefetched file that must be in memory
READAHEAD_TIMEOUT = 3.0  # seconds without progress after which read-ahead counts as ended
MAX_NETWORKS = 1.2  # most networks in memory after experts were switched
_PAGE = mmap.PAGESIZE


def _make_config(bench: Bench) -> dict[str, Any]:
    """Makes the config of a network of 1 GB in float32 (the 1.3B's width); on a CPU 100 MB."""
    if bench.large:
        return {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 5}
    return {"dim": 768, "ffn_dim": 3072, "num_heads": 6, "num_layers": 2}


def _write_weights(bench: Bench, kind: str) -> Path:
    """Writes a file of random weights once and syncs it to the disk; returns its path."""
    path = bench.folder / f"{kind}.safetensors"
    if not path.exists():
        with torch.device("meta"):
            named = WanModel(**_make_config(bench)).named_parameters()
        torch.manual_seed(0)
        save_file({name: torch.randn(x.shape).to(DTYPES[kind]) for name, x in named}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return path


def _count_bytes(model: WanModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)


def _make_spec(bench: Bench, path: Path) -> ModelSpec[WanModel]:
    make_model = partial(WanModel, **_make_config(bench))
    return ModelSpec("DiT", make_model, read_headers(path, lambda name: name), path)


def _drop_pages(path: Path) -> None:
    """Drops the file's pages from the page cache; InputError if the system keeps them."""
    if not hasattr(os, "posix_fadvise"):
        raise InputError("the system does not let a program drop a file's pages")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if measure_resident_share(path) >= 0.05:
        raise InputError("the system keeps the file in memory")


def measure_resident_share(path: Path) -> float:
    """Returns the share of a file's pages that are in memory (mincore)."""
    size = path.stat().st_size
    pages = -(-size // _PAGE)
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(view))
        failed = library.mincore(address, ctypes.c_size_t(size), held)
        del view
    if failed:
        raise InputError(f"mincore: {os.strerror(ctypes.get_errno())}")
    return sum(page & 1 for page in held) / pages


def check_loading(bench: Bench) -> Measurements:
    """Checks loading of files of both dtypes, from the disk and from memory."""

    def measure_loading(path: Path, state: str) -> list[Figure]:
        if state == "cold":
            _drop_pages(path)
        else:
            path.read_bytes()
        blueprint = _make_spec(bench, path)
        blueprint.check()
        compute = torch.bfloat16 if bench.device.type != "cpu" else torch.float32
        start = time.perf_counter()
        model = blueprint.load(
            device=bench.torch_device, dtype_of=make_dit_dtype_rule(compute, False)
        )
        bench.device.synchronize()
        seconds, size = time.perf_counter() - start, path.stat().st_size
        expected, far = load_file(path), 0.0
        for name, parameter in model.named_parameters():
            want = expected[name].to(parameter.dtype).float()
            far = max(far, float((parameter.data.cpu().float() - want).abs().max()))
        rate = Figure("of the file", size / seconds / 1e9, "GB/s")
        figures = [make_error(far, 0.0), Figure("time", seconds, "s"), rate]
        if state == "hot":
            least = LEAST_SHARE if bench.large else None
            kept_rate = _count_bytes(model) / seconds
            figures.append(make_share("of a plain copy's rate", kept_rate / to_device, least))
        return figures

    source = torch.ones(256 << 20 if bench.large else 32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source, device=bench.torch_device)
    to_device = source.nbytes / bench.measure_seconds(lambda: target.copy_(source))
    yield make_line("plain copy to the device", Figure("rate", to_device / 1e9, "GB/s"))
    for kind in DTYPES:
        path = _write_weights(bench, kind)
        for state in ("cold", "hot"):
            label = f"{kind} file, {state}, {path.stat().st_size / 1e6:.0f} MB"
            yield label, partial(measure_loading, path, state)


def check_readahead(bench: Bench) -> Measurements:
    """Checks that `Experts.prefetch` reads a complete file into memory."""
    path = _write_weights(bench, "fp32")
    _drop_pages(path)

    def never(name: str) -> WanModel:
        raise AssertionError(f"{name} is not to be loaded")

    start = time.perf_counter()
    Experts(never, offload=True, files={"dit": [path]}).prefetch("dit")
    held, seconds = 0.0, 0.0
    while held < RESIDENT and time.perf_counter() - start - seconds < READAHEAD_TIMEOUT:
        time.sleep(0.05)
        more = measure_resident_share(path)
        if more > held:
            held, seconds = more, time.perf_counter() - start
    rate = held * path.stat().st_size / max(seconds, 1e-9)
    yield make_line(
        f"a file of {path.stat().st_size / 1e6:.0f} MB",
        make_share("of it in memory", held, RESIDENT),
        Figure("after", seconds, "s"),
        Figure("rate", rate / 1e9, "GB/s"),
    )


def check_experts(bench: Bench) -> Measurements:
    """Switches between two offloaded experts three times; measures seconds and memory."""
    path = _write_weights(bench, "bf16")

    def load(_: str) -> WanModel:
        dtype_of = make_dit_dtype_rule(torch.bfloat16, convert_all=True)
        return _make_spec(bench, path).load(device=bench.torch_device, dtype_of=dtype_of)

    def count_held_bytes() -> int:
        """Returns the allocated bytes of an accelerator; on a CPU those of all live networks."""
        gc.collect()
        if bench.large:
            return int(
                torch.get_device_module(bench.torch_device).memory_allocated(bench.torch_device)
            )
        return sum(
            _count_bytes(network) for network in gc.get_objects() if isinstance(network, WanModel)
        )

    def measure_memory(most: float) -> list[Figure]:
        more = count_held_bytes() - base
        count = Figure("networks", more / size, "", most, verdict=SLOW)
        return [Figure("held", more / 1e9, "GB"), count]

    pair, base = Experts(load, offload=True), count_held_bytes()
    size = _count_bytes(pair.get("high_noise"))
    for name in ("low_noise", "high_noise", "low_noise"):
        start = time.perf_counter()
        pair.get(name)
        bench.device.synchronize()
        elapsed = Figure("time", time.perf_counter() - start, "s")
        yield make_line(f"switch to {name}", elapsed, *measure_memory(MAX_NETWORKS))
    pair.release()
    bench.device.empty_cache()
    yield make_line("released", *measure_memory(MAX_NETWORKS - 1))
