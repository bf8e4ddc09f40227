"""Resolves settings to a run, for the command line, `--plan` and the Python classes.

All settings are checked here, before torch is imported and before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.app.run import INPUT_FILE_SETTINGS, PATH_SETTINGS, InputFile, Run
from wan.cache import policy
from wan.checkpoint import lora, w8a8_export
from wan.checkpoint.headers import compute_file_digest, read_json
from wan.checkpoint.layout import (
    Checkpoint,
    check_task,
    inspect_checkpoint,
    make_reference_checkpoint,
)
from wan.media.video_writer import check_latents_shape, read_latents_shape
from wan.pipeline.setup import Setup
from wan.settings import parallel, recipes, step_cache
from wan.settings.attention import Attention
from wan.settings.command import Loras, NetworkFiles, Output, PlanOptions, PromptExtension
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import build_from_values, list_options
from wan.settings.flags import FLAGS, read_settings
from wan.settings.parallel import SIZE_FLAGS, Parallel
from wan.settings.presets import PRESETS, TASK_ALIASES, Preset
from wan.settings.rules import Values
from wan.settings.step_cache import StepCache
from wan.tasks.base import NO_INPUTS, Inputs, VideoParams, get_task, make_video_params
from wan.utils import env

if TYPE_CHECKING:
    pass

MAX_RANKS = 4096  # limit of --plan
_DEMO_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained checkpoints
InspectFolder = Callable[[Path, NetworkFiles, tuple[Preset, ...]], Checkpoint]
"""Reads the description of a checkpoint folder."""


def resolve_run(
    values: Values,
    make_demo: Callable[[str, Path], None],
    plan: bool = False,
    inspect_folder: InspectFolder = inspect_checkpoint,
    require_inputs: bool = True,
) -> Run:
    """Resolves settings to a run and checks them.

    Args:
        values: The settings. Missing ones come from the checkpoint's generation_config.json and
            the task's preset.
        make_demo: make_demo(task, folder) writes a randomly initialized checkpoint. It is called
            only if no checkpoint is given and the demo checkpoint does not exist yet.
        plan: Only plan the run: its ranks need not exist, nothing is written, and without a
            checkpoint the published sizes of the task are used.
        inspect_folder: Identifies the networks of a folder; may cache them for many runs.
        require_inputs: Refuse a run without an image, audio or poses that its task needs.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    task: str = values.get("task", "t2v-A14B")
    preset = PRESETS[TASK_ALIASES.get(task, task)]
    world_size, decodes_only = env.world_size(), "decode_latents" in values
    if plan and world_size == 1:
        world_size = prod(values.get(name) or 1 for name in SIZE_FLAGS)
        if world_size > MAX_RANKS:
            remedy = f"give at most {MAX_RANKS}"
            raise InputError(f"The sizes make {world_size} ranks", remedy=remedy)
    task_room = get_task(preset.kind)
    inputs = NO_INPUTS
    if not decodes_only:
        inputs = task_room.read_inputs(preset, values, required=require_inputs and not plan)
    size = inputs.source_size
    network_files = build_from_values(NetworkFiles, values)
    folder, is_demo = _find_checkpoint_folder(values, preset, network_files)
    candidates = tuple(PRESETS[name] for name in (task, TASK_ALIASES.get(task)) if name in PRESETS)
    if is_demo and (plan or not folder.is_dir()):
        checkpoint = make_reference_checkpoint(preset)
        if not plan:  # refuse before the checkpoint is written
            _make_setup_and_params(values, {}, preset, checkpoint, world_size, size)
            make_demo(preset.task, folder)
            checkpoint = inspect_folder(folder, network_files, candidates)
    else:
        checkpoint = inspect_folder(folder, network_files, candidates)
    if task in TASK_ALIASES and checkpoint.experts.keys() == {"dit"}:
        has_two_images = task == "i2v-14B" and checkpoint.num_clip_vision_images == 2
        preset = PRESETS["flf2v-14B" if has_two_images else task]
    check_task(checkpoint, preset)
    defaults = {} if checkpoint.folder is None else read_generation_config(checkpoint.folder)
    if not decodes_only:
        values = {**values, **task_room.complete_settings(preset, values, inputs, defaults)}
    setup, params, notices = _make_setup_and_params(
        values, defaults, preset, checkpoint, world_size, size
    )
    check_latents_shape(values.get("fixed_latents"), params.latent_shape)
    if not plan:
        components: tuple[str, ...] = ("vae",)
        if not decodes_only:
            components = ("vae", "text_encoder", "tokenizer", *inputs.components)
        if not decodes_only and preset.num_clip_vision_images:
            components = (*components, "image_encoder")
        for component in components:
            checkpoint.require(component)
    output_defaults = {
        "save_file": Path(make_video_file_name(task, params)),
        "fps": task_room.choose_fps(params, inputs, defaults),
    }
    output = build_from_values(Output, {**output_defaults, **values})
    demo_folder = folder if is_demo and not plan else None
    settings = {**values, "task": task, "ckpt_dir": folder}
    extends_prompt = values.get("use_prompt_extend")
    return Run(
        setup=setup,
        params=params,
        output=output,
        inputs=inputs,
        input_files=() if plan else _list_input_files(values, inputs),
        prompt_extension=build_from_values(PromptExtension, values) if extends_prompt else None,
        decode_latents=values.get("decode_latents"),
        fixed_latents=values.get("fixed_latents"),
        plan_options=build_from_values(PlanOptions, values),
        device_memory=int(values["device_memory"] * 1e9) if "device_memory" in values else None,
        power=values.get("power", False),
        settings=_record_settings(settings, setup, params, output),
        notices=(*_make_run_notices(params, output, demo_folder, defaults), *notices),
    )


