"""Adds VACE's control blocks, stored in files of their own, to t2v networks; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan.checkpoint.config import (
    CONFIG_READERS,
    NETWORK_KEYS,
    DitConfig,
    detect_kind,
    get_control_layers,
)
from wan.checkpoint.discovery import WeightFinder
from wan.checkpoint.formats.headers import read_weight_headers
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.names.dit_shapes import convert_dit_tensors
from wan.checkpoint.names.keymaps import rename_dit_to_official
from wan.checkpoint.names.network_names import VACE_MODULE
from wan.checkpoint.quant.metadata import collect_network_tensors
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS, Preset

_CONTROL_PREFIXES = ("vace_blocks.", "vace_patch_embedding.")


def add_t2v_presets(presets: tuple[Preset, ...]) -> tuple[Preset, ...]:
    """Adds the t2v tasks whose networks have the sizes of those of the VACE tasks."""
    sizes = [(preset.dim, preset.experts) for preset in presets if preset.kind == "vace"]
    t2v_presets = [preset for preset in PRESETS.values() if preset.kind == "t2v"]
    return (*presets, *(x for x in t2v_presets if (x.dim, x.experts) in sizes and x not in presets))


def find_vace_modules(
    finder: WeightFinder,
    experts: Mapping[str, Mapping[str, TensorInfo]],
    presets: tuple[Preset, ...],
) -> dict[str, Path]:
    """Finds the files of VACE's control blocks, which a VACE task needs with its t2v networks.

    Args:
        experts: The tensors of each network.
    """
    has_control = all(NETWORK_KEYS["vace"] in tensors for tensors in experts.values())
    if has_control or any(preset.kind != "vace" for preset in presets):
        return {}
    candidates = finder.find_all(VACE_MODULE)
    modules: dict[str, Path] = {}
    for expert in experts:
        files = [file for file in candidates if expert == "dit" or file.expert == expert]
        module = finder.pick_one(VACE_MODULE, files, "dit" if expert == "dit" else f"dit_{expert}")
        if module is not None:
            modules[expert] = module.path
    return modules


def add_vace_module(
    path: Path, folder: Path, config: DitConfig, tensors: Mapping[str, TensorInfo]
) -> tuple[Any, dict[str, TensorInfo]]:
    """Returns the configuration and tensors of a network with the control blocks of a file.

    Args:
        path: The file or folder of the control blocks.
        folder: That of the network.
        config: The configuration of the network.
        tensors: Of the network, by official name. Its control blocks are replaced.

    Raises:
        InputError: The network is none for text-to-video, or the file lacks control blocks.
    """
    kind = detect_kind(tensors, config["in_dim"], tensors.values())
    if kind not in ("t2v", "vace"):
        why = f"holds VACE's control blocks, which need a t2v network, and {folder} has one for "
        raise InputError(f"{path}", None, f"{why}{kind}", "give the folder of a t2v checkpoint")
    infos = read_weight_headers(path)
    module = convert_dit_tensors(
        collect_network_tensors(infos, rename_dit_to_official, VACE_MODULE)
    )
    base = {name: x for name, x in tensors.items() if not name.startswith(_CONTROL_PREFIXES)}
    merged = base | module
    config_path = (path if path.is_dir() else path.parent) / "config.json"
    vace_config = CONFIG_READERS["vace"](config_path, merged, config)
    layers = get_control_layers(config)
    if not config_path.is_file() and len(layers) == len(vace_config["vace_layers"]):
        vace_config["vace_layers"] = layers  # those of the blocks that are replaced
    return {**config, "model_type": "vace", **vace_config}, merged
