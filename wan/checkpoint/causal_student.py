"""Distinguishes causal students from t2v and ti2v networks with the same tensors; no torch."""

from __future__ import annotations

from collections.abc import Mapping

from wan.checkpoint.config import DitConfig
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS, Preset
from wan.utils.log import logger

_STUDENT = "generator_ema."  # prefix of stored names, see `pickle_header`


def is_causal_student(
    config: DitConfig, tensors: Mapping[str, TensorInfo], presets: tuple[Preset, ...]
) -> bool:
    """Returns whether a network is run as a causal student.

    The name of its dictionary in a file of the distillation shows it, or `model_type` in the
    config.json of a randomly initialized or converted checkpoint; else only the task.

    Args:
        presets: The tasks whose networks are wanted.

    Raises:
        InputError: A causal student is given for another task.
    """
    fitting = [x.task for x in PRESETS.values() if x.keeps_kv and x.in_dim == config["in_dim"]]
    if config["model_type"] not in ("t2v", "ti2v", "causal") or not fitting:
        return False
    kinds = {preset.kind for preset in presets}
    info = next(iter(tensors.values()))
    is_student = config["model_type"] == "causal" or info.name.startswith(_STUDENT)
    if is_student and "causal" not in kinds:
        why = "holds a causal student, which makes a video block by block"
        raise InputError(f"{info.file}", None, why, f"use `task={fitting[0]}`")
    if not is_student and kinds == {"causal"}:
        text = "%s does not say that it is a causal student: a model of whole videos falls apart."
        logger.info(text, info.file)
    return is_student or kinds == {"causal"}
