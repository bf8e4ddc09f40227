"""The one rule for which of two experts the name of a weight file states, of DiTs and of LoRAs.

A mark is "high" or "low" with "noise" (`high_noise`, `HighNoise`, `hinoise`), or one of "high",
"low", "HN" and "LN" as a word, in any case. Words end where letters end and where capitals begin
(`StyleHigh`, `highV2`), so `highway`, `yellow` and `lowpoly` have no mark.

A doubtful mark counts only together with its counterpart: another file whose path is the same but
for the mark of the other expert, such as `style_H` for `style_L`. Doubtful are single letters, "hi"
and "lo", "high" and "low" before a noun that they describe (`high_quality`, `LowPoly`), and words
in the names of folders that are no part of a checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

EXPERTS = ("high_noise", "low_noise")
_WORDS = {"high": "high_noise", "hn": "high_noise", "low": "low_noise", "ln": "low_noise"}
_SHORT = {"h": "high_noise", "hi": "high_noise", "l": "low_noise", "lo": "low_noise"}
_JOINED = re.compile(r"hi(?:gh)?noise|(?<![sfgplbe])lo(?:w)?noise", re.IGNORECASE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_VERSION = re.compile(r"(?<=[A-Za-z])(?=[vV]\d)")
_DESCRIBED = re.compile(
    r"angle|angles|bit|bitrate|budget|cfg|contrast|cut|def|definition|detail|"
    r"detailed|details|dynamic|end|fantasy|fashion|fi|fidelity|five|fps|freq|"
    r"frequency|grade|guidance|heel|heeled|heels|jump|key|kick|level|light|"
    r"lighting|lights|lit|mem|memory|motion|neck|pass|pixel|poly|pony|ponytail|"
    r"power|precision|pressure|quality|ram|rank|res|resolution|rise|saturation|"
    r"school|sharpness|shot|shots|shutter|society|speed|steps|strength|tech|"
    r"tide|tops|vram|waist|waisted|weight"
).fullmatch
"""Words that "high" or "low" before them describes; then it names no expert."""


@dataclass(frozen=True)
class ExpertMark:
    """A part of a path that states an expert.

    Attributes:
        expert: "high_noise" or "low_noise".
        text: The part.
        base: The path's words without it, and without numbers.
        noise: "noise" is a part of it, which leaves no doubt.
        doubtful: It counts only together with its counterpart.
        in_name: It is in the name, and not in a folder's.
    """

    expert: str
    text: str
    base: tuple[str, ...]
    noise: bool = False
    doubtful: bool = False
    in_name: bool = True


def find_marks(name: str) -> list[ExpertMark]:
    """Returns all marks in a name."""
    spaced = _VERSION.sub(" ", name)
    words = [*_WORD.finditer(spaced)]
    found: list[ExpertMark] = []
    for index, word in enumerate(words):
        text, end = word[0].lower(), word.end()
        following = words[index + 1] if index + 1 < len(words) else None
        after = "" if following is None else following[0].lower()
        is_joined = following is not None and following.start() == end
        expert, count, noise, doubtful = None, 1, False, False
        if joined := _JOINED.search(text):
            expert, noise = EXPERTS[joined[0][0] == "l"], True
        elif text in ("high", "hi", "low", "lo") and after.startswith("noise"):
            expert, count, noise = EXPERTS[text[0] == "l"], 2, True
        elif text in _WORDS:
            expert = _WORDS[text]
            compound = is_joined and after.isalpha() and after != "lora"
            doubtful = _DESCRIBED(after) is not None or compound
        elif text in _SHORT and not (is_joined and after.isdecimal()):  # H264 is none
            expert, doubtful = _SHORT[text], True
        if expert is not None:
            last = words[index + count - 1]
            base = _base([*words[:index], *words[index + count :]])
            text = spaced[word.start() : last.end()]
            found.append(ExpertMark(expert, text, base, noise, doubtful))
    return found


def _base(words: Sequence[re.Match[str]]) -> tuple[str, ...]:
    """Returns words in small letters, without numbers and versions."""
    small = (word[0].lower() for word in words)
    return tuple(word for word in small if word != "v" and not word.isdecimal())


def words_of(name: str) -> tuple[str, ...]:
    """Returns the words of a name as `ExpertMark.base` has them."""
    return _base([*_WORD.finditer(_VERSION.sub(" ", name))])


def find_experts(
    paths: Collection[Path], folder: Path | None = None
) -> dict[Path, ExpertMark | None]:
    """Returns the mark that counts of each path; None where there is none, or of both experts.

    A name counts before its folder's, and so on upwards; marks with "noise" count before others.

    Args:
        paths: Files, or folders, that are given together.
        folder: The checkpoint that all paths are in. Without it a file's folder is looked at, and
            those above it that not all files share.
    """
    marks = {path: [*_marks_of_path(path, paths, folder)] for path in paths}
    return {
        path: _choose(own) or _choose_doubtful(own, [m for p, m in marks.items() if p != path])
        for path, own in marks.items()
    }


def _marks_of_path(
    path: Path, paths: Collection[Path], folder: Path | None
) -> list[list[ExpertMark]]:
    """Returns the marks of a file's name, of its folder's name, and so on upwards."""
    name = path.stem if path.suffix in (".safetensors", ".gguf", ".ckpt", ".pth") else path.name
    if folder is not None:
        above = [*path.relative_to(folder).parts[-2::-1]]
    else:
        absolute = [Path(os.path.abspath(one)) for one in paths]
        shared = os.path.commonpath([one.parent.parent for one in absolute])
        own = Path(os.path.abspath(path)).parent.relative_to(shared)
        above = [*reversed(own.parts)]
    found = [find_marks(name)]
    for index, part in enumerate(above):
        others = [words_of(one) for at, one in enumerate(above) if at != index]
        base = tuple(word for words in (words_of(name), *others) for word in words)
        found.append(
            [
                ExpertMark(
                    mark.expert,
                    mark.text,
                    (*mark.base, *base),
                    mark.noise,
                    mark.doubtful or (folder is None and not mark.noise),
                    in_name=False,
                )
                for mark in find_marks(part)
            ]
        )
    return found


def _choose(names: Sequence[Sequence[ExpertMark]]) -> ExpertMark | None:
    """Returns the first mark without doubt, unless its name has marks of both experts."""
    for marks in names:
        for chosen in ([m for m in marks if m.noise], [m for m in marks if not m.doubtful]):
            if len({mark.expert for mark in chosen}) == 1:
                return chosen[0]
            if chosen:
                break
    return None


def _choose_doubtful(
    names: Sequence[Sequence[ExpertMark]], others: Sequence[Sequence[Sequence[ExpertMark]]]
) -> ExpertMark | None:
    """Returns the first doubtful mark that has its counterpart among the other paths' marks."""
    theirs = {(m.expert, m.base) for path in others for marks in path for m in marks}
    for marks in names:
        for mark in marks:
            (other,) = {*EXPERTS} - {mark.expert}
            if mark.doubtful and (other, mark.base) in theirs:
                return mark
    return None
