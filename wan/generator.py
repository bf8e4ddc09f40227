"""Base class of the official Python classes: checkpoint, pipeline and calls of `generate`."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from wan import device as devices
from wan import env
from wan.checkpoint.files import compute_fingerprint
from wan.checkpoint.layout import Checkpoint, check_task, inspect_checkpoint
from wan.configs import WAN_CONFIGS
from wan.distributed import mesh
from wan.distributed.mesh import ParallelGroups
from wan.distributed.rendezvous import RankStatus, find_first_mismatch
from wan.log import logger
from wan.modules.model import WanModel
from wan.pipeline import build, images
from wan.pipeline.batch import Batch, Job
from wan.pipeline.following import (
    count_animate_clips,
    count_s2v_clips,
    count_vace_frames,
    read_animate_inputs,
    read_s2v_inputs,
    read_vace_inputs,
)
from wan.pipeline.pipeline import Inputs
from wan.pipeline.setup import Setup
from wan.run import ask, make_setup
from wan.settings.command import Loras, NetworkFiles
from wan.settings.errors import InputError, name_settings
from wan.settings.execution import OFFLOAD_MODEL, Offload
from wan.settings.fields import build_from_values, list_options
from wan.settings.flags import (
    FLAGS,
    PYTHON_KEYWORDS,
    PYTHON_NAMING,
    is_python_setting,
    read_constructor_settings,
    read_settings,
)
from wan.settings.presets import PRESETS, Preset
from wan.settings.request import VideoParams
from wan.settings.values import choice, format_value, integer, switch

_NETWORKS = {"high_noise_model": "high_noise", "low_noise_model": "low_noise", "model": "dit"}
_IMAGES = ("image", "last_image")
_OPTIONAL = (
    *("base_seed", "audio", "pose_video", "num_clip", "src_root_path"),
    *("src_video", "src_mask"),
)
_PICTURES = "src_ref_images"
_EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds")
T = TypeVar("T")


class DefaultFloat(float):
    """A default of `generate`, distinguishable from the same number passed by the caller."""


class DefaultInt(int):
    """A default like `DefaultFloat`."""


class DefaultStr(str):
    """A default like `DefaultFloat`."""


@dataclass(eq=False, kw_only=True)
class VideoCall(Job):
    """A checked call of `generate`.

    Attributes:
        output_type: "pt" or "latent".
    """

    output_type: str


class Generator:
    """Generates videos with one checkpoint, whose networks determine the task of its kind."""

    kind: str
    generate: Any

    def __init__(
        self,
        config: Any,
        checkpoint_dir: str | Path,
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
            checkpoint_dir: A folder in any layout that --ckpt_dir accepts.
            device_id: Index of the accelerator; no effect on CPUs.
            rank: No effect: the rank comes from the process group.
            t5_fsdp: As --t5_fsdp.
            dit_fsdp: As --dit_fsdp.
            use_sp: Distribute each video over the ranks of torch.distributed, which the caller has
                initialised. `generate` is called on every rank and returns the video on rank 0,
                None on the others (latents on all).
            t5_cpu: As --t5_cpu.
            init_on_cpu: No effect: networks are loaded directly to their device.
            convert_model_dtype: As --convert_model_dtype.
            **settings: Command-line flags, without dashes, for loading and running networks:
                ulysses_size, comm_type, fa_quant, compile, ... None means unset. Environment
                variables that set flags have no effect; unsupported ones are refused.

        Raises:
            InputError: A ValueError: the folder or a setting is invalid.
        """
        with name_settings(PYTHON_NAMING):
            env.refused()
            self.config = _config(config)
            flags = {"t5_fsdp": t5_fsdp, "dit_fsdp": dit_fsdp, "t5_cpu": t5_cpu}
            values = read_constructor_settings(
                {**settings, **flags, "convert_model_dtype": convert_model_dtype}
            )
            if "precision" not in values and self.config.param_dtype == torch.float32:
                values["precision"] = "fp32"
            integer(0, 10**6)("`rank`", rank)  # checked only; it has no effect
            chosen = build_from_values(NetworkFiles, values)
            own = [preset for preset in PRESETS.values() if preset.kind == self.kind]
            checkpoint = _described(checkpoint_dir, chosen, tuple(own))
            checkpoint = _with_files(checkpoint, self.config, chosen)
            sizes = checkpoint.experts.keys(), checkpoint.num_images
            fitting = [one for one in own if ({*one.experts}, one.num_clip_vision_images) == sizes]
            self._preset = (fitting or own[:1])[-1]  # of Wan2.1's t2v networks, the larger one
            check_task(checkpoint, self._preset)
            _warn_of_other_task(self.config, self._preset)
            world = _world(use_sp)
            self._setup, notices = make_setup(values, self._preset, checkpoint, world)
            for notice in notices:
                logger.warning(PYTHON_NAMING.render(notice))
            device = devices.resolve(
                self._setup.execution.device, integer(0, 10**6)("`device_id`", device_id)
            )
            self._setup.check_device(device.can)
            self._team: ParallelGroups | None = None
            if world > 1:
                self._team = mesh.make_parallel_groups(device, self._setup.parallel.mesh_shape)
                self._agreed(lambda: checkpoint, self._model_facts)
            kept = ("noise_device", *list_options(Loras))
            self._values = {name: values[name] for name in kept if name in values}
            t5_dtype = torch.float32 if self.config.t5_dtype == torch.float32 else None
            self._pipeline = build.build_pipeline(
                self._setup, device, self._team, t5_dtype=t5_dtype
            )

    def __getattr__(self, name: str) -> WanModel:
        """Returns the network of an official attribute: low_noise_model, high_noise_model, model.

        The network stays in memory, so that a caller may modify it in place.
        """
        expert = _NETWORKS.get(name)
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
        **shared: Any,
    ) -> Iterator[Tensor | None]:
        """Generates a video for each call, in order, and loads every network only once.

        All calls are checked before this returns. An error ends the iteration.

        Args:
            calls: Prompts, or mappings with arguments of `generate`.
            group_by_expert: As --group_by_expert.
            offload_model: As for `generate`, for all calls.
            **shared: Arguments of all calls; those of a call override them.

        Returns:
            An iterator over the results of `generate`, to be consumed on all ranks.

        Raises:
            InputError: A ValueError: a value is invalid.
        """
        with name_settings(PYTHON_NAMING):
            offload = OFFLOAD_MODEL("`offload_model`", offload_model)
            setup = self._with_offload(offload)
            grouped = switch("`group_by_expert`", group_by_expert)
            if grouped:
                setup.check_grouping()
            if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
                raise InputError("calls", format_value(calls), "is no list of calls", "give a list")
            asked = [self._asked(self._bound(call, shared), setup) for call in calls]
        return self._made(asked, offload, grouped)

    def _generate(self, call: dict[str, Any]) -> Tensor | None:
        """Generates one video from the arguments of `generate`."""
        with name_settings(PYTHON_NAMING):
            offload = OFFLOAD_MODEL("`offload_model`", call["offload_model"])
            asked = self._asked(call, self._with_offload(offload))
        (made,) = self._made([asked], offload, False)
        return made

    def _bound(self, call: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all arguments of `generate`, defaults included, for a call of `generate_many`."""
        if not isinstance(call, str | Mapping):
            raise InputError(
                f"A call is {format_value(call)}; give a prompt, or arguments of generate."
            )
        own = {"input_prompt": call} if isinstance(call, str) else call
        if "offload_model" in own:
            raise InputError("offload_model applies to all calls; give it to generate_many.")
        try:
            bound = inspect.signature(self.generate).bind(**{**shared, **own})
        except TypeError as error:
            raise InputError(f"A call does not fit generate: {error}.") from error
        bound.apply_defaults()
        return self._named(bound.arguments)

    def _named(self, call: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `generate` by the names that are common to all classes."""
        return call

    def _made(
        self, calls: Sequence[VideoCall], offload: Offload, grouped: bool
    ) -> Iterator[Tensor | None]:
        """Yields the video of each call; `generate` may be called between two videos."""
        pipeline = self._pipeline

        def make(call: VideoCall, latents: Callable[[], Tensor]) -> Tensor | None:
            if call.params.has_clips:
                return self._joined(call)
            return latents() if call.output_type == "latent" else pipeline.decode(latents())

        with name_settings(PYTHON_NAMING):
            pipeline.set_offload(offload)
            try:
                yield from Batch(pipeline, calls, group_by_expert=grouped).generate_videos(make)
            except BaseException:
                pipeline.abandon()
                raise

    def _joined(self, call: VideoCall) -> Tensor | None:
        """Generates the clips of a long video and concatenates them along the frames."""
        done = [*self._pipeline.generate_clips(call.params, call.inputs)]
        if call.output_type == "latent":
            return torch.cat([clip.latents for clip in done], dim=1)
        frames = [clip.frames for clip in done if clip.frames is not None]
        return torch.cat(frames, dim=1) if frames else None

    def _asked(self, call: dict[str, Any], setup: Setup) -> VideoCall:
        """Checks that a call is valid and equal on all ranks, and broadcasts the seed of rank 0."""
        asked = self._agreed(lambda: self._checked(call, setup), _facts)
        if self._team is not None:  # a random seed differs between ranks
            seed = self._team.broadcast_object_from_rank0(asked.params.base_seed)
            asked.params = replace(asked.params, base_seed=seed)
        return asked

    def _model_facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns the settings and digests of the model that must be equal on all ranks."""
        setup, loras = self._setup, self._setup.loras.items()
        parts = (setup.attention, setup.parallel, setup.execution, setup.cache)
        facts = {name: str(value) for part in parts for name, value in vars(part).items()}
        facts["ckpt_dir"] = compute_fingerprint(checkpoint.list_files())
        facts["lora"] = str(
            [
                (name, one.strength, compute_fingerprint([one.file]))
                for name, ones in loras
                for one in ones
            ]
        )
        return {f"`{name}`": {"value": value} for name, value in facts.items()}

    def _agreed(self, prepare: Callable[[], T], facts: Callable[[T], dict[str, Any]]) -> T:
        """Returns the result of `prepare`, after comparing it between all ranks.

        Args:
            prepare: Checks the input of this rank; raises InputError for a refusal.
            collect_invariants: Returns the values of a result that must be equal on all ranks.

        Raises:
            InputError: A rank refused its input, or its values differ; raised on all ranks.
        """
        if self._team is None:
            return prepare()
        own = RankStatus(self._team.rank, socket.gethostname())
        made: T | None = None
        refusal: InputError | None = None
        try:
            made = prepare()
            own = replace(own, invariants=facts(made))
        except InputError as error:
            refusal, own = error, replace(own, error=str(error))
        difference = find_first_mismatch(self._team.gather(own))
        if refusal is not None or made is None:
            raise refusal or InputError(difference or "")
        if difference is not None:
            raise InputError(difference)
        return made

    def _checked(self, call: dict[str, Any], setup: Setup) -> VideoCall:
        if self._preset.kind in ("i2v", "s2v") and call["img"] is None:
            name = "img" if self._preset.kind == "i2v" else "ref_image_path"
            raise InputError(f"{type(self).__name__} starts from an image; give one as {name}.")
        request, given = self._request(call, setup)
        prompt, negative = (_embedding(name, call[name]) for name in _EMBEDDINGS)
        output_type = choice("pt", "latent")("`output_type`", call["output_type"])
        end = _motion(call.get("motion_latent"), request)
        if request.clip_prompts and (prompt is not None or negative is not None):
            why = "do not go with `clip_prompts`"
            raise InputError("Embeddings", None, why, "give the texts of all clips")
        inputs = replace(
            given, prompt_embeds=prompt, negative_prompt_embeds=negative, clip_state=end
        )
        return VideoCall("A call", request, inputs, output_type=output_type)

    def _with_offload(self, offload: Offload) -> Setup:
        """Returns the setup with a call's `offload_model`, checked for the device."""
        execution = replace(self._setup.execution, offload_model=offload)
        setup = replace(self._setup, execution=execution)
        setup.check_device(self._pipeline.device.can)
        return setup

    def _request(self, call: dict[str, Any], setup: Setup) -> tuple[VideoParams, Inputs]:
        """Returns a call's parameters and inputs."""
        unknown = [name for name in call["settings"] if not is_python_setting(name, "video")]
        if unknown:
            raise InputError(f"{unknown[0]} is not a known keyword of generate; remove it.")
        twins = [name for name in call["settings"] if PYTHON_KEYWORDS.get(name) in call]
        if twins:
            raise InputError(
                f"{twins[0]} is called {PYTHON_KEYWORDS[twins[0]]} here; use that keyword."
            )
        if "image" in call["settings"]:
            raise InputError("image has no effect on a text-to-video model; remove it.")
        flags = {keyword: flag for flag, keyword in PYTHON_KEYWORDS.items()}
        named = {
            flags.get(name, name): value for name, value in {**call, **call["settings"]}.items()
        }
        image, last = (
            None if named.get(name) is None else images.convert_to_image(named[name], name)
            for name in _IMAGES
        )
        pictures = _pictures(named.get(_PICTURES))
        absent = {
            *_IMAGES,
            _PICTURES,
            *(n for n in (*_OPTIONAL, *call["settings"]) if named.get(n) is None),
        }
        given = {n: named[n] for n in named if is_python_setting(n, "video") and n not in absent}
        values = self._values | read_settings(given)
        values["negative_prompt"] = values.get("negative_prompt") or self.config.sample_neg_prompt
        if image is not None and call.get("max_area") is not None:
            values["max_area"] = integer(1, 10**12)("`max_area`", call["max_area"])
        # A recipe overrides the defaults of `generate`; Wan2.1's image models have presets.
        absent = {
            n for n in values if isinstance(named.get(n), DefaultFloat | DefaultInt | DefaultStr)
        }
        below = (
            {} if self._preset.num_clip_vision_images else {name: values[name] for name in absent}
        )
        values = {name: value for name, value in values.items() if name not in absent}
        size = None if image is None else image.size
        values["last_image"] = last
        inputs = Inputs(image, last)
        if self._preset.kind == "s2v":
            sound, pose = read_s2v_inputs(values, self._preset)
            values |= count_s2v_clips(values, self._preset, sound)
            inputs = replace(inputs, audio=sound, pose=pose)
        if self._preset.kind == "animate":
            moving = read_animate_inputs(values, self._preset)
            values |= count_animate_clips(values, self._preset, moving, below)
            inputs = replace(inputs, animate=moving)
        if self._preset.kind == "vace":
            sources = read_vace_inputs(values | {_PICTURES: pictures}, self._preset)
            values |= count_vace_frames(values, self._preset, sources, below)
            inputs = replace(inputs, vace=sources)
            size = None if sources is None else sources.size
        boundary = {"boundary": self.config.get("boundary")}
        edited = boundary["boundary"] not in (None, self._preset.boundary)
        values, below = (values | boundary, below) if edited else (values, below | boundary)
        request, notices = ask(setup, values, size, below)
        for notice in notices:
            logger.warning(PYTHON_NAMING.render(notice))
        return request, inputs


def _facts(call: VideoCall) -> dict[str, Any]:
    """Returns the values of a call that must be equal on all ranks."""
    facts: dict[str, Any] = {name: str(value) for name, value in vars(call.params).items()}
    del facts["base_seed"]  # broadcast from rank 0 later
    facts |= call.inputs.compute_digests() | {"output_type": call.output_type}
    return {f"`{name}`": {"value": value} for name, value in facts.items()}


def _config(config: Any) -> Any:
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


def _warn_of_other_task(config: Any, preset: Preset) -> None:
    """Logs a warning if the folder has another number of networks than the config's task."""
    named = str(getattr(config, "__name__", "")).rpartition(" ")[2]
    if named in PRESETS and len(PRESETS[named].experts) != len(preset.experts):
        held = "two experts" if len(preset.experts) == 2 else "one network"
        logger.warning(
            "The checkpoint holds %s: it runs as %s, not as %s.", held, preset.task, named
        )


def _described(folder: Any, chosen: NetworkFiles, presets: tuple[Preset, ...]) -> Checkpoint:
    if not isinstance(folder, str | Path):
        raise InputError("`ckpt_dir`", format_value(folder), "must be the folder of a checkpoint")
    return inspect_checkpoint(Path(os.path.expanduser(folder)), chosen, presets)


def _with_files(checkpoint: Checkpoint, config: Any, chosen: NetworkFiles) -> Checkpoint:
    """Returns the checkpoint with the files that the config names, if the folder has them.

    Files given explicitly (`vae`, `text_encoder`, `tokenizer`) are not replaced.
    """
    assert checkpoint.folder is not None
    named = {
        "vae": checkpoint.folder / config.vae_checkpoint,
        "text_encoder": checkpoint.folder / config.t5_checkpoint,
        "tokenizer": checkpoint.folder / config.t5_tokenizer,
    }
    named = {part: path for part, path in named.items() if not getattr(chosen, part, None)}
    return replace(checkpoint, **{part: path for part, path in named.items() if path.exists()})


def _world(use_sp: bool) -> int:
    world = mesh.get_num_ranks() if use_sp else 1
    if use_sp and world == 1:
        raise InputError(
            "use_sp distributes a video over ranks, but torch.distributed is not initialised for "
            "several; start with torchrun and call init_process_group first."
        )
    return world


def _pictures(value: Any) -> tuple[Any, ...]:
    """Returns the reference images of VACE from one image, a list of images, or paths."""
    if value is None:
        return ()
    several = [*value] if isinstance(value, list | tuple) else [value]
    if all(isinstance(one, str | Path) for one in several):
        return FLAGS[_PICTURES].reader(f"`{_PICTURES}`", several) if several else ()
    return tuple(several)


def _motion(value: Any, request: VideoParams) -> Tensor | None:
    if value is None:
        return None
    if request.chain != "latent":
        raise InputError("motion_latent", None, "is of `chain=latent`", "add that, or drop it")
    channels, _, *sides = request.latent_shape
    shape = (channels, 1, *sides)
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        given = list(value.shape) if isinstance(value, Tensor) else format_value(value)
        raise InputError("motion_latent", given, f"must be floats of shape {list(shape)}")
    return value.float()


def _embedding(name: str, value: Any) -> Tensor | None:
    if value is None or (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    raise InputError(f"{name} must be a floating-point tensor [length, channels].")
