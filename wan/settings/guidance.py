"""Settings of guidance, and the table of guiders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wan.settings.errors import InputError
from wan.settings.fields import HelpText, option
from wan.settings.parameters import (
    Parameter,
    Parameters,
    format_number,
    normalize_parameters,
    read_parameters,
)
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.values import (
    Reader,
    choice,
    format_value,
    integer,
    join_with_or,
    read_blocks,
    real,
)


@dataclass(frozen=True)
class GuiderRow:
    """A way to combine the velocities of both guidance branches, selected by `guider`.

    Attributes:
        help: Description for `--help` and the documentation.
        factory: "module:class", a `wan.guidance.guider.Guider`.
        parameters: Parameters of `guider=NAME:KEY=VALUE`.
    """

    help: str
    factory: str
    parameters: Parameters = field(default_factory=dict)


GUIDERS = {
    "cfg": GuiderRow("classifier-free guidance", "wan.guidance.guider:ClassifierFree"),
    "cfg_zero": GuiderRow(
        "CFG-Zero*, the unconditional branch scaled to the conditional one",
        "wan.guidance.guider:CfgZeroStar",
        # by default 1, and 0 with up to 8 steps
        {"zero_init_steps": Parameter(integer(0, TRAIN_TIMESTEPS))},
    ),
    "apg": GuiderRow(
        "adaptive projected guidance, against oversaturation",
        "wan.guidance.guider:AdaptiveProjected",
        {
            "eta": Parameter(real(0, 1), 0.0),
            # the paper's momentum of -0.5 harms with few steps
            "momentum": Parameter(real(-1, 1, exclude_min=True, exclude_max=True), 0.0),
            "threshold": Parameter(real(0, 100), 0.0),
        },
    ),
}


_NAG = {  # tau and alpha of the authors
    "tau": Parameter(real(1, 1000), 2.5),
    "alpha": Parameter(real(0, 1), 0.25),
    "norm": Parameter(choice("l1", "l2"), "l1"),
}
_SLG = {"start": Parameter(real(0, 1), 0.1), "stop": Parameter(real(0, 1), 0.9)}


def _also_text(schema: Mapping[str, Any], example: str) -> dict[str, Any]:
    """Returns the JSON Schema of values that may also be text, with parameters after a colon."""
    text = {"type": "string", "pattern": "^[0-9.,-]+(:.*)?$", "examples": [example]}
    return {"anyOf": [schema, text]}


@partial(
    Reader,
    choices=tuple(GUIDERS),
    schema={"type": "string", "pattern": f"^({'|'.join(GUIDERS)})(:.*)?$", "examples": [*GUIDERS]},
)
def read_guider(name: str, raw: Any) -> str:
    """Reads `NAME`, or `NAME:KEY=VALUE,...` with parameters of the guider."""
    row = GUIDERS.get(raw.partition(":")[0]) if isinstance(raw, str) else None
    if row is None:
        raise InputError(name, format_value(raw), f"must be {join_with_or([*GUIDERS])}")
    return normalize_parameters(name, raw, row.parameters)


_NAG_SCALE = real(1, 100, exclude_min=True)


@partial(Reader, metavar="X", schema=_also_text(_NAG_SCALE.schema, "5:norm=l2"))
def read_nag(name: str, raw: Any) -> str:
    """Reads the scale of NAG, `X`, or `X:KEY=VALUE,...`."""
    scale, colon, parameters = format_number(raw).partition(":")
    _NAG_SCALE(name, scale)
    return normalize_parameters(name, f"{format_number(scale)}{colon}{parameters}", _NAG)


@partial(Reader, metavar="9,10", schema=_also_text(read_blocks.schema, "9:start=0.2"))
def read_slg(name: str, raw: Any) -> str:
    """Reads block numbers as `read_blocks` does, also with `:KEY=VALUE,...` after them."""
    blocks, colon, parameters = raw.partition(":") if isinstance(raw, str) else (raw, "", "")
    numbers = ",".join(map(str, read_blocks(name, blocks)))
    return normalize_parameters(name, f"{numbers}{colon}{parameters}", _SLG)


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Settings of guidance other than its scale; None selects the default in `help`."""

    guider: str = option(
        "cfg",
        read_guider,
        HelpText(
            "; ".join(f"{name}: {row.help}" for name, row in GUIDERS.items())
            + "; parameters of a guider follow a colon, as in apg:eta=0.5,momentum=-0.5",
            "default cfg",
        ),
        checkpoint=True,
    )
    slg_blocks: str | None = option(
        None,
        read_slg,
        HelpText(
            "blocks that the unconditional branch skips, from 0: skip-layer guidance; 9:start=0.1,"
            "stop=0.9: only from this share of the steps to that one, as by default",
            "default none",
        ),
    )
    nag_scale: str | None = option(
        None,
        read_nag,
        HelpText(
            "scale of normalized attention guidance (NAG): the negative prompt has an effect "
            "also without guidance; authors 5:norm=l2, ComfyUI 11; further parameters: tau, alpha",
            "default none",
        ),
    )

    @property
    def guider_name(self) -> str:
        """Name of the guider, without its parameters."""
        return self.guider.partition(":")[0]

    @property
    def guider_parameters(self) -> Mapping[str, Any]:
        """Parameters of the guider, by name."""
        return read_parameters("`guider`", self.guider, GUIDERS[self.guider_name].parameters)

    @property
    def nag_parameters(self) -> Mapping[str, Any]:
        """Parameters of NAG, by name: "scale", "tau", "alpha" and "norm"."""
        assert self.nag_scale is not None
        parameters = read_parameters("`nag_scale`", self.nag_scale, _NAG)
        return {"scale": float(self.nag_scale.partition(":")[0]), **parameters}

    @property
    def skipped_blocks(self) -> tuple[int, ...]:
        """The blocks of skip-layer guidance; () without it."""
        if self.slg_blocks is None:
            return ()
        return tuple(map(int, self.slg_blocks.partition(":")[0].split(",")))

    @property
    def slg_range(self) -> tuple[float, float]:
        """Shares of the steps at which skip-layer guidance starts and ends."""
        parameters = read_parameters("`slg_blocks`", self.slg_blocks or "", _SLG)
        return parameters["start"], parameters["stop"]
