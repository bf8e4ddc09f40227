"""Finds weight files of any name by the tensor names in their headers.

A folder may hold files of many models, as ComfyUI's `models/` does. Only the folder itself and
ComfyUI's subfolders are searched, and each header is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from wan.checkpoint.expert_names import ExpertTag, detect_experts
from wan.checkpoint.headers import (
    WEIGHT_FILES,
    is_further_shard,
    read_file_headers,
    read_folder_headers,
)
from wan.checkpoint.lora_names import split_suffix
from wan.checkpoint.tensor_info import TensorInfo
from wan.settings.errors import InputError

COMPONENTS = {
    "dit": "a video network (DiT)",
    "text_encoder": "a UMT5 text encoder",
    "vae": "a Wan VAE",
    "image_encoder": "a CLIP image encoder",
    "lora": "a LoRA",
}
"""Component -> its name in messages."""
_SUBFOLDERS = {  # ComfyUI's
    "dit": ("diffusion_models", "unet"),
    "text_encoder": ("text_encoders", "clip"),
    "vae": ("vae",),
    "image_encoder": ("clip_vision",),
}
_SIGNATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "dit": (
        ("patch_embedding.weight", "blocks.0.ffn.0.weight"),
        ("patch_embedding.weight", "blocks.0.ffn.net.0.proj.weight"),
    ),
    "text_encoder": (
        ("shared.weight", "block.1.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("token_embd.weight", "enc.blk.1.attn_rel_b.weight"),
        ("token_embedding.weight", "blocks.1.pos_embedding.embedding.weight"),
    ),
    "vae": (
        ("encoder.conv1.weight", "conv2.weight"),
        ("encoder.conv_in.weight", "post_quant_conv.weight"),
    ),
    "image_encoder": (("embeddings.class_embedding",), ("visual.cls_embedding",)),
}
"""Component -> signatures: suffixes of tensor names, all of which occur in its file."""


@dataclass(frozen=True)
class WeightFile:
    """A weight file, or a folder of one network in the layout of diffusers or transformers.

    Attributes:
        component: A key of `COMPONENTS`; None for other contents.
        tensors: By stored name.
        tag: The expert tag in the path.
    """

    path: Path
    component: str | None
    tensors: Mapping[str, TensorInfo]
    tag: ExpertTag | None = None

    @property
    def expert(self) -> str | None:
        """The expert in the path: "high_noise", "low_noise" or None."""
        return None if self.tag is None else self.tag.expert

    def find_shape(self, *names: str) -> tuple[int, ...]:
        """Returns the shape of the first tensor that has one of the names; () if there is none.

        Names also match with the prefix of ComfyUI's files of a whole model.
        """
        keys = (*names, *(f"model.diffusion_model.{name}" for name in names))
        return next((self.tensors[name].shape for name in keys if name in self.tensors), ())

    @property
    def channels(self) -> int:
        """Input channels of a DiT, or latent channels of a VAE; 0 if unknown."""
        if self.component == "dit":
            return (*self.find_shape("patch_embedding.weight"), 0, 0)[1]
        return (*self.find_shape("post_quant_conv.weight", "conv2.weight"), 0)[0]


def inspect_weights(path: Path) -> WeightFile:
    """Reads the headers of a weight file or folder and detects its component.

    Raises:
        InputError: A file is incomplete.
    """
    tensors = (read_file_headers(path) if path.is_file() else read_folder_headers(path)) or {}
    return WeightFile(path, _detect_component(tensors), tensors)


def _detect_component(tensors: Mapping[str, TensorInfo]) -> str | None:
    names = tuple(tensors)
    for component, signatures in _SIGNATURES.items():
        for signature in signatures:
            if all(any(name.endswith(suffix) for name in names) for suffix in signature):
                is_video = any(len(info.shape) == 5 for info in tensors.values())
                return component if is_video or component != "vae" else None
    roles = {suffix.role for name in names if (suffix := split_suffix(name)) is not None}
    return "lora" if roles - {"alpha"} else None


class WeightFinder:
    """Searches a folder for weight files; each header is read once, on demand.

    Attributes:
        errors: Of the damaged files met so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inspect = lru_cache(maxsize=None)(inspect_weights)
        self.errors: list[InputError] = []

    def find_all(self, component: str) -> list[WeightFile]:
        """Returns all files of a component, in the folder itself and in ComfyUI's subfolders."""
        paths = [*self._folder.iterdir(), *self._folder.glob("*/*.gguf")]
        for name in _SUBFOLDERS[component]:
            paths += [*self._folder.glob(f"{name}/*"), *self._folder.glob(f"{name}/*/*")]
        weight_files: dict[Path, WeightFile] = {}
        for path in sorted({path for path in paths if path.suffix in WEIGHT_FILES}):
            if not path.is_file() or is_further_shard(path):
                continue
            try:
                weight_file = self._inspect(path)
            except InputError as error:
                self.errors.append(error)
                continue
            if weight_file.component == component:
                weight_files[path] = weight_file
        tags = detect_experts(weight_files, self._folder)
        return [replace(weight_file, tag=tags[path]) for path, weight_file in weight_files.items()]

    def pick_one(
        self, component: str, candidates: Collection[WeightFile], flag: str
    ) -> WeightFile | None:
        """Returns the only candidate; None if there is none.

        Raises:
            InputError: There are several; or none, but a damaged file that might be one.
        """
        if len(candidates) > 1:
            names = sorted(str(file.path.relative_to(self._folder)) for file in candidates)
            listing = f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
            why = (
                f"holds {len(names)} files with {COMPONENTS[component]} to choose from ({listing})"
            )
            raise InputError(f"{self._folder}", None, why, f"choose one with `{flag}`")
        if not candidates and self.errors:
            raise self.errors[0]
        return next(iter(candidates), None)
