"""The switch between the two experts, and missing devices."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.refusals import check_refusals
from wan import device
from wan.checkpoint.load import open_sources, read_headers
from wan.checkpoint.lora.merge import merge_loras
from wan.pipeline.batch import Batch, Job
from wan.pipeline.denoise import DenoisingLoop, NeverCancelled, compute_model_kwargs
from wan.pipeline.pipeline import Experts, LazyModule, make_base_inputs
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.settings.solvers import SOLVERS
from wan.tasks.base import (
    NO_INPUTS,
    DenoiseInputs,
    VideoParams,
    make_video_params,
)
from wan.utils import system


class Recorder:
    """A fake source of two different experts; `calls` lists the requested names."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get(self, name: str) -> Any:
        self.calls.append(name)
        return lambda x, *args, **kwargs: [x[0] * len(name)]

    def prefetch(self, name: str) -> None:
        self.calls.append(f"prefetch {name}")


def make_six_steps(**overrides: Any) -> tuple[VideoParams, DenoiseInputs]:
    """Six steps of two experts."""
    values = {"prompt": "", "size": (32, 32), "frame_num": 1, "sample_steps": 6}
    values |= {"base_seed": 0, "sample_shift": 12.0, "sample_guide_scale": (1.0, 1.0)}
    request = make_video_params(PRESETS["t2v-A14B"], values | overrides)
    context = torch.zeros(1, 4)
    conditions = make_base_inputs(request, (context, context), torch.device("cpu"))
    return request, conditions


def find_latents(root: object) -> list[torch.Tensor]:
    """All tensors with the shape of latents that an object refers to, directly or not."""
    tensors, visited, pending = [], set(), [root]
    while pending:
        item = pending.pop()
        if id(item) in visited or isinstance(item, type | ModuleType):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif not (isinstance(item, dict) and "__builtins__" in item):  # globals of a function
            pending += gc.get_referents(item)
    return [x for x in tensors if x.shape == (16, 1, 4, 4)]


def test_a_paused_video_leaves_its_device() -> None:
    """The tensors that solver and guider keep from earlier steps leave the device, too."""
    guidance = {"guider": "apg:momentum=0.5", "sample_guide_scale": (2.0, 2.0)}
    for solver in SOLVERS:
        steps = {"sample_steps": 4, "boundary_step": 3} if solver == "rcm" else {}
        video = DenoisingLoop(*make_six_steps(sample_solver=solver, **steps, **guidance))
        video.advance(Recorder(), num_experts=1)
        latents_before = find_latents(video)
        assert len(latents_before) >= {"unipc": 4, "dpm++": 3}.get(solver, 2), solver
        video.to(torch.device("meta"))
        latents_after = find_latents(video)
        assert {x.device.type for x in latents_after} == {"meta"}, solver
        assert len(latents_after) == len(latents_before), solver


def test_a_video_goes_on_where_its_network_is() -> None:
    """All inputs of both branches return from the host to the device."""
    meta = torch.device("meta")
    request, plain = make_six_steps(sample_guide_scale=(2.0, 2.0))
    control = {"vace_context": [torch.zeros(5, 1)], "vace_context_scale": 1.0}
    more = {"y": torch.zeros(4, 1), "clip_fea": torch.zeros(1, 2, 3)}
    branch_kwargs = {"cond": control, "uncond": control}
    video = DenoisingLoop(request, replace(plain, model_kwargs=branch_kwargs, **more))
    video.advance(Recorder(), num_experts=1)
    video.offload()
    video.to(meta)
    calls: list[dict[str, Any]] = []

    def forward(x: list[torch.Tensor], _: object, **kwargs: Any) -> list[torch.Tensor]:
        calls.append({"x": x, **kwargs})
        if len(calls) == 2:
            raise InterruptedError  # latents without data cannot be looked at
        return x

    with pytest.raises(InterruptedError):
        video.advance(SimpleNamespace(get=lambda _: forward))  # type: ignore[arg-type]
    for call in calls:
        values = [x for value in call.values() for x in (value if type(value) is list else [value])]
        devices = [value.device for value in values if isinstance(value, torch.Tensor)]
        assert devices == [meta] * 5


