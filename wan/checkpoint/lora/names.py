"""The names of tensors in LoRA files: of programs, of kinds of adapters, of layers; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from wan.checkpoint.names.keymaps import (
    nest_animate2_block,
    rename_animate2_to_diffusers,
    rename_dit_to_diffusers,
)
from wan.checkpoint.names.prefixes import NETWORK_PREFIXES


class Naming(NamedTuple):
    """A program's names for the LoRA tensors of a layer.

    Attributes:
        program: The programs that write such files.
        prefix: Precedes the layer's name.
        down: Suffix of the matrix [rank, columns]; NAME is that of any adapter.
        up: Suffix of the matrix [rows, rank].
        bias: Suffix of a bias that is scaled like the pair; None if there is none.
    """

    program: str
    prefix: str
    down: str
    up: str
    bias: str | None = None


_A_B = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_A_B_NAME = (".lora_A.NAME.weight", ".lora_B.NAME.weight", ".lora_B.NAME.bias")
_DOWN_UP = (".lora_down.weight", ".lora_up.weight", ".lora_up.bias")
HIGH_NOISE_PREFIX, LOW_NOISE_PREFIX = "transformer.", "transformer_2."  # of diffusers
NAMINGS = (
    Naming("LightX2V, ComfyUI", "diffusion_model.", *_DOWN_UP),
    Naming("ComfyUI, with the whole model's prefix", "model.", *_DOWN_UP),
    Naming("musubi-tuner, kohya", "lora_unet_", *_DOWN_UP),
    Naming("VideoX-Fun", "lora_unet__", *_DOWN_UP),
    Naming("OneTrainer", "lora_transformer_", *_DOWN_UP),
    Naming("LyCORIS, SimpleTuner", "lycoris_", *_DOWN_UP),
    Naming("diffusers", HIGH_NOISE_PREFIX, *_A_B),
    Naming("diffusers, the low-noise expert", LOW_NOISE_PREFIX, *_A_B),
    Naming("PEFT", "base_model.model.", *_A_B_NAME),
    Naming("DiffSynth-Studio", "pipe.dit.", *_A_B_NAME),
    Naming("DiffSynth-Studio, the low-noise expert", "pipe.dit2.", *_A_B_NAME),
    Naming("diffusers' attention processors", "", "_lora.down.weight", "_lora.up.weight"),
    Naming("LoRA modules in a network", "", ".lora.down.weight", ".lora.up.weight"),
    Naming(
        "diffusers' LoRA layers",
        "",
        ".lora_linear_layer.down.weight",
        ".lora_linear_layer.up.weight",
    ),
    Naming("parameters without a module", "", ".lora_A", ".lora_B"),
    Naming("parameters without a module", "", ".lora_down", ".lora_up"),
)
"""One row for each program, for the documentation. In a file, a prefix may be repeated, and be
combined with the suffixes of any row. A layer has its official or its diffusers name, with any
mixture of dots and underscores between its modules."""
DIFFERENCES = {
    ".diff": "weight",
    ".w_norm": "weight",
    ".diff_b": "bias",
    ".b_norm": "bias",
    ".diff_m": "modulation",
}
"""Suffix of a full weight delta -> the parameter to which it is added. After a parameter's name,
as in `blocks.0.modulation.diff`, `.diff` is the delta of that parameter."""


def _list_prefix_spellings(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Returns prefixes with other separators: a dot or an underscore for each.

    A prefix of one word keeps its dot, because transformer_blocks is a layer of other networks.
    """
    spellings: dict[str, None] = {}
    for prefix in prefixes:
        spellings[prefix] = None
        if prefix not in NETWORK_PREFIXES or "_" in prefix:
            flat = prefix.replace(".", "_")
            spellings |= dict.fromkeys((f"{prefix[:-1]}_", f"{prefix[:-1]}.", flat))
    return tuple(spellings)


