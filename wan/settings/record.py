"""The JSON record's settings: what `--from_json` repeats a run from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wan.settings.attention import Attention
from wan.settings.execution import Execution
from wan.settings.flags import FLAGS
from wan.settings.output import Output
from wan.settings.request import Request

_PATHS = ("image", "quant_dit_path")


def record(
    values: Mapping[str, Any],
    request: Request,
    execution: Execution,
    attention: Attention,
    output: Output,
    folder: Path,
) -> dict[str, Any]:
    """All settings under their flag names, enough to repeat the run."""
    resolved = {
        **attention.record(),
        **values,
        "task": values.get("task", request.preset.task),
        "ckpt_dir": str(folder.absolute()),
        **{name: str(Path(values[name]).absolute()) for name in _PATHS if name in values},
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "size": request.size,
        "frame_num": request.frame_num,
        "sample_steps": request.sample_steps,
        "sample_shift": request.sample_shift,
        "sample_solver": request.sample_solver,
        "sample_guide_scale": request.guide_scale,
        "base_seed": request.seed,
        "noise_device": request.noise_device,
        "fps": output.fps,
        "save_file": str(output.save_file.absolute()),
        **asdict(execution),
    }
    return {
        name: resolved[name] for name, flag in FLAGS.items() if flag.record and name in resolved
    }
