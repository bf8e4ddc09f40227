"""The fields that a request to the running task needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan.app.run import Run
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS
from wan.settings.values import join_with_and, join_with_or
from wan.settings.video_options import list_needed_inputs

FIELD_NAMES = {
    "image": "input_reference",
    "frame_num": "num_frames",
    "sample_steps": "num_inference_steps",
    "sample_shift": "flow_shift",
    "base_seed": "seed",
    "video_lora": "lora",
}
"""Setting -> its field in the schema and in answers, where the two differ."""
FOLDER = "src_root_path"
"""Setting whose value is a folder of uploaded files."""


def list_needed_fields(run: Run, replaces_character: bool) -> list[tuple[str, ...]]:
    """Returns groups of fields; a request needs one of each group.

    Args:
        run: The run that the ranks were started with.
        replaces_character: The value of `replace_flag`.
    """
    task = run.params.task
    groups: list[tuple[str, ...]] = [] if task.uploads_without_prompt else [("prompt",)]
    for group in list_needed_inputs(run.setup.preset.task):
        if FOLDER in group:
            names = (*task.needed_uploads, *(task.scene_uploads if replaces_character else ()))
            groups += [(name,) for name in names]
        else:
            groups.append(tuple(FIELD_NAMES.get(name, name) for name in group))
    return groups


def check_needed_fields(
    settings: Mapping[str, Any], files: Mapping[str, bytes | bytearray], run: Run
) -> None:
    """Refuses a request that lacks fields, and names all of them.

    Args:
        settings, files: See `ParsedRequest`.
        run: The run that the ranks were started with.
    """
    present = {"prompt"} if settings.get("clip_prompts") or "prompt" in settings else set()
    for name, _, file in (key.partition("/") for key in files):
        present.add(Path(file).stem if name == FOLDER else FIELD_NAMES.get(name, name))
    flag = settings.get("replace_flag", bool(run.params.replace_flag))
    groups = list_needed_fields(run, FLAGS["replace_flag"].reader("replace_flag", flag))
    missing = [group for group in groups if present.isdisjoint(group)]
    if missing == [("prompt",)]:
        raise InputError("prompt", why="is missing", remedy="describe the video")
    if missing:
        names = join_with_and([join_with_or(group) for group in missing])
        remedy = "give it" if names == missing[0][0] else f"give {names}"
        if ("prompt",) not in groups and "prompt" not in present:
            remedy += ", and a prompt if you like"
        raise InputError(missing[0][0], why="is missing", remedy=remedy)
