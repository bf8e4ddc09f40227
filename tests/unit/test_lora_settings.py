"""The settings of a LoRA: alphas, PEFT's settings, strengths; and the comparison of ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.lora_files import PAIR, Q, make_pair, merge_file
from tests.pipelines import resolve_argv
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.resolve import resolve_loras
from wan.settings.command import Loras

V = "blocks.0.self_attn.v"


def name_for_diffusers(
    layer: str, down: Tensor, up: Tensor, prefix: str = "transformer"
) -> dict[str, Tensor]:
    name = layer.replace("self_attn.", "attn1.to_")
    ends = {"A": down, "B": up}
    return {f"{prefix}.{name}.lora_{end}.weight": x.clone() for end, x in ends.items()}


def save_with_settings(
    tensors: Mapping[str, Tensor], path: Path, settings: Mapping[str, Any], *, prefix: str = ""
) -> Path:
    """Saves a file with PEFT's settings in diffusers' metadata."""
    named = {f"{prefix}{key}": value for key, value in settings.items()}
    save_file(dict(tensors), path, {"lora_adapter_metadata": json.dumps(named)})
    return path


@pytest.mark.filterwarnings("ignore")
def test_ways_to_begin_training_that_change_the_base_weights_are_refused(
    dense: Checkpoint, tmp_path: Path
) -> None:
    """PEFT shows which do: the adapter belongs to other weights than those of the checkpoint."""
    from peft import LoraConfig, get_peft_model

    methods = (True, False, "gaussian", "orthogonal", "eva", "mica")
    for init in (*methods, "pissa", "pissa_niter_4", "olora"):
        torch.manual_seed(0)
        network: Any = torch.nn.ModuleDict({"q": torch.nn.Linear(96, 96, bias=False)})
        before = network["q"].weight.detach().clone()
        config = LoraConfig(r=4, target_modules=["q"], init_lora_weights=init)
        model: Any = get_peft_model(network, config)
        is_unchanged = torch.equal(model.base_model.model["q"].base_layer.weight, before)
        model.save_pretrained(tmp_path)
        save_file(PAIR, tmp_path / "adapter_model.safetensors")
        sentence = get_refusal(merge_file, tmp_path / "adapter_model.safetensors", dense)
        assert ("init_lora_weights" in sentence) == (not is_unchanged), (init, sentence)


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


def test_settings_of_peft_that_are_not_computed(dense: Checkpoint, tmp_path: Path) -> None:
    """In adapter_config.json for a file of any name, or in its metadata, also with alphas."""
    messages: dict[str, str] = {}
    locations = "beside", "renamed", "diffusers", "with alphas"
    cases = [(UNKNOWN[0], location) for location in locations[1:]]
    for number, (config, location) in enumerate([*cases, *((x, "beside") for x in UNKNOWN)]):
        name = "style" if location == "renamed" else "adapter_model"
        path, tensors = tmp_path / str(number) / f"{name}.safetensors", dict(PAIR)
        path.parent.mkdir()
        if location == "with alphas":
            tensors[f"{Q}.alpha"] = torch.tensor(4.0)
        if location in ("diffusers", "with alphas"):
            save_with_settings(tensors, path, config, prefix="transformer.")
        else:
            path.with_name("adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, path)
        sentence = messages[f"{config} {location}"] = get_refusal(merge_file, path, dense)
        assert next(iter(config)) in sentence, (config, location)
    check_refusals("LoRA: settings of PEFT", messages)


def test_a_configuration_among_other_files_is_adapter_models(
    dense: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"init_lora_weights": "pissa"}))
    save_file(PAIR, tmp_path / "style.safetensors")
    save_file(PAIR, tmp_path / "adapter_model.safetensors")
    assert merge_file(tmp_path / "style.safetensors", dense)


def check_factors(
    path: Path,
    checkpoint: Checkpoint,
    factors: Mapping[str, float],
    down: Tensor,
    up: Tensor,
    expert: str = "dit",
) -> None:
    """The merged weights are the checkpoint's and a multiple of the pair."""
    plain = open_sources(checkpoint.experts[expert].tensors)
    merged = merge_loras(plain, resolve_loras(Loras(lora=(str(path),)), checkpoint)[expert])
    for layer, factor in factors.items():
        weight, actual = (x[f"{layer}.weight"].read(slice(None)).double() for x in (plain, merged))
        exact = weight + factor * up.double() @ down.double()
        torch.testing.assert_close(actual, exact, atol=1e-9, rtol=2e-7)


