"""Settings of step caches, and the table of their policies.

A policy decides which steps compute a part of the network and which reuse the output of an earlier
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

from wan.settings import rules
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import build_from_values, load_option
from wan.settings.parallel import Parallel
from wan.settings.parameters import Parameter, Parameters, normalize_parameters, read_parameters
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.rules import Rule, make_conflict_rule
from wan.settings.values import (
    Reader,
    choice,
    format_value,
    integer,
    join_with_or,
    parse_number,
    parse_step_list,
    read_path,
    real,
    split_list,
    switch,
)


@partial(Reader, metavar="X,X,...")
def read_coefficients(name: str, raw: Any) -> tuple[float, ...]:
    """Reads finite numbers, separated by commas or in a list."""
    parts = split_list(raw)
    numbers = [parse_number(part) for part in parts] if isinstance(parts, list | tuple) else []
    coefficients = tuple(n for n in numbers if n is not None and isfinite(n))
    if not numbers or len(coefficients) < len(numbers):
        raise InputError(
            f"{name} is {format_value(raw)}; give numbers separated by commas, highest power first."
        )
    return coefficients


@dataclass(frozen=True)
class PolicyRow:
    """A policy, selected by `step_cache`.

    Attributes:
        value: Value of `step_cache`; a placeholder for its first parameter follows a colon.
        help: Description of the skipped part, for the documentation.
        factory: "module:class" of the policy, a `wan.cache.policy.Policy`.
        parameters: Parameters of `step_cache=NAME:KEY=VALUE`; with a placeholder the first one is
            required.
        conflicts: Rules for settings that the policy does not support.
    """

    value: str
    help: str
    factory: str
    parameters: Parameters = field(default_factory=dict)
    conflicts: tuple[Rule[object], ...] = ()

    @property
    def name(self) -> str:
        """Value without the argument."""
        return self.value.partition(":")[0]


_STEP = integer(0, TRAIN_TIMESTEPS)
_ORDER = {"order": Parameter(choice(0, 1), 0)}
_FORCE = {"force": Parameter(switch, False)}  # allows fewer than 8 steps
_ATTENTION_CACHE = ("attentioncache_ratio", "attentioncache_interval", "start_step", "end_step")
"""Settings of the policy `attention`, with the names of the Ascend fork."""


def _make_threshold(default: float) -> dict[str, Parameter]:
    return {"threshold": Parameter(real(0, 100), default)}


def _make_residual_parameters(threshold: float) -> dict[str, Parameter]:
    return {**_make_threshold(threshold), "warmup": Parameter(_STEP, 1), **_ORDER, **_FORCE}


_ROWS = (
    PolicyRow(
        "first_block",
        "all blocks but the first, while the first one's residual changes little",
        factory="wan.cache.first_block:FirstBlock",
        # ParaAttention's examples use 0.06 to 0.12, cache-dit 0.08
        parameters=_make_residual_parameters(0.08),
    ),
    PolicyRow(
        "mag",
        "all blocks, by a curve of how residuals grow from step to step (MagCache)",
        factory="wan.cache.mag:Mag",
        parameters={  # the numbers are those of its authors for Wan2.2
            **_make_residual_parameters(0.04),
            "max_skip": Parameter(_STEP, 2),
            "retention": Parameter(real(0, 1), 0.2),
            "curve": Parameter(read_path),
        },
    ),
    PolicyRow(
        "tea",
        "all blocks, by how much the time embedding changes (TeaCache)",
        factory="wan.cache.tea:Tea",
        parameters={  # the threshold is that of its authors for Wan2.1 T2V
            **_make_residual_parameters(0.2),
            "coefficients": Parameter(read_coefficients),
        },
    ),
    PolicyRow(
        "easy",
        "the whole network, while the latents change little (EasyCache)",
        factory="wan.cache.easy:EasyPolicy",
        parameters={**_make_threshold(0.05), **_FORCE},  # by its authors, who also use 0.1 and 0.2
    ),
    PolicyRow(
        "steps:LIST",
        "all blocks but the first, in the steps that are not listed",
        factory="wan.cache.first_block:ListedSteps",
        parameters={"list": Parameter(Reader(parse_step_list)), **_ORDER, **_FORCE},
    ),
    PolicyRow(
        "attention",
        "self-attention (MindIE-SD)",
        factory="wan.cache.attention:AttentionPolicy",
        parameters=_FORCE,
        conflicts=(
            make_conflict_rule(
                "step_cache=attention", "compile", "skips a part of the compiled blocks"
            ),
        ),
    ),
    PolicyRow(
        "cfg",
        "the unconditional branch in four of five late steps",
        factory="wan.cache.guidance:GuidancePolicy",
        parameters=_FORCE,
        conflicts=(
            make_conflict_rule(
                "step_cache=cfg",
                "cfg_size=2",
                "skips the unconditional branch, which half of the ranks compute with `cfg_size=2`",
            ),
        ),
    ),
)
POLICIES = {row.name: row for row in _ROWS}
POLICY_VALUES = ("none", *(row.value for row in _ROWS))


@partial(Reader, metavar="POLICY")
def read_policy(name: str, raw: Any) -> str:
    """Reads one of POLICY_VALUES, with its parameters: `mag:threshold=0.1,warmup=2`."""
    word, colon, _ = raw.partition(":") if isinstance(raw, str) else ("", "", "")
    row = POLICIES.get(word)
    if raw != "none" and (row is None or (":" in row.value and not colon)):
        raise InputError(
            f"{name} is {format_value(raw)}; it must be {join_with_or(POLICY_VALUES)}."
        )
    return "none" if row is None else normalize_parameters(name, raw, row.parameters)


@dataclass(frozen=True)
class StepCache:
    """A policy and its parameters."""

    step_cache: str = load_option(
        "none",
        read_policy,
        f"reuse outputs of earlier steps: {join_with_or(POLICY_VALUES)} (default none), such as "
        "mag:threshold=0.1",
        diffusers="policy",
        common=True,
    )
    use_attentioncache: bool = load_option(
        False,
        switch,
        "same as --step_cache attention, the Ascend fork's name (default false)",
        diffusers=True,
    )
    attentioncache_ratio: float = load_option(
        1.2, real(0, 1000), "no effect, as in the Ascend fork (default 1.2)", diffusers=True
    )
    attentioncache_interval: int = load_option(
        4,
        integer(1, TRAIN_TIMESTEPS),
        "compute self-attention in every Nth step between --start_step and --end_step (default 4)",
        diffusers=True,
    )
    start_step: int = load_option(
        12,
        _STEP,
        "--step_cache attention skips nothing up to this step, counted from 0 (default 12)",
        diffusers=True,
    )
    end_step: int | None = load_option(
        None,
        _STEP,
        "--step_cache attention skips nothing after this step (default: --sample_steps minus 3)",
        diffusers=True,
    )

    @property
    def policy(self) -> str:
        """Name of the policy, without its parameters."""
        name = self.step_cache.partition(":")[0]
        return "attention" if name == "none" and self.use_attentioncache else name

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the policy, by name."""
        parameters = POLICIES[self.policy].parameters
        return read_parameters("`step_cache`", self.step_cache, parameters)


def list_unused_parameters(values: Mapping[str, Any]) -> list[str]:
    """Lists the settings of the policy `attention` where another one is selected."""
    is_used = build_from_values(StepCache, values).policy == "attention"
    return [] if is_used else [name for name in values if name in _ATTENTION_CACHE]


def check_step_cache(cache: StepCache, parallel: Parallel, execution: Execution) -> None:
    """Raises InputError for step cache settings that contradict each other."""
    if cache.use_attentioncache and cache.step_cache != "none" and cache.policy != "attention":
        raise InputError(
            "`use_attentioncache`",
            why=f"is `step_cache=attention`, and `step_cache={cache.step_cache}` is another policy",
            remedy="drop one of them",
        )
    for name in _ATTENTION_CACHE:
        if cache.policy != "attention" and getattr(cache, name) != getattr(_DEFAULTS, name):
            why = f"has no effect on `step_cache={cache.policy}`; it is a parameter of attention"
            raise InputError(f"`{name}`", why=why, remedy="drop it")
    if cache.policy != "none":
        values = {**vars(parallel), **vars(execution), "step_cache": cache.policy}
        rules.check_rules(POLICIES[cache.policy].conflicts, values, None)


_DEFAULTS = StepCache()
