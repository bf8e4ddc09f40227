"""Settings of guidance, and the table of guiders."""

from __future__ import annotations

from dataclasses import dataclass

from wan.settings import values
from wan.settings.fields import HelpText, option
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.values import choice, integer, real


@dataclass(frozen=True)
class GuiderRow:
    """A way to combine the velocities of both guidance branches, selected by `guider`.

    Attributes:
        help: Description for `--help` and the documentation.
        factory: "module:class", a `wan.guidance.guider.Guider`.
        parameters: Settings that have an effect on this guider only.
    """

    help: str
    factory: str
    parameters: tuple[str, ...] = ()


GUIDERS = {
    "cfg": GuiderRow("classifier-free guidance", "wan.guidance.guider:ClassifierFree"),
    "cfg_zero": GuiderRow(
        "CFG-Zero*, the unconditional branch scaled to the conditional one",
        "wan.guidance.guider:CfgZeroStar",
        ("zero_init_steps",),
    ),
    "apg": GuiderRow(
        "adaptive projected guidance, against oversaturation",
        "wan.guidance.guider:AdaptiveProjected",
        ("apg_eta", "apg_momentum", "apg_threshold"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Settings of guidance besides its scale; None selects the default in `help`."""

    guider: str = option(
        "cfg",
        choice(*GUIDERS),
        HelpText("; ".join(f"{name}: {row.help}" for name, row in GUIDERS.items()), "default cfg"),
        checkpoint=True,
    )
    zero_init_steps: int | None = option(
        None,
        integer(0, TRAIN_TIMESTEPS),
        HelpText(
            "first steps with velocity 0, for `guider=cfg_zero`", "default 1; with up to 8 steps 0"
        ),
    )
    apg_eta: float | None = option(
        None,
        real(0, 1),
        HelpText(
            "share of the update along the conditional velocity, for `guider=apg`", "default 0"
        ),
    )
    apg_momentum: float | None = option(
        None,
        real(-1, 1, exclude_min=True, exclude_max=True),
        HelpText(
            "factor of the update of the step before, for `guider=apg`", "default 0; paper -0.5"
        ),
    )
    apg_threshold: float | None = option(
        None,
        real(0, 100),
        HelpText(
            "limit of the root mean square of the update, for `guider=apg`", "default 0: none"
        ),
    )
    slg_blocks: tuple[int, ...] | None = option(
        None,
        values.read_blocks,
        HelpText(
            "blocks that the unconditional branch skips, from 0: skip-layer guidance",
            "default none",
        ),
    )
    slg_start: float | None = option(
        None,
        real(0, 1),
        HelpText("share of the steps before skip-layer guidance", "default 0.1"),
        needs="slg_blocks",
    )
    slg_stop: float | None = option(
        None,
        real(0, 1),
        HelpText("share of the steps after which skip-layer guidance ends", "default 0.9"),
        needs="slg_blocks",
    )
    nag_scale: float | None = option(
        None,
        real(1, 100, exclude_min=True),
        HelpText(
            "scale of normalized attention guidance (NAG): the negative prompt has an effect "
            "also without guidance; authors 5, ComfyUI 11",
            "default none",
        ),
    )
    nag_tau: float | None = option(
        None,
        real(1, 1000),
        HelpText("limit by which NAG may increase the norm of a token", "default 2.5"),
        needs="nag_scale",
    )
    nag_alpha: float | None = option(
        None,
        real(0, 1),
        HelpText("share of NAG's result in the output of cross-attention", "default 0.25"),
        needs="nag_scale",
    )
    nag_norm: str | None = option(
        None,
        choice("l1", "l2"),
        HelpText(
            "norm of a token in NAG; l1: of ComfyUI's nodes for Wan; l2: of its authors",
            "default l1",
        ),
        needs="nag_scale",
    )

    @property
    def slg_range(self) -> tuple[float, float]:
        """Shares of the steps at which skip-layer guidance starts and ends."""
        start = 0.1 if self.slg_start is None else self.slg_start
        return start, 0.9 if self.slg_stop is None else self.slg_stop
