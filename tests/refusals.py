"""Compares refusals with `refusals.txt`: each refusal is one sentence.

Tests list the refused cases; the sentences are in one file, where they can be read as prose: a line
for each rule of a table, with the names of all cases that it refuses. After a change of wording,
`WRITE_REFUSALS=1 python -m pytest FILE` rewrites the sentences of FILE: review the diff.
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
_VERBS = "must|is|are|has|have|does|needs|names|holds|cannot"
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
        _write_tables(tables | {table: _format_lines(texts)})
        return
    expected, actual = tables.get(table, []), _format_lines(texts)
    changed = difflib.unified_diff(
        sorted(expected), sorted(actual), FILE.name, "said now", "", "", 0
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


def _find_rule(sentence: str) -> str:
    """Returns a sentence without its values, which differ between the cases of a rule."""
    words = re.sub(r"[^ ,;]*[\d/_=*\"'\[\]{}`][^ ,;]*|--\S+", "#", sentence)
    words = re.sub(rf"^(# )(.*?)(?= (?:{_VERBS}) )", "#", words)
    return re.sub(r"#([ ,]+(and |or )?#)*", "#", words)


def _format_lines(texts: Mapping[str, str]) -> list[str]:
    """Returns a line for each rule: the sentence of one case, and the names of all."""
    rules: dict[str, list[str]] = {}
    for case, text in sorted(texts.items()):
        rules.setdefault(_find_rule(text), []).append(case)
    return [f"{texts[cases[0]]}  ({' | '.join(cases)})" for cases in rules.values()]


def _read_tables() -> dict[str, list[str]]:
    parts = FILE.read_text().split("\n\n") if FILE.exists() else []
    sections = (part.strip().split("\n") for part in parts)
    return {head.strip("[]"): lines for head, *lines in sections}


def _write_tables(tables: Mapping[str, Sequence[str]]) -> None:
    parts = ("\n".join((f"[{head}]", *lines)) for head, lines in sorted(tables.items()))
    FILE.write_text("\n\n".join(parts) + "\n")
