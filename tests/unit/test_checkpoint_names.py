"""One tiny checkpoint and one LoRA under every naming, prefix and container.

Each network is written under the names of each library, with each prefix and in each container, is
loaded through the loader of a run, and its values are compared with those of the plain file. So are
weights merged with a LoRA under each row of `NAMINGS`, and each stored format. The quick test has
every row and every column of the matrix at least once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import slow
from wan.checkpoint.formats.tensor_info import PICKLE_SUFFIXES, SAFETENSORS_SUFFIXES
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.names import DIFFERENCES, NAMINGS, Naming, is_low_noise
from wan.checkpoint.lora.resolve import resolve_loras
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers, rename_t5_to_transformers
from wan.checkpoint.names.prefixes import NETWORK_PREFIXES
from wan.modules import clip, t5
from wan.modules.vae import video_vae
from wan.settings.command import Loras
from wan.settings.fields import build_from_values
from wan.testing.random_checkpoint import WRITERS, make_checkpoint

Tensors = Mapping[str, Tensor]
PREFIXES = (
    *("", *NETWORK_PREFIXES, "vae.", "text_encoders.umt5xxl.transformer.", "any.prefix."),
    *(
        "control_net.",
        "encoder.",
        "model.diffusion_model.",
        "module._orig_mod.",
        "_fsdp_wrapped_module.",
    ),
)
_FILES = {  # component -> (pattern in an official folder, folder of a library's layout)
    "dit": ("diffusion_pytorch_model*.safetensors", "transformer"),
    "text_encoder": ("models_t5_umt5*", "text_encoder"),
    "vae": ("Wan2.*_VAE.*", "vae"),
    "image_encoder": ("models_clip*", "image_encoder"),
}
_STEM = "diffusion_pytorch_model"
_LAYERS = ("blocks.0.self_attn.q", "blocks.0.cross_attn.v", "blocks.1.ffn.0")
LAYER_NAMES: dict[str, Callable[[str], str]] = {
    "official": str,
    "official, underscores": lambda layer: layer.replace(".", "_"),
    "diffusers": lambda layer: _rename_layer(layer),
    "diffusers, underscores": lambda layer: _rename_layer(layer).replace(".", "_"),
}
"""Spelling of layers in LoRA files -> function from the official name."""


def _rename_layer(layer: str) -> str:
    return rename_dit_to_diffusers(f"{layer}.weight").removesuffix(".weight")


def _split_tensors(tensors: Tensors) -> list[Tensors]:
    """Splits tensors into two halves."""
    names = [*tensors]
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    return [{name: tensors[name] for name in half} for half in halves]


def _save_one(suffix: str, tensors: Tensors, folder: Path) -> Path:
    path = folder / f"network{suffix}"
    _SAVERS.get(suffix, torch.save)(dict(tensors), path)
    return path


def _save_shards(suffix: str, name: str, index: bool, tensors: Tensors, folder: Path) -> Path:
    """Writes two shards, as NAME with their numbers, and perhaps their index."""
    weight_map: dict[str, str] = {}
    for number, half in enumerate(_split_tensors(tensors), 1):
        file = f"{name.format(f'0000{number}-of-00002')}{suffix}"
        _SAVERS.get(suffix, torch.save)(dict(half), folder / file)
        weight_map |= dict.fromkeys(half, file)
    if index:
        path = folder / f"{_STEM}{suffix}.index.json"
        path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        return folder
    return folder / next(iter(weight_map.values()))


def _save_nested(tensors: Tensors, folder: Path) -> Path:
    path = folder / "network.pt"
    torch.save({"generator": dict(tensors), "step": 1}, path)
    return path


def _save_gguf(tensors: Tensors, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "wan")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_SAVERS: Mapping[str, Callable[[Any, Path], None]] = {
    **dict.fromkeys(SAFETENSORS_SUFFIXES, save_file),
    ".gguf": _save_gguf,
}
CONTAINERS: dict[str, Callable[[Tensors, Path], Path]] = {
    **{suffix: partial(_save_one, suffix) for suffix in SAFETENSORS_SUFFIXES},
    "shards, index": partial(_save_shards, ".safetensors", f"{_STEM}-{{}}", True),
    "shards": partial(_save_shards, ".safetensors", "any-{}", False),
    "variant": partial(_save_shards, ".safetensors", f"{_STEM}.bf16-{{}}", False),
    ".gguf": partial(_save_one, ".gguf"),
    "split .gguf": partial(_save_shards, ".gguf", "any-{}", False),
    **{suffix: partial(_save_one, suffix) for suffix in PICKLE_SUFFIXES},
    ".bin shards": partial(_save_shards, ".bin", "pytorch_model-{}", False),
    "in a .pt": _save_nested,
}
"""Container -> function that writes tensors into a folder and returns the path to load."""


class Case(NamedTuple):
    """A network under a naming, with a prefix, in a container."""

    component: str
    naming: str
    prefix: str
    container: str


class NetworkFiles:
    """The tensors of a tiny checkpoint's networks, under the names of each library."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder, dict[tuple[str, str], Tensors]()
        for layout in WRITERS:
            root = make_checkpoint("i2v-14B", folder / layout, layout=layout, dtype="fp32")
            for component, (pattern, subfolder) in _FILES.items():
                files = (root / subfolder).glob("*.safetensors")
                if layout == "official":
                    files = root.glob(pattern)
                tensors: dict[str, Tensor] = {}
                for file in files:
                    is_pickle = file.suffix == ".pth"
                    tensors |= torch.load(file) if is_pickle else load_file(file)
                self.tensors[component, layout] = tensors
        llama_cpp = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, n_blocks=24)
        self.tensors["text_encoder", "llama.cpp"] = {
            str(llama_cpp.get_name(rename_t5_to_transformers(name), (".weight",))): tensor
            for name, tensor in self.tensors["text_encoder", "official"].items()
        }
        self.expected = {
            component: self.load(Case(component, "official", "", ".safetensors"))
            for component in _FILES
        }

    def load(self, case: Case) -> Tensors:
        """Writes and loads a case; returns the values by the network's names."""
        tensors = self.tensors[case.component, case.naming]
        named = {f"{case.prefix}{name}": x.clone().contiguous() for name, x in tensors.items()}
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            path = CONTAINERS[case.container](named, Path(name))
            if case.component == "dit":
                infos = inspect_checkpoint(Path(name)).experts["dit"].tensors
            else:
                spec = _SPECS[case.component](path)
                spec.check()
                infos = spec.tensors
            sources = open_sources(infos)
            return {name: source.read(slice(None)).clone() for name, source in sources.items()}

    def is_equal(self, case: Case) -> bool:
        """Returns whether a case has the values of the plain file."""
        return _are_equal(self.load(case), self.expected[case.component])


