"""The tasks: architecture and sampling defaults of the published Wan checkpoints (numbers only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，"
    "形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""The official negative prompt: part of the model's recipe, needed for equal outputs."""

SHAKY = "镜头晃动，"
CUTS = "镜头切换，"
"""What the negative prompts of Wan2.1's image models begin with."""

TRAIN_TIMESTEPS = 1000
MAX_POSITIONS = 1024  # rotary positions per axis the networks were built for

SIZES = {
    f"{w}*{h}": (w, h)
    for a, b in ((1280, 720), (832, 480), (1280, 704), (1024, 704))
    for w, h in ((b, a), (a, b))
}


@dataclass(frozen=True)
class Preset:
    """One task. Guidance scales are (low noise, high noise); a single network uses the first."""

    task: str
    kind: str  # "t2v", "i2v" or "ti2v": what conditions the video
    folder: str  # the official checkpoint's folder name
    experts: tuple[str, ...]
    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    vae: str
    vae_stride: tuple[int, int, int]
    sample_steps: int
    sample_shift: float
    sample_guide_scale: tuple[float, float]
    boundary: float | None
    size: tuple[int, int]
    trained_sizes: tuple[str, ...]
    frame_num: int = 81
    fps: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    images: int = 0  # that CLIP looks at
    negative_prompt: str = NEGATIVE_PROMPT
    small_shift: float | None = None  # sample_shift of 832*480 and 480*832, where another one

    @property
    def prompt(self) -> str:
        """An example."""
        return EXAMPLE_PROMPTS[self.kind]

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents, and of the networks' output."""
        return {"2.1": 16, "2.2": 48}[self.vae]

    @property
    def size_multiple(self) -> int:
        """Width and height must be multiples of one token's side in pixels."""
        return self.vae_stride[1] * self.patch_size[1]


_TWO = ("high_noise", "low_noise")
_ONE = ("dit",)
_A14B_SIZES = ("720*1280", "1280*720", "480*832", "832*480")
_NET_14B: dict[str, Any] = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
_VAE_21: dict[str, Any] = {"vae": "2.1", "vae_stride": (4, 8, 8)}
_DENSE: dict[str, Any] = {
    "experts": _ONE,
    **_VAE_21,
    "sample_guide_scale": (5.0, 5.0),
    "boundary": None,
}
_WAN21: dict[str, Any] = {**_DENSE, "kind": "t2v", "sample_steps": 50, "sample_shift": 5.0}
_IMAGE21: dict[str, Any] = {
    **_DENSE,
    "kind": "i2v",
    **_NET_14B,
    "size": (1280, 720),
    "trained_sizes": _A14B_SIZES,
}

PRESETS: dict[str, Preset] = {
    preset.task: preset
    for preset in (
        Preset(
            task="t2v-A14B",
            kind="t2v",
            folder="Wan2.2-T2V-A14B",
            experts=_TWO,
            **_NET_14B,
            **_VAE_21,
            sample_steps=40,
            sample_shift=12.0,
            sample_guide_scale=(3.0, 4.0),
            boundary=0.875,
            size=(1280, 720),
            trained_sizes=_A14B_SIZES,
        ),
        Preset(
            task="i2v-A14B",
            kind="i2v",
            folder="Wan2.2-I2V-A14B",
            experts=_TWO,
            **_NET_14B,
            **_VAE_21,
            sample_steps=40,
            sample_shift=5.0,
            sample_guide_scale=(3.5, 3.5),
            boundary=0.900,
            size=(1280, 720),
            trained_sizes=_A14B_SIZES,
        ),
        Preset(
            task="ti2v-5B",
            kind="ti2v",
            folder="Wan2.2-TI2V-5B",
            experts=_ONE,
            dim=3072,
            ffn_dim=14336,
            num_heads=24,
            num_layers=30,
            vae="2.2",
            vae_stride=(4, 16, 16),
            sample_steps=50,
            sample_shift=5.0,
            sample_guide_scale=(5.0, 5.0),
            boundary=None,
            size=(1280, 704),
            trained_sizes=("704*1280", "1280*704"),
            frame_num=121,
            fps=24,
        ),
        Preset(
            task="t2v-1.3B",
            folder="Wan2.1-T2V-1.3B",
            dim=1536,
            ffn_dim=8960,
            num_heads=12,
            num_layers=30,
            size=(832, 480),
            trained_sizes=("480*832", "832*480"),
            **_WAN21,
        ),
        Preset(
            task="t2v-14B",
            folder="Wan2.1-T2V-14B",
            **_NET_14B,
            size=(1280, 720),
            trained_sizes=_A14B_SIZES,
            **_WAN21,
        ),
        Preset(
            task="i2v-14B",
            folder="Wan2.1-I2V-14B-720P",
            sample_steps=40,
            sample_shift=5.0,
            small_shift=3.0,
            images=1,
            negative_prompt=SHAKY + NEGATIVE_PROMPT,
            **_IMAGE21,
        ),
        Preset(
            task="flf2v-14B",
            folder="Wan2.1-FLF2V-14B-720P",
            sample_steps=50,
            sample_shift=16.0,
            images=2,
            negative_prompt=CUTS + SHAKY + NEGATIVE_PROMPT,
            **_IMAGE21,
        ),
    )
}

ALIASES = {"t2v-14B": "t2v-A14B", "i2v-14B": "i2v-A14B"}
"""Other names of the two-expert tasks. A folder with a single network makes them Wan2.1's."""

TASKS = tuple(PRESETS)

EXAMPLE_PROMPTS = {
    "t2v": "A red fox trots through fresh snow at dawn, its breath steaming in the cold air, "
    "low golden light between the birches, the camera gliding alongside at eye level.",
    "i2v": "The scene comes gently to life: a soft breeze, drifting light, and a slow push-in of "
    "the camera while the subject turns towards the viewer.",
    "ti2v": "Two paper boats race down a rain-filled gutter past glowing shop windows, ripples "
    "catching the neon, close tracking shot just above the water.",
}

UNSUPPORTED_TASKS = ("s2v-14B", "animate-14B")
"""Official tasks that are refused by name."""
