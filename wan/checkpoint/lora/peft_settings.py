"""Reads the settings that PEFT or diffusers store with a LoRA, and refuses unsupported ones.

PEFT itself is the tests' oracle and is not used here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wan.checkpoint.formats.headers import read_json
from wan.checkpoint.formats.safetensors_header import read_safetensors_metadata
from wan.checkpoint.formats.tensor_info import SAFETENSORS_SUFFIXES
from wan.settings.errors import InputError
from wan.settings.values import format_value
from wan.utils.files import has_file

_CONFIG_FILE = "adapter_config.json"  # PEFT's, in the folder of adapter_model.safetensors
_METADATA_KEY = "lora_adapter_metadata"  # the same settings in diffusers' metadata
_SUPPORTED_INITS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of PEFT's `init_lora_weights` (0.21) that do not change the base weights."""
_IGNORED_SETTINGS = (
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    *("use_rslora", "lora_bias", "use_dora", "use_effective_conv2d", "velora_config"),
)
"""Settings of PEFT that other code reads, that belong to a value of `init_lora_weights`, that only
training uses, or that the names and shapes of the tensors show."""
_SUPPORTED_TYPES = ("LORA", "LOHA", "LOKR")
_UNSUPPORTED_SETTINGS = (
    "alora_invocation_tokens",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
"""Unsupported settings of PEFT, in addition to all others named `use_...` or `..._config`."""
_MAX_RANK = 1_000_000
_MERGE_REMEDY = "merge it into the checkpoint with the program it was made with"


_PATTERN = re.compile(r"[^*+?{]{0,200}([*+?{][^*+?{]{0,200}){0,4}")
"""Patterns with few quantifiers; others may take hours to match a name."""


@dataclass(frozen=True)
class PeftSettings:
    """PEFT's settings of an adapter.

    Attributes:
        alpha: Divided by the rank it scales the matrices; None: they are not scaled.
        alpha_pattern: Pattern of a module's name -> its alpha.
        rank: The rank of layers without factors, of LoKr.
        bias: "none", "all" or "lora_only": which biases are stored with the adapter.
        saved_modules: Names of modules that are stored with the adapter.
    """

    alpha: Any = None
    alpha_pattern: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    rank_pattern: Mapping[str, Any] = field(default_factory=dict)
    use_rslora: bool = False
    bias: str = "none"
    saved_modules: Sequence[str] = ()

    def find_alpha(self, module_names: Sequence[str]) -> Any:
        """Returns the alpha of a module, which may have several names."""
        return _find_pattern_value(self.alpha_pattern, module_names, self.alpha)

    def find_rank(self, module_names: Sequence[str]) -> int | None:
        """Returns the rank of a module, which may have several names."""
        rank = _find_pattern_value(self.rank_pattern, module_names, self.rank)
        return rank if isinstance(rank, int) and 0 < rank <= _MAX_RANK else None

    def trains(self, parameter: str) -> bool:
        """Returns whether a parameter may be stored whole, as trained."""
        is_bias = self.bias != "none" and parameter.endswith((".bias", "_bias"))
        dotted_name = f".{parameter}."
        return is_bias or any(f".{module}." in dotted_name for module in self.saved_modules)


def _find_pattern_value(patterns: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    """Returns the value of the first pattern that matches a name, as PEFT matches it."""
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            return value
    return default


def read_peft_settings(path: Path, prefix: str) -> PeftSettings:
    """Reads PEFT's settings of a file from adapter_config.json in its folder, or its metadata.

    Args:
        prefix: Prefix of the network's keys in diffusers' metadata.

    Raises:
        InputError: A setting that affects the result is not supported.
    """
    settings: dict[str, Any] = {}
    for source, source_settings in _iter_peft_sources(path):
        network_settings = {
            key.removeprefix(prefix): value
            for key, value in source_settings.items()
            if key.startswith(prefix) or "." not in key
        }
        _check_peft_settings(path, source, network_settings)
        settings = network_settings | settings
    return PeftSettings(
        alpha=settings.get("lora_alpha", settings.get("alpha")),
        alpha_pattern=settings.get("alpha_pattern") or {},
        rank=settings.get("r"),
        rank_pattern=settings.get("rank_pattern") or {},
        use_rslora=bool(settings.get("use_rslora")),
        bias=settings.get("bias") or "none",
        saved_modules=settings.get("modules_to_save") or (),
    )


def _iter_peft_sources(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (source, settings) of each configuration of a file."""
    config_path = path.with_name(_CONFIG_FILE)
    if has_file(config_path):
        suffixes = (*SAFETENSORS_SUFFIXES, ".ckpt")
        weight_files = {path, *(file for x in suffixes for file in path.parent.glob(f"*{x}"))}
        if path.stem == "adapter_model" or len(weight_files) == 1:
            yield _CONFIG_FILE, read_json(config_path)
    if path.suffix in SAFETENSORS_SUFFIXES:
        metadata = read_safetensors_metadata(path, _METADATA_KEY)
        if isinstance(metadata, dict):
            yield f"metadata ({_METADATA_KEY})", metadata


def _check_peft_settings(path: Path, source: str, settings: Mapping[str, Any]) -> None:
    """Refuses settings of anything but a LoRA, LoHa or LoKr of unchanged base weights."""
    init = settings.get("init_lora_weights")
    if not isinstance(init, str | bool | None) or init not in _SUPPORTED_INITS:
        value = format_value(init)
        why = f"has init_lora_weights {value} in its {source}: it may belong to base weights"
        convert = "save it with PEFT's path_initial_model_for_weight_conversion"
        remedy = f"{convert}, or {_MERGE_REMEDY}"
        raise InputError("LoRA", path, f"{why} that training changed", remedy)
    peft_type = settings.get("peft_type", "LORA")
    if peft_type not in _SUPPORTED_TYPES:
        why = f"has the peft_type {format_value(peft_type)} in its {source}, which is not supported"
        raise InputError("LoRA", path, why, _MERGE_REMEDY)
    for key, is_valid in _VALIDATORS.items():
        if settings.get(key) is not None and not is_valid(settings[key]):
            why = f"has {key} {format_value(settings[key])} in its {source}"
            raise InputError("LoRA", path, why, "it is damaged, or not supported")
    for key, value in settings.items():
        is_variant = key.startswith("use_") or key.endswith("_config")
        is_unsupported = key in _UNSUPPORTED_SETTINGS or (
            is_variant and key not in _IGNORED_SETTINGS
        )
        if is_unsupported and value:
            why = f"has {key} in its {source}, which is not supported"
            raise InputError("LoRA", path, why, _MERGE_REMEDY)


def _is_pattern_table(value: Any) -> bool:
    """Returns whether a value maps regular expressions to numbers."""
    return isinstance(value, dict) and all(
        isinstance(number, int | float) and _PATTERN.fullmatch(key) and _is_regex(key)
        for key, number in value.items()
    )


def _is_regex(text: str) -> bool:
    try:
        re.compile(f"({text})")
    except re.error:
        return False
    return True


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


_VALIDATORS: Mapping[str, Callable[[Any], bool]] = {
    "use_rslora": lambda value: isinstance(value, bool),
    "alpha_pattern": _is_pattern_table,
    "rank_pattern": _is_pattern_table,
    "modules_to_save": _is_list_of_names,
    "bias": lambda value: isinstance(value, str),
}
"""Setting -> whether its value is valid."""
