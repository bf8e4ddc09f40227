"""Table of the tasks: network sizes and sampling defaults of the published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wan.settings.sound import FIXED_CONFIG, INJECT_LAYERS

NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，"
    "形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""The official negative prompt, which official outputs are generated with."""

CAMERA_SHAKE = "镜头晃动，"
SCENE_CUTS = "镜头切换，"
"""Prefixes of the negative prompts of Wan2.1's image-to-video models."""

SPEECH_NEGATIVE_PROMPT = (
    "画面模糊，最差质量，画面模糊，细节模糊不清，情绪激动剧烈，手快速抖动，字幕，丑陋的，残缺的，多余的手指，"
    "画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，"
    "三条腿，背景人很多，倒着走"
)
"""The official negative prompt of speech-to-video."""

TRAIN_TIMESTEPS = 1000
FACE_BLOCK_INTERVAL = 5  # blocks per face adapter, which runs after the first of these blocks
FACE_SIZE = 512  # pixels of a side of the face video
SKIPPED_BLOCK = 9  # of Animate-2's network, in the unconditional branch
VACE_CONTEXT_CHANNELS = 96  # of VACE: kept and changed latents (16 each) and the mask (64)
MAX_POSITIONS = 1024  # rotary positions per axis in the official networks

SIZES = {
    f"{w}*{h}": (w, h)
    for a, b in ((1280, 720), (832, 480), (1280, 704), (1024, 704), (800, 640))
    for w, h in ((b, a), (a, b))
}

