"""Finds out what a checkpoint folder holds, from names, JSON files and safetensors headers alone.

It reads official folders, `*-Diffusers` folders, and single-file DiT weights (with or without a
config.json) next to the official VAE and text encoder. No weight is read, and torch not imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypedDict, cast

from wan.checkpoint.files import (
    OTHER_PARTS,
    WEIGHT_FILES,
    TensorInfo,
    check_complete,
    file_tensors,
    folder_tensors,
    is_folder,
    read_json,
)
from wan.checkpoint.keymaps import dit_official_name
from wan.checkpoint.marks import network_tensors
from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.values import shown

KINDS = {16: "t2v", 36: "i2v", 48: "ti2v"}  # by input channels of the patch embedding
MODEL_TYPES = (*KINDS.values(), "flf2v")
EXPERT_FOLDERS = {"high_noise": "high_noise_model", "low_noise": "low_noise_model"}
_DIFFUSERS_FOLDERS = {"high_noise": "transformer", "low_noise": "transformer_2"}
_STEMS = {  # official files end with .pth or .safetensors
    "text_encoder": "models_t5_umt5-xxl-enc-bf16",
    "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14",
}
_EXPECTED = {
    "vae": "Wan2.1_VAE.pth, Wan2.2_VAE.pth or vae/",
    "text_encoder": f"{_STEMS['text_encoder']}.pth, text_encoder/ or *umt5*.gguf",
    "image_encoder": f"{_STEMS['image_encoder']}.pth or image_encoder/",
    "tokenizer": "google/umt5-xxl/ or tokenizer/",
}


class DitConfig(TypedDict):
    """The official constructor arguments of a DiT."""

    model_type: str
    patch_size: tuple[int, int, int]
    text_len: int
    in_dim: int
    dim: int
    ffn_dim: int
    freq_dim: int
    text_dim: int
    out_dim: int
    num_heads: int
    num_layers: int
    window_size: tuple[int, int]
    qk_norm: bool
    cross_attn_norm: bool
    eps: float
    image_dim: int
    image_positions: int


@dataclass(frozen=True)
class DitFiles:
    """The configuration of one network, and its tensors under official names.

    Attributes:
        folder: Where its files are.
        config: The arguments of its constructor.
        tensors: Official name -> tensor.
        sparse_linear: It was trained with sparse-linear attention, whose projections are left out.
    """

    folder: Path
    config: DitConfig
    tensors: dict[str, TensorInfo]
    sparse_linear: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder. Absent files are None; `require` refuses their absence.

    Attributes:
        folder: None for networks that are only described (`published`).
        layout: "official" or "diffusers".
        kind: "t2v", "i2v" or "ti2v".
        experts: "high_noise" and "low_noise", or "dit" -> the network.
    """

    folder: Path | None
    layout: str
    kind: str
    experts: dict[str, DitFiles]
    vae: Path | None = None
    text_encoder: Path | None = None
    image_encoder: Path | None = None
    tokenizer: Path | None = None

    @property
    def config(self) -> DitConfig:
        """The configuration of its networks, which is the same for both experts."""
        return next(iter(self.experts.values())).config

    @property
    def heads(self) -> int:
        """The number of attention heads."""
        return self.config["num_heads"]

    @property
    def head_dim(self) -> int:
        """The number of channels of a head."""
        return self.config["dim"] // self.heads

    def files(self) -> list[Path]:
        """Returns every weight file in a fixed order."""
        found = [info.file for dit in self.experts.values() for info in dit.tensors.values()]
        for part in (self.vae, self.text_encoder, self.image_encoder):
            if part is not None:
                found += [part] if part.is_file() else part.glob("*.safetensors")
        return sorted(set(found))

    @property
    def images(self) -> int:
        """How many images its networks look at beside the text."""
        return 0 if not self.config["image_dim"] else 2 if self.config["image_positions"] else 1

    def require(self, part: str) -> Path:
        """Returns the path of "vae", "text_encoder", "image_encoder" or "tokenizer".

        Raises:
            InputError: The folder does not have it.
        """
        path: Path | None = getattr(self, part)
        if path is None:
            why = f"has no {part.replace('_', ' ')}; expected {_EXPECTED[part]}"
            remedy = "download the missing files of the checkpoint"
            raise InputError(f"{self.folder}", None, why, remedy)
        return path


