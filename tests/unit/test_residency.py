"""`--offload_model block` and `cpu`: the same bits, no more memory than planned, refusals."""

from __future__ import annotations

import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conftest import slow
from tests.lora_files import make_pair
from tests.pipelines import (
    build_quick_pipeline,
    count_owned_bytes,
    generate_quick_latents,
    plan_stages,
    resolve_plan,
)
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_marks import write_quantised_checkpoint
from tools.quantize_dit import quantize_checkpoint
from wan import WanTI2V
from wan import device as devices
from wan.checkpoint.formats.tensor_source import TensorSource
from wan.checkpoint.load import keep_sources, load_weights
from wan.modules.animate import WanAnimateModel
from wan.modules.s2v import WanModel_S2V
from wan.modules.vace import VaceWanModel
from wan.pipeline import memory_estimate as memory
from wan.pipeline import offload as residency
from wan.pipeline.offload import stream_blocks
from wan.settings.errors import FileChangedError
from wan.testing.random_checkpoint import make_checkpoint
from wan.utils import system

CPU = torch.device("cpu")
LAYERS = 4


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """deep(task): a random checkpoint of four layers. Do not write into it."""
    root, checkpoints = tmp_path_factory.mktemp("deep"), {}

    def make(task: str) -> Path:
        if task not in checkpoints:
            checkpoints[task] = make_checkpoint(task, root / task, sizes={"num_layers": LAYERS})
        return checkpoints[task]

    return make


def write_lora(folder: Path, path: Path) -> Path:
    """Writes a LoRA for the feed-forward of every layer of a network."""
    tensors: dict[str, Tensor] = {}
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    for layer in range(LAYERS):
        name = f"blocks.{layer}.ffn.0"
        down, up = make_pair(weights[f"{name}.weight"].shape, 3, layer)
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    save_file(tensors, path)
    return path


THREE_STEPS = ("--sample_steps", "3", "--frame_num", "1")
TWO_EXPERTS = ("--sample_steps", "2", "--boundary_step", "1", "--frame_num", "1")
CACHED = ("--step_cache", "first_block:threshold=0.6", "--sample_steps", "9")
REUSED = ("--use_attentioncache", "--start_step", "1", "--end_step", "7", "--sample_steps", "8")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("ti2v-5B", (*THREE_STEPS, "--precision", "bf16")),
    "all in bf16": ("t2v-1.3B", (*THREE_STEPS, "--convert_model_dtype")),
    "two experts": ("t2v-A14B", (*TWO_EXPERTS, "--precision", "bf16")),
    "step cache": ("t2v-1.3B", CACHED),
    "attention cache": ("t2v-1.3B", REUSED),
    "fp8 attention": ("t2v-1.3B", (*THREE_STEPS, "--fa_quant", "fp8")),
    "int8": ("t2v-1.3B", (*THREE_STEPS, "--quant_dit_path", "EXPORT")),
    "LoRA": ("t2v-1.3B", (*THREE_STEPS, "--lora", "LORA=0.5")),
    "FP8 weights": ("FP8", (*THREE_STEPS, "--precision", "bf16")),
    "FP8, upcast": ("FP8", (*THREE_STEPS, "--precision", "bf16", "--stored_weights", "upcast")),
}


def prepare_case(name: str, deep: Any, tmp_path: Path) -> tuple[Path, list[str]]:
    """The checkpoint folder of a case, with the files that it names, and its flags."""
    task, argv = CASES[name]
    folder = deep("t2v-1.3B" if task == "FP8" else task)
    files = {"EXPORT": tmp_path / "export", "LORA": tmp_path / "lora.safetensors"}
    if "EXPORT" in argv:
        quantize_checkpoint(folder, files["EXPORT"])
    if name.startswith("LoRA"):
        write_lora(folder, files["LORA"])
    if task == "FP8":
        folder, task = write_quantised_checkpoint(folder, tmp_path / "fp8"), "t2v-1.3B"
    flags = [word.replace("EXPORT", str(files["EXPORT"])) for word in argv]
    return folder, ["--task", task, *(w.replace("LORA", str(files["LORA"])) for w in flags)]


