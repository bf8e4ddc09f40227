"""A checked run, and its input files and prompt lines."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wan.checkpoint.formats.headers import compute_fingerprint
from wan.checkpoint.lora.folder import make_video_lora_record
from wan.media.video_writer import load_latents
from wan.pipeline.setup import Setup
from wan.settings.command import Loras, Output, PlanOptions, PromptExtension
from wan.settings.fields import list_options
from wan.settings.flags import FLAGS
from wan.settings.removed import update_record
from wan.settings.rules import Values
from wan.settings.values import read_image_files, read_path
from wan.tasks.base import Inputs, VideoParams


@dataclass(frozen=True)
class InputFile:
    """An input file of a video, and the setting that names it or its folder."""

    setting: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class PromptLine:
    """A video of a prompt file: a line, or a line with one of its `seeds`.

    Attributes:
        number: Line number, from 1.
        seed: One of the line's `seeds`; None for a line with one video.
        run: The resolved run; None if the line was refused on all ranks.
        error: Reason why the video is not generated; "" if it is.
        draws_seed: Whether the seed is random.
    """

    number: int
    run: Run | None
    error: str = ""
    draws_seed: bool = False
    seed: int | None = None

    @property
    def name(self) -> str:
        """The line's name in messages."""
        return f"{self.number}" if self.seed is None else f"{self.number} (seed {self.seed})"

    def with_seed(self, seed: int) -> PromptLine:
        """Returns the line with a seed derived from the random seed of the file and its number."""
        if self.run is None or not self.draws_seed:
            return self
        return replace(self, run=self.run.with_seed((seed + self.number) % 2**63))


