"""The settings of a LoRA: alphas, PEFT's settings, strengths; and the comparison of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.pipelines import resolve_argv
from tests.unit.test_lora import Q, pair, pair_of, peft_folder, read_merged_weights
from wan.checkpoint import lora
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.merge_lora import merge_loras

V = "blocks.0.self_attn.v"


@pytest.fixture(scope="module")
def weights(tiny: Any) -> dict[str, Tensor]:
    """The weights of the tiny dense checkpoint."""
    return load_file(tiny("t2v-1.3B") / "diffusion_pytorch_model.safetensors")


def name_for_diffusers(
    layer: str, down: Tensor, up: Tensor, prefix: str = "transformer"
) -> dict[str, Tensor]:
    name = layer.replace("self_attn.", "attn1.to_")
    ends = {"A": down, "B": up}
    return {f"{prefix}.{name}.lora_{end}.weight": x.clone() for end, x in ends.items()}


def test_alphas_of_layers_count_and_then_nothing_of_peft(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """A factor of alpha 6 / rank 4, and of 1 for a layer without an alpha."""
    down, up = pair(weights[f"{Q}.weight"].shape, 4, 0, torch.float32)
    peft_settings = {
        "transformer.r": 4,
        "transformer.lora_alpha": 32,
        "transformer.use_rslora": True,
    }
    path = tmp_path / "x.safetensors"
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        tensors = name_for_diffusers(Q, down, up) | name_for_diffusers(V, down, up)
        tensors["transformer.blocks.0.attn1.to_q.alpha"] = torch.tensor(6, dtype=dtype)
        save_file(tensors, path, {"lora_adapter_metadata": json.dumps(peft_settings)})
        actual = read_merged_weights(path, tiny("t2v-1.3B"))
        for layer, factor in ((Q, 1.5), (V, 1.0)):
            weight = f"{layer}.weight"
            exact = weights[weight].double() + factor * up.double() @ down.double()
            torch.testing.assert_close(actual[weight].double(), exact, atol=1e-9, rtol=1.2e-7)


def test_the_metadata_of_each_expert_is_its_own(tiny: Any, tmp_path: Path) -> None:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA, of the low-noise expert's metadata."""
    checkpoint, path = inspect_checkpoint(tiny("t2v-A14B")), tmp_path / "x.safetensors"
    down, up = pair_of(checkpoint, 4)
    for stabilised, factor in ((False, 8 / 4), (True, 8 / 2), (None, 8 / 4)):
        peft_settings: dict[str, Any] = {
            "transformer.lora_alpha": 2,
            "transformer.use_rslora": False,
        }
        peft_settings |= {"transformer_2.lora_alpha": 8, "transformer_2.use_rslora": stabilised}
        tensors = name_for_diffusers(Q, down, up) | name_for_diffusers(Q, down, up, "transformer_2")
        save_file(tensors, path, {"lora_adapter_metadata": json.dumps(peft_settings)})
        loras = lora.resolve_loras({"lora": (str(path),)}, checkpoint)
        for expert, expected_factor in (("high_noise", 2 / 4), ("low_noise", factor)):
            plain = open_sources(checkpoint.experts[expert].tensors)
            weight = plain[f"{Q}.weight"].read(slice(None)).double()
            exact = weight + expected_factor * up.double() @ down.double()
            actual = merge_loras(plain, loras[expert])[f"{Q}.weight"].read(slice(None))
            torch.testing.assert_close(actual.double(), exact, atol=1e-9, rtol=1.2e-7)


@pytest.mark.filterwarnings("ignore")
def test_adapter_config_counts_before_the_metadata(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """As in PEFT, whose merged weight is the reference."""
    path, expected = peft_folder(tmp_path / "peft", weights[f"{Q}.weight"].float(), lora_alpha=3)
    peft_settings = {"lora_alpha": 50, "use_rslora": True}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(peft_settings)})
    actual = read_merged_weights(path, tiny("t2v-1.3B"))[f"{Q}.weight"]
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_ranks_compare_content_and_strength_and_no_folders(tiny: Any, tmp_path: Path) -> None:
    """Ranks may read the same file from other folders, but not another strength or other values."""
    folder = tiny("t2v-1.3B")
    shape = inspect_checkpoint(folder).experts["dit"].tensors[f"{Q}.weight"].shape
    down, up = pair(torch.Size(shape), 2, 0, torch.float32)
    here, there = tmp_path / "here.safetensors", tmp_path / "other" / "there.safetensors"
    save_file(name_for_diffusers(Q, down, up), here)
    there.parent.mkdir()
    shutil.copy(here, there)

    def collect_invariants(lora_argument: str) -> dict[str, Any]:
        argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(folder), "--base_seed", "1"]
        return resolve_argv(
            [*argv, "--save_file", "v.mp4", "--lora", lora_argument]
        ).collect_rank_invariants("cpu")

    def find_differences(lora_argument: str) -> set[str]:
        base_invariants, invariants = (
            collect_invariants(f"{here}=0.5"),
            collect_invariants(lora_argument),
        )
        return {
            name
            for name in base_invariants | invariants
            if base_invariants.get(name) != invariants.get(name)
        }

    assert find_differences(f"{there}=0.5") == set()
    assert find_differences(f"{there}=0.6") == {"the content of --lora"}
    save_file(name_for_diffusers(Q, down, 2 * up), there)  # of the same size
    assert find_differences(f"{there}=0.5") == {"the content of --lora"}
