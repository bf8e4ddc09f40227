"""Networks that other programs quantized are read, or refused by the name of the program."""

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
from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_marks import float8_blocks
from wan.checkpoint.headers import read_file_headers
from wan.checkpoint.keymaps import (
    rename_clip_to_transformers,
    rename_t5_to_transformers,
    rename_vae_to_diffusers,
)
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import read_headers
from wan.checkpoint.lora import resolve_loras
from wan.checkpoint.quant_metadata import collect_network_tensors
from wan.planner import report
from wan.planner.measure import Planner
from wan.settings.command import Loras, NetworkFiles

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


REFUSED: dict[str, tuple[str, ...]] = {  # program -> ends of the tensors of a layer
    "quanto": ("weight._data._data", "weight._scale", "weight._shift"),
    "torchao": ("_weight_qdata", "_weight_scale"),
    "torchao ": ("weight:qdata", "weight:scale"),
    "torchao  ": ("weight.tensor_impl.int_data", "weight.tensor_impl.scale"),
    "Nunchaku": ("qweight", "wscales", "smooth_factor", "lora_down", "lora_up"),
    "bitsandbytes (NF4)": ("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"),
    "bitsandbytes (FP4)": ("weight", "weight.absmax", "weight.quant_state.bitsandbytes__fp4"),
    "bitsandbytes (int8)": ("weight", "SCB"),
    "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map"),
    "GPTQ": ("qweight", "qzeros", "scales", "g_idx"),
    "AWQ": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
    "HQQ": ("W_q", "meta"),
    "SDNQ": ("weight", "scale", "zero_point"),
    "TurboDiffusion": ("int8_weight",),
    "a format that is not known": ("weight_of_tomorrow",),
}


def rename_state(state: State, ends: tuple[str, ...]) -> dict[str, Tensor]:
    """Gives each weight of two and of five axes the tensors of a program."""
    stored = {}
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        is_weight = layer != name and tensor.dim() in (2, 5)
        names = [f"{layer}.{end}" for end in ends] if is_weight else [name]
        stored |= {x: tensor.clone() for x in names}
    return stored


@pytest.mark.parametrize("program", REFUSED)
def test_other_programs_are_named(program: str, tiny: Any, tmp_path: Path) -> None:
    """For each network, given with a flag or in the folder, in a plan, and given as a LoRA."""
    source, sentences = tiny("t2v-1.3B"), {}
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    clip = {"visual.cls_embedding": torch.ones(1), "visual.transformer.0.attn.proj.weight": ONES}
    vae = torch.load(source / "Wan2.1_VAE.pth")
    states = {
        "dit": {name: x for name, x in load_file(source / FILE).items() if "blocks.1" not in name},
        "text_encoder": load_encoder(source),
        "vae": {name: x for name, x in vae.items() if name.startswith(("conv", "encoder.conv1"))},
    }
    argv = "--task", "t2v-1.3B", "--ckpt_dir", folder, "--size", "64*64"
    for component, state in states.items():
        path, stored = tmp_path / f"{component}.pth", rename_state(state, REFUSED[program])
        torch.save(stored, path)
        files = NetworkFiles(**{component: path})
        sentences[component] = get_refusal(inspect_checkpoint, source, files)
    if "not known" not in program:
        stored = rename_state(states["vae"], REFUSED[program])
        save_file(stored, tmp_path / "x.safetensors")
        loras = Loras((str(tmp_path / "x.safetensors"),))
        sentences["lora"] = get_refusal(resolve_loras, loras, inspect_checkpoint(source))
        torch.save(rename_state(clip, REFUSED[program]), tmp_path / "clip.pth")
        sentences["clip"] = get_refusal(
            read_headers, tmp_path / "clip.pth", rename_clip_to_transformers, "image_encoder"
        )
    shutil.copy(tmp_path / "vae.pth", folder / "Wan2.1_VAE.pth")
    sentences["a plan"] = get_refusal(plan, *argv)
    save_file(rename_state(states["dit"], REFUSED[program]), folder / FILE)
    sentences["the folder"] = get_refusal(inspect_checkpoint, folder)
    if program in ("Nunchaku", "a format that is not known"):
        check_refusals(f"networks of {program}", sentences)
    wrong = {case: text for case, text in sentences.items() if program.strip() not in text}
    assert not wrong


def plan(*argv: Any) -> None:
    run = resolve_plan(*argv)
    list(report.describe_checkpoint_files(Planner(run.setup, run.params)))


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("optimum.quanto.tensor.weights.qbytes", "quanto"),
        ("torchao.dtypes.affine_quantized_tensor", "torchao"),
        ("bitsandbytes.nn.modules", "bitsandbytes"),
        ("nunchaku.models", "Nunchaku"),
    ],
)
def test_classes_of_other_programs_in_a_pickle_are_named(
    module: str, program: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that lacks the network otherwise."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    weight_class = type("Weight", (), {"__module__": module, "__qualname__": "Weight"})
    monkeypatch.setattr(sys.modules[module], "Weight", weight_class, raising=False)
    path = tmp_path / "x.pth"
    torch.save({"blocks.0.ffn.0.weight": weight_class()}, path)
    sentences = [
        get_refusal(inspect_checkpoint, tiny("t2v-1.3B"), NetworkFiles(**{component: path}))
        for component in ("dit", "text_encoder", "vae")
    ]
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "folder"))
    (folder / FILE).rename(folder / "kept.txt")
    shutil.copy(path, folder / "wan.pth")
    sentences.append(get_refusal(inspect_checkpoint, folder))
    assert all(program in sentence for sentence in sentences), sentences