@dataclass(frozen=True)
class Run:
    """A checked run of the command line: one video, or the videos of a prompt file.

    Attributes:
        decode_latents: Latents file that is only decoded.
        fixed_latents: Latents file that denoising starts from.
        settings: Settings of the JSON record, from which `--from_json` repeats the run.
        sources: Setting -> where its value comes from; the others are defaults.
        lines: Lines of a prompt file. The other attributes are those of its first valid line.
        summary: Path of the summary of a prompt file; None without one.
        group_by_expert: Whether all lines run the steps of an expert before those of the next one.
    """

    setup: Setup
    params: VideoParams
    output: Output
    inputs: Inputs
    input_files: tuple[InputFile, ...]
    prompt_extension: PromptExtension | None
    decode_latents: Path | None
    fixed_latents: Path | None
    plan_options: PlanOptions
    power: bool
    settings: dict[str, Any]
    sources: dict[str, str]
    notices: tuple[str, ...]
    lines: tuple[PromptLine, ...] = ()
    summary: Path | None = None
    skip_existing: bool = False
    group_by_expert: bool = False

    @property
    def device_memory(self) -> int | None:
        """Device memory in bytes that the plan is compared with."""
        gigabytes = self.plan_options.device_memory
        return None if gigabytes is None else int(gigabytes * 1e9)

    @property
    def verbose(self) -> bool:
        """Whether the run logs the operations in each layer."""
        return self.output.log_level == "debug"

    @property
    def boundary(self) -> float | None:
        """Fraction of the training timesteps from which on the high-noise expert is used.

        None: the task has a single network, or latents are only decoded.
        """
        return self.params.boundary if self.decode_latents is None else None

    def with_seed(self, seed: int) -> Run:
        """Returns the run, and its record, with another seed.

        For a prompt file, lines that draw their seed derive it from this one; others keep theirs.
        """
        if self.lines:
            return replace(self, lines=tuple(line.with_seed(seed) for line in self.lines))
        params = replace(self.params, base_seed=seed)
        return replace(self, params=params, settings=self.settings | {"base_seed": seed})

    def with_prompt(self, prompt: str) -> Run:
        """Returns the run with the extended prompt; its record does not extend the prompt again."""
        excluded = list_options(PromptExtension)
        settings = {name: value for name, value in self.settings.items() if name not in excluded}
        settings |= {"prompt": prompt, "use_prompt_extend": False}
        return replace(self, params=replace(self.params, prompt=prompt), settings=settings)

    def with_save_file(self, path: Path) -> Run:
        """Returns the run with another output path."""
        settings = self.settings | {"save_file": str(path.absolute())}
        return replace(self, output=replace(self.output, save_file=path), settings=settings)

    def load_inputs(self) -> Inputs:
        """Returns the inputs with the latents of `fixed_latents`."""
        if self.fixed_latents is None:
            return self.inputs
        return replace(self.inputs, initial_latents=load_latents(self.fixed_latents))

    def collect_rank_invariants(self, device: str) -> dict[str, Any]:
        """Returns the values that must be equal on all ranks, by their names in messages.

        Values that mean nothing to a user (hashes) are wrapped in a dict, so that they are
        compared but not printed.
        """
        setup = self.setup
        option_groups = (setup.attention, setup.parallel, setup.execution, self.output)
        values = {name: value for group in option_groups for name, value in vars(group).items()}
        values = drop_paths_and_seed(values | self.settings) | {
            "power": self.power,
            "trace": self.output.trace is not None,
            "skip_existing": self.skip_existing,
            "group_by_expert": self.group_by_expert,
        }
        invariants = {f"--{name}": value for name, value in values.items()}
        for name, value in self.compute_content_digests().items():
            invariants[f"the content of {name}"] = {"hash": value}
        invariants["the video's size"] = self.params.video_size
        for line in self.lines:
            line_digest: Any = None
            if line.run is not None:  # a short hash, as a file has up to 10,000 lines
                settings = drop_paths_and_seed(line.run.settings)
                settings["content of its files"] = [file.sha256 for file in line.run.input_files]
                settings["content of its LoRAs"] = make_video_lora_record(line.run.inputs.loras)
                serialized = json.dumps(settings, sort_keys=True, default=str)
                digest = hashlib.sha256(serialized.encode()).hexdigest()[:16]
                line_digest = digest, line.draws_seed or line.run.params.base_seed
            invariants[f"line {line.name} of --prompt_file"] = {"hash": line_digest}
        return invariants | {"the device": device}

    def compute_content_digests(self) -> dict[str, Any]:
        """Returns digests of the weights and input files, by the setting that names them."""
        setup, quantized_dit = self.setup, self.setup.quantized_dit
        digests: dict[str, Any] = {
            "--ckpt_dir": compute_fingerprint(setup.checkpoint.list_files()),
            "--quant_dit_path": quantized_dit and compute_fingerprint(quantized_dit.list_files()),
            "--step_cache": setup.policy and setup.policy.content,
            "--lora": {
                name: [(file.strength, compute_fingerprint([file.path])) for file in lora_files]
                for name, lora_files in setup.loras.items()
            },
        }
        if self.inputs.loras:
            digests["--video_lora"] = make_video_lora_record(self.inputs.loras)
        for name in INPUT_FILE_SETTINGS:
            file_digests = [file.sha256 for file in self.input_files if file.setting == name]
            digests[f"--{name}"] = file_digests or None
        return digests


def drop_paths_and_seed(settings: Values) -> dict[str, Any]:
    """Returns settings without the seed and without paths, which may differ between ranks."""
    excluded = (*PATH_SETTINGS, *list_options(Loras), "src_ref_images", "base_seed")
    return {name: value for name, value in settings.items() if name not in excluded}


def list_changed_settings(current: Values, stored: Values) -> list[str]:
    """Lists the settings that differ from stored ones.

    A setting that an earlier version did not store, since it did not have it, counts as default.
    """

    stored = update_record(stored)

    def differs(name: str) -> bool:
        value = current.get(name)
        is_new = name not in stored and value is not None
        return value != (getattr(VideoParams, name, None) if is_new else stored.get(name))

    return list(filter(differs, dict.fromkeys((*current, *stored))))


PATH_SETTINGS = [name for name, flag in FLAGS.items() if flag.reader is read_path]
"""Settings that are paths: absolute in records, and possibly different between ranks."""


_FILE_READERS = (read_path, read_image_files)


INPUT_FILE_SETTINGS = [
    name
    for name, flag in FLAGS.items()
    if name in ("fixed_latents", "decode_latents")
    or (flag.line and flag.reader in _FILE_READERS and name not in list_options(Output))
]
"""Settings that name the input files of a video."""
