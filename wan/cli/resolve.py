"""From values to a run: the one road of the command line, `--plan` and the Python classes.

Values are layered (`wan.cli.records`) and all of them checked. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wan.checkpoint import layout, lora, quantised
from wan.checkpoint.files import fingerprint
from wan.checkpoint.layout import Checkpoint, check_task, describe, published
from wan.cli import env, memory
from wan.cli.extend_prompt import Extension
from wan.cli.output import check_trace, check_writable, generated_name
from wan.cli.records import PATHS, Values, generation_config, layered, record
from wan.pipeline import images
from wan.pipeline.caching import find_curve
from wan.pipeline.setup import Setup
from wan.pipeline.video import latents_shape
from wan.settings import parallel, recipes
from wan.settings.attention import Attention
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import options
from wan.settings.flags import FLAGS
from wan.settings.parallel import SIZES, Parallel
from wan.settings.presets import ALIASES, PRESETS, Preset
from wan.settings.request import Request, make_request
from wan.settings.step_cache import StepCache

if TYPE_CHECKING:
    from PIL.Image import Image

    from wan.cli.prompt_file import Line

T = TypeVar("T")
MAX_RANKS = 4096  # that --plan plans for
_DEMOS = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained, in the repository
_OWN = (*PATHS, *lora.FLAGS, "base_seed")


@dataclass(frozen=True)
class Run:
    """Everything the command line needs.

    Attributes:
        setup: What the pipeline is built for.
        request: The video.
        output: Where results go.
        image: The image to start from.
        last_image: The image to end with.
        extension: The language model that extends the prompt.
        decode_latents: The latents that are only decoded.
        device_memory: Bytes of a device, as --device_memory says.
        power: The run is metered.
        settings: For the JSON record: what --from_json repeats the run from.
        notices: Lines that the user should see before the work.
        lines: Of a --prompt_file; the rest then is that of the first line that can be carried out.
        skip_existing: Videos that are there already are left out.
        group_by_expert: All lines' steps of an expert come before the next one's.
    """

    setup: Setup
    request: Request
    output: Output
    image: Image | None
    last_image: Image | None
    extension: Extension | None
    decode_latents: Path | None
    device_memory: int | None
    power: bool
    settings: dict[str, Any]
    notices: tuple[str, ...]
    lines: tuple[Line, ...] = ()
    skip_existing: bool = False
    group_by_expert: bool = False

    @property
    def verbose(self) -> bool:
        """It says what happens in the layers."""
        return self.output.log_level == "debug"

    def with_seed(self, seed: int) -> Run:
        """The run with another seed, also in its record; lines of a file have their own."""
        if self.lines:
            return replace(self, lines=tuple(line.with_seed(seed) for line in self.lines))
        request = replace(self.request, base_seed=seed)
        return replace(self, request=request, settings=self.settings | {"base_seed": seed})

    def with_prompt(self, prompt: str) -> Run:
        """The run with the extended prompt, which its record repeats without extending again."""
        off = {name for name, flag in FLAGS.items() if flag.needs == "use_prompt_extend"}
        kept = {name: value for name, value in self.settings.items() if name not in off}
        settings = kept | {"prompt": prompt, "use_prompt_extend": False}
        return replace(self, request=replace(self.request, prompt=prompt), settings=settings)

    def saved_to(self, path: Path) -> Run:
        """The run with another name of its video."""
        settings = self.settings | {"save_file": str(path.absolute())}
        return replace(self, output=replace(self.output, save_file=path), settings=settings)

    def facts(self, device: str) -> dict[str, Any]:
        """What has to be equal on all ranks, under the names a user knows. device: its type."""
        setup, files = self.setup, self.setup.quantised
        settings = asdict(setup.attention) | asdict(setup.parallel) | self.settings
        return {
            **{f"--{name}": value for name, value in _shared(settings).items()},
            "the content of --quant_dit_path": files and fingerprint(files.files()),
            "the curve of --step_cache": setup.curve and setup.curve.ratios,
            "the content of --lora": [
                (name, one.strength, fingerprint([one.file]))
                for name, ones in setup.loras.items()
                for one in ones
            ],
            "--power": self.power,
            "--vae_parallel": setup.execution.vae_parallel,
            "the video's size": self.request.video_size,
            "--trace": self.output.trace is not None,
            "--trace_steps": self.output.trace_steps,
            "--log_level": self.output.log_level,
            **{
                f"line {line.number} of --prompt_file": line.run
                and (_digest(line.run.settings), line.draws or line.run.request.base_seed)
                for line in self.lines
            },
            "--skip_existing": self.skip_existing,
            "--group_by_expert": self.group_by_expert,
            "the device": device,
            "the checkpoint's content": fingerprint(setup.checkpoint.files()),
        }


def _digest(settings: Values) -> str:
    text = json.dumps(_shared(settings), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shared(settings: Values) -> dict[str, Any]:
    """Without what each rank may have for itself."""
    return {name: value for name, value in settings.items() if name not in _OWN}


def resolve(flags: Values, make_demo: Callable[[str, Path], None], plan: bool = False) -> Run:
    """The run that the given flags ask for.

    Args:
        flags: As `wan.cli.flags.parse` returns them.
        make_demo: make_demo(task, folder) writes a randomly initialised checkpoint; called only
            where no checkpoint is given and none has been made yet.
        plan: The run is only planned: its ranks need not exist, nothing is written, and without a
            checkpoint the task's published sizes hold.

    Raises:
        InputError: For everything that is wrong, in one sentence.
    """
    values = layered(flags)
    check_needs({name: value for name, value in values.items() if FLAGS[name].needs != "plan"})
    task = values.get("task", "t2v-A14B")
    preset = PRESETS[ALIASES.get(task, task)]
    world = _planned_world(values) if plan else env.world_size()
    image = _image(values, preset, plan)
    image_size = None if image is None else image.size
    extension = _extension(values, image is not None)
    if "save_file" in values and not plan:
        check_writable(values["save_file"])
    folder, is_demo = _checkpoint_folder(values, preset)
    if is_demo and (plan or not folder.is_dir()):
        checkpoint = published(preset)
        if not plan:  # what can be refused is refused before anything is written
            sampling = _recipe(values, checkpoint, preset)[1]
            _decide(recipes.under(values, sampling), preset, checkpoint, world, image_size)
            make_demo(preset.task, folder)
            checkpoint = describe(folder)
    else:
        checkpoint = describe(folder)
    if task in ALIASES and checkpoint.experts.keys() == {"dit"}:
        two = task == "i2v-14B" and layout.images(checkpoint) == 2
        preset = PRESETS["flf2v-14B" if two else task]
    check_task(checkpoint, preset)
    defaults = {} if checkpoint.folder is None else generation_config(checkpoint.folder)
    recipe, sampling = _recipe(values, checkpoint, preset)
    values = recipes.under(values, recipes.under(sampling, defaults))
    setup, request, notices = _decide(values, preset, checkpoint, world, image_size)
    if not plan:
        decodes = "decode_latents" in values
        looks = ("image_encoder",) if preset.images else ()
        for part in ("vae",) if decodes else ("vae", "text_encoder", "tokenizer", *looks):
            checkpoint.require(part)
        if not decodes:
            memory.check(setup, request, env.local_world_size())
    output = _made(
        Output,
        {"save_file": Path(generated_name(task, request)), "fps": preset.fps, **values},
    )
    check_trace(output, setup.execution.compile, request.sample_steps)
    return Run(
        setup=setup,
        request=request,
        output=output,
        image=image,
        last_image=_last_image(values),
        extension=extension,
        decode_latents=values.get("decode_latents"),
        device_memory=int(values["device_memory"] * 1e9) if "device_memory" in values else None,
        power=values.get("power", False),
        settings=record(values | {"task": task, "ckpt_dir": folder}, setup, request, output),
        notices=(
            *_about(request, output, folder if is_demo and not plan else None, defaults),
            *recipes.notices(recipe, request),
            *notices,
        ),
    )


def make_setup(
    values: Values, preset: Preset, checkpoint: Checkpoint, world: int
) -> tuple[Setup, tuple[str, ...]]:
    """What a pipeline is built for, and notices.

    Args:
        values: Other subjects' are ignored.
        preset: The task.
        checkpoint: Of the task.
        world: Ranks that share each video.
    """
    execution = _made(Execution, values)
    chip = values.get("chip")
    if chip is not None:
        if execution.device not in ("auto", "npu"):
            raise InputError(
                f"--chip {chip} is an NPU, but --device is {execution.device}; drop one of them."
            )
        execution = replace(execution, device="npu")
    topology, notices = parallel.resolve(values, world, checkpoint.heads)
    attention = _made(Attention, values)
    exported = None
    if "quant_dit_path" in values:
        exported = quantised.resolve(
            values["quant_dit_path"],
            checkpoint,
            device=execution.device,
            dit_fsdp=topology.dit_fsdp,
            fa_quant=attention.fa_quant if attention.fp8 else None,
        )
    cache = _made(StepCache, values)
    curve = find_curve(cache, checkpoint.folder, preset)
    loras = lora.resolve(values, checkpoint)
    parts = (execution, topology, attention, exported, chip, cache, curve, loras)
    return Setup(preset, checkpoint, *parts), notices


def check_needs(values: Values) -> None:
    """InputError for a setting without the one that it belongs to."""
    for name in values:
        needs = FLAGS[name].needs
        if needs is not None and not values.get(needs):
            raise InputError(f"--{name} has no effect without --{needs}; add it or drop --{name}.")


def _recipe(
    values: Values, checkpoint: Checkpoint, preset: Preset
) -> tuple[str | None, dict[str, Any]]:
    """The recipe's name and settings; recognised from the files, unless one is named."""
    if "decode_latents" in values:
        return None, {}
    asked, weights, loras = values.get("recipe", "auto"), *recipe_files(values, checkpoint)
    return recipes.choose(asked, weights, loras, preset)