@pytest.mark.parametrize(
    "name", [name if name in ("two experts", "int8") else slow(name) for name in CASES]
)
def test_the_same_bits(name: str, deep: Any, tmp_path: Path, one_thread: None) -> None:
    folder, flags = prepare_case(name, deep, tmp_path)
    expected = generate_quick_latents(folder, *flags, "--offload_model", "false")
    assert expected.isfinite().all()
    streamed = (*flags, "--offload_model", "block", "--resident_blocks", "1")
    assert torch.equal(generate_quick_latents(folder, *streamed), expected)


def test_what_a_network_holds_while_it_runs(deep: Any, one_thread: None) -> None:
    """At most the planned bytes are held, and one block of the text encoder at a time."""
    argv = ("--offload_model", "block", "--resident_blocks", "1", "--sample_steps", "1")
    run, pipeline = build_quick_pipeline(deep("t2v-1.3B"), *argv, "--frame_num", "1")
    network, held_bytes = pipeline.experts.get("dit"), []
    for block in network.blocks:
        block.register_forward_hook(lambda *_: held_bytes.append(count_owned_bytes(network)))
    pipeline.generate_latents(run.params)
    assert len(held_bytes) == LAYERS * 2
    plan = plan_stages(run)
    full_bytes = sum(x.nbytes for x in network.parameters())
    assert plan["denoising"]["DiT weights"] < full_bytes
    assert plan["denoising"]["DiT weights"] == pytest.approx(max(held_bytes), rel=0.03)
    encoder = pipeline.text_encoder.get()._model
    pipeline.text_encoder.get()("a cat")
    planned_bytes = plan["text encoder"]["text encoder weights"]
    assert count_owned_bytes(encoder) == pytest.approx(planned_bytes, rel=0.1)


def test_networks_are_released_as_before(deep: Any, one_thread: None) -> None:
    """No part of a network stays in memory after its stage, also with streamed blocks."""
    flags = ("--offload_model", "block", *TWO_EXPERTS, "--sample_guide_scale", "1")
    run, pipeline = build_quick_pipeline(deep("t2v-A14B"), *flags)
    high, low = (weakref.ref(pipeline.experts.get(f"{name}_noise")) for name in ("high", "low"))
    assert high() is None and low() is not None, "asking for one releases the other"
    pipeline.generate_latents(run.params)
    assert low() is None


@pytest.mark.parametrize(("old", "new"), [(False, "block"), ("block", False)])
def test_another_way_releases_what_was_loaded(old: Any, new: Any, deep: Any) -> None:
    _, pipeline = build_quick_pipeline(deep("t2v-1.3B"), "--offload_model", str(old))
    references = [weakref.ref(pipeline.experts.get("dit")), weakref.ref(pipeline.vae.get())]
    for way in (old, new):
        pipeline.set_offload(way)
        assert {reference() is None for reference in references} == {way == new}


class Sum(nn.Module):
    """Blocks as a step cache calls them: all, or the first ones."""

    def __init__(self) -> None:
        """The first block, which has no bias, is smaller than the other blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=n > 0) for n in range(LAYERS))
        self.table = nn.Embedding(9, 3)

    def forward(self, x: Tensor, last: int = LAYERS) -> Tensor:
        for block in self.blocks[:last]:
            x = block(x)
        return x


class CountedSources:
    """Sources that count the reads of each tensor."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = Sum().requires_grad_(False)
        self.read: Counter[str] = Counter()
        self.sources = {name: self._source(name, x) for name, x in self.plain.named_parameters()}

    def _source(self, name: str, values: Tensor) -> TensorSource:
        def read(rows: slice) -> Tensor:
            self.read[name] += 1
            return values[rows]

        return TensorSource(values.dtype, tuple(values.shape), read)

    def network(self, resident: int = 0, dtype: torch.dtype = torch.float32) -> Sum:
        with torch.device("meta"):
            network = Sum()
        ways = (keep_sources, "blocks", CPU, lambda *_: dtype, lambda *_: resident)
        sources = stream_blocks(*ways, embedding_name="table")(network, self.sources)
        load_weights(network, sources, device=CPU, dtype_of=lambda *_: dtype, label="sum")
        return network

    def take_read_counts(self) -> list[int]:
        """How often each block was read since the last call."""
        counts = [self.read[f"blocks.{layer}.weight"] for layer in range(LAYERS)]
        self.read.clear()
        return counts