def _list_input_files(values: Values, inputs: Inputs) -> tuple[InputFile, ...]:
    """Lists the input files of a video with the digests of their contents."""
    input_files: list[InputFile] = []
    for name in ("decode_latents",) if "decode_latents" in values else INPUT_FILE_SETTINGS:
        paths = values.get(name, ())
        paths = [paths] if isinstance(paths, Path) else [Path(path) for path in paths]
        if any(path.is_dir() for path in paths):  # the files in it
            paths = [*inputs.files]
        input_files += [InputFile(name, path, compute_file_digest(path)) for path in paths]
    return tuple(input_files)


def _make_setup_and_params(
    values: Values,
    defaults: Values,
    preset: Preset,
    checkpoint: Checkpoint,
    world_size: int,
    image_size: tuple[int, int] | None,
) -> tuple[Setup, VideoParams, tuple[str, ...]]:
    """Returns the pipeline's setup, the parameters of the video, and notices."""
    if "decode_latents" not in values:
        setup, notices = make_setup(values, preset, checkpoint, world_size)
        params, param_notices = make_params(setup, values, image_size, defaults)
        return setup, params, (*notices, *param_notices)
    groups = map(list_options, (Loras, Attention, Parallel, StepCache))
    excluded = {"quant_dit_path"}.union(*groups)  # settings of denoising
    values = {name: value for name, value in values.items() if name not in excluded}
    path = values["decode_latents"]
    channels, frames, height, width = read_latents_shape(path)
    if channels != preset.latent_channels:
        why = f"and the {preset.vae} VAE of this task decodes {preset.latent_channels}"
        remedy = "give the `ckpt_dir` that the latents were made with"
        raise InputError(f"{path} has {channels} channels", None, why, remedy)
    t, h, w = preset.vae_stride
    stored_sizes = {"frame_num": (frames - 1) * t + 1, "size": (width * w, height * h)}
    has_image = "image" in values or "src_video" in values  # its aspect ratio wins
    for name in stored_sizes.keys() & values.keys():
        if values[name] != stored_sizes[name] and not (name == "size" and has_image):
            why = f"holds latents whose {name} is {stored_sizes[name]}, and its settings say "
            why, remedy = f"{why}{values[name]}", "use the unmodified file"
            raise InputError(str(path), None, why, remedy)
    values = stored_sizes | values
    if world_size > 1 and not values.get("vae_parallel"):
        why = f"runs on one process, but {world_size} were started"
        remedy = "start it without torchrun, or add `vae_parallel`"
        raise InputError("`decode_latents`", None, why, remedy)
    setup, _ = make_setup(values, preset, checkpoint, world_size)  # the notices are about the DiT
    params = make_video_params(preset, recipes.merge_defaults(values, defaults), image_size)
    return setup, params, setup.check_params(params)


