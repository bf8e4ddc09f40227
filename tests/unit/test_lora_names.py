"""The names of LoRA files as programs publish them: prefixes, adapters, parameters."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.lora_files import LINEARS, PAIR, Q, make_pair, merge_file, rename_to_diffusers
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.layout import Checkpoint, inspect_checkpoint
from wan.checkpoint.lora.names import split_suffix
from wan.checkpoint.lora.reader import LoraFile, LoraReader
from wan.checkpoint.lora.resolve import iter_lora_notices, resolve_loras
from wan.checkpoint.names.prefixes import find_shared_prefix, strip_prefixes
from wan.settings.command import Loras

DOTTED = (
    "_orig_mod.",
    "module.",
    "model.",
    "model.diffusion_model.",
    "pipe.dit.",
    "dit.",
    "diffusion_model.",
)
DOTTED += ("transformer.", "base_model.model.", "base_model.model.model._orig_mod.")
DOTTED += ("module._orig_mod.pipe.", "any.thing.", "style.")
FLAT = ("lora_unet_", "lora_unet__", "lycoris_", "lora_transformer_", "lora_dit_", "mine_")


@pytest.mark.parametrize("count", [-1, 1], ids=["flat", "flat up to the number"])
@pytest.mark.parametrize("spell", [str, rename_to_diffusers], ids=["official", "diffusers"])
def test_every_prefix_names_the_same_layers(
    spell: Any, count: int, weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """Also prefixes of no known program, if all names have them; layers with dots or without."""
    path, wrong = tmp_path / "x.safetensors", []
    pairs = {layer: make_pair(weights[f"{layer}.weight"].shape, 2) for layer in LINEARS}
    for prefix in (*DOTTED, *FLAT):
        tensors, expected = {}, {}
        for layer, (down, up) in pairs.items():
            name = spell(layer) if prefix in DOTTED else spell(layer).replace(".", "_", count)
            names = f"{prefix}{name}.lora_up.weight", f"{prefix}{name}.lora_down.weight"
            tensors |= {names[0]: up.clone(), names[1]: down.clone()}
            expected[f"{layer}.weight"] = names
        save_file(tensors, path)
        ((adapter,),) = resolve_loras(Loras(lora=(str(path),)), dense).values()
        infos = {name: delta.infos for name, (delta,) in adapter.deltas.items()}
        if {name: tuple(x.name for x in group) for name, group in infos.items()} != expected:
            wrong.append(prefix)
    assert not wrong


FLAT_PARTS = ("", "lora_unet_", "lora_unet.", "lycoris_", "lora_transformer_", "diffusion_model_")


@pytest.mark.parametrize("task", ["vace-1.3B", "animate-14B", "s2v-14B"])
def test_separators_are_read_by_the_module_tree(task: str, tiny: Any, tmp_path: Path) -> None:
    """Dots and underscores in any mixture, in every layer and for every kind of adapter."""
    network, path = inspect_checkpoint(tiny(task)).experts["dit"].tensors, tmp_path / "x.sft"
    random, wrong = Random(0), []
    ends = (
        ("lora_down.weight", "lora_up.weight", "alpha"),
        ("lora_A.weight", "lora_B.weight", "dora_scale"),
        ("hada_w1_b", "hada_w1_a", "hada_w2_b", "hada_w2_a"),
        ("lokr_w2_b", "lokr_w2_a", "lokr_w1"),
    )
    for prefix in FLAT_PARTS:
        tensors, expected = {}, {}
        for index, (name, info) in enumerate(network.items()):
            layer = name.removesuffix(".weight")
            if info.chunks or len(info.shape) != 2 or layer == name:
                continue
            spelling = rename_to_diffusers(layer) if index % 3 else layer
            first, *rest = spelling.split(".")
            mixed = prefix + first + "".join(random.choice("._") + word for word in rest)
            rows, columns = info.shape
            shapes = {"lora_B.weight": (rows, 1), "lora_up.weight": (rows, 1), "alpha": ()}
            shapes |= {"dora_scale": (rows, 1), "lokr_w1": (1, 1)}
            for end in ends[index % len(ends)]:
                shape = (rows, 1) if end.endswith("_a") else shapes.get(end, (1, columns))
                tensors[f"{mixed}.{end}"] = torch.ones(shape)
            expected[name] = mixed
            if f"{layer}.bias" in network:
                tensors[f"{mixed}.diff_b"], expected[f"{layer}.bias"] = torch.ones(rows), mixed
        save_file(tensors, path)
        deltas = LoraReader(LoraFile(path), network, "dit").read().deltas
        names = {name: group[0].infos[0].name for name, group in deltas.items()}
        stems = {name: split_suffix(stored) for name, stored in names.items()}
        assert len(expected) > 20
        if {name: suffix and suffix.stem for name, suffix in stems.items()} != expected:
            wrong.append(prefix)
    assert not wrong


@pytest.mark.parametrize("prefix", ["transformer_", "model_", "refiner_", "audio_", "my_"])
def test_a_word_before_a_dotted_module_is_no_prefix(
    prefix: str, dense: Checkpoint, tmp_path: Path
) -> None:
    """`transformer_blocks.0` and `refiner_blocks.0` are layers of other networks."""
    path = tmp_path / "x.safetensors"
    save_file(make_pairs(prefix, Q), path)
    assert f"{prefix}{Q}" in get_refusal(merge_file, path, dense)


@pytest.mark.parametrize("adapter", ["default", "default_0", "style-1", "weight"])
def test_an_adapter_of_any_name(
    adapter: str, weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    down, up = make_pair(weights[f"{Q}.weight"].shape, 2)
    path = tmp_path / "x.safetensors"
    magnitude = torch.ones(len(up))
    tensors = {f"{Q}.lora_A.{adapter}.weight": down, f"{Q}.lora_B.{adapter}.weight": up}
    tensors |= {f"{Q}.lora_B.{adapter}.bias": magnitude}
    save_file(tensors, path)
    actual = merge_file(path, dense)
    exact = weights[f"{Q}.weight"].double() + up.double() @ down.double()
    assert torch.equal(actual[f"{Q}.weight"], exact.float())
    assert torch.equal(actual[f"{Q}.bias"], weights[f"{Q}.bias"].float() + 1)
    save_file(tensors | {f"{Q}.lora_magnitude_vector.{adapter}": magnitude.clone()}, path)
    changed = merge_file(path, dense)[f"{Q}.weight"]
    torch.testing.assert_close(changed.norm(dim=1), magnitude)


def test_whole_parameters_of_peft(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """Stored modules and biases replace the network's, in part with a strength below 1."""
    down, up = make_pair(weights[f"{Q}.weight"].shape, 2)
    prefix, path = "base_model.model.", tmp_path / "adapter_model.safetensors"
    whole = {
        "head.head.weight": "head.head.weight",
        "head.modulation": "head.modulation",
        f"{Q}.bias": f"{Q}.base_layer.bias",
        "text_embedding.0.weight": "text_embedding.0.modules_to_save.style.weight",
    }
    stored = {name: torch.randn(weights[name].shape) for name in whole}
    tensors = {f"{prefix}{key}": stored[name] for name, key in whole.items()}
    tensors |= {f"{prefix}{Q}.lora_A.weight": down, f"{prefix}{Q}.lora_B.weight": up}
    save_file(tensors, path)
    config = {"modules_to_save": ["head", "text_embedding.0"], "bias": "lora_only"}
    path.with_name("adapter_config.json").write_text(json.dumps(config))
    for strength in (1.0, 0.25):
        actual = merge_file(path, dense, strength)
        for name, value in stored.items():
            exact = torch.lerp(weights[name].double(), value.double(), strength)
            torch.testing.assert_close(actual[name].double(), exact, atol=1e-7, rtol=1e-6)


