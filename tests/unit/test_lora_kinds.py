"""Kinds of adapters: merged as PEFT and LyCORIS merge them, and applied to kept weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.modules.dylora import DyLoraModule
from lycoris.modules.full import FullModule
from lycoris.wrapper import network_module_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.lora_files import (
    CONVOLUTION,
    LINEARS,
    LYCORIS,
    Q,
    make_layer,
    make_pair,
    merge_file,
    randomise,
    save_lycoris,
)
from tests.pipelines import build_quick_pipeline
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_marks import quantise_state
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.deltas import list_factor_shapes
from wan.checkpoint.lora.merge import merge_loras, open_lora_sources, read_lora_factors
from wan.checkpoint.lora.resolve import collect_deltas, resolve_loras
from wan.kernels.weight_only_linear import WeightOnlyLinear
from wan.settings.command import Loras

TOLERANCE = 1e-6  # of the largest change of the weight


def open_merged(path: Path, checkpoint: Checkpoint, strength: float = 1.0) -> Any:
    """The sources of the weights that a file changes."""
    (adapter,) = resolve_loras(Loras((f"{path}={strength}",)), checkpoint)["dit"]
    sources = merge_loras(open_sources(checkpoint.experts["dit"].tensors), [adapter])
    return {name: sources[name] for name in adapter.deltas}, adapter


def check_merged(sources: Any, expected: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    assert sources.keys() == expected.keys()
    for name, exact in expected.items():
        base = weights[name].double()
        error = (sources[name].read(slice(None)).double() - exact).abs().max()
        assert error <= TOLERANCE * (exact - base).abs().max(), name


@pytest.mark.filterwarnings("ignore")
def test_files_add_up_in_any_order(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """A DoRA's change is that of the checkpoint's weight, whatever other files add to it."""
    name, files = f"{Q}.weight", list[str]()
    base = weights[name].double()
    total = base.clone()
    for kind in ("LoRA", "DoRA", "LoKr, DoRA"):
        files.append(str(tmp_path / f"{kind}.safetensors"))
        total += save_lycoris(kind, weights, Path(files[-1]), (Q,), "lycoris_")[name] - base
    tensors = dense.experts["dit"].tensors
    for order in (files, files[::-1]):
        adapters = resolve_loras(Loras(tuple(order)), dense)["dit"]
        merged = merge_loras(open_sources(tensors), adapters)[name]
        check_merged({name: merged}, {name: total}, weights)


@pytest.mark.parametrize("kind", LYCORIS)
@pytest.mark.filterwarnings("ignore")
def test_lycoris(kind: str, weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path) -> None:
    """Also at strength -2, which is -2 times the change.

    Rows of any range have the same bits, so that ranks that hold other rows do, too.
    """
    path = tmp_path / "x.safetensors"
    layers = (*LINEARS, CONVOLUTION, "time_projection.1")  # this one of three tiles of rows
    expected = save_lycoris(kind, weights, path, layers, "lycoris_")
    if kind == "LoKr, factorised":
        assert any("w1_a" in x for x in load_file(path))
    sources, _ = open_merged(path, dense)
    check_merged(sources, expected, weights)
    for name, source in sources.items():
        rows = len(weights[name])
        cuts = [0, 1, rows // 3, 7 * rows // 9, rows - 1, rows]
        parts = [source.read(slice(*cut)) for cut in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), source.read(slice(None))), name
    sources, _ = open_merged(path, dense, -2)
    scaled = {n: torch.lerp(weights[n].double(), x, -2) for n, x in expected.items()}
    check_merged(sources, scaled, weights)


@pytest.mark.parametrize("kind", [k for k in LYCORIS if "DoRA" not in k])
@pytest.mark.filterwarnings("ignore")
def test_beside_a_kept_weight(
    kind: str, weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """Two files for a layer; a layer that adds their outputs equals one with the merged weight."""
    paths, adapters, changes = [tmp_path / x for x in ("one", "two")], [], {}
    for number, path in enumerate(path.with_suffix(".safetensors") for path in paths):
        layers = LINEARS if number else LINEARS[::-1]
        expected = save_lycoris(kind if number else "LoHa", weights, path, layers)
        adapters.append(open_merged(path, dense, -0.5)[1])
        for name, merged in expected.items():
            delta = -0.5 * (merged - weights[name].double())
            changes[name] = changes.get(name, 0) + delta
    deltas = collect_deltas(adapters)
    base_sources = open_sources(dense.experts["dit"].tensors)
    generator = torch.Generator().manual_seed(0)
    for layer in LINEARS:
        weight = weights[f"{layer}.weight"]
        shapes = list_factor_shapes(deltas[f"{layer}.weight"])
        layer_deltas = {layer: deltas[f"{layer}.weight"]}
        sources = open_lora_sources(layer_deltas, torch.float32, base_sources)
        factors = {n: sources[f"{layer}.{n}"].read(slice(None)) for n in shapes}
        assert {name: tuple(x.shape) for name, x in factors.items()} == shapes
        linear = WeightOnlyLinear(
            weight.float(), Tensor.clone, None, in_features=weight.shape[1], lora=factors
        )
        x = torch.randn(2, 5, weight.shape[1], generator=generator)
        exact = x.double() @ (weight.double() + changes[f"{layer}.weight"]).T
        assert (linear(x) - exact).abs().max() <= 2e-6 * exact.abs().max(), layer


def make_network(weights: dict[str, Tensor]) -> nn.Module:
    """Some layers of the network, for PEFT."""
    network = nn.Module()
    for layer in (*LINEARS, CONVOLUTION, "head.head"):
        parent = network
        *parents, last = layer.split(".")
        for name in parents:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        module = make_layer(weights[f"{layer}.weight"])
        module.bias.data = weights[f"{layer}.bias"].double()
        parent.add_module(last, module)
    return network


PEFT: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True, "alpha_pattern": {"q": 2}, "rank_pattern": {"ffn.0": 9}},
    "patterns": {
        "alpha_pattern": {".n.0": 9, "ffn.0": 5, "^blocks.1.*o": 2},
        "rank_pattern": {"q": 1},
    },
    "DoRA": {"use_dora": True},
    "DoRA of patterns": {"use_dora": True, "alpha_pattern": {"q": 9}},
    "biases": {"bias": "all"},
    "biases of layers": {"bias": "lora_only"},
    "a bias of the LoRA": {"lora_bias": True},
    "saved modules": {"modules_to_save": ["head.head"]},
    "LoHa": {"alpha_pattern": {"q": 2}},
    "LoKr": {"alpha_pattern": {"q": 2}, "rank_pattern": {"ffn.2": 50}},
    "LoKr of both": {"decompose_both": True, "decompose_factor": 8},
    "LoKr, whole": {"r": 60, "alpha": 15},
}


MERGED_ONLY = ("DoRA", "DoRA of patterns", "biases", "biases of layers", "saved modules")


def check_separate(
    factors: Mapping[str, Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> None:
    """The factors of each layer make the change of its weight, and of its bias."""
    num_changes = 0
    for layer, layer_factors in factors.items():
        tensors = {name: x.double() for name, x in layer_factors.items()}
        changes = {"bias": tensors["bias"]} if "bias" in tensors else {}
        if "lora_up" in tensors:
            changes["weight"] = tensors["lora_up"] @ tensors["lora_down"]
        if "lora_left_0" in tensors:
            changes["weight"] = torch.kron(tensors["lora_left_0"], tensors["lora_right_0"])
        num_changes += len(changes)
        for name, change in changes.items():
            base = weights[f"{layer}.{name}"].double()
            exact = expected[f"{layer}.{name}"] - base
            error = (change.view_as(base) - exact).abs().max()
            assert error <= TOLERANCE * exact.abs().max(), (layer, name)
    assert num_changes == len(expected)


@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.filterwarnings("ignore")
def test_peft(kind: str, weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path) -> None:
    from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model

    config_class: Any = {"LoHa": LoHaConfig, "LoKr": LoKrConfig}.get(kind[:4], LoraConfig)
    targets = ["q", "o", "ffn.0", "ffn.2"] + (
        [] if config_class is not LoraConfig else ["patch_embedding"]
    )
    alpha = "lora_alpha" if config_class is LoraConfig else "alpha"
    config = config_class(**{"r": 3, alpha: 6, "target_modules": targets} | PEFT[kind])
    model: Any = get_peft_model(make_network(weights), config).double()
    model.requires_grad_(True)
    names = [n for n, _ in model.named_parameters() if "modules_to_save" in n or ".bias" in n]
    randomise(model, 3)
    if kind.startswith("biases"):
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.data += 0.25
    model.save_pretrained(tmp_path)
    merged: Any = PeftModel.from_pretrained(make_network(weights), tmp_path).double()
    expected = merged.merge_and_unload().state_dict()
    assert kind != "saved modules" or not torch.equal(
        expected["head.head.weight"].float(), weights["head.head.weight"].float()
    )
    path = tmp_path / "adapter_model.safetensors"
    sources, _ = open_merged(path, dense)
    changed = {
        name: x for name, x in expected.items() if not torch.equal(x, weights[name].double())
    }
    assert changed.keys() <= sources.keys()
    expected = {name: expected[name] for name in sources}
    check_merged(sources, expected, weights)
    scaled = {name: torch.lerp(weights[name].double(), x, -2) for name, x in expected.items()}
    sources, adapter = open_merged(path, dense, -2)
    check_merged(sources, scaled, weights)
    if kind not in MERGED_ONLY:
        check_separate(read_lora_factors(adapter, lambda *_: torch.float32), scaled, weights)


def test_two_biases_of_a_layer(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """The bias of a pair, with the scale of the pair, and a difference of the bias."""
    down, up = make_pair(weights[f"{Q}.weight"].shape, 3)
    biases = torch.randn(2, len(up), generator=torch.Generator().manual_seed(0))
    tensors = {
        f"{Q}.lora_A.weight": down,
        f"{Q}.lora_B.weight": up,
        f"{Q}.alpha": torch.tensor(6.0),
    }
    tensors |= {f"{Q}.lora_B.bias": biases[0].clone(), f"{Q}.diff_b": biases[1].clone()}
    save_file(tensors, tmp_path / "x.safetensors")
    changes = {"weight": up.double() @ down.double(), "bias": biases[0] + 0.5 * biases[1].double()}
    expected = {f"{Q}.{name}": weights[f"{Q}.{name}"].double() + x for name, x in changes.items()}
    sources, adapter = open_merged(tmp_path / "x.safetensors", dense, 0.5)
    check_merged(sources, expected, weights)
    check_separate(read_lora_factors(adapter, lambda *_: torch.float32), expected, weights)


PEFT_OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 48},
    "IA3": {"feedforward_modules": ["ffn.2"]},
    "ROAD": {"group_size": 32},
    "VBLORA": {"vector_length": 48},
}
"""Options without which a kind does not fit the network."""


@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_peft_are_refused(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """All kinds of PEFT's registry that adapt layers, without the settings that name the kind."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS

    sentences = {}
    for kind in sorted(x.value for x in CONFIGS if x.value not in ("LORA", "LOHA", "LOKR")):
        config_class: Any = CONFIGS[peft.PeftType(kind)]
        if issubclass(config_class, peft.PromptLearningConfig):
            continue
        options = {"target_modules": ["q", "ffn.2"], **PEFT_OPTIONS.get(kind, {})}
        try:
            model: Any = peft.get_peft_model(make_network(weights).float(), config_class(**options))
            model.save_pretrained(tmp_path / kind)
        except Exception:  # each kind refuses what it cannot adapt in its own way
            continue
        path = tmp_path / kind / "adapter_model.safetensors"
        path.with_name("adapter_config.json").unlink()
        sentences[kind] = get_refusal(merge_file, path, dense)
    accepted = [kind for kind, sentence in sentences.items() if not sentence]
    assert len(sentences) > 20 and not accepted, (len(sentences), accepted)


