"""Which runs `plan_memory.py` plans and measures, and the checkpoints they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from PIL import Image

from wan.pipeline import tiny
from wan.settings.presets import PRESETS

HEAD_DIMS = {"t2v-1.3B": 64, "t2v-A14B": 32, "i2v-A14B": 32, "ti2v-5B": 32}
LARGE_TEXT = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16}
LARGE = ("--size", "512*512", "--frame_num", "25", "--sample_steps", "2")
ONE = ("--sample_guide_scale", "1")  # guidance branch
MODES = {
    "baseline": (),
    "InsertComm": ("--comm_type", "1"),
    "BlockAttn": ("--comm_type", "2"),
    "overlap": ("--fa_alltoall_overlap",),
}
FP8 = ("--fa_quant", "fp8")
RAIN = ("--use_rainfusion", "--sparse_start_step", "0")
FSDP = ("--dit_fsdp", "--t5_fsdp")


@dataclass(frozen=True)
class Case:
    """A run on CPUs.

    loop: only denoising runs; else all stages do. text: sizes of the text encoder that differ from
    the tiny one's.
    """

    name: str
    flags: tuple[str, ...]
    task: str = "t2v-1.3B"
    loop: bool = False
    text: Mapping[str, int] = field(default_factory=dict)
    image: bool = False

    def argv(self, folder: Path) -> list[str]:
        """The command line, with what it needs made in `folder`."""
        made = folder / f"{self.task}-{len(self.text)}"
        if not made.is_dir():
            dim = PRESETS[self.task].num_heads * HEAD_DIMS[self.task]
            with patch.dict(tiny.TEXT_SIZES, self.text):
                tiny.make_checkpoint(self.task, made, sizes={"dim": dim, "ffn_dim": 2 * dim})
        argv = ["--plan", "--device", "cpu", "--task", self.task, "--ckpt_dir", str(made)]
        if self.image:
            Image.new("RGB", (512, 512)).save(folder / "image.png")
            argv += ["--image", str(folder / "image.png")]
        return [*argv, *self.flags]


def ranks(ring: int, ulysses: int) -> tuple[str, ...]:
    return ("--ring_size", str(ring), "--ulysses_size", str(ulysses))


def cases() -> Iterator[Case]:
    for name, flags in {**dict(loops()), **dict(methods()), **dict(caches())}.items():
        yield Case(name, (*LARGE, *flags), loop=True)
    yield from runs()


def caches() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What step caches keep, of steps that compute all."""
    shown = {
        "first_block": ("first_block", "--step_cache_threshold", "0"),
        "first_block, order 1": (
            *("first_block", "--step_cache_threshold", "0", "--step_cache_order", "1"),
        ),
        "steps": ("steps:0-1",),
    }
    for name, policy in shown.items():
        given = ("--step_cache", *policy, "--step_cache_force")
        yield f"{name}, one rank", (*given, *ONE)
        yield f"{name}, one rank bf16", (*given, *ONE, "--precision", "bf16")
        yield f"{name}, 2 x 2 InsertComm", (*given, *ranks(2, 2), "--comm_type", "1")
    yield "steps, 2 x 2 FSDP", (*given, *ranks(2, 2), "--dit_fsdp")
    kept = (
        *("--use_attentioncache", "--start_step", "0", "--end_step", "4", "--step_cache_force"),
        *("--attentioncache_interval", "2", "--sample_steps", "5"),  # the solver keeps more later
    )
    yield "attention, one rank", (*kept, *ONE)
    yield "attention, 1 x 2", (*kept, *ranks(1, 2), *ONE)
    yield "attention, 1 x 2, two branches", (*kept, *ranks(1, 2))


def loops() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modes, rings, dtypes, padding, branches, sharded weights."""
    yield "one rank", ONE
    yield "one rank bf16", (*ONE, "--precision", "bf16")
    yield "one rank, two branches, no text cache", ("--text_kv_cache", "false")
    for name, mode in MODES.items():
        yield f"1 x 2 {name}", (*ranks(1, 2), *mode, *ONE)
        yield f"1 x 2 {name} bf16", (*ranks(1, 2), *mode, *ONE, "--precision", "bf16")
        yield f"1 x 4 {name}", (*ranks(1, 4), *mode, *ONE)
        yield f"2 x 2 {name}", (*ranks(2, 2), *mode, *ONE)
    yield "ring of 2", (*ranks(2, 1), *ONE)
    yield "ring of 2 bf16", (*ranks(2, 1), *ONE, "--precision", "bf16")
    yield "ring of 4", (*ranks(4, 1), *ONE)
    yield "line of 4", (*ranks(4, 1), *ONE, "--ring_type", "bidirectional")
    yield "2 x 2 InsertComm, padded", (*ranks(2, 2), *ONE, "--comm_type", "1", "--size", "528*496")
    yield "2 x 1 x 2, two branches", ("--cfg_size", "2", *ranks(1, 2))
    yield "1 x 2 FSDP", (*ranks(1, 2), "--dit_fsdp", *ONE)
    yield "2 x 2 FSDP bf16", (*ranks(2, 2), "--dit_fsdp", *ONE, "--precision", "bf16")


def methods() -> Iterator[tuple[str, tuple[str, ...]]]:
    """FP8, exchanged in FP8, block-sparse, and both."""
    both = (*RAIN, "--rainfusion_type", "v3", *FP8)
    for name, flags in (("FP8", FP8), ("RainFusion", RAIN), ("RainFusion FP8", both)):
        yield f"{name} one rank", (*flags, *ONE)
        yield f"{name} one rank bf16", (*flags, *ONE, "--precision", "bf16")
        yield f"{name} 1 x 2 BlockAttn", (*ranks(1, 2), *flags, "--comm_type", "2", *ONE)
        yield f"{name} 2 x 2 InsertComm", (*ranks(2, 2), *flags, "--comm_type", "1", *ONE)
    exchanged = (*FP8, "--quant_alltoall", *ONE)
    yield "FP8 exchanged 1 x 2", (*ranks(1, 2), *exchanged)
    yield "FP8 exchanged 2 x 2 bf16", (*ranks(2, 2), *exchanged, "--precision", "bf16")


def runs() -> Iterator[Case]:
    """Whole runs: tasks, memory policies, text encoder and VAE."""
    size = ("--size", "512*512", "--frame_num", "17", "--sample_steps")
    two = (*size, "2", *ranks(1, 2))
    four = (*size, "4", *ranks(1, 2), "--offload_model")
    yield Case("t2v", (*size, "2", *ONE))
    yield Case("t2v, large text encoder", (*size, "1", *ONE), text=LARGE_TEXT)
    bf16 = ("--precision", "bf16")
    yield Case("t2v, large text encoder bf16", (*size, "1", *ONE, *bf16), text=LARGE_TEXT)
    yield Case("t2v FSDP, large text encoder", (*two, *FSDP, *ONE), text=LARGE_TEXT)
    yield Case("t2v, two experts, one at a time", (*four, "true"), "t2v-A14B")
    yield Case("t2v, two experts at once", (*four, "false"), "t2v-A14B")
    yield Case("i2v", two, "i2v-A14B", image=True)
    yield Case("i2v, all at once", (*four, "false"), "i2v-A14B", image=True)
    yield Case("ti2v", two, "ti2v-5B")
    yield Case("ti2v, image", two, "ti2v-5B", image=True)
    yield Case("t2v, tiled decoding", (*size, "1", *ONE, "--vae_tiling"))
