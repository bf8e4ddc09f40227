"""Resolves settings to a checked run, for the command line, the service, tools and Python classes.

All settings are checked here, before torch is imported and before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.app.failures import refuse_unusable_paths
from wan.app.output import (
    check_current_folder,
    check_run_outputs,
    check_trace_options,
    check_video_path,
)
from wan.app.prompt_file import resolve_prompt_file
from wan.app.record import merge_layers, read_generation_config, record_settings
from wan.app.run import INPUT_FILE_SETTINGS, InputFile, Run
from wan.cache import policy
from wan.checkpoint import lora, lora_folder, w8a8_export
from wan.checkpoint.headers import compute_file_digest, is_folder
from wan.checkpoint.layout import (
    Checkpoint,
    check_checkpoint_folder,
    check_task,
    inspect_checkpoint,
    make_reference_checkpoint,
)
from wan.media.video_writer import check_latents_shape, read_latents_shape
from wan.pipeline.memory_estimate import check_memory
from wan.pipeline.setup import Setup
from wan.settings import parallel, recipes
from wan.settings.attention import Attention
from wan.settings.command import (
    Loras,
    NetworkFiles,
    Output,
    PlanOptions,
    PromptExtension,
    VideoLoraOptions,
)
from wan.settings.errors import InputError, name_settings
from wan.settings.execution import Execution
from wan.settings.fields import build_from_values, list_options
from wan.settings.flags import FLAGS, check_needed_settings
from wan.settings.layers import merge_defaults, merge_settings
from wan.settings.parallel import SIZE_FLAGS, Parallel
from wan.settings.presets import PRESETS, TASK_ALIASES, Preset
from wan.settings.rules import Values
from wan.settings.step_cache import StepCache
from wan.tasks.base import NO_INPUTS, Inputs, VideoParams, get_task, make_video_params
from wan.utils import env
from wan.utils.files import has_folder
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.distributed.rendezvous import RunOncePerNode

MAX_RANKS = 4096  # limit of --plan
_DEMO_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained checkpoints
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


@refuse_unusable_paths()
def resolve_settings(
    user_settings: Values,
    run_once: RunOncePerNode = lambda make: make(),
    plan: bool = False,
    require_inputs: bool = True,
) -> Run:
    """Resolves the user's settings to a run of one video or of a prompt file.

    Args:
        user_settings: Checked settings, as from `wan.app.flag_parser.parse_flags`.
        run_once: Calls a function on one rank of each node; the others wait.
        plan, require_inputs: As for `wan.app.resolve.resolve_run`.
    """
    if not plan and "save_file" not in user_settings:
        check_current_folder()
    if "prompt_file" in user_settings:
        if plan:
            raise InputError("`plan` is about one video; drop `prompt_file`.")
        return resolve_prompt_file(user_settings, partial(make_line_resolver, run_once=run_once))
    make_demo = partial(make_random_checkpoint, run_once)
    return resolve_command_line(user_settings, make_demo, plan, require_inputs=require_inputs)


def make_line_resolver(
    shared: Values, run_once: RunOncePerNode = lambda make: make()
) -> Callable[[Values], Run]:
    """Returns a function that resolves the settings of one of several videos.

    They are merged over the shared settings. The checkpoint folder is inspected once.
    """
    make_demo = partial(make_random_checkpoint, run_once)
    inspect_folder = cache(inspect_checkpoint)

    def resolve_line(line_settings: Values) -> Run:
        settings = merge_settings(line_settings, shared)
        return resolve_command_line(settings, make_demo, inspect_folder=inspect_folder)

    return resolve_line


def resolve_command_line(
    user_settings: Values,
    make_demo: MakeDemo,
    plan: bool = False,
    inspect_folder: InspectFolder = inspect_checkpoint,
    require_inputs: bool = True,
) -> Run:
    """Resolves the settings of one video, merged with a record and variables, to a checked run.

    Args:
        user_settings: The flags, from `wan.app.flag_parser.parse_flags`.
        make_demo, plan, inspect_folder, require_inputs: As for `resolve_run`.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    with name_settings(env.make_flag_naming()), refuse_unusable_paths():
        values = merge_layers(user_settings)
        check_needed_settings(
            {name: value for name, value in values.items() if FLAGS[name].needs != "plan"}
        )
        writes_file = "save_file" in values and not plan
        if writes_file:
            check_video_path(values["save_file"])
        run = resolve_run(values, make_demo, plan, inspect_folder, require_inputs)
        # Only rank 0 runs the language model.
        if run.prompt_extension is not None and env.rank() == 0:
            from wan.app import prompt_extend

            has_image = run.inputs.image is not None
            prompt_extend.check_prompt_extension(run.prompt_extension, has_image)
        if plan:
            run.setup.check_plan()
        else:
            _check_free_memory(run)
        if writes_file:
            check_run_outputs(run)
        check_trace_options(run.output, run.setup.execution.compile, run.params.num_forwards)
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