_SPECS: dict[str, Callable[[Path], Any]] = {
    "text_encoder": t5.read_text_encoder_spec,
    "vae": video_vae.read_vae_spec,
    "image_encoder": clip.make_clip_spec,
}
NETWORKS = [
    *product(_FILES, WRITERS),
    ("text_encoder", "llama.cpp"),
]
"""Component and naming of each row."""


def _are_equal(values: Tensors, expected: Tensors) -> bool:
    return values.keys() == expected.keys() and all(
        torch.equal(values[name].float(), expected[name].float()) for name in expected
    )


def list_cases(is_complete: bool) -> Iterator[Case]:
    """Yields all cases, or as many as have each row, prefix and container at least once."""
    for index, (component, naming) in enumerate(NETWORKS):
        if is_complete:
            yield from (Case(component, naming, *rest) for rest in product(PREFIXES, CONTAINERS))
            continue
        for offset in range(index, max(len(PREFIXES), len(CONTAINERS)), len(NETWORKS)):
            prefix = PREFIXES[offset % len(PREFIXES)]
            container = [*CONTAINERS][offset % len(CONTAINERS)]
            yield Case(component, naming, prefix, container)


class LoraCase(NamedTuple):
    """A LoRA's naming, the spelling of its layers, and the suffix of its file."""

    naming: Naming | str
    spelling: str
    suffix: str


