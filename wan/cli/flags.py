"""The command line: one table of flags, and what is refused by name.

A flag that is not given has no value here, so that values can be layered: flags win over a JSON
record, that over the checkpoint's generation_config.json, that over the task's presets. A flag sets
the field of the same name of a dataclass in `wan.settings` (or of `wan.cli.output`); defaults stand
there. The Python classes take the same names, see `Flag.python`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from wan.modules.schedule import MODES
from wan.settings import step_cache, values
from wan.settings.attention import (
    ALGORITHMS,
    COMPILED_OPS,
    FUSED_OPS,
    RAINFUSION_TYPES,
    VENDOR_OPS,
)
from wan.settings.backends import BACKENDS
from wan.settings.devices import CHIPS
from wan.settings.errors import InputError
from wan.settings.execution import DEVICE_TYPES, FP8_WEIGHTS, PRECISIONS, VAE_PRECISIONS
from wan.settings.parallel import RING_TYPES
from wan.settings.presets import TASKS, TRAIN_TIMESTEPS, UNSUPPORTED_TASKS
from wan.settings.recipes import NAMES as RECIPES
from wan.settings.request import SOLVERS
from wan.settings.step_cache import POLICIES
from wan.settings.values import Reader, choice, integer, real, switch


@dataclass(frozen=True)
class Flag:
    """One setting.

    Attributes:
        name: Without dashes; also its name in records, in Python and in the dataclass it sets.
        read: How its value is read.
        help: One line.
        record: Whether it is part of the JSON record that --from_json repeats: what changes the
            video is.
        needs: The flag without which it has no effect.
        python: "load" for keywords of the classes' constructors (what decides how networks are
            loaded and run), "video" for `generate`'s (what one video is; some have official names
            there), None for what exists on the command line only.
    """

    name: str
    read: Reader
    help: str
    record: bool = True
    needs: str | None = None
    python: str | None = "video"


def _task(name: str, raw: Any) -> str:
    if raw in UNSUPPORTED_TASKS:
        raise InputError(f"Task {raw} is not supported; available tasks: {', '.join(TASKS)}.")
    return str(choice(*TASKS)(name, raw))


def _loads(name: str, read: Reader, help_: str, **more: Any) -> Flag:
    return Flag(name, read, help_, python="load", **more)


def _layout(name: str, read: Reader, help_: str, **more: Any) -> Flag:
    return Flag(name, read, help_, record=False, python="load", **more)


def _command(name: str, read: Reader, help_: str, **more: Any) -> Flag:
    return Flag(name, read, help_, python=None, **more)


OFFLOAD = values.switch_or("cpu", "block")
_SIZE = integer(1, 4096)
_MHZ = integer(100, 4000)
_STEP = integer(0, TRAIN_TIMESTEPS)
_GROUPS: dict[str, tuple[Flag, ...]] = {
    "what to generate": (
        _command("task", Reader(_task, TASKS), "default t2v-A14B"),
        Flag("prompt", values.text, "default: an example"),
        Flag("negative_prompt", values.text, "default, also for '': the official one"),
        Flag("image", values.path, "image to start from (i2v: needed, ti2v: optional)"),
        Flag("last_image", values.path, "image to end with (i2v)"),
        Flag("size", values.size, "WIDTH*HEIGHT; with an image its area counts"),
        Flag("frame_num", values.frame_num, "frames, 4n+1"),
        Flag("base_seed", integer(-(2**63), 2**63 - 1), "negative (default): a random one"),
    ),
    "checkpoint": (
        _command("ckpt_dir", values.path, "checkpoint folder; default ./Wan2.2-..., else a demo"),
        _loads("quant_dit_path", values.path, "folder of quantised DiT weights, used instead"),
        _loads("lora", values.files, "FILE[=STRENGTH], merged into every expert; repeatable"),
        _loads("lora_high_noise", values.files, "likewise, into the high-noise expert"),
        _loads("lora_low_noise", values.files, "likewise, into the low-noise expert"),
        _loads("lora_dir", values.path, "folder with {high,low}_noise_model.safetensors"),
    ),
    "sampling": (
        Flag("recipe", choice(*RECIPES), "of a distilled model; default auto: by file names"),
        Flag("sample_solver", choice(*SOLVERS), "default unipc"),
        Flag("sample_steps", integer(1, TRAIN_TIMESTEPS), "solver steps"),
        Flag("sample_shift", real(0, 1000, above=True), "shift of the noise schedule"),
        Flag("timesteps", values.timesteps, "T1,T2,...: of each step of euler, dmd, rcm"),
        Flag("boundary_step", _STEP, "steps of the high-noise expert; default: by timestep"),
        Flag("ode", switch, "rcm adds no noise between its steps"),
        Flag("sigma_max", real(0, 1e6, above=True), "noise rcm begins with (t2v 80, i2v 200)"),
        Flag("sample_guide_scale", values.guide_scale, "one number, or LOW,HIGH; 1: no guidance"),
        _loads("noise_device", choice("cpu", "device"), "cpu (default): same noise anywhere"),
    ),
    "device and memory": (
        _loads("device", choice(*DEVICE_TYPES), "default auto"),
        _loads("precision", choice(*PRECISIONS), "auto (default): bf16, on the CPU fp32"),
        _loads("convert_model_dtype", switch, "store all DiT weights in bf16"),
        _loads("fp8_weights", choice(*FP8_WEIGHTS), "an FP8 checkpoint stays FP8, or not (auto)"),
        Flag("offload_model", OFFLOAD, "true (default): one network in memory at a time"),
        _layout("resident_blocks", integer(0, 1000), "blocks that --offload_model block keeps"),
        _loads("t5_cpu", switch, "run the text encoder on the CPU"),
        _loads("text_kv_cache", switch, "keep the text's keys and values (default true)"),
        _loads("compile", switch, "compile the transformer blocks"),
        _loads("vae_tiling", switch, "decode in tiles: less memory, not exact"),
        _loads("vae_precision", choice(*VAE_PRECISIONS), "fp32 (default) or bf16"),
    ),
    "attention": (
        _loads("attention_algo", choice(*ALGORITHMS), "dense kernel of NPUs (default fused)"),
        _loads(
            "attention_backend",
            choice(*BACKENDS),
            "dense kernel of GPUs: PyTorch's (default auto, sdpa, cudnn) or one of xfuser's",
        ),
        _loads("fa_quant", choice("fp8", "none"), "fp8: attention in FP8 (default none)"),
        _layout("quant_alltoall", switch, "exchange FP8 tensors"),
        _loads("use_rainfusion", switch, "block-sparse attention after the first steps"),
        _loads(
            "sparsity",
            real(0, 1, below=True),
            "share of blocks left out (0.64)",
            needs="use_rainfusion",
        ),
        _loads(
            "sparse_start_step",
            integer(0, TRAIN_TIMESTEPS),
            "first sparse step, from 0; default: a quarter of the steps",
            needs="use_rainfusion",
        ),
        _loads("rainfusion_type", choice(*RAINFUSION_TYPES), "default v2", needs="use_rainfusion"),
        _loads(
            "mask_refresh_interval",
            integer(1, TRAIN_TIMESTEPS),
            "steps that a mask is used for (1)",
            needs="use_rainfusion",
        ),
        _loads(
            "fused_ops",
            values.some_of(*FUSED_OPS),
            f"auto (default), none, or of CPUs and GPUs {','.join(COMPILED_OPS)}, of NPUs "
            f"{','.join(VENDOR_OPS)}",
        ),
        _layout("fa_freq_cap", _MHZ, "clock of an NPU during self-attention, MHz"),
        _layout("fa_freq_restore", _MHZ, "clock after it, MHz (1650)", needs="fa_freq_cap"),
    ),
    "step cache": (
        _loads("step_cache", step_cache.policy, f"{', '.join(POLICIES)}, or steps:LIST"),
        _loads("step_cache_threshold", real(0, 100), "what first_block, mag, tea compare with"),
        _loads("step_cache_warmup", _STEP, "steps of each expert that are computed first (1)"),
        _loads("step_cache_max_skip", _STEP, "most steps in a row that mag skips (2)"),
        _loads("step_cache_retention", real(0, 1), "share of steps that mag computes first (0.2)"),
        _loads("step_cache_order", choice(0, 1), "1: extrapolate what is kept (default 0)"),
        _loads("step_cache_curve", values.path, "of mag; default: the checkpoint's or published"),
        _loads("step_cache_coefficients", step_cache.coefficients, "of tea, highest power first"),
        _loads("step_cache_force", switch, "also with fewer than 8 steps"),
        _loads("use_attentioncache", switch, "--step_cache attention, as in the Ascend fork"),
        _loads("attentioncache_ratio", real(0, 1000), "has no effect, as in the Ascend fork"),
        _loads("attentioncache_interval", integer(1, TRAIN_TIMESTEPS), "steps between two (4)"),
        _loads("start_step", _STEP, "attention is computed up to this step (12)"),
        _loads("end_step", _STEP, "attention is computed behind this step"),
    ),
    "several processes (torchrun)": (
        _layout("cfg_size", choice(1, 2), "2: the guidance branches on two halves of the ranks"),
        _layout("ring_size", _SIZE, "ranks that pass K/V round; default: what ulysses leaves"),
        _layout("ulysses_size", _SIZE, "ranks that exchange heads; default: as many as fit"),
        _layout("ring_type", choice(*RING_TYPES), "default ring"),
        _layout(
            "comm_type",
            choice(*MODES),
            ", ".join(f"{key}: {mode.name}" for key, mode in MODES.items()) + " (default 0)",
        ),
        _layout("chunks", _SIZE, "most head chunks, to search for the best (published: 10)"),
        _layout("fa_alltoall_overlap", switch, "hide exchanges under attention (or OVERLAP=1)"),
        _layout("vae_parallel", switch, "encode and decode on all ranks, exactly"),
        _layout("t5_fsdp", switch, "shard the text encoder"),
        _layout("dit_fsdp", switch, "shard the DiT"),
        _layout("dist_timeout", real(0, 10080, above=True), "minutes to wait for ranks (30)"),
    ),
    "planning": (
        _command(
            "plan", switch, "print exchanges and memory of the run, and do not run", record=False
        ),
        _command(
            "device_memory",
            real(0, 1e6, above=True),
            "GB (1e9 bytes) per device that the plan must fit; default: this machine's GPU",
            record=False,
            needs="plan",
        ),
        _command("chip", choice(*CHIPS), "the NPU model to plan for", record=False, needs="plan"),
    ),
    "prompt extension": (
        _command("use_prompt_extend", switch, "let a language model write more"),
        _command(
            "prompt_extend_method",
            choice("local_qwen", "dashscope"),
            "default local_qwen",
            needs="use_prompt_extend",
        ),
        _command(
            "prompt_extend_model",
            values.text,
            "folder or name of the language model",
            needs="use_prompt_extend",
        ),
        _command(
            "prompt_extend_target_lang", choice("zh", "en"), "default zh", needs="use_prompt_extend"
        ),
    ),
    "evidence": (
        _command(
            "power", switch, "meter power, energy, clock and throttling of the run", record=False
        ),
    ),
    "many videos": (
        _command("prompt_file", values.path, "a prompt or JSON object per line", record=False),
        _command(
            "skip_existing",
            switch,
            "leave out videos that are there already",
            record=False,
            needs="prompt_file",
        ),
        _command(
            "group_by_expert",
            switch,
            "all lines' steps of one expert, then of the other: each is loaded once",
            record=False,
            needs="prompt_file",
        ),
    ),
    "output": (
        _command("save_file", values.path, "path of the mp4; default: a name from task and prompt"),
        _command("fps", real(1, 240), "frames per second of the file"),
        _command("save_latents", switch, "keep the denoised latents"),
        _command(
            "trace", values.path, "folder for a schedule trace (python -m wan.power)", record=False
        ),
        _command(
            "trace_steps",
            values.steps,
            "which steps, from 0, as in 3,7-9; default: the second of each expert",
            record=False,
            needs="trace",
        ),
        _command(
            "trace_kernels",
            switch,
            "also run PyTorch's or the NPU's profiler in these steps, which slows them",
            record=False,
            needs="trace",
        ),
        _command(
            "log_level",
            choice("info", "debug"),
            "debug: also the order of exchanges and attention in the layers",
            record=False,
        ),
        _command("decode_latents", values.path, "only decode this latents file", record=False),
        _command(
            "from_json",
            values.path,
            "repeat the run of this record, under a new name",
            record=False,
        ),
    ),
}
FLAGS: dict[str, Flag] = {flag.name: flag for group in _GROUPS.values() for flag in group}

_ANIMATE = "it belongs to animate-14B, which is not supported"
_S2V = "it belongs to s2v-14B, which is not supported"
REFUSED = {
    "tp_size": "tensor parallelism is not supported; run without it",
    "src_root_path": _ANIMATE,
    "refert_num": _ANIMATE,
    "replace_flag": _ANIMATE,
    "use_relighting_lora": _ANIMATE,
    "num_clip": _S2V,
    "audio": _S2V,
    "enable_tts": _S2V,
    "tts_prompt_audio": _S2V,
    "tts_text": _S2V,
    "tts_prompt_text": _S2V,
    "pose_video": _S2V,
    "start_from_ref": _S2V,
    "infer_frames": _S2V,
}
"""Flags of the official code and the Ascend fork that are not supported, and what to do instead."""

_COMPLAINTS = (  # argparse's words -> ours
    (r"argument (--\S+): ignored explicit argument .*", r"\1 takes no value."),
    (r"argument (--\S+): expected .*", r"\1 needs a value; --help lists the flags."),
    (r"unrecognized arguments: (--\S+).*", r"\1 is not a known flag; --help lists the flags."),
    (r"unrecognized arguments: (.*)", r"\1 belongs to no flag; --help lists the flags."),
)


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        for theirs, ours in _COMPLAINTS:
            if re.fullmatch(theirs, message, re.DOTALL):
                raise InputError(re.sub(theirs, ours, message, flags=re.DOTALL))
        raise InputError(f"{message}; --help lists the flags.")


def parse(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The flags that were given, as checked values. InputError for anything wrong in them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for argument in arguments:
        name = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and name in REFUSED:
            raise InputError(f"--{name} is not available: {REFUSED[name]}.")
    found = read(vars(_parser().parse_args(arguments)), "--{}")
    for name in found:
        needs = FLAGS[name].needs
        if needs == "plan" and needs not in found:
            raise InputError(f"--{name} has no effect without --plan; add it or drop --{name}.")
    check_given(found)
    return found


def check_given(given: Mapping[str, Any]) -> None:
    """InputError for settings of one call that exclude each other, whatever their values."""
    if {"attention_algo", "attention_backend"} <= given.keys():
        raise InputError(
            "--attention_algo names the dense kernel of NPUs, --attention_backend that of GPUs; "
            "give one of them."
        )
    for name in ("sample_shift", "sample_steps"):
        if {"timesteps", name} <= given.keys():
            raise InputError(f"--timesteps says all steps; drop it or --{name}.")
    if given.get("sample_solver") == "rcm" and "sample_shift" in given:
        raise InputError("--sample_shift has no effect on --sample_solver rcm; drop it.")


def read(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Checked values of raw ones.

    Args:
        raw: Values under flags' names.
        source: Makes a value's shown name from its key: "--{}", "record.json: {}".
    """
    unknown = [key for key in raw if key not in FLAGS]
    if unknown:
        raise InputError(f"{source.format(unknown[0])} is not a known setting; remove it.")
    return {key: FLAGS[key].read(source.format(key), value) for key, value in raw.items()}


def _parser() -> Parser:
    result = Parser(
        prog="generate.py",
        description="Generate a video with Wan2.2 from a text prompt, an image, or both.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, flags in _GROUPS.items():
        group = result.add_argument_group(title)
        for flag in flags:
            choices = flag.read.choices
            shown = flag.name.rsplit("_", 1)[-1].upper()
            shown = shown if choices is None else "{" + ",".join(choices) + "}"
            if flag.name == "plan":
                group.add_argument("--plan", action="store_true", help=flag.help)
            elif flag.read is values.files:
                group.add_argument(f"--{flag.name}", action="append", metavar=shown, help=flag.help)
            elif flag.read in (
                switch,
                OFFLOAD,
            ):  # alone it is true; false takes back a record or variable
                group.add_argument(
                    f"--{flag.name}", nargs="?", const="true", metavar=shown, help=flag.help
                )
            else:
                group.add_argument(f"--{flag.name}", metavar=shown, help=flag.help)
    return result
