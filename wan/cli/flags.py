"""The command line: one table of flags, and what is refused by name.

Every flag's parsed default is "not given", so that values can be layered: flags win over a JSON
record, that over the checkpoint's generation_config.json, that over the task's presets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from wan.settings import attention, values
from wan.settings import devices as chips
from wan.settings.errors import InputError
from wan.settings.execution import DEVICES, PRECISIONS
from wan.settings.parallel import RING_TYPES
from wan.settings.presets import TASKS, TRAIN_TIMESTEPS, UNBUILT_TASKS
from wan.settings.request import READERS


@dataclass(frozen=True)
class Flag:
    """One setting. A switch takes no value on the command line; in JSON it is true or false."""

    name: str
    read: values.Reader
    help: str
    switch: bool = False
    record: bool = True  # part of the JSON record that --from_json repeats


def _task(name: str, raw: Any) -> str:
    if isinstance(raw, str) and raw in UNBUILT_TASKS:
        raise InputError(UNBUILT_TASKS[raw])
    return str(values.choice(*TASKS)(name, raw))


_SIZES = {
    "cfg_size": "2: the two guidance branches on two halves of the processes (1)",
    "ring_size": "processes that pass K/V round; default: what ulysses_size leaves",
    "ulysses_size": "processes that exchange heads; default: as many as heads allow",
}
_SEED = values.integer(-(2**63), 2**63 - 1)
_START, _REFRESH = values.integer(0, TRAIN_TIMESTEPS), values.integer(1, TRAIN_TIMESTEPS)
_MHZ = values.integer(100, 4000)
_GROUPS: dict[str, tuple[Flag, ...]] = {
    "what to generate": (
        Flag("task", _task, f"{', '.join(TASKS)} (default t2v-A14B)"),
        Flag("prompt", READERS["prompt"], "default: an example"),
        Flag(
            "negative_prompt",
            READERS["negative_prompt"],
            "default, also for '': the official one",
        ),
        Flag("image", values.path, "image to start from (i2v: needed, ti2v: optional)"),
        Flag("size", READERS["size"], "WIDTH*HEIGHT; with an image its area counts"),
        Flag("frame_num", READERS["frame_num"], "frames, 4n+1"),
        Flag("base_seed", _SEED, "negative (default): a random one"),
    ),
    "checkpoint": (
        Flag("ckpt_dir", values.path, "checkpoint folder; default ./Wan2.2-..., else a demo"),
        Flag("quant_dit_path", values.path, "folder of quantised DiT weights, used instead"),
    ),
    "sampling": (
        Flag("sample_solver", READERS["sample_solver"], "unipc (default) or dpm++"),
        Flag("sample_steps", READERS["sample_steps"], "solver steps"),
        Flag("sample_shift", READERS["sample_shift"], "shift of the noise schedule"),
        Flag(
            "sample_guide_scale", READERS["guide_scale"], "one number, or LOW,HIGH; 1: no guidance"
        ),
        Flag("noise_device", READERS["noise_device"], "cpu (default): same noise anywhere"),
    ),
    "device and memory": (
        Flag("device", values.choice(*DEVICES), "auto (default), cpu, cuda, npu"),
        Flag("precision", values.choice(*PRECISIONS), "auto: bf16, on the CPU fp32"),
        Flag("convert_model_dtype", values.switch, "store all DiT weights in bf16", switch=True),
        Flag("offload_model", values.switch, "true/false: keep one network at a time (true)"),
        Flag("t5_cpu", values.switch, "run the text encoder on the CPU", switch=True),
        Flag("text_kv_cache", values.switch, "true/false: keep the text's K/V over steps (true)"),
        Flag("compile", values.switch, "compile the transformer blocks", switch=True),
        Flag("vae_tiling", values.switch, "decode in tiles: less memory, not exact", switch=True),
    ),
    "attention": (
        Flag(
            "attention_algo",
            values.choice(*attention.ALGORITHMS),
            "kernel of an NPU: fused (default) or laser",
        ),
        Flag("fa_quant", values.choice("fp8", "none"), "fp8: q, k, v as FP8 numbers"),
        Flag("quant_alltoall", values.switch, "exchange FP8 numbers", switch=True, record=False),
        Flag("use_rainfusion", values.switch, "sparse attention", switch=True),
        Flag("sparsity", values.share, "share of blocks left out (0.64)"),
        Flag("sparse_start_step", _START, "from 0; default: a quarter of the steps"),
        Flag("rainfusion_type", values.choice(*attention.RAINFUSION_TYPES), "v2 (default) or v3"),
        Flag("mask_refresh_interval", _REFRESH, "steps that a mask is used for (1)"),
        Flag(
            "fused_ops",
            values.some_of(*attention.FUSED_OPS),
            f"of an NPU: {','.join(attention.FUSED_OPS)}",
        ),
        Flag("fa_freq_cap", _MHZ, "MHz of an NPU during self-attention", record=False),
        Flag("fa_freq_restore", _MHZ, "MHz after it (1650)", record=False),
    ),
    "several processes (torchrun)": (
        *(Flag(n, values.integer(1, 4096), h, record=False) for n, h in _SIZES.items()),
        Flag(
            "ring_type", values.choice(*RING_TYPES), "ring (default) or bidirectional", record=False
        ),
        Flag(
            "comm_type",
            values.comm_type,
            "0: plain attention (default), 1: InsertComm, 2: BlockAttn",
            record=False,
        ),
        Flag(
            "fa_alltoall_overlap",
            values.switch,
            "hide exchanges under attention (or OVERLAP=1)",
            switch=True,
            record=False,
        ),
        Flag("t5_fsdp", values.switch, "shard the text encoder", switch=True, record=False),
        Flag("dit_fsdp", values.switch, "shard the DiT", switch=True, record=False),
        Flag(
            "dist_timeout",
            values.positive(10080),
            "minutes to wait for other processes (30)",
            record=False,
        ),
    ),
    "planning": (
        Flag(
            "plan",
            values.switch,
            "say what a run exchanges and what memory it takes; nothing is read or run",
            switch=True,
            record=False,
        ),
        Flag(
            "device_memory",
            values.positive(1e6),
            "GB (1e9 bytes) per device that the plan must fit; default: this machine's GPU",
            record=False,
        ),
        Flag(
            "chip",
            values.choice(*(chip.name for chip in chips.CHIPS)),
            "the Ascend chip to plan for",
            record=False,
        ),
    ),
    "prompt extension": (
        Flag("use_prompt_extend", values.switch, "let a language model write more", switch=True),
        Flag(
            "prompt_extend_method",
            values.choice("local_qwen", "dashscope"),
            "local_qwen (default) or dashscope",
        ),
        Flag("prompt_extend_model", values.path, "folder or name of the language model"),
        Flag("prompt_extend_target_lang", values.choice("zh", "en"), "zh (default) or en"),
    ),
    "output": (
        Flag("save_file", values.path, "path of the mp4; default: a name from task and prompt"),
        Flag("fps", values.positive(240, minimum=1), "frames per second of the file"),
        Flag("save_latents", values.switch, "keep the denoised latents", switch=True),
        Flag("decode_latents", values.path, "only decode this latents file", record=False),
        Flag(
            "from_json",
            values.text,
            "repeat the run of this record, under a new name",
            record=False,
        ),
    ),
}
FLAGS: dict[str, Flag] = {flag.name: flag for group in _GROUPS.values() for flag in group}

_S2V = "it belongs to s2v-14B, which is not built here"
_ANIMATE = "it belongs to animate-14B, which is not built here"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("src_root_path", "refert_num", "replace_flag", "use_relighting_lora"), _ANIMATE
    ),
    **dict.fromkeys(("num_clip", "audio", "enable_tts", "tts_prompt_audio", "tts_text"), _S2V),
    **dict.fromkeys(("tts_prompt_text", "pose_video", "start_from_ref", "infer_frames"), _S2V),
    "tp_size": "tensor parallelism is not built; run without it",
    "vae_parallel": "the VAE runs on one device; --vae_tiling bounds its memory",
    **dict.fromkeys(
        ("use_attentioncache", "attentioncache_ratio", "attentioncache_interval", "start_step"),
        "step caches are not built; lower --sample_steps instead",
    ),
    "end_step": "step caches are not built; lower --sample_steps instead",
}
"""Flags of the official code and the Ascend fork that are not built, and what to do instead."""


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the flags.")


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog="generate.py",
        description="Generate a video with Wan2.2 from a text prompt, an image, or both.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, flags in _GROUPS.items():
        group = result.add_argument_group(title)
        for flag in flags:
            if flag.switch:
                group.add_argument(f"--{flag.name}", action="store_true", help=flag.help)
            else:
                metavar = flag.name.rsplit("_", 1)[-1].upper()
                group.add_argument(f"--{flag.name}", metavar=metavar, help=flag.help)
    return result


def parse(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The flags that were given, as checked values. InputError for anything wrong in them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for argument in arguments:
        name = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and name in REFUSED:
            raise InputError(f"--{name} is not available: {REFUSED[name]}.")
    found = read(vars(parser().parse_args(arguments)), "--{}")
    for name, meaning in (("device_memory", "compares with"), ("chip", "plans for")):
        if name in found and "plan" not in found:
            raise InputError(f"--{name} is what --plan {meaning}; add --plan or drop it.")
    return found


def read(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Check values against the table. `source` makes a value's shown name from its key."""
    unknown = [key for key in raw if key not in FLAGS]
    if unknown:
        raise InputError(f"{source.format(unknown[0])} is not a known setting; remove it.")
    return {key: FLAGS[key].read(source.format(key), value) for key, value in raw.items()}