def test_branches_share_what_a_network_computes_for_a_clip() -> None:
    networks = list[object]()

    def compute(network: object) -> list[object]:
        networks.append(network)
        return networks

    kwargs = compute_model_kwargs(
        compute, {"cond": {"kv": compute, "x": 1}, "uncond": {"kv": compute}}
    )
    assert kwargs["cond"]["kv"] is kwargs["uncond"]["kv"] and kwargs["cond"]["x"] == 1
    assert networks == [compute]


def test_grouped_videos_keep_only_latents() -> None:
    """All denoising state is freed before the first decoding; each expert loads once.

    Each is cancelled by itself; its seconds are those of all parts. The first video has no step of
    the first expert.
    """
    settings = ({"base_seed": 0, "refine": True}, {"base_seed": 1})
    points = [NeverCancelled(), NeverCancelled()]
    source, loops = Recorder(), list[weakref.ref[DenoisingLoop]]()

    def prepare_loop(*_: object) -> DenoisingLoop:
        video = DenoisingLoop(*make_six_steps(**settings[len(loops)]))
        loops.append(weakref.ref(video))
        return video

    def denoise(video: DenoisingLoop, num_experts: int) -> torch.Tensor:
        time.sleep(0.01)
        assert pipeline.cancellation_point is points[video.params.base_seed]
        return video.advance(source, num_experts=num_experts)

    cpu_device = SimpleNamespace(torch_device=torch.device("cpu"), empty_cache=lambda: None)
    pipeline: Any = SimpleNamespace(
        offload_manager=SimpleNamespace(offload=True),
        stage_timer=SimpleNamespace(seconds={}),
        device=cpu_device,
        experts=source,
        prepare_denoising=prepare_loop,
        denoise=denoise,
        cache_prompt_embeds=lambda *_: None,
        set_offload=lambda _: None,
        release=lambda _: None,
    )
    jobs = [
        Job("a line", make_six_steps(**values)[0], NO_INPUTS, cancellation_point=point)
        for values, point in zip(settings, points, strict=True)
    ]
    batch = Batch(pipeline, jobs, group_by_expert=True)

    def make(_: Job, latents: Any) -> torch.Tensor:
        assert len(loops) == 2 and not any(loop() is not None for loop in loops)
        return latents()

    for values, result in zip(settings, batch.generate_videos(make), strict=True):
        assert torch.equal(result, DenoisingLoop(*make_six_steps(**values)).advance(Recorder()))
    assert list(dict.fromkeys(source.calls)) == ["high_noise", "low_noise"]
    assert source.calls == sorted(source.calls), "no expert comes back"
    assert [job.seconds >= 0.01 * n for n, job in enumerate(jobs, 1)] == [True, True]


class Network(torch.nn.Module):
    def forward(self, x: list[torch.Tensor], *_: Any, **__: Any) -> list[torch.Tensor]:
        return [torch.zeros_like(x[0])]


def test_one_network_has_gone_before_the_next_is_loaded() -> None:
    for offload in (True, False):
        network_refs: list[weakref.ref[Network]] = []
        live_counts: list[int] = []

        def load(_: str, network_refs=network_refs, live_counts=live_counts) -> Any:
            live_counts.append(sum(network() is not None for network in network_refs))
            network = Network()
            network_refs.append(weakref.ref(network))
            return network

        DenoisingLoop(*make_six_steps()).advance(Experts(load, offload=offload))
        assert live_counts == [0, 0 if offload else 1]


def test_the_next_expert_is_announced_when_the_first_is_there() -> None:
    source = Recorder()
    DenoisingLoop(*make_six_steps()).advance(source)
    high = sum(timestep >= 875 for timestep in make_noise_schedule(make_six_steps()[0]).timesteps)
    assert 0 < high < 6
    steps = ["high_noise"] * high + ["low_noise"] * (6 - high)
    assert source.calls == ["high_noise", "prefetch low_noise", *steps]


