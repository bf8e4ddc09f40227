"""Reads a DiT's configuration from its config.json and the shapes of its tensors; no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypedDict, cast

from wan.checkpoint.formats.headers import read_json
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.settings.errors import InputError
from wan.settings.presets import MODEL_TYPES, PRESETS, Preset
from wan.settings.sound import FIXED_CONFIG, INJECT_LAYERS
from wan.settings.values import format_value
from wan.utils.files import has_file

PIPELINE_INDEX = "model_index.json"
DIFFUSERS_FOLDERS = {"high_noise": "transformer", "low_noise": "transformer_2"}
_PIPELINE_COMPONENTS = (
    *DIFFUSERS_FOLDERS.values(),
    "vae",
    "text_encoder",
    "tokenizer",
    "image_encoder",
)
NETWORK_KEYS = {
    "s2v": "casual_audio_encoder.weights",  # the official spelling of "causal"
    "animate": "face_adapter.fuser_blocks.0.linear1_q.weight",
    "vace": "vace_patch_embedding.weight",
}
"""Kind -> name of a tensor that only its networks have."""
KINDS = {
    preset.in_dim: preset.kind
    for preset in PRESETS.values()
    if preset.kind not in (*NETWORK_KEYS, "animate2", "causal")
}
"""Input channels of the patch embedding -> kind of the other networks.

Causal networks have the tensors of t2v's and ti2v's.
"""
# Animate-2's networks have the tensors of i2v's: official files nest those of the blocks, those of
# diffusers have other names, and those of other programs are recognized by the file's name.
_match_animate2_tensor = re.compile(r".*\bblocks\.0\.(?:block|self_attn\.to_q)\.").match
_match_animate2_file = re.compile(r"(?i).*animate[-_]?2(?!\d)").match
BLOCK_PREFIXES = ("blocks.", "vace_blocks.")  # key prefixes of the transformer blocks
match_adapter = re.compile(  # keys of the modules that are copied together with a block
    r"(?:vace_blocks|audio_injector\.injector(?:_adain_layers)?|face_adapter\.fuser_blocks)\.(\d+)\."
).match
_HEAD_DIM_KEY = "face_adapter.fuser_blocks.0.q_norm.weight"


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


class S2VConfig(DitConfig):
    """The constructor arguments of S2V's network."""

    audio_dim: int
    num_audio_token: int
    audio_inject_layers: tuple[int, ...]


class VaceConfig(DitConfig):
    """The constructor arguments of VACE's network."""

    vace_layers: tuple[int, ...]
    vace_in_dim: int


def get_control_layers(config: DitConfig) -> tuple[int, ...]:
    """Returns the indices of the blocks to which a control block adds a hint."""
    return cast(VaceConfig, config).get("vace_layers", ())


def make_reference_dit_config(preset: Preset) -> DitConfig:
    """Returns the configuration of a task's published networks."""
    config = {
        **_DEFAULTS,
        "model_type": preset.model_type,
        "patch_size": preset.patch_size,
        "in_dim": preset.in_dim,
        "dim": preset.dim,
        "ffn_dim": preset.ffn_dim,
        "freq_dim": 256,
        "text_dim": 4096,
        "out_dim": preset.latent_channels,
        "num_heads": preset.num_heads,
        "num_layers": preset.num_layers,
        "qk_norm": True,
        "cross_attn_norm": True,
        "image_dim": 1280 if preset.num_clip_vision_images else 0,
        "image_positions": 514 if preset.num_clip_vision_images == 2 else 0,
        **preset.network_config,
    }
    return cast(DitConfig, config)


# A config.json must agree with the tensor shapes; _RULES check the values that no shape shows.

