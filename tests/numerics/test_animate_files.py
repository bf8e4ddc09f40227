"""Animate's weights in every layout: the same network, against diffusers and official tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanAnimateTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import slow
from tests.numerics.official import distance
from tests.numerics.procedural import procedural
from tests.numerics.test_animate import animate, inputs, state, told
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint import keymaps, lora
from wan.checkpoint.layout import check_task, inspect_checkpoint
from wan.checkpoint.load import ModelSpec, merge_loras
from wan.modules.networks import build_dit
from wan.pipeline.tiny import convert_to_diffusers, write_json
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS

__all__ = ["animate"]  # a fixture
PRESET = PRESETS["animate-14B"]
NAME = "diffusion_pytorch_model.safetensors"
KEYS_AND_VALUES = "face_adapter.fuser_blocks.0.linear1_kv.weight"


def loaded(folder: Path, **values: Any) -> Any:
    """Load the network of a folder as a run does, in float32."""
    checkpoint = inspect_checkpoint(folder, presets=(PRESET,))
    check_task(checkpoint, PRESET)
    files = checkpoint.experts["dit"]
    loras = lora.resolve_loras(values, checkpoint).get("dit", ())
    return ModelSpec("DiT", partial(build_dit, files.config), files.tensors, folder).load(
        device=torch.device("cpu"),
        dtype_of=lambda *_: torch.float32,
        transform=lambda _, sources: merge_loras(sources, loras),
    )


def stored_state(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def single_file(tensors: dict[str, Tensor], folder: Path, prefix: str = "") -> Path:
    """Write one file with a published name into a folder without config.json."""
    folder.mkdir()
    renamed = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(renamed, folder / "Wan2_2-Animate-14B.safetensors")
    return folder


def scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantize as ComfyUI's FP8: one scale for each matrix of the blocks and adapters."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if tensor.dim() == 2 and name.startswith(("blocks.", "face_adapter.")):
            scale = tensor.abs().max().float() / 448
            found[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            found[f"{layer}.scale_weight"] = scale.reshape(1)
        else:
            found[name] = tensor
    return found


WAYS: dict[str, Callable[[dict[str, Tensor], Path], Path]] = {
    "single": single_file,
    "ComfyUI": partial(single_file, prefix="model.diffusion_model."),
    "diffusers": lambda tensors, folder: single_file(convert_to_diffusers(tensors), folder),
    "without kernels": lambda tensors, folder: single_file(
        {name: x for name, x in tensors.items() if not name.endswith(".kernel")}, folder
    ),
}


def test_layouts(tiny: Any, tmp_path: Path) -> None:
    """All single-file layouts load bit-equal tensors; the Diffusers folder is tested below."""
    official = tiny("animate-14B")
    stored, theirs = stored_state(official), loaded(official).state_dict()
    for name, write in WAYS.items():
        ours = loaded(write(stored, tmp_path / name)).state_dict()
        assert ours.keys() == theirs.keys(), name
        assert all(torch.equal(ours[one], theirs[one]) for one in ours), name


def test_fp8_file(tiny: Any, tmp_path: Path) -> None:
    official = stored_state(tiny("animate-14B"))
    stored = scaled(official)
    found = loaded(single_file(stored, tmp_path / "files")).state_dict()
    for name in ("blocks.0.self_attn.q.weight", KEYS_AND_VALUES):
        scale = stored[name.replace(".weight", ".scale_weight")]
        assert torch.equal(found[name], stored[name].float() * scale)
    assert torch.equal(
        found["motion_encoder.dec.direction.weight"],
        official["motion_encoder.dec.direction.weight"].float(),
    )


@pytest.mark.slow
@torch.no_grad()
def test_diffusers_folder(tiny: Any) -> None:
    """Against diffusers' network from the same folder; this also tests the mapping of names."""
    folder = tiny("animate-14B", "diffusers")
    theirs: Any = WanAnimateTransformer3DModel.from_pretrained(
        folder / "transformer", torch_dtype=torch.float32
    ).eval()
    ours, of_official = loaded(folder), loaded(tiny("animate-14B")).state_dict()
    names = {keymaps.rename_dit_to_official(name) for name in theirs.state_dict()}
    names = {
        name.replace("linear1_k.", "linear1_kv.") for name in names if "linear1_v." not in name
    }
    assert names == {name for name in of_official if not name.endswith(".kernel")}
    assert all(torch.equal(x, of_official[name]) for name, x in ours.state_dict().items())
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(c, 3, 6, 10, generator=draw) for c in (16, 20))
    pose, text = torch.randn(1, 16, 2, 6, 10, generator=draw), torch.randn(7, 64, generator=draw)
    seen = torch.randn(1, 257, 160, generator=draw)
    faces = torch.rand(1, 3, 5, 512, 512, generator=draw) * 2 - 1
    when = torch.tensor([500])
    out = ours([x], when, seen, [text], 45, [y], pose, faces)[0]
    padded = F.pad(text, (0, 0, 0, 512 - len(text)))[None]
    expected = theirs(torch.cat((x, y))[None], when, padded, seen, pose, faces).sample[0]
    assert distance(out, expected) <= 1e-4  # their sinusoid is float32


