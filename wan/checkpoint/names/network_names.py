"""Finds the networks in a file by the names of their tensors, under any prefix.

Training code, `torch.compile`, pipelines and ComfyUI put prefixes before the names of a network's
tensors (`module.`, `pipe.dit.`, `model.diffusion_model.`), and one file may hold several networks
under different prefixes. A network is found by a few of its tensors, which share their prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wan.checkpoint.formats.tensor_info import FP8, GET_READ_FORMAT, TensorInfo
from wan.checkpoint.lora.names import split_suffix
from wan.checkpoint.names.expert_names import EXPERTS, find_expert_tags
from wan.checkpoint.names.prefixes import WRAPPERS
from wan.settings.errors import InputError
from wan.settings.values import list_names

VACE_MODULE = "vace_module"
COMPONENTS = {
    "dit": "a video network (DiT)",
    "text_encoder": "a UMT5 text encoder",
    "vae": "a Wan VAE",
    "image_encoder": "a CLIP image encoder",
    VACE_MODULE: "VACE's control blocks without the rest of the network",
    "lora": "a LoRA",
}
"""Component -> its name in messages."""
_SIGNATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "dit": (
        ("patch_embedding.weight", "blocks.0.ffn.0.weight"),
        ("patch_embedding.weight", "blocks.0.ffn.net.0.proj.weight"),
        ("patch_embedding.weight", "blocks.0.block.ffn.0.weight"),
    ),
    "text_encoder": (
        (
            "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
            "encoder.final_layer_norm.weight",
        ),
        ("enc.blk.1.attn_rel_b.weight", "token_embd.weight"),
        ("blocks.1.pos_embedding.embedding.weight", "token_embedding.weight"),
    ),
    "vae": (
        ("encoder.conv1.weight", "conv2.weight"),
        ("encoder.conv_in.weight", "post_quant_conv.weight"),
    ),
    "image_encoder": (
        ("vision_model.embeddings.class_embedding",),
        ("embeddings.class_embedding",),
        ("visual.cls_embedding",),
    ),
    VACE_MODULE: (
        ("vace_patch_embedding.weight", "vace_blocks.0.ffn.0.weight"),
        ("vace_patch_embedding.weight", "vace_blocks.0.ffn.net.0.proj.weight"),
    ),
}
"""Component -> signatures: names of tensors that a network has, all with the same prefix."""
_EXPERT_PREFIXES = {"transformer.": "high_noise", "transformer_2.": "low_noise"}  # diffusers'
_EXPERT_PREFIXES |= {"dit.": "high_noise", "dit2.": "low_noise"}  # DiffSynth-Studio's
# Prefixes of the networks in ComfyUI's files of a whole model.
_PART_PREFIXES = ("text_encoders.", "cond_stage_model.", "vae.", "first_stage_model.")
# The decoder of a whole UMT5, in transformers' and llama.cpp's names, and ComfyUI's CLIP scale.
_is_unused_text_tensor = re.compile(
    r"decoder\.|lm_head\.|dec\.|output\.weight$|(?:.*\.)?logit_scale$"
).match
_is_parameter = re.compile(r".*(\.weight|\.bias|modulation)$").match
_READ_LAYOUTS = ((".weight._data", ".weight._scale"), (".int8_weight", ".scale"))
"""Ends of the values and of their scales: quanto's and TurboDiffusion's."""
_WORD_TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@dataclass(frozen=True)
class NetworkNames:
    """A network in a file.

    Attributes:
        component: A key of `COMPONENTS`.
        prefix: Precedes the names of its tensors; "" or with a dot at its end.
        expert: "high_noise" or "low_noise" if the prefixes of a file's two DiTs say so.
    """

    component: str
    prefix: str
    expert: str | None = None


def list_tensors(infos: Iterable[TensorInfo]) -> str:
    """Returns the names and dtypes of the first three tensors, and how many follow."""
    return list_names(f"{info.name} {info.dtype}" for info in infos)


def find_networks(tensors: Mapping[str, TensorInfo]) -> list[NetworkNames]:
    """Returns the networks of a file, or a LoRA if it holds no network."""
    return _find_networks(_remove_wrappers(tensors))


class OtherFormatError(InputError):
    """Networks are stored in a format that is not read.

    Attributes:
        components: Keys of `COMPONENTS`.
    """

    components: frozenset[str] = frozenset()


def check_format(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuses weights in a format that is not read.

    Raises:
        OtherFormatError: The tensors are no network, but would be one if they were weights.
    """
    unwrapped = _remove_wrappers(tensors)
    if _find_networks(unwrapped, with_loras=False):
        return
    parts = [name for name in unwrapped if not (_is_parameter(name) or split_suffix(name))]
    weights = {
        f"{name[: match.start()]}.weight": unwrapped[name]
        for name in parts
        for match in re.finditer(r"[.:]", name)
    }
    networks = _find_networks(weights | unwrapped, with_loras=False)
    if not networks:
        return
    components = dict.fromkeys(network.component for network in networks)
    content = " and ".join(COMPONENTS[name] for name in components)
    why = f"holds {content} in a format that is not read"
    why += f" ({list_tensors(unwrapped[name] for name in parts)})"
    file = next(iter(tensors.values())).file
    error = OtherFormatError(f"{file}", None, why, GET_READ_FORMAT)
    error.components = frozenset(components)
    raise error


