"""Reads the settings that PEFT or diffusers store with a LoRA, and refuses unsupported ones.

PEFT itself is the tests' oracle and is not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wan.checkpoint.files import read_json, safetensors_metadata
from wan.settings.errors import InputError
from wan.settings.values import shown

_CONFIG = "adapter_config.json"  # PEFT's, in the folder of adapter_model.safetensors
_METADATA = "lora_adapter_metadata"  # the same settings in diffusers' metadata
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of PEFT's `init_lora_weights` (0.21) that do not change the base weights."""
_CHANGE_NOTHING = (
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    *("use_rslora", "lora_bias"),
)
"""Settings of PEFT that other code reads, or that belong to a value of `init_lora_weights`."""
_CHANGE_RESULTS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
"""Unsupported settings of PEFT, in addition to all others named `use_...` or `..._config`."""
_MERGE = "merge it into the checkpoint with the program it was made with"


def read_peft_settings(path: Path, prefix: str) -> dict[str, Any]:
    """Reads PEFT's settings of a file from adapter_config.json in its folder, or its metadata.

    Args:
        prefix: Prefix of the network's keys in diffusers' metadata.

    Raises:
        InputError: A setting that affects the result is not supported.
    """
    found: dict[str, Any] = {}
    for source, stated in _find_settings(path):
        own = {
            key.removeprefix(prefix): value
            for key, value in stated.items()
            if key.startswith(prefix) or "." not in key
        }
        _check_settings(path, source, own)
        found = own | found
    return found


def _find_settings(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (source, settings) of each configuration of a file."""
    beside = path.with_name(_CONFIG)
    if beside.is_file():
        others = [*path.parent.glob("*.safetensors"), *path.parent.glob("*.ckpt")]
        if path.stem == "adapter_model" or len(others) == 1:
            yield _CONFIG, read_json(beside)
    if path.suffix == ".safetensors":
        stated = safetensors_metadata(path, _METADATA)
        if isinstance(stated, dict):
            yield f"metadata ({_METADATA})", stated


def _check_settings(path: Path, source: str, stated: Mapping[str, Any]) -> None:
    """Refuses settings of anything but a plain LoRA of unchanged base weights."""
    start = stated.get("init_lora_weights")
    if not isinstance(start, str | bool | None) or start not in _PLAIN_STARTS:
        why = f"has init_lora_weights {shown(start)} in its {source}: it may belong to base weights"
        convert = "save it with PEFT's path_initial_model_for_weight_conversion"
        remedy = f"{convert}, or {_MERGE}"
        raise InputError("LoRA", path, f"{why} that training changed", remedy)
    kind = stated.get("peft_type", "LORA")
    if kind != "LORA":
        why = f"has the peft_type {shown(kind)} in its {source}, which is not supported"
        raise InputError("LoRA", path, why, _MERGE)
    if not isinstance(stated.get("use_rslora", False), bool | None):
        why = f"has use_rslora {shown(stated['use_rslora'])} in its {source}"
        raise InputError("LoRA", path, why, "it is damaged")
    for key, value in stated.items():
        variant = key.startswith("use_") or key.endswith("_config")
        unknown = key in _CHANGE_RESULTS or (variant and key not in _CHANGE_NOTHING)
        if unknown and value:
            why = f"has {key} in its {source}, which is not supported"
            raise InputError("LoRA", path, why, _MERGE)