@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_lycoris_are_refused(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """DyLoRA's files are those of a LoRA, and those of full training are differences."""
    merged = {module_class for module_class, _ in LYCORIS.values()} | {DyLoraModule, FullModule}
    others, path = {*network_module_dict.values()} - merged, tmp_path / "x.safetensors"
    for module_class in others:
        module = module_class("x", make_layer(weights[f"{Q}.weight"]), 1.0, 24, 2).double()
        randomise(module, 0)
        save_file({f"{Q}.{name}": x.contiguous() for name, x in module.state_dict().items()}, path)
        assert get_refusal(merge_file, path, dense), module_class
    assert len(others) >= 4


@pytest.mark.filterwarnings("ignore")
def test_dora_of_kept_weights_is_refused(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """Before anything is loaded; upcast weights take it."""
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "t2v-1.3B"))
    file, path = folder / "diffusion_pytorch_model.safetensors", tmp_path / "x.safetensors"
    save_file(quantise_state(load_file(file), "float8")[0], file)
    save_lycoris("DoRA", weights, path, LINEARS)
    flags = ["--lora", str(path), "--stored_weights"]
    build_quick_pipeline(folder, *flags, "upcast")
    messages = {
        setting: get_refusal(build_quick_pipeline, folder, *flags, setting)
        for setting in ("keep", "auto", "multiply")
    }
    check_refusals("LoRA: DoRA of kept weights", messages)


def test_alphas_of_whole_matrices_count_for_nothing(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """ai-toolkit's LoKr of full rank has an alpha of 1e10, which LyCORIS does not use."""
    path, rows = tmp_path / "x.safetensors", len(weights[f"{Q}.weight"])
    left, right = torch.eye(4), torch.randn(rows // 4, rows // 4)
    tensors = {f"{Q}.lokr_w1": left, f"{Q}.lokr_w2": right, f"{Q}.alpha": torch.tensor(1e10)}
    save_file(tensors, path)
    sources, _ = open_merged(path, dense)
    exact = weights[f"{Q}.weight"].double() + torch.kron(left, right).double()
    check_merged(sources, {f"{Q}.weight": exact}, weights)
    config = {"peft_type": "LOKR", "alpha": 8.0, "r": 10**400, "use_rslora": True}
    path.with_name("adapter_config.json").write_text(json.dumps(config))
    del tensors[f"{Q}.alpha"]
    save_file(tensors, path)
    check_merged(open_merged(path, dense)[0], {f"{Q}.weight": exact}, weights)
