"""Base class of the official Python classes: checkpoint, pipeline and calls of `generate`."""

from __future__ import annotations

import inspect
import socket
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from wan import device as devices
from wan.app.call_arguments import Arguments, bind_arguments
from wan.app.notices import make_demo_size_notices
from wan.app.resolve import make_setup, resolve_params
from wan.app.video import Video
from wan.checkpoint.formats.headers import compute_fingerprint
from wan.checkpoint.layout import Checkpoint, check_task, inspect_checkpoint
from wan.configs import WAN_CONFIGS
from wan.distributed import mesh
from wan.distributed.mesh import ParallelGroups
from wan.distributed.rendezvous import RankStatus, find_first_mismatch
from wan.modules.model import WanModel
from wan.pipeline import build, clips
from wan.pipeline.batch import Batch, Job
from wan.pipeline.setup import Setup
from wan.settings.command import Loras, NetworkFiles
from wan.settings.errors import InputError, name_settings
from wan.settings.execution import OFFLOAD_MODEL, Offload
from wan.settings.fields import list_options
from wan.settings.flags import PYTHON_NAMING
from wan.settings.layers import Layer, merge, read_constructor
from wan.settings.presets import PRESETS, TASKS_OF_KIND, Preset
from wan.settings.run_options import read_run_options
from wan.settings.values import choice, expand_home, format_value, integer, switch
from wan.tasks.base import Inputs, StepCallback, VideoParams, get_task
from wan.tasks.needed_inputs import check_needed_inputs
from wan.utils import env
from wan.utils.files import check_link
from wan.utils.log import logger, show_progress

_EXPERT_OF_ATTRIBUTE = {
    "high_noise_model": "high_noise",
    "low_noise_model": "low_noise",
    "model": "dit",
}
_EMBEDDING_KEYWORDS = ("prompt_embeds", "negative_prompt_embeds")
T = TypeVar("T")


Result = Video | Any
"""What `generate` returns: a video, latents, or None on ranks other than 0.

It is not `Video | None`, so that type checkers do not require a check for None on one rank.
"""
GuideScale = float | tuple[float, float]
Function = TypeVar("Function", bound=Callable[..., Any])


def video_call(signature: Function) -> Function:
    """Makes the method `generate` of a documented signature, whose own body is not run."""
    bind = inspect.signature(signature).bind

    @wraps(signature)
    def generate(self: Generator, *args: Any, **kwargs: Any) -> Result:
        arguments = bind(self, *args, **kwargs).arguments
        del arguments["self"]
        arguments |= arguments.pop("settings", {})
        return self._generate_video(arguments)

    return cast(Function, generate)


@dataclass(eq=False, kw_only=True)
class VideoCall(Job):
    """A checked call of `generate`.

    Attributes:
        output_type: "pt" or "latent".
    """

    output_type: str


