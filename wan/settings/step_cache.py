"""Settings of step caches, and the table of their policies.

A policy decides which steps compute a part of the network and which reuse the output of an earlier
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from wan.settings import rules
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import build_from_values, load_option
from wan.settings.parallel import Parallel
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


@dataclass(frozen=True)
class PolicyRow:
    """A policy, selected by `step_cache`.

    Attributes:
        value: Value of `step_cache`; a placeholder for an argument follows a colon.
        help: Description of the skipped part, for the documentation.
        factory: "module:class" of the policy, a `wan.cache.policy.Policy`.
        parameters: Settings that have an effect on the policy.
        default_threshold: Default of `step_cache_threshold`.
        read_argument: Parses the argument, from the setting's name and the text after the colon.
        conflicts: Rules for settings that the policy does not support.
    """

    value: str
    help: str
    factory: str
    parameters: tuple[str, ...] = ()
    default_threshold: float | None = None
    read_argument: Callable[[str, str], Any] | None = None
    conflicts: tuple[Rule[object], ...] = ()

    @property
    def name(self) -> str:
        """Value without the argument."""
        return self.value.partition(":")[0]


_RESIDUAL = ("step_cache_threshold", "step_cache_warmup", "step_cache_order")
_ROWS = (
    PolicyRow(
        "first_block",
        "all blocks but the first, while the first one's residual changes little",
        factory="wan.cache.residual:FirstBlock",
        parameters=_RESIDUAL,
        default_threshold=0.08,  # ParaAttention's examples use 0.06 to 0.12, cache-dit 0.08
    ),
    PolicyRow(
        "mag",
        "all blocks, by a curve of how residuals grow from step to step (MagCache)",
        factory="wan.cache.mag:Mag",
        parameters=(*_RESIDUAL, "step_cache_max_skip", "step_cache_retention", "step_cache_curve"),
        default_threshold=0.04,  # by its authors for Wan2.2, as are max_skip 2 and retention 0.2
    ),
    PolicyRow(
        "tea",
        "all blocks, by how much the time embedding changes (TeaCache)",
        factory="wan.cache.tea:Tea",
        parameters=(*_RESIDUAL, "step_cache_coefficients"),
        default_threshold=0.2,  # by its authors for Wan2.1 T2V
    ),
    PolicyRow(
        "easy",
        "the whole network, while the latents change little (EasyCache)",
        factory="wan.cache.easy:EasyPolicy",
        parameters=("step_cache_threshold",),
        default_threshold=0.05,  # by its authors, who also use 0.1 and 0.2
    ),
    PolicyRow(
        "steps:LIST",
        "all blocks but the first, in the steps that are not listed",
        factory="wan.cache.residual:ListedSteps",
        parameters=("step_cache_order",),
        read_argument=parse_step_list,
    ),
    PolicyRow(
        "attention",
        "self-attention (MindIE-SD)",
        factory="wan.cache.attention:AttentionPolicy",
        parameters=("attentioncache_ratio", "attentioncache_interval", "start_step", "end_step"),
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


def _list_policies_using(parameter: str) -> list[str]:
    """Returns the policies that a parameter has an effect on; empty for a parameter of all."""
    return [row.name for row in _ROWS if parameter in row.parameters]


@partial(Reader, metavar="POLICY")
def read_policy(name: str, raw: Any) -> str:
    """Reads a policy: one of POLICY_VALUES, with an argument for the placeholder."""
    word, _, argument = raw.partition(":") if isinstance(raw, str) else ("", "", "")
    row = POLICIES.get(word)
    if row is not None and row.read_argument is not None and ":" in raw:
        row.read_argument(name, argument)
    elif raw != "none" and (row is None or raw != row.value):
        raise InputError(
            f"{name} is {format_value(raw)}; it must be {join_with_or(POLICY_VALUES)}."
        )
    return str(raw)


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


_STEP = integer(0, TRAIN_TIMESTEPS)


@dataclass(frozen=True)
class StepCache:
    """A policy and its parameters; None selects the policy's default."""

    step_cache: str = load_option(
        "none",
        read_policy,
        f"reuse outputs of earlier steps: {join_with_or(POLICY_VALUES)} (default none)",
        diffusers="policy",
        common=True,
    )
    step_cache_threshold: float | None = load_option(
        None,
        real(0, 100),
        "estimated relative change below which a step is skipped, for "
        f"{', '.join(_list_policies_using('step_cache_threshold'))}; a larger one skips more "
        "(default: the value published for the policy, 0.04 to 0.2)",
        diffusers="threshold",
    )
    step_cache_warmup: int = load_option(
        1,
        _STEP,
        "number of first steps of each expert that are always computed (default 1)",
        diffusers="warmup",
    )
    step_cache_max_skip: int = load_option(
        2, _STEP, "maximum of consecutive steps that mag skips (default 2)", diffusers="max_skip"
    )
    step_cache_retention: float = load_option(
        0.2,
        real(0, 1),
        "share of each expert's steps at its start that mag always computes (default 0.2)",
        diffusers="retention",
    )
    step_cache_order: int = load_option(
        0,
        choice(0, 1),
        "0 (default): reuse the cached output; 1: extrapolate it linearly from two steps",
        diffusers="order",
    )
    step_cache_curve: Path | None = load_option(
        None,
        read_path,
        "file of mag's curve (default: mag_curve.json of the checkpoint, else a published curve)",
        diffusers="curve",
    )
    step_cache_coefficients: tuple[float, ...] | None = load_option(
        None,
        read_coefficients,
        "coefficients of tea's polynomial, highest power first (default: published for the task)",
        diffusers="coefficients",
    )
    step_cache_force: bool = load_option(
        False,
        switch,
        "allow a step cache with fewer than 8 steps (default false)",
        diffusers="force",
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
        """Name of the policy, without its argument."""
        return "attention" if self.use_attentioncache else self.step_cache.partition(":")[0]

    @property
    def argument(self) -> Any:
        """Parsed argument of `step_cache`; None for a policy without one."""
        read_argument = POLICIES[self.policy].read_argument
        if read_argument is None:
            return None
        return read_argument("`step_cache`", self.step_cache.partition(":")[2])

    @property
    def threshold(self) -> float:
        """`step_cache_threshold`, or the policy's default."""
        default = POLICIES[self.policy].default_threshold
        value = default if self.step_cache_threshold is None else self.step_cache_threshold
        assert value is not None
        return value


_DEFAULT_PARAMETERS = asdict(StepCache())


def get_changed_parameters(cache: StepCache) -> dict[str, Any]:
    """Returns the parameters that differ from their defaults, by name."""
    return {
        name: value for name, value in asdict(cache).items() if value != _DEFAULT_PARAMETERS[name]
    }


def list_unused_parameters(values: Mapping[str, Any]) -> list[str]:
    """Lists the settings that are parameters of policies other than the selected one."""
    policy = build_from_values(StepCache, values).policy
    policies = {name: _list_policies_using(name) for name in values}
    return [name for name in values if policies[name] and policy not in policies[name]]


def check_step_cache(cache: StepCache, parallel: Parallel, execution: Execution) -> None:
    """Raises InputError for step cache settings that contradict each other."""
    if cache.use_attentioncache and cache.step_cache not in ("none", "attention"):
        raise InputError(
            "`use_attentioncache`",
            why=f"is `step_cache=attention`, and `step_cache={cache.step_cache}` is another policy",
            remedy="drop one of them",
        )
    for name in get_changed_parameters(cache):
        policies = _list_policies_using(name)
        if policies and cache.policy not in policies:
            why = f"has no effect on `step_cache={cache.policy}`; it is a parameter of "
            raise InputError(f"`{name}`", why=why + ", ".join(policies), remedy="drop it")
    if cache.policy != "none":
        values = {**vars(parallel), **vars(execution), "step_cache": cache.policy}
        rules.check_rules(POLICIES[cache.policy].conflicts, values, None)
