"""The command line: a parser made from the fields of the settings, and what is refused by name.

A flag that is not given has no value here, so that values can be layered: flags win over a JSON
record, that over the checkpoint's generation_config.json, that over the task's presets.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from wan.settings import values
from wan.settings.errors import COMMAND_LINE, InputError, spoken
from wan.settings.execution import OFFLOAD
from wan.settings.fields import Option, options
from wan.settings.flags import FLAGS, GROUPS, check_given, check_needs, read
from wan.settings.values import switch

_ANIMATE = "it belongs to animate-14B, which is not supported"
_S2V = "it belongs to s2v-14B, which is not supported"
REFUSED = {
    "tp_size": "tensor parallelism is not supported; run without it",
    "src_root_path": _ANIMATE,
    "refert_num": _ANIMATE,
    "replace_flag": _ANIMATE,
    "use_relighting_lora": _ANIMATE,
    "num_clip": _S2V,
    "audio": _S2V,
    "enable_tts": _S2V,
    "tts_prompt_audio": _S2V,
    "tts_text": _S2V,
    "tts_prompt_text": _S2V,
    "pose_video": _S2V,
    "start_from_ref": _S2V,
    "infer_frames": _S2V,
}
"""Flags of the official code and the Ascend fork that are not supported, and what to do instead."""

_COMPLAINTS = (  # argparse's words -> ours
    (r"argument (--\S+): ignored explicit argument .*", r"\1 takes no value."),
    (r"argument (--\S+): expected .*", r"\1 needs a value; --help lists the flags."),
    (r"unrecognized arguments: (--\S+).*", r"\1 is not a known flag; --help lists the flags."),
    (r"unrecognized arguments: (.*)", r"\1 belongs to no flag; --help lists the flags."),
)


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        for theirs, ours in _COMPLAINTS:
            if re.fullmatch(theirs, message, re.DOTALL):
                raise InputError(re.sub(theirs, ours, message, flags=re.DOTALL))
        raise InputError(f"{message}; --help lists the flags.")


@spoken(COMMAND_LINE)
def parse(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The flags that were given, as checked values. InputError for anything wrong in them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for argument in arguments:
        name = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and name in REFUSED:
            raise InputError(f"`{name}`", why=f"is not available: {REFUSED[name]}")
    found = read(vars(_parser().parse_args(arguments)))
    check_needs({name: found[name] for name in found if "plan" in (name, FLAGS[name].needs)})
    check_given(found)
    return found


def _parser() -> Parser:
    result = Parser(
        prog="generate.py",
        description="Generate a video with Wan2.2 from a text prompt, an image, or both.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, kinds in GROUPS.items():
        group = result.add_argument_group(title)
        for name, flag in (item for kind in kinds for item in options(kind).items()):
            group.add_argument(f"--{name}", **_argument(name, flag))
    return result


def _argument(name: str, flag: Option) -> dict[str, Any]:
    """What argparse is told of a flag, whose value `Option.read` reads."""
    choices = flag.read.choices
    shown = name.rsplit("_", 1)[-1].upper() if choices is None else "{" + ",".join(choices) + "}"
    told: dict[str, Any] = {"help": flag.help, "metavar": shown}
    if name == "plan":
        return {"help": flag.help, "action": "store_true"}
    if flag.read is values.files:
        return told | {"action": "append"}
    if flag.read in (switch, OFFLOAD):  # alone it is true; false takes back a record or variable
        return told | {"nargs": "?", "const": "true"}
    return told
