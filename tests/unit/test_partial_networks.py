"""Files of a part of a network: VACE's control blocks beside a t2v network, and others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_files import add_prefix, hold_same_networks, load_tensors, save_tensors
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers
from wan.settings.command import NetworkFiles
from wan.settings.presets import PRESETS

FILE = "diffusion_pytorch_model.safetensors"
CONTROL = ("vace_blocks.", "vace_patch_embedding.")


def split_vace(source: Path, folder: Path, modules: Path, task: str) -> dict[str, Path]:
    """Writes the t2v networks of a VACE checkpoint, and a file of each one's control blocks."""
    networks = {"dit": source}
    if "A14B" in task:
        networks = {name: source / f"{name}_model" for name in ("high_noise", "low_noise")}
    files = {}
    for expert, network in networks.items():
        state = load_tensors(network)
        base = {x: y for x, y in state.items() if not x.startswith(CONTROL)}
        target = folder / network.relative_to(source)
        save_tensors(base, target / FILE)
        config = json.loads((network / "config.json").read_text())
        config = {x: y for x, y in config.items() if "vace" not in x and x[0] != "_"}
        (target / "config.json").write_text(json.dumps(config | {"model_type": "t2v"}))
        control = {
            rename_dit_to_diffusers(x) if expert == "low_noise" else x: y
            for x, y in state.items()
            if x.startswith(CONTROL)
        }
        control = add_prefix(control, "" if expert == "dit" else "model.diffusion_model.")
        files[expert] = save_tensors(control, modules / f"vace_module_{expert}.safetensors")
    for file in source.iterdir():
        if file.is_file() and file.suffix == ".pth":
            shutil.copy(file, folder)
    shutil.copytree(source / "google", folder / "google")
    layers = inspect_checkpoint(source, presets=(PRESETS[task],)).config["vace_layers"]
    (modules / "config.json").write_text(json.dumps({"vace_layers": layers}))
    return files


@pytest.mark.parametrize("task", ["vace-1.3B", "vace-A14B"])
def test_control_blocks_beside_a_t2v_network(task: str, tiny: Any, tmp_path: Path) -> None:
    """Given with the DiT's flag, with the base given by it, or both in the folder."""
    folder, modules = tmp_path / "t2v", tmp_path / "modules"
    files = split_vace(tiny(task), folder, modules, task)
    presets = (PRESETS[task],)
    whole = inspect_checkpoint(tiny(task), presets=presets)
    flags = {expert if expert == "dit" else f"dit_{expert}": x for expert, x in files.items()}
    given = NetworkFiles(**flags)
    assert hold_same_networks(inspect_checkpoint(folder, given, presets), whole)
    assert hold_same_networks(inspect_checkpoint(folder, given), whole)  # the task is detected
    assert inspect_checkpoint(folder).kind == "t2v"
    assert hold_same_networks(inspect_checkpoint(tiny(task), given, presets), whole)
    together = tmp_path / "together"
    for path in folder.iterdir():
        copy = shutil.copytree if path.is_dir() else shutil.copy
        together.mkdir(exist_ok=True)
        if path.suffix != ".safetensors" and not path.name.endswith("_model"):
            copy(path, together / path.name)
    for file in (*files.values(), modules / "config.json"):
        (together / "diffusion_models").mkdir(exist_ok=True)
        shutil.copy(file, together / "diffusion_models")
    base = {x.replace("dit_", ""): y for x, y in flags.items()}
    base = {x: folder if x == "dit" else folder / f"{x}_model" for x in base}
    given = NetworkFiles(**{x if x == "dit" else f"dit_{x}": y for x, y in base.items()})
    assert hold_same_networks(inspect_checkpoint(together, given, presets), whole)


def test_other_parts_are_refused(tiny: Any, tmp_path: Path) -> None:
    path, sentences = tmp_path / "x.safetensors", {}
    names = [f"audio_injector.injector.{i}.q.weight" for i in range(4)]
    save_tensors({name: torch.ones(2) for name in names}, path)
    files = NetworkFiles(dit=path)
    sentences["S2V's modules"] = get_refusal(inspect_checkpoint, tiny("t2v-1.3B"), files)
    assert all(name in sentences["S2V's modules"] for name in names[:3])
    control = {x: y for x, y in load_tensors(tiny("vace-1.3B")).items() if x.startswith(CONTROL)}
    save_tensors(control, path)
    for case, files in (("vae", NetworkFiles(vae=path)), ("i2v", NetworkFiles(dit=path))):
        folder = tiny("i2v-14B" if case == "i2v" else "t2v-1.3B")
        sentences[f"control blocks: {case}"] = get_refusal(inspect_checkpoint, folder, files)
    check_refusals("parts of networks", sentences)