def has_scaled_int8(info: TensorInfo) -> bool:
    """Whether the program that stored int8 values only multiplies them by their scales."""
    return info.name.endswith(tuple(values_end for values_end, _ in _READ_LAYOUTS))


def select_network(
    tensors: Mapping[str, TensorInfo], component: str, expert: str | None = None
) -> dict[str, TensorInfo]:
    """Returns the tensors of a file's network, by names without prefix.

    Tensors that belong to no network of the file are returned as well, by their stored names. All
    tensors are returned if the file does not hold the component.

    Args:
        expert: The `NetworkNames.expert` of one of two DiTs.

    Raises:
        InputError: The file holds the component twice.
    """
    unwrapped = _remove_wrappers(tensors)
    networks = _find_networks(unwrapped)
    prefixes = [
        network.prefix
        for network in networks
        if network.component == component and expert in (None, network.expert)
    ]
    if not prefixes:
        return unwrapped
    if len(prefixes) > 1:
        listing = " and ".join(f"{prefix}*" for prefix in sorted(prefixes)[:3])
        file = next(iter(tensors.values())).file
        why = f"holds {COMPONENTS[component]} {len(prefixes)} times ({listing})"
        remedy = "save each in its own file"
        if component == "dit":
            remedy += ", and give two experts with `dit_high_noise` and `dit_low_noise`"
        raise InputError(f"{file}", None, why, remedy)
    (prefix,) = prefixes
    other_prefixes = {network.prefix for network in networks} - {prefix}
    roots = _find_roots(prefix, other_prefixes | {*_PART_PREFIXES})
    is_nested = any(prefix.startswith(other) for other in other_prefixes)
    selected: dict[str, TensorInfo] = {}
    for name, info in unwrapped.items():
        if not name.startswith(roots) and (name.startswith(prefix) or not is_nested):
            add_once(selected, name.removeprefix(prefix), info)
    return _select_text_encoder(selected) if component == "text_encoder" else selected


def _find_roots(prefix: str, other_prefixes: Iterable[str]) -> tuple[str, ...]:
    """Returns the shortest part of each other network's prefix with which `prefix` does not begin.

    Tensors next to another network belong to it: `text_encoders.umt5xxl.logit_scale` belongs to
    `text_encoders.umt5xxl.transformer.`.
    """
    roots = []
    for other in other_prefixes:
        ends = (match.end() for match in re.finditer(r"\.", other))
        roots += [next((other[:end] for end in ends if not prefix.startswith(other[:end])), "")]
    return tuple(root for root in roots if root)


