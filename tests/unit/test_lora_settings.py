"""The settings of a LoRA: alphas, PEFT's settings, strengths; and the comparison of ranks."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.pipelines import resolve_argv
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_lora import PAIR, Q, pair, pair_of, read_merged_weights
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


def peft_folder(folder: Path, weight: Tensor, **config: Any) -> tuple[Path, Tensor]:
    """An adapter of PEFT for Q, trained a little, and PEFT's own merged weight."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def network() -> torch.nn.Module:
        layers = torch.nn.ModuleDict({"q": torch.nn.Linear(*weight.shape[::-1], bias=False)})
        layers["q"].weight.data = weight.clone()
        block = torch.nn.ModuleDict({"self_attn": layers})
        return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})

    torch.manual_seed(0)
    settings = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q"]} | config)
    model: Any = get_peft_model(network(), settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    merged_weight = PeftModel.from_pretrained(network(), folder).merge_and_unload()
    return folder / "adapter_model.safetensors", merged_weight.state_dict()[f"{Q}.weight"]


INIT_METHODS = (
    True,
    False,
    "gaussian",
    "orthogonal",
    "eva",
    "mica",
    "pissa",
    "pissa_niter_4",
    "olora",
)
PEFT_VARIANTS: tuple[dict[str, Any], ...] = (
    {"use_rslora": True},
    {"rank_pattern": {"q": 2}},
    {"fan_in_fan_out": True},
    {"alpha_pattern": {"q": 2}},
    {"use_dora": True},
)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_merged_as_peft_does_or_refused(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    messages, q = {}, weights[f"{Q}.weight"].float()
    for number, config in enumerate(
        (*({"init_lora_weights": x} for x in INIT_METHODS), *PEFT_VARIANTS)
    ):
        path, expected = peft_folder(tmp_path / str(number), q, **config)
        is_plain = config.get("init_lora_weights", True) not in ("pissa", "pissa_niter_4", "olora")
        if is_plain:
            actual = read_merged_weights(path, tiny("t2v-1.3B"))[f"{Q}.weight"]
            assert torch.allclose(actual, expected, atol=1e-6, rtol=1e-5), config
        else:
            messages[str(config)] = get_refusal(read_merged_weights, path, tiny("t2v-1.3B"))
    check_refusals("LoRA: adapters of PEFT", messages)


UNKNOWN: tuple[dict[str, Any], ...] = (
    *({"init_lora_weights": x} for x in ("corda", "loftq", "lora_ga", "pissa_v2", "", 1, ["eva"])),
    *({key: {"x": 1}} for key in ("arrow_config", "kasa_config", "use_bdlora", "use_next_year")),
    {"layer_replication": [[0, 1]]},
    {"alora_invocation_tokens": [1]},
    {"peft_type": "VERA"},
    {"alpha_pattern": {"(": 2}},
    {"rank_pattern": {".*" * 40: 2}},
    {"modules_to_save": "head"},
    {"use_rslora": "yes"},
)


def test_settings_of_peft_that_are_not_computed(tiny: Any, tmp_path: Path) -> None:
    """In adapter_config.json for a file of any name, or in its metadata, also with alphas."""
    messages: dict[str, str] = {}
    locations = "beside", "renamed", "diffusers", "with alphas"
    for number, (config, location) in enumerate(product(UNKNOWN, locations)):
        name = "style" if location == "renamed" else "adapter_model"
        path, tensors = tmp_path / str(number) / f"{name}.safetensors", dict(PAIR)
        path.parent.mkdir()
        if location == "with alphas":
            tensors[f"{Q}.alpha"] = torch.tensor(4.0)
        metadata = None
        if location in ("diffusers", "with alphas"):
            peft_settings = {f"transformer.{key}": value for key, value in config.items()}
            metadata = {"lora_adapter_metadata": json.dumps(peft_settings)}
        else:
            path.with_name("adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, path, metadata)
        sentence = get_refusal(read_merged_weights, path, tiny("t2v-1.3B"))
        assert next(iter(config)) in sentence and "\n" not in sentence, (config, location)
        if number % len(locations) == 0 or number < len(locations):
            messages[f"{config} {location}"] = sentence
    check_refusals("LoRA: settings of PEFT", messages)


def test_a_configuration_among_other_files_is_adapter_models(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"init_lora_weights": "pissa"}))
    save_file(PAIR, tmp_path / "style.safetensors")
    save_file(PAIR, tmp_path / "adapter_model.safetensors")
    assert read_merged_weights(tmp_path / "style.safetensors", tiny("t2v-1.3B"))


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