def resolve_run(
    values: Values,
    make_demo: MakeDemo,
    plan: bool = False,
    inspect_folder: InspectFolder = inspect_checkpoint,
    require_inputs: bool = True,
) -> Run:
    """Resolves settings to a run and checks them.

    Args:
        values: The settings. Missing ones come from the checkpoint's generation_config.json and
            the task's preset.
        make_demo: Called only if no checkpoint is given and the demo checkpoint does not exist yet.
        plan: Only plan the run: its ranks need not exist, nothing is written, and without a
            checkpoint the published sizes of the task are used.
        inspect_folder: Identifies the networks of a folder; may cache them for many runs.
        require_inputs: Refuse a run without an image, audio or poses that its task needs.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    name: str = values.get("task", "t2v-A14B")
    decodes_only = "decode_latents" in values
    preset, world_size = PRESETS[TASK_ALIASES.get(name, name)], _count_ranks(values, plan)
    task, inputs = get_task(preset.kind), NO_INPUTS
    folder, is_demo = _find_checkpoint_folder(values, preset)
    has_files = is_folder(folder) and not (is_demo and plan)
    defaults = read_generation_config(folder) if has_files else {}
    if not decodes_only:
        is_required = require_inputs and not plan
        inputs = task.read_inputs(preset, {**defaults, **values}, is_required)
    checkpoint: Checkpoint | None = None
    files = build_from_values(NetworkFiles, values)
    if is_demo and not has_files:
        checkpoint = make_reference_checkpoint(preset, files)
        if not plan:  # refuse before the demo is written
            setup, _ = make_setup(values, preset, checkpoint, world_size)
            make_params(setup, values, inputs.source_size)
            make_demo(preset.task, folder)
            checkpoint = None
    if checkpoint is None:
        remedy = "give the folder of a checkpoint, or leave it out to try the demo"
        check_checkpoint_folder(folder, remedy)
        candidates = [PRESETS[key] for key in (name, TASK_ALIASES.get(name, "")) if key in PRESETS]
        checkpoint = inspect_folder(folder, files, tuple(candidates))
    preset = _choose_preset(name, preset, checkpoint)
    defaults = {} if checkpoint.folder is None else read_generation_config(checkpoint.folder)
    if decodes_only:
        video_values = _complete_decoding(values, preset, world_size)
    else:
        values = {**values, **task.complete_settings(preset, values, inputs, defaults)}
        video_values = values
    setup, notices = make_setup(video_values, preset, checkpoint, world_size)
    if "lora_folder" in video_values:
        inputs = replace(inputs, loras=_choose_loras(video_values, setup))
        setup = replace(setup, video_loras=inputs.loras)
    params, param_notices = make_params(
        setup, video_values, inputs.source_size, defaults, inputs.loras
    )
    check_latents_shape(values.get("fixed_latents"), params.latent_shape)
    if checkpoint.folder is not None:
        _require_components(checkpoint, preset, inputs, decodes_only)
    file_name, fps = make_video_file_name(name, params), task.choose_fps(params, inputs, defaults)
    output = build_from_values(Output, {"save_file": Path(file_name), "fps": fps, **values})
    extends_prompt = values.get("use_prompt_extend")
    demo_folder = folder if is_demo and not plan else None
    run_notices = _make_run_notices(params, output, demo_folder, defaults)
    video_notices = () if decodes_only else (*notices, *param_notices)  # about the DiT
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
        settings=record_settings(
            {**values, "task": name, "ckpt_dir": folder}, setup, params, output
        ),
        notices=(*run_notices, *video_notices),
    )


def _count_ranks(values: Values, plan: bool) -> int:
    """Returns the number of ranks; for a plan in one process those of the sizes."""
    world_size = env.world_size()
    if plan and world_size == 1:
        world_size = prod(values.get(name) or 1 for name in SIZE_FLAGS)
        if world_size > MAX_RANKS:
            remedy = f"give at most {MAX_RANKS}"
            raise InputError(f"The sizes make {world_size} ranks", remedy=remedy)
    return world_size


def _choose_preset(name: str, preset: Preset, checkpoint: Checkpoint) -> Preset:
    """Returns the preset of the task; an alias with a single network is Wan2.1's task."""
    if name in TASK_ALIASES and checkpoint.experts.keys() == {"dit"}:
        has_two_images = name == "i2v-14B" and checkpoint.num_clip_vision_images == 2
        preset = PRESETS["flf2v-14B" if has_two_images else name]
    check_task(checkpoint, preset)
    return preset


