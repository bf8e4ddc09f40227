"""Parses the command line with a parser that is built from the options of `wan.settings`.

A flag that is not given has no value, so that the flags are a layer of settings of their own
(`wan.settings.layers`).
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from wan.app.completion import make_completion_script
from wan.app.failures import refuse_unusable_paths
from wan.settings import values
from wan.settings.command import SAVE_LATENTS
from wan.settings.errors import COMMAND_LINE_NAMING, InputError, name_settings
from wan.settings.execution import OFFLOAD_MODEL
from wan.settings.fields import Option, list_options
from wan.settings.flags import FOREIGN_NAMES, GROUPS
from wan.settings.layers import Layer, read_layer
from wan.settings.removed import refuse_removed
from wan.settings.values import switch

_TTS = (
    "there is no speech synthesis here; use CosyVoice or another program, and give the file with "
    "`audio`"
)
UNSUPPORTED_FLAGS = {
    "tp_size": "tensor parallelism is not supported; run without it",
    **dict.fromkeys(("enable_tts", "tts_prompt_audio", "tts_prompt_text", "tts_text"), _TTS),
}
"""Unsupported flags of the official code and the Ascend fork -> remedy."""

_ERROR_MESSAGES = (  # pattern of argparse's message -> message
    (r"argument (--\S+): ignored explicit argument .*", r"\1 takes no value."),
    (r"argument (--\S+): expected .*", r"\1 needs a value; --help lists the flags."),
    (r"argument (--\S+): (.* must be .*)", r"\1 \2."),
    (r"unrecognized arguments: (.*)", r"\1 belongs to no flag; --help lists the flags."),
)
_EXAMPLES = """three commands:
  %(prog)s --task t2v-A14B --ckpt_dir ./Wan2.2-T2V-A14B --prompt "A red fox in the snow"
  %(prog)s --task i2v-A14B --ckpt_dir ./Wan2.2-I2V-A14B --image cat.jpg --plan
  torchrun --nproc_per_node=8 generate.py --ckpt_dir ./Wan2.2-T2V-A14B --dit_fsdp --comm_type 1

A switch without a value is true; "--power false" turns off what a record or a variable turns on.
"""


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: --([^\s=]+).*", message, re.DOTALL)
        if unknown is not None:
            known_names = [option.removeprefix("--") for option in self._option_string_actions]
            similar = difflib.get_close_matches(unknown[1], known_names, 1)
            suggestion = FOREIGN_NAMES.get(unknown[1].replace("-", "_"))
            suggestion = suggestion if suggestion in known_names else next(iter(similar), None)
            problem = f"--{unknown[1]} is not a known flag; "
            hint = "--help all lists them" if suggestion is None else f"did you mean --{suggestion}"
            raise InputError(problem + hint + ("?" if suggestion else "."))
        for pattern, replacement in _ERROR_MESSAGES:
            if re.fullmatch(pattern, message, re.DOTALL):
                raise InputError(re.sub(pattern, replacement, message, flags=re.DOTALL))
        raise InputError(f"{message}; --help lists the flags.")


@name_settings(COMMAND_LINE_NAMING)
@refuse_unusable_paths()
def parse_flags(argv: Sequence[str] | None = None) -> Layer:
    """Parses the flags of a command line to a layer of settings.

    Raises:
        InputError: A flag is unknown, is not supported, or has a value that is not allowed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for argument in arguments:
        name = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--"):
            refuse_removed(name)
            if name in UNSUPPORTED_FLAGS:
                raise InputError(f"`{name}`", why=f"is not available: {UNSUPPORTED_FLAGS[name]}")
    program = Path(sys.argv[0]).name
    if {"-h", "--help"} & {*arguments}:
        _make_flag_parser(program, show_all="all" in arguments).print_help()
        raise SystemExit(0)
    if arguments[:1] == ["--completion"]:
        print(make_completion_script(" ".join(arguments[1:])), end="")
        raise SystemExit(0)
    flags = vars(_make_flag_parser(program).parse_args(arguments))
    return read_layer(flags, "the command line", COMMAND_LINE_NAMING)


@cache
def _make_flag_parser(program: str, show_all: bool = True) -> Parser:
    """Returns the parser of all flags, whose help lists all or only the common ones."""
    parser = Parser(
        prog=_PROGRAMS.get(program, "python generate.py"),
        usage="%(prog)s [flags]",
        description="Generate a video with Wan2.2 from a text prompt, an image, or both.",
        epilog=_EXAMPLES,
        formatter_class=_Help,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    common_group = parser.add_argument_group("common flags (--help all lists every flag)")
    for title, kinds in GROUPS.items():
        group = parser.add_argument_group(title) if show_all else common_group
        for name, flag in (item for kind in kinds for item in list_options(kind).items()):
            argument_options = _make_argument_options(name, flag)
            if not show_all and not flag.common:
                argument_options["help"] = argparse.SUPPRESS
            group.add_argument(f"--{name}", **argument_options)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """Prints a switch without its two values."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, shutil.get_terminal_size()[0]))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "?" and action.metavar == _SWITCH_METAVAR:
            return ""
        return super()._format_args(action, default_metavar)


_SWITCH_METAVAR = "{true,false}"
_REPEATABLE_READERS = (values.read_lora_files, values.read_video_loras, values.read_image_files)
_SWITCH_READERS = (switch, OFFLOAD_MODEL, SAVE_LATENTS)
"""Readers of options that are true without a value; false overrides a record or variable."""
_PROGRAMS = {"__main__.py": "python -m wan", "wan-generate": "wan-generate"}


def _make_argument_options(name: str, flag: Option) -> dict[str, Any]:
    """Returns the keywords of `add_argument` for a flag, whose value `Option.read` reads later."""
    choices = flag.reader.choices
    choice_list = "{" + ",".join(choices or ()) + "}"
    metavar = flag.reader.metavar if choices is None or len(choice_list) > 150 else choice_list
    argument_options: dict[str, Any] = {"help": flag.help, "metavar": metavar}
    if name == "plan":
        return {"help": flag.help, "action": "store_true"}
    if flag.reader in _REPEATABLE_READERS:
        return argument_options | {"action": "append"}
    if flag.reader is values.read_text_values:
        return argument_options | {"nargs": "+"}
    if flag.reader in _SWITCH_READERS:
        return argument_options | {"nargs": "?", "const": "true"}
    return argument_options