_TINY_SIZE = {"size": "128*128"}
_TINY_CLIP = {"frame_num": 9, "sample_steps": 4}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Network sizes and sampling defaults of one task; defaults are those of Wan2.1 14B.

    Attributes:
        kind: Kind of task: "t2v", "i2v", ...; a row of `wan.tasks.base.TASKS`.
        folder: Name of the official checkpoint folder.
        experts: ("high_noise", "low_noise") for two networks, else ("dit",).
        in_dim: Input channels of the network.
        network_config: Further arguments of the network's class; tuples are lists of layers.
        config_json: Further entries of the published config.json; None: it lacks the entry.
        vae: Version of the VAE.
        sample_guide_scale: (low noise, high noise); a single network uses the first.
        boundary: Timestep / 1000 from which on the high-noise expert computes the step; None for a
            single network.
        infer_frames: Frames of a clip of s2v.
        num_clip_vision_images: Number of images that the CLIP vision encoder encodes.
        needs_audio_encoder: Whether the checkpoint contains wav2vec2.
        has_extra_tokens: Whether self-attention also has tokens of an image.
        keeps_kv: Whether tokens also attend to kept keys and values of earlier frames.
        has_reference_kv: Whether tokens also attend to those of a reference video, by a second call
            of the kernel whose result is merged by log-sum-exp.
        sample_shift_480p: `sample_shift` at 832*480 and 480*832; None: `sample_shift`.
        rcm_sigma: First noise-to-data ratio of the solver rcm.
        diffusers_shift: `flow_shift` of the published diffusers scheduler.
        sharded: Whether the published weights of a network are several files.
        tiny_head_dim: Channels of a head in a randomly initialized checkpoint, which has the
            official number of heads.
        tiny_num_layers: Blocks of a network in a randomly initialized checkpoint.
        tiny_settings: Settings in the generation_config.json of a randomly initialized checkpoint.
    """

    task: str
    kind: str
    folder: str
    experts: tuple[str, ...] = ("dit",)
    dim: int = 5120
    ffn_dim: int = 13824
    num_heads: int = 40
    num_layers: int = 40
    in_dim: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    network_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    config_json: Mapping[str, Any] = field(default_factory=dict, hash=False)
    vae: str = "2.1"
    sample_steps: int
    sample_shift: float
    sample_guide_scale: tuple[float, float] = (5.0, 5.0)
    boundary: float | None = None
    size: tuple[int, int] = (1280, 720)
    trained_sizes: tuple[str, ...] = ("720*1280", "1280*720", "480*832", "832*480")
    frame_num: int = 81
    infer_frames: int | None = None
    fps: int = 16
    num_clip_vision_images: int = 0
    needs_audio_encoder: bool = False
    has_extra_tokens: bool = False
    has_reference_kv: bool = False
    keeps_kv: bool = False
    negative_prompt: str = NEGATIVE_PROMPT
    sample_shift_480p: float | None = None
    rcm_sigma: float = 80.0
    diffusers_shift: float = 3.0
    sharded: bool = True
    tiny_head_dim: int = 6
    tiny_num_layers: int = 2
    tiny_settings: Mapping[str, Any] = field(
        default_factory=lambda: _TINY_SIZE | _TINY_CLIP, hash=False
    )

    @property
    def prompt(self) -> str:
        """The default prompt, an example."""
        return EXAMPLE_PROMPTS[self.kind]

    @property
    def model_type(self) -> str:
        """The official name of the network's type."""
        return "flf2v" if self.num_clip_vision_images == 2 else self.kind

    @property
    def vae_stride(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the video per latent."""
        return {"2.1": (4, 8, 8), "2.2": (4, 16, 16)}[self.vae]

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return {"2.1": 16, "2.2": 48}[self.vae]

    @property
    def size_multiple(self) -> int:
        """Pixels of a token's side, of which width and height must be multiples."""
        return self.vae_stride[1] * self.patch_size[1]


_TWO_EXPERTS = ("high_noise", "low_noise")
_VACE_14B = {"vace_layers": tuple(range(0, 40, 5)), "vace_in_dim": VACE_CONTEXT_CHANNELS}
PRESETS = {
    preset.task: preset
    for preset in (
        Preset(
            task="t2v-A14B",
            kind="t2v",
            folder="Wan2.2-T2V-A14B",
            experts=_TWO_EXPERTS,
            sample_steps=40,
            sample_shift=12.0,
            sample_guide_scale=(3.0, 4.0),
            boundary=0.875,
        ),
        Preset(
            task="i2v-A14B",
            kind="i2v",
            in_dim=36,
            rcm_sigma=200.0,
            folder="Wan2.2-I2V-A14B",
            experts=_TWO_EXPERTS,
            sample_steps=40,
            sample_shift=5.0,
            sample_guide_scale=(3.5, 3.5),
            boundary=0.900,
        ),
        Preset(
            task="ti2v-5B",
            kind="ti2v",
            in_dim=48,
            folder="Wan2.2-TI2V-5B",
            dim=3072,
            ffn_dim=14336,
            num_heads=24,
            num_layers=30,
            vae="2.2",
            sample_steps=50,
            sample_shift=5.0,
            size=(1280, 704),
            trained_sizes=("704*1280", "1280*704"),
            frame_num=121,
            fps=24,
            diffusers_shift=5.0,
            tiny_head_dim=8,
        ),
        Preset(
            task="t2v-1.3B",
            kind="t2v",
            folder="Wan2.1-T2V-1.3B",
            dim=1536,
            ffn_dim=8960,
            num_heads=12,
            num_layers=30,
            sample_steps=50,
            sample_shift=5.0,
            size=(832, 480),
            trained_sizes=("480*832", "832*480"),
            sharded=False,
            tiny_head_dim=8,
        ),
        Preset(
            task="t2v-14B",
            kind="t2v",
            folder="Wan2.1-T2V-14B",
            sample_steps=50,
            sample_shift=5.0,
        ),
        Preset(
            task="i2v-14B",
            kind="i2v",
            in_dim=36,
            rcm_sigma=200.0,
            folder="Wan2.1-I2V-14B-720P",
            sample_steps=40,
            sample_shift=5.0,
            sample_shift_480p=3.0,
            num_clip_vision_images=1,
            negative_prompt=CAMERA_SHAKE + NEGATIVE_PROMPT,
        ),
        Preset(
            task="flf2v-14B",
            kind="i2v",
            in_dim=36,
            rcm_sigma=200.0,
            folder="Wan2.1-FLF2V-14B-720P",
            sample_steps=50,
            sample_shift=16.0,
            num_clip_vision_images=2,
            negative_prompt=SCENE_CUTS + CAMERA_SHAKE + NEGATIVE_PROMPT,
        ),
        Preset(
            task="s2v-14B",
            kind="s2v",
            folder="Wan2.2-S2V-14B",
            network_config={
                "audio_dim": 1024,
                "num_audio_token": 4,
                "audio_inject_layers": INJECT_LAYERS,
            },
            config_json=FIXED_CONFIG,
            needs_audio_encoder=True,
            has_extra_tokens=True,
            sample_steps=40,
            sample_shift=3.0,
            sample_guide_scale=(4.5, 4.5),
            trained_sizes=("1024*704", "704*1024", "1280*720", "720*1280", "832*480", "480*832"),
            infer_frames=80,
            negative_prompt=SPEECH_NEGATIVE_PROMPT,
            tiny_settings=_TINY_SIZE | {"infer_frames": 12, "sample_steps": 4},
        ),
        Preset(
            task="animate-14B",
            kind="animate",
            folder="Wan2.2-Animate-14B",
            in_dim=36,
            config_json={"model_type": None},
            has_extra_tokens=True,
            sample_steps=20,
            sample_shift=5.0,
            sample_guide_scale=(1.0, 1.0),
            trained_sizes=("720*1280", "1280*720"),
            frame_num=77,
            fps=30,
            num_clip_vision_images=1,
            diffusers_shift=5.0,
            tiny_num_layers=FACE_BLOCK_INTERVAL,
            tiny_settings=_TINY_CLIP,  # the size is that of the pose video
        ),
        Preset(
            task="animate2-14B",
            kind="animate2",
            folder="Wan2.2-Animate-2-14B",
            in_dim=36,
            config_json={"model_type": None},
            has_extra_tokens=True,
            has_reference_kv=True,
            sample_steps=40,
            sample_shift=5.0,
            sample_guide_scale=(3.0, 3.0),
            size=(640, 800),
            trained_sizes=("640*800", "800*640", "720*1280", "1280*720"),
            fps=24,
            num_clip_vision_images=1,
            negative_prompt="",
            diffusers_shift=5.0,
            sharded=False,
            tiny_num_layers=SKIPPED_BLOCK + 1,
        ),
        Preset(
            task="vace-1.3B",
            kind="vace",
            folder="Wan2.1-VACE-1.3B",
            dim=1536,
            ffn_dim=8960,
            num_heads=12,
            num_layers=30,
            network_config=_VACE_14B | {"vace_layers": tuple(range(0, 30, 2))},
            sample_steps=50,
            sample_shift=16.0,
            size=(832, 480),
            trained_sizes=("480*832", "832*480"),
            sharded=False,
            tiny_head_dim=8,
            tiny_num_layers=3,
        ),
        Preset(
            task="vace-14B",
            kind="vace",
            folder="Wan2.1-VACE-14B",
            network_config=_VACE_14B,
            tiny_num_layers=3,
            sample_steps=50,
            sample_shift=16.0,
        ),
        Preset(
            task="vace-A14B",
            kind="vace",
            folder="Wan2.2-VACE-Fun-A14B",
            network_config=_VACE_14B,
            tiny_num_layers=3,
            experts=_TWO_EXPERTS,
            sample_steps=40,
            sample_shift=12.0,
            sample_guide_scale=(3.0, 4.0),
            boundary=0.875,
        ),
        Preset(
            task="causal-1.3B",
            kind="causal",
            folder="Self-Forcing",
            dim=1536,
            ffn_dim=8960,
            num_heads=12,
            num_layers=30,
            config_json={"_class_name": "WanModel"},
            keeps_kv=True,
            sample_steps=4,
            sample_shift=5.0,
            sample_guide_scale=(1.0, 1.0),
            size=(832, 480),
            trained_sizes=("480*832", "832*480"),
            sharded=False,
            tiny_head_dim=8,
            tiny_settings=_TINY_SIZE | {"frame_num": 21},
        ),
        Preset(
            task="causal-5B",
            kind="causal",
            in_dim=48,
            folder="LongLive-2.0-5B",
            dim=3072,
            ffn_dim=14336,
            num_heads=24,
            num_layers=30,
            config_json={"_class_name": "WanModel"},
            vae="2.2",
            keeps_kv=True,
            sample_steps=4,
            sample_shift=5.0,
            sample_guide_scale=(1.0, 1.0),
            size=(1280, 704),
            trained_sizes=("704*1280", "1280*704"),
            frame_num=125,
            fps=24,
            diffusers_shift=5.0,
            tiny_head_dim=8,
            tiny_settings=_TINY_SIZE | {"frame_num": 61},
        ),
    )
}

TASKS_OF_KIND: dict[str, tuple[str, ...]] = {}
"""Kind of task -> its tasks."""
for _preset in PRESETS.values():
    TASKS_OF_KIND[_preset.kind] = (*TASKS_OF_KIND.get(_preset.kind, ()), _preset.task)

MODEL_TYPES = tuple(dict.fromkeys(preset.model_type for preset in PRESETS.values()))
"""The official names of the networks' types."""

TASK_ALIASES = {"t2v-14B": "t2v-A14B", "i2v-14B": "i2v-A14B"}
"""Alias -> two-expert task. With a single-network checkpoint the alias is Wan2.1's task."""

EXAMPLE_PROMPTS = {
    "t2v": "A red fox trots through fresh snow at dawn, its breath steaming in the cold air, "
    "low golden light between the birches, the camera gliding alongside at eye level.",
    "i2v": "The scene comes gently to life: a soft breeze, drifting light, and a slow push-in of "
    "the camera while the subject turns towards the viewer.",
    "animate": "视频中的人在做动作",  # the official default
    "animate2": "A person in a plain room moves as in the driving video, soft even light, the "
    "camera still at eye level.",
    "s2v": "A person speaks to the camera, the head and the shoulders moving lightly with the "
    "words, soft daylight from a window.",
    "vace": "A red fox trots through fresh snow at dawn, its breath steaming in the cold air, "
    "low golden light between the birches, the camera gliding alongside at eye level.",
    "causal": "A red fox trots through fresh snow at dawn, its breath steaming in the cold air, "
    "low golden light between the birches, the camera gliding alongside at eye level.",
    "ti2v": "Two paper boats race down a rain-filled gutter past glowing shop windows, ripples "
    "catching the neon, close tracking shot just above the water.",
}