def _complete_decoding(values: Values, preset: Preset, world_size: int) -> dict[str, Any]:
    """Returns the settings of decoding: without those of denoising, and with the latents' sizes.

    Raises:
        InputError: The task's VAE cannot decode the latents, or they do not fit their settings.
    """
    path = values["decode_latents"]
    channels, frames, height, width = read_latents_shape(path)
    if channels != preset.latent_channels:
        why = f"and the {preset.vae} VAE of this task decodes {preset.latent_channels}"
        remedy = "give the `ckpt_dir` that the latents were made with"
        raise InputError(f"{path} has {channels} channels", None, why, remedy)
    t, h, w = preset.vae_stride
    sizes: dict[str, Any] = {"frame_num": (frames - 1) * t + 1, "size": (width * w, height * h)}
    has_image = "image" in values or "src_video" in values  # its aspect ratio wins
    for name in sizes.keys() & values.keys():
        if values[name] != sizes[name] and not (name == "size" and has_image):
            why = f"holds latents whose {name} is {sizes[name]}, and its settings say "
            why, remedy = f"{why}{values[name]}", "use the unmodified file"
            raise InputError(str(path), None, why, remedy)
    if world_size > 1 and not values.get("vae_parallel"):
        why = f"runs on one process, but {world_size} were started"
        remedy = "start it without torchrun, or add `vae_parallel`"
        raise InputError("`decode_latents`", None, why, remedy)
    settings = {name: value for name, value in values.items() if name not in _DENOISING_SETTINGS}
    return sizes | settings | {"recipe": "none"}


def _require_components(
    checkpoint: Checkpoint, preset: Preset, inputs: Inputs, decodes_only: bool
) -> None:
    """Refuses a checkpoint without a network that the run needs."""
    components: tuple[str, ...] = ("vae",)
    if not decodes_only:
        components = ("vae", "text_encoder", "tokenizer", *inputs.components)
        components += ("image_encoder",) if preset.num_clip_vision_images else ()
    for component in components:
        checkpoint.require(component)


def make_setup(
    values: Values, preset: Preset, checkpoint: Checkpoint, world_size: int
) -> tuple[Setup, tuple[str, ...]]:
    """Returns the setup of a pipeline, and notices.

    Args:
        values: Settings; those that do not concern the setup are ignored.
        world_size: Ranks per video.
    """
    execution, chip = build_from_values(Execution, values), values.get("chip")
    attention = build_from_values(Attention, values)
    cache_settings = build_from_values(StepCache, values)
    if chip is not None:
        if execution.device not in ("auto", "npu"):
            why = f"is an NPU and contradicts `device={execution.device}`"
            raise InputError("`chip`", chip, why, "drop one of them")
        execution = replace(execution, device="npu")
    topology, notices = parallel.resolve_topology(values, world_size, checkpoint.num_heads)
    if env.world_size() > 1:
        ranks_per_node = env.local_world_size()
        notices += parallel.note_machine_spanning(topology, ranks_per_node, checkpoint.num_heads)
    quantized_dit = None
    if "quant_dit_path" in values:
        quantized_dit = w8a8_export.read_quantized_dit(
            values["quant_dit_path"],
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
        cache=cache_settings,
        policy=policy.make_policy(cache_settings, preset, checkpoint.folder),
        loras=lora.resolve_loras(values, checkpoint),
        lora_options=build_from_values(VideoLoraOptions, values),
    )
    return setup, notices


def _choose_loras(values: Values, setup: Setup) -> lora_folder.VideoLoras:
    """Returns the LoRAs of `video_lora`; checks the folder."""
    folder = values["lora_folder"]
    lora_folder.find_lora_files(folder)
    loras = lora_folder.resolve_video_loras(values.get("video_lora", ()), folder, setup.checkpoint)
    if setup.cache.policy == "tea":
        for entry in (entry for entries in loras.values() for entry in entries):
            if any(name.startswith("time_embedding.") for name in entry.lora.deltas):
                why = "changes the time embedding, from which `step_cache=tea` selects steps"
                raise InputError("`video_lora`", entry.name, why, "leave it out")
    return loras


