"""Resolves a --prompt_file: one video per line, with networks that are loaded once.

A line that starts with `{` is a JSON object of settings of one video, by flag name; `seed` is
`base_seed`, `seeds` is a list of seeds with one video each, and `prompt` may be a list of prompts
for the clips of a long video. A line that starts with `# ` is a comment. Any other line is a
prompt. The settings of the command line apply to all lines.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wan import env
from wan.checkpoint.files import open_regular_file
from wan.cli import failures
from wan.cli.output import check_outputs
from wan.log import logger
from wan.output_files import SUMMARY, check_output
from wan.run import Line, Run
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS, check_exclusive_settings, read_settings
from wan.settings.values import format_value

MOST_BYTES, MOST_LINES = 16_000_000, 10_000
_SLUG = 40


def resolved(given: Mapping[str, Any], resolve: Callable[[Mapping[str, Any]], Run]) -> Run:
    """Resolves a command line with --prompt_file; an invalid line does not affect the others.

    Args:
        user_settings: The flags; `save_file` is a folder.
        resolve_settings: Resolves the settings of one video to a run.

    Raises:
        InputError: The file cannot be read, has no lines or too many, or every line is invalid.
    """
    path, folder = given["prompt_file"], given.get("save_file", Path())
    for name in _NOT_WITH:
        if name in given:
            raise InputError(f"`{name}` is about one video; drop it or `prompt_file`.")
    shared = {name: value for name, value in given.items() if name not in _COMMAND}
    found: list[Line] = []
    texts, said = _texts(path), time.monotonic()
    for number, text in texts:
        if time.monotonic() - said > 2:
            said = time.monotonic()
            logger.info("%d of %d lines are checked.", len(found), len(texts))
        seeds: list[int | None] = [None]
        try:
            values, seeds = _values(text)
        except Exception as error:  # refuse this line only
            found.append(_refused(number, error))
            continue
        for seed in seeds:
            try:
                found.append(_line(number, dict(values), seed, shared, folder, resolve))
            except Exception as error:
                found.append(replace(_refused(number, error), seed=seed))
    found = _without_twins(found)
    first = next((line.run for line in found if line.run is not None), None)
    if first is None or all(line.error for line in found):
        raise InputError(
            f"`prompt_file={path}` has no line that can be carried out; line {found[0].number}: "
            f"{found[0].error}"
        )
    grouped = given.get("group_by_expert", False)
    if grouped:
        first.setup.check_grouping()
        for flag, given_too in (("power", first.power), ("log_level=debug", first.verbose)):
            if given_too:
                raise InputError(f"`{flag}` is about whole videos; drop it or `group_by_expert`.")
    drawn = [line.run.request.base_seed for line in found if line.run and line.draws]
    first = first.with_seed(drawn[0]) if drawn else first  # its seed is broadcast to all ranks
    skips = given.get("skip_existing", False)
    summary = folder / f"{path.stem}.summary.json"
    if env.rank() == 0:
        check_output(summary, SUMMARY, "`save_file`")
    many = {"skip_existing": skips, "group_by_expert": grouped, "summary": summary}
    return replace(first, lines=tuple(found), **many)


_COMMAND = ("prompt_file", "skip_existing", "group_by_expert", "save_file")
_NOT_WITH = ("decode_latents", "trace", "use_prompt_extend", "prompt")


def _texts(path: Path) -> list[tuple[int, str]]:
    with open_regular_file(path) as file:
        content = file.read(MOST_BYTES + 1)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"`prompt_file={path}` is no UTF-8 text ({error.reason}).") from error
    stripped = ((n, line.strip()) for n, line in enumerate(text.split("\n"), 1))
    found = [(n, line) for n, line in stripped if line and not f"{line} ".startswith("# ")]
    if not found:
        raise InputError(f"`prompt_file={path}` has no lines; write one prompt per line.")
    if len(content) > MOST_BYTES or len(found) > MOST_LINES:
        raise InputError(f"`prompt_file={path}` is too long: at most {MOST_LINES} lines, 16 MB.")
    return found


def _line(
    number: int,
    values: dict[str, Any],
    seed: int | None,
    shared: Mapping[str, Any],
    folder: Path,
    resolve: Callable[[Mapping[str, Any]], Run],
) -> Line:
    name, end = values.pop("save_file", None), ""
    if seed is not None:
        values["base_seed"], end = seed, f"_s{seed}"
    path = folder / (f"{number:03d}.mp4" if name is None else name)
    path = path.with_stem(f"{path.stem}{end}") if path.name else path
    asked = over(shared, values)
    run, error = resolve(asked).saved_to(path), ""
    if name is None:
        start = run.request.prompt[: 4 * _SLUG]
        slug = re.sub(r"[^\w-]+", "_", start.lower()).strip("_")
        while len(slug.encode()) > _SLUG:
            slug = slug[:-1]
        run = run.saved_to(folder / f"{number:03d}_{slug.strip('_')}{end}.mp4")
    try:
        check_outputs(run)
    except InputError as reason:  # on the main rank only: the others keep the run
        error = str(failures.describe(reason))
    draws = asked.get("base_seed", -1) < 0 and "from_json" not in asked
    return Line(number, run, error, draws, seed)


def over(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of all lines, overridden by those of a line."""
    schedule = ("timesteps", "sample_steps", "sample_shift", "boundary_step")
    below = {*schedule} if "timesteps" in own else set()  # timesteps replace them all
    below |= {"clip_prompts"} if "prompt" in own else set()
    return {name: value for name, value in shared.items() if name not in below} | {**own}


def _refused(number: int, error: Exception) -> Line:
    return Line(number, None, failures.describe(error) or repr(error))


def _values(text: str) -> tuple[dict[str, Any], list[int | None]]:
    """Parses a line; returns its settings and its `seeds`, or [None] without `seeds`."""
    if not text.startswith("{"):
        return {"prompt": text}, [None]
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no JSON object ({error}).") from error
    if len({"seed", "base_seed", "seeds"} & raw.keys()) > 1:
        raise InputError("seed, base_seed and seeds exclude each other; give one.")
    for name in raw:
        if name in FLAGS and not FLAGS[name].line:
            raise InputError(f"{name} applies to all lines; give `{name}` on the command line.")
    seeds: list[int | None] = [None]
    whole = FLAGS["base_seed"].reader
    if (listed := raw.get("seeds")) is not None:
        known = isinstance(listed, list) and 0 < len(listed) <= 1000 and None not in listed
        seeds = [whole("seeds", one) for one in raw.pop("seeds")] if known else []
        if not known or len({*seeds}) < len(seeds):
            raise InputError(
                "seeds",
                format_value(listed, json.dumps),
                "must be a list of different whole numbers",
            )
    seed = {} if raw.get("seed") is None else {"base_seed": whole("seed", raw.pop("seed"))}
    if isinstance(raw.get("prompt"), list):  # prompts of the clips
        raw = {"clip_prompts" if name == "prompt" else name: value for name, value in raw.items()}
    values = read_settings(raw, "{}") | seed
    check_exclusive_settings(values)
    return values, seeds


def _without_twins(found: list[Line]) -> list[Line]:
    """Refuses a line that would overwrite the video or record of an earlier one."""
    taken: dict[Path, str] = {}
    for place, line in enumerate(found):
        if line.run is None or line.error:
            continue
        path = Path(
            os.path.realpath(line.run.output.record_path)
        )  # unique for the video and its record
        if path in taken:
            name = line.run.output.save_file
            error = f"{name} is the video of line {taken[path]} already; give another save_file."
            found[place] = replace(line, error=error)
        taken.setdefault(path, line.name)
    return found