def recipe_files(values: Values, checkpoint: Checkpoint) -> tuple[list[Path], list[Path]]:
    """Of a checkpoint and of LoRAs: what a recipe is recognised from."""
    weights = {info.file for dit in checkpoint.experts.values() for info in dit.tensors.values()}
    folder = [] if checkpoint.folder is None else [checkpoint.folder]
    loras = [one.file for ones in lora.named_files(values).values() for one in ones]
    return [*folder, *sorted(weights)], loras


def _decide(
    values: Values,
    preset: Preset,
    checkpoint: Checkpoint,
    world: int,
    image_size: tuple[int, int] | None,
) -> tuple[Setup, Request, tuple[str, ...]]:
    if "decode_latents" in values:  # there is no attention
        kinds = (Attention, Parallel, StepCache)
        denoising = {
            "quant_dit_path",
            *lora.FLAGS,
            *(name for kind in kinds for name in options(kind)),
        }
        values = {name: value for name, value in values.items() if name not in denoising}
        _check_latents(values["decode_latents"], preset)
        if world > 1 and not values.get("vae_parallel"):
            raise InputError(
                f"--decode_latents runs on one process, but {world} were started; start it as "
                "`python generate.py --decode_latents ...`, or add --vae_parallel."
            )
    setup, notices = make_setup(values, preset, checkpoint, world)
    notices = () if "decode_latents" in values else notices  # they are about the DiT
    request = make_request(preset, values, image_size)
    return setup, request, (*notices, *setup.check_request(request))