def make_params(
    setup: Setup,
    values: Values,
    image_size: tuple[int, int] | None = None,
    defaults: Values | None = None,
    video_loras: lora_folder.VideoLoras | None = None,
) -> tuple[VideoParams, tuple[str, ...]]:
    """Returns the parameters of a video, and notices.

    Settings override a recipe, which is named or recognized by file names; the recipe overrides
    the defaults.

    Args:
        values: Settings; those that do not concern the video are ignored.
        image_size: (width, height) of the first image.
        defaults: Settings of the checkpoint's generation_config.json.
        video_loras: LoRAs of this video only.
    """
    loras = lora_folder.add_video_loras(setup.loras, video_loras or {})
    checkpoint, recipe_name = setup.checkpoint, values.get("recipe", "auto")
    files = {info.file for dit in checkpoint.experts.values() for info in dit.tensors.values()}
    folders = [] if checkpoint.folder is None else [checkpoint.folder]
    lora_files = sorted({entry.path for group in loras.values() for entry in group})
    paths = [*folders, *sorted(files)]
    recipe_names, settings = recipes.choose_recipes(recipe_name, paths, lora_files, setup.preset)
    boundary = {} if checkpoint.boundary is None else {"boundary": checkpoint.boundary}
    defaults = merge_defaults(settings, {**(defaults or {}), **boundary})
    values = merge_defaults(values, defaults)
    params = make_video_params(setup.preset, values, image_size)
    recipes.check_svi_loras(params.chain, lora_files)
    lora_notices = lora.iter_lora_notices(loras, setup.preset.kind, bool(recipe_names))
    notices = (*recipes.make_recipe_notices(recipe_names, params, bool(lora_files)), *lora_notices)
    if "svi-2-pro" not in recipe_names:  # whose own notice is about shorter clips, too
        notices += make_length_notices(setup, params)
    return params, (*notices, *setup.check_params(params, values))


def _find_checkpoint_folder(values: Values, preset: Preset) -> tuple[Path, bool]:
    """Returns the checkpoint folder and whether it is a demo checkpoint.

    Without `ckpt_dir` it is the official folder name, the folder of a given DiT, or a demo.
    """
    if "ckpt_dir" in values:
        return values["ckpt_dir"], False
    official = Path(preset.folder)
    if has_folder(official):
        return official, False
    for name in ("dit", "dit_high_noise", "dit_low_noise"):
        if name in values:
            folder: Path = values[name].parent
            return folder, False
    trained = _DEMO_FOLDER / preset.task
    return trained if trained.is_dir() else _find_random_demo(preset), True


def _find_random_demo(preset: Preset) -> Path:
    """Returns the folder of the task's randomly initialized demo checkpoint."""
    return env.find_cache_dir() / f"demo-{preset.task}-v1"


def has_random_weights(run: Run) -> bool:
    """Returns whether the checkpoint of a run is a randomly initialized demo: videos are noise."""
    return Path(run.settings["ckpt_dir"]) == _find_random_demo(run.setup.preset)


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


def _make_run_notices(
    params: VideoParams, output: Output, demo_folder: Path | None, defaults: Values
) -> list[str]:
    """Returns notices about a demo checkpoint, an untrained size and an existing output file."""
    notices, preset = [], params.preset
    if demo_folder is not None:
        note = "It is randomly initialized, so the video is noise: a test of the installation."
        if not _DEMO_FOLDER.is_dir():  # installed without the repository
            note += " The trained demo, examples/demo, comes with a clone of the repository."
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


def make_demo_size_notices(params: VideoParams, folder: Path | None) -> list[str]:
    """Returns a notice if a video of a trained demo in the repository is larger than the demo's."""
    if folder is None or folder.resolve().parent != _DEMO_FOLDER:
        return []
    width, height = read_generation_config(folder)["size"]
    video_width, video_height = params.video_size
    if video_width * video_height <= 1.1 * width * height:  # an image has another aspect ratio
        return []
    size, trained_size = f"{video_width}*{video_height}", f"{width}*{height}"
    return [f"{size} is not a size the demo was trained on ({trained_size})."]


def make_length_notices(setup: Setup, params: VideoParams) -> tuple[str, ...]:
    """Returns a notice if a video, or its clips, are longer than those of the training.

    The published default is the length on which the networks were trained, unless a checkpoint's
    generation_config.json has a larger one.
    """
    name = "frame_num" if params.preset.infer_frames is None else "infer_frames"
    frames, longest = getattr(params, name), getattr(params.preset, name)
    if (folder := setup.checkpoint.folder) is not None:
        longest = max(longest, read_generation_config(folder).get(name, 0))
    if frames <= longest:
        return ()
    unit = "frames a clip" if params.has_clips else "frames"
    return (
        f"{frames} {unit} are more than the {longest} that the network was trained on: the first "
        "ones may flash, and motion may repeat or stop.",
    )


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