def test_alphas_of_layers_count_before_those_of_peft(dense: Checkpoint, tmp_path: Path) -> None:
    """PEFT's settings divide them by sqrt(rank), and have the alphas of the other layers."""
    down, up = make_pair(torch.Size((96, 96)), 4)
    settings = {"r": 4, "lora_alpha": 32, "use_rslora": True}
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
    for dtype in dtypes:
        tensors = name_for_diffusers(Q, down, up) | name_for_diffusers(V, down, up)
        tensors["transformer.blocks.0.attn1.to_q.alpha"] = torch.tensor(6, dtype=dtype)
        path = tmp_path / "x.safetensors"
        save_with_settings(tensors, path, settings, prefix="transformer.")
        check_factors(path, dense, {Q: 6 / 2, V: 32 / 2}, down, up)
    save_with_settings(
        tensors, path, settings | {"use_rslora": False, "alpha_pattern": {"to_v": 2}}
    )
    check_factors(path, dense, {Q: 6 / 4, V: 2 / 4}, down, up)
    save_file(tensors, path)
    check_factors(path, dense, {Q: 6 / 4, V: 1}, down, up)


def test_adapter_config_counts_before_the_metadata(dense: Checkpoint, tmp_path: Path) -> None:
    """As for PEFT, which knows no metadata; a setting that it lacks is taken from there."""
    down, up = make_pair(torch.Size((96, 96)), 4)
    settings = {"lora_alpha": 50, "use_rslora": True}
    path = save_with_settings(name_for_diffusers(Q, down, up), tmp_path / "x.safetensors", settings)
    config = path.with_name("adapter_config.json")
    for values, factor in (
        ({"lora_alpha": 3}, 3 / 2),
        ({"lora_alpha": 3} | {"use_rslora": False}, 3 / 4),
    ):
        config.write_text(json.dumps(values))
        check_factors(path, dense, {Q: factor}, down, up)


def test_the_metadata_of_each_expert_is_its_own(
    pair_of_experts: Checkpoint, tmp_path: Path
) -> None:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA, of the low-noise expert's metadata."""
    shape = pair_of_experts.experts["low_noise"].tensors[f"{Q}.weight"].shape
    down, up = make_pair(torch.Size(shape), 4)
    tensors = name_for_diffusers(Q, down, up) | name_for_diffusers(Q, down, up, "transformer_2")
    for stabilised, factor in ((False, 8 / 4), (True, 8 / 2), (None, 8 / 4)):
        settings: dict[str, Any] = {"transformer.lora_alpha": 2, "transformer.use_rslora": False}
        settings |= {"transformer_2.lora_alpha": 8, "transformer_2.use_rslora": stabilised}
        path = save_with_settings(tensors, tmp_path / "x.safetensors", settings)
        check_factors(path, pair_of_experts, {Q: 2 / 4}, down, up, "high_noise")
        check_factors(path, pair_of_experts, {Q: factor}, down, up, "low_noise")


def test_ranks_compare_content_and_strength_and_no_folders(tiny: Any, tmp_path: Path) -> None:
    """Ranks may read the same file from other folders, but not another strength or other values."""
    here, there = tmp_path / "here.safetensors", tmp_path / "other" / "there.safetensors"
    save_file(PAIR, here)
    there.parent.mkdir()
    shutil.copy(here, there)
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), "--base_seed", "1"]
    argv += ["--save_file", "v.mp4", "--lora"]

    def collect_invariants(argument: str) -> dict[str, Any]:
        return resolve_argv([*argv, argument]).collect_rank_invariants("cpu")

    def find_differences(argument: str) -> set[str]:
        base, other = collect_invariants(f"{here}=0.5"), collect_invariants(argument)
        return {name for name in base | other if base.get(name) != other.get(name)}

    assert find_differences(f"{there}=0.5") == set()
    assert find_differences(f"{there}=0.6") == {"the content of --lora"}
    save_file({name: 2 * x for name, x in PAIR.items()}, there)  # of the same size
    assert find_differences(f"{there}=0.5") == {"the content of --lora"}
