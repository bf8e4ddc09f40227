"""What a DiT's config.json says, or, without one, what the shapes of its tensors say.

What a checkpoint folder holds, found from names, JSON files and safetensors headers alone.

Understood: official folders, `*-Diffusers` folders, and single-file DiT weights (with or without a
config.json) beside the official VAE and text encoder. Nothing here imports torch or reads weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.checkpoint.files import (
    TensorInfo,
    check_complete,
    folder_tensors,
    is_folder,
    read_json,
    safetensors_header,
)
from wan.checkpoint.keymaps import dit_official_name
from wan.settings.errors import InputError
from wan.settings.presets import Preset

KINDS = {16: "t2v", 36: "i2v", 48: "ti2v"}  # by input channels of the patch embedding
_OFFICIAL_KEYS = [
    "model_type",
    "dim",
    "ffn_dim",
    "freq_dim",
    "in_dim",
    "out_dim",
    "num_heads",
    "num_layers",
    "text_len",
    "text_dim",
    "eps",
    "patch_size",
    "qk_norm",
    "cross_attn_norm",
    "window_size",
]


def stated_config(path: Path) -> dict[str, Any]:
    """The official constructor arguments in an official or diffusers config.json."""
    raw = read_json(path)
    config = {key: raw[key] for key in _OFFICIAL_KEYS if key in raw}
    if "num_attention_heads" in raw:
        for key in ("in_channels", "out_channels", "attention_head_dim"):
            if key not in raw:
                raise InputError(f"{path} lacks {key}; download the file again.")
        config |= {
            "in_dim": raw["in_channels"],
            "out_dim": raw["out_channels"],
            "num_heads": raw["num_attention_heads"],
            "dim": raw["num_attention_heads"] * raw["attention_head_dim"],
        }
        config.pop("qk_norm", None)  # the name of a norm there, always the one we have
    heads = config.get("num_heads", 1)
    if not isinstance(heads, int) or heads < 1:
        raise InputError(f"{path}: num_heads is {heads!r}; download the file again.")
    return config


def config_from_shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What the tensors' shapes say; the head size (128) they cannot."""
    shape = {name: info.shape for name, info in tensors.items()}
    dim, in_dim, *patch = shape["patch_embedding.weight"]
    layers = {name.split(".")[1] for name in shape if name.startswith("blocks.")}
    config = {
        "model_type": KINDS.get(in_dim, "t2v"),
        "dim": dim,
        "in_dim": in_dim,
        "patch_size": tuple(patch),
        "num_heads": max(dim // 128, 1),
        "num_layers": len(layers),
    }
    for key, name, axis in (
        ("ffn_dim", "blocks.0.ffn.0.weight", 0),
        ("freq_dim", "time_embedding.0.weight", 1),
        ("text_dim", "text_embedding.0.weight", 1),
    ):
        if name in shape:
            config[key] = shape[name][axis]
    if "head.head.weight" in shape:
        config["out_dim"] = shape["head.head.weight"][0] // (patch[0] * patch[1] * patch[2])
    return config


_OFFICIAL_EXPERTS = {"high_noise": "high_noise_model", "low_noise": "low_noise_model"}
_DIFFUSERS_EXPERTS = {"high_noise": "transformer", "low_noise": "transformer_2"}
_DIT_STEM = "diffusion_pytorch_model"
_T5_STEM = "models_t5_umt5-xxl-enc-bf16"
_DTYPES = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True)
class DitFiles:
    """One network: official constructor arguments, and its tensors under official names."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder. Parts that are absent are None; who needs them says so (`require`)."""

    folder: Path
    layout: str  # "official" or "diffusers"
    kind: str  # "t2v", "i2v" or "ti2v"
    experts: dict[str, DitFiles]
    vae: Path | None
    text_encoder: Path | None
    tokenizer: Path | None

    @property
    def heads(self) -> int:
        """Attention heads of the networks."""
        return int(next(iter(self.experts.values())).config["num_heads"])

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return int(next(iter(self.experts.values())).config["dim"]) // self.heads

    def files(self) -> list[Path]:
        """Every weight file, in a fixed order."""
        found = [info.file for dit in self.experts.values() for info in dit.tensors.values()]
        for part in (self.vae, self.text_encoder):
            if part is not None:
                found += [part] if part.is_file() else part.glob("*.safetensors")
        return sorted(set(found))

    def require(self, part: str) -> Path:
        """The path of "vae", "text_encoder" or "tokenizer"; InputError where it is missing."""
        path = getattr(self, part)
        if path is None:
            raise InputError(
                f"{self.folder} has no {part.replace('_', ' ')}; expected {_EXPECTED[part]}. "
                "Download the missing files of the checkpoint."
            )
        return Path(path)


_EXPECTED = {
    "vae": "Wan2.1_VAE.pth, Wan2.2_VAE.pth or vae/",
    "text_encoder": f"{_T5_STEM}.pth or text_encoder/",
    "tokenizer": "google/umt5-xxl/ or tokenizer/",
}