def published(preset: Preset) -> Checkpoint:
    """Describes a task's networks with the sizes they were published with, without any file."""
    config = {
        **_DEFAULTS,
        "model_type": "flf2v" if preset.images == 2 else preset.kind,
        "patch_size": preset.patch_size,
        "in_dim": {kind: channels for channels, kind in KINDS.items()}[preset.kind],
        "dim": preset.dim,
        "ffn_dim": preset.ffn_dim,
        "freq_dim": 256,
        "text_dim": 4096,
        "out_dim": preset.latent_channels,
        "num_heads": preset.num_heads,
        "num_layers": preset.num_layers,
        "qk_norm": True,
        "cross_attn_norm": True,
        "image_dim": 1280 if preset.images else 0,
        "image_positions": 514 if preset.images == 2 else 0,
    }
    files = DitFiles(Path(preset.folder), cast(DitConfig, config), {})
    return Checkpoint(None, "official", preset.kind, dict.fromkeys(preset.experts, files))


def describe(folder: Path) -> Checkpoint:
    """Finds out what a checkpoint folder holds.

    Raises:
        InputError: Something is missing, truncated or contradictory.
    """
    if not is_folder(folder):
        why = "does not exist"
        remedy = "give the folder of a checkpoint, or leave it out to try the demo"
        if folder.exists():
            why = "is a file"
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not str(folder).startswith("."):
            why = "is not a folder"
            remedy = (
                "download the checkpoint first, if it is a model hub's name, and give its folder"
            )
        raise InputError("`ckpt_dir`", folder, why, remedy)
    diffusers = (folder / "transformer").is_dir()
    experts = _find_experts(folder, diffusers)
    first, *others = experts.values()
    if any(files.config != first.config for files in others):
        why = "mixes networks of different tasks or sizes"
        raise InputError(f"{folder}", None, why, "download it again")
    kind = _kind(first)
    if diffusers:
        found = {part: _library_part(folder / part) for part in ("vae", *_STEMS)}
    else:
        stems = {"vae": "Wan2.2_VAE" if kind == "ti2v" else "Wan2.1_VAE", **_STEMS}
        found = {part: _file(folder, stem) for part, stem in stems.items()}
        encoders = [path for path in folder.glob("*.gguf") if "umt5" in path.name.lower()]
        if found["text_encoder"] is None and len(encoders) == 1:
            found["text_encoder"] = check_complete(encoders[0])
    if not first.config["image_dim"]:
        found["image_encoder"] = None
    tokenizer = folder / ("tokenizer" if diffusers else "google/umt5-xxl")
    return Checkpoint(
        folder=folder,
        layout="diffusers" if diffusers else "official",
        kind=kind,
        experts=experts,
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        **found,
    )


def check_task(checkpoint: Checkpoint, preset: Preset) -> None:
    """Refuses a folder that does not hold the networks of the task."""

    def networks(kind: str, names: Collection[str]) -> str:
        return f"{'two experts' if len(names) == 2 else 'one network'} for {kind}"

    if (checkpoint.kind, {*checkpoint.experts}) != (preset.kind, {*preset.experts}):
        held = networks(checkpoint.kind, checkpoint.experts)
        needed = networks(preset.kind, preset.experts)
    elif checkpoint.images != preset.images:
        held = f"a network that looks at {checkpoint.images} images"
        needed = f"one for {preset.images}"
    else:
        return
    why = f"holds {held}, but task {preset.task} needs {needed}"
    remedy = f"give `ckpt_dir` a {preset.folder} folder or choose another `task`"
    raise InputError(f"{checkpoint.folder}", None, why, remedy)


def _file(folder: Path, stem: str) -> Path | None:
    files = (folder / (stem + suffix) for suffix in (".pth", ".safetensors"))
    return next((check_complete(file) for file in files if file.is_file()), None)


def _library_part(folder: Path) -> Path | None:
    """Returns a folder of diffusers or transformers, if it holds (complete) weights."""
    return folder if folder.is_dir() and folder_tensors(folder) else None


