"""Writes an HTML page with the videos of a prompt file's folder.

    python tools/gallery.py FOLDER [--out PAGE.html]

The prompts, sizes, seeds and times are read from the records of the videos.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wan.app import failures
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.checkpoint.headers import read_json
from wan.settings import values
from wan.settings.errors import InputError, WriteError
from wan.utils.files import check_output, make_marked_kind, write_output

_TITLE = "Wan2.2 videos"
PAGE_KIND = make_marked_kind("a page of tools/gallery.py", f"<title>{_TITLE}</title>".encode())

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


def write_gallery(folder: Path, out: Path | None = None) -> Path:
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
    check_output(out, PAGE_KIND, "--out")
    videos = [path for path in sorted(folder.glob("*.mp4")) if path.with_suffix(".json").exists()]
    if not videos:
        remedy = "give the folder that generate.py --prompt_file has written"
        raise InputError(str(folder), why="holds no videos with records", remedy=remedy)
    cards = [
        _format_card(path, Path(os.path.relpath(path, out.absolute().parent))) for path in videos
    ]
    failed_lines = [
        line for path in sorted(folder.glob("*.summary.json")) for line in _list_failed_lines(path)
    ]
    style = resources.files("wan.serve").joinpath("page", "page.css").read_text("utf-8")
    text = _PAGE.format(
        title=_TITLE,
        style=style,
        failed="".join(f"<p>{html.escape(line)}</p>\n" for line in failed_lines),
        cards="\n".join(cards),
    )
    with write_output(out, PAGE_KIND) as temporary:
        temporary.write_text(text, "utf-8", errors="backslashreplace")  # half a surrogate pair
    return out


def _format_card(video: Path, link: Path) -> str:
    """Returns the HTML of one video."""
    record = read_json(video.with_suffix(".json"))
    video_info, settings, seconds, power = (
        _read_record_section(record, name) for name in ("video", "settings", "seconds", "power")
    )
    width, height = video_info.get("width"), video_info.get("height")
    details = [f"{width}x{height}", f"{video_info.get('frames')} frames"]
    details.append(f"seed {record.get('seed')}")
    total = sum(duration for duration in seconds.values() if _is_amount(duration))
    details += [f"{total:.1f} s"] if total else []
    joules = power.get("joules")
    details += [f"{joules:.0f} J"] if _is_amount(joules) else []
    return _CARD.format(
        source=quote(os.fsencode(link.as_posix())),
        prompt=html.escape(str(settings.get("prompt", video.stem))),
        facts=html.escape(" · ".join(details)),
    )


def _is_amount(value: object) -> bool:
    """Whether a value of a record is a number that can be added and printed."""
    return isinstance(value, int | float) and abs(value) < 1e15


def _read_record_section(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns an object of a record; {} if it is missing."""
    section = record.get(name)
    return section if isinstance(section, dict) else {}


def _list_failed_lines(summary: Path) -> list[str]:
    """Returns a sentence for each refused or failed line of a prompt file."""
    record = read_json(summary)
    lines = _read_record_section(record, "refused") | _read_record_section(record, "failed")
    return [f"Line {name}: {error}" for name, error in lines.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", type=make_argument_type(values.read_path), help="folder of a prompt file's videos"
    )
    parser.add_argument(
        "--out", type=make_output_path_type(PAGE_KIND), help="the page; default FOLDER/index.html"
    )
    options = parser.parse_args(argv)
    try:
        print(write_gallery(options.folder, options.out))
    except OSError as error:
        if failures.describe_error(error) is not None:
            raise
        raise WriteError(f"{error}; give --out a folder that can be written.") from error


if __name__ == "__main__":
    sys.exit(run_program(main))
