"""All flags: the options of all settings dataclasses, and their names in other programs."""

from __future__ import annotations

from difflib import get_close_matches

from wan.settings import errors, rules
from wan.settings.attention import Attention
from wan.settings.command import (
    CheckpointOptions,
    LatentOptions,
    Loras,
    MeasurementOptions,
    NetworkFiles,
    Output,
    PlanOptions,
    PromptExtension,
    PromptFileOptions,
    ResumeOptions,
    VideoLoraOptions,
)
from wan.settings.errors import FlagNaming, InputError
from wan.settings.execution import Execution
from wan.settings.fields import Option, list_options
from wan.settings.guidance import Guidance
from wan.settings.parallel import Parallel
from wan.settings.removed import refuse_removed
from wan.settings.step_cache import StepCache
from wan.settings.values import join_with_or
from wan.settings.video_options import INPUT_OPTIONS, Sampling, VideoSettings

GROUPS: dict[str, tuple[type, ...]] = {
    "video": (VideoSettings, *INPUT_OPTIONS),
    "checkpoint": (CheckpointOptions, NetworkFiles, Loras, VideoLoraOptions),
    "sampling": (Sampling, LatentOptions),
    "guidance": (Guidance,),
    "device and memory": (Execution,),
    "attention": (Attention,),
    "step cache": (StepCache,),
    "several processes (torchrun)": (Parallel,),
    "planning": (PlanOptions,),
    "prompt extension": (PromptExtension,),
    "measurement": (MeasurementOptions,),
    "prompt file": (PromptFileOptions,),
    "output": (Output, ResumeOptions),
}
"""Title of a group of flags -> the dataclasses that declare them."""
FLAGS: dict[str, Option] = {
    name: flag
    for kinds in GROUPS.values()
    for kind in kinds
    for name, flag in list_options(kind).items()
}


def _make_task_rule(name: str, tasks: tuple[str, ...]) -> rules.Rule[rules.VideoView]:
    why, remedy = "has no effect on {s.video.preset.task}", f"drop it, or use {join_with_or(tasks)}"
    return rules.Rule((name,), why, remedy, lambda s: s.video.preset.task not in tasks)


TASK_RULES = tuple(_make_task_rule(name, flag.tasks) for name, flag in FLAGS.items() if flag.tasks)
"""Rules for settings of single tasks, by their options."""
PYTHON_KEYWORDS = {name: flag.keyword for name, flag in FLAGS.items() if flag.keyword is not None}
"""Flag -> keyword of the Python classes, where the two differ."""


PYTHON_NAMING = FlagNaming(errors.KEYWORD_NAMING.format_setting, PYTHON_KEYWORDS)
"""Names of settings in messages of the Python classes."""
DIFFUSERS_NAMING = FlagNaming(
    errors.KEYWORD_NAMING.format_setting,
    {name: str(flag.diffusers) for name, flag in FLAGS.items() if flag.diffusers is not None},
)
"""Names of settings in messages of `wan.diffusers`."""
NEEDS_RULES = tuple(
    rules.make_needs_rule(name, flag.needs)
    for name, flag in FLAGS.items()
    if flag.needs is not None
)
"""Rules for settings that need another one; they hold for all layers of a run together."""


FOREIGN_NAMES = {
    **{flag.keyword: name for name, flag in FLAGS.items() if flag.keyword},
    **{flag.diffusers: name for name, flag in FLAGS.items() if isinstance(flag.diffusers, str)},
    **dict.fromkeys(("steps", "infer_steps", "num_steps"), "sample_steps"),
    **dict.fromkeys(("sampler", "sampler_name"), "sample_solver"),
    **dict.fromkeys(("height", "width", "resolution"), "size"),
    **dict.fromkeys(("frames", "video_length"), "frame_num"),
    **dict.fromkeys(("output", "out", "output_path", "output_dir", "save_path"), "save_file"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance"), "sample_guide_scale"),
    **dict.fromkeys(("model", "model_path", "checkpoint"), "ckpt_dir"),
    **dict.fromkeys(("lora_path", "lora_weights"), "lora"),
    "generator": "base_seed",
}
"""Name in other programs, or keyword of the official classes -> flag."""
_OF_SAVE_VIDEO = ("fps", "save_file")


def make_keyword_error(name: str, call: str) -> InputError:
    """Makes the error for a keyword that a call of the Python classes does not accept.

    Args:
        name: The keyword.
        call: "load" for the constructor, "video" for `generate`.
    """
    refuse_removed(name)
    methods = {"load": "the constructor", "video": "generate"}
    spellings = FOREIGN_NAMES | {flag: flag for flag in FLAGS}
    flag = spellings.get(name)
    if flag is None:
        accepted = [n for n, flag in spellings.items() if FLAGS[flag].python == call]
        similar = get_close_matches(name, accepted, n=1, cutoff=0.7)
        flag = spellings[similar[0]] if similar else None
    remedy, why = "remove it", f"is not a known keyword of {methods[call]}"
    if flag is not None and FLAGS[flag].python is not None:
        keyword, owner = PYTHON_KEYWORDS.get(flag, flag), str(FLAGS[flag].python)
        remedy = f"did you mean {keyword}"
        if owner != call:
            remedy = f"give it to {methods[owner]}"
            remedy += "" if keyword == name else f" as {keyword}"
        elif keyword == name:  # an official keyword, which the signature of this class lacks
            remedy, why = "remove it", "is a keyword of other classes"
    elif flag in _OF_SAVE_VIDEO:
        remedy = "give it to wan.save_video"
    return InputError(name, why=why, remedy=remedy)


def is_python_setting(name: str, call: str) -> bool:
    """Whether a call of the Python classes ("load" or "video") accepts this setting."""
    return name in FLAGS and FLAGS[name].python == call