class Generator:
    """Generates videos with one checkpoint.

    The networks of the checkpoint select the task of the subclass's kind.

    Attributes:
        kind: Kind of task.
        default_prompt: Used where the prompt is empty.
        flag_names: Argument of `generate` -> flag, where only this class has the name.
    """

    kind: str
    default_prompt: ClassVar[str] = ""
    flag_names: ClassVar[Mapping[str, str]] = {}
    generate: Any

    def __init__(
        self,
        config: Any,
        checkpoint_dir: str | Path | None = None,
        device_id: int = 0,
        rank: int = 0,
        t5_fsdp: bool = False,
        dit_fsdp: bool = False,
        use_sp: bool = False,
        t5_cpu: bool = False,
        init_on_cpu: bool = True,
        convert_model_dtype: bool = False,
        **settings: Any,
    ) -> None:
        """Reads the checkpoint's headers and builds the pipeline; loads no weights.

        Args:
            config: An entry of WAN_CONFIGS, edited or not, or its name. boundary,
                sample_neg_prompt, file names (t5_checkpoint, t5_tokenizer, vae_checkpoint) and
                float32 as t5_dtype or param_dtype are used; the networks' sizes come from the
                checkpoint.
            checkpoint_dir: A folder in any layout that --ckpt_dir accepts; needed.
            device_id: Index of the accelerator; no effect on CPUs.
            rank: No effect: the rank comes from the process group.
            t5_fsdp: As --t5_fsdp.
            dit_fsdp: As --dit_fsdp.
            use_sp: Distribute each video over the ranks of torch.distributed, which the caller has
                initialized. `generate` is called on every rank and returns the video on rank 0,
                None on the others (latents on all).
            t5_cpu: As --t5_cpu.
            init_on_cpu: No effect: networks are loaded directly to their device.
            convert_model_dtype: As --convert_model_dtype.
            **settings: Command-line flags, without dashes, for loading and running networks:
                ulysses_size, comm_type, fa_quant, compile, ... None means unset. Environment
                variables that set flags have no effect; unsupported ones are refused.

        Raises:
            InputError (a ValueError): The folder or a setting is invalid.
        """
        with name_settings(PYTHON_NAMING):
            env.check_environment()
            self.config = _find_config(config)
            flags = {"t5_fsdp": t5_fsdp, "dit_fsdp": dit_fsdp, "t5_cpu": t5_cpu}
            flags["convert_model_dtype"] = convert_model_dtype
            layer = read_constructor({**settings, **flags}, PYTHON_NAMING)
            if "precision" not in layer and self.config.param_dtype == torch.float32:
                layer = layer.with_values({"precision": "fp32"})
            integer(0, 10**6)("`rank`", rank)  # checked only; it has no effect
            options = read_run_options(merge(layer))
            presets = [PRESETS[name] for name in TASKS_OF_KIND[self.kind]]
            checkpoint = _inspect_checkpoint_dir(checkpoint_dir, options.files, tuple(presets))
            checkpoint = _apply_config_files(checkpoint, self.config, options.files)
            in_dim, num_images = checkpoint.config["in_dim"], checkpoint.num_clip_vision_images
            structure = checkpoint.experts.keys(), num_images, in_dim
            matching = [x for x in presets if _get_structure(x) == structure]
            self._preset = (matching or presets[:1])[-1]  # of Wan2.1's t2v networks, the larger one
            check_task(checkpoint, self._preset)
            _warn_of_other_task(self.config, self._preset)
            world_size = _find_world_size(use_sp)
            self._setup, notices = make_setup(options, self._preset, checkpoint, world_size)
            for notice in notices:
                logger.warning(PYTHON_NAMING.render(notice))
            device = devices.select_device(
                self._setup.execution.device, integer(0, 10**6)("`device_id`", device_id)
            )
            self._setup.check_device(device.capabilities)
            self._groups: ParallelGroups | None = None
            if world_size > 1:
                self._groups = mesh.make_parallel_groups(device, self._setup.parallel.mesh_shape)
                self._agree_on(lambda: checkpoint, self._collect_model_invariants)
            self._constructor = layer.select(("noise_device", *list_options(Loras)))
            t5_dtype = torch.float32 if self.config.t5_dtype == torch.float32 else None
            self._pipeline = build.build_pipeline(
                self._setup, device, self._groups, t5_dtype=t5_dtype
            )

    def __repr__(self) -> str:
        setup = self._setup
        return (
            f"<{type(self).__name__} {self._preset.task}: {setup.checkpoint.folder}, "
            f"{self._pipeline.device.name()}, kernel {self._pipeline.kernel_name}, "
            f"world_size {setup.parallel.world_size}, precision {setup.execution.precision}, "
            f"comm_type {setup.parallel.comm_type}, offload_model {setup.execution.offload_model}>"
        )

    def __getattr__(self, name: str) -> WanModel:
        """Returns the network of an official attribute: low_noise_model, high_noise_model, model.

        The network stays in memory, so that a caller may modify it in place.
        """
        expert = _EXPERT_OF_ATTRIBUTE.get(name)
        if expert is None or expert not in self._setup.checkpoint.experts:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._pipeline.experts.load_editable(expert)

    @property
    def step_cache(self) -> dict[str, Any] | None:
        """The step cache's entry of the last video's record; None without a policy.

        {"policy": ..., "computed": {"cond": [...], "uncond": [...]}} lists the computed steps of
        each branch.
        """
        return self._pipeline.step_cache.make_record()

    def generate_many(
        self,
        calls: Iterable[str | Mapping[str, Any]],
        *,
        group_by_expert: bool = False,
        offload_model: Offload = True,
        progress: bool = True,
        **shared: Any,
    ) -> Iterator[Result]:
        """Generates a video for each call, in order, and loads every network only once.

        All calls are checked before this returns. An error ends the iteration.

        Args:
            calls: Prompts, or mappings with arguments of `generate`.
            group_by_expert: As --group_by_expert.
            offload_model: As for `generate`, for all calls.
            progress: As for `generate`, for all calls.
            **shared: Arguments of all calls; those of a call override them.

        Returns:
            An iterator over the results of `generate`, to be consumed on all ranks.

        Raises:
            InputError (a ValueError): A value is invalid.
        """
        with name_settings(PYTHON_NAMING):
            offload = OFFLOAD_MODEL("`offload_model`", offload_model)
            setup = self._make_call_setup(offload)
            is_grouped = switch("`group_by_expert`", group_by_expert)
            has_bars = switch("`progress`", progress)
            if is_grouped:
                setup.check_grouping()
            if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
                raise InputError("calls", format_value(calls), "is no list of calls", "give a list")
            video_calls = [
                self._prepare_call(self._bind_arguments(call, shared), setup) for call in calls
            ]
        return self._generate_videos(video_calls, offload, is_grouped, has_bars)

    def _generate_video(self, arguments: Mapping[str, Any]) -> Result:
        """Generates one video from the arguments of `generate`."""
        with name_settings(PYTHON_NAMING):
            call = bind_arguments(self.generate, arguments, {}, self.flag_names)
            offload = OFFLOAD_MODEL("`offload_model`", call.get("offload_model"))
            has_bars = switch("`progress`", call.get("progress"))
            video_call = self._prepare_call(call, self._make_call_setup(offload))
        (video,) = self._generate_videos([video_call], offload, False, has_bars)
        return video

    def _bind_arguments(self, call: Any, shared: Mapping[str, Any]) -> Arguments:
        """Returns the arguments of a call of `generate_many`."""
        if not isinstance(call, str | Mapping):
            raise InputError(
                f"A call is {format_value(call)}; give a prompt, or arguments of generate."
            )
        arguments = {"input_prompt": call} if isinstance(call, str) else dict(call)
        for name in ("offload_model", "progress"):
            if name in arguments:
                raise InputError(f"{name} applies to all calls; give it to generate_many.")
        try:
            inspect.signature(self.generate).bind(**{**shared, **arguments})
        except TypeError as error:
            raise InputError(f"A call does not fit generate: {error}.") from error
        return bind_arguments(self.generate, arguments, shared, self.flag_names)

    def _check_arguments(self, call: Arguments) -> None:
        """Refuses arguments of this class without a meaning here."""

    def _generate_videos(
        self, calls: Sequence[VideoCall], offload: Offload, is_grouped: bool, has_bars: bool
    ) -> Iterator[Result]:
        """Yields the video of each call; `generate` may be called between two videos.

        The caller's context is not changed between two videos.
        """
        context = copy_context()
        videos = self._generate_in_context(calls, offload, is_grouped, has_bars)
        try:
            with suppress(StopIteration):
                while True:
                    yield context.run(next, videos)
        finally:
            context.run(videos.close)

    def _generate_in_context(
        self, calls: Sequence[VideoCall], offload: Offload, is_grouped: bool, has_bars: bool
    ) -> abc.Generator[Result, None, None]:
        pipeline = self._pipeline

        def make_output(call: VideoCall, get_latents: Callable[[], Tensor]) -> Tensor | None:
            if call.output_type == "latent" and not call.params.has_clips:
                return get_latents()
            has_clips = call.params.has_clips
            video = self._generate_long_video(call) if has_clips else pipeline.decode(get_latents())
            if video is None or call.output_type == "latent":
                return video
            return Video.from_tensor(video, self.config.sample_fps)

        with name_settings(PYTHON_NAMING), show_progress(has_bars and pipeline.is_main):
            pipeline.set_offload(offload)
            try:
                yield from Batch(pipeline, calls, group_by_expert=is_grouped).generate_videos(
                    make_output
                )
            except BaseException:
                pipeline.release_all()
                raise

    def _generate_long_video(self, call: VideoCall) -> Tensor | None:
        """Generates the clips of a long video and concatenates them along the frames."""
        video_clips = [*clips.generate_clips(self._pipeline, call.params, call.inputs)]
        if call.output_type == "latent":
            return torch.cat([clip.latents for clip in video_clips], dim=1)
        frames = [clip.frames for clip in video_clips if clip.frames is not None]
        return torch.cat(frames, dim=1) if frames else None

    def _prepare_call(self, call: Arguments, setup: Setup) -> VideoCall:
        """Checks that a call is valid and equal on all ranks, and broadcasts the seed of rank 0."""
        video_call = self._agree_on(
            lambda: self._make_video_call(call, setup), _collect_call_invariants
        )
        if self._groups is not None:  # a random seed differs between ranks
            seed = self._groups.broadcast_object_from_rank0(video_call.params.base_seed)
            video_call.params = replace(video_call.params, base_seed=seed)
        return video_call

    def _collect_model_invariants(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns the settings and digests of the model that must be equal on all ranks."""
        setup, loras = self._setup, self._setup.loras.items()
        settings_parts = (setup.attention, setup.parallel, setup.execution, setup.cache)
        invariants = {
            name: str(value) for part in settings_parts for name, value in vars(part).items()
        }
        invariants["ckpt_dir"] = compute_fingerprint(checkpoint.list_files())
        invariants["lora"] = str(
            [
                (name, lora_file.strength, compute_fingerprint([lora_file.path]))
                for name, lora_files in loras
                for lora_file in lora_files
            ]
        )
        return {f"`{name}`": {"value": value} for name, value in invariants.items()}

    def _agree_on(
        self, prepare: Callable[[], T], collect_invariants: Callable[[T], dict[str, Any]]
    ) -> T:
        """Returns the result of `prepare`, after comparing it between all ranks.

        Args:
            prepare: Checks the input of this rank; raises InputError for a refusal.
            collect_invariants: Returns the values of a result that must be equal on all ranks.

        Raises:
            InputError: A rank refused its input, or its values differ; raised on all ranks.
        """
        if self._groups is None:
            return prepare()
        report = RankStatus(self._groups.rank, socket.gethostname())
        result: T | None = None
        refusal: InputError | None = None
        try:
            result = prepare()
            report = replace(report, invariants=collect_invariants(result))
        except InputError as error:
            refusal, report = error, replace(report, error=str(error))
        mismatch = find_first_mismatch(self._groups.gather(report))
        if refusal is not None or result is None:
            raise refusal or InputError(mismatch or "")
        if mismatch is not None:
            raise InputError(mismatch)
        return result

    def _make_video_call(self, call: Arguments, setup: Setup) -> VideoCall:
        """Checks the arguments of a call, and reads its images, audio and other inputs."""
        self._check_arguments(call)
        embeds, negative_embeds = (
            _check_prompt_embeds(name, call.get(name)) for name in _EMBEDDING_KEYWORDS
        )
        has_embeds = embeds is not None or negative_embeds is not None
        if has_embeds and call.get("clip_prompts") is not None:
            why = "cannot be combined with `clip_prompts`"
            raise InputError("Embeddings", None, why, "give prompts instead")
        params, base_inputs = self._make_call_params(call, setup)
        output_type = choice("pt", "latent")("`output_type`", call.get("output_type"))
        motion_latent = _check_motion_latent(call.get("motion_latent"), params)
        inputs = replace(
            base_inputs,
            prompt_embeds=embeds,
            negative_prompt_embeds=negative_embeds,
            clip_state=motion_latent,  # the first clip continues from it
            callback_on_step_end=_check_callback(call.get("callback_on_step_end")),
        )
        return VideoCall("A call", params, inputs, output_type=output_type)

    def _make_call_setup(self, offload: Offload) -> Setup:
        """Returns the setup with a call's `offload_model`, checked for the device."""
        execution = replace(self._setup.execution, offload_model=offload)
        setup = replace(self._setup, execution=execution)
        setup.check_device(self._pipeline.device.capabilities)
        return setup

    def _make_call_params(self, call: Arguments, setup: Setup) -> tuple[VideoParams, Inputs]:
        """Reads a call's inputs, resolves its parameters, and logs notices about them."""
        layers, defaults = call.read_layers()
        texts = {"prompt": self.default_prompt, "negative_prompt": self.config.sample_neg_prompt}
        config = Layer("the config", PYTHON_NAMING, texts)
        settings = merge(*layers, self._constructor, config)
        if "image" not in settings:
            settings = settings.drop(["max_area"])
        if self._preset.num_clip_vision_images:  # the defaults are those of the preset
            defaults = defaults.select(())
        task = get_task(self._preset.kind)
        check_needed_inputs(self._preset, settings)
        inputs = task.read_inputs(self._preset, settings)
        completed = task.complete_settings(self._preset, settings, inputs, defaults.values)
        boundary = self.config.get("boundary")
        if boundary in (None, self._preset.boundary):
            defaults = defaults.with_values({"boundary": boundary})
        else:  # the caller has edited the config
            completed["boundary"] = boundary
        settings = settings.add_above(Layer("the inputs", PYTHON_NAMING, completed))
        video = resolve_params(setup, settings, inputs.source_size, defaults)
        params = video.params
        for notice in (*video.notices, *make_demo_size_notices(params, setup.checkpoint.folder)):
            logger.warning(PYTHON_NAMING.render(notice))
        return params, inputs


def _collect_call_invariants(call: VideoCall) -> dict[str, Any]:
    """Returns the values of a call that must be equal on all ranks."""
    invariants: dict[str, Any] = {name: str(value) for name, value in vars(call.params).items()}
    del invariants["base_seed"]  # broadcast from rank 0 later
    invariants |= call.inputs.compute_digests() | {"output_type": call.output_type}
    return {f"`{name}`": {"value": value} for name, value in invariants.items()}


def _find_config(config: Any) -> Any:
    """Returns an entry of WAN_CONFIGS by its name, or a given config after a check."""
    if isinstance(config, str):
        if config not in WAN_CONFIGS:
            raise InputError(
                f"config is {format_value(config)}; names are {', '.join(WAN_CONFIGS)}."
            )
        return WAN_CONFIGS[config]
    if not hasattr(config, "sample_neg_prompt"):
        raise InputError(
            f"config is {format_value(config)}; give an entry of WAN_CONFIGS, or its name "
            f"({', '.join(WAN_CONFIGS)})."
        )
    return config


def _get_structure(preset: Preset) -> tuple[set[str], int, int]:
    """Returns the experts, the images that CLIP encodes, and the input channels of a task."""
    return {*preset.experts}, preset.num_clip_vision_images, preset.in_dim


def _warn_of_other_task(config: Any, preset: Preset) -> None:
    """Logs a warning if the folder's number of networks differs from that of the config's task."""
    task = str(getattr(config, "__name__", "")).rpartition(" ")[2]
    if task in PRESETS and len(PRESETS[task].experts) != len(preset.experts):
        networks = "two experts" if len(preset.experts) == 2 else "one network"
        logger.warning(
            "The checkpoint holds %s: it runs as %s, not as %s.", networks, preset.task, task
        )


def _inspect_checkpoint_dir(
    folder: Any, network_files: NetworkFiles, presets: tuple[Preset, ...]
) -> Checkpoint:
    if folder is None:
        raise InputError("`ckpt_dir`", None, "is missing", "give the folder of a checkpoint")
    if not isinstance(folder, str | Path):
        raise InputError("`ckpt_dir`", format_value(folder), "must be the folder of a checkpoint")
    return inspect_checkpoint(expand_home("`ckpt_dir`", str(folder)), network_files, presets)


def _apply_config_files(
    checkpoint: Checkpoint, config: Any, network_files: NetworkFiles
) -> Checkpoint:
    """Returns the checkpoint with the files that the config names, if the folder has them.

    Files given explicitly (`vae`, `text_encoder`, `tokenizer`) are not replaced.
    """
    assert checkpoint.folder is not None
    paths = {
        "vae": checkpoint.folder / config.vae_checkpoint,
        "text_encoder": checkpoint.folder / config.t5_checkpoint,
        "tokenizer": checkpoint.folder / config.t5_tokenizer,
    }
    paths = {name: path for name, path in paths.items() if not getattr(network_files, name, None)}
    for path in paths.values():
        check_link(path)
    return replace(checkpoint, **{name: path for name, path in paths.items() if path.exists()})


def _find_world_size(use_sp: bool) -> int:
    world_size = mesh.get_num_ranks() if use_sp else 1
    if use_sp and world_size == 1:
        raise InputError(
            "use_sp distributes a video over ranks, but torch.distributed is not initialized for "
            "several; start with torchrun and call init_process_group first."
        )
    return world_size


def _check_motion_latent(value: Any, params: VideoParams) -> Tensor | None:
    """Checks the latent frame from which the first clip continues; returns it in float32."""
    if value is None:
        return None
    if params.chain != "latent":
        why = "has an effect only with `chain=latent`"
        raise InputError("motion_latent", None, why, "add that, or drop it")
    channels, _, *sides = params.latent_shape
    shape = (channels, 1, *sides)
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        actual_shape = list(value.shape) if isinstance(value, Tensor) else format_value(value)
        raise InputError("motion_latent", actual_shape, f"must be floats of shape {list(shape)}")
    return value.float()


def _check_callback(value: Any) -> StepCallback | None:
    if value is None or callable(value):
        return value
    remedy = "give a function of the steps that are done and the latents"
    raise InputError("callback_on_step_end", format_value(value), "is no function", remedy)


def _check_prompt_embeds(name: str, value: Any) -> Tensor | None:
    """Checks that prompt embeddings are a floating-point tensor, and returns them."""
    if value is None or (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    raise InputError(f"{name} must be a floating-point tensor [length, channels].")
