"""Names of settings that the version before had, and what to use instead.

Each front end refuses them with this table, and records of that version are read by it. A row is
deleted one release after the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wan.settings.errors import InputError
from wan.settings.parameters import format_number


@dataclass(frozen=True)
class RemovedSetting:
    """A setting that is gone.

    Attributes:
        remedy: What to use instead; settings in backticks.
        setting: Setting that has its value now; "": none, a record's value has no effect.
        parameter: Parameter of that setting; "": the value itself.
        default: Value of a record that leaves the other setting as it is.
        recorded: Whether records of the version before have it.
    """

    remedy: str
    setting: str = ""
    parameter: str = ""
    default: str = ""
    recorded: bool = True


def _list_parameters(
    setting: str, value: str, prefix: str, *parameters: str
) -> dict[str, RemovedSetting]:
    """Lists settings that are parameters of another one now, with a value of it as an example."""
    return {
        f"{prefix}{name}": RemovedSetting(f"use `{setting}={value}:{name}=...`", setting, name)
        for name in parameters
    }


_WEIGHTS = RemovedSetting("use `stored_weights`", "stored_weights", default="auto")
REMOVED = {
    **_list_parameters("step_cache", "first_block", "step_cache_", "threshold", "warmup", "order"),
    **_list_parameters("step_cache", "mag", "step_cache_", "max_skip", "retention", "curve"),
    **_list_parameters("step_cache", "tea", "step_cache_", "coefficients"),
    **_list_parameters("step_cache", "first_block", "step_cache_", "force"),
    **_list_parameters("guider", "apg", "apg_", "eta", "momentum", "threshold"),
    **_list_parameters("guider", "cfg_zero", "", "zero_init_steps"),
    **_list_parameters("nag_scale", "11", "nag_", "tau", "alpha", "norm"),
    **_list_parameters("slg_blocks", "9", "slg_", "start", "stop"),
    "fp8_weights": _WEIGHTS,
    "gguf_weights": _WEIGHTS,
    "attention_algo": RemovedSetting(
        "use `attention_backend`", "attention_backend", default="fused"
    ),
    "text_kv_cache": RemovedSetting("leave it out: keys and values are always cached"),
    "fa_freq_restore": RemovedSetting(
        "use `fa_freq_cap=1400,1650`: the clock during, and after", recorded=False
    ),
    "host_gbs": RemovedSetting(
        "divide the bytes that the plan prints by the bandwidth", recorded=False
    ),
    "clips": RemovedSetting("use `num_clip`", recorded=False),
}
"""Name of a setting of the version before -> what to use instead."""


def refuse_removed(name: str) -> None:
    """Raises InputError for the name of a removed setting."""
    if name in REMOVED:
        raise InputError(f"`{name}`", None, "was removed", REMOVED[name].remedy)


def update_record(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a record of the version before under today's names."""
    recorded = {name for name, row in REMOVED.items() if row.recorded}
    updated = {name: value for name, value in settings.items() if name not in recorded}
    for name in {row.setting for row in REMOVED.values() if row.parameter} & updated.keys():
        updated[name] = _write_value(updated[name])
    for name, row in REMOVED.items():
        value, owner = settings.get(name), updated.get(row.setting)
        if value is None or not row.setting:
            continue
        if not row.parameter:
            updated[row.setting] = owner if owner and value == row.default else value
        elif owner not in (None, "none"):
            separator = "," if ":" in owner else ":"
            updated[row.setting] = f"{owner}{separator}{row.parameter}={_write_value(value)}"
    return updated


def _write_value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(format_number, value))
    return str(value).lower() if isinstance(value, bool) else format_number(value)