def describe(folder: Path) -> Checkpoint:
    """Look at a checkpoint folder. InputError says what is missing, truncated or contradictory."""
    _check_folder(folder)
    diffusers = (folder / "transformer").is_dir()
    experts = _find_experts(folder, diffusers)
    kinds = {name: _kind(files) for name, files in experts.items()}
    if len(set(kinds.values())) > 1:
        raise InputError(
            f"{folder} mixes networks of different tasks ({kinds}); download it again."
        )
    kind = next(iter(kinds.values()))
    if diffusers:
        vae = _library_part(folder / "vae", _DIT_STEM)
        encoder = _library_part(folder / "text_encoder", "model")
    else:
        vae = _file(folder, "Wan2.2_VAE" if kind == "ti2v" else "Wan2.1_VAE")
        encoder = _file(folder, _T5_STEM)
    tokenizer = folder / ("tokenizer" if diffusers else "google/umt5-xxl")
    return Checkpoint(
        folder=folder,
        layout="diffusers" if diffusers else "official",
        kind=kind,
        experts=experts,
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer if tokenizer.is_dir() else None,
    )


def check_task(checkpoint: Checkpoint, preset: Preset) -> None:
    """The folder must hold the networks of the task."""
    found = set(checkpoint.experts)
    if checkpoint.kind != preset.kind or found != set(preset.experts):
        networks = "two experts" if len(found) == 2 else "one network"
        raise InputError(
            f"{checkpoint.folder} holds {networks} for {checkpoint.kind}, but task {preset.task} "
            f"needs {'two experts' if len(preset.experts) == 2 else 'one network'} for "
            f"{preset.kind}; give --ckpt_dir a {preset.folder} folder or choose another --task."
        )


def _check_folder(folder: Path) -> None:
    if is_folder(folder):
        return
    if folder.exists():
        raise InputError(f"--ckpt_dir {folder} is a file; give the folder of a checkpoint.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not str(folder).startswith("."):
        raise InputError(
            f"--ckpt_dir {folder} is not a folder; if it is a model hub's name, download the "
            "checkpoint first and give the local folder."
        )
    raise InputError(f"--ckpt_dir {folder} does not exist; give the folder of a checkpoint.")


def _file(folder: Path, stem: str) -> Path | None:
    for suffix in (".pth", ".safetensors"):
        if (folder / (stem + suffix)).is_file():
            return check_complete(folder / (stem + suffix))
    return None


def _library_part(folder: Path, stem: str) -> Path | None:
    """A folder of diffusers or transformers, if it holds (complete) weights."""
    return folder if folder.is_dir() and folder_tensors(folder, stem) else None


def _find_experts(folder: Path, diffusers: bool) -> dict[str, DitFiles]:
    names = _DIFFUSERS_EXPERTS if diffusers else _OFFICIAL_EXPERTS
    folders = {expert: folder / sub for expert, sub in names.items() if (folder / sub).is_dir()}
    if folders.keys() == {"high_noise"} and diffusers:
        return {"dit": _dit_files(folders["high_noise"])}
    if len(folders) == 1:
        missing = names[({"high_noise", "low_noise"} - folders.keys()).pop()]
        raise InputError(f"{folder / missing} is missing; download the other expert too.")
    if folders:
        return {expert: _dit_files(path) for expert, path in folders.items()}
    pair = {e: sorted(folder.glob(f"*{e}*.safetensors")) for e in _OFFICIAL_EXPERTS}
    if all(len(files) == 1 for files in pair.values()):
        return {expert: _dit_files(folder, files[0]) for expert, files in pair.items()}
    return {"dit": _dit_files(folder)}


def _dit_files(folder: Path, file: Path | None = None) -> DitFiles:
    found = folder_tensors(folder, _DIT_STEM) if file is None else safetensors_header(file)
    if found is None:
        raise InputError(
            f"{folder} holds no DiT weights; expected {_DIT_STEM}.safetensors, its shards with an "
            "index, or the folders high_noise_model/ and low_noise_model/."
        )
    tensors = {dit_official_name(name): info for name, info in found.items()}
    if "patch_embedding.weight" not in tensors or len(_patch(tensors)) != 5:
        raise InputError(
            f"{folder} holds no Wan DiT (no patch_embedding.weight); check --ckpt_dir."
        )
    for info in tensors.values():
        if info.dtype not in _DTYPES:
            raise InputError(
                f"{info.file}: {info.name} is stored as {info.dtype}; quantised weights are not "
                f"built here, give weights in one of {', '.join(_DTYPES)}."
            )
    path = folder / "config.json"
    stated = stated_config(path) if path.is_file() else {}
    return DitFiles(folder, {**config_from_shapes(tensors), **stated}, tensors)


def _patch(tensors: Mapping[str, TensorInfo]) -> tuple[int, ...]:
    return tensors["patch_embedding.weight"].shape


def _kind(files: DitFiles) -> str:
    in_dim = _patch(files.tensors)[1]
    if in_dim not in KINDS or "blocks.0.cross_attn.k_img.weight" in files.tensors:
        raise InputError(
            f"{files.folder} is a Wan network that is not built here ({in_dim} input channels); "
            "t2v (16), i2v of Wan2.2 (36) and ti2v (48) are."
        )
    return KINDS[in_dim]
