"""Detects the expert of a DiT or LoRA file from its name.

An expert tag is "high" or "low" with "noise" (`high_noise`, `HighNoise`, `hinoise`), or one of the
words "high", "low", "HN" and "LN", in any case. Words end at non-letters and before capitals
(`StyleHigh`, `highV2`), so `highway`, `yellow` and `lowpoly` have no tag.

An ambiguous tag counts only together with its counterpart: another file whose path differs only in
the tag of the other expert, such as `style_H` for `style_L`. Ambiguous are single letters, "hi" and
"lo", "high" and "low" before a noun that they describe (`high_quality`, `LowPoly`), and words in
the names of folders outside a checkpoint.
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
"""Nouns after "high" or "low", which then describe the noun and are an ambiguous tag."""


@dataclass(frozen=True)
class ExpertMark:
    """A part of a path that names an expert.

    Attributes:
        expert: "high_noise" or "low_noise".
        text: The tag as written.
        other_words: The words of the path without the tag and without numbers, in lower case.
        has_noise: The tag contains "noise" and is never ambiguous.
        is_ambiguous: The tag counts only together with its counterpart.
        in_file_name: False for a tag in a folder's name.
    """

    expert: str
    text: str
    base: tuple[str, ...]
    noise: bool = False
    doubtful: bool = False
    in_name: bool = True


def find_marks(name: str) -> list[ExpertMark]:
    """Returns all expert tags in a file or folder name."""
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
        elif text in _SHORT and not (is_joined and after.isdecimal()):  # not H264
            expert, doubtful = _SHORT[text], True
        if expert is not None:
            last = words[index + count - 1]
            base = _base([*words[:index], *words[index + count :]])
            text = spaced[word.start() : last.end()]
            found.append(ExpertMark(expert, text, base, noise, doubtful))
    return found


def _base(words: Sequence[re.Match[str]]) -> tuple[str, ...]:
    """Returns the words in lower case, without numbers and versions."""
    small = (word[0].lower() for word in words)
    return tuple(word for word in small if word != "v" and not word.isdecimal())


def words_of(name: str) -> tuple[str, ...]:
    """Returns the words of a name in the form of `ExpertTag.other_words`."""
    return _base([*_WORD.finditer(_VERSION.sub(" ", name))])


def find_experts(
    paths: Collection[Path], folder: Path | None = None
) -> dict[Path, ExpertMark | None]:
    """Returns the decisive expert tag of each path; None without one or with tags of both experts.

    A file's name takes precedence over its folder's, and that over its parent's; in each name, tags
    with "noise" take precedence over others.

    Args:
        paths: Files or folders among which counterparts are searched.
        folder: The checkpoint that contains all paths. If None, the names of a file's folder and of
            the parents that the files do not share are searched.
    """
    marks = {path: [*_marks_of_path(path, paths, folder)] for path in paths}
    return {
        path: _choose(own) or _choose_doubtful(own, [m for p, m in marks.items() if p != path])
        for path, own in marks.items()
    }


def _marks_of_path(
    path: Path, paths: Collection[Path], folder: Path | None
) -> list[list[ExpertMark]]:
    """Returns the expert tags of a file's name, of its folder's name, and of each parent's."""
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
    """Returns the first unambiguous tag whose name has tags of one expert only."""
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
    """Returns the first ambiguous tag whose counterpart is among the other paths' tags."""
    theirs = {(m.expert, m.base) for path in others for marks in path for m in marks}
    for marks in names:
        for mark in marks:
            (other,) = {*EXPERTS} - {mark.expert}
            if mark.doubtful and (other, mark.base) in theirs:
                return mark
    return None