def make_setup(
    values: Values, preset: Preset, checkpoint: Checkpoint, world_size: int
) -> tuple[Setup, tuple[str, ...]]:
    """Returns the setup of a pipeline, and notices.

    Args:
        values: Settings; those that do not concern the setup are ignored.
        world_size: Ranks per video.
    """
    execution, chip = build_from_values(Execution, values), values.get("chip")
    if chip is not None:
        if execution.device not in ("auto", "npu"):
            why = f"is an NPU and contradicts `device={execution.device}`"
            raise InputError("`chip`", chip, why, "drop one of them")
        execution = replace(execution, device="npu")
    topology, notices = parallel.resolve_topology(values, world_size, checkpoint.num_heads)
    if env.world_size() > 1:
        ranks_per_node = env.local_world_size()
        notices += parallel.note_machine_spanning(topology, ranks_per_node, checkpoint.num_heads)
    attention = build_from_values(Attention, values)
    quantized_dit = None
    if "quant_dit_path" in values:
        quantized_dit = w8a8_export.read_quantized_dit(
            values["quant_dit_path"],
            checkpoint,
            device=execution.device,
            dit_fsdp=topology.dit_fsdp,
            fa_quant=attention.fa_quant if attention.fp8 else None,
        )
    cache_settings = build_from_values(StepCache, values)
    setup = Setup(
        preset,
        checkpoint,
        execution,
        parallel=topology,
        attention=attention,
        quantized_dit=quantized_dit,
        chip=chip,
        cache=cache_settings,
        policy=policy.make_policy(cache_settings, preset, checkpoint.folder),
        loras=lora.resolve_loras(values, checkpoint),
    )
    return setup, notices


def make_params(
    setup: Setup,
    values: Values,
    image_size: tuple[int, int] | None = None,
    defaults: Values | None = None,
) -> tuple[VideoParams, tuple[str, ...]]:
    """Returns the parameters of a video, and notices.

    Settings override a recipe, which is named or recognized by file names; the recipe overrides
    the defaults.

    Args:
        values: Settings; those that do not concern the video are ignored.
        image_size: (width, height) of the first image.
        defaults: Settings of the checkpoint's generation_config.json.
    """
    checkpoint, recipe_name = setup.checkpoint, values.get("recipe", "auto")
    files = {info.file for dit in checkpoint.experts.values() for info in dit.tensors.values()}
    folders = [] if checkpoint.folder is None else [checkpoint.folder]
    lora_files = [file.path for group in lora.list_lora_files(values).values() for file in group]
    paths = [*folders, *sorted(files)]
    recipe_names, settings = recipes.choose_recipes(recipe_name, paths, lora_files, setup.preset)
    boundary = {} if checkpoint.boundary is None else {"boundary": checkpoint.boundary}
    defaults = recipes.merge_defaults(settings, {**(defaults or {}), **boundary})
    values = recipes.merge_defaults(values, defaults)
    params = make_video_params(setup.preset, values, image_size)
    recipes.check_svi_loras(params.chain, lora_files)
    lora_notices = lora.iter_lora_notices(setup.loras, setup.preset.kind, bool(recipe_names))
    notices = (*recipes.make_recipe_notices(recipe_names, params, bool(lora_files)), *lora_notices)
    return params, (*notices, *setup.check_params(params))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads the sampling defaults in a checkpoint's generation_config.json, if it has one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    raw, allowed = read_json(path), [name for name, flag in FLAGS.items() if flag.checkpoint]
    for key in raw:
        if key not in allowed:
            why = f"sets {key!r}, but a checkpoint may set {', '.join(allowed)}"
            raise InputError(str(path), why=why, remedy="remove it")
    return read_settings(raw, f"{path}: {{}}")


