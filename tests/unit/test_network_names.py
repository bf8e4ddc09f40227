"""Networks under any prefix, in files of several networks, and under other programs' file names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import gguf_files
from tests.checkpoint_files import (
    Tensors,
    add_prefix,
    are_equal,
    hold_same_networks,
    load_tensors,
    read_values,
    save_tensors,
)
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.layout import Checkpoint, inspect_checkpoint
from wan.checkpoint.load import ModelSpec
from wan.checkpoint.names.keymaps import rename_t5_to_transformers
from wan.modules import t5
from wan.modules.vae import video_vae
from wan.settings.command import NetworkFiles
from wan.settings.presets import PRESETS

DIT = "diffusion_pytorch_model"
TEXT, VAE = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
TABLE = "shared.weight"


def read_spec_values(spec: ModelSpec[Any]) -> Tensors:
    spec.check()
    return read_values(spec.tensors)


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "checkpoint"))


def test_wrappers_within_names(weights: Tensors, dense: Checkpoint, folder: Path) -> None:
    """As torch.compile and FSDP of each block write them, also under a prefix."""
    wrapped = {
        name.replace("blocks.", "_fsdp_wrapped_module.blocks.").replace(
            "blocks.0.", "blocks.0._orig_mod."
        ): tensor
        for name, tensor in weights.items()
    }
    for prefix in ("", "module._orig_mod.a.b."):
        save_file(add_prefix(wrapped, prefix), folder / f"{DIT}.safetensors")
        checkpoint = inspect_checkpoint(folder)
        assert are_equal(read_values(checkpoint.experts["dit"].tensors), weights)
        assert checkpoint.config == dense.config


@pytest.mark.parametrize("table", [TABLE, f"encoder.embed_tokens.{'weight'}", "decoder."])
def test_a_whole_umt5_and_names_of_its_word_table(table: str, tiny: Any, tmp_path: Path) -> None:
    """`save_model` keeps one of the names that share the table."""
    names = {
        rename_t5_to_transformers(n): x for n, x in load_tensors(tiny("t2v-1.3B") / TEXT).items()
    }
    expected = read_spec_values(t5.read_text_encoder_spec(tiny("t2v-1.3B") / TEXT))
    table = "decoder.embed_tokens.weight" if table == "decoder." else table
    names[table] = names.pop(TABLE)
    if table != "encoder.embed_tokens.weight":
        block = {n: x for n, x in names.items() if n.startswith("encoder.block.")}
        names |= {n.replace("encoder", "decoder"): x for n, x in block.items()}
        names |= {"lm_head.weight": names[table].clone(), "logit_scale": torch.ones(())}
    path = tmp_path / "umt5.safetensors"
    save_file(add_prefix(names, ""), path)
    assert are_equal(read_spec_values(t5.read_text_encoder_spec(path)), expected)


def make_whole_model(source: Path, prefixes: tuple[str, str, str]) -> Tensors:
    """One file of all networks, as ComfyUI saves them."""
    dit, text, vae = prefixes
    encoder = load_tensors(source / TEXT)
    return {
        **add_prefix(load_tensors(source), dit),
        **add_prefix({rename_t5_to_transformers(n): x for n, x in encoder.items()}, text),
        **add_prefix(load_tensors(source / VAE), vae),
        "text_encoders.umt5xxl.logit_scale": torch.ones(()),
    }


COMFYUI = ("model.diffusion_model.", "text_encoders.umt5xxl.transformer.", "vae.")


def test_one_file_of_all_networks(dense: Checkpoint, tiny: Any, tmp_path: Path) -> None:
    source = tiny("t2v-1.3B")
    for number, prefixes in enumerate((("", "te.", "vae."), COMFYUI)):
        root = tmp_path / str(number)
        tensors = make_whole_model(source, prefixes)
        file = save_tensors(tensors, root / "checkpoints" / "all.safetensors")
        shutil.copytree(source / "google", root / "google")
        shutil.copy(source / "config.json", root / "checkpoints")
        assert hold_same_networks(inspect_checkpoint(root), dense)
    files = NetworkFiles(dit=file, vae=file, text_encoder=file)
    presets = (PRESETS["t2v-1.3B"],)
    assert hold_same_networks(inspect_checkpoint(source, files, presets), dense)


@pytest.mark.parametrize(
    ("high", "low"),
    [
        ("pipe.dit.", "pipe.dit2."),
        ("model.high_noise_model.", "model.low_noise_model."),
        ("HighNoise.transformer.", "LowNoise.transformer."),
        ("high.transformer.", "low.transformer."),
        ("a_h.transformer.", "a_h.transformer_2."),  # an ambiguous word decides nothing
    ],
)
def test_two_experts_in_one_file(high: str, low: str, tiny: Any, tmp_path: Path) -> None:
    """In a folder with nothing else, and given by the flags of both experts."""
    source, folder = Path(tiny("t2v-A14B")), tmp_path / "all"
    original = inspect_checkpoint(source)
    expected = {expert: read_values(dit.tensors) for expert, dit in original.experts.items()}
    tensors = add_prefix(expected["low_noise"], low) | add_prefix(expected["high_noise"], high)
    folder.mkdir()
    shutil.copy(source / "high_noise_model" / "config.json", folder)
    path = save_tensors(tensors, folder / "all.safetensors")
    files = NetworkFiles(dit_high_noise=path, dit_low_noise=path)
    for checkpoint in (inspect_checkpoint(folder), inspect_checkpoint(source, files)):
        assert checkpoint.config == original.config
        for expert, values in expected.items():
            assert are_equal(read_values(checkpoint.experts[expert].tensors), values)


def test_files_that_hold_another_number_of_networks(
    folder: Path, tiny: Any, tmp_path: Path
) -> None:
    """Two DiTs in a file, a file of other networks, and unknown tensors beside a network."""
    dit, messages = load_file(folder / f"{DIT}.safetensors"), {}
    files = {
        "two": add_prefix(dit, "transformer.") | add_prefix(dit, "transformer_2."),
        "text and vae": add_prefix(make_whole_model(folder, ("a.", *COMFYUI[1:])), ""),
        "another model": {f"double_blocks.{i}.weight": torch.zeros(2) for i in range(5)},
        "wrapped twice": add_prefix(dit, "_orig_mod.") | {"head.head.bias": torch.zeros(2)},
    }
    files["text and vae"] = {n: x for n, x in files["text and vae"].items() if n[:2] != "a."}
    for case, tensors in files.items():
        path = save_tensors(tensors, tmp_path / f"{case}.safetensors")
        messages[case] = get_refusal(inspect_checkpoint, folder, NetworkFiles(dit=path))
    two = tmp_path / "two"
    two.mkdir()
    (tmp_path / "two.safetensors").rename(two / "two.safetensors")
    dense = tuple(preset for preset in PRESETS.values() if "dit" in preset.experts)
    messages["two for a task of one"] = get_refusal(inspect_checkpoint, two, NetworkFiles(), dense)
    unnamed = add_prefix(dit, "a.") | add_prefix(dit, "b.")
    save_tensors(unnamed, two / "two.safetensors")
    messages["two without names"] = get_refusal(inspect_checkpoint, two)
    path = save_tensors(add_prefix(dit, ""), tmp_path / "one.safetensors")
    pair = NetworkFiles(dit_high_noise=path, dit_low_noise=path)
    messages["one for both"] = get_refusal(inspect_checkpoint, folder, pair)
    vae = load_tensors(folder / VAE)
    path = save_tensors(
        add_prefix(vae, "vae.") | {f"extra.{i}": torch.zeros(1) for i in range(5)},
        tmp_path / "vae.safetensors",
    )
    messages["unknown tensors"] = get_refusal(video_vae.read_vae_spec(path).check)
    vae = {name: x for name, x in vae.items() if "upsamples.1" not in name}
    path = save_tensors(add_prefix(vae, ""), tmp_path / "lacking.safetensors")
    messages["lacking tensors"] = get_refusal(video_vae.read_vae_spec(path).check)
    check_refusals("checkpoints: several networks", messages)
    assert not any("download" in text for text in messages.values())


@pytest.mark.parametrize(
    ("form", "index"),
    [(".bf16-{}", "variant"), ("-{}-bf16", ""), ("-{}.fp16", "plain"), (".bf16-{}", "plain")],
)
def test_shards_of_a_variant(
    form: str, index: str, weights: Tensors, dense: Checkpoint, folder: Path
) -> None:
    """`save_pretrained(variant=...)`, and branches whose index has the names without it."""
    (folder / f"{DIT}.safetensors").unlink()
    weight_map = {}
    for number in (1, 2):
        shard = f"0000{number}-of-00002"
        part = {n: x for n, x in weights.items() if n.startswith("blocks.1.") == (number == 2)}
        file = f"{DIT}{form.format(shard)}.safetensors"
        save_file(part, folder / file)
        plain = f"{DIT}-{shard}.safetensors"
        weight_map |= dict.fromkeys(part, plain if index == "plain" else file)
    name = f"{DIT}.safetensors.index.{'' if index == 'plain' else 'bf16.'}json"
    if index:
        (folder / name).write_text(json.dumps({"weight_map": weight_map}))
    tensor_names = dense.experts["dit"].tensors.keys()
    assert inspect_checkpoint(folder).experts["dit"].tensors.keys() == tensor_names
    last = folder / f"{DIT}{form.format('00002-of-00002')}.safetensors"
    content = last.read_bytes()
    last.unlink()
    messages = [get_refusal(inspect_checkpoint, folder)]
    if index == "plain":  # one shard of two variants
        for variant in ("a", "b"):
            (folder / f"{DIT}-00002-of-00002.{variant}.safetensors").write_bytes(content)
        messages.append(get_refusal(inspect_checkpoint, folder))
    for message in messages:
        assert "00002-of-00002" in message and "is missing" in message, message


def test_pytorch_files_of_a_library(tiny: Any, dense: Checkpoint, tmp_path: Path) -> None:
    """`.bin` files of the text encoder, in shards, and of the DiT."""
    source = tiny("t2v-1.3B", "diffusers")
    root, messages = Path(shutil.copytree(source, tmp_path / "bin")), {}
    for name, stem in (("text_encoder", "pytorch_model"), ("transformer", DIT)):
        tensors = load_tensors(source / name)
        for file in (root / name).glob("*.safetensors*"):
            file.unlink()
        for number in (1, 2):
            part = {n: x for n, x in tensors.items() if ("block" in n) == (number == 2)}
            torch.save(part, root / name / f"{stem}-0000{number}-of-00002.bin")
    assert hold_same_networks(inspect_checkpoint(root), dense)
    (root / "text_encoder" / "pytorch_model-00001-of-00002.bin").unlink()
    messages["a shard"] = get_refusal(inspect_checkpoint, root)
    old = tmp_path / "old.bin"
    torch.save({"a": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    messages["an old format"] = get_refusal(inspect_checkpoint, source, NetworkFiles(vae=old))
    for file in (root / "transformer").glob("*.bin"):
        file.unlink()
    torch.save({"a": torch.ones(2)}, root / "transformer" / f"{DIT}.bin")
    messages["a DiT"] = get_refusal(inspect_checkpoint, root)
    check_refusals("checkpoints: PyTorch files", messages)


@pytest.mark.parametrize(
    ("axes", "suffix"),
    [("four", "gguf"), ("merged", "gguf"), ("one", "safetensors"), ("two", "safetensors")],
)
def test_patch_embeddings_of_fewer_axes(
    axes: str, suffix: str, weights: Tensors, dense: Checkpoint, folder: Path
) -> None:
    """GGUF has four axes, merged from the first two or without that of time; rCM has two."""
    tensors, key = dict(weights), "patch_embedding.weight"
    (folder / f"{DIT}.safetensors").unlink()
    weight = tensors[key]
    shape = {"four": (-1, *weight.shape[1:2], 2, 2), "merged": (-1, 1, 2, 2)}
    shape |= {"two": (len(weight), -1), "one": (-1,)}
    tensors[key] = weight.reshape(shape[axes])
    path = folder / f"wan.{suffix}"
    if suffix == "gguf":
        gguf_files.write_gguf(path, tensors, {})
    else:
        save_file(tensors, path)
    checkpoint = inspect_checkpoint(folder)
    infos = checkpoint.experts["dit"].tensors
    assert checkpoint.config == dense.config
    assert torch.equal(read_values({key: infos[key]})[key], weight.float())


def test_pytorch_files_beside_safetensors(weights: Tensors, folder: Path) -> None:
    """The safetensors file counts, and a trainer's files are left alone."""
    (folder / f"{DIT}.safetensors").rename(folder / "wan.safetensors")
    torch.save({name: torch.zeros_like(x) for name, x in weights.items()}, folder / "wan.ckpt")
    torch.save({"step": 1}, folder / "optimizer.bin")
    assert are_equal(read_values(inspect_checkpoint(folder).experts["dit"].tensors), weights)