_CONFIG_FROM_SHAPES = {  # key -> (tensor, number of its dimensions, dimension with the value)
    "dim": ("patch_embedding.weight", 5, 0),
    "in_dim": ("patch_embedding.weight", 5, 1),
    "ffn_dim": ("blocks.0.ffn.0.weight", 2, 0),
    "freq_dim": ("time_embedding.0.weight", 2, 1),
    "text_dim": ("text_embedding.0.weight", 2, 1),
    "out_dim": ("head.head.weight", 2, 0),  # out_dim * prod(patch_size)
}
_IMAGE_SHAPES = {
    "image_dim": ("img_emb.proj.1.weight", 1),
    "image_positions": ("img_emb.emb_pos", 1),
}
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_type": (lambda value: value in MODEL_TYPES, ", ".join(MODEL_TYPES)),
    "num_heads": (lambda value: type(value) is int and 1 <= value <= 1024, "from 1 to 1024"),
    "text_len": (lambda value: type(value) is int and 1 <= value <= 4096, "from 1 to 4096"),
    "window_size": (lambda value: value == [-1, -1], "[-1, -1], all of the video"),
    "eps": (lambda value: type(value) is float and 0 < value < 1, "a number between 0 and 1"),
}
_CLASS_NAMES = (
    *("WanModel", "WanModel_S2V", "WanAnimateModel", "WanAnimate2Model", "VaceWanModel"),
    *("WanTransformer3DModel", "WanAnimateTransformer3DModel", "WanAnimate2Transformer3DModel"),
    "WanVACETransformer3DModel",
)
_VACE_PREFIX = "vace_blocks."
_REFERENCE_POSITIONS = {  # Animate-2's reference tokens are one frame later, to the right
    "refer_offset_t": 1,
    "refer_offset_h": 0,
    "refer_offset_w": -1,
    "refer_stride": 1,
}
_GIVE_ALL_FILES = "give all files of this network"
_DEFAULTS = {"text_len": 512, "window_size": (-1, -1), "eps": 1e-6}


def read_dit_config(folder: Path, tensors: Mapping[str, TensorInfo]) -> DitConfig:
    """Returns the configuration of a DiT.

    Raises:
        InputError: The config.json is damaged or does not agree with the tensors.
    """
    sizes = _infer_config_from_shapes(folder, tensors)
    path = folder / "config.json"
    config_json = _read_config_json(path) if has_file(path) else {}
    _check_shapes_agree(path, config_json, sizes)
    overrides = {key: config_json[key] for key in _RULES if key in config_json}
    for key, value in overrides.items():
        is_valid, allowed = _RULES[key]
        if not is_valid(value):
            raise _make_config_error(path, key, value, allowed)
    kind = detect_kind(tensors, sizes["in_dim"], tensors.values()) or "t2v"
    json_value = config_json.get("model_type", kind)
    if json_value != kind and NETWORK_KEYS.keys() & {json_value, kind}:
        why = f"is {format_value(json_value)}, but the tensors are those of {kind}"
        raise InputError(f"{path}: model_type", None, why, "download config.json and weights again")
    if not config_json:
        _check_blocks(folder, sizes)
    num_heads = max(sizes["dim"] // 128, 1)  # all published networks have 128 channels per head
    config = {**_DEFAULTS, "model_type": kind, "num_heads": num_heads, **overrides, **sizes}
    dim, num_heads = config["dim"], config["num_heads"]
    if num_heads < 1 or dim % (2 * num_heads):
        why = f"is {num_heads}, but {dim} channels are not {num_heads} heads of an even size"
        raise InputError(f"{path}: num_heads", None, why, "download config.json again")
    if (read_network_config := CONFIG_READERS.get(kind)) is not None:
        config |= read_network_config(path, tensors, config)
    frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items()}
    return cast(DitConfig, frozen)


def _check_shapes_agree(
    path: Path, config_json: Mapping[str, Any], sizes: Mapping[str, Any]
) -> None:
    """Refuses a config.json that does not agree with the tensors' shapes."""
    for key, value in sizes.items():
        json_value = config_json.get(key, value)
        if type(json_value) is not type(value) or json_value != value:
            why = f"is {format_value(json_value)}, but the tensors' shapes give "
            why += format_value(value)
            raise InputError(f"{path}: {key}", None, why, "download config.json and weights again")


def _check_blocks(folder: Path, shape_config: Mapping[str, Any]) -> None:
    """Refuses a network that has fewer blocks than the published one of the same dimensions."""
    sizes = shape_config["dim"], shape_config["ffn_dim"]
    block_counts = {
        preset.num_layers for preset in PRESETS.values() if (preset.dim, preset.ffn_dim) == sizes
    }
    if block_counts and shape_config["num_layers"] < min(block_counts):
        count, fewest = shape_config["num_layers"], min(block_counts)
        why = f"has {count} blocks, and Wan's networks of these sizes {fewest}"
        remedy = "give all of its files, or put its config.json into the same folder"
        raise InputError(f"{folder}", None, why, remedy)