def _find_experts(folder: Path, diffusers: bool) -> dict[str, DitFiles]:
    names = _DIFFUSERS_FOLDERS if diffusers else EXPERT_FOLDERS
    folders = {expert: folder / sub for expert, sub in names.items() if (folder / sub).is_dir()}
    if folders.keys() == {"high_noise"} and diffusers:
        return {"dit": _dit_files(folders["high_noise"])}
    if len(folders) == 1:
        missing = folder / names[({"high_noise", "low_noise"} - folders.keys()).pop()]
        raise InputError(f"{missing}", None, "is missing", "download the other expert too")
    if folders:
        return {expert: _dit_files(path) for expert, path in folders.items()}
    pair = {expert: _named(folder, expert) for expert in EXPERT_FOLDERS}
    if all(len(files) == 1 for files in pair.values()):
        return {expert: _dit_files(folder, files[0]) for expert, files in pair.items()}
    return {"dit": _dit_files(folder)}


def _named(folder: Path, expert: str) -> list[Path]:
    """Returns the weight files whose names say an expert; a folder may be between (QuantStack)."""
    says = re.compile(expert.replace("_", "[-_ ]?"), re.IGNORECASE)
    files = (*folder.iterdir(), *folder.glob("*/*.gguf"))
    return sorted(f for f in files if f.suffix in WEIGHT_FILES and says.search(f.name))


def _dit_files(folder: Path, file: Path | None = None) -> DitFiles:
    """Describes the network of a folder, or of one file in it."""
    found = folder_tensors(folder) if file is None else file_tensors(file)
    if found is None:
        why = "holds no video network (DiT)"
        remedy = (
            "expected diffusion_pytorch_model.safetensors, its shards with an index, or the "
            "folders high_noise_model/ and low_noise_model/"
        )
        pickled = [path.name for path in folder.glob("*.pth") if not OTHER_PARTS.search(path.name)]
        if pickled:
            why = f"holds {pickled[0]}, but a video network is read from safetensors only"
            remedy = "convert it with tools/convert_checkpoint.py"
        raise InputError(f"{folder}", None, why, remedy)
    tensors = network_tensors(found, dit_official_name)
    dense = {name: info for name, info in tensors.items() if SPARSE_LINEAR not in name}
    return DitFiles(folder, _dit_config(folder, dense), dense, len(dense) < len(tensors))


def _kind(files: DitFiles) -> str:
    in_dim = files.config["in_dim"]
    if in_dim not in KINDS:
        why = f"is a Wan network that is not supported ({in_dim} input channels)"
        raise InputError(f"{files.folder}", None, why, "t2v (16), i2v (36) and ti2v (48) are")
    for part, (shows, remedy) in _UNSUPPORTED.items():
        name = next((name for name in files.tensors if part in name), None)
        if name is not None:
            why = f"has {name}, {shows}, which is not supported"
            raise InputError(f"{files.folder}", None, why, remedy)
    return KINDS[in_dim]


_UNSUPPORTED = {
    "gate_compress": ("of video sparse attention", "get the FullAttn model"),
    ".weight_scale": ("of a quantised linear layer", "see `quant_dit_path`"),
    "time_embedding_r": ("of a second timestep (MeanFlow)", "get another model"),
}
"""Part of a tensor's name -> what it shows, and what to do."""
SPARSE_LINEAR = ".proj_l."  # TurboDiffusion's; attention is dense without it


# A config.json must say what the shapes of the tensors say; for the rest there are rules.

_SHAPES = {  # key -> the tensor whose shape tells it, the tensor's rank, and the axis
    "dim": ("patch_embedding.weight", 5, 0),
    "in_dim": ("patch_embedding.weight", 5, 1),
    "ffn_dim": ("blocks.0.ffn.0.weight", 2, 0),
    "freq_dim": ("time_embedding.0.weight", 2, 1),
    "text_dim": ("text_embedding.0.weight", 2, 1),
    "out_dim": ("head.head.weight", 2, 0),  # times the elements of a patch
}
_IMAGE = {"image_dim": ("img_emb.proj.1.weight", 1), "image_positions": ("img_emb.emb_pos", 1)}
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_type": (lambda value: value in MODEL_TYPES, "t2v, i2v, flf2v or ti2v"),
    "num_heads": (lambda value: type(value) is int and 1 <= value <= 1024, "from 1 to 1024"),
    "text_len": (lambda value: type(value) is int and 1 <= value <= 4096, "from 1 to 4096"),
    "window_size": (lambda value: value == [-1, -1], "[-1, -1], all of the video"),
    "eps": (lambda value: type(value) is float and 0 < value < 1, "a number between 0 and 1"),
}
_CLASSES = ("WanModel", "WanTransformer3DModel")  # of the official code and of diffusers
_DEFAULTS = {"text_len": 512, "window_size": (-1, -1), "eps": 1e-6}