_LOW_NOISE_PREFIXES = _list_prefix_spellings((LOW_NOISE_PREFIX, "dit2.", "lora_transformer_2_"))
PREFIXES = _list_prefix_spellings(naming.prefix for naming in NAMINGS if naming.prefix)
PREFIXES = (*PREFIXES, *NETWORK_PREFIXES, *_LOW_NOISE_PREFIXES)
_LOHA_ROLES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_LOKR_ROLES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
_MAGNITUDES = (
    *(".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight"),
    *(".lora_magnitude_vector.NAME.weight", ".lora_magnitude_vector.NAME"),
)
_SUFFIX_ROLES = {  # suffix -> role of the tensor
    **{naming.down: "down" for naming in NAMINGS},
    **{naming.up: "up" for naming in NAMINGS},
    ".b1.weight": "up",
    ".b2.weight": "down",
    ".a1.weight": "base_up",  # of GLoRA
    ".a2.weight": "base_down",
    **{suffix: f"difference of {parameter}" for suffix, parameter in DIFFERENCES.items()},
    **{naming.bias: "bias" for naming in NAMINGS if naming.bias is not None},
    ".alpha": "alpha",
    **dict.fromkeys(_MAGNITUDES, "magnitude"),
    **{f".{role}": role for role in (*_LOHA_ROLES, *_LOKR_ROLES)},
    **{f".{role}.NAME": role for role in (*_LOHA_ROLES, *_LOKR_ROLES)},
}
_SUFFIX_ROLES |= {
    f"{stem}.NAME.weight": role
    for suffix, role in _SUFFIX_ROLES.items()
    if role in ("down", "up")
    and "NAME" not in suffix
    and (stem := suffix.removesuffix(".weight")) != suffix
}
_SUFFIX_PATTERNS = [
    (re.compile(re.escape(suffix).replace("NAME", r"(?P<adapter>[^.]+)") + "$"), role)
    for suffix, role in sorted(_SUFFIX_ROLES.items(), key=lambda item: "NAME" in item[0])
]


_LOW_NOISE = re.compile(
    "(?:{})*?(?:{})".format(
        *("|".join(map(re.escape, prefixes)) for prefixes in (PREFIXES, _LOW_NOISE_PREFIXES))
    )
)


class Suffix(NamedTuple):
    """The end of a LoRA tensor's name.

    Attributes:
        stem: What precedes it.
        adapter: PEFT's name of the adapter; "" if there is none.
    """

    stem: str
    role: str
    adapter: str


def split_suffix(name: str) -> Suffix | None:
    """Splits a name at its suffix; None if the suffix is not known."""
    for pattern, role in _SUFFIX_PATTERNS:
        if match := pattern.search(name):
            adapter = match.groupdict().get("adapter") or ""
            return Suffix(name[: match.start()], role, adapter)
    return None


_is_image_layer = re.compile(
    r"(^|[._])(k_img|v_img|norm_k_img|add_[kv]_proj|norm_added_k|img_emb|image_embedder)[._]"
).search


def is_image_layer(name: str) -> bool:
    """Whether a tensor changes layers that only networks with CLIP's image input have."""
    return _is_image_layer(name) is not None


def is_low_noise(name: str) -> bool:
    """Whether a name has a prefix of the low-noise expert."""
    return _LOW_NOISE.match(name) is not None


def names_both_experts(names: Iterable[str]) -> bool:
    """Whether some tensors have a prefix of the low-noise expert, and others do not."""
    return len({is_low_noise(name) for name in names}) == 2


def flatten_name(name: str) -> str:
    """Returns a name with underscores, because each separator of a spelling may be one or a dot."""
    return name.replace(".", "_")


def map_layer_spellings(parameters: Iterable[str]) -> dict[str, str]:
    """Maps every spelling of a layer's name, with underscores, to its official name."""
    spellings: dict[str, str] = {}
    for name in parameters:
        official, _, parameter = name.rpartition(".")
        diffusers_name = rename_dit_to_diffusers(name)
        names = [
            official,
            diffusers_name.removesuffix(f".{parameter}") if parameter != "modulation" else official,
        ]
        names += [rename_animate2_to_diffusers(official), nest_animate2_block(official)]
        if names[1].endswith(".to_out.0"):  # diffusers' attention processors have to_out_lora
            names.append(names[1].removesuffix(".0"))
        spellings |= {flatten_name(spelling): official for spelling in names}
    return spellings


def map_parameter_spellings(parameters: Iterable[str]) -> dict[str, str]:
    """Maps every spelling of a parameter's name, with underscores, to its official name."""
    return {
        flatten_name(spelling): name
        for name in parameters
        for spelling in (name, rename_dit_to_diffusers(name))
    }
