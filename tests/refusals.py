"""Compares refusals with `refusals.txt`: each refusal is one sentence.

Tests list the refused cases; the sentences are in one file, where they can be read as prose. After
a change of wording, `WRITE_REFUSALS=1 python -m pytest FILE` rewrites the sentences of FILE: review
the diff.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError

FILE = Path(__file__).with_suffix(".txt")
_REPO = str(Path(__file__).parents[1])
# Parts that differ between machines; `tests.conftest` adds the folder of temporary files.
LOCAL = {
    re.escape(_REPO): "REPO",
    r"[\d.]+ [GM]B free": "N GB free",
    r"\(Error opening [^)]*\)": "(what ffmpeg says)",
    r"[\x00-\x08\x7f]": "?",  # control characters, which editors do not show
}
_SENTENCE = re.compile(r".*[^\s.][.?]")


def hide_temporary_folders(base: Path) -> None:
    """Writes the folders that pytest makes in `base`, or for each worker in it, as "TMP"."""
    LOCAL[re.escape(str(base)) + r"/(popen-gw\d+/)?[\w-]+"] = "TMP"


def check_refusals(table: str, sentences: Mapping[str, str], hide: Sequence[str] = ()) -> None:
    """Raises AssertionError unless each case has one sentence, that of its table in the file.

    Args:
        table: Heading in `refusals.txt`, unique among all tests.
        sentences: The whole error output by case. An empty text: the case was not refused.
        hide: Patterns of parts that differ between runs; they are written as "...".
    """
    patterns = LOCAL | dict.fromkeys(hide, "...")
    texts = {}
    for case, text in sentences.items():
        for pattern, word in patterns.items():
            text = re.sub(pattern, word, text)
        texts[case] = text.strip().encode(errors="backslashreplace").decode()
    wrong = {case: text for case, text in texts.items() if not _SENTENCE.fullmatch(text)}
    assert not wrong, f"not one sentence in {table}: {wrong}"
    tables = _read_tables()
    if os.environ.get("WRITE_REFUSALS"):
        _write_tables(tables | {table: texts})
        return
    expected = tables.get(table, {})
    changed = difflib.unified_diff(
        _format_lines(expected), _format_lines(texts), FILE.name, "said now", "", "", 0
    )
    difference = "\n".join(changed)
    assert not difference, f"{table}; see tests/refusals.py\n{difference}"


def get_refusal(
    call: Callable[..., Any], *args: Any, kind: type[Exception] = InputError, **keywords: Any
) -> str:
    """Returns the message of the refusal of a call, or "" if it is not refused."""
    try:
        call(*args, **keywords)
    except kind as refusal:
        return str(refusal)
    return ""


def _format_lines(cases: Mapping[str, str]) -> list[str]:
    return [f"{case}: {text}" for case, text in sorted(cases.items())]


def _read_tables() -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = {}
    for part in FILE.read_text().split("\n\n") if FILE.exists() else []:
        head, *lines = part.strip().splitlines()
        pairs = zip(lines[::2], lines[1::2], strict=True)
        tables[head.strip("[]")] = {case.strip(): text.strip() for case, text in pairs}
    return tables


def _write_tables(tables: Mapping[str, Mapping[str, str]]) -> None:
    parts = []
    for head, cases in sorted(tables.items()):
        parts.append(f"[{head}]\n" + "".join(f"  {c}\n    {t}\n" for c, t in cases.items()))
    FILE.write_text("\n".join(parts))
