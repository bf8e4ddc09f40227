"""The checkpoint and the settings of a pipeline, checked together.

This module does not import torch, so that contradictory settings are refused before torch is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wan.cache.policy import Policy
from wan.checkpoint.config import BLOCK_PREFIXES
from wan.checkpoint.formats.tensor_info import FP8, GGUF
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.lora.folder import VideoLoras
from wan.checkpoint.lora.resolve import Lora
from wan.checkpoint.quant.w8a8_export import QuantizedDit, check_export_device
from wan.settings import attention, devices, parallel, rules, step_cache
from wan.settings.attention import Attention
from wan.settings.command import VideoLoraOptions
from wan.settings.devices import Capabilities
from wan.settings.errors import InputError
from wan.settings.execution import MULTIPLY, Execution
from wan.settings.flags import TASK_RULES
from wan.settings.noise_schedule import make_schedule_notices
from wan.settings.parallel import Parallel
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.step_cache import StepCache
from wan.tasks.base import Task, VideoParams


@dataclass(frozen=True)
class Setup:
    """A checked combination of checkpoint and settings.

    Attributes:
        preset: The defaults and sizes of the task.
        checkpoint: Its folder is None if only the task's published sizes are known (--plan).
        execution: Device, dtypes, memory.
        attention: Kernels of self-attention.
        quantized_dit: An export of quantized DiT weights; None: the weights of the checkpoint.
        chip: The NPU model of --chip.
        cache: Settings of the step cache.
        policy: Policy of the step cache; None: no step cache.
        loras: The LoRAs of each expert.
        lora_options: The folder of LoRAs for single videos, and the limit of their cache.
        video_loras: LoRAs of this video only, whose memory is counted.
        keeps_kv_in_host_memory: The kept K/V of a causal video are in host memory.
    """

    preset: Preset
    checkpoint: Checkpoint
    execution: Execution
    parallel: Parallel
    attention: Attention
    quantized_dit: QuantizedDit | None = None
    chip: str | None = None
    cache: StepCache = field(default_factory=StepCache)
    policy: Policy | None = None
    loras: Mapping[str, tuple[Lora, ...]] = field(default_factory=dict)
    lora_options: VideoLoraOptions = field(default_factory=VideoLoraOptions)
    video_loras: VideoLoras = field(default_factory=dict)
    keeps_kv_in_host_memory: bool = False

    def __post_init__(self) -> None:
        rules.check_rules(rules.PIPELINE_RULES, self._settings, self._rule_view)
        attention.check_attention(self.attention, self.execution)
        attention.check_attention_layout(self.attention, self.parallel, self.checkpoint.head_dim)
        step_cache.check_step_cache(self.cache, self.parallel, self.execution)
        if self.execution.device != "auto":
            self.check_device(*devices.list_candidate_devices(self.execution.device, self.chip))

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings of the pipeline by name, for the conditions of `wan.settings.rules`."""
        groups = (self.execution, self.parallel, self.cache, self.attention, self.lora_options)
        return {name: value for group in groups for name, value in vars(group).items()}

    @property
    def _rule_view(self) -> rules.PipelineView:
        return rules.PipelineView(
            preset=self.preset,
            device=self.execution.device,
            dit_fsdp=self.parallel.dit_fsdp,
            dense_kernel=self.attention.dense_kernel,
            policy=self.cache.policy,
            has_quantized_dit=self.quantized_dit is not None,
            checkpoint_dtypes=self.checkpoint_dtypes,
        )

    @property
    def checkpoint_dtypes(self) -> set[str]:
        """The dtypes of the DiTs' tensors in the checkpoint."""
        networks = self.checkpoint.experts.values()
        return {info.dtype for network in networks for info in network.tensors.values()}

    def unconverted_dtypes(self, device: str) -> set[str]:
        """Returns the stored dtypes whose weights are not converted when they are loaded."""
        if self.quantized_dit is not None or self.parallel.dit_fsdp:
            return set()
        # NPUs have no FP8, and unpacking GGUF is not tested on an NPU.
        values = ("keep",) if device == "npu" else ("keep", "auto", MULTIPLY)
        is_kept = self.execution.stored_weights in values
        return self.checkpoint_dtypes & {*FP8, *GGUF} if is_kept else set()

    @property
    def multiplies_fp8(self) -> bool:
        """Whether matrix products with FP8 weights are computed in FP8."""
        return self.execution.stored_weights == MULTIPLY

    def exchange_on(self, device: str) -> str:
        """Returns how q, k and v are exchanged on this type of device: "fused" or "split".

        `auto` is fused only where this was measured to be faster; it was not measured with a ring.
        """
        parallel = self.parallel
        if parallel.exchange != "auto":
            return parallel.exchange
        is_measured = (
            device in self.attention.dense_kernel.fused_exchange_devices and parallel.ring_size == 1
        )
        return "fused" if is_measured and not self.execution.compile else "split"

    def changes_weights(self, expert: str, device: str) -> bool:
        """Returns whether loading an expert replaces layers or merges weights on this device."""
        has_loras = bool(self.loras.get(expert))
        return self.quantized_dit is not None or has_loras or bool(self.unconverted_dtypes(device))

    def check_device(self, *candidates: Capabilities) -> None:
        """Refuses settings that none of these devices can run."""
        weights = () if self.quantized_dit is None else self.quantized_dit.algorithms
        head_dim = self.checkpoint.head_dim
        devices.check_device_support(candidates, self.attention, self.execution, head_dim, weights)
        if self.quantized_dit is not None:
            check_export_device(self.quantized_dit, candidates[0].type)
        self._check_doras(self.unconverted_dtypes(candidates[0].type))

    def _check_doras(self, unconverted_dtypes: set[str]) -> None:
        """Refuses a DoRA of a weight that stays quantized: it is no sum of weight and change."""
        for expert, loras in self.loras.items():
            tensors = self.checkpoint.experts[expert].tensors
            for lora in loras:
                for name, deltas in lora.deltas.items():
                    is_kept = name.startswith(BLOCK_PREFIXES) and (
                        tensors[name].dtype in unconverted_dtypes
                    )
                    if is_kept and any(delta.magnitude is not None for delta in deltas):
                        stored = "GGUF" if tensors[name].dtype in GGUF else "FP8"
                        why = f"is a DoRA, which needs {name} in float, but it is kept in {stored}"
                        raise InputError("LoRA", lora.path, why, "use `stored_weights=upcast`")

    def check_plan(self) -> None:
        """Refuses settings that no device matching `device` and `chip` can run."""
        candidates = devices.list_candidate_devices(self.execution.device, self.chip)
        for candidate in candidates:
            try:
                return self.check_device(candidate)
            except InputError:
                continue
        self.check_device(*candidates)

    def check_params(self, params: VideoParams, settings: Values | None = None) -> tuple[str, ...]:
        """Refuses settings of a video that contradict each other or the pipeline's.

        Args:
            settings: Further settings of the user, such as input files.

        Returns:
            Notices.
        """
        steps, tokens = params.num_forwards, params.max_clip_tokens
        values = {**(settings or {}), **self._settings, **vars(params)}
        view = rules.VideoView(
            video=params,
            step_range=params.step_range,
            trace_steps=values.get("trace_steps") or (),
            last_block=self.checkpoint.config["num_layers"] - 1,
            num_control_blocks=self.checkpoint.num_control_blocks,
            num_scales=len(params.conditioning_scale or ()),
            has_adapters=params.task.network != Task.network,
        )
        rules.check_rules((*TASK_RULES, *rules.VIDEO_RULES), values, view)
        attention.check_attention_request(self.attention, self.parallel, steps, tokens)
        notices = (*params.task.list_notices(params), *make_schedule_notices(params, steps))
        notices += () if self.policy is None else self.policy.check_params(params)
        heads = self.checkpoint.num_heads
        guidance = params.sample_guide_scale
        return (*notices, *parallel.check_guidance(self.parallel, guidance, heads))

    def check_grouping(self) -> None:
        """Refuses `group_by_expert` where it has no effect or is not possible."""
        values = {**self._settings, "group_by_expert": True}
        rules.check_rules(rules.GROUPING_RULES, values, self._rule_view)
