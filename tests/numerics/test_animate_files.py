"""Animate's weights in every layout: the same network, against diffusers and official tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import slow
from tests.numerics.official import distance
from tests.numerics.procedural import make_procedural_tensor
from tests.numerics.test_animate import animate, load_inputs, load_state, read_json
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.layout import check_task, inspect_checkpoint
from wan.checkpoint.load import ModelSpec
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.resolve import resolve_loras
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.tasks.base import build_dit
from wan.testing.random_checkpoint import convert_to_diffusers, write_json

__all__ = ["animate"]  # a fixture
PRESET = PRESETS["animate-14B"]
NAME = "diffusion_pytorch_model.safetensors"
KEYS_AND_VALUES = "face_adapter.fuser_blocks.0.linear1_kv.weight"


def load_dit(folder: Path, **values: Any) -> Any:
    """Load the network of a folder as a run does, in float32."""
    checkpoint = inspect_checkpoint(folder, presets=(PRESET,))
    check_task(checkpoint, PRESET)
    files = checkpoint.experts["dit"]
    loras = resolve_loras(Loras(**values), checkpoint).get("dit", ())
    return ModelSpec("DiT", partial(build_dit, files.config), files.tensors, folder).load(
        device=torch.device("cpu"),
        dtype_of=lambda *_: torch.float32,
        transform=lambda _, sources: merge_loras(sources, loras),
    )


def stored_state(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def write_single_file(tensors: dict[str, Tensor], folder: Path, prefix: str = "") -> Path:
    """Write one file with a published name into a folder without config.json."""
    folder.mkdir()
    renamed = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(renamed, folder / "Wan2_2-Animate-14B.safetensors")
    return folder


WRITERS: dict[str, Callable[[dict[str, Tensor], Path], Path]] = {
    "single": write_single_file,
    "ComfyUI": partial(write_single_file, prefix="model.diffusion_model."),
    "diffusers": lambda tensors, folder: write_single_file(convert_to_diffusers(tensors), folder),
    "without kernels": lambda tensors, folder: write_single_file(
        {name: x for name, x in tensors.items() if not name.endswith(".kernel")}, folder
    ),
}


def test_layouts(tiny: Any, tmp_path: Path) -> None:
    """All single-file layouts load bit-equal tensors; the Diffusers folder is tested below."""
    official = tiny("animate-14B")
    stored, expected = stored_state(official), load_dit(official).state_dict()
    for name, write in WRITERS.items():
        actual = load_dit(write(stored, tmp_path / name)).state_dict()
        assert actual.keys() == expected.keys(), name
        assert all(torch.equal(actual[key], expected[key]) for key in actual), name


def test_damaged_keys_and_values(tiny: Any, tmp_path: Path) -> None:
    tensors = convert_to_diffusers(stored_state(tiny("animate-14B")))
    del tensors["face_adapter.0.to_v.bias"]
    with pytest.raises(InputError, match=r"to_k\.bias lacks its value tensor"):
        load_dit(write_single_file(tensors, tmp_path / "files"))


@pytest.fixture(scope="module")
def folder(animate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official network as an official folder."""
    out = tmp_path_factory.mktemp("official") / "folder"
    out.mkdir()
    save_file(load_state(animate), out / NAME)
    write_json(
        out / "config.json", {**read_json(animate)["config"], "_class_name": "WanAnimateModel"}
    )
    return out


@pytest.fixture(scope="module")
def pairs(animate: Path) -> dict[str, Tensor]:
    """The factors of the official relighting LoRA, by name."""
    lora_spec = read_json(animate)["lora"]
    return {
        name: make_procedural_tensor(lora_spec["seed"], name, shape, scale)
        for name, (shape, scale) in lora_spec["tensors"].items()
    }


@pytest.mark.parametrize(
    "prefix", ["", slow("base_model.model."), slow("diffusion_model."), "in a folder"]
)
@torch.no_grad()
def test_relighting_lora(
    prefix: str, folder: Path, animate: Path, pairs: dict[str, Tensor]
) -> None:
    """All key prefixes load; the official loader silently ignores `diffusion_model.`."""
    file, peft = folder / "relighting_lora.ckpt", folder / "relighting_lora"
    file.unlink(missing_ok=True)
    if prefix == "in a folder":
        peft.mkdir()
        save_file(pairs, peft / "adapter_model.safetensors")
        write_json(peft / "adapter_config.json", {"r": 128, "lora_alpha": 128})
    else:
        torch.save({"state_dict": {prefix + name: x for name, x in pairs.items()}}, file)
    arguments, _ = load_inputs(animate, "c")
    stored = load_file(animate / "dit_animate.cases.safetensors")["c_lora.out"]
    assert distance(load_dit(folder, use_relighting_lora=True)(**arguments)[0], stored) <= 2e-5
    if prefix == "in a folder":  # half the alpha is half the change
        write_json(peft / "adapter_config.json", {"r": 128, "lora_alpha": 64})
        half = load_dit(folder, use_relighting_lora=True).state_dict()
        lora_file = f"{peft / 'adapter_model.safetensors'}"
        name = "blocks.0.self_attn.q.weight"
        up, down = (pairs[name.replace(".weight", f".lora_{x}.weight")] for x in "BA")
        assert distance(half[name], load_state(animate)[name] + up @ down / 2) <= 1e-6
        assert torch.equal(half[name], load_dit(folder, lora=(lora_file,)).state_dict()[name])


def make_lora_of_q(name: str) -> dict[str, Any]:
    return {"state_dict": {f"{name}.lora_A.weight": torch.zeros(4, 96)}}


def test_refused_relighting_lora(tiny: Any, tmp_path: Path) -> None:
    folder = write_single_file(stored_state(tiny("animate-14B")), tmp_path / "files")
    file = folder / "relighting_lora.ckpt"

    def refuse_lora(content: object = None) -> str:
        if content is not None:
            torch.save(content, file)
        return get_refusal(lambda: load_dit(folder, use_relighting_lora=True))

    messages = {"none": refuse_lora()}
    messages["unknown"] = refuse_lora(make_lora_of_q("blocks.0.self_attn.qq"))
    messages["prefix"] = refuse_lora(make_lora_of_q("foreign.blocks.0.self_attn.q"))
    messages["half"] = refuse_lora(make_lora_of_q("blocks.0.self_attn.q"))
    messages["code"] = refuse_lora({"state_dict": {"x": Path("x")}})
    messages["empty"] = refuse_lora({})
    file.write_bytes(b"x" * 100)
    messages["damaged"] = refuse_lora()
    check_refusals("relighting LoRA", messages, hide=[r"(?<=read) \(.*\)(?=;)"])
