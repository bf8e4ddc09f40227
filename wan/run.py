"""From settings to a run: the one road of the command line, `--plan` and the Python classes.

All settings are checked here, before torch is imported: what a run cannot do is refused before any
weight is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan import env
from wan.cache import policy
from wan.checkpoint import lora, quantised
from wan.checkpoint.files import content_digest, fingerprint, read_json
from wan.checkpoint.layout import Checkpoint, check_task, describe, published
from wan.pipeline.following import (
    check_chain,
    clips,
    control,
    controlled,
    driving,
    moves,
    sounds,
)
from wan.pipeline.setup import Setup
from wan.pipeline.video import check_start, latents_shape
from wan.settings import parallel, recipes, step_cache
from wan.settings.attention import Attention
from wan.settings.command import (
    Loras,
    NetworkFiles,
    Output,
    Planning,
    PromptExtension,
)
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import fill, options
from wan.settings.flags import FLAGS, read
from wan.settings.parallel import SIZES, Parallel
from wan.settings.presets import ALIASES, PRESETS, Preset
from wan.settings.request import Request, make_request
from wan.settings.rules import Values
from wan.settings.step_cache import StepCache
from wan.settings.values import path as read_path
from wan.settings.values import pictures as read_pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from wan.pipeline.driving import DrivingVideos
    from wan.pipeline.media import PoseVideo, Sound
    from wan.pipeline.pipeline import Inputs
    from wan.pipeline.sources import ControlSources

MAX_RANKS = 4096  # that --plan plans for
_DEMOS = Path(__file__).resolve().parents[1] / "examples" / "demo"  # trained, in the repository
DescribeFolder = Callable[[Path, NetworkFiles, tuple[Preset, ...]], Checkpoint]
"""As `wan.checkpoint.layout.describe`."""
PATHS = [name for name, flag in FLAGS.items() if flag.read is read_path]
"""Absolute in records; may differ between ranks."""
INPUTS = [
    name
    for name, flag in FLAGS.items()
    if name in ("fixed_latents", "decode_latents")
    or (flag.line and flag.read in (read_path, read_pictures) and name not in options(Output))
]
"""Settings that name the files a video is made from."""


@dataclass(frozen=True)
class InputFile:
    """A file that a video is made from.

    Attributes:
        setting: The setting that names it, or its folder.
        path: The file.
        sha256: The digest of its content, in hexadecimal.
    """

    setting: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class Line:
    """A line of a prompt file, which asks for a video.

    Attributes:
        number: In the file, from 1.
        seed: Which of the line's `seeds` it is; None where it has one video.
        run: What it asks for; None where that is refused on all ranks.
        error: Why there is no video of it.
        draws: Its seed is drawn.
    """

    number: int
    run: Run | None
    error: str = ""
    draws: bool = False
    seed: int | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.number}" if self.seed is None else f"{self.number} (seed {self.seed})"

    def with_seed(self, seed: int) -> Line:
        """The line with what was drawn for all lines; its own seed follows from its number."""
        if self.run is None or not self.draws:
            return self
        return replace(self, run=self.run.with_seed((seed + self.number) % 2**63))


@dataclass(frozen=True)
class Run:
    """One run of the command line, checked.

    Attributes:
        setup: What the pipeline is built for.
        request: The video.
        output: Where results go.
        image: The image to start from.
        last_image: The image to end with.
        sound: The sound to follow.
        pose: The video whose poses are taken over.
        driving: What moves a character.
        sources: What a video of VACE is made from.
        input_files: All files that the video is made from.
        extension: How the prompt is extended.
        decode_latents: The latents that are only decoded.
        fixed_latents: The latents that denoising starts from.
        planning: What `plan` says more.
        device_memory: Bytes of a device that the plan is compared with.
        power: The run is metered.
        settings: For the JSON record: what `--from_json` repeats the run from.
        notices: Lines that the user should see before the work.
        lines: Of a prompt file; the rest then is that of the first line that can be carried out.
        summary: Where what became of the lines is written; None without a prompt file.
        skip_existing: Videos that are there already are left out.
        group_by_expert: All lines' steps of an expert come before the next one's.
    """

    setup: Setup
    request: Request
    output: Output
    image: Image | None
    last_image: Image | None
    sound: Sound | None
    pose: PoseVideo | None
    driving: DrivingVideos | None
    sources: ControlSources | None
    input_files: tuple[InputFile, ...]
    extension: PromptExtension | None
    decode_latents: Path | None
    fixed_latents: Path | None
    planning: Planning
    device_memory: int | None
    power: bool
    settings: dict[str, Any]
    notices: tuple[str, ...]
    lines: tuple[Line, ...] = ()
    summary: Path | None = None
    skip_existing: bool = False
    group_by_expert: bool = False

    @property
    def verbose(self) -> bool:
        """Whether the run says what happens in the layers."""
        return self.output.log_level == "debug"

    @property
    def boundary(self) -> float | None:
        """The share of the training timesteps from which on the high-noise expert works, if any."""
        return self.request.boundary if self.decode_latents is None else None

    def with_seed(self, seed: int) -> Run:
        """The run with another seed, also in its record; lines of a file have their own."""
        if self.lines:
            return replace(self, lines=tuple(line.with_seed(seed) for line in self.lines))
        request = replace(self.request, base_seed=seed)
        return replace(self, request=request, settings=self.settings | {"base_seed": seed})

    def with_prompt(self, prompt: str) -> Run:
        """The run with the extended prompt, which its record repeats without extending again."""
        kept = {n: v for n, v in self.settings.items() if n not in options(PromptExtension)}
        settings = kept | {"prompt": prompt, "use_prompt_extend": False}
        return replace(self, request=replace(self.request, prompt=prompt), settings=settings)

    def saved_to(self, path: Path) -> Run:
        """The run with another name of its video."""
        settings = self.settings | {"save_file": str(path.absolute())}
        return replace(self, output=replace(self.output, save_file=path), settings=settings)

    def inputs(self) -> Inputs:
        """What the pipeline makes the video from besides the request."""
        from wan.pipeline.pipeline import Inputs  # imports torch
        from wan.pipeline.video import load_latents

        return Inputs(
            self.image,
            self.last_image,
            sound=self.sound,
            pose=self.pose,
            driving=self.driving,
            sources=self.sources,
            start=None if self.fixed_latents is None else load_latents(self.fixed_latents),
        )

    def facts(self, device: str) -> dict[str, Any]:
        """What has to be equal on all ranks, under the names a user knows.

        What tells a user nothing, such as a hash, stands in a dictionary.

        Args:
            device: The type of the rank's device.
        """
        setup = self.setup
        parts = (setup.attention, setup.parallel, setup.execution, self.output)
        named = {name: value for part in parts for name, value in vars(part).items()}
        named = without_paths(named | self.settings) | {
            "power": self.power,
            "trace": self.output.trace is not None,
            "skip_existing": self.skip_existing,
            "group_by_expert": self.group_by_expert,
        }
        found = {f"--{name}": value for name, value in named.items()} | {
            f"the content of {name}": {"hash": value} for name, value in self.contents().items()
        }
        found["the video's size"] = self.request.video_size
        for line in self.lines:
            asked: Any = None
            if line.run is not None:  # a few bytes stand for the settings of a line
                content = [file.sha256 for file in line.run.input_files]
                shared = without_paths(line.run.settings) | {"content of its files": content}
                text = json.dumps(shared, sort_keys=True, default=str)
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                asked = digest, line.draws or line.run.request.base_seed
            found[f"line {line.name} of --prompt_file"] = {"hash": asked}
        return found | {"the device": device}

    def contents(self) -> dict[str, Any]:
        """Digests of all files that decide what the video shows, by what names them."""
        setup, files = self.setup, self.setup.quantised
        found: dict[str, Any] = {
            "--ckpt_dir": fingerprint(setup.checkpoint.files()),
            "--quant_dit_path": files and fingerprint(files.files()),
            "--step_cache_curve": setup.policy and setup.policy.content,
            "--lora": {
                name: [(one.strength, fingerprint([one.file])) for one in ones]
                for name, ones in setup.loras.items()
            },
        }
        for name in INPUTS:
            digests = [file.sha256 for file in self.input_files if file.setting == name]
            found[f"--{name}"] = digests or None
        return found


def without_paths(settings: Values) -> dict[str, Any]:
    """Returns settings without paths, which may differ between ranks, and without the seed."""
    own = (*PATHS, *options(Loras), "src_ref_images", "base_seed")
    return {name: value for name, value in settings.items() if name not in own}


def resolve(
    values: Values,
    make_demo: Callable[[str, Path], None],
    plan: bool = False,
    describe: DescribeFolder = describe,
    inputs: bool = True,
) -> Run:
    """The run that settings ask for.

    Args:
        values: The settings; defaults that a checkpoint brings and the task's preset fill the rest.
        make_demo: make_demo(task, folder) writes a randomly initialised checkpoint; called only
            where no checkpoint is given and none has been made yet.
        plan: The run is only planned: its ranks need not exist, nothing is written, and without a
            checkpoint the task's published sizes hold.
        describe: Describes a checkpoint; many runs of one checkpoint may remember it.
        inputs: An image, a sound or poses that the task needs have to be given.

    Raises:
        InputError: For everything that is wrong, in one sentence.
    """
    task: str = values.get("task", "t2v-A14B")
    preset = PRESETS[ALIASES.get(task, task)]
    world, decodes = env.world_size(), "decode_latents" in values
    if plan and world == 1:
        world = prod(values.get(name) or 1 for name in SIZES)
        if world > MAX_RANKS:
            raise InputError(f"The sizes make {world} ranks", remedy=f"give at most {MAX_RANKS}")
    lacks = plan or not inputs
    image, last_image = (None, None) if decodes else _images(values, preset, lacks)
    size = None if image is None else image.size
    sound, pose = (None, None) if decodes else sounds(values, preset, lacks)
    moving = None if decodes else driving(values, preset, lacks)
    sources = None if decodes else control(values, preset, lacks)
    size = sources.size if sources is not None else size
    chosen = fill(NetworkFiles, values)
    folder, is_demo = _checkpoint_folder(values, preset, chosen)
    meant = tuple(PRESETS[name] for name in (task, ALIASES.get(task)) if name in PRESETS)
    if is_demo and (plan or not folder.is_dir()):
        checkpoint = published(preset)
        if not plan:  # what can be refused is refused before anything is written
            _decide(values, {}, preset, checkpoint, world, size)
            make_demo(preset.task, folder)
            checkpoint = describe(folder, chosen, meant)
    else:
        checkpoint = describe(folder, chosen, meant)
    if task in ALIASES and checkpoint.experts.keys() == {"dit"}:
        two = task == "i2v-14B" and checkpoint.images == 2
        preset = PRESETS["flf2v-14B" if two else task]
    check_task(checkpoint, preset)
    defaults = {} if checkpoint.folder is None else generation_config(checkpoint.folder)
    values = {**values, **_counted(values, preset, defaults, sound, moving, sources)}
    setup, request, notices = _decide(values, defaults, preset, checkpoint, world, size)
    check_start(values.get("fixed_latents"), request.latent_shape)
    if not plan:
        more = ("image_encoder",) if preset.images else ("sound_encoder",) if sound else ()
        for part in ("vae",) if decodes else ("vae", "text_encoder", "tokenizer", *more):
            checkpoint.require(part)
    own = request.fps, moving and defaults.get("fps", moving.fps), sources and sources.fps
    name = {"save_file": Path(generated_name(task, request)), "fps": [f for f in own if f][-1]}
    output = fill(Output, name | {**values})
    demo = folder if is_demo and not plan else None
    return Run(
        setup=setup,
        request=request,
        output=output,
        image=image,
        last_image=last_image,
        sound=sound,
        pose=pose,
        driving=moving,
        sources=sources,
        input_files=() if plan else _input_files(values, moving),
        extension=fill(PromptExtension, values) if values.get("use_prompt_extend") else None,
        decode_latents=values.get("decode_latents"),
        fixed_latents=values.get("fixed_latents"),
        planning=fill(Planning, values),
        device_memory=int(values["device_memory"] * 1e9) if "device_memory" in values else None,
        power=values.get("power", False),
        settings=_record({**values, "task": task, "ckpt_dir": folder}, setup, request, output),
        notices=(*_about(request, output, demo, defaults), *notices),
    )


def _input_files(values: Values, moving: DrivingVideos | None) -> tuple[InputFile, ...]:
    """Lists the files that a video is made from, with the digests of their contents."""
    found: list[InputFile] = []
    for name in ("decode_latents",) if "decode_latents" in values else INPUTS:
        paths = values.get(name, ())
        if moving is not None and name == "src_root_path":
            paths = moving.files
        several = [paths] if isinstance(paths, Path) else paths
        found += [InputFile(name, Path(one), content_digest(Path(one))) for one in several]
    return tuple(found)


def _counted(
    values: Values,
    preset: Preset,
    defaults: Values,
    sound: Sound | None,
    moving: DrivingVideos | None,
    sources: ControlSources | None,
) -> dict[str, Any]:
    """Counts what follows from what a video is made from: clips, frames, pictures."""
    if preset.infer_frames is not None:
        return clips(values, preset, sound, defaults)
    if preset.kind == "animate":
        return moves(values, preset, moving, defaults)
    return controlled(values, preset, sources, defaults)


def _decide(
    values: Values,
    defaults: Values,
    preset: Preset,
    checkpoint: Checkpoint,
    world: int,
    image_size: tuple[int, int] | None,
) -> tuple[Setup, Request, tuple[str, ...]]:
    """What a pipeline is built for, the video, and notices about both."""
    if "decode_latents" not in values:
        setup, notices = make_setup(values, preset, checkpoint, world)
        request, more = ask(setup, values, image_size, defaults)
        return setup, request, (*notices, *more)
    denoising = {"quant_dit_path"}.union(*map(options, (Loras, Attention, Parallel, StepCache)))
    values = {name: value for name, value in values.items() if name not in denoising}
    path = values["decode_latents"]
    channels, frames, height, width = latents_shape(path)
    if channels != preset.latent_channels:
        why = f"and the {preset.vae} VAE of this task decodes {preset.latent_channels}"
        remedy = "give the `ckpt_dir` that the latents were made with"
        raise InputError(f"{path} has {channels} channels", None, why, remedy)
    t, h, w = preset.vae_stride
    stored = {"frame_num": (frames - 1) * t + 1, "size": (width * w, height * h)}
    for name in stored.keys() & values.keys():
        of_image = name == "size" and {"image", "src_video"} & {*values}  # whose ratio decides
        if values[name] != stored[name] and not of_image:
            why = f"holds latents whose {name} is {stored[name]}, and its settings say "
            why, remedy = f"{why}{values[name]}", "take the file as generate.py wrote it"
            raise InputError(str(path), None, why, remedy)
    values = stored | values
    if world > 1 and not values.get("vae_parallel"):
        why = f"runs on one process, but {world} were started"
        remedy = "start it without torchrun, or add `vae_parallel`"
        raise InputError("`decode_latents`", None, why, remedy)
    setup, _ = make_setup(values, preset, checkpoint, world)  # the notices are about the DiT
    request = make_request(preset, recipes.under(values, defaults), image_size)
    return setup, request, setup.check_request(request)


def make_setup(
    values: Values, preset: Preset, checkpoint: Checkpoint, world: int
) -> tuple[Setup, tuple[str, ...]]:
    """What a pipeline is built for, and notices.

    Args:
        values: Settings; those of other subjects are ignored.
        preset: The task.
        checkpoint: A checkpoint of the task.
        world: How many ranks share each video.
    """
    execution, chip = fill(Execution, values), values.get("chip")
    if chip is not None:
        if execution.device not in ("auto", "npu"):
            why = f"is an NPU, but not `device={execution.device}`"
            raise InputError("`chip`", chip, why, "drop one of them")
        execution = replace(execution, device="npu")
    topology, notices = parallel.resolve(values, world, checkpoint.heads)
    if env.world_size() > 1:
        notices += parallel.spanning(topology, env.local_world_size(), checkpoint.heads)
    attention = fill(Attention, values)
    exported = None
    if "quant_dit_path" in values:
        exported = quantised.resolve(
            values["quant_dit_path"],
            checkpoint,
            device=execution.device,
            dit_fsdp=topology.dit_fsdp,
            fa_quant=attention.fa_quant if attention.fp8 else None,
        )
    cache = fill(StepCache, values)
    steps = policy.make(cache, preset, checkpoint.folder)
    loras = lora.resolve(values, checkpoint)
    parts = (execution, topology, attention, exported, chip, cache, steps, loras)
    return Setup(preset, checkpoint, *parts), notices


def ask(
    setup: Setup,
    values: Values,
    image_size: tuple[int, int] | None = None,
    defaults: Values | None = None,
) -> tuple[Request, tuple[str, ...]]:
    """The video that settings ask of a setup, and notices.

    A recipe, named or recognised by its files, goes below the settings, and defaults below the
    recipe.

    Args:
        setup: What the pipeline is built for.
        values: Settings; those of other subjects are ignored.
        image_size: (width, height) of the image to start from.
        defaults: Settings that the checkpoint brings.
    """
    checkpoint, name = setup.checkpoint, values.get("recipe", "auto")
    weights = {info.file for dit in checkpoint.experts.values() for info in dit.tensors.values()}
    folder = [] if checkpoint.folder is None else [checkpoint.folder]
    files = [one.file for ones in lora.named_files(values).values() for one in ones]
    chosen, sampling = recipes.choose(name, [*folder, *sorted(weights)], files, setup.preset)
    boundary = {} if checkpoint.boundary is None else {"boundary": checkpoint.boundary}
    values = recipes.under(values, recipes.under(sampling, {**(defaults or {}), **boundary}))
    request = make_request(setup.preset, values, image_size)
    check_chain(values, request)
    recipes.check_chain(request.chain, files)
    about_loras = lora.notices(setup.loras, setup.preset.kind, bool(chosen))
    said = (*recipes.notices(chosen, request, bool(files)), *about_loras)
    return request, (*said, *setup.check_request(request))


def generation_config(folder: Path) -> dict[str, Any]:
    """Sampling defaults that a checkpoint brings in its generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    raw, allowed = read_json(path), [name for name, flag in FLAGS.items() if flag.checkpoint]
    for key in raw:
        if key not in allowed:
            why = f"sets {key!r}, but a checkpoint may set {', '.join(allowed)}"
            raise InputError(str(path), why=why, remedy="remove it")
    return read(raw, f"{path}: {{}}")


