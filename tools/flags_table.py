#!/usr/bin/env python
"""Write the table of all flags into docs/cli.md, from the fields of the settings.

    python tools/flags_table.py

The table stands between two markers; a test holds the page and the fields equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from wan.settings.fields import Option, options
from wan.settings.flags import GROUPS

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
BEGIN = "<!-- all flags: written by tools/flags_table.py -->\n"
END = "<!-- end of all flags -->\n"


def table() -> str:
    """The table in Markdown: a row for each flag, in the order of `--help`."""
    lines = [
        "| Flag | Meaning | Python | diffusers | in records |",
        "|---|---|---|---|---|",
    ]
    for title, kinds in GROUPS.items():
        lines.append(f"| **{title}** | | | | |")
        lines += [_row(name, flag) for kind in kinds for name, flag in options(kind).items()]
    return "\n".join(lines) + "\n"


def _row(name: str, flag: Option) -> str:
    call = {"load": "constructor", "video": "`generate`", None: ""}[flag.python]
    if flag.keyword is not None:
        call = f"`{flag.keyword}`"
    variables = "".join(f" Variable `{variable}`." for variable in flag.variables)
    help_ = flag.help.replace("|", "\\|").replace("*", "\\*")
    diffusers = "" if flag.diffusers is None else f"`{flag.diffusers}`"
    record = "yes" if flag.record else ""
    return f"| `--{name}` | {help_}.{variables} | {call} | {diffusers} | {record} |"


def page(text: str) -> str:
    """The page with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
