"""Every kind of adapter that PEFT and LyCORIS write is merged as they merge it, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wan.checkpoint.layout import Checkpoint, inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.resolve import resolve_loras
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.testing.random_checkpoint import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-6  # of the largest change
TARGETS = ["to_q", "to_v", "ffn.net.2"]
PEFT_OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 48},
    "IA3": {"feedforward_modules": ["ffn.net.2"]},
    "ROAD": {"group_size": 32},
    "VBLORA": {"vector_length": 48},
}
"""Options of PEFT without which a kind does not fit the tiny network."""
PEFT_VARIANTS: dict[str, dict[str, Any]] = {
    **{
        name: {"init_lora_weights": name}
        for name in ("gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora")
    },
    "QALoRA": {"use_qalora": True, "qalora_group_size": 8},
    "KaSA": {"kasa_config": "KasaConfig"},
}
"""Variants of PEFT's LORA, in addition to those of test_lora_kinds.py."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, sizes = tmp_path_factory.mktemp("lora"), {"num_layers": 2}
    return inspect_checkpoint(
        make_checkpoint("t2v-1.3B", folder / "x", layout="diffusers", sizes=sizes)
    )


def load_network(checkpoint: Checkpoint) -> Any:
    from diffusers import WanTransformer3DModel

    assert checkpoint.folder is not None
    return WanTransformer3DModel.from_pretrained(checkpoint.folder / "transformer").double()


def is_merged(checkpoint: Checkpoint, file: Path, merge: Callable[[], dict[str, Tensor]]) -> bool:
    """Whether `--lora` takes a file; its weights must then be those of the library's `merge`."""
    try:
        loras = resolve_loras(Loras((str(file),)), checkpoint)["dit"]
    except InputError:
        return False
    sources = merge_loras(open_sources(checkpoint.experts["dit"].tensors), loras)
    expected, stored = merge(), load_network(checkpoint).state_dict()
    for name, source in sources.items():
        key = rename_dit_to_diffusers(name)
        exact = expected.get(key, stored[key])
        actual = source.read(slice(None)).double().reshape(exact.shape)
        limit = TOLERANCE * (exact - stored[key]).abs().max()
        assert (actual - exact).abs().max() <= limit, (file, name)
    return True


def randomise(parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Adds random values to trained parameters; a DoRA's magnitudes change by up to a third."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
            is_magnitude = "magnitude" in name or "dora_scale" in name
            parameter.data = parameter.data + noise * (
                parameter.data * 2 / 3 if is_magnitude else 1
            )


def test_kinds_of_peft(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Kinds for the prompts of language models are left out."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    cases: dict[str, Any] = {}
    for kind, make_config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if issubclass(make_config, peft.PromptLearningConfig) or kind.value == "ADAPTION_PROMPT":
            continue
        fields = {field.name for field in dataclasses.fields(make_config)}
        targets = {"target_modules": TARGETS} if "target_modules" in fields else {}
        cases[kind.value] = make_config, targets | PEFT_OPTIONS.get(kind.value, {})
    for variant, options in PEFT_VARIANTS.items():
        values = {k: getattr(peft, v)() if k == "kasa_config" else v for k, v in options.items()}
        cases[variant] = peft.LoraConfig, {"target_modules": TARGETS, **values}
    merged, without_file = set(), set()
    for kind, (make_config, options) in cases.items():
        folder = tmp_path / kind
        try:
            model: Any = peft.get_peft_model(
                load_network(checkpoint).float(), make_config(**options)
            )
            randomise(model.named_parameters())
            model.double().save_pretrained(folder)
        except Exception:  # each kind refuses what it cannot adapt in its own way
            without_file.add(kind)
            continue

        def merge(folder: Path = folder) -> dict[str, Tensor]:
            loaded: Any = peft.PeftModel.from_pretrained(load_network(checkpoint), folder)
            return loaded.double().merge_and_unload().state_dict()

        if is_merged(checkpoint, folder / "adapter_model.safetensors", merge):
            merged.add(kind)
    assert merged == {"LORA", "LOHA", "LOKR", "gaussian", "orthogonal"}
    assert without_file <= {"SHADOW", "ADAMSS"}  # these need a language model, scikit-learn
    assert len(cases) >= 45


def test_kinds_of_lycoris(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The outputs of the adapted layers show the weights: LyCORIS' merges scale LoHa twice."""
    from lycoris import create_lycoris
    from lycoris.logging import logger
    from lycoris.wrapper import network_module_dict

    logger.setLevel("ERROR")
    merged = set()
    for kind in network_module_dict:
        file, target = tmp_path / f"{kind}.safetensors", load_network(checkpoint)
        rank = 24 if kind == "boft" else 4  # BOFT needs one that fits the network
        network = create_lycoris(target, linear_dim=rank, linear_alpha=2, algo=kind)
        network.apply_to()
        randomise(network.double().eval().named_parameters())
        network.save_weights(str(file), torch.float64, {})
        for adapter in network.loras if kind == "dylora" else ():  # its forward draws a rank
            adapter.restore()
            weight = adapter.org_module[0].weight.data
            change = torch.cat([*adapter.up_list], 1) @ torch.cat([*adapter.down_list])
            weight += change.view(weight.shape) * adapter.scale
        if is_merged(checkpoint, file, lambda target=target: read_forward_state(target)):
            merged.add(kind)
    assert merged == {"lora", "locon", "loha", "lokr", "dylora", "glora", "full"}


@torch.no_grad()
def read_forward_state(network: nn.Module) -> dict[str, Tensor]:
    """Returns the weights and biases of layers as their outputs show them."""
    state = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            inputs = torch.eye(layer.in_features, dtype=torch.float64)
            shape: tuple[int, ...] = (layer.out_features, layer.in_features)
        elif isinstance(layer, nn.Conv3d):
            size = (layer.in_channels, *layer.kernel_size)
            inputs = torch.eye(prod(size), dtype=torch.float64).view(-1, *size)
            shape = (layer.out_channels, *size)
        else:
            continue
        outputs = layer(torch.cat([inputs, torch.zeros_like(inputs[:1])])).flatten(1)
        state[f"{name}.bias"] = outputs[-1]
        state[f"{name}.weight"] = (outputs[:-1] - outputs[-1]).T.reshape(shape)
    return state