class LoraFiles:
    """Tiny experts, and LoRA files for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        checkpoint = make_checkpoint("t2v-A14B", folder / "t2v-A14B", dtype="fp32")
        self.checkpoint = inspect_checkpoint(checkpoint)

    def is_equal(self, case: LoraCase) -> bool:
        """Returns whether the merged weights are those of exact arithmetic."""
        generator = torch.Generator().manual_seed(0)
        stored, changes = dict[str, Tensor](), dict[str, Tensor]()
        network = self.checkpoint.experts["low_noise"].tensors
        if isinstance(case.naming, str):
            parameter = DIFFERENCES[case.naming]
            names = (
                ["blocks.0.modulation"]
                if parameter == "modulation"
                else [f"{layer}.{parameter}" for layer in _LAYERS]
            )
            for name in names:
                changes[name] = torch.randn(network[name].shape, generator=generator)
                layer = LAYER_NAMES[case.spelling](name.rpartition(".")[0])
                stored[f"diffusion_model.{layer}{case.naming}"] = changes[name]
        else:
            for layer in _LAYERS:
                rows, columns = network[f"{layer}.weight"].shape
                down = torch.randn(4, columns, generator=generator)
                up = torch.randn(rows, 4, generator=generator)
                changes[f"{layer}.weight"] = up.double() @ down.double()
                stem = f"{case.naming.prefix}{LAYER_NAMES[case.spelling](layer)}"
                stored[f"{stem}{case.naming.down.replace('NAME', 'default')}"] = down
                stored[f"{stem}{case.naming.up.replace('NAME', 'default')}"] = up
        path = self.folder / f"lora{case.suffix}"
        _SAVERS.get(case.suffix, torch.save)(stored, path)
        is_for_one = is_low_noise(next(iter(stored)))
        experts = ["low_noise"] if is_for_one else ["high_noise", "low_noise"]
        flag = "lora_low_noise" if is_for_one else "lora"
        loras = resolve_loras(build_from_values(Loras, {flag: (str(path),)}), self.checkpoint)
        return all(self.has_changes(loras, expert, changes) for expert in experts)

    def has_changes(self, loras: Any, expert: str, changes: Tensors) -> bool:
        """Returns whether an expert's merged weights are its weights with the changes."""
        plain = open_sources(self.checkpoint.experts[expert].tensors)
        merged = merge_loras(plain, loras[expert])
        names = {name for lora in loras[expert] for name in lora.deltas}
        expected = {
            name: (plain[name].read(slice(None)).double() + change).float()
            for name, change in changes.items()
        }
        return _are_equal({name: merged[name].read(slice(None)) for name in names}, expected)


def list_lora_cases(is_complete: bool) -> Iterator[LoraCase]:
    """Yields all cases, or as many as have each row and each column at least once."""
    suffixes = (*SAFETENSORS_SUFFIXES, *PICKLE_SUFFIXES)
    namings: list[Naming | str] = [*NAMINGS, *DIFFERENCES]
    for index, naming in enumerate(namings):
        spellings = [*LAYER_NAMES]
        if is_complete:
            yield from (LoraCase(naming, *rest) for rest in product(spellings, suffixes))
        else:
            spelling, suffix = spellings[index % 4], suffixes[index % len(suffixes)]
            yield LoraCase(naming, spelling, suffix)


@pytest.mark.parametrize("is_complete", [False, slow(True)])
def test_every_file_has_the_values_of_the_plain_one(is_complete: bool, tmp_path: Path) -> None:
    networks, loras = NetworkFiles(tmp_path), LoraFiles(tmp_path)
    cases, lora_cases = [*list_cases(is_complete)], [*list_lora_cases(is_complete)]
    assert not [case for case in cases if not networks.is_equal(case)]
    assert not [case for case in lora_cases if not loras.is_equal(case)]


def test_few_cases_have_each_row_and_each_column() -> None:
    """A new row of the package's tables is covered."""
    cases = [*list_cases(is_complete=False)]
    assert {case[:2] for case in cases} == {*NETWORKS}
    assert {case.container for case in cases} == {*CONTAINERS}
    assert {case.prefix for case in cases} == {*PREFIXES} > {*NETWORK_PREFIXES}
    lora_cases = [*list_lora_cases(is_complete=False)]
    assert [case.naming for case in lora_cases] == [*NAMINGS, *DIFFERENCES]
    assert {case.spelling for case in lora_cases} == {*LAYER_NAMES}
