"""Tables of settings that exclude or need each other or have no effect together.

The conditions of a rule read a mapping of settings; `when` and the texts, format templates of `s`,
read a typed view. Texts write settings in backticks, as in `wan.settings.errors.InputError`, so
that each front end can format them.

Table, where it is checked, what conditions read, and the view:

- USER_SETTING_RULES, `layers.read_layer`: the settings that one layer gives; none.
- TOPOLOGY_RULES, `parallel.resolve_topology`: the settings that any layer gives; `TopologyView`.
- PIPELINE_RULES, `Setup`: complete settings, with defaults; `PipelineView`.
- VIDEO_RULES, `Setup.check_params`: complete settings, also of the pipeline; `VideoView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from wan.settings.attention_modes import CHUNKED_MODES
from wan.settings.errors import InputError
from wan.settings.kernels import DenseKernelRow
from wan.settings.noise_tables import OFFICIAL_TABLE
from wan.settings.presets import Preset
from wan.settings.solvers import SOLVERS_OF_ANY_TIMESTEPS
from wan.settings.values import join_with_or
from wan.settings.video_options import VideoSettings

Values = Mapping[str, Any]
"""Flag -> value."""
View = TypeVar("View", contravariant=True)
"""What `when` and the texts read: `TopologyView`, `PipelineView` or `VideoView`."""


@dataclass(frozen=True, kw_only=True)
class TopologyView:
    """What rules for the topology read."""

    world_size: int
    ring_size: int
    ulysses_size: int
    comm_type: int
    chunks: int | None
    num_heads: int

    @property
    def heads_of_a_rank(self) -> int:
        """Heads that each rank of a Ulysses group has at least."""
        return self.num_heads // self.ulysses_size


@dataclass(frozen=True, kw_only=True)
class PipelineView:
    """What rules for a pipeline read."""

    preset: Preset
    device: str
    dit_fsdp: bool
    dense_kernel: DenseKernelRow
    policy: str
    has_quantized_dit: bool
    checkpoint_dtypes: Set[str]

    def has_stored_weights(self, *dtype_prefixes: str) -> bool:
        """Whether the checkpoint has a tensor of such a dtype."""
        return any(dtype.startswith(dtype_prefixes) for dtype in self.checkpoint_dtypes)


@dataclass(frozen=True, kw_only=True)
class VideoView:
    """What rules for a video read: its settings, and properties of the network that makes it."""

    video: VideoSettings
    step_range: range
    trace_steps: Sequence[int]
    last_block: int
    num_control_blocks: int
    num_scales: int
    has_adapters: bool


@dataclass(frozen=True)
class Rule(Generic[View]):
    """A combination of settings that is refused.

    Attributes:
        conditions: Conditions on settings that must all hold: `name` (it is set; False and None are
            not), `name=value` (its text in Python: `offload_model=False`), or one of them after
            `not `.
        why: What is wrong, continuing the sentence after `subject`.
        remedy: Suggestion to the user.
        when: Further condition.
        subject: Subject of the refusal; by default the setting of the first condition.
    """

    conditions: tuple[str, ...]
    why: str
    remedy: str = "drop it"
    when: Callable[[View], bool] | None = None
    subject: str = ""

    @property
    def full_subject(self) -> str:
        """Subject of the refusal: `subject`, or the setting of the first condition."""
        return self.subject or f"`{self.conditions[0]}`"


def is_condition_met(condition: str, settings: Values) -> bool:
    """Returns whether a condition holds for these settings; see `Rule`."""
    if condition.startswith("not "):
        return not is_condition_met(condition.removeprefix("not "), settings)
    name, equals, value = condition.partition("=")
    actual = settings.get(name)
    return str(actual) == value if equals else actual is not None and actual is not False


def make_conflict_rule(
    setting: str, other: str, why: str = "", remedy: str = "drop one of them"
) -> Rule[object]:
    """Makes the rule that two settings exclude each other."""
    return Rule((setting, other), why or f"does not work with `{other}`", remedy)


def make_needs_rule(setting: str, other: str) -> Rule[object]:
    """Makes the rule that a setting has no effect without another one."""
    remedy = f"add `{other}`, or drop `{setting}`"
    return Rule((setting, f"not {other}"), f"has no effect without `{other}`", remedy)


def check_rules(rules: Iterable[Rule[View]], settings: Values, view: View) -> None:
    """Raises InputError for the first rule that applies to these settings and this view."""
    for rule in rules:
        if all(is_condition_met(condition, settings) for condition in rule.conditions) and (
            rule.when is None or rule.when(view)
        ):
            subject, why, remedy = (
                text.format(s=view) for text in (rule.full_subject, rule.why, rule.remedy)
            )
            raise InputError(subject, None, why, remedy)


SHIFT_OF_RCM_RULE = make_conflict_rule(
    "sample_shift", "sample_solver=rcm", "has no effect on `sample_solver=rcm`", "drop it"
)
USER_SETTING_RULES: tuple[Rule[object], ...] = (
    *(
        make_conflict_rule("timesteps", name, "already sets all steps", f"drop it, or `{name}`")
        for name in ("sample_shift", "sample_steps", "sigmas")
    ),
    make_conflict_rule("prompt", "clip_prompts", "is replaced by `clip_prompts`"),
    make_conflict_rule(
        "use_prompt_extend", "clip_prompts", "extends one prompt, and `clip_prompts` gives several"
    ),
    SHIFT_OF_RCM_RULE,
)
"""Rules for the settings that one layer gives.

