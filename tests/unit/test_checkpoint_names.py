"""The networks of a tiny checkpoint under every naming, with every prefix, in every container.

The values of a loaded file are compared with those of the plain one. The quick test has every row
and every column of the matrix at least once.
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
from safetensors.torch import save_file

from tests.checkpoint_files import Tensors, add_prefix, are_equal, load_tensors, read_values
from tests.conftest import slow
from tests.gguf_files import write_gguf
from wan.checkpoint.formats.tensor_info import PICKLE_SUFFIXES, SAFETENSORS_SUFFIXES
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.names.keymaps import rename_t5_to_transformers
from wan.checkpoint.names.prefixes import NETWORK_PREFIXES
from wan.modules import clip, t5
from wan.modules.vae import video_vae
from wan.testing.random_checkpoint import WRITERS, make_checkpoint

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


def _split_tensors(tensors: Tensors) -> list[Tensors]:
    """Splits tensors into two halves."""
    names = [*tensors]
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    return [{name: tensors[name] for name in half} for half in halves]


def _save_one(suffix: str, tensors: Tensors, folder: Path) -> Path:
    path = folder / f"network{suffix}"
    _SAVERS.get(suffix, torch.save)(tensors, path)
    return path


def _save_shards(suffix: str, name: str, index: bool, tensors: Tensors, folder: Path) -> Path:
    """Writes two shards, as NAME with their numbers, and perhaps their index."""
    weight_map: dict[str, str] = {}
    for number, half in enumerate(_split_tensors(tensors), 1):
        file = f"{name.format(f'0000{number}-of-00002')}{suffix}"
        _SAVERS.get(suffix, torch.save)(half, folder / file)
        weight_map |= dict.fromkeys(half, file)
    if index:
        path = folder / f"{_STEM}{suffix}.index.json"
        path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        return folder
    return folder / next(iter(weight_map.values()))


def _save_nested(tensors: Tensors, folder: Path) -> Path:
    path = folder / "network.pt"
    torch.save({"generator": tensors, "step": 1}, path)
    return path


_SAVERS: Mapping[str, Callable[[Any, Path], None]] = {
    **dict.fromkeys(SAFETENSORS_SUFFIXES, save_file),
    ".gguf": lambda tensors, path: write_gguf(path, tensors, {}),
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
                tensors: Tensors = {}
                for file in files:
                    tensors |= load_tensors(file)
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
        named = add_prefix(tensors, case.prefix)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            path = CONTAINERS[case.container](named, Path(name))
            if case.component == "dit":
                infos = inspect_checkpoint(Path(name)).experts["dit"].tensors
            else:
                spec = _SPECS[case.component](path)
                spec.check()
                infos = spec.tensors
            return {name: x.clone() for name, x in read_values(infos).items()}

    def is_equal(self, case: Case) -> bool:
        """Returns whether a case has the values of the plain file."""
        return are_equal(self.load(case), self.expected[case.component])


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


@pytest.mark.parametrize("is_complete", [False, slow(True)])
def test_every_file_has_the_values_of_the_plain_one(is_complete: bool, tmp_path: Path) -> None:
    networks = NetworkFiles(tmp_path)
    assert not [case for case in list_cases(is_complete) if not networks.is_equal(case)]


def test_few_cases_have_each_row_and_each_column() -> None:
    """A new row of the package's tables is covered."""
    cases = [*list_cases(is_complete=False)]
    assert {case[:2] for case in cases} == {*NETWORKS}
    assert {case.container for case in cases} == {*CONTAINERS}
    assert {case.prefix for case in cases} == {*PREFIXES} > {*NETWORK_PREFIXES}
