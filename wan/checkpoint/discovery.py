"""Finds weight files of any name by the tensor names in their headers.

A folder may hold files of many models, as ComfyUI's `models/` does. Only the folder itself and
the subfolders of ComfyUI and of Animate-2 are searched, and each header is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from wan.checkpoint.formats.headers import (
    is_further_shard,
    read_weight_headers,
)
from wan.checkpoint.formats.pickle_header import ForeignPickleError
from wan.checkpoint.formats.tensor_info import PICKLE_SUFFIXES, WEIGHT_FILES, TensorInfo
from wan.checkpoint.names.dit_shapes import restore_patch_axes
from wan.checkpoint.names.expert_names import ExpertTag, detect_experts
from wan.checkpoint.names.network_names import (
    COMPONENTS,
    VACE_MODULE,
    OtherFormatError,
    check_format,
    find_networks,
    select_network,
)
from wan.settings.errors import InputError
from wan.settings.values import list_names
from wan.utils.files import find_link_error

_ANIMATE2_FOLDER = "videomodel/Wan-AI"
_SUBFOLDERS = {  # ComfyUI's, of which `checkpoints` holds several networks, and Animate-2's
    "dit": ("diffusion_models", "unet", "checkpoints", "wan_animate_2"),
    "text_encoder": ("text_encoders", "clip", "checkpoints", _ANIMATE2_FOLDER),
    "vae": ("vae", "checkpoints", _ANIMATE2_FOLDER),
    "image_encoder": ("clip_vision", _ANIMATE2_FOLDER),
}
_SUBFOLDERS[VACE_MODULE] = _SUBFOLDERS["dit"]


@dataclass(frozen=True)
class WeightFile:
    """A network in a weight file, or in a folder in the layout of diffusers or transformers.

    Attributes:
        component: A key of `COMPONENTS`.
        tensors: By name without prefix.
        tag: The expert tag in the path.
        stored_expert: The expert that the file's names give one of its two DiTs; else None.
    """

    path: Path
    component: str
    tensors: Mapping[str, TensorInfo]
    tag: ExpertTag | None = None
    stored_expert: str | None = None

    @property
    def expert(self) -> str | None:
        """The expert in the file or its path: "high_noise", "low_noise" or None."""
        return self.stored_expert or (None if self.tag is None else self.tag.expert)

    def find_shape(self, *names: str) -> tuple[int, ...]:
        """Returns the shape of the first tensor that has one of the names; () if there is none."""
        return next((self.tensors[name].shape for name in names if name in self.tensors), ())

    @property
    def channels(self) -> int:
        """Input channels of a DiT, or latent channels of a VAE; 0 if unknown."""
        if self.component == "dit":
            return (*self.find_shape("patch_embedding.weight"), 0, 0)[1]
        return (*self.find_shape("post_quant_conv.weight", "conv2.weight"), 0)[0]


def inspect_weights(path: Path) -> dict[str, list[WeightFile]]:
    """Reads the headers of a weight file or folder and returns its networks by component.

    Raises:
        InputError: A file is incomplete, is quantized in a format that is not read, or holds a
            component twice and names no experts.
    """
    tensors = read_weight_headers(path)
    check_format(tensors)
    weight_files: dict[str, list[WeightFile]] = {}
    for network in find_networks(tensors):
        component, expert = network.component, network.expert
        selected: Mapping[str, TensorInfo] = select_network(tensors, component, expert)
        if component == "dit":
            selected = restore_patch_axes(selected)
        weight_file = WeightFile(path, component, selected, stored_expert=expert)
        weight_files.setdefault(component, []).append(weight_file)
    return weight_files


class WeightFinder:
    """Searches a folder for weight files; each header is read once, on demand.

    Attributes:
        errors: Of the damaged files met so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inspect = lru_cache(maxsize=None)(inspect_weights)
        self.errors: list[InputError] = []

    def find_all(self, component: str) -> list[WeightFile]:
        """Returns all files of a component, in the folder itself and in ComfyUI's subfolders."""
        paths = [*self.folder.iterdir(), *self.folder.glob("*/*.gguf")]
        for name in _SUBFOLDERS[component]:
            self._note_broken_link(self.folder / name)
            paths += [*self.folder.glob(f"{name}/*"), *self.folder.glob(f"{name}/*/*")]
        weight_files: list[WeightFile] = []
        for path in sorted({path for path in paths if path.suffix in WEIGHT_FILES}):
            if self._note_broken_link(path) or not path.is_file() or is_further_shard(path):
                continue
            try:
                networks = self._inspect(path)
            except OtherFormatError as error:
                if component in error.components:
                    self.errors.append(error)
            except InputError as error:
                if not isinstance(error, ForeignPickleError):  # a trainer's state, for example
                    self.errors.append(error)
                continue
            weight_files += networks.get(component, ())
        tags = detect_experts(dict.fromkeys(file.path for file in weight_files), self.folder)
        return [replace(weight_file, tag=tags[weight_file.path]) for weight_file in weight_files]

    def _note_broken_link(self, path: Path) -> bool:
        """Adds a link to nothing, which may replace a wanted file, to the errors."""
        if (error := find_link_error(path)) is not None:
            self.errors.append(error)
        return error is not None

    def pick_one(
        self, component: str, candidates: Collection[WeightFile], flag: str
    ) -> WeightFile | None:
        """Returns the only candidate; None if there is none.

        PyTorch files are candidates only without others.

        Raises:
            InputError: There are several; or none, but a damaged file that might be one.
        """
        plain = [file for file in candidates if file.path.suffix not in PICKLE_SUFFIXES]
        candidates = plain or candidates
        if len(candidates) > 1:
            names = sorted(str(file.path.relative_to(self.folder)) for file in candidates)
            why = f"holds {len(names)} files with {COMPONENTS[component]} to choose from"
            why = f"{why} ({list_names(names)})"
            raise InputError(f"{self.folder}", None, why, f"choose one with `{flag}`")
        if not candidates and self.errors:
            raise self.errors[0]
        return next(iter(candidates), None)
