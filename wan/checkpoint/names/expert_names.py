"""Detects the expert of a DiT or LoRA file from its name.

An expert tag is "high" or "low" with "noise" (`high_noise`, `HighNoise`, `hinoise`), or one of the
words "high", "low", "HN" and "LN", in any case. Words end at non-letters and before capitals
(`StyleHigh`, `highV2`), so `highway`, `yellow` and `lowpoly` have no tag.

An ambiguous tag counts only together with its counterpart: another file whose path differs only in
the tag of the other expert, such as `style_H` for `style_L`. Ambiguous are single letters, "hi" and
"lo", "high" and "low" before another word, which they may describe (`high_quality`, `LowPoly`), but
not in capitals of their own (`HIGH_lightning`), and words in the names of folders outside a
checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from wan.checkpoint.formats.tensor_info import WEIGHT_FILES

EXPERTS = ("high_noise", "low_noise")
_EXPERT_WORDS = {"high": "high_noise", "hn": "high_noise", "low": "low_noise", "ln": "low_noise"}
_SHORT_WORDS = {"h": "high_noise", "hi": "high_noise", "l": "low_noise", "lo": "low_noise"}
_NOISE_WORD = re.compile(r"hi(?:gh)?noise|(?<![sfgplbe])lo(?:w)?noise", re.IGNORECASE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_VERSION = re.compile(r"(?<=[A-Za-z])(?=[vV]\d)")


@dataclass(frozen=True)
class ExpertTag:
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
    other_words: tuple[str, ...]
    has_noise: bool = False
    is_ambiguous: bool = False
    in_file_name: bool = True


def find_expert_tags(name: str) -> list[ExpertTag]:
    """Returns all expert tags in a file or folder name."""
    spaced = _VERSION.sub(" ", name)
    matches = [*_WORD.finditer(spaced)]
    tags: list[ExpertTag] = []
    for index, match in enumerate(matches):
        text, end = match[0].lower(), match.end()
        next_match = matches[index + 1] if index + 1 < len(matches) else None
        next_word = "" if next_match is None else next_match[0].lower()
        is_adjacent = next_match is not None and next_match.start() == end
        expert, num_words, has_noise, is_ambiguous = None, 1, False, False
        if noise_match := _NOISE_WORD.search(text):
            expert, has_noise = EXPERTS[noise_match[0][0] == "l"], True
        elif text in ("high", "hi", "low", "lo") and next_word.startswith("noise"):
            expert, num_words, has_noise = EXPERTS[text[0] == "l"], 2, True
        elif text in _EXPERT_WORDS:
            expert = _EXPERT_WORDS[text]
            is_ambiguous = next_match is not None and _may_describe(match, next_match)
        elif text in _SHORT_WORDS and not (is_adjacent and next_word.isdecimal()):  # not H264
            expert, is_ambiguous = _SHORT_WORDS[text], True
        if expert is not None:
            last = matches[index + num_words - 1]
            other_words = _normalize_words([*matches[:index], *matches[index + num_words :]])
            text = spaced[match.start() : last.end()]
            tags.append(ExpertTag(expert, text, other_words, has_noise, is_ambiguous))
    return tags


def _may_describe(word: re.Match[str], next_word: re.Match[str]) -> bool:
    """Returns whether "high" or "low" may describe the next word, as in `high_quality`."""
    if not next_word[0].isalpha() or next_word[0].lower() in ("v", "lora"):
        return False
    has_own_capitals = word[0].isupper() and not next_word[0].isupper()
    return next_word.start() == word.end() or not has_own_capitals


def _normalize_words(matches: Sequence[re.Match[str]]) -> tuple[str, ...]:
    """Returns the words in lower case, without numbers and versions."""
    lowercase = (word[0].lower() for word in matches)
    return tuple(word for word in lowercase if word != "v" and not word.isdecimal())


def split_name_words(name: str) -> tuple[str, ...]:
    """Returns the words of a name in the form of `ExpertTag.other_words`."""
    return _normalize_words([*_WORD.finditer(_VERSION.sub(" ", name))])


def detect_experts(
    paths: Collection[Path], folder: Path | None = None
) -> dict[Path, ExpertTag | None]:
    """Returns the decisive expert tag of each path; None without one or with tags of both experts.

    A file's name takes precedence over its folder's, and that over its parent's; in each name, tags
    with "noise" take precedence over others.

    Args:
        paths: Files or folders among which counterparts are searched.
        folder: The checkpoint that contains all paths. If None, the names of a file's folder and of
            the parents that the files do not share are searched.
    """
    tags_by_path = {path: [*_find_path_tags(path, paths, folder)] for path in paths}
    return {
        path: _pick_certain_tag(path_tags)
        or _pick_ambiguous_tag(path_tags, [m for p, m in tags_by_path.items() if p != path])
        for path, path_tags in tags_by_path.items()
    }


def _find_path_tags(
    path: Path, paths: Collection[Path], folder: Path | None
) -> list[list[ExpertTag]]:
    """Returns the expert tags of a file's name, of its folder's name, and of each parent's."""
    is_file = path.suffix in WEIGHT_FILES
    name = path.stem if is_file else path.name
    if folder is not None:
        folder_names = [*path.relative_to(folder).parts[-2::-1]]
    else:
        absolute_paths = [Path(os.path.abspath(entry)) for entry in paths]
        common = os.path.commonpath([entry.parent.parent for entry in absolute_paths])
        relative = Path(os.path.abspath(path)).parent.relative_to(common)
        folder_names = [*reversed(relative.parts)]
    path_tags = [find_expert_tags(name)]
    for index, folder_name in enumerate(folder_names):
        words_of_others = [
            split_name_words(entry) for other, entry in enumerate(folder_names) if other != index
        ]
        path_words = tuple(
            word for name_words in (split_name_words(name), *words_of_others) for word in name_words
        )
        path_tags.append(
            [
                ExpertTag(
                    tag.expert,
                    tag.text,
                    (*tag.other_words, *path_words),
                    tag.has_noise,
                    tag.is_ambiguous or (folder is None and not tag.has_noise),
                    in_file_name=False,
                )
                for tag in find_expert_tags(folder_name)
            ]
        )
    return path_tags


def _pick_certain_tag(tag_lists: Sequence[Sequence[ExpertTag]]) -> ExpertTag | None:
    """Returns the first unambiguous tag whose name has tags of one expert only."""
    for tags in tag_lists:
        for matches in ([m for m in tags if m.has_noise], [m for m in tags if not m.is_ambiguous]):
            if len({tag.expert for tag in matches}) == 1:
                return matches[0]
            if matches:
                break
    return None


def _pick_ambiguous_tag(
    tag_lists: Sequence[Sequence[ExpertTag]],
    other_tag_lists: Sequence[Sequence[Sequence[ExpertTag]]],
) -> ExpertTag | None:
    """Returns the first ambiguous tag whose counterpart is among the other paths' tags."""
    counterparts = {
        (m.expert, m.other_words) for path in other_tag_lists for tags in path for m in tags
    }
    for tags in tag_lists:
        for tag in tags:
            (other_expert,) = {*EXPERTS} - {tag.expert}
            if tag.is_ambiguous and (other_expert, tag.other_words) in counterparts:
                return tag
    return None