def make_video_file_name(task: str, params: VideoParams) -> str:
    """Returns `task_WxH_start-of-prompt_seed_time.mp4`.

    Only letters, digits, `_`, `-` and `.` of the prompt are used, so that the name is valid on
    every file system.
    """
    slug = re.sub(r"[^\w.-]+", "_", params.prompt[:200]).strip("_.")
    while len(slug.encode("utf-8")) > 50:
        slug = slug[:-1]
    timestamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    width, height = params.video_size
    parts = (task, f"{width}x{height}", slug, str(params.base_seed), timestamp)
    return "_".join(filter(None, parts)) + ".mp4"


def _record_settings(
    values: Values, setup: Setup, params: VideoParams, output: Output
) -> dict[str, Any]:
    """Returns all settings that are needed to repeat the video, by flag name."""
    settings: dict[str, Any] = {**vars(setup.execution), **vars(setup.attention)}
    settings |= step_cache.get_changed_parameters(setup.cache)
    settings["step_cache"] = setup.cache.step_cache
    # With `decode_latents`, the settings of denoising are in `values`, but not in `setup`.
    settings |= {**values, **vars(params), **vars(output)}
    if params.infer_frames is not None:
        del settings["frame_num"]  # derived from infer_frames
    paths = [name for name in PATH_SETTINGS if settings.get(name)]
    settings |= {name: str(Path(settings[name]).absolute()) for name in paths}
    return {
        name: settings[name]
        for name, flag in FLAGS.items()
        if flag.record
        and settings.get(name) is not None
        and (flag.needs is None or settings.get(flag.needs))
    }


def _find_checkpoint_folder(
    values: Values, preset: Preset, network_files: NetworkFiles
) -> tuple[Path, bool]:
    """Returns the checkpoint folder and whether it is a demo checkpoint.

    Without `ckpt_dir` it is the official folder name, the folder of a given DiT, or a demo.
    """
    if "ckpt_dir" in values:
        return values["ckpt_dir"], False
    official = Path(preset.folder)
    if official.is_dir():
        return official, False
    dit = network_files.dit or network_files.dit_high_noise or network_files.dit_low_noise
    if dit is not None:
        return dit.parent, False
    trained = _DEMO_FOLDER / preset.task
    return trained if trained.is_dir() else env.find_cache_dir() / f"demo-{preset.task}-v1", True


def _make_run_notices(
    params: VideoParams, output: Output, demo_folder: Path | None, defaults: Values
) -> list[str]:
    """Returns notices about a demo checkpoint, an untrained size and an existing output file."""
    notices, preset = [], params.preset
    if demo_folder is not None:
        note = "It is randomly initialized, so the video is noise: a test of the installation."
        if demo_folder.parent == _DEMO_FOLDER:
            readme = _DEMO_FOLDER / "README.md"
            note = f"It draws plain shapes that move; {readme} lists the words for prompts."
        missing = f"No --ckpt_dir and no ./{preset.folder}"
        notices.append(f"{missing}: using the demo checkpoint {demo_folder}. {note}")
    size, sizes, model = "*".join(map(str, params.size)), preset.trained_sizes, preset.task
    if demo_folder is not None and demo_folder.parent == _DEMO_FOLDER:
        sizes, model = ("*".join(map(str, defaults["size"])),), "the demo"
    if size not in sizes and params.size != defaults.get("size"):
        notices.append(f"{size} is not a size {model} was trained on ({', '.join(sizes)}).")
    if output.save_file.exists():
        notices.append(f"{output.save_file} exists and will be replaced.")
    return notices
