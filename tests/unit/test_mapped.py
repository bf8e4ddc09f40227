"""Weights that a CPU uses where their files are mapped: whole runs, plans, changes of files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.conftest import slow
from tests.pipelines import build_quick_pipeline, generate_quick_latents
from tests.unit.test_load import shift_tensors
from tests.unit.test_marks import write_quantised_checkpoint
from tests.unit.test_residency import LAYERS, write_lora
from tools.quantize_dit import quantize_checkpoint
from wan.checkpoint.formats.safetensors_stream import stream_safetensors
from wan.checkpoint.formats.tensor_source import owns_memory
from wan.cli import main as generate
from wan.modules.model import WanModel
from wan.planner.measure import Planner
from wan.planner.report import describe_plan, describe_rereads
from wan.testing.random_checkpoint import make_checkpoint

BF16 = ("--precision", "bf16", "--sample_steps", "2")
DIT = "diffusion_pytorch_model.safetensors"


def count_tensor_bytes(network: nn.Module) -> tuple[int, int]:
    """Returns the bytes of a network's tensors in allocated memory and in mapped files."""
    sizes = [0, 0]
    for tensor in (*network.parameters(), *network.buffers()):
        sizes[not owns_memory(tensor)] += tensor.nbytes
    return sizes[0], sizes[1]


def test_every_layout_of_a_file_gives_the_same_bits(
    tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    """Aligned files are mapped and others are copied; the latents are equal."""
    folder, argv = tiny("t2v-1.3B"), BF16
    task = ("--task", "t2v-1.3B")
    odd = tmp_path / "odd"
    shutil.copytree(folder, odd)
    shift_tensors(odd / DIT, 1)
    as_mapped, as_copied = (
        build_quick_pipeline(f, *task, *argv)[1].experts.get("dit") for f in (folder, odd)
    )
    assert count_tensor_bytes(as_mapped)[1] > 0.5 * sum(count_tensor_bytes(as_mapped)), (
        "what is not aligned is small"
    )
    assert count_tensor_bytes(as_copied)[1] == 0
    assert torch.equal(
        generate_quick_latents(folder, *task, *argv), generate_quick_latents(odd, *task, *argv)
    )


@pytest.mark.parametrize(
    ("case", "argv"),
    [
        ("bf16", ()),
        slow("bf16", ("--offload_model", "block")),
        slow("FP8", ()),
        slow("int8", ()),
        slow("LoRA", ()),
        slow("fp32", ("--precision", "fp32")),
    ],
)
def test_a_plan_tells_what_is_allocated_from_what_is_mapped(
    case: str, argv: tuple[str, ...], tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    folder, argv = tiny("t2v-1.3B"), (*BF16, "--task", "t2v-1.3B", *argv)
    if case == "FP8":
        folder = write_quantised_checkpoint(folder, tmp_path / "fp8")
    elif case == "int8":
        argv = (*argv, "--quant_dit_path", str(quantize_checkpoint(folder, tmp_path / "export")))
    elif case == "LoRA":
        folder = make_checkpoint("t2v-1.3B", tmp_path / "deep", sizes={"num_layers": LAYERS})
        argv = (*argv, "--lora", str(write_lora(folder, tmp_path / "lora.safetensors")))
    run, pipeline = build_quick_pipeline(folder, *argv)
    planner = Planner(run.setup, run.params)
    stages, mapped = planner.compute_stage_memory(), planner.sum_mapped_weights()
    networks = {
        ("text encoder", "text encoder weights"): pipeline.text_encoder.get()._model,
        ("denoising", "DiT weights"): pipeline.experts.get("dit"),
        ("decoding", "VAE weights"): pipeline.vae.get()._network,
    }
    for (stage, name), network in networks.items():
        allocated, in_files = count_tensor_bytes(network)
        assert mapped.get(stage, {}).get(name, 0) == pytest.approx(in_files, rel=0.03), stage
        if "block" not in argv:  # weights that come and go are counted while it runs
            assert stages[stage][name] == pytest.approx(allocated, rel=0.03, abs=64), stage
    in_files = count_tensor_bytes(networks["denoising", "DiT weights"])[1]
    assert (in_files == 0) == (case == "fp32")


def test_what_is_read_again_where_memory_is_short(tiny: Any) -> None:
    """Guided steps call the network twice; each call rereads at most all of its weights."""
    run, _ = build_quick_pipeline(tiny("t2v-1.3B"), *BF16, "--task", "t2v-1.3B")
    planner = Planner(run.setup, run.params)
    need, mapped = (
        planner.compute_stage_memory()["denoising"].total(),
        planner.sum_mapped_weights()["denoising"].total(),
    )

    def reread_sizes(memory: int) -> list[str]:
        lines = [line for line in describe_rereads(planner, memory) if "denoising" in line]
        return [line.partition("at least ")[2].partition(" from")[0] for line in lines]

    assert reread_sizes(need + mapped) == [] == reread_sizes(0)
    assert reread_sizes(need + mapped - 10_000) == ["20.00 kB"]
    assert reread_sizes(1) == [
        f"{2 * mapped / 1e3:.2f} kB" if 2 * mapped < 1e5 else f"{2 * mapped / 1e6:.2f} MB"
    ]
    assert mapped < 1e6 or any(
        "mapped from files" in line for line in describe_plan(planner, "t2v")
    )


def test_a_network_that_is_kept_may_be_changed(tiny: Any) -> None:
    """A network that is already loaded is copied, because mapped memory cannot be written."""
    folder, argv = tiny("t2v-1.3B"), (*BF16, "--task", "t2v-1.3B", "--offload_model", "false")
    for loaded in (False, True):
        experts = build_quick_pipeline(folder, *argv)[1].experts
        network = experts.get("dit") if loaded else None
        editable = experts.load_editable("dit")
        assert network is None or editable is network
        assert count_tensor_bytes(editable)[1] == 0
        for parameter in editable.parameters():
            parameter.zero_()


def test_a_file_that_changes_between_steps(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run ends with one message."""
    folder, video = tmp_path / "folder", tmp_path / "video.mp4"
    shutil.copytree(tiny("t2v-1.3B"), folder)
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(folder), *BF16, "--size", "64*64"]
    argv += ["--frame_num", "5", "--device", "cpu", "--base_seed", "7", "--save_file", str(video)]
    calls, forward = list[Any](), WanModel.forward

    def forward_and_change(self: WanModel, *args: Any, **kwargs: Any) -> Any:
        calls.append(forward(self, *args, **kwargs))
        if len(calls) == 2:  # of the first step
            os.truncate(folder / DIT, 4096)
        return calls[-1]

    monkeypatch.setattr(WanModel, "forward", forward_and_change)
    assert generate.main(argv) == 1 and len(calls) == 2
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert DIT in message and "was changed while its weights were used" in message
    assert "Traceback" not in message and not video.exists()


def test_streamed_files_begin_large_tensors_at_64_bytes(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(16, 4), "c": torch.ones(5).bfloat16()}
    form = {name: (x.dtype, tuple(x.shape)) for name, x in state.items()}
    stream_safetensors(tmp_path / "x.safetensors", form, iter(state.items()), "x")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], x) for name, x in state.items())
    header = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0
