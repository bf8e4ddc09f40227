"""Completion of the command line in bash and zsh, a script that is made from the flags."""

from __future__ import annotations

from wan.settings.errors import InputError
from wan.settings.flags import FLAGS

SHELLS = ("bash", "zsh")
_SCRIPT = """{start}_wan_generate() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" flag="${{COMP_WORDS[COMP_CWORD-1]}}" values=""
  if [[ "$flag" == "=" ]]; then flag="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if [[ "$word" == "=" ]]; then word=""; fi
  if [[ "$word" == --* ]]; then
    COMPREPLY=($(compgen -W "{flags}" -- "$word"))
    return
  fi
  case "$flag" in
{cases}
  esac
  if [[ -n "$values" ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
  else
    local IFS=$'\\n'
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _wan_generate wan-generate
"""


def make_completion_script(shell: str) -> str:
    """Makes the script that completes flags, their values, and the names of files.

    Raises:
        InputError: The shell is not one of `SHELLS`.
    """
    if shell not in SHELLS:
        raise InputError("completion", shell or None, "must be bash or zsh")
    choices = {name: flag.reader.choices for name, flag in FLAGS.items()}
    return _SCRIPT.format(
        start="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        flags=" ".join(f"--{name}" for name in FLAGS),
        cases="\n".join(
            f'    --{name}) values="{" ".join(map(str, values))}" ;;'
            for name, values in choices.items()
            if values
        ),
    )
