"""From values to a run: the one road of the command line, `--plan` and the Python classes.

Values are layered (a flag wins over the record of an earlier run, that over a variable that stands
for a flag, that over the checkpoint's generation_config.json, that over the task's preset) and all
of them checked. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wan.checkpoint import quantised
from wan.checkpoint.files import fingerprint, read_json, safetensors_metadata
from wan.checkpoint.layout import Checkpoint, check_task, describe, published
from wan.cli import env, memory
from wan.cli.extend_prompt import Extension
from wan.cli.flags import FLAGS, read
from wan.cli.output import Output, check_writable, generated_name
from wan.pipeline import images
from wan.pipeline.caching import find_curve
from wan.pipeline.setup import Setup
from wan.pipeline.video import latents_shape
from wan.settings import parallel
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import SIZES, Parallel
from wan.settings.presets import ALIASES, PRESETS, Preset
from wan.settings.request import Request, make_request
from wan.settings.step_cache import StepCache, given, is_read
from wan.settings.values import path as read_path

if TYPE_CHECKING:
    from PIL.Image import Image

Values = Mapping[str, Any]
"""Checked settings under their flags' names, as `wan.cli.flags.read` returns them."""
T = TypeVar("T")
MAX_RANKS = 4096  # that --plan plans for
_DEMOS = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained, in the repository
_DECODING = (
    *("decode_latents", "ckpt_dir", "save_file", "fps", "device"),
    *("vae_tiling", "offload_model"),
)
_FROM_CHECKPOINT = (
    "size",
    "frame_num",
    "sample_solver",
    "sample_steps",
    "sample_shift",
    "sample_guide_scale",
    "fps",
    "prompt",
    "negative_prompt",
)
_PATHS = [name for name, flag in FLAGS.items() if flag.read is read_path]
"""Absolute in records; may differ between ranks."""
_OWN = (*_PATHS, "base_seed")