Settings that exclude each other in one layer replace each other in different ones
(`wan.settings.layers`).
"""

_CHUNKS = "`chunks={s.chunks}`"
_CHUNKED = (*(f"`comm_type={comm_type}`" for comm_type in CHUNKED_MODES), "`fa_alltoall_overlap`")
TOPOLOGY_RULES: tuple[Rule[TopologyView], ...] = (
    Rule(
        ("comm_type", "fa_alltoall_overlap"),
        "runs exchanges between the attention of head chunks, and `fa_alltoall_overlap` runs them "
        "during attention",
        "choose one",
        lambda s: s.comm_type > 0,
    ),
    Rule(
        ("comm_type",),
        "has an effect only on exchanges between ranks",
        "start with torchrun --nproc_per_node=2, or drop it",
        lambda s: s.comm_type > 0 and s.ulysses_size <= 1,
        # The first sentence is quoted from the guide to FA_Power_Cap, see docs/guide.md.
        "comm_type optimization requires ulysses_size > 1. `comm_type={s.comm_type}`",
    ),
    Rule(
        ("fa_alltoall_overlap",),
        "has no effect with `ulysses_size=1`, which has no all-to-all exchanges to hide",
        "use a larger one, or drop it",
        lambda s: s.ulysses_size <= 1,
    ),
    Rule(
        ("exchange",),
        "has no effect with `ulysses_size=1`",
        "drop it, or use a larger one",
        lambda s: s.ulysses_size == 1,
    ),
    Rule(
        ("ring_type",),
        "has no effect with `ring_size=1`",
        "drop it, or use a larger ring",
        lambda s: s.ring_size == 1,
    ),
    Rule(("dist_timeout",), "has no effect on one process", when=lambda s: s.world_size == 1),
    *(
        Rule[TopologyView](
            (name,),
            f"{effect}, but this is one process",
            "start it with torchrun, or drop it",
            lambda s: s.world_size == 1,
        )
        for name, effect in (
            ("dit_fsdp", "shards weights over several devices"),
            ("t5_fsdp", "shards weights over several devices"),
            ("vae_parallel", "splits the rows of frames over ranks"),
        )
    ),
    make_conflict_rule(
        "t5_fsdp", "t5_cpu", "shards the text encoder over devices, and `t5_cpu` runs it on the CPU"
    ),
    Rule(
        ("compile",),
        "does not work with `ring_size` above 1",
        "drop one of them",
        lambda s: s.ring_size > 1,
    ),
    make_conflict_rule("compile", "fa_alltoall_overlap"),
    Rule(
        ("chunks", "not fa_alltoall_overlap"),
        f"has an effect only with {join_with_or(_CHUNKED)}",
        "add one of them, or drop it",
        lambda s: s.comm_type not in CHUNKED_MODES,
        _CHUNKS,
    ),
    Rule(
        ("chunks",),
        "is more than the {s.heads_of_a_rank} of {s.num_heads} heads that a rank has with "
        "`ulysses_size={s.ulysses_size}`",
        "give 1 to {s.heads_of_a_rank}, or a smaller `ulysses_size`",
        lambda s: (s.chunks or 0) > s.heads_of_a_rank,
        _CHUNKS,
    ),
)
"""Rules for the topology, on the settings that a layer gives."""


def _make_unconverted_rules(
    value: str, formats: str, *dtype_prefixes: str
) -> tuple[Rule[PipelineView], ...]:
    """Makes the rules for computing with weights as the checkpoint stores them."""
    reasons: tuple[tuple[str, Callable[[PipelineView], bool]], ...] = (
        ("`dit_fsdp` shards parameters", lambda s: s.dit_fsdp),
        ("`quant_dit_path` replaces these weights", lambda s: s.has_quantized_dit),
        ("NPUs have no FP8 weights", lambda s: s.device == "npu" and s.has_stored_weights("F8")),
        (
            f"the checkpoint has no {formats} weights",
            lambda s: not s.has_stored_weights(*dtype_prefixes),
        ),
    )
    remedy = "use `stored_weights=upcast`, or drop it"
    return tuple(
        Rule((f"stored_weights={value}",), f"is not possible: {why}", remedy, when)
        for why, when in reasons
    )


_RETURNS_NO_LSE = (
    "returns no log-sum-exp, by which {s.preset.task} merges the attention to its reference video"
)
PIPELINE_RULES: tuple[Rule[PipelineView], ...] = (
    make_conflict_rule(
        "convert_model_dtype",
        "precision=fp32",
        "stores the DiT in bf16, and `precision=fp32` computes in fp32",
    ),
    make_conflict_rule(
        "vae_parallel",
        "vae_tiling",
        "decodes whole frames on all ranks, and `vae_tiling` tiles of them on one",
    ),
    *(
        make_conflict_rule(
            "overlap_decoding", name, f"decodes on one rank by itself, and `{name}` {effect}"
        )
        for name, effect in (("vae_parallel", "on all ranks"), ("vae_tiling", "in tiles"))
    ),
    Rule(
        ("dit_fsdp",),
        "shards parameters, and quantised weights are buffers",
        "drop it, or drop `quant_dit_path`",
        lambda s: s.has_quantized_dit,
    ),
    *_make_unconverted_rules("keep", "FP8 or GGUF", "F8", "Q", "IQ", "MXFP4"),
    *_make_unconverted_rules("multiply", "FP8", "F8"),
    Rule(
        ("stored_weights=multiply",),
        "needs weights in E4M3, and those of the checkpoint are E5M2",
        "use `stored_weights=keep`",
        lambda s: {"F8_E5M2"} == {dtype for dtype in s.checkpoint_dtypes if dtype[:2] == "F8"},
    ),
    *(
        make_conflict_rule(
            f"offload_model={value}",
            name,
            f"copies weights from host memory or files, but `{name}` {effect}",
        )
        for name, effect, values in (
            ("dit_fsdp", "shards the DiT over the devices", ("cpu", "block")),
            ("t5_fsdp", "shards the text encoder over the devices", ("cpu", "block")),
            ("compile", "needs weights at fixed addresses", ("block",)),
        )
        for value in values
    ),
    make_conflict_rule(
        "lora_folder",
        "compile",
        "does not work with `compile`: compiled blocks would leave out LoRAs that are added later",
    ),
    Rule(
        ("use_rainfusion",),
        "masks the tokens of a video, and {s.preset.task} also has tokens of an image",
        "drop it",
        lambda s: s.preset.has_extra_tokens,
    ),
    Rule(("fa_quant=fp8",), _RETURNS_NO_LSE, "drop it", lambda s: s.preset.has_reference_kv),
    Rule(
        (),
        _RETURNS_NO_LSE,
        "drop it",
        lambda s: s.preset.has_reference_kv and not s.dense_kernel.has_lse,
        "{s.dense_kernel.setting}",
    ),
    Rule(
        ("compile",),
        "is not supported for {s.preset.task}, whose blocks attend to a reference video",
        "drop it",
        lambda s: s.preset.has_reference_kv,
    ),
    *(
        Rule[PipelineView](
            conditions,
            f"{effect}, and {{s.preset.task}} attends to kept keys of earlier frames",
            remedy,
            lambda s: s.preset.keeps_kv,
            subject,
        )
        for conditions, effect, remedy, subject in (
            (
                ("not ring_size=1",),
                "passes the keys of all tokens on",
                "use `ulysses_size`",
                "`ring_size`",
            ),
            (("fa_quant=fp8",), "scales the keys of one forward pass", "drop it", ""),
            (("use_rainfusion",), "masks the tokens of a whole video", "drop it", ""),
            (
                ("not step_cache=none",),
                "needs more than the few steps of a block",
                "drop it",
                "`step_cache`",
            ),
            (("use_attentioncache",), "skips attention, which keeps the keys", "drop it", ""),
            (("compile",), "needs keys of a fixed length", "drop it", ""),
        )
    ),
)
"""Rules for a pipeline, on its complete settings, with defaults."""

GROUPING_RULES: tuple[Rule[PipelineView], ...] = (
    Rule(
        ("group_by_expert",),
        "has no effect on {s.preset.task}, which has one expert",
        when=lambda s: len(s.preset.experts) == 1,
    ),
    make_conflict_rule(
        "group_by_expert",
        "offload_model=False",
        "has no effect with `offload_model=false`, which keeps both experts in memory",
    ),
    Rule(
        ("group_by_expert",),
        "interrupts videos, and `step_cache` has tensors of only one of them",
        "drop one of them",
        lambda s: s.policy != "none",
    ),
)
"""Rules for runs of many videos."""

_BOUNDARY_STEP = "`boundary_step={s.video.boundary_step}`"
VIDEO_RULES: tuple[Rule[VideoView], ...] = (
    # The pipeline together with the video.
    make_needs_rule("resident_blocks", "offload_model=block"),
    Rule(
        ("conditioning_scale",),
        "has {s.num_scales} numbers, and the network has {s.num_control_blocks} control blocks",
        "give one number, or {s.num_control_blocks}",
        lambda s: s.num_control_blocks > 0 and s.num_scales not in (1, s.num_control_blocks),
    ),
    # Sampling.
    Rule(
        ("sample_guide_scale",),
        "has two numbers, but {s.video.preset.task} has one network",
        "give one number",
        lambda s: s.video.boundary is None and len({*s.video.sample_guide_scale}) == 2,
        "`sample_guide_scale={s.video.sample_guide_scale[0]:g},{s.video.sample_guide_scale[1]:g}`",
    ),
    Rule(
        ("timesteps",),
        "has no effect on `sample_solver={s.video.sample_solver}`, which computes them from "
        "`sample_shift`",
        f"use {join_with_or(SOLVERS_OF_ANY_TIMESTEPS)}, or drop `timesteps`",
        lambda s: s.video.sample_solver not in SOLVERS_OF_ANY_TIMESTEPS,
    ),
    Rule(
        ("sigmas", "sample_solver=rcm"),
        "has no effect on `sample_solver=rcm`, which has sigmas of its own",
        when=lambda s: s.video.sigmas != OFFICIAL_TABLE,
        subject="`sigmas={s.video.sigmas}`",
    ),
    Rule(
        ("sample_solver=rcm", "not timesteps"),
        "has at most 4 steps, and there are {s.video.sample_steps}",
        "add `sample_steps=4`, or give `timesteps`",
        lambda s: s.video.sample_steps > 4,
    ),
    Rule(
        ("sample_solver=rcm", "sigma_max", "not timesteps"),
        "is below rcm's second level of 14.1 (tan 1.5), or too close to it",
        "give more than 14.2",
        lambda s: s.video.sample_steps > 1 and (s.video.sigma_max or 0) <= 14.2,
        "`sigma_max={s.video.sigma_max:g}`",
    ),
    make_conflict_rule("sigma_max", "timesteps", "has no effect with `timesteps`"),
    *(
        Rule[VideoView](
            (name, "not sample_solver=rcm"),
            "has an effect only with `sample_solver=rcm`, but the solver is "
            "{s.video.sample_solver}",
            f"drop `{name}`",
        )
        for name in ("ode", "sigma_max")
    ),
    Rule(
        ("boundary_step",),
        "has no effect, as the task has one network",
        when=lambda s: s.video.boundary is None,
        subject=_BOUNDARY_STEP,
    ),
    Rule(
        ("boundary_step",),
        "is more than the {s.video.sample_steps} steps",
        "lower it",
        lambda s: (s.video.boundary_step or 0) > s.video.sample_steps,
        _BOUNDARY_STEP,
    ),
    Rule(
        ("strength",),
        "leaves none of the {s.video.sample_steps} steps",
        "give at least 1/{s.video.sample_steps}, or more `sample_steps`",
        lambda s: not s.step_range,
        "`strength={s.video.strength:g}`",
    ),
    Rule(
        ("refine",),
        "has no steps, as none of the {s.video.sample_steps} is one of the low-noise expert",
        "add `strength`, or give more `sample_steps`",
        lambda s: not s.step_range,
    ),
    *(
        make_conflict_rule(
            "fixed_latents", name, "replaces the initial latents, and so does `src_video`"
        )
        for name in ("strength", "refine")
    ),
    Rule(
        ("trace_steps",),
        "names step {s.trace_steps[0]}, and this video starts at step {s.step_range.start}",
        "drop it, or name later ones",
        lambda s: s.trace_steps[0] < s.step_range.start,
    ),
    # Guidance.
    *(
        Rule[VideoView](
            conditions,
            f"{effect}, and `sample_guide_scale=1` computes only one",
            "give a larger scale, or drop it",
            lambda s: not s.video.uses_guidance,
            subject,
        )
        for conditions, subject, effect in (
            (
                ("guider", "not guider=cfg"),
                "`guider={s.video.guider}`",
                "combines both guidance branches",
            ),
            (("slg_blocks",), "", "skips blocks of the unconditional branch"),
        )
    ),
    Rule(
        ("guider",),
        "leaves none of the {s.video.sample_steps} steps",
        "give fewer zero_init_steps",
        lambda s: (s.video.guider_parameters.get("zero_init_steps") or 0) >= s.video.sample_steps,
        "`guider={s.video.guider}`",
    ),
    Rule(
        ("slg_blocks",),
        "names a block that the network does not have",
        "name blocks from 0 to {s.last_block}",
        lambda s: max(s.video.skipped_blocks or (0,)) > s.last_block,
    ),
    Rule(
        ("slg_blocks",),
        "names all blocks of the network",
        "name one or two, such as 9",
        lambda s: len(s.video.skipped_blocks) > s.last_block,
    ),
    Rule(
        ("slg_blocks",),
        "does not start before it stops: start={s.video.slg_range[0]:g}, "
        "stop={s.video.slg_range[1]:g}",
        "give a smaller start, or a larger stop",
        lambda s: s.video.slg_range[0] >= s.video.slg_range[1],
    ),
    Rule(
        ("slg_blocks", "offload_model=block"),
        "skips blocks with whose weights {s.video.preset.task} copies those of its adapters",
        "drop one of them",
        lambda s: s.has_adapters,
    ),
    # Images.
    Rule(
        (),
        "needs a video of more than one frame",
        "give a larger `frame_num`",
        lambda s: s.video.has_last_image and s.video.frame_num == 1,
        "`last_image`",
    ),
    Rule(
        (),
        "ends with an image",
        "add `last_image`",
        lambda s: (
            s.video.image_size is not None
            and s.video.preset.num_clip_vision_images == 2
            and not s.video.has_last_image
        ),
        "The task {s.video.preset.task}",
    ),
    # Videos that are generated clip by clip.
    Rule(
        ("clip_prompts", "num_clip"),
        "and `num_clip={s.video.num_clip}` differ",
        "give one prompt for each clip",
        lambda s: len(s.video.clip_prompts or ()) != s.video.num_clip,
        "The number of `clip_prompts`",
    ),
    Rule(
        ("chain",),
        "does not work with several clips, because each of them would end with it",
        "drop it, or `num_clip`",
        lambda s: s.video.has_last_image,
        "`last_image`",
    ),
    Rule(
        ("chain=latent",),
        "is too short: 5 frames of a later clip repeat the previous clip",
        "give 9 or more; 81 is best",
        lambda s: s.video.frame_num < 9,
        "`frame_num={s.video.frame_num}`",
    ),
    Rule(
        ("chain=frame",),
        "is too short for clips that begin with the last frame of the previous clip",
        "give 5 or more",
        lambda s: s.video.frame_num < 5 and (s.video.num_clip or 1) > 1,
        "`frame_num={s.video.frame_num}`",
    ),
    Rule(
        ("refert_num",),
        "is not below the {s.video.frame_num} frames of a clip",
        "give a larger `frame_num`",
        lambda s: (s.video.refert_num or 0) >= s.video.frame_num,
        "`refert_num={s.video.refert_num}`",
    ),
)
"""Rules for a video, on its complete settings, with defaults, and those of its pipeline."""