def test_blocks_are_read_when_they_are_called_and_not_otherwise() -> None:
    counted, x = CountedSources(), torch.randn(2, 3)
    network = counted.network()
    assert counted.take_read_counts() == [0] * LAYERS, "nothing is read before it is needed"
    assert torch.equal(network(x), counted.plain(x)) and counted.take_read_counts() == [1] * LAYERS
    for _ in range(3):
        network(x, last=1)
    # A skipped block is not read, nor one that is there.
    assert counted.take_read_counts() == [1, 0, 0, 0]
    assert torch.equal(network(x), counted.plain(x)) and counted.take_read_counts() == [0, 1, 1, 1]


def test_a_block_is_read_again_where_memory_ran_out_in_the_middle() -> None:
    counted, x = CountedSources(), torch.randn(2, 3)
    bias = counted.sources["blocks.1.bias"]
    failing = mock.Mock(side_effect=MemoryError)
    counted.sources["blocks.1.bias"] = replace(bias, read=failing)
    network = counted.network()
    with pytest.raises(MemoryError):
        network(x)
    failing.side_effect = bias.read
    assert torch.equal(network(x), counted.plain(x))


def test_a_mapped_file_that_changes_during_a_run_is_noticed(deep: Any, tmp_path: Path) -> None:
    """Its weights need no conversion, so that blocks are not read again."""
    folder = shutil.copytree(deep("t2v-1.3B"), tmp_path / "copy")
    (file,) = folder.glob("diffusion*.safetensors")
    flags = ("--task", "t2v-1.3B", "--offload_model", "block", "--convert_model_dtype")
    network = build_quick_pipeline(folder, *flags)[1].experts.get("dit")
    block_bytes = sum(x.nbytes for x in network.blocks[1].parameters())
    assert count_owned_bytes(network.blocks[1]) < 0.1 * block_bytes
    os.utime(file, ns=(0, 0))
    with pytest.raises(FileChangedError, match=file.name):
        network.blocks[1](None)


def test_resident_blocks_are_read_once() -> None:
    """They are spread evenly, from the first one on; one buffer would hold the last one too."""
    expected = {1: [0, 1, 1, 1], 2: [0, 1, 0, 1], 3: [0] * 4, 4: [0] * 4, 9: [0] * 4}
    counts, x = {}, torch.randn(2, 3)
    for resident in expected:
        counted = CountedSources()
        network = counted.network(resident)
        assert torch.equal(network(x), counted.plain(x))
        counted.take_read_counts(), network(x)
        counts[resident] = counted.take_read_counts()
    assert counts == expected


def test_weights_that_are_elsewhere_are_seen_at_once() -> None:
    """Reading such weights gives NaN in the network's dtype and shape, on the run's device."""
    network = CountedSources().network(dtype=torch.bfloat16)
    network(torch.randn(2, 3, dtype=torch.bfloat16))
    first, last = network.blocks[0].weight, network.blocks[-1].weight
    assert first.isnan().all() and first.shape == (3, 3) and first.dtype == torch.bfloat16
    assert first.untyped_storage().nbytes() == 2 and last.isfinite().all()


def test_rows_of_a_table_come_from_its_file() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        counted = CountedSources()
        network, ids = counted.network(dtype=dtype), torch.tensor([[7, 2, 7], [2, 2, 7]])
        rows = network.table(ids)
        assert torch.equal(rows, counted.plain.table(ids).to(dtype)) and rows.dtype == dtype
        assert counted.read["table.weight"] == 2
        assert network.table.weight.untyped_storage().nbytes() == dtype.itemsize


class ModelWithAdapters(nn.Module):
    """Blocks with further modules after every second block, which move with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS))
        self.early, self.late = (
            nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS // 2)) for _ in range(2)
        )

    def adapter_modules(self, layer: int) -> tuple[nn.Module, ...]:
        return () if layer % 2 else (self.early[layer // 2], self.late[layer // 2])

    def forward(self, x: Tensor) -> Tensor:
        for layer, block in enumerate(self.blocks):
            x = block(x)
            for module in self.adapter_modules(layer):
                x = module(x)
        return x


class RecordingStream:
    """Replaces an accelerator's two streams and logs the copies."""

    log: list[str]
    waits: list[str]

    def __init__(self, _: object) -> None:
        self.kept, self.num_copies = list[Tensor](), 0

    def make_event(self) -> list[str]:
        return []

    def record_stream(self, memory: Tensor) -> None:
        self.kept.append(memory)

    def record_copied(self, event: list[str]) -> None:
        event[:] = [f"copy {self.num_copies}"]

    def make_compute_wait(self, event: list[str]) -> None:
        self.waits.append("".join(event))

    def record_computed(self, event: list[str]) -> None:
        event[:] = self.log[-1:]

    def copy(self, target: Tensor, slices: object, event: list[str]) -> None:
        assert any(target is memory for memory in self.kept)
        self.num_copies += 1
        self.log.append(f"copy after {''.join(event)}")


