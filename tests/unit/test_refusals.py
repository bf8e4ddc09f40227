"""Refusals in the words of every front end: the command line, the Python classes, diffusers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from wan.settings import flags, rules
from wan.settings.errors import COMMAND_LINE, Words
from wan.settings.flags import DIFFUSERS, FLAGS, PYTHON
from wan.settings.step_cache import POLICIES

REPO = Path(__file__).parents[2]
OF_CACHES = [rule for row in POLICIES.values() for rule in row.refuses]
ROWS = (*rules.ALL, *flags.NEEDS, *OF_CACHES)
FRONTS = {
    "command line": (COMMAND_LINE, {*FLAGS}),
    "Python": (PYTHON, {n for n, flag in FLAGS.items() if flag.python or flag.keyword}),
    "diffusers": (DIFFUSERS, {n for n, flag in FLAGS.items() if flag.diffusers}),
}


class Blank:
    """Stands for any fact of a row."""

    def __getattr__(self, _: str) -> Blank:
        return self

    def __format__(self, _: str) -> str:
        return "7"


class Facts(dict[str, object]):
    def __missing__(self, _: str) -> Blank:
        return Blank()


def foreign(text: str, front: str) -> set[str]:
    """What this front end's users have not written."""
    words, _ = FRONTS[front]
    if front == "command line":
        found = {name for name in FLAGS if re.search(rf"\b{name}=", text)}
    else:
        others = {name for name in FLAGS if "_" in name and words.names.get(name, name) != name}
        found = {name for name in others if re.search(rf"\b{name}\b", text)} - {
            *words.names.values()
        }
        found |= set(re.findall(r"--\w+", text)) - {"--nproc_per_node"}  # torchrun's
    return found | set(re.findall("[`{}]", text))


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what} {row.conditions}")
def test_every_row_is_written_in_a_front_ends_own_words(row: rules.Rule, front: str) -> None:
    words, has = FRONTS[front]
    settings = {condition.partition("=")[0] for condition in row.conditions} & FLAGS.keys()
    if not settings <= has:
        return  # the front end cannot ask for it
    text = f"{row.what} {row.why}; {row.remedy}.".format_map(Facts())
    named = set(re.findall(r"`([a-z]\w*)[`=]", text))
    assert named <= FLAGS.keys(), "a setting that there is not"
    assert named <= has, "a setting that this front end does not have"
    assert not foreign(words.render(text), front)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (COMMAND_LINE, "--sample_steps 7 and --step_cache_threshold"),
        (PYTHON, "sampling_steps=7 and step_cache_threshold"),
        (DIFFUSERS, "num_inference_steps=7 and threshold"),
    ],
)
def test_words(words: Words, text: str) -> None:
    assert words.render("`sample_steps=7` and `step_cache_threshold`") == text


def refusals() -> list[tuple[str, int, str]]:
    """Every text of a refusal in the package: (file, line, text)."""
    found = []
    for path in sorted((REPO / "wan").rglob("*.py")):
        if path.is_relative_to(REPO / "wan" / "power"):
            continue  # commands of their own
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError":
                parts = [
                    part.value
                    for argument in (*node.args, *(word.value for word in node.keywords))
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                found.append((str(path.relative_to(REPO)), node.lineno, "".join(parts)))
    return found


def test_no_refusal_is_written_for_one_front_end_only() -> None:
    """Settings stand in backticks, so that each front end writes them in its own words."""
    texts = refusals()
    assert len(texts) > 200
    dashes = [
        (file, line, text)
        for file, line, text in texts
        if (flag := re.search(r"(?<!\w)--(\w+)", text))
        and flag[1] in FLAGS
        and "tools/" not in text  # a command of its own
    ]
    assert not dashes
    named = {
        (file, line, name)
        for file, line, text in texts
        for name in re.findall(r"`([a-z]\w*)[`=]", text)
        if name not in FLAGS
    }
    assert not named, "a setting that there is not"