def generated_name(task: str, request: Request) -> str:
    """`task_WxH_start-of-prompt_seed_time.mp4`, safe as a file name on every system.

    The official name keeps `*`, quotes and line breaks; here letters, digits, `-` and `.` stay.
    """
    words = re.sub(r"[^\w.-]+", "_", request.prompt[:200]).strip("_.")
    while len(words.encode("utf-8")) > 50:
        words = words[:-1]
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    width, height = request.video_size
    parts = (task, f"{width}x{height}", words, str(request.base_seed), stamp)
    return "_".join(filter(None, parts)) + ".mp4"


def _record(values: Values, setup: Setup, request: Request, output: Output) -> dict[str, Any]:
    """All settings under their flags' names, enough to repeat the video."""
    found: dict[str, Any] = {**vars(setup.execution), **vars(setup.attention)}
    found |= step_cache.given(setup.cache) | {"step_cache": setup.cache.step_cache}
    found |= {**values, **vars(request), **vars(output)}  # latents keep how they were made
    if request.infer_frames is not None:
        del found["frame_num"]  # which follows from it
    found |= {name: str(Path(found[name]).absolute()) for name in PATHS if found.get(name)}
    return {
        name: found[name]
        for name, flag in FLAGS.items()
        if flag.record
        and found.get(name) is not None
        and (flag.needs is None or found.get(flag.needs))
    }