class FakePinnedMemory:
    """Replaces page-locked memory, which only an accelerator has."""

    def __init__(self, size: int) -> None: ...

    def chunks(self, start: int, size: int) -> list[object]:
        return []

    def write(self, start: int, values: Tensor) -> None: ...


def test_a_buffer_is_free_when_all_that_moves_with_a_block_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an accelerator, a copy into a buffer waits for the last module of its block."""
    monkeypatch.setattr(residency, "CopyStream", RecordingStream)
    monkeypatch.setattr(residency, "PinnedMemory", FakePinnedMemory)
    meta, RecordingStream.log, RecordingStream.waits = torch.device("meta"), [], []
    with meta:
        network = ModelWithAdapters().requires_grad_(False)
    sources = {
        name: TensorSource(x.dtype, tuple(x.shape), lambda rows, x=x: x[rows])
        for name, x in ModelWithAdapters().named_parameters()
    }
    adapt = stream_blocks(
        *(keep_sources, "blocks", meta, lambda *_: torch.float32),
        adapter_modules=lambda network, layer: network.adapter_modules(layer),
    )
    sources, options = adapt(network, sources), {"device": meta, "label": "sum"}
    load_weights(network, sources, dtype_of=lambda *_: torch.float32, **options)
    for kind in ("blocks", "early", "late"):
        for index, module in enumerate(network.get_submodule(kind)):
            name = f"{kind} {index}"
            module.register_forward_pre_hook(lambda *_, name=name: RecordingStream.log.append(name))
    for _ in range(2):
        network(torch.empty(2, 3, device=meta))
    first, second = ["blocks 0", "early 0", "late 0"], ["blocks 2", "early 1", "late 1"]
    after_late, after_plain = ("copy after late 1", "copy after blocks 1"), "copy after blocks 3"
    assert RecordingStream.log == [
        *("copy after ", "copy after ", *first, "copy after late 0", "blocks 1"),
        *(after_late[1], *second, after_late[0], "blocks 3"),
        *(after_plain, *first, "copy after late 0", "blocks 1"),
        *(after_late[1], *second, after_late[0], "blocks 3"),
    ]
    # Every block waits for its own copy.
    assert RecordingStream.waits == [f"copy {number}" for number in range(1, 9)]


NETWORKS: dict[str, Callable[[], Any]] = {
    "vace": partial(VaceWanModel, (0, 2), 4),
    "s2v": partial(WanModel_S2V, audio_dim=4, audio_inject_layers=(3, 0)),
    "animate": partial(WanAnimateModel, image_dim=6),
}


@pytest.mark.parametrize("kind", NETWORKS)
@torch.no_grad()
def test_the_last_module_that_moves_with_a_block_is_called_last(kind: str) -> None:
    """Every module of these networks that is called moves with a block."""
    small = {"dim": 24, "num_heads": 2, "ffn_dim": 16, "freq_dim": 8, "text_dim": 4, "text_len": 3}
    with mock.patch(
        "wan.modules.animate.model_animate.MotionEncoder", lambda _: FlatMotionEncoder()
    ):
        network = NETWORKS[kind](num_layers=5, **small)
    order: list[nn.Module] = []
    for submodule in network.modules():
        submodule.register_forward_hook(lambda module, *_: order.append(module))
    inputs = {
        "vace": {"vace_context": [torch.zeros(4, 2, 8, 8)]},
        "s2v": {
            "ref_latents": [torch.zeros(16, 1, 8, 8)],
            "motion_latents": [torch.zeros(16, 19, 8, 8)],
            "cond_states": None,
            "audio_input": torch.zeros(1, 25, 4, 8),
        },
        "animate": {
            "clip_fea": torch.zeros(1, 2, 6),
            "y": [torch.zeros(20, 2, 8, 8)],
            "pose_latents": torch.zeros(1, 16, 1, 8, 8),
            "face_pixel_values": torch.zeros(1, 3, 1, 512, 512),
        },
    }[kind]
    x, text = torch.zeros(16, 2, 8, 8), torch.zeros(2, 4)
    network([x], torch.tensor([1]), context=[text], seq_len=99, **inputs)
    groups = [
        (block, *network.adapter_modules(layer)) for layer, block in enumerate(network.blocks)
    ]
    assert {len(group) > 1 for group in groups} == {False, True}
    positions = {module: position for position, module in enumerate(order)}
    ends = [positions[group[-1]] for group in groups]
    begin = -1
    for group, end in zip(groups, ends, strict=True):
        inside = {part for module in group for part in module.modules() if part in positions}
        assert all(begin < positions[part] <= end for part in inside)
        begin = end


class FlatMotionEncoder(nn.Module):
    """Replaces the motion encoder, which takes seconds."""

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        return faces_P3HW.flatten(1)[:, :512]


ONE_STEP: dict[str, Any] = {"size": (64, 64), "frame_num": 1, "sampling_steps": 1, "seed": 0}
ONE_STEP |= {"output_type": "latent"}


def test_a_network_that_is_kept_is_whole(
    deep: Any, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed weights persist under all settings of later videos.

    Unsupported offloading is refused then, also on a device that "auto" has chosen.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "find_hidden_accelerator", lambda: None)
    model = WanTI2V("ti2v-5B", deep("ti2v-5B"))
    expected = model.generate("a cat", **ONE_STEP, offload_model="block")
    assert torch.equal(model.generate("a cat", **ONE_STEP, offload_model="block"), expected)
    network = model.model
    assert network.blocks[1].ffn[0].weight.isfinite().all()
    network.blocks[1].ffn[0].weight.mul_(1.5)
    changed = model.generate("a cat", **ONE_STEP, offload_model="block")
    assert not torch.equal(changed, expected)
    assert torch.equal(changed, model.generate("a cat", **ONE_STEP, offload_model=False))

    def get_message(way: Any, **settings: Any) -> str:
        model = WanTI2V("ti2v-5B", deep("ti2v-5B"), **settings)
        return get_refusal(model.generate, "a cat", **ONE_STEP, offload_model=way)

    ways = (True, "cpu", "disk")
    messages = {f"offload_model={way}": get_message(way, resident_blocks=1) for way in ways}
    messages["compiled"] = get_message("block", device="cpu", compile=True)
    check_refusals("residency: another way", messages)


def test_shards_stay_where_they_are() -> None:
    messages = {}
    for way, flag in product(("cpu", "block"), ("--dit_fsdp", "--t5_fsdp")):
        flags = ("--ulysses_size", "2", "--device", "cuda", "--offload_model", way, flag)
        messages[f"{flag} {way}"] = get_refusal(resolve_plan, *flags)
    check_refusals("residency: shards", messages)


def test_int8_weights_of_an_npu_stay_where_they_are(deep: Any, tmp_path: Path) -> None:
    """mindiesd has changed the layout of these weights."""
    folder = deep("t2v-1.3B")
    flags = ["--task", "t2v-1.3B", "--ckpt_dir", str(folder), "--chip", "A2"]
    export = quantize_checkpoint(folder, tmp_path / "export")
    flags += ["--quant_dit_path", str(export), "--offload_model"]
    resolve_plan(*flags, "true")
    messages = {way: get_refusal(resolve_plan, *flags, way) for way in ("cpu", "block")}
    check_refusals("residency: int8 weights of an NPU", messages)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming is proposed where it would fit and no other setting excludes it."""
    flags = ("--task", "ti2v-5B", "--size", "320*192", "--frame_num", "9", "--device", "cpu")
    messages = {}
    for gigabytes, argv in ((8, ()), (2, ()), (8, ("--compile",))):
        run = resolve_plan(*flags, *argv)
        monkeypatch.setattr(system, "read_available_memory", lambda free=gigabytes: free * 10**9)
        name = f"{gigabytes} GB {' '.join(argv)}".strip()
        messages[name] = get_refusal(memory.check_memory, run.setup, run.params, 1)
        block = replace(run.setup.execution, offload_model="block", compile=False)
        if gigabytes == 8:
            memory.check_memory(replace(run.setup, execution=block), run.params, 1)
    check_refusals("residency: too little memory", messages)