def measure_cached_share(path: Path) -> float:
    """Share of a file's pages in the system's page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, page = path.stat().st_size, mmap.PAGESIZE
    with path.open("rb") as file:
        address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, 1, file.fileno(), 0)
    pages = (ctypes.c_ubyte * -(-size // page))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(state & 1 for state in pages) / len(pages)


def evict_file(path: Path) -> None:
    """Evict a file from the system's page cache."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert measure_cached_share(path) < 0.1


def wait_for_cached_share(path: Path, share: float) -> float:
    deadline = time.monotonic() + 30
    while measure_cached_share(path) < share and time.monotonic() < deadline:
        time.sleep(0.02)
    return measure_cached_share(path)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise on this system")
def test_a_mapped_tensor_is_read_ahead(tmp_path: Path) -> None:
    """Also a tensor that a LoRA changes, which is read from the file."""
    path, rows = tmp_path / "x.safetensors", 12 << 10
    save_file({"x": torch.ones(rows, 1024), "y": torch.ones(rows, 1024)}, path)
    evict_file(path)
    sources = merge_loras(open_sources(read_headers(path, str)), ())
    assert measure_cached_share(path) < 0.1
    sources["x"].prefetch()
    assert 0.45 < wait_for_cached_share(path, 0.45) < 0.6, "one of the two"


def test_prefetch_reads_files_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of an expert and of a text encoder, each a MB at a time, if they fit into memory.

    Reading the end of larger files ahead would evict their beginning.
    """
    parts = set[tuple[str, int, int]]()

    def advise(file: int, offset: int, length: int, _: int) -> None:
        parts.add((Path(f"/proc/self/fd/{file}").readlink().name, offset, length))

    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    monkeypatch.setattr(system, "start_background_thread", lambda call: call())
    files = [tmp_path / name for name in ("a", "b")]
    for file, size in zip(files, (3 << 20, 5), strict=True):
        file.write_bytes(bytes(size))
    load: Any = lambda *_: torch.nn.Identity()  # noqa: E731
    experts = Experts(load, offload=True, files={"high_noise": [], "low_noise": files})
    experts.get("high_noise")
    prefetches = (lambda: experts.prefetch("low_noise"), LazyModule(load, files).prefetch)
    for memory in (4 << 20, 3 << 20):
        monkeypatch.setattr(system, "read_available_memory", lambda memory=memory: memory)
        for prefetch in prefetches:
            parts.clear()
            prefetch()
            ranges = [("a", n << 20, 1 << 20) for n in range(3)] + [("b", 0, 1 << 20)]
            assert parts == {*ranges[: 4 if memory == 4 << 20 else 0]}, memory


def test_an_accelerator_that_pytorch_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver too old for the wheel is refused, unless the user hides all devices."""
    (tmp_path / "nvidiactl").touch()
    assert device.find_hidden_accelerator(tmp_path) is None
    messages, variables = {}, {"nvidia0": "CUDA_VISIBLE_DEVICES"}
    for name, variable in (variables | {"davinci3": "ASCEND_RT_VISIBLE_DEVICES"}).items():
        (tmp_path / name).touch()
        messages[name] = str(device.find_hidden_accelerator(tmp_path))
        for hidden in ("", "-1"):
            with monkeypatch.context() as patch:
                patch.setenv(variable, hidden)
                assert device.find_hidden_accelerator(tmp_path) is None
        (tmp_path / name).unlink()
    check_refusals("devices: hidden", messages, [r"(?<=torch )\S+ is built[^;]*"])


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local rank has no device, or `auto` would fall back to the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="CUDA device 2 does not exist; 2 do"):
        device.select_device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refusal = InputError("A GPU", why="is hidden", remedy="use `device=cpu`")
    monkeypatch.setattr(device, "find_hidden_accelerator", lambda: refusal)
    with pytest.raises(InputError, match="A GPU is hidden; use device=cpu"):
        device.select_device("auto")
    assert device.select_device("cpu").type == "cpu"
