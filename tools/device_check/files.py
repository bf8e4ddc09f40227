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
from tools.device_check.steps import SLOW, Figure, Measured, UnavailableError, error, line, share
from wan.checkpoint.load import ModelSpec, make_dit_dtype_rule, read_headers
from wan.modules.model import WanModel
from wan.pipeline.pipeline import Experts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_SHARE = 0.25  # of the rate of a plain copy to the device, for files in the page cache
RESIDENT = 0.95  # share of a prefetched file that must be in memory
PATIENCE = 3.0  # seconds without progress after which read-ahead counts as ended
KEPT = 1.2  # most networks in memory after experts were switched
_PAGE = mmap.PAGESIZE


def _config(bench: Bench) -> dict[str, Any]:
    """Make the config of a network of 1 GB in float32 (the 1.3B's width); on a CPU 100 MB."""
    if bench.large:
        return {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 5}
    return {"dim": 768, "ffn_dim": 3072, "num_heads": 6, "num_layers": 2}


def _written(bench: Bench, kind: str) -> Path:
    """Write a file of random weights once and sync it to the disk; return its path."""
    path = bench.folder / f"{kind}.safetensors"
    if not path.exists():
        with torch.device("meta"):
            named = WanModel(**_config(bench)).named_parameters()
        torch.manual_seed(0)
        save_file({name: torch.randn(x.shape).to(DTYPES[kind]) for name, x in named}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return path


def _bytes(model: WanModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)


def _blueprint(bench: Bench, path: Path) -> ModelSpec[WanModel]:
    made = partial(WanModel, **_config(bench))
    return ModelSpec("DiT", made, read_headers(path, lambda name: name), path)


def _forget(path: Path) -> None:
    """Drop the file's pages from the page cache; UnavailableError if the system keeps them."""
    if not hasattr(os, "posix_fadvise"):
        raise UnavailableError("the system does not let a program drop a file's pages")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path) >= 0.05:
        raise UnavailableError("the system keeps the file in memory")


def resident(path: Path) -> float:
    """Return the share of a file's pages that are in memory (mincore)."""
    size = path.stat().st_size
    pages = -(-size // _PAGE)
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(mapped)
        place = ctypes.c_void_p(ctypes.addressof(view))
        failed = library.mincore(place, ctypes.c_size_t(size), held)
        del view
    if failed:
        raise UnavailableError(f"mincore: {os.strerror(ctypes.get_errno())}")
    return sum(page & 1 for page in held) / pages


def loading(bench: Bench) -> Measured:
    """Check loading of files of both dtypes, from the disk and from memory."""

    def copied(pinned: bool) -> float:
        """Return bytes per second."""
        source = torch.ones(256 << 20 if bench.large else 32 << 20, dtype=torch.uint8)
        source = source.pin_memory() if pinned else source
        target = torch.empty_like(source, device=bench.place)
        return source.nbytes / bench.seconds(lambda: target.copy_(source))

    def loaded(path: Path, state: str) -> list[Figure]:
        if state == "cold":
            _forget(path)
        else:
            path.read_bytes()
        blueprint = _blueprint(bench, path)
        blueprint.check()
        compute = torch.bfloat16 if bench.device.type != "cpu" else torch.float32
        start = time.perf_counter()
        model = blueprint.load(device=bench.place, dtype_of=make_dit_dtype_rule(compute, False))
        bench.device.synchronize()
        taken, size = time.perf_counter() - start, path.stat().st_size
        kept, far = load_file(path), 0.0
        for name, parameter in model.named_parameters():
            want = kept[name].to(parameter.dtype).float()
            far = max(far, float((parameter.data.cpu().float() - want).abs().max()))
        rate = Figure("of the file", size / taken / 1e9, "GB/s")
        figures = [error(far, 0.0), Figure("time", taken, "s"), rate]
        if state == "hot":
            least = LEAST_SHARE if bench.large else None
            kept_rate = _bytes(model) / taken
            figures.append(share("of a plain copy's rate", kept_rate / to_device, least))
        return figures

    to_device = copied(pinned=False)
    yield line("plain copy to the device", Figure("rate", to_device / 1e9, "GB/s"))
    if bench.device.type != "cpu":
        what = "plain copy from pinned memory"
        yield what, lambda: [Figure("rate", copied(pinned=True) / 1e9, "GB/s")]
    for kind in DTYPES:
        path = _written(bench, kind)
        for state in ("cold", "hot"):
            what = f"{kind} file, {state}, {path.stat().st_size / 1e6:.0f} MB"
            yield what, partial(loaded, path, state)


def readahead(bench: Bench) -> Measured:
    """Check that `Experts.prefetch` reads a complete file into memory."""
    path = _written(bench, "fp32")
    _forget(path)

    def never(name: str) -> WanModel:
        raise AssertionError(f"{name} is not to be loaded")

    start = time.perf_counter()
    Experts(never, offload=True, files={"dit": [path]}).prefetch("dit")
    held, taken = 0.0, 0.0
    while held < RESIDENT and time.perf_counter() - start - taken < PATIENCE:
        time.sleep(0.05)
        more = resident(path)
        if more > held:
            held, taken = more, time.perf_counter() - start
    rate = held * path.stat().st_size / max(taken, 1e-9)
    yield line(
        f"a file of {path.stat().st_size / 1e6:.0f} MB",
        share("of it in memory", held, RESIDENT),
        Figure("after", taken, "s"),
        Figure("rate", rate / 1e9, "GB/s"),
    )


def experts(bench: Bench) -> Measured:
    """Switch between two offloaded experts three times; measure seconds and memory."""
    path = _written(bench, "bf16")

    def load(_: str) -> WanModel:
        dtype_of = make_dit_dtype_rule(torch.bfloat16, convert_all=True)
        return _blueprint(bench, path).load(device=bench.place, dtype_of=dtype_of)

    def held() -> int:
        """Return the allocated bytes of an accelerator; on a CPU those of all live networks."""
        gc.collect()
        if bench.large:
            return int(torch.get_device_module(bench.place).memory_allocated(bench.place))
        return sum(_bytes(one) for one in gc.get_objects() if isinstance(one, WanModel))

    def memory(most: float) -> list[Figure]:
        more = held() - base
        count = Figure("networks", more / size, "", most, verdict=SLOW)
        return [Figure("held", more / 1e9, "GB"), count]

    pair, base = Experts(load, offload=True), held()
    size = _bytes(pair.get("high_noise"))
    for name in ("low_noise", "high_noise", "low_noise"):
        start = time.perf_counter()
        pair.get(name)
        bench.device.synchronize()
        taken = Figure("time", time.perf_counter() - start, "s")
        yield line(f"switch to {name}", taken, *memory(KEPT))
    pair.release()
    bench.device.empty_cache()
    yield line("released", *memory(KEPT - 1))
