"""Networks that other programs quantized are read, or refused by one rule."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint_files import are_equal, load_tensors, read_values
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_marks import float8_blocks
from wan.checkpoint.formats.headers import read_file_headers
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import read_headers
from wan.checkpoint.names.keymaps import (
    rename_t5_to_transformers,
    rename_vae_to_diffusers,
)
from wan.checkpoint.quant.metadata import collect_network_tensors
from wan.settings.command import NetworkFiles

ONES = torch.ones(2, 2)
State = Mapping[str, Tensor]
FILE = "diffusion_pytorch_model.safetensors"


def store_quanto(name: str, weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Any, Tensor]:
    """A scale for each row, with all axes of the weight."""
    scale = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True) / 120
    values = (weight / scale).round().to(dtype)
    stored = {f"{name}.weight._data": values, f"{name}.weight._scale": scale}
    ones = {f"{name}.input_scale": torch.ones(()), f"{name}.output_scale": torch.ones(())}
    return stored | ones, values.float() * scale


def store_turbodiffusion(name: str, weight: Tensor, size: int) -> tuple[Any, Tensor]:
    """Blocks of as many rows as columns; of 128, of 64 in later files."""
    _, scale = float8_blocks(weight, (size, size))[0].values()
    by_value = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
    by_value = by_value[: weight.shape[0], : weight.shape[1]]
    values = (weight / by_value).div(4).round().to(torch.int8)
    return {f"{name}.int8_weight": values, f"{name}.scale": scale * 4}, values * by_value * 4


READ: dict[str, Callable[[str, Tensor], tuple[Any, Tensor]]] = {
    "quanto, int8": store_quanto,
    "quanto, float8": partial(store_quanto, dtype=torch.float8_e4m3fn),
    "TurboDiffusion, 64": partial(store_turbodiffusion, size=64),
    "TurboDiffusion, 32": partial(store_turbodiffusion, size=32),
}


@pytest.mark.parametrize(
    ("layout", "suffix"), [*zip(READ, (".pt", ".safetensors") * 2, strict=True)]
)
def test_values_with_scales_are_read(layout: str, suffix: str, tiny: Any, tmp_path: Path) -> None:
    """In the DiT, the text encoder and, by quanto, in the convolutions of the VAE."""
    source, path = tiny("t2v-1.3B"), tmp_path / f"x{suffix}"
    text = {rename_t5_to_transformers(x): y for x, y in load_encoder(source).items()}
    vae = {rename_vae_to_diffusers(x): y for x, y in torch.load(source / "Wan2.1_VAE.pth").items()}
    states = {"dit": (load_file(source / FILE), 2), "text_encoder": (text, 2), "vae": (vae, 5)}
    for component, (state, axes) in states.items():
        if component == "vae" and "quanto, int8" not in layout:
            continue
        stored, expected = {}, {}
        for name, tensor in state.items():
            layer = name.removesuffix(".weight")
            is_weight = tensor.dim() == axes and layer != name and "embed" not in name
            is_weight &= "shared" not in name and "relative" not in name
            parts, value = READ[layout](layer, tensor.float()) if is_weight else ({}, tensor)
            stored |= {f"model.{x}": y for x, y in (parts or {name: tensor}).items()}
            expected[name] = value.float()
        save_file(stored, path) if suffix == ".safetensors" else torch.save(stored, path)
        actual = read_values(collect_network_tensors(read_file_headers(path), str, component))
        assert are_equal(actual, expected), component


def load_encoder(folder: Path) -> dict[str, Tensor]:
    return load_tensors(folder / "models_t5_umt5-xxl-enc-bf16.pth")


REFUSED: dict[str, tuple[str, ...]] = {  # format -> ends of the tensors of a layer
    "quanto, int4": ("weight._data._data", "weight._scale", "weight._shift"),
    "torchao": ("weight:qdata", "weight:scale"),
    "Nunchaku": ("qweight", "wscales", "smooth_factor", "lora_down", "lora_up"),
    "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
    "HQQ": ("W_q", "meta"),
    "a format of tomorrow": ("weight_of_tomorrow",),
}


def rename_state(state: State, ends: tuple[str, ...]) -> dict[str, Tensor]:
    """Gives each weight of two and of five axes the tensors of a format."""
    stored = {}
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        is_weight = layer != name and tensor.dim() in (2, 5)
        names = [f"{layer}.{end}" for end in ends] if is_weight else [name]
        stored |= {x: tensor.to(torch.uint8 if is_weight and x == name else None) for x in names}
        stored = {x: tensor.clone() for x, tensor in stored.items()}
    return stored


@pytest.mark.parametrize("layout", REFUSED)
def test_other_formats_are_refused(layout: str, tiny: Any, tmp_path: Path) -> None:
    """By rule, for each network, given with a flag or in the folder."""
    source, sentences, ends = tiny("t2v-1.3B"), {}, REFUSED[layout]
    vae = torch.load(source / "Wan2.1_VAE.pth")
    states = {
        "dit": {name: x for name, x in load_file(source / FILE).items() if "blocks.1" not in name},
        "text_encoder": load_encoder(source),
        "vae": {name: x for name, x in vae.items() if name.startswith(("conv", "encoder.conv1"))},
        "image_encoder": {"visual.cls_embedding": ONES, "visual.x.attn.proj.weight": ONES},
    }
    for component, state in states.items():
        path = tmp_path / f"{component}.pth"
        torch.save(rename_state(state, ends), path)
        if component != "image_encoder" or "weight" in ends:
            sentences[component] = get_refusal(read_headers, path, str, component)
    files = NetworkFiles(dit=tmp_path / "dit.pth")
    sentences["by its flag"] = get_refusal(inspect_checkpoint, source, files)
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    save_file(rename_state(states["dit"], ends), folder / FILE)
    sentences["in the folder"] = get_refusal(inspect_checkpoint, folder)
    words = "is stored as U8" if "weight" in ends else "in a format that is not read"
    assert all(words in sentence for sentence in sentences.values()), sentences
    if layout in ("Nunchaku", "bitsandbytes"):
        check_refusals(f"networks of {layout}", sentences)


def test_classes_of_other_programs_in_a_pickle_are_named(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "optimum.quanto"
    for name in ("optimum", module):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    weight_class = type("Weight", (), {"__module__": module, "__qualname__": "Weight"})
    monkeypatch.setattr(sys.modules[module], "Weight", weight_class, raising=False)
    path = tmp_path / "x.pth"
    torch.save({"blocks.0.ffn.0.weight": weight_class()}, path)
    for component in ("dit", "text_encoder", "vae"):
        files = NetworkFiles(**{component: path})
        assert "holds optimum.quanto.Weight" in get_refusal(
            inspect_checkpoint, tiny("t2v-1.3B"), files
        )