OTHER_KINDS = ("oft_R.weight", "ia3_l", "lora_E", "q_layer.weight", "reshape_weight", "set_weight")
OTHER_KINDS += ("lora_mid.weight", "hada_t1", "lokr_t1", "lokr_t2", "bm.weight", "scale")
OTHER_KINDS += ("q_loras.down.weight", "weight.absmax", "qweight", "int8_weight")


def test_tensors_of_other_kinds_are_refused(dense: Checkpoint, tmp_path: Path) -> None:
    """Beside a whole pair, and whatever their prefix: of kinds, cores and quantized weights."""
    path, sentences = tmp_path / "x.safetensors", {}
    for end, prefix in product(OTHER_KINDS, ("", "any.", "lora_unet__")):
        layer = Q.replace(".", "_") if prefix.endswith("_") else Q
        name = f"{prefix}{layer}.{end}"
        pair = {key.replace(Q, f"{prefix}{layer}"): x.clone() for key, x in PAIR.items()}
        save_file({**pair, name: torch.ones(2, 2)}, path)
        sentences[name] = get_refusal(merge_file, path, dense)
        assert f"no known kind of LoRA ({name})" in sentences[name], (name, sentences[name])
    check_refusals("LoRA: other kinds", {OTHER_KINDS[0]: sentences[f"{Q}.{OTHER_KINDS[0]}"]})


