"""`python -m wan.gallery FOLDER`: writes an HTML page with the videos of a prompt file's folder."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from wan.checkpoint.files import read_json
from wan.cli import failures
from wan.cli.flags import Parser
from wan.cli.programs import output_path, run_program, typed
from wan.output_files import check_output, marked_kind, write_output
from wan.settings import values
from wan.settings.errors import InputError, WriteError

_TITLE = "Wan2.2 videos"
PAGE = marked_kind("a page of wan.gallery", f"<title>{_TITLE}</title>".encode())

_CARD = """<li>
<div class="shot"><video controls loop muted preload="metadata" src="{source}"></video></div>
<div class="about"><p>{prompt}</p><p class="small">{facts}</p></div></li>"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style></head>
<body><header><h1>{title}</h1></header>
{failed}<ul id="videos">
{cards}
</ul></body></html>
"""


def gallery(folder: Path, out: Path | None = None) -> Path:
    """Writes the page and returns its path.

    Args:
        folder: Folder of videos and their records.
        out: Path of the page; None: index.html in the folder.

    Raises:
        InputError: The folder does not exist, or has no video with a record.
    """
    if not folder.is_dir():
        raise InputError(str(folder), why="is no folder", remedy="give that of a prompt file")
    out = folder / "index.html" if out is None else out
    check_output(out, PAGE, "--out")
    videos = [path for path in sorted(folder.glob("*.mp4")) if path.with_suffix(".json").exists()]
    if not videos:
        remedy = "give the folder that generate.py --prompt_file has written"
        raise InputError(str(folder), why="holds no videos with records", remedy=remedy)
    cards = [_card(path, Path(os.path.relpath(path, out.absolute().parent))) for path in videos]
    failed = [line for path in sorted(folder.glob("*.summary.json")) for line in _failed(path)]
    page = resources.files("wan.serve").joinpath("page.html").read_text("utf-8")
    text = _PAGE.format(
        title=_TITLE,
        style=page.partition("<style>")[2].partition("</style>")[0],
        failed="".join(f"<p>{html.escape(line)}</p>\n" for line in failed),
        cards="\n".join(cards),
    )
    with write_output(out, PAGE) as temporary:
        temporary.write_text(text, "utf-8")
    return out


def _card(video: Path, link: Path) -> str:
    """Returns the HTML of one video."""
    record = read_json(video.with_suffix(".json"))
    shown, settings, seconds, power = (
        _values(record, name) for name in ("video", "settings", "seconds", "power")
    )
    facts = [f"{shown.get('width')}x{shown.get('height')}", f"{shown.get('frames')} frames"]
    facts.append(f"seed {record.get('seed')}")
    total = sum(one for one in seconds.values() if isinstance(one, int | float))
    facts += [f"{total:.1f} s"] if total else []
    joules = power.get("joules")
    facts += [f"{joules:.0f} J"] if isinstance(joules, int | float) else []
    return _CARD.format(
        source=quote(link.as_posix()),
        prompt=html.escape(str(settings.get("prompt", video.stem))),
        facts=html.escape(" · ".join(facts)),
    )


def _values(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns an object of a record; {} if it is missing."""
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _failed(summary: Path) -> list[str]:
    """Returns a sentence for each refused or failed line of a prompt file."""
    found = read_json(summary)
    lines = _values(found, "refused") | _values(found, "failed")
    return [f"Line {name}: {error}" for name, error in lines.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, or 2 for a refusal."""
    parser = Parser(prog="python -m wan.gallery", description=(__doc__ or "").strip())
    parser.add_argument(
        "folder", type=typed(values.read_path), help="folder of a prompt file's videos"
    )
    parser.add_argument("--out", type=output_path(PAGE), help="the page; default FOLDER/index.html")

    def work() -> None:
        options = parser.parse_args(argv)
        try:
            print(gallery(options.folder, options.out))
        except OSError as error:
            if failures.describe(error) is not None:
                raise
            raise WriteError(f"{error}; give --out a folder that can be written.") from error

    return run_program(work, "wan.gallery")


if __name__ == "__main__":
    sys.exit(main())
