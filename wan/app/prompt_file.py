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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wan.app import failures
from wan.app.output import check_run_outputs, find_replaced_input, index_input_files
from wan.app.run import PromptLine, Run
from wan.settings.errors import COMMAND_LINE_NAMING, FlagNaming, InputError
from wan.settings.flags import FLAGS
from wan.settings.json_text import parse_json
from wan.settings.layers import Layer, read_layer
from wan.settings.values import describe_json_error, format_value
from wan.utils import env
from wan.utils.files import SUMMARY_KIND, check_output, open_regular_file
from wan.utils.log import logger

MAX_BYTES, MAX_LINES = 16_000_000, 10_000
_MAX_SLUG_BYTES = 40


def resolve_prompt_file(
    flags: Layer, make_line_resolver: Callable[[Layer], Callable[[Layer], Run]]
) -> Run:
    """Resolves a command line with --prompt_file; an invalid line does not affect the others.

    Args:
        flags: The command line; `save_file` is a folder.
        make_line_resolver: As in `wan.app.resolve`.

    Raises:
        InputError: The file cannot be read, has no lines or too many, or every line is invalid.
    """
    path, folder = flags.values["prompt_file"], flags.values.get("save_file", Path())
    for name in _EXCLUDED_SETTINGS:
        if name in flags:
            raise InputError(f"`{name}` is about one video; drop it or `prompt_file`.")
    shared = flags.drop(_COMMAND_SETTINGS)
    lines = _resolve_prompt_lines(path, folder, shared, make_line_resolver(shared))
    skip_existing = flags.values.get("skip_existing", False)
    # With `skip_existing`, a line may continue an earlier line's video.
    _refuse_overwriting_lines(lines, checks_inputs=env.rank() == 0 and not skip_existing)
    first_run = next((line.run for line in lines if line.run is not None), None)
    if first_run is None or all(line.error for line in lines):
        raise InputError(
            f"`prompt_file={path}` has no line that can be carried out; line {lines[0].number}: "
            f"{lines[0].error}"
        )
    is_grouped = flags.values.get("group_by_expert", False)
    if is_grouped:
        _check_grouping(first_run)
    drawn_seeds = [line.run.params.base_seed for line in lines if line.run and line.draws_seed]
    # Its seed is broadcast to all ranks.
    first_run = first_run.with_seed(drawn_seeds[0]) if drawn_seeds else first_run
    summary = folder / f"{path.stem}.summary.json"
    if env.rank() == 0:
        check_output(summary, SUMMARY_KIND, "`save_file`")
    options = {"skip_existing": skip_existing, "group_by_expert": is_grouped, "summary": summary}
    return replace(first_run, lines=tuple(lines), **options)


_COMMAND_SETTINGS = ("prompt_file", "skip_existing", "group_by_expert", "save_file")
_EXCLUDED_SETTINGS = ("decode_latents", "trace", "use_prompt_extend", "prompt")


def _read_prompt_lines(path: Path) -> list[tuple[int, str]]:
    with open_regular_file(path) as file:
        content = file.read(MAX_BYTES + 1)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"`prompt_file={path}` is no UTF-8 text ({error.reason}).") from error
    stripped = ((n, line.strip()) for n, line in enumerate(text.split("\n"), 1))
    numbered_lines = [(n, line) for n, line in stripped if line and not f"{line} ".startswith("# ")]
    if not numbered_lines:
        raise InputError(f"`prompt_file={path}` has no lines; write one prompt per line.")
    if len(content) > MAX_BYTES or len(numbered_lines) > MAX_LINES:
        raise InputError(f"`prompt_file={path}` is too long: at most {MAX_LINES} lines, 16 MB.")
    return numbered_lines


def _resolve_prompt_lines(
    path: Path, folder: Path, shared: Layer, resolve_line: Callable[[Layer], Run]
) -> list[PromptLine]:
    """Resolves each line, with one video per seed; an error refuses only its line or seed."""
    lines: list[PromptLine] = []
    numbered_texts, last_log = _read_prompt_lines(path), time.monotonic()
    for number, text in numbered_texts:
        if time.monotonic() - last_log > 2:
            last_log = time.monotonic()
            logger.info("%d of %d lines are checked.", len(lines), len(numbered_texts))
        try:
            layer, seeds = _read_prompt_line(number, text)
        except Exception as error:
            lines.append(_make_refused_line(number, error))
            continue
        for seed in seeds:
            try:
                line_args = (number, layer, seed, shared, folder, resolve_line)
                lines.append(_resolve_prompt_line(*line_args))
            except Exception as error:
                lines.append(_make_refused_line(number, error, seed))
    return lines


def _check_grouping(run: Run) -> None:
    run.setup.check_grouping()
    for flag, is_set in (("power", run.power), ("log_level=debug", run.verbose)):
        if is_set:
            raise InputError(f"`{flag}` is about whole videos; drop it or `group_by_expert`.")