def test_the_first_three_unknown_names_are_told(dense: Checkpoint, tmp_path: Path) -> None:
    layers = [f"blocks.{block}.self_attn.{x}" for block in (0, 1) for x in "qkv"]
    path, tensor, end = tmp_path / "x.safetensors", torch.ones(2, 96), ".lora_A.weight"
    cases = {
        "ends": [f"{layer}.lora_C.weight" for layer in layers],
        "layers": [f"{layer.replace('blocks.', 'blocks.7')}{end}" for layer in layers],
        "prefixes": [f"{layer}{end}" for layer in layers[:2]]
        + [f"foreign.{layer}{end}" for layer in layers[2:]],
        "flat prefixes": [f"vace_{layer.replace('.', '_')}{end}" for layer in layers],
        "whole weights": [f"{layer}.weight" for layer in layers],
    }
    sentences = {}
    for case, names in cases.items():
        save_file({name: tensor.clone() for name in names}, path)
        sentences[case] = get_refusal(merge_file, path, dense)
        assert "more" in sentences[case] and "another model" not in sentences[case]
    check_refusals("LoRA: unknown names", sentences)


def make_pairs(prefix: str, *layers: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Pairs of official layers of 96 channels."""
    down, up = make_pair(torch.Size((96, 96)), 2)
    return {
        f"{prefix}{layer}.{end}.weight": x.to(dtype).clone()
        for layer in layers
        for end, x in (("lora_down", down), ("lora_up", up))
    }


@pytest.mark.parametrize(
    "prefix", ["control_net.", "conditioner.", "vace.", "te.", "a.controlnet."]
)
def test_prefixes_of_other_networks(prefix: str, dense: Checkpoint, tmp_path: Path) -> None:
    """Their layers may have the same names; a word is only a part of another prefix."""
    path = tmp_path / "x.safetensors"
    save_file(make_pairs(prefix, Q), path)
    assert f"does not have ({prefix}{Q}" in get_refusal(merge_file, path, dense)
    save_file(make_pairs(f"my_{prefix.replace('.', '_v2.')}", Q), path)
    assert merge_file(path, dense).keys() == {f"{Q}.weight"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_lora_in_float8(dtype: torch.dtype, dense: Checkpoint, tmp_path: Path) -> None:
    path, values = tmp_path / "x.safetensors", []
    tensors = make_pairs("", Q, dtype=dtype)
    for stored in (tensors, {name: x.float() for name, x in tensors.items()}):
        save_file(stored, path)
        values.append(merge_file(path, dense)[f"{Q}.weight"])
    assert torch.equal(*values)


IMAGE_LAYERS = ("blocks.0.cross_attn.k_img", "blocks.1.cross_attn.v_img", "img_emb.proj.1")


@pytest.mark.parametrize("spell", [str, rename_to_diffusers], ids=["official", "diffusers"])
def test_layers_of_an_image_input_that_the_network_lacks(
    spell: Any, dense: Checkpoint, tmp_path: Path
) -> None:
    """Wan2.1's i2v LoRAs on Wan2.2: the rest is merged, and a line names the others."""
    path = tmp_path / "x.safetensors"
    image_pairs = make_pairs("diffusion_model.", *map(spell, IMAGE_LAYERS))
    save_file(image_pairs | make_pairs("diffusion_model.", spell(Q)), path)
    loras = resolve_loras(Loras(lora=(str(path),)), dense)
    assert [*loras["dit"][0].deltas] == [f"{Q}.weight"]
    (line,) = [x for x in iter_lora_notices(loras, "t2v", False) if "not used" in x]
    assert "6 tensors" in line and min(image_pairs) in line
    save_file(image_pairs, path)
    sentence = get_refusal(merge_file, path, dense)
    assert "only the image input of other networks" in sentence and min(image_pairs) in sentence


def test_prefixes_of_any_network() -> None:
    """The function is used for other networks than a DiT too."""
    known = {"encoder.conv1.weight", "decoder.conv1.weight"}.__contains__
    assert strip_prefixes("module._orig_mod.encoder.conv1.weight", known)[-1] == (
        "encoder.conv1.weight"
    )
    prefixes = ["x_", "x__"]  # the longer one counts
    assert strip_prefixes("x__encoder.conv1.weight", known, prefixes)[-1] == "encoder.conv1.weight"
    names = ["vae.model.encoder.conv1.weight", "vae.model.decoder.conv1.weight"]
    assert find_shared_prefix(names, known, ["model."]) == "vae."
    assert find_shared_prefix(names, known) == "vae."
    assert find_shared_prefix([*names, "x.decoder.conv1.weight"], known) is None