def test_pytorch_files_of_a_pair_and_of_components(tiny: Any, tmp_path: Path) -> None:
    """The experts' names decide for `.pth` too; VAE, UMT5 and CLIP have any names."""
    pair = Path(shutil.copytree(tiny("t2v-A14B"), tmp_path / "pair"))
    experts = inspect_checkpoint(pair).experts
    expected = {expert: read_values(files.tensors) for expert, files in experts.items()}
    shutil.copy(pair / "high_noise_model" / "config.json", pair)
    for expert, file in (("high_noise", "A-HighNoise.pt"), ("low_noise", "A_low_noise.pth")):
        torch.save(load_tensors(pair / f"{expert}_model"), pair / file)
        shutil.rmtree(pair / f"{expert}_model")
    experts = inspect_checkpoint(pair).experts
    assert experts.keys() == expected.keys()
    for expert, values in expected.items():
        assert are_equal(read_values(experts[expert].tensors), values)
    for file, name in (("A-HighNoise.pt", "one.pt"), ("A_low_noise.pth", "two.pth")):
        (pair / file).rename(pair / name)
    sentence = get_refusal(inspect_checkpoint, pair, presets=(PRESETS["t2v-A14B"],))
    assert "one.pt, two.pth" in sentence and "dit_high_noise and dit_low_noise" in sentence
    root = Path(shutil.copytree(tiny("i2v-14B"), tmp_path / "any names"))
    names = {VAE: "vae/a.pt", TEXT: "text_encoders/b.bin", CLIP: "clip_vision/c.ckpt"}
    for name, other in names.items():
        (root / other).parent.mkdir()
        (root / name).rename(root / other)
    checkpoint = inspect_checkpoint(root)
    paths = (checkpoint.vae, checkpoint.text_encoder, checkpoint.image_encoder)
    assert [path and str(path.relative_to(root)) for path in paths] == [*names.values()]


def test_pytorch_files_that_are_refused(folder: Path) -> None:
    tensors, messages = load_file(folder / f"{DIT}.safetensors"), {}
    (folder / f"{DIT}.safetensors").unlink()
    path = folder / "dit.pt"
    torch.save({"generator": tensors, "ema": tensors}, path)
    messages["two sets"] = get_refusal(inspect_checkpoint, folder)
    path.write_bytes(path.read_bytes()[:-300])
    messages["truncated"] = get_refusal(inspect_checkpoint, folder)
    path.write_text("<html>not found</html>")
    messages["a page"] = get_refusal(inspect_checkpoint, folder)
    torch.save({"epoch": 1}, path)
    messages["no weights"] = get_refusal(inspect_checkpoint, folder)
    save_file(tensors, folder / f"{DIT}.safetensors")
    for flag, name in (("dit", VAE), ("vae", TEXT), ("text_encoder", VAE)):
        files = NetworkFiles(**{flag: folder / name})
        messages[f"another network as {flag}"] = get_refusal(inspect_checkpoint, folder, files)
    check_refusals("checkpoints: PyTorch files of any name", messages)