def _checkpoint_folder(values: Values, preset: Preset, chosen: NetworkFiles) -> tuple[Path, bool]:
    """The checkpoint folder, and whether it is a demo's; without one, that of a chosen DiT."""
    if "ckpt_dir" in values:
        return values["ckpt_dir"], False
    official = Path(preset.folder)
    if official.is_dir():
        return official, False
    dit = chosen.dit or chosen.dit_high_noise or chosen.dit_low_noise
    if dit is not None:
        return dit.parent, False
    trained = _DEMOS / preset.task
    return trained if trained.is_dir() else env.cache_dir() / f"demo-{preset.task}-v1", True


def _images(values: Values, preset: Preset, plan: bool) -> tuple[Image | None, Image | None]:
    """Reads the images to start from and to end with."""
    if "image" in values and preset.kind == "animate":
        remedy = "drop it; the picture is src_ref.png in `src_root_path`"
        raise InputError("`task`", preset.task, "takes no `image`", remedy)
    if "image" in values and preset.kind == "vace":
        remedy = "give pictures with `src_ref_images`, or drop it"
        raise InputError("`task`", preset.task, "takes no `image`", remedy)
    if "image" in values and preset.kind == "t2v":
        remedy = "use i2v-A14B or ti2v-5B, or drop the image"
        raise InputError("`task`", preset.task, "takes no `image`", remedy)
    if "image" not in values and preset.kind in ("i2v", "s2v") and not plan:
        raise InputError("`task`", preset.task, "starts from an image", "give one with `image`")
    if not {"image", "last_image"} & values.keys():
        return None, None
    from wan.pipeline import images

    first, last = (
        images.read(values[name], name) if name in values else None
        for name in ("image", "last_image")
    )
    return first, last


def _about(request: Request, output: Output, demo: Path | None, defaults: Values) -> list[str]:
    """Lines about the checkpoint, the video's size and a video that is there already."""
    lines, preset = [], request.preset
    if demo is not None:
        expect = "It is randomly initialised, so the video is noise; it shows that everything runs."
        if demo.parent == _DEMOS:
            expect = f"It draws plain shapes that move; {_DEMOS / 'README.md'} lists its words."
        lines.append(
            f"No --ckpt_dir and no ./{preset.folder}: using the demo checkpoint {demo}. {expect}"
        )
    size, trained, who = "*".join(map(str, request.size)), preset.trained_sizes, preset.task
    if demo is not None and demo.parent == _DEMOS:
        trained, who = ("*".join(map(str, defaults["size"])),), "the demo"
    if size not in trained and request.size != defaults.get("size"):
        lines.append(f"{size} is not a size {who} was trained on ({', '.join(trained)}).")
    if output.save_file.exists():
        lines.append(f"{output.save_file} exists and will be replaced.")
    return lines
