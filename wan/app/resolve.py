"""Resolves settings to a checked run, for the command line, the service, tools and Python classes.

All settings are checked here, before torch is imported and before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.app.failures import refuse_unusable_paths
from wan.app.notices import (
    DEMO_FOLDER,
    find_random_demo,
    make_length_notices,
    make_run_notices,
    make_video_file_name,
)
from wan.app.output import (
    check_current_folder,
    check_run_outputs,
    check_trace_options,
    check_video_path,
)
from wan.app.prompt_file import resolve_prompt_file
from wan.app.record import read_generation_config, read_lower_layers, record_settings
from wan.app.run import INPUT_FILE_SETTINGS, InputFile, Run
from wan.cache import policy
from wan.checkpoint.formats.headers import compute_file_digest, is_folder
from wan.checkpoint.layout import (
    Checkpoint,
    check_checkpoint_folder,
    check_task,
    inspect_checkpoint,
    make_reference_checkpoint,
)
from wan.checkpoint.lora import folder as lora_folder
from wan.checkpoint.lora.resolve import iter_lora_notices, resolve_loras
from wan.checkpoint.quant import w8a8_export
from wan.media.video_writer import check_latents_shape, read_latents_shape
from wan.pipeline.memory_estimate import check_memory
from wan.pipeline.setup import Setup
from wan.settings import parallel, recipes
from wan.settings.attention import Attention
from wan.settings.command import Loras, NetworkFiles, Output, PromptExtension, VideoLoraOptions
from wan.settings.errors import InputError, name_settings
from wan.settings.fields import build_from_values, list_options
from wan.settings.layers import Layer, Settings, merge
from wan.settings.parallel import SIZE_FLAGS, Parallel
from wan.settings.presets import PRESETS, TASK_ALIASES, Preset
from wan.settings.rules import Values
from wan.settings.run_options import RunOptions, read_run_options
from wan.settings.step_cache import StepCache
from wan.tasks.base import NO_INPUTS, Inputs, VideoParams, get_task, make_video_params
from wan.tasks.needed_inputs import check_needed_inputs
from wan.utils import env
from wan.utils.files import has_folder
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.distributed.rendezvous import RunOncePerNode

MAX_RANKS = 4096  # limit of --plan
_DENOISING_SETTINGS = {
    "quant_dit_path",
    *(
        name
        for group in (Loras, VideoLoraOptions, Attention, Parallel, StepCache)
        for name in list_options(group)
    ),
}
"""Settings that have no effect where latents are only decoded."""
InspectFolder = Callable[[Path, NetworkFiles, tuple[Preset, ...]], Checkpoint]
"""Reads the description of a checkpoint folder."""
MakeDemo = Callable[[str, Path], None]
"""make_demo(task, folder) writes a randomly initialized checkpoint."""


@dataclass(frozen=True)
class ResolveContext:
    """How runs are resolved, for all settings.

    Attributes:
        plan: Only plan the run: its ranks need not exist, nothing is written, and without a
            checkpoint the published sizes of the task are used.
        require_inputs: Refuse a run without an image, audio or poses that its task needs.
        make_demo: Called only if no checkpoint is given and the demo checkpoint does not exist yet.
        inspect_folder: Identifies the networks of a folder; may cache them for many runs.
    """

    plan: bool = False
    require_inputs: bool = True
    make_demo: MakeDemo = lambda task, folder: make_random_checkpoint(_make_here, task, folder)
    inspect_folder: InspectFolder = inspect_checkpoint


@refuse_unusable_paths()
def resolve_settings(flags: Layer, context: ResolveContext | None = None) -> Run:
    """Resolves a command line to a run of one video or of a prompt file.

    Args:
        flags: From `wan.app.flag_parser.parse_flags`.
    """
    context = context or ResolveContext()
    if not context.plan and "save_file" not in flags:
        check_current_folder()
    if "prompt_file" not in flags:
        return resolve_video(context, flags)
    if context.plan:
        raise InputError("`plan` is about one video; drop `prompt_file`.")
    return resolve_prompt_file(flags, partial(make_line_resolver, context=context))


def make_line_resolver(
    shared: Layer, context: ResolveContext | None = None
) -> Callable[[Layer], Run]:
    """Returns a function that resolves the settings of one of several videos.

    They are merged over the shared settings. The checkpoint folder is inspected once.
    """
    context = replace(context or ResolveContext(), inspect_folder=cache(inspect_checkpoint))
    return lambda line: resolve_video(context, line, shared)


def resolve_video(context: ResolveContext, *layers: Layer) -> Run:
    """Resolves the settings of one video to a checked run.

    Args:
        layers: The user's settings, the highest first; a record and variables are read here.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    plan = context.plan
    with refuse_unusable_paths():
        with name_settings(layers[0].naming):
            # Settings about the plan need it, in any layer.
            layers += (Layer("the plan", layers[0].naming, {"plan": True}),) if plan else ()
            settings = merge(*layers, *read_lower_layers(*layers))
        with name_settings(settings.naming):
            writes_file = "save_file" in settings and not plan
            if writes_file:
                check_video_path(settings["save_file"])
            run = resolve_run(settings, context)
            # Only rank 0 runs the language model.
            if run.prompt_extension is not None and env.rank() == 0:
                from wan.app import prompt_extend

                prompt_extend.check_prompt_extension(run.prompt_extension)
            if plan:
                run.setup.check_plan()
            else:
                _check_free_memory(run)
            if writes_file:
                check_run_outputs(run)
            num_steps = run.params.num_forwards * run.params.num_blocks
            check_trace_options(run.output, run.setup.execution.compile, num_steps)
            return run