def _dit_config(folder: Path, tensors: Mapping[str, TensorInfo]) -> DitConfig:
    """Refuses a config.json that is damaged or belongs to other tensors."""
    told = _told_by_shapes(folder, tensors)
    path = folder / "config.json"
    stated = _stated(path) if path.is_file() else {}
    for key, value in told.items():
        said = stated.get(key, value)
        if type(said) is not type(value) or said != value:
            why = f"is {shown(said)}, but the shapes of the tensors say {shown(value)}"
            raise InputError(f"{path}: {key}", None, why, "download config.json and weights again")
    for key, (fits, allowed) in _RULES.items():
        if key in stated and not fits(stated[key]):
            raise _damaged(path, key, stated[key], allowed)
    kind = KINDS.get(told["in_dim"], "t2v")
    heads = max(told["dim"] // 128, 1)  # the published networks' head size
    free = {key: stated[key] for key in _RULES if key in stated}
    config = {**_DEFAULTS, "model_type": kind, "num_heads": heads, **free, **told}
    dim, heads = config["dim"], config["num_heads"]
    if dim % (2 * heads):
        why = f"is {heads}, but {dim} channels are not {heads} heads of an even size"
        raise InputError(f"{path}: num_heads", None, why, "download config.json again")
    frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items()}
    return cast(DitConfig, frozen)


def _told_by_shapes(folder: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Reads a configuration off the shapes, all but the head size; values have JSON's types."""
    told: dict[str, Any] = {}
    for key, (name, rank, axis) in _SHAPES.items():
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != rank or 0 in shape:
            why = f"holds no Wan DiT (no {name} of {rank} dimensions)"
            raise InputError(f"{folder}", None, why, "check `ckpt_dir`")
        told[key] = shape[axis]
    told["patch_size"] = list(tensors["patch_embedding.weight"].shape[2:])
    told["out_dim"] //= prod(told["patch_size"])
    layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    told["num_layers"] = len(layers)
    if layers != {str(index) for index in range(len(layers))}:
        why = "lacks one of the blocks of its network"
        raise InputError(f"{folder}", None, why, "download it again")
    told["qk_norm"] = "blocks.0.self_attn.norm_q.weight" in tensors
    told["cross_attn_norm"] = "blocks.0.norm3.weight" in tensors
    for key, (name, axis) in _IMAGE.items():
        told[key] = tensors[name].shape[axis] if name in tensors else 0
    return told


def _stated(path: Path) -> dict[str, Any]:
    """Returns what an official or diffusers config.json says, under the official names."""
    raw = read_json(path)
    if (kind := raw.get("_class_name", _CLASSES[0])) not in _CLASSES:
        why = f"is of the class {shown(kind)}, which is not supported"
        raise InputError(str(path), None, why, f"{' and '.join(_CLASSES)} are")
    if "num_attention_heads" in raw:
        for key in ("num_attention_heads", "attention_head_dim"):
            if type(raw.get(key)) is not int:
                raise _damaged(path, key, raw.get(key), "a whole number")
        raw |= {
            "num_heads": raw["num_attention_heads"],
            "dim": raw["num_attention_heads"] * raw["attention_head_dim"],
            "in_dim": raw.get("in_channels"),
            "out_dim": raw.get("out_channels"),
            "qk_norm": True,  # there the name of a norm, always the one we have
            "image_dim": raw.get("image_dim") or 0,
            "image_positions": raw.get("pos_embed_seq_len") or 0,
        }
    return {key: raw[key] for key in DitConfig.__annotations__ if key in raw}


def _damaged(path: Path, key: str, value: object, allowed: str) -> InputError:
    why = f"is {shown(value)}, but must be {allowed}"
    return InputError(f"{path}: {key}", None, why, "download config.json again")
