"""Settings of one run: input, weight and output files, prompt extension, planning.

Each field is a flag, see `wan.settings.fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wan.settings import values
from wan.settings.devices import CHIPS
from wan.settings.fields import REQUIRED, HelpText, command_option, load_option, option
from wan.settings.presets import PRESETS, TASKS_OF_KIND
from wan.settings.recipes import RECIPE_NAMES as RECIPES
from wan.settings.values import choice, integer, real, switch, switch_or_choice

_FPS = "frames per second of the mp4"
SAVE_LATENTS = switch_or_choice("steps")
"""Reader of `save_latents`."""


@dataclass(frozen=True)
class CheckpointOptions:
    """The task, and where its weights are."""

    task: str = command_option(
        "t2v-A14B",
        choice(*PRESETS),
        "task and model (default t2v-A14B)",
        keyword="class",
        common=True,
    )
    ckpt_dir: Path | None = command_option(
        None,
        values.read_path,
        "checkpoint folder (default ./Wan2.2-..., or demo)",
        decoding=True,
        keyword="checkpoint_dir",
        common=True,
    )
    quant_dit_path: Path | None = load_option(
        None, values.read_path, "folder of quantized DiT weights (default: those of --ckpt_dir)"
    )
    recipe: str = option(
        "auto",
        choice(*RECIPES),
        HelpText(
            "published way to sample; auto: by file names; none: the task's defaults",
            "default auto",
        ),
    )


@dataclass(frozen=True)
class NetworkFiles:
    """Files or folders of single networks that replace those of the checkpoint folder."""

    dit: Path | None = load_option(
        None, values.read_path, "file or folder of the DiT (default: in --ckpt_dir)"
    )
    dit_high_noise: Path | None = load_option(
        None, values.read_path, "file or folder of the high-noise expert (default: in --ckpt_dir)"
    )
    dit_low_noise: Path | None = load_option(
        None, values.read_path, "file or folder of the low-noise expert (default: in --ckpt_dir)"
    )
    text_encoder: Path | None = load_option(
        None, values.read_path, "file or folder of the text encoder (default: in --ckpt_dir)"
    )
    vae: Path | None = load_option(
        None, values.read_path, "file or folder of the VAE (default: in --ckpt_dir)", decoding=True
    )


@dataclass(frozen=True)
class Loras:
    """LoRA and weight difference files."""

    lora: tuple[str, ...] = load_option(
        (),
        values.read_lora_files,
        "LoRA of all experts, or of the one in its file name; repeatable (default none)",
        common=True,
    )
    lora_high_noise: tuple[str, ...] = load_option(
        (), values.read_lora_files, "LoRA of the high-noise expert; repeatable (default none)"
    )
    lora_low_noise: tuple[str, ...] = load_option(
        (), values.read_lora_files, "LoRA of the low-noise expert; repeatable (default none)"
    )
    lora_dir: Path | None = load_option(
        None,
        values.read_path,
        "folder with the LoRAs high_noise_model.safetensors and low_noise_model.safetensors "
        "(default none)",
    )
    use_relighting_lora: bool = load_option(
        False,
        switch,
        "merge the checkpoint's relighting_lora.ckpt, which fits the character to the light of "
        "the scene (animate; default false)",
        tasks=TASKS_OF_KIND["animate"],
    )


@dataclass(frozen=True)
class VideoLoraOptions:
    """LoRAs that are chosen for single videos, and computed separately from the weights."""

    lora_folder: Path | None = command_option(
        None,
        values.read_path,
        "folder whose .safetensors files are the LoRAs that --video_lora may name (default none)",
    )
    video_lora: tuple[dict[str, Any], ...] = command_option(
        (),
        values.read_video_loras,
        HelpText(
            "LoRA of this video only, a file name in `lora_folder` without .safetensors",
            "default none",
            command_line="; repeatable",
        ),
        line=True,
        needs="lora_folder",
    )
    lora_cache: float = command_option(
        4.0,
        real(0, 1e6),
        "host memory of a rank for the LoRAs of earlier videos, in GB of 1e9 bytes (default 4)",
        record=False,
        needs="lora_folder",
    )


@dataclass(frozen=True)
class LatentOptions:
    """Latents to start denoising from."""

    fixed_latents: Path | None = command_option(
        None,
        values.read_path,
        "start from the latents in this .safetensors file (default: noise from --base_seed)",
    )


@dataclass(frozen=True)
class PlanOptions:
    """The plan of a run: its exchanges and memory, estimated without running it."""

    plan: bool = command_option(
        False,
        switch,
        "print the exchanges and the memory of the run, and exit (default false)",
        record=False,
        common=True,
    )
    device_memory: float | None = command_option(
        None,
        real(0, 1e6, exclude_min=True),
        "memory per device that the plan must fit, in GB of 1e9 bytes (default: that of --chip or "
        "of this machine's GPU)",
        record=False,
        needs="plan",
    )
    nodes: int | None = command_option(
        None,
        integer(1, 4096),
        "number of machines; the plan compares topologies by the bytes sent inside and between "
        "them (default: no comparison)",
        record=False,
        needs="plan",
    )
    link_gbs: tuple[float, float] | None = command_option(
        None,
        values.read_link_rates,
        "bandwidth of a rank inside a machine and between machines in GB/s, for --nodes (default: "
        "bytes without times)",
        record=False,
        needs="plan",
    )
    chip: str | None = command_option(
        None,
        choice(*CHIPS),
        "NPU model to plan for (default: none, the plan is for --device)",
        record=False,
        needs="plan",
    )


@dataclass(frozen=True)
class PromptExtension:
    """Settings of the language model that extends prompts."""

    use_prompt_extend: bool = command_option(
        False, switch, "extend the prompt with a language model (default false)"
    )
    prompt_extend_method: str = command_option(
        "local_qwen",
        choice("local_qwen", "dashscope"),
        "where the language model runs (default local_qwen); dashscope is a web service with "
        "OpenAI's chat completions, by default Alibaba's",
        needs="use_prompt_extend",
    )
    prompt_extend_model: str | None = command_option(
        None,
        values.read_text_value,
        "folder or name of the language model (default: the method's and the task's)",
        needs="use_prompt_extend",
    )
    prompt_extend_target_lang: str = command_option(
        "zh",
        choice("zh", "en"),
        "language of the extended prompt (default zh)",
        needs="use_prompt_extend",
    )


@dataclass(frozen=True)
class MeasurementOptions:
    """Measurements during a run."""

    power: bool = command_option(
        False,
        switch,
        "measure the run's power, energy, clock and throttling (default false)",
        record=False,
        decoding=True,
    )


@dataclass(frozen=True)
class PromptFileOptions:
    """Settings of a run with many videos."""

    prompt_file: Path | None = command_option(
        None,
        values.read_path,
        "file with a prompt or JSON object per line (default none)",
        record=False,
        common=True,
    )
    skip_existing: bool = command_option(
        False,
        switch,
        "skip videos whose files already exist (default false)",
        record=False,
        needs="prompt_file",
    )
    group_by_expert: bool = command_option(
        False,
        switch,
        "run the high-noise steps of all videos, then the low-noise steps: each expert is loaded "
        "once (default false)",
        record=False,
        needs="prompt_file",
    )


@dataclass(frozen=True)
class Output:
    """Output files of a run. Record and latents have the video's name with other suffixes."""

    save_file: Path = command_option(
        REQUIRED,
        values.read_path,
        "path of the mp4 (default: named by task and prompt)",
        decoding=True,
        line=True,
        common=True,
    )
    fps: float = command_option(
        REQUIRED,
        real(1, 240),
        HelpText(
            "frames per second of the mp4, and of the frames that animate2 reads",
            "default: the task's, 16, 24 or 30",
            dict.fromkeys(("t2v", "i2v", "ti2v", "s2v", "animate", "vace"), _FPS)
            | {"animate2": f"{_FPS}, and of the frames that are read"},
        ),
        decoding=True,
        line=True,
        checkpoint=True,
    )
    save_latents: bool | Literal["steps"] = command_option(
        False,
        SAVE_LATENTS,
        HelpText(
            "save the denoised latents; steps: also those after each step",
            "default false",
        ),
        line=True,
    )
    stream: bool = command_option(
        False,
        switch,
        HelpText(
            "write the decoded frames at once to a second mp4, which can be played while it grows",
            "default false",
            command_line=", as NAME.stream.mp4 until the video is complete",
        ),
        decoding=True,
        line=True,
        record=False,
    )
    trace: Path | None = command_option(
        None,
        values.read_path,
        "write a trace of exchanges and attention calls to this folder, for python -m wan.power "
        "(default: no trace)",
        record=False,
    )
    trace_steps: tuple[int, ...] | None = command_option(
        None,
        values.read_steps,
        "steps to trace, counted from 0, such as 3,7-9 (default: the second step of each expert)",
        record=False,
        needs="trace",
    )
    trace_kernels: bool = command_option(
        False,
        switch,
        "run PyTorch's or the NPU's profiler in traced steps, which slows them (default false)",
        record=False,
        needs="trace",
    )
    log_level: str = command_option(
        "info",
        choice("info", "debug"),
        "log level (default info); debug: also the order of exchanges and attention in each layer",
        record=False,
    )

    @property
    def record_path(self) -> Path:
        """File of the video's JSON record."""
        return self.save_file.with_suffix(".json")

    @property
    def latents_path(self) -> Path:
        """File of the denoised latents."""
        return self.save_file.with_suffix(".latents.safetensors")

    @property
    def clips_dir(self) -> Path:
        """Folder of a long video's clips until the video is complete."""
        return self.save_file.with_suffix(".clips")

    @property
    def preview_path(self) -> Path:
        """JPEG of the predicted video."""
        return self.save_file.with_suffix(".preview.jpg")

    @property
    def stream_path(self) -> Path:
        """The mp4 that can be played while it grows."""
        return self.save_file.with_suffix(".stream.mp4")

    @property
    def steps_dir(self) -> Path:
        """Folder of the latents after each step."""
        return self.save_file.with_suffix(".steps")


@dataclass(frozen=True)
class ResumeOptions:
    """Files of an earlier run: latents to decode, or a record to repeat."""

    decode_latents: Path | None = command_option(
        None,
        values.read_path,
        "only decode the latents in this file (default: generate a video)",
        record=False,
        decoding=True,
    )
    from_json: Path | None = command_option(
        None,
        values.read_path,
        "repeat the run of this JSON record under a new file name (default: none)",
        record=False,
    )