def test_damaged_keys_and_values(tiny: Any, tmp_path: Path) -> None:
    tensors = convert_to_diffusers(stored_state(tiny("animate-14B")))
    del tensors["face_adapter.0.to_v.bias"]
    with pytest.raises(InputError, match=r"to_k\.bias lacks its value tensor"):
        loaded(single_file(tensors, tmp_path / "files"))


@pytest.fixture(scope="module")
def folder(animate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official network as an official folder."""
    out = tmp_path_factory.mktemp("official") / "folder"
    out.mkdir()
    save_file(state(animate), out / NAME)
    write_json(out / "config.json", {**told(animate)["config"], "_class_name": "WanAnimateModel"})
    return out


@pytest.mark.parametrize(
    "prefix", ["", slow("base_model.model."), slow("diffusion_model."), "in a folder"]
)
@torch.no_grad()
def test_relighting_lora(prefix: str, folder: Path, animate: Path) -> None:
    """All key prefixes load; the official loader silently ignores `diffusion_model.`."""
    made = told(animate)["lora"]
    pairs = {
        name: procedural(made["seed"], name, shape, scale)
        for name, (shape, scale) in made["tensors"].items()
    }
    file, peft = folder / "relighting_lora.ckpt", folder / "relighting_lora"
    file.unlink(missing_ok=True)
    if prefix == "in a folder":
        peft.mkdir()
        save_file(pairs, peft / "adapter_model.safetensors")
        write_json(peft / "adapter_config.json", {"r": 128, "lora_alpha": 128})
    else:
        torch.save({"state_dict": {prefix + name: x for name, x in pairs.items()}}, file)
    arguments, _ = inputs(animate, "c")
    stored = load_file(animate / "dit_animate.cases.safetensors")["c_lora.out"]
    assert distance(loaded(folder, use_relighting_lora=True)(**arguments)[0], stored) <= 2e-5
    if prefix == "in a folder":  # half the alpha is half the change
        write_json(peft / "adapter_config.json", {"r": 128, "lora_alpha": 64})
        half = loaded(folder, use_relighting_lora=True).state_dict()
        given = f"{peft / 'adapter_model.safetensors'}"
        name = "blocks.0.self_attn.q.weight"
        up, down = (pairs[name.replace(".weight", f".lora_{x}.weight")] for x in "BA")
        assert distance(half[name], state(animate)[name] + up @ down / 2) <= 1e-6
        assert torch.equal(half[name], loaded(folder, lora=(given,)).state_dict()[name])


def of_q(name: str) -> dict[str, Any]:
    return {"state_dict": {f"{name}.lora_A.weight": torch.zeros(4, 96)}}


def test_refused_relighting_lora(tiny: Any, tmp_path: Path) -> None:
    folder = single_file(stored_state(tiny("animate-14B")), tmp_path / "files")
    file = folder / "relighting_lora.ckpt"

    def refusal(content: object = None) -> str:
        if content is not None:
            torch.save(content, file)
        return get_refusal(lambda: loaded(folder, use_relighting_lora=True))

    found = {"none": refusal()}
    found["unknown"] = refusal(of_q("blocks.0.self_attn.qq"))
    found["prefix"] = refusal(of_q("foreign.blocks.0.self_attn.q"))
    found["half"] = refusal(of_q("blocks.0.self_attn.q"))
    found["code"] = refusal({"state_dict": {"x": Path("x")}})
    found["empty"] = refusal({})
    file.write_bytes(b"x" * 100)
    found["damaged"] = refusal()
    check_refusals("relighting LoRA", found, hide=[r"(?<=read) \(.*\)(?=;)"])