def _resolve_prompt_line(
    number: int,
    layer: Layer,
    seed: int | None,
    shared: Layer,
    folder: Path,
    resolve_line: Callable[[Layer], Run],
) -> PromptLine:
    name, suffix = layer.values.get("save_file"), ""
    layer = layer.drop(["save_file"])
    if seed is not None:
        layer, suffix = layer.with_values({"base_seed": seed}), f"_s{seed}"
    path = folder / (f"{number:03d}.mp4" if name is None else name)
    path = path.with_stem(f"{path.stem}{suffix}") if path.name else path
    run, error = resolve_line(layer).with_save_file(path), ""
    if name is None:
        prompt_start = run.params.prompt[: 4 * _MAX_SLUG_BYTES]
        slug = re.sub(r"[^\w-]+", "_", prompt_start.lower()).strip("_")
        while len(slug.encode()) > _MAX_SLUG_BYTES:
            slug = slug[:-1]
        run = run.with_save_file(folder / f"{number:03d}_{slug.strip('_')}{suffix}.mp4")
    try:
        check_run_outputs(run)
    except InputError as reason:  # on the main rank only: the others keep the run
        error = str(failures.describe_error(reason))
    settings = {**shared.values, **layer.values}
    draws_seed = settings.get("base_seed", -1) < 0 and "from_json" not in settings
    return PromptLine(number, run, error, draws_seed, seed)


def _make_refused_line(number: int, error: Exception, seed: int | None = None) -> PromptLine:
    return PromptLine(number, None, failures.describe_error(error) or repr(error), seed=seed)


def _write_setting(name: str, value: str | None) -> str:
    """Writes a setting as in a line; what no line may have, as on the command line."""
    if name in FLAGS and not FLAGS[name].line:
        return COMMAND_LINE_NAMING.render_setting(name, value)
    return name if value is None else f"{name} {value}"


_LINE_NAMING = FlagNaming(_write_setting)


def _read_prompt_line(number: int, text: str) -> tuple[Layer, list[int | None]]:
    """Reads a line; returns its settings and its `seeds`, or [None] without `seeds`."""
    source = f"line {number}"
    if not text.startswith("{"):
        return read_layer({"prompt": text}, source, _LINE_NAMING), [None]
    try:
        raw = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no JSON object ({describe_json_error(error)}).") from error
    if len({"seed", "base_seed", "seeds"} & raw.keys()) > 1:
        raise InputError("seed, base_seed and seeds exclude each other; give one.")
    for name in raw:
        if name in FLAGS and not FLAGS[name].line:
            flag = COMMAND_LINE_NAMING.render_setting(name)
            raise InputError(f"{name} applies to all lines; give {flag} on the command line.")
    seeds: list[int | None] = [None]
    reader = FLAGS["base_seed"].reader
    if (seed_list := raw.get("seeds")) is not None:
        is_valid = (
            isinstance(seed_list, list) and 0 < len(seed_list) <= 1000 and None not in seed_list
        )
        seeds = [reader("seeds", seed_value) for seed_value in raw.pop("seeds")] if is_valid else []
        if not is_valid or len({*seeds}) < len(seeds):
            raise InputError(
                "seeds",
                format_value(seed_list, json.dumps),
                "must be a list of different whole numbers",
            )
    seed = {} if raw.get("seed") is None else {"base_seed": reader("seed", raw.pop("seed"))}
    if isinstance(raw.get("prompt"), list):  # prompts of the clips
        raw = {"clip_prompts" if name == "prompt" else name: value for name, value in raw.items()}
    return read_layer(raw, source, _LINE_NAMING).with_values(seed), seeds


def _refuse_overwriting_lines(lines: list[PromptLine], checks_inputs: bool) -> None:
    """Refuses, in place, a line that would replace an earlier line's video or record.

    Args:
        checks_inputs: Also refuses a line that would replace an input file of any line.
    """
    line_of_record: dict[Path, str] = {}
    runs = [(line.name, line.run) for line in lines if line.run is not None and checks_inputs]
    line_of_input = {file: name for name, run in runs for file in run.input_files}
    input_files = index_input_files(line_of_input)
    for index, line in enumerate(lines):
        if line.run is None or line.error:
            continue
        name, error = line.run.output.save_file, ""
        # Unique for the video and its record.
        path = Path(os.path.realpath(line.run.output.record_path))
        if path in line_of_record:
            error = f"{name} is the video of line {line_of_record[path]} already"
        elif (file := find_replaced_input(line.run, input_files)) is not None:
            where = f"{file.setting} of line {line_of_input[file]}"
            error = f"{name} would replace {file.path} ({where})"
        line_of_record.setdefault(path, line.name)
        if error:
            lines[index] = replace(line, error=f"{error}; give another save_file.")
