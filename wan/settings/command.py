"""Settings of one run as a whole: its files, how a prompt is extended, what is planned or written.

Fields are flags, see `wan.settings.fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wan.settings import values
from wan.settings.devices import CHIPS
from wan.settings.fields import REQUIRED, command, loading, option
from wan.settings.presets import PRESETS
from wan.settings.recipes import NAMES as RECIPES
from wan.settings.values import choice, integer, real, switch, switch_or

LATENTS = switch_or("steps")
"""Reads `save_latents`."""


@dataclass(frozen=True)
class Images:
    """The images of a video. The Python classes take them as keywords, in memory, too."""

    image: Path | None = option(
        None,
        values.path,
        "image to start from (i2v: needed, ti2v: optional)",
        keyword="img",
        diffusers=True,
        common=True,
    )
    last_image: Path | None = option(None, values.path, "image to end with (i2v)", diffusers=True)


@dataclass(frozen=True)
class Sounds:
    """What a video of s2v-14B follows."""

    audio: Path | None = option(
        None, values.path, "sound, or a video with one (s2v: needed)", keyword="audio_path"
    )
    pose_video: Path | None = option(None, values.path, "video whose poses are taken over (s2v)")
    audio_sync: bool = command(
        False, switch, "cut the 3/16 s by which the picture leads the sound (s2v)", line=True
    )


@dataclass(frozen=True)
class Driving:
    """What moves a character of animate-14B."""

    src_root_path: Path | None = option(
        None, values.path, "folder with src_pose.mp4, src_face.mp4, src_ref.png (animate: needed)"
    )


@dataclass(frozen=True)
class Controlled:
    """What a video of VACE is made from."""

    src_video: Path | None = option(
        None, values.path, "video to change, or that controls the new one (vace)"
    )
    src_mask: Path | None = option(
        None, values.path, "video of what is made anew: white (vace)", needs="src_video"
    )
    src_ref_images: tuple[str, ...] = option(
        (), values.pictures, "pictures of what it shows, with commas between, or repeated (vace)"
    )


@dataclass(frozen=True)
class Files:
    """The task, and the files that its networks are read from."""

    task: str = command(
        "t2v-A14B", choice(*PRESETS), "default t2v-A14B", keyword="class", common=True
    )
    ckpt_dir: Path | None = command(
        None,
        values.path,
        "checkpoint folder; default ./Wan2.2-..., else a demo",
        decoding=True,
        keyword="checkpoint_dir",
        common=True,
    )
    quant_dit_path: Path | None = loading(
        None, values.path, "folder of quantised DiT weights, used instead"
    )
    recipe: str = option(
        "auto", choice(*RECIPES), "of a distilled model; default auto: by file names"
    )


@dataclass(frozen=True)
class NetworkFiles:
    """Files or folders of single networks, used instead of what the checkpoint folder holds."""

    dit: Path | None = loading(None, values.path, "file or folder of the DiT, instead")
    dit_high_noise: Path | None = loading(None, values.path, "likewise, of the high-noise expert")
    dit_low_noise: Path | None = loading(None, values.path, "likewise, of the low-noise expert")
    text_encoder: Path | None = loading(None, values.path, "likewise, of the text encoder")
    vae: Path | None = loading(None, values.path, "likewise, of the VAE", decoding=True)


@dataclass(frozen=True)
class Loras:
    """LoRA and difference files, by the network that they change."""

    lora: tuple[str, ...] = loading(
        (),
        values.files,
        "LoRA for every expert, or for the one that its name says; repeatable",
        common=True,
    )
    lora_high_noise: tuple[str, ...] = loading(
        (), values.files, "likewise, into the high-noise expert"
    )
    lora_low_noise: tuple[str, ...] = loading(
        (), values.files, "likewise, into the low-noise expert"
    )
    lora_dir: Path | None = loading(
        None, values.path, "folder with {high,low}_noise_model.safetensors"
    )
    use_relighting_lora: bool = loading(
        False, switch, "merge the checkpoint's relighting_lora.ckpt (animate)"
    )


@dataclass(frozen=True)
class Start:
    """What denoising starts from."""

    fixed_latents: Path | None = command(
        None,
        values.path,
        "start from the latents in this .safetensors file instead of noise from the seed",
    )


@dataclass(frozen=True)
class Planning:
    """What is said of a run without running it."""

    plan: bool = command(
        False,
        switch,
        "print exchanges and memory of the run, and do not run",
        record=False,
        common=True,
    )
    device_memory: float | None = command(
        None,
        real(0, 1e6, above=True),
        "GB (1e9 bytes) per device that the plan must fit; default: this machine's GPU",
        record=False,
        needs="plan",
    )
    nodes: int | None = command(
        None,
        integer(1, 4096),
        "machines to compare layouts for: bytes inside and between them",
        record=False,
        needs="plan",
    )
    link_gbs: tuple[float, float] | None = command(
        None,
        values.link_rates,
        "GB/s that a rank sends inside a machine, and to another one, for `nodes`",
        record=False,
        needs="plan",
    )
    host_gbs: float | None = command(
        None,
        real(0, 1e6, above=True),
        "GB/s from host memory to the device, for blocks that are copied (offload_model block)",
        record=False,
        needs="plan",
    )
    chip: str | None = command(
        None, choice(*CHIPS), "the NPU model to plan for", record=False, needs="plan"
    )


@dataclass(frozen=True)
class PromptExtension:
    """The language model that extends prompts."""

    use_prompt_extend: bool = command(False, switch, "let a language model write more")
    prompt_extend_method: str = command(
        "local_qwen",
        choice("local_qwen", "dashscope"),
        "default local_qwen",
        needs="use_prompt_extend",
    )
    prompt_extend_model: str | None = command(
        None, values.text, "folder or name of the language model", needs="use_prompt_extend"
    )
    prompt_extend_target_lang: str = command(
        "zh", choice("zh", "en"), "default zh", needs="use_prompt_extend"
    )


@dataclass(frozen=True)
class Evidence:
    """What is measured while a video is made."""

    power: bool = command(
        False,
        switch,
        "meter power, energy, clock and throttling of the run",
        record=False,
        decoding=True,
    )


@dataclass(frozen=True)
class Many:
    """The videos of a prompt file."""

    prompt_file: Path | None = command(
        None, values.path, "a prompt or JSON object per line", record=False, common=True
    )
    skip_existing: bool = command(
        False, switch, "leave out videos that are there already", record=False, needs="prompt_file"
    )
    group_by_expert: bool = command(
        False,
        switch,
        "all lines' steps of one expert, then of the other: each is loaded once",
        record=False,
        needs="prompt_file",
    )


@dataclass(frozen=True)
class Output:
    """The files of a run. The record and the latents have the video's name and other endings."""

    save_file: Path = command(
        REQUIRED,
        values.path,
        "path of the mp4; default: a name from task and prompt",
        decoding=True,
        line=True,
        common=True,
    )
    fps: float = command(
        REQUIRED,
        real(1, 240),
        "frames per second of the file",
        decoding=True,
        line=True,
        checkpoint=True,
    )
    save_latents: bool | Literal["steps"] = command(
        False, LATENTS, "keep the denoised latents; steps: also those after each step", line=True
    )
    trace: Path | None = command(
        None, values.path, "folder for a schedule trace (python -m wan.power)", record=False
    )
    trace_steps: tuple[int, ...] | None = command(
        None,
        values.steps,
        "which steps, from 0, as in 3,7-9; default: the second of each expert",
        record=False,
        needs="trace",
    )
    trace_kernels: bool = command(
        False,
        switch,
        "also run PyTorch's or the NPU's profiler in these steps, which slows them",
        record=False,
        needs="trace",
    )
    log_level: str = command(
        "info",
        choice("info", "debug"),
        "debug: also the order of exchanges and attention in the layers",
        record=False,
    )

    @property
    def record(self) -> Path:
        """The JSON record of the video."""
        return self.save_file.with_suffix(".json")

    @property
    def latents(self) -> Path:
        """Where denoised latents are kept."""
        return self.save_file.with_suffix(".latents.safetensors")

    @property
    def clips(self) -> Path:
        """The folder of a long video's clips until it is whole."""
        return self.save_file.with_suffix(".clips")

    @property
    def steps(self) -> Path:
        """The folder of the latents after each step."""
        return self.save_file.with_suffix(".steps")


@dataclass(frozen=True)
class Earlier:
    """What an earlier run has left: latents to decode, or a record to repeat."""

    decode_latents: Path | None = command(
        None, values.path, "only decode this latents file", record=False, decoding=True
    )
    from_json: Path | None = command(
        None, values.path, "repeat the run of this record, under a new name", record=False
    )