def _select_text_encoder(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Removes UMT5's decoder, and names the word table by the first of its names."""
    table = next((name for name in _WORD_TABLES if name in tensors), None)
    if table is not None:
        tensors = {_WORD_TABLES[0] if name == table else name: i for name, i in tensors.items()}
    return {name: info for name, info in tensors.items() if not _is_unused_text_tensor(name)}


def _find_networks(names: Mapping[str, TensorInfo], with_loras: bool = True) -> list[NetworkNames]:
    networks: list[NetworkNames] = []
    for component, signatures in _SIGNATURES.items():
        prefixes: set[str] = set()
        for signature in signatures:
            prefixes = prefixes or _find_prefixes(names, signature)
        if component == "vae":
            prefixes = {prefix for prefix in prefixes if _is_video_vae(names, prefix)}
        if component == VACE_MODULE:  # those of a whole network are a part of it
            prefixes -= {network.prefix for network in networks}
        experts = _find_experts(prefixes) if component == "dit" else {}
        networks += [
            NetworkNames(component, prefix, experts.get(prefix)) for prefix in sorted(prefixes)
        ]
    if networks or not with_loras:
        return networks
    roles = {suffix.role for name in names if (suffix := split_suffix(name)) is not None}
    return [NetworkNames("lora", "")] if roles - {"alpha"} else []


def _find_experts(prefixes: set[str]) -> dict[str, str]:
    """Returns the expert of each of two prefixes of DiTs; {} unless both say theirs."""
    by_expert: dict[str, str] = {}
    for prefix in prefixes if len(prefixes) == len(EXPERTS) else ():
        tags = (tag for part in prefix.split(".") for tag in find_expert_tags(part))
        experts = {tag.expert for tag in tags if not tag.is_ambiguous} or {
            expert for end, expert in _EXPERT_PREFIXES.items() if f".{prefix}".endswith(f".{end}")
        }
        if len(experts) == 1:
            by_expert[experts.pop()] = prefix
    return {prefix: x for x, prefix in by_expert.items()} if len(by_expert) == 2 else {}


def _find_prefixes(names: Mapping[str, TensorInfo], signature: tuple[str, ...]) -> set[str]:
    """Returns the prefixes with which all names of a signature occur."""
    first = signature[0]
    prefixes = {name.removesuffix(first) for name in names if name.endswith(first)}
    return {
        prefix
        for prefix in prefixes
        if (not prefix or prefix.endswith("."))
        and all(f"{prefix}{name}" in names for name in signature)
    }


def _is_video_vae(tensors: Mapping[str, TensorInfo], prefix: str) -> bool:
    return any(len(i.shape) == 5 for name, i in tensors.items() if name.startswith(prefix))


def _rename_scaled_values(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Names values and scales that can be read `X.weight` and `X.weight_scale`."""
    renamed = dict(tensors)
    for name, info in tensors.items():
        for values_end, scale_end in _READ_LAYOUTS:
            layer = name.removesuffix(values_end)
            scale = tensors.get(f"{layer}{scale_end}")
            if layer == name or scale is None or info.dtype not in ("I8", *FP8):
                continue
            if f"{layer}.weight._shift" in tensors or f"{layer}.weight" in tensors:
                continue
            del renamed[name], renamed[f"{layer}{scale_end}"]
            renamed |= {f"{layer}.weight": info, f"{layer}.weight_scale": scale}
    return renamed


def _remove_wrappers(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    unwrapped: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        add_once(unwrapped, WRAPPERS.sub("", name), info)
    return _rename_scaled_values(unwrapped)


def add_once(tensors: dict[str, TensorInfo], name: str, info: TensorInfo) -> None:
    """Adds a tensor; InputError if another one has its name."""
    first_info = tensors.setdefault(name, info)
    if first_info is not info:
        why = f"has both {info.name} and {first_info.name}, which are the same tensor"
        raise InputError(f"{info.file}", None, why, "give a file with one of them")
