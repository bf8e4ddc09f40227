"""The tables by kind of task fit each other: presets, rooms, options and checkpoints."""

from __future__ import annotations

import dataclasses
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import wan
from tests.tasks.tasks import TASKS as COLUMNS
from wan import settings
from wan.checkpoint.config import (
    CONFIG_READERS,
    KINDS,
    NETWORK_KEYS,
    detect_kind,
)
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.settings.errors import InputError
from wan.settings.fields import list_options
from wan.settings.flags import FLAGS, GROUPS
from wan.settings.presets import PRESETS, SIZES, TASKS_OF_KIND
from wan.settings.video_options import INPUT_OPTIONS, list_needed_inputs
from wan.tasks.base import TASKS, get_task
from wan.tasks.needed_inputs import check_needed_inputs


def test_each_kind_has_a_room_presets_a_prompt_a_class_and_promises() -> None:
    assert TASKS.keys() == TASKS_OF_KIND.keys()
    assert [get_task(kind).kind for kind in TASKS] == [*TASKS]
    assert all(preset.prompt for preset in PRESETS.values())
    classes = [getattr(wan, name) for name in wan.__all__ if name.startswith("Wan")]
    assert sorted(kind.kind for kind in classes) == sorted(TASKS)
    assert {PRESETS[column.checkpoint].kind for column in COLUMNS.values()} == TASKS.keys()


@pytest.mark.parametrize("task", PRESETS)
def test_a_network_shows_its_kind(task: str) -> None:
    """By a tensor that only its kind has, by stored names, or by its input channels."""
    preset = PRESETS[task]
    tensors = [NETWORK_KEYS[preset.kind]] if preset.kind in NETWORK_KEYS else []
    stored = list_animate2_tensors() if preset.kind == "animate2" else [()]
    # Causal networks have the tensors of t2v's and ti2v's.
    kind = {"causal-1.3B": "t2v", "causal-5B": "ti2v"}.get(task, preset.kind)
    for infos in stored:
        assert detect_kind(tensors, preset.in_dim, infos) == kind
    assert preset.in_dim in KINDS
    assert (preset.kind in CONFIG_READERS) == bool(preset.network_config or stored[0])


def list_animate2_tensors() -> list[tuple[TensorInfo]]:
    """Lists a tensor of each spelling, and of a file that is named after the network."""
    names = {
        "blocks.0.block.self_attn.q.weight": "model.safetensors",
        "model.diffusion_model.blocks.0.block.norm3.bias": "model.safetensors",
        "blocks.0.self_attn.to_q.weight": "diffusion_pytorch_model.safetensors",
        "blocks.0.self_attn.q.weight": "wan2.2_animate-2_14B_fp8.safetensors",
    }
    return [(TensorInfo(Path(file), name, "BF16", (1,), 2),) for name, file in names.items()]


def test_networks_of_i2v_are_not_of_animate2() -> None:
    for name, file in (
        ("blocks.0.self_attn.q.weight", "Wan2.2-Animate-24fps.safetensors"),
        ("blocks.0.attn1.to_q.weight", "diffusion_pytorch_model.safetensors"),
    ):
        assert detect_kind((), 36, [TensorInfo(Path(file), name, "BF16", (1,), 2)]) == "i2v"


def test_the_numbers_of_presets_fit_each_other() -> None:
    for task, preset in PRESETS.items():
        assert preset.dim % (2 * preset.num_heads) == 0, "rotary embeddings rotate pairs"
        assert "*".join(map(str, preset.size)) in preset.trained_sizes, task
        assert {*preset.trained_sizes} <= {*SIZES}, task
        assert (preset.boundary is None) == (len(preset.experts) == 1), task
    assert len({preset.folder for preset in PRESETS.values()}) == len(PRESETS)
    for kind, tasks in TASKS_OF_KIND.items():  # a folder is read as that of the first preset
        if kind == "causal":  # or as one of t2v or ti2v
            continue
        presets = [PRESETS[task] for task in tasks]
        assert len({(x.vae, x.needs_audio_encoder, x.in_dim) for x in presets}) == 1, tasks


def test_all_declared_options_are_flags() -> None:
    modules = [
        import_module(f"wan.settings.{info.name}")
        for info in pkgutil.iter_modules(settings.__path__)
    ]
    declared = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and list_options(value)
    }
    assert declared == {group for groups in GROUPS.values() for group in groups}


def test_an_input_has_an_effect_on_named_tasks_only() -> None:
    for group in INPUT_OPTIONS:
        for name, option in list_options(group).items():
            assert option.tasks, f"{name} names no tasks"


@pytest.mark.parametrize("task", PRESETS)
def test_a_task_refuses_a_video_without_the_inputs_that_it_needs(task: str) -> None:
    """All that are missing are named, and `--help` says that they are needed."""
    preset = PRESETS[task]
    get_task(preset.kind).read_inputs(preset, {})
    groups = list_needed_inputs(task)
    if not groups:
        check_needed_inputs(preset, {})
        return
    with pytest.raises(InputError) as refusal:
        check_needed_inputs(preset, {})
    names = [name for group in groups for name in group]
    assert not [name for name in names if f"`{name}`" not in refusal.value.why]
    assert not [name for name in names if "needed" not in FLAGS[name].help]
