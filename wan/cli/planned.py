"""What `--plan` plans: a run's settings and refusals, for processes that need not exist.

Nothing is written, no demo checkpoint is made, no weight is read, and torch is not imported.

What can be known of this machine's devices without torch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.layout import Checkpoint, check_task, describe
from wan.checkpoint.quantised import QuantisedDit
from wan.cli import env
from wan.cli.resolve import (
    attention_for,
    checkpoint_folder,
    generation_config,
    quantised_for,
    recorded,
    request_from,
)
from wan.settings import devices as chips
from wan.settings import devices as on_device
from wan.settings import parallel
from wan.settings.attention import Attention
from wan.settings.devices import Chip
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import SIZES, Parallel
from wan.settings.presets import ALIASES, PRESETS, Preset
from wan.settings.request import Request, check_image

MAX_RANKS = 4096


@dataclass(frozen=True)
class Planned:
    """A run that is only planned.

    checkpoint: None where there is no folder; then the task's published sizes hold.
    chip: what --chip names; execution.device is then npu. device_memory: bytes of a rank, None
    where they are not known. notices: lines worth reading.
    """

    request: Request
    checkpoint: Checkpoint | None
    execution: Execution
    parallel: Parallel
    attention: Attention
    quantised: QuantisedDit | None
    chip: Chip | None
    device_memory: int | None
    notices: tuple[str, ...]


def resolve(flags: Mapping[str, Any]) -> Planned:
    """The run that the given flags ask for. InputError as for the run itself.

    flags: checked values as `flags.parse` returns them.
    """
    if "decode_latents" in flags:
        raise InputError("--plan is about denoising, --decode_latents only decodes; drop one.")
    world = _world(flags)
    values = {**env.aliases(), **recorded(flags), **flags}
    chip = chips.by_name(values["chip"]) if "chip" in values else None
    execution = _execution(values, chip)
    preset, checkpoint = _networks(values)
    if checkpoint is not None and checkpoint.folder is not None:
        values = {**generation_config(checkpoint.folder), **values}
    if "image" in values and preset.kind == "t2v":
        raise InputError(f"Task {preset.task} takes no --image; drop the image.")
    image_size = check_image(Path(values["image"])) if "image" in values else None
    request = request_from(values, preset, image_size)
    heads, head_dim = preset.num_heads, preset.dim // preset.num_heads
    if checkpoint is not None:
        heads, head_dim = checkpoint.heads, checkpoint.head_dim
    topology, notices = parallel.resolve(values, world, heads, request.guide_scale)
    attention = attention_for(values, request, execution, topology, head_dim)
    quantised = quantised_for(values, checkpoint, execution, attention)
    if execution.device != "auto":
        on_device.check(execution, attention, quantised, head_dim, execution.device, chip)
    return Planned(
        request=request,
        checkpoint=checkpoint,
        execution=execution,
        parallel=topology,
        attention=attention,
        quantised=quantised,
        chip=chip,
        device_memory=_memory(values, execution),
        notices=notices,
    )


def _networks(values: Mapping[str, Any]) -> tuple[Preset, Checkpoint | None]:
    task = values.get("task", "t2v-A14B")
    preset = PRESETS[ALIASES.get(task, task)]
    folder, demo = checkpoint_folder(values, preset)
    if demo:
        return preset, None
    checkpoint = describe(folder)
    if task == "t2v-14B" and checkpoint.experts.keys() == {"dit"}:
        preset = PRESETS["t2v-14B"]
    check_task(checkpoint, preset)
    return preset, checkpoint


def _execution(values: Mapping[str, Any], chip: Chip | None) -> Execution:
    fields = Execution.__dataclass_fields__
    execution = Execution(**{name: values[name] for name in fields if name in values})
    if chip is None:
        return execution
    if execution.device not in ("auto", "npu"):
        raise InputError(
            f"--chip {chip.name} is an NPU, but --device is {execution.device}; drop one of them."
        )
    return replace(execution, device="npu")


def _world(flags: Mapping[str, Any]) -> int:
    """The processes that torchrun started; else as many as the sizes ask for."""
    started = env.world_size()
    asked = prod(flags.get(name) or 1 for name in SIZES)
    if asked > MAX_RANKS:
        raise InputError(f"The sizes make {asked} processes; at most {MAX_RANKS} are planned.")
    return asked if started == 1 else started


def _memory(values: Mapping[str, Any], execution: Execution) -> int | None:
    if "device_memory" in values:
        return int(values["device_memory"] * 1e9)
    return gpu_memory() if execution.device in ("auto", "cuda") else None


def gpu_memory() -> int | None:
    """Bytes of the smallest NVIDIA GPU here, as its driver's own program reports them.

    None where there is no such program, no GPU, or no answer within five seconds.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return min(int(line) for line in done.stdout.split("\n") if line.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