@dataclass(frozen=True)
class Run:
    """Everything the command line needs.

    Attributes:
        setup: What the pipeline is built for.
        request: The video.
        output: Where results go.
        image: The image to start from.
        extension: The language model that extends the prompt.
        decode_latents: The latents that are only decoded.
        device_memory: Bytes of a device, as --device_memory says.
        settings: For the JSON record: what --from_json repeats the run from.
        notices: Lines that the user should see before the work.
    """

    setup: Setup
    request: Request
    output: Output
    image: Image | None
    extension: Extension | None
    decode_latents: Path | None
    device_memory: int | None
    settings: dict[str, Any]
    notices: tuple[str, ...]

    def with_seed(self, seed: int) -> Run:
        """The run with another seed, also in its record."""
        request = replace(self.request, base_seed=seed)
        return replace(self, request=request, settings=self.settings | {"base_seed": seed})

    def with_prompt(self, prompt: str) -> Run:
        """The run with the extended prompt, which its record repeats without extending again."""
        off = {name for name, flag in FLAGS.items() if flag.needs == "use_prompt_extend"}
        kept = {name: value for name, value in self.settings.items() if name not in off}
        settings = kept | {"prompt": prompt, "use_prompt_extend": False}
        return replace(self, request=replace(self.request, prompt=prompt), settings=settings)

    def facts(self, device: str) -> dict[str, Any]:
        """What has to be equal on all ranks, under the names a user knows. device: its type."""
        setup, files = self.setup, self.setup.quantised
        settings = asdict(setup.attention) | asdict(setup.parallel) | self.settings
        return {
            **{f"--{name}": value for name, value in settings.items() if name not in _OWN},
            "the content of --quant_dit_path": files and fingerprint(files.files()),
            "the curve of --step_cache": setup.curve and setup.curve.ratios,
            "the video's size": self.request.video_size,
            "the device": device,
            "the checkpoint's content": fingerprint(setup.checkpoint.files()),
        }


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
    values = _layered(flags)
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
            _decide(values, preset, checkpoint, world, image_size)
            make_demo(preset.task, folder)
            checkpoint = describe(folder)
    else:
        checkpoint = describe(folder)
    if task == "t2v-14B" and checkpoint.experts.keys() == {"dit"}:
        preset = PRESETS["t2v-14B"]
    check_task(checkpoint, preset)
    defaults = {} if checkpoint.folder is None else _generation_config(checkpoint.folder)
    values = defaults | values
    setup, request, notices = _decide(values, preset, checkpoint, world, image_size)
    if not plan:
        decodes = "decode_latents" in values
        for part in ("vae",) if decodes else ("vae", "text_encoder", "tokenizer"):
            checkpoint.require(part)
        if not decodes:
            memory.check(setup, request, env.local_world_size())
    output = Output(
        save_file=values.get("save_file") or Path(generated_name(task, request)),
        fps=values.get("fps", preset.fps),
        save_latents=values.get("save_latents", False),
    )
    return Run(
        setup=setup,
        request=request,
        output=output,
        image=image,
        extension=extension,
        decode_latents=values.get("decode_latents"),
        device_memory=int(values["device_memory"] * 1e9) if "device_memory" in values else None,
        settings=_record(values | {"task": task, "ckpt_dir": folder}, setup, request, output),
        notices=(
            *_about(request, output, folder if is_demo and not plan else None, defaults),
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
    parts = (execution, topology, attention, exported, chip, cache, curve)
    return Setup(preset, checkpoint, *parts), notices


def check_needs(values: Values) -> None:
    """InputError for a setting without the one that it belongs to."""
    for name in values:
        needs = FLAGS[name].needs
        if needs is not None and not values.get(needs):
            raise InputError(f"--{name} has no effect without --{needs}; add it or drop --{name}.")


def _decide(
    values: Values,
    preset: Preset,
    checkpoint: Checkpoint,
    world: int,
    image_size: tuple[int, int] | None,
) -> tuple[Setup, Request, tuple[str, ...]]:
    if "decode_latents" in values:  # there is no attention
        kinds = (Attention, Parallel, StepCache)
        denoising = {"quant_dit_path", *(field.name for kind in kinds for field in fields(kind))}
        values = {name: value for name, value in values.items() if name not in denoising}
        _check_latents(values["decode_latents"], preset)
        if world > 1:
            raise InputError(
                f"--decode_latents runs on one process, but {world} were started; start it as "
                "`python generate.py --decode_latents ...`."
            )
    setup, notices = make_setup(values, preset, checkpoint, world)
    request = make_request(preset, values, image_size)
    return setup, request, (*notices, *setup.check_request(request))


def _made(kind: Callable[..., T], values: Values) -> T:
    """A dataclass whose fields are named like flags, from the values that are present."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


def _layered(flags: Values) -> dict[str, Any]:
    """The given flags over an earlier run's record over variables.

    A switch that a flag turns off, or another step cache, takes back what is said below beside it.
    """
    below = {**env.aliases(), **_recorded(flags)}
    values = {**below, **flags}
    for name in below.keys() - flags.keys():
        needs = FLAGS[name].needs
        if (needs is not None and not values.get(needs)) or not is_read(name, values):
            del values[name]
    check_needs({name: value for name, value in values.items() if FLAGS[name].needs != "plan"})
    return values


def _recorded(flags: Values) -> dict[str, Any]:
    """Settings of the earlier run that --from_json repeats or --decode_latents continues."""
    if "from_json" in flags and "decode_latents" in flags:
        raise InputError("--from_json and --decode_latents exclude each other; give one of them.")
    if "plan" in flags and "decode_latents" in flags:
        raise InputError("--plan is about denoising, --decode_latents only decodes; drop one.")
    if "from_json" in flags:
        path = flags["from_json"]
        settings = read_json(path).get("settings")
        if isinstance(settings, dict):  # the repeat gets a name of its own: nothing is overwritten
            settings = {key: value for key, value in settings.items() if key != "save_file"}
    elif "decode_latents" in flags:
        for name in flags:
            if name not in _DECODING:
                raise InputError(
                    f"--{name} has no effect with --decode_latents, which only decodes; drop it."
                )
        path = flags["decode_latents"]
        latents_shape(path)
        settings = safetensors_metadata(path, "settings")
    else:
        return {}
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name} is not part of a record; remove it.")
    return read(settings, f"{path}: {{}}")


def _generation_config(folder: Path) -> dict[str, Any]:
    """Sampling defaults that the checkpoint brings in its generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    raw = read_json(path)
    for key in raw:
        if key not in _FROM_CHECKPOINT:
            raise InputError(
                f"{path} sets {key!r}; a checkpoint may set {', '.join(_FROM_CHECKPOINT)}."
            )
    return read(raw, f"{path}: {{}}")


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


def _record(values: Values, setup: Setup, request: Request, output: Output) -> dict[str, Any]:
    """All settings under their flags' names, enough to repeat the video."""
    found: dict[str, Any] = {**_named(setup.execution), **_named(setup.attention)}
    found |= given(setup.cache) | {"step_cache": setup.cache.step_cache}
    found |= {**values, **_named(request), **_named(output)}  # latents keep how they were made
    found |= {name: str(Path(found[name]).absolute()) for name in _PATHS if name in found}
    return {
        name: found[name]
        for name, flag in FLAGS.items()
        if flag.record
        and found.get(name) is not None
        and (flag.needs is None or found.get(flag.needs))
    }


def _named(part: Execution | Attention | Request | Output) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(part)}


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