def detect_kind(
    tensors: Collection[str], in_dim: int, infos: Iterable[TensorInfo] = ()
) -> str | None:
    """Returns the kind of a network; None if unknown.

    Args:
        tensors: Official names.
        in_dim: Input channels.
        infos: The stored tensors.
    """
    kinds = (kind for kind, name in NETWORK_KEYS.items() if name in tensors)
    kind = next(kinds, KINDS.get(in_dim))
    is_animate2 = kind == "i2v" and any(
        _match_animate2_tensor(info.name) or _match_animate2_file(info.file.name) for info in infos
    )
    return "animate2" if is_animate2 else kind


def _read_s2v_config(
    path: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments that only S2V's network has."""
    config_json = read_json(path) if has_file(path) else {}
    for key, value in FIXED_CONFIG.items():
        if config_json.get(key, value) != value:
            raise _make_config_error(
                path, key, config_json[key], f"{format_value(value)}, as in the published network"
            )
    conv_weight = tensors.get("casual_audio_encoder.encoder.conv1_local.conv.weight")
    injectors = {
        name.split(".")[2] for name in tensors if name.startswith("audio_injector.injector.")
    }
    num_tokens = 0 if conv_weight is None else conv_weight.shape[0] // max(config["dim"] // 4, 1)
    if conv_weight is None or not num_tokens or not injectors:
        why = "lacks tensors of the audio encoder or audio injectors of S2V"
        raise InputError(f"{path.parent}", None, why, _GIVE_ALL_FILES)
    shape_config = {"audio_dim": conv_weight.shape[1], "num_audio_token": num_tokens}
    _check_shapes_agree(path, config_json, shape_config)
    layers = config_json.get("audio_inject_layers", INJECT_LAYERS)
    is_int_list = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
    if (
        not is_int_list
        or len({*layers}) != len(injectors)
        or not 0 <= min(layers) <= max(layers) < config["num_layers"]
    ):
        allowed = f"{len(injectors)} different layers below {config['num_layers']}"
        raise _make_config_error(path, "audio_inject_layers", layers, allowed)
    return shape_config | {"audio_inject_layers": tuple(sorted(layers))}


def _read_animate2_config(
    path: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Refuses positions of the reference tokens other than those of the published networks.

    A config.json may name the type of the network whose tensors it has, i2v.
    """
    config_json = read_json(path) if has_file(path) else {}
    for key, value in _REFERENCE_POSITIONS.items():
        if config_json.get(key, value) != value:
            raise _make_config_error(path, key, config_json[key], format_value(value))
    return {"model_type": "animate2"}


def _read_vace_config(
    path: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments that only VACE's network has.

    If config.json has no `vace_layers`, the control blocks are spaced evenly over the layers, as in
    all published networks.
    """
    config_json, num_layers = read_json(path) if has_file(path) else {}, config["num_layers"]
    shape = tensors[NETWORK_KEYS["vace"]].shape
    block_ids = {n.split(".")[1] for n in tensors if n.startswith(_VACE_PREFIX)}
    count = len(block_ids)
    if len(shape) != 5 or not count or block_ids != {str(index) for index in range(count)}:
        why = "lacks tensors of the control blocks of VACE"
        raise InputError(f"{path.parent}", None, why, _GIVE_ALL_FILES)
    if config_json.get("vace_in_dim") is not None:
        _check_shapes_agree(path, config_json, {"vace_in_dim": shape[1]})
    layers = config_json.get("vace_layers")
    if layers is None:
        layers = list(range(0, num_layers, max(1, num_layers // count)))[:count]
    is_int_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_int_list or len({*layers}) != count or min(layers) != 0 or max(layers) >= num_layers:
        allowed = f"{count} different layers below {num_layers}, of which 0 is one"
        raise _make_config_error(path, "vace_layers", layers, allowed)
    return {"vace_layers": tuple(sorted(layers)), "vace_in_dim": shape[1]}


CONFIG_READERS = {
    "s2v": _read_s2v_config,
    "animate2": _read_animate2_config,
    "vace": _read_vace_config,
}
"""Kind -> function that reads the arguments that only its networks have."""


def _infer_config_from_shapes(folder: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Infers a configuration from tensor shapes, with JSON's types.

    Only Animate's tensors show the number of heads.
    """
    config: dict[str, Any] = {}
    for key, (name, rank, axis) in _CONFIG_FROM_SHAPES.items():
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != rank or 0 in shape:
            first_names = ", ".join(format_value(key, str) for key in [*tensors][:2])
            why = f"holds no Wan DiT (no {name} of {rank} dimensions among {first_names}, ...)"
            raise InputError(f"{folder}", None, why, "check `ckpt_dir`")
        config[key] = shape[axis]
    config["patch_size"] = list(tensors["patch_embedding.weight"].shape[2:])
    config["out_dim"] //= prod(config["patch_size"])
    block_ids = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    config["num_layers"] = len(block_ids)
    if block_ids != {str(index) for index in range(len(block_ids))}:
        why = "lacks one of the blocks of its network"
        raise InputError(f"{folder}", None, why, _GIVE_ALL_FILES)
    config["qk_norm"] = "blocks.0.self_attn.norm_q.weight" in tensors
    config["cross_attn_norm"] = "blocks.0.norm3.weight" in tensors
    if (norm_weight := tensors.get(_HEAD_DIM_KEY)) is not None and all(norm_weight.shape):
        config["num_heads"] = config["dim"] // norm_weight.shape[0]
    for key, (name, axis) in _IMAGE_SHAPES.items():
        config[key] = tensors[name].shape[axis] if name in tensors else 0
    return config


def _read_config_json(path: Path) -> dict[str, Any]:
    """Reads an official or diffusers config.json and returns it under the official names."""
    raw = read_json(path)
    if (class_name := raw.get("_class_name", _CLASS_NAMES[0])) not in _CLASS_NAMES:
        why = f"is of the class {format_value(class_name)}, which is not supported"
        raise InputError(str(path), None, why, f"{', '.join(_CLASS_NAMES)} are")
    if "num_attention_heads" in raw:
        for key in ("num_attention_heads", "attention_head_dim"):
            if type(raw.get(key)) is not int:
                raise _make_config_error(path, key, raw.get(key), "a whole number")
        raw |= {
            "num_heads": raw["num_attention_heads"],
            "dim": raw["num_attention_heads"] * raw["attention_head_dim"],
            "in_dim": raw.get("in_channels"),
            "out_dim": raw.get("out_channels"),
            "qk_norm": True,  # in diffusers the name of a norm: RMS norm in every network
            "image_dim": raw.get("image_dim") or 0,
            "image_positions": raw.get("pos_embed_seq_len") or 0,
        }
    return {key: raw[key] for key in DitConfig.__annotations__ if key in raw}


def _make_config_error(path: Path, key: str, value: object, allowed: str) -> InputError:
    why = f"is {format_value(value)}, but must be {allowed}"
    return InputError(f"{path}: {key}", None, why, "download config.json again")


@dataclass(frozen=True)
class PipelineIndex:
    """The contents of a Diffusers folder's model_index.json.

    Attributes:
        boundary: The `boundary_ratio`; None if it is absent or null.
        has_null_boundary: `boundary_ratio` is null, so that `transformer` runs all steps.
        components: Names of the pipeline's components.
    """

    boundary: float | None = None
    has_null_boundary: bool = False
    components: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> PipelineIndex:
        """Reads a folder's model_index.json if it exists; InputError if it is damaged."""
        path = folder / PIPELINE_INDEX
        if not has_file(path):
            return cls()
        model_index, remedy = read_json(path), "download model_index.json again"
        boundary = model_index.get("boundary_ratio")
        is_number = isinstance(boundary, int | float) and not isinstance(boundary, bool)
        if boundary is not None and not (is_number and 0 < boundary < 1):
            why = f"is {format_value(boundary)}, but must be a number between 0 and 1, or null"
            raise InputError(f"{path}: boundary_ratio", None, why, remedy)
        entries = {name: model_index[name] for name in _PIPELINE_COMPONENTS if name in model_index}
        for name, value in entries.items():
            if value is not None and not (isinstance(value, list) and len(value) == 2):
                why = f"is {format_value(value)}, but must be a library and a class"
                raise InputError(f"{path}: {name}", None, why, remedy)
        return cls(
            None if boundary is None else float(boundary),
            "boundary_ratio" in model_index and boundary is None,
            frozenset(name for name, value in entries.items() if value not in (None, [None, None])),
        )
