"""Step caches: the table of their policies, and a policy's parameters.

A policy decides which steps of a run are computed and which reuse what an earlier step has left.
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
from wan.settings.fields import fill, loading
from wan.settings.parallel import Parallel
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.rules import Rule, conflict
from wan.settings.values import Reader, choice, either, integer, listed, path, real, shown, switch


@dataclass(frozen=True)
class PolicyRow:
    """A policy, as everything outside of its own file knows it.

    Attributes:
        value: The value of `step_cache`. A colon is followed by the argument's name.
        help: What the policy leaves out.
        make: Module and class of the policy, a `wan.cache.policy.Policy`.
        reads: The parameters that have an effect on it.
        threshold: Its default of `step_cache_threshold`.
        argument: Reads what follows the colon, from a setting's name and the text.
        refuses: Settings that it does not work with.
    """

    value: str
    help: str
    make: str
    reads: tuple[str, ...] = ()
    threshold: float | None = None
    argument: Callable[[str, str], Any] | None = None
    refuses: tuple[Rule, ...] = ()

    @property
    def name(self) -> str:
        """The value without an argument."""
        return self.value.partition(":")[0]


_RESIDUAL = ("step_cache_threshold", "step_cache_warmup", "step_cache_order")
_ROWS = (
    PolicyRow(
        "first_block",
        "all blocks but the first, while the first one's residual changes little",
        make="wan.cache.first_block:FirstBlock",
        reads=_RESIDUAL,
        threshold=0.08,  # ParaAttention's examples take 0.06 to 0.12, cache-dit takes 0.08
    ),
    PolicyRow(
        "mag",
        "all blocks, by a curve of how residuals grow from step to step (MagCache)",
        make="wan.cache.mag:Mag",
        reads=(*_RESIDUAL, "step_cache_max_skip", "step_cache_retention", "step_cache_curve"),
        threshold=0.04,  # its authors' for Wan2.2, as are max_skip 2 and retention 0.2
    ),
    PolicyRow(
        "tea",
        "all blocks, by how much the time embedding changes (TeaCache)",
        make="wan.cache.tea:Tea",
        reads=(*_RESIDUAL, "step_cache_coefficients"),
        threshold=0.2,  # its authors' for Wan2.1 T2V
    ),
    PolicyRow(
        "steps:LIST",
        "all blocks but the first, in the steps that are not listed",
        make="wan.cache.first_block:Steps",
        reads=("step_cache_order",),
        argument=listed,
    ),
    PolicyRow(
        "attention",
        "self-attention (MindIE-SD)",
        make="wan.cache.attention:AttentionPolicy",
        reads=("attentioncache_ratio", "attentioncache_interval", "start_step", "end_step"),
        refuses=(
            conflict("step_cache=attention", "compile", "skips a part of what `compile` compiles"),
        ),
    ),
    PolicyRow(
        "cfg",
        "the unconditional branch in four of five late steps",
        make="wan.cache.guidance:GuidancePolicy",
        refuses=(
            conflict(
                "step_cache=cfg",
                "cfg_size=2",
                "leaves out the unconditional branch, for which `cfg_size=2` has half of the ranks",
            ),
        ),
    ),
)
POLICIES = {row.name: row for row in _ROWS}
VALUES = ("none", *(row.value for row in _ROWS))


def _readers(parameter: str) -> list[str]:
    """The policies that read a parameter; empty where every policy does."""
    return [row.name for row in _ROWS if parameter in row.reads]


@partial(Reader, metavar="POLICY")
def policy(name: str, raw: Any) -> str:
    """One of VALUES, with an argument for its placeholder."""
    word, _, argument = raw.partition(":") if isinstance(raw, str) else ("", "", "")
    row = POLICIES.get(word)
    if row is not None and row.argument is not None and ":" in raw:
        row.argument(name, argument)
    elif raw != "none" and (row is None or raw != row.value):
        raise InputError(f"{name} is {shown(raw)}; it must be {either(VALUES)}.")
    return str(raw)


@partial(Reader, metavar="X,X,...")
def coefficients(name: str, raw: Any) -> tuple[float, ...]:
    """Finite numbers with commas between them, or a list."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    try:
        found = tuple(float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        found = ()
    if not found or not all(map(isfinite, found)):
        raise InputError(
            f"{name} is {shown(raw)}; give numbers with commas between them, highest power first."
        )
    return found


_STEP = integer(0, TRAIN_TIMESTEPS)


@dataclass(frozen=True)
class StepCache:
    """A policy and its parameters; every policy has its own default where that is None."""

    step_cache: str = loading(
        "none", policy, f"{either(VALUES)} (default none)", diffusers="policy", common=True
    )
    step_cache_threshold: float | None = loading(
        None,
        real(0, 100),
        f"what {', '.join(_readers('step_cache_threshold'))} compare with",
        diffusers="threshold",
    )
    step_cache_warmup: int = loading(
        1,
        _STEP,
        "first steps of each expert that are computed, as its last is (1)",
        diffusers="warmup",
    )
    step_cache_max_skip: int = loading(
        2, _STEP, "most steps in a row that mag skips (2)", diffusers="max_skip"
    )
    step_cache_retention: float = loading(
        0.2, real(0, 1), "share of steps that mag computes first (0.2)", diffusers="retention"
    )
    step_cache_order: int = loading(
        0, choice(0, 1), "1: extrapolate what is kept (default 0)", diffusers="order"
    )
    step_cache_curve: Path | None = loading(
        None, path, "of mag; default: the checkpoint's or published", diffusers="curve"
    )
    step_cache_coefficients: tuple[float, ...] | None = loading(
        None, coefficients, "of tea, highest power first", diffusers="coefficients"
    )
    step_cache_force: bool = loading(
        False, switch, "also with fewer than 8 steps", diffusers="force"
    )
    use_attentioncache: bool = loading(
        False, switch, "--step_cache attention, as in the Ascend fork", diffusers=True
    )
    attentioncache_ratio: float = loading(
        1.2, real(0, 1000), "has no effect, as in the Ascend fork", diffusers=True
    )
    attentioncache_interval: int = loading(
        4, integer(1, TRAIN_TIMESTEPS), "steps between two (4)", diffusers=True
    )
    start_step: int = loading(
        12, _STEP, "attention is computed up to this step (12)", diffusers=True
    )
    end_step: int | None = loading(
        None, _STEP, "attention is computed behind this step (3 before the end)", diffusers=True
    )

    @property
    def policy(self) -> str:
        """The policy's name; "steps" for a list."""
        return "attention" if self.use_attentioncache else self.step_cache.partition(":")[0]

    @property
    def argument(self) -> Any:
        """What follows the colon of `step_cache`, as the policy's row reads it."""
        read = POLICIES[self.policy].argument
        return None if read is None else read("`step_cache`", self.step_cache.partition(":")[2])

    @property
    def threshold(self) -> float:
        """What the policy compares with."""
        own = POLICIES[self.policy].threshold
        given = own if self.step_cache_threshold is None else self.step_cache_threshold
        assert given is not None
        return given


_DEFAULT = asdict(StepCache())


def given(cache: StepCache) -> dict[str, Any]:
    """The parameters that are not as by default."""
    return {name: value for name, value in asdict(cache).items() if value != _DEFAULT[name]}


def is_read(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a setting has an effect beside the others; True for other subjects' settings."""
    readers = _readers(name)
    return not readers or fill(StepCache, values).policy in readers


def check(cache: StepCache, parallel: Parallel, execution: Execution) -> None:
    """InputError for settings that contradict each other."""
    if cache.use_attentioncache and cache.step_cache not in ("none", "attention"):
        raise InputError(
            "`use_attentioncache`",
            why=f"is `step_cache=attention`, and `step_cache={cache.step_cache}` is another policy",
            remedy="drop one of them",
        )
    for name in given(cache):
        readers = _readers(name)
        if readers and cache.policy not in readers:
            why = f"has no effect on `step_cache={cache.policy}`; it belongs to "
            raise InputError(f"`{name}`", why=why + ", ".join(readers), remedy="drop it")
    if cache.policy != "none":
        facts = {**vars(parallel), **vars(execution), "step_cache": cache.policy}
        rules.check(POLICIES[cache.policy].refuses, facts)