def _check_free_memory(run: Run) -> None:
    """Refuses a run that does not fit into the free memory."""
    if run.decode_latents is None:
        check_memory(run.setup, run.params, env.local_world_size())
        return
    # An image's aspect ratio follows from the latents.
    _, _, height, width = read_latents_shape(run.decode_latents)
    _, stride_h, stride_w = run.params.preset.vae_stride
    params = replace(run.params, size=(width * stride_w, height * stride_h))
    check_memory(run.setup, params, env.local_world_size(), "decoding")


@dataclass(frozen=True)
class Weights:
    """Where the weights of a run are.

    Attributes:
        name: Task as the user calls it; an alias may mean several presets.
        preset: Preset of the task.
        folder: Folder of the checkpoint; a demo may not exist yet.
        is_demo: Whether it is a demo checkpoint, because none was given.
        is_written: Whether the folder is to be read: it exists, and is not only planned for.
    """

    name: str
    preset: Preset
    folder: Path
    is_demo: bool
    is_written: bool


def resolve_run(settings: Settings, context: ResolveContext) -> Run:
    """Resolves merged settings to a run, in stages, and checks them.

    Settings that no layer sets come from the checkpoint's generation_config.json and the task's
    preset.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    if "decode_latents" in settings:
        return _resolve_decoding(settings, context)
    options = read_run_options(settings)
    weights = _find_weights(options, context)
    inputs = _read_inputs(settings, weights, context)
    weights = _prepare_demo(settings, options, weights, inputs, context)
    checkpoint, preset = _open_checkpoint(weights, options, context)
    defaults = read_generation_config(checkpoint.folder)
    task = get_task(preset.kind)
    values = task.complete_settings(preset, settings, inputs, defaults.values)
    completed = settings.add_above(Layer("the input files", settings.unset_naming, values))
    setup, notices = make_setup(options, preset, checkpoint, _count_ranks(options, context.plan))
    setup = replace(setup, video_loras=_choose_video_loras(setup))
    inputs = replace(inputs, loras=setup.video_loras)
    video = resolve_params(setup, completed, inputs.source_size, defaults)
    video = replace(video, notices=(*notices, *video.notices))
    check_latents_shape(settings.get("fixed_latents"), video.params.latent_shape)
    if checkpoint.folder is not None:
        components = ("vae", "text_encoder", "tokenizer", *inputs.components)
        _require_components(checkpoint, preset, components)
    return _make_run(completed, options, weights, inputs, setup, video, context)


def _resolve_decoding(settings: Settings, context: ResolveContext) -> Run:
    """Resolves a run that decodes latents; settings of denoising are only in its record."""
    chosen = settings.drop(_DENOISING_SETTINGS)
    options = read_run_options(chosen)
    weights = _find_weights(options, context)
    weights = _prepare_demo(chosen, options, weights, NO_INPUTS, context)
    checkpoint, preset = _open_checkpoint(weights, options, context)
    defaults = read_generation_config(checkpoint.folder)
    completed = _complete_decoding(chosen, preset)
    setup, _ = make_setup(options, preset, checkpoint, env.world_size())
    video = replace(resolve_params(setup, completed, None, defaults), notices=())  # about the DiT
    checkpoint.require("vae")
    return _make_run(settings, options, weights, NO_INPUTS, setup, video, context)


def _count_ranks(options: RunOptions, plan: bool) -> int:
    """Returns the number of ranks; for a plan in one process those of the sizes."""
    world_size = env.world_size()
    if plan and world_size == 1:
        world_size = prod(options.values.get(name) or 1 for name in SIZE_FLAGS)
        if world_size > MAX_RANKS:
            remedy = f"give at most {MAX_RANKS}"
            raise InputError(f"The sizes make {world_size} ranks", remedy=remedy)
    return world_size


def _find_weights(options: RunOptions, context: ResolveContext) -> Weights:
    """Finds the checkpoint folder.

    Without `ckpt_dir` it is the official folder name, the folder of a given DiT, or a demo.
    """
    name, files = options.checkpoint.task, options.files
    preset = PRESETS[TASK_ALIASES.get(name, name)]
    official = Path(preset.folder)
    dit = files.dit or files.dit_high_noise or files.dit_low_noise
    folder = options.checkpoint.ckpt_dir
    folder = folder or (official if has_folder(official) else dit and dit.parent)
    if folder is not None:
        return Weights(name, preset, folder, is_demo=False, is_written=is_folder(folder))
    trained = DEMO_FOLDER / preset.task
    folder = trained if trained.is_dir() else find_random_demo(preset)
    is_written = is_folder(folder) and not context.plan
    return Weights(name, preset, folder, is_demo=True, is_written=is_written)


def _read_inputs(settings: Settings, weights: Weights, context: ResolveContext) -> Inputs:
    defaults = read_generation_config(weights.folder if weights.is_written else None)
    values = {**defaults.values, **settings}
    if context.require_inputs and not context.plan:
        check_needed_inputs(weights.preset, values)
    return get_task(weights.preset.kind).read_inputs(weights.preset, values)


def _prepare_demo(
    settings: Settings,
    options: RunOptions,
    weights: Weights,
    inputs: Inputs,
    context: ResolveContext,
) -> Weights:
    """Writes a demo checkpoint that does not exist, after checking the run with published sizes."""
    if not weights.is_demo or weights.is_written or context.plan:
        return weights
    checkpoint = make_reference_checkpoint(weights.preset, options.files)
    setup, _ = make_setup(options, weights.preset, checkpoint, env.world_size())
    resolve_params(setup, settings, inputs.source_size)
    context.make_demo(weights.preset.task, weights.folder)
    return replace(weights, is_written=True)


def _open_checkpoint(
    weights: Weights, options: RunOptions, context: ResolveContext
) -> tuple[Checkpoint, Preset]:
    """Inspects the checkpoint; a plan of a demo that does not exist has the published sizes.

    Returns:
        The checkpoint, and the preset of its task; an alias with a single network is Wan2.1's.
    """
    name, preset = weights.name, weights.preset
    if weights.is_demo and not weights.is_written:
        checkpoint = make_reference_checkpoint(preset, options.files)
    else:
        remedy = "give the folder of a checkpoint, or leave it out to try the demo"
        check_checkpoint_folder(weights.folder, remedy)
        names = [n for n in (name, TASK_ALIASES.get(name)) if n in PRESETS]
        candidates = tuple(PRESETS[n] for n in names)
        checkpoint = context.inspect_folder(weights.folder, options.files, candidates)
    if name in TASK_ALIASES and checkpoint.experts.keys() == {"dit"}:
        has_two_images = name == "i2v-14B" and checkpoint.num_clip_vision_images == 2
        preset = PRESETS["flf2v-14B" if has_two_images else name]
    check_task(checkpoint, preset)
    return checkpoint, preset


def _complete_decoding(settings: Settings, preset: Preset) -> Settings:
    """Returns the settings of decoding, with the latents' sizes.

    Raises:
        InputError: The task's VAE cannot decode the latents, or they do not fit their settings.
    """
    path = settings["decode_latents"]
    channels, frames, height, width = read_latents_shape(path)
    if channels != preset.latent_channels:
        why = f"and the {preset.vae} VAE of this task decodes {preset.latent_channels}"
        remedy = "give the `ckpt_dir` that the latents were made with"
        raise InputError(f"{path} has {channels} channels", None, why, remedy)
    t, h, w = preset.vae_stride
    sizes: dict[str, Any] = {"frame_num": (frames - 1) * t + 1, "size": (width * w, height * h)}
    has_image = "image" in settings or "src_video" in settings  # its aspect ratio wins
    for name in sizes.keys() & settings.keys():
        if settings[name] != sizes[name] and not (name == "size" and has_image):
            why = f"holds latents whose {name} is {sizes[name]}, and its settings say "
            why, remedy = f"{why}{settings[name]}", "use the unmodified file"
            raise InputError(str(path), None, why, remedy)
    if env.world_size() > 1 and not settings.get("vae_parallel"):
        why = f"runs on one process, but {env.world_size()} were started"
        remedy = "start it without torchrun, or add `vae_parallel`"
        raise InputError("`decode_latents`", None, why, remedy)
    latents = {n: size for n, size in sizes.items() if n not in settings} | {"recipe": "none"}
    return settings.add_above(Layer(str(path), settings.unset_naming, latents))


def _require_components(checkpoint: Checkpoint, preset: Preset, components: Iterable[str]) -> None:
    """Refuses a checkpoint without a network that the run needs."""
    for component in components:
        checkpoint.require(component)
    if preset.num_clip_vision_images:
        checkpoint.require("image_encoder")


def make_setup(
    options: RunOptions, preset: Preset, checkpoint: Checkpoint, world_size: int
) -> tuple[Setup, tuple[str, ...]]:
    """Returns the setup of a pipeline, and notices.

    Args:
        world_size: Ranks per video.
    """
    execution, attention, chip = options.execution, options.attention, options.plan.chip
    quantized_folder = options.checkpoint.quant_dit_path
    if chip is not None:
        if execution.device not in ("auto", "npu"):
            why = f"is an NPU and contradicts `device={execution.device}`"
            raise InputError("`chip`", chip, why, "drop one of them")
        execution = replace(execution, device="npu")
    topology, notices = parallel.resolve_topology(options.values, world_size, checkpoint.num_heads)
    if env.world_size() > 1:
        ranks_per_node = env.local_world_size()
        notices += parallel.note_machine_spanning(topology, ranks_per_node, checkpoint.num_heads)
    quantized_dit = None
    if quantized_folder is not None:
        quantized_dit = w8a8_export.read_quantized_dit(
            quantized_folder,
            checkpoint,
            device=execution.device,
            fa_quant=attention.fa_quant if attention.fp8 else None,
        )
    setup = Setup(
        preset,
        checkpoint,
        execution,
        parallel=topology,
        attention=attention,
        quantized_dit=quantized_dit,
        chip=chip,
        cache=options.cache,
        policy=policy.make_policy(options.cache, preset, checkpoint.folder),
        loras=resolve_loras(options.loras, checkpoint, quantized_folder is not None),
        lora_options=options.video_loras,
    )
    return setup, notices


def _choose_video_loras(setup: Setup) -> lora_folder.VideoLoras:
    """Returns the LoRAs of `video_lora`; checks the folder."""
    folder, chosen = setup.lora_options.lora_folder, setup.lora_options.video_lora
    if folder is None:
        return {}
    lora_folder.find_lora_files(folder)
    loras = lora_folder.resolve_video_loras(chosen, folder, setup.checkpoint)
    if setup.cache.policy == "tea":
        for entry in (entry for entries in loras.values() for entry in entries):
            if any(name.startswith("time_embedding.") for name in entry.lora.deltas):
                why = "changes the time embedding, from which `step_cache=tea` selects steps"
                raise InputError("`video_lora`", entry.name, why, "leave it out")
    return loras


@dataclass(frozen=True)
class ResolvedParams:
    """The parameters of a video.

    Attributes:
        settings: The settings with the layers below them: a recipe's and the checkpoint's.
        defaults: The layer of the checkpoint's generation_config.json.
    """

    params: VideoParams
    settings: Settings
    defaults: Layer
    notices: tuple[str, ...]


def resolve_params(
    setup: Setup,
    settings: Settings,
    image_size: tuple[int, int] | None = None,
    defaults: Layer | None = None,
) -> ResolvedParams:
    """Resolves the parameters of a video, and checks them.

    Settings override a recipe, which is named or recognized by file names; the recipe overrides
    the defaults.

    Args:
        settings: Settings; those that do not concern the video are ignored.
        image_size: (width, height) of the first image.
        defaults: The layer below the recipe's.
    """
    loras = lora_folder.add_video_loras(setup.loras, setup.video_loras)
    checkpoint, recipe_name = setup.checkpoint, settings.get("recipe", "auto")
    files = {info.file for dit in checkpoint.experts.values() for info in dit.tensors.values()}
    folders = [] if checkpoint.folder is None else [checkpoint.folder]
    lora_files = sorted({entry.path for group in loras.values() for entry in group})
    paths = [*folders, *sorted(files)]
    recipe_names, values = recipes.choose_recipes(recipe_name, paths, lora_files, setup.preset)
    naming = settings.unset_naming
    settings = settings.add_below(
        Layer(f"recipe {'+'.join(recipe_names)}", naming, values, "default")
    )
    if checkpoint.boundary is not None:
        boundary = {"boundary": checkpoint.boundary}
        settings = settings.add_below(Layer("the checkpoint", naming, boundary, "default"))
    defaults = defaults or Layer("the checkpoint", naming, {}, "default")
    settings = settings.add_below(defaults)
    params = make_video_params(setup.preset, settings, image_size)
    recipes.check_svi_loras(params.chain, lora_files)
    lora_notices = iter_lora_notices(loras, setup.preset.kind, bool(recipe_names))
    notices = (*recipes.make_recipe_notices(recipe_names, params, bool(lora_files)), *lora_notices)
    if "svi-2-pro" not in recipe_names:  # whose own notice is about shorter clips, too
        notices += make_length_notices(setup, params)
    notices = (*notices, *setup.check_params(params, settings))
    return ResolvedParams(params, settings, defaults, notices)


def _make_run(
    settings: Settings,
    options: RunOptions,
    weights: Weights,
    inputs: Inputs,
    setup: Setup,
    video: ResolvedParams,
    context: ResolveContext,
) -> Run:
    """Makes the run of resolved settings, with its outputs, notices and record."""
    params, defaults, plan = video.params, video.defaults, context.plan
    file_name = make_video_file_name(weights.name, params)
    fps = params.task.choose_fps(params, inputs, defaults.values)
    output = build_from_values(Output, {"save_file": Path(file_name), "fps": fps, **settings})
    extends_prompt = settings.get("use_prompt_extend")
    demo_folder = weights.folder if weights.is_demo and not plan else None
    recorded = {**settings, "task": weights.name, "ckpt_dir": weights.folder}
    return Run(
        setup=setup,
        params=params,
        output=output,
        inputs=inputs,
        input_files=() if plan else _list_input_files(settings, inputs),
        prompt_extension=build_from_values(PromptExtension, settings) if extends_prompt else None,
        decode_latents=settings.get("decode_latents"),
        fixed_latents=settings.get("fixed_latents"),
        plan_options=options.plan,
        power=settings.get("power", False),
        settings=record_settings(recorded, setup, params, output),
        sources=video.settings.list_sources(),
        notices=(*make_run_notices(params, output, demo_folder, defaults), *video.notices),
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


def _make_here(make: Callable[[], None]) -> None:
    """Calls a function on the only rank."""
    make()


def make_random_checkpoint(run_once: RunOncePerNode, task: str, folder: Path) -> None:
    """Writes a randomly initialized checkpoint on one rank of each node; the others wait."""
    load_torch()
    from wan.testing.random_checkpoint import make_checkpoint

    def make_once() -> None:
        logger.info("Making the randomly initialized checkpoint %s (once).", folder)
        try:
            make_checkpoint(task, folder)
        except (OSError, InputError):
            if not folder.is_dir():  # otherwise another run has just written it
                raise

    run_once(make_once)


def load_torch() -> None:
    """Imports torch; raises InputError if it does not load, as with torch-npu but without CANN."""
    try:
        import torch  # noqa: F401
    except RuntimeError as error:
        raise InputError(
            f"PyTorch does not load ({str(error).splitlines()[0]}); if torch-npu is installed, "
            "install CANN and source its set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run "
            "without NPUs."
        ) from error
