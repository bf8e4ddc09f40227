#!/usr/bin/env python
"""Writes the documents' tables that are generated from tables of the package.

    python tools/flags_table.py

Each table is between two markers of its page: all flags in docs/cli.md, dense kernels in
docs/attention_backends.md, names in LoRA files in docs/few_step.md, and kinds of files in
docs/checkpoints.md. A test compares the pages with the package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from wan.app.programs import run_program
from wan.checkpoint.lora.names import DIFFERENCES, NAMINGS
from wan.settings.errors import InputError
from wan.settings.fields import list_options
from wan.settings.flags import GROUPS
from wan.settings.kernels import DENSE_KERNELS
from wan.utils.files import OutputKind, write_output

DOCS = Path(__file__).parents[1] / "docs"
Row = tuple[str, ...]


def list_flags() -> Iterable[Row]:
    """Yields a row for each flag, in the order of `--help`."""
    yield "Flag", "Meaning", "Python", "diffusers", "in records"
    for title, kinds in GROUPS.items():
        yield f"**{title}**", "", "", "", ""
        for name, flag in (item for kind in kinds for item in list_options(kind).items()):
            call = {"load": "constructor", "video": "`generate`", None: ""}[flag.python]
            yield (
                f"`--{name}`",
                flag.help.replace("|", "\\|").replace("*", "\\*")
                + "."
                + "".join(f" Variable `{variable}`." for variable in flag.variables),
                f"`{flag.keyword}`" if flag.keyword is not None else call,
                "" if flag.diffusers is None else f"`{flag.diffusers}`",
                "yes" if flag.record else "",
            )


def list_kernels() -> Iterable[Row]:
    """Yields a row for the dense kernels that need and return the same."""
    yield "Value", "Devices", "Computes in", "Log-sum-exp", "Packages"
    values: dict[Row, list[str]] = {}
    for row in DENSE_KERNELS.values():
        devices = [d.upper() if d != "cuda" else "GPU" for d in row.factories if d != "npu"]
        devices += row.chips if "npu" in row.factories else ()
        dtypes = ", ".join(row.precisions)
        needs = (
            ", ".join(devices),
            f"{dtypes}, quantised" if row.low_precision else dtypes,
            "yes" if row.has_lse else "",
            ", ".join(("xfuser", *row.install) if row.xfuser_member is not None else ()),
        )
        values.setdefault(needs, []).append(f"`{row.name}`")
    for others, names in values.items():
        yield ", ".join(names), *others


def list_lora_namings() -> Iterable[Row]:
    """Yields a row of prefix and suffixes of layer names for each naming of LoRA files."""
    yield "Written by", "Before the layer's name", "After it"
    for row in NAMINGS:
        prefix = f"`{row.prefix}`" if row.prefix else ""
        ends = [end for end in (row.down, row.up, row.bias) if end is not None]
        yield row.program, prefix, ", ".join(f"`{end}`" for end in ends)
    for part in dict.fromkeys(DIFFERENCES.values()):
        ends = [end for end, other in DIFFERENCES.items() if other == part]
        yield f"whole differences of the {part}", "", ", ".join(f"`{end}`" for end in ends)


_SENTENCES = DOCS.parent / "tests" / "refusals.txt"
_FILE_KINDS = (  # kind of file, and the case of the tests whose sentence it gets
    ("two networks in one file", "checkpoints: several networks", "two without names"),
    ("another of Wan's networks than its flag's", "checkpoints: several networks", "text and vae"),
    ("another model", "checkpoints: several networks", "another model"),
    ("a network and more", "checkpoints: several networks", "unknown tensors"),
    ("a part of a network", "checkpoints: several networks", "lacking tensors"),
    ("some of several shards", "checkpoints: PyTorch files", "a shard"),
    ("a PyTorch file of an old format", "checkpoints: PyTorch files", "an old format"),
    ("several sets of weights", "checkpoints: PyTorch files of any name", "two sets"),
    ("a trainer's state", "checkpoints: PyTorch files of any name", "no weights"),
    ("a PyTorch file with code", "weights: other contents", "code"),
    ("a page in place of a file", "checkpoints: PyTorch files of any name", "a page"),
    ("half of a download", "checkpoints: PyTorch files of any name", "truncated"),
    ("a big-endian GGUF file", "gguf: files", "big-endian"),
    ("a LoRA of unknown kind", "LoRA: unknown names", "ends"),
    ("a LoRA of another network", "LoRA: unknown names", "layers"),
    ("whole weights given as a LoRA", "LoRA: unknown names", "whole weights"),
    ("a LoRA of a CLIP image input only", "LoRA: files", "only image keys"),
)


def list_file_kinds() -> Iterable[Row]:
    """Yields a row for each kind of file that is refused, with its sentence."""
    yield "Kind of file", "Sentence"
    text = _SENTENCES.read_text(encoding="utf-8")
    for kind, table, case in _FILE_KINDS:
        section = text.partition(f"[{table}]\n")[2].partition("\n\n")[0]
        lines = (line.rpartition("  (") for line in section.splitlines())
        sentence = next(x for x, _, cases in lines if case in cases[:-1].split(" | "))
        yield kind, sentence.replace("TMP/", "").replace("|", "\\|").replace("*", "\\*")


TABLES: dict[tuple[str, str], Callable[[], Iterable[Row]]] = {
    ("cli.md", "all flags"): list_flags,
    ("attention_backends.md", "dense kernels"): list_kernels,
    ("few_step.md", "names in LoRA files"): list_lora_namings,
    ("checkpoints.md", "kinds of files"): list_file_kinds,
}
"""Page and title of a table -> its rows, of which the first one is the head."""


def _make_markers(title: str) -> tuple[str, str]:
    """Returns the marker lines before and after a table."""
    begin = f"<!-- {title}: written by tools/flags_table.py -->\n"
    return begin, f"<!-- end of {title} -->\n"


def render_page(name: str) -> str:
    """Returns the text of a page with its generated tables between their markers."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for (where, title), rows in TABLES.items():
        if where == name:
            begin, end = _make_markers(title)
            if not 0 <= text.find(begin) < text.find(end):
                raise InputError(f"{DOCS / name}", None, f"lacks the markers of {title}")
            head, *body_rows = rows()
            lines = [f"| {' | '.join(row)} |" for row in (head, *body_rows)]
            lines.insert(1, "|" + "---|" * len(head))
            text_before, _, remainder = text.partition(begin)
            _, _, after = remainder.partition(end)
            text = text_before + begin + "\n".join(lines) + "\n" + end + after
    return text


def _has_markers(file: Path) -> bool:
    """Returns whether a page has the markers of its tables."""
    text = file.read_text(encoding="utf-8")
    titles = [title for where, title in TABLES if where == file.name]
    return all(marker in text for title in titles for marker in _make_markers(title))


PAGE = OutputKind("a page with the markers of its tables", _has_markers)


def main() -> None:
    for name in dict.fromkeys(name for name, _ in TABLES):
        text = render_page(name)
        with write_output(DOCS / name, PAGE) as temporary:
            temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_program(main))