def _made(kind: Callable[..., T], values: Values) -> T:
    """A dataclass whose fields are named like flags, from the values that are present."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


def _planned_world(values: Values) -> int:
    """The ranks that torchrun started; else as many as the sizes ask for."""
    started, asked = env.world_size(), prod(values.get(name) or 1 for name in SIZES)
    if asked > MAX_RANKS:
        raise InputError(f"The sizes make {asked} ranks; at most {MAX_RANKS} are planned.")
    return asked if started == 1 else started


def _checkpoint_folder(values: Values, preset: Preset) -> tuple[Path, bool]:
    """The checkpoint folder, and whether it is a demo's."""
    if "ckpt_dir" in values:
        return values["ckpt_dir"], False
    official = Path(preset.folder)
    if official.is_dir():
        return official, False
    trained = _DEMOS / preset.task
    return trained if trained.is_dir() else env.cache_dir() / f"demo-{preset.task}-v1", True


def _image(values: Values, preset: Preset, plan: bool) -> Image | None:
    if "decode_latents" in values:
        return None
    if "image" in values:
        if preset.kind == "t2v":
            raise InputError(
                f"Task {preset.task} takes no --image; use i2v-A14B or ti2v-5B, or drop the image."
            )
        return images.read(values["image"])
    if preset.kind == "i2v" and not plan:
        raise InputError(f"Task {preset.task} starts from an image; give one with --image.")
    return None


def _last_image(values: Values) -> Image | None:
    if "last_image" not in values or "decode_latents" in values:
        return None
    return images.read(values["last_image"])


def _extension(values: Values, has_image: bool) -> Extension | None:
    if not values.get("use_prompt_extend"):
        return None
    extension = _made(Extension, values)
    if env.rank() == 0:  # which alone runs the model
        extension.check(has_image)
    return extension


def _check_latents(path: Path, preset: Preset) -> None:
    channels = latents_shape(path)[0]
    if channels != preset.latent_channels:
        raise InputError(
            f"{path} has {channels} channels, the {preset.vae} VAE of this task decodes "
            f"{preset.latent_channels}; give the --ckpt_dir the latents were made with."
        )


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
    size = "*".join(map(str, request.size))
    if size not in preset.trained_sizes and request.size != defaults.get("size"):
        trained = ", ".join(preset.trained_sizes)
        lines.append(f"{size} is not a size {preset.task} was trained on ({trained}).")
    if output.save_file.exists():
        lines.append(f"{output.save_file} exists and will be replaced.")
    return lines
