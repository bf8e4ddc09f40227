"""Reads the settings that PEFT or diffusers store with a LoRA, and refuses unsupported ones.

PEFT itself is the tests' oracle and is not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wan.checkpoint.headers import read_json, read_safetensors_metadata
from wan.settings.errors import InputError
from wan.settings.values import format_value

_CONFIG_FILE = "adapter_config.json"  # PEFT's, in the folder of adapter_model.safetensors
_METADATA_KEY = "lora_adapter_metadata"  # the same settings in diffusers' metadata
_SUPPORTED_INITS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of PEFT's `init_lora_weights` (0.21) that do not change the base weights."""
_IGNORED_SETTINGS = (
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    *("use_rslora", "lora_bias"),
)
"""Settings of PEFT that other code reads, or that belong to a value of `init_lora_weights`."""
_UNSUPPORTED_SETTINGS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
"""Unsupported settings of PEFT, in addition to all others named `use_...` or `..._config`."""
_MERGE_REMEDY = "merge it into the checkpoint with the program it was made with"


def read_peft_settings(path: Path, prefix: str) -> dict[str, Any]:
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
    return settings


def _iter_peft_sources(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (source, settings) of each configuration of a file."""
    config_path = path.with_name(_CONFIG_FILE)
    if config_path.is_file():
        weight_files = [*path.parent.glob("*.safetensors"), *path.parent.glob("*.ckpt")]
        if path.stem == "adapter_model" or len(weight_files) == 1:
            yield _CONFIG_FILE, read_json(config_path)
    if path.suffix == ".safetensors":
        metadata = read_safetensors_metadata(path, _METADATA_KEY)
        if isinstance(metadata, dict):
            yield f"metadata ({_METADATA_KEY})", metadata


def _check_peft_settings(path: Path, source: str, settings: Mapping[str, Any]) -> None:
    """Refuses settings of anything but a plain LoRA of unchanged base weights."""
    init = settings.get("init_lora_weights")
    if not isinstance(init, str | bool | None) or init not in _SUPPORTED_INITS:
        value = format_value(init)
        why = f"has init_lora_weights {value} in its {source}: it may belong to base weights"
        convert = "save it with PEFT's path_initial_model_for_weight_conversion"
        remedy = f"{convert}, or {_MERGE_REMEDY}"
        raise InputError("LoRA", path, f"{why} that training changed", remedy)
    peft_type = settings.get("peft_type", "LORA")
    if peft_type != "LORA":
        why = f"has the peft_type {format_value(peft_type)} in its {source}, which is not supported"
        raise InputError("LoRA", path, why, _MERGE_REMEDY)
    if not isinstance(settings.get("use_rslora", False), bool | None):
        why = f"has use_rslora {format_value(settings['use_rslora'])} in its {source}"
        raise InputError("LoRA", path, why, "it is damaged")
    for key, value in settings.items():
        is_variant = key.startswith("use_") or key.endswith("_config")
        is_unsupported = key in _UNSUPPORTED_SETTINGS or (
            is_variant and key not in _IGNORED_SETTINGS
        )
        if is_unsupported and value:
            why = f"has {key} in its {source}, which is not supported"
            raise InputError("LoRA", path, why, _MERGE_REMEDY)
