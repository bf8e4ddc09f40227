"""LoRAs of single videos in the networks of all tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tasks.conftest import TaskRun
from wan.checkpoint.lora import folder as lora_folder
from wan.modules.lora_branch import LoraBranch


def list_layers(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the layers that a LoRA of a video may change, and their weights."""
    for file in sorted(folder.rglob("diffusion_pytorch_model*.safetensors")):
        for name, weight in load_file(file).items():
            layer, _, suffix = name.rpartition(".")
            if suffix == "weight" and lora_folder._LAYER.fullmatch(layer):
                yield layer, weight


@pytest.mark.slow
@pytest.mark.parametrize("task", ["i2v", "first and last", "s2v", "animate", "vace"])
def test_each_layer_of_each_network_adds_its_branch(
    task: str,
    asked: Callable[[str], TaskRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each branch is computed, and the frames are those of a merge within rounding."""
    run, path = asked(task), tmp_path / "x.safetensors"
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer, weight in list_layers(run.checkpoint):
        down = torch.randn(2, weight[0].numel(), generator=generator) / 20
        up = torch.randn(len(weight), 2, generator=generator) / 20
        tensors[f"{layer}.lora_down.weight"] = down.view(2, *weight.shape[1:])
        tensors[f"{layer}.lora_up.weight"] = up.view(len(weight), 2, *[1] * (weight.dim() - 2))
    save_file(tensors, path)
    called: list[LoraBranch] = []
    add_product = LoraBranch.add_product

    def record_call(branch: LoraBranch, *args: Any) -> None:
        called.append(branch)
        add_product(branch, *args)

    monkeypatch.setattr(LoraBranch, "add_product", record_call)
    chosen = ["--lora_folder", tmp_path, "--video_lora", "x"]
    separate = run.make_frames(tmp_path / "separate.mp4", *chosen)
    num_experts = 2 if "A14B" in run.task.checkpoint else 1
    factors = {id(branch.factors["lora_up"]) for branch in called}
    assert len(factors) == num_experts * len(tensors) // 2
    merged = run.make_frames(tmp_path / "merged.mp4", "--lora", path)
    difference = np.abs(separate.astype(int) - merged)
    assert difference.mean() < 0.1
    assert np.abs(run.frames.astype(int) - merged).mean() > 3
