"""One run, fully resolved. Everything wrong is refused here, before torch is imported.

The JSON record's settings: what `--from_json` repeats a run from.

Where settings come from besides flags: earlier runs' records and the checkpoint itself.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint import quantised
from wan.checkpoint.files import read_json, safetensors_header, safetensors_metadata
from wan.checkpoint.layout import Checkpoint, check_task, describe
from wan.checkpoint.quantised import QuantisedDit
from wan.cli import env
from wan.cli.flags import FLAGS, read
from wan.cli.output import Output, check_writable, generated_name
from wan.settings import attention as attention_flags
from wan.settings import parallel
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.settings.presets import ALIASES, EXAMPLE_PROMPTS, NEGATIVE_PROMPT, PRESETS, Preset
from wan.settings.request import Request, check_image

DemoMaker = Callable[[str, Path], None]
"""(task, folder): writes the demo checkpoint."""
ExtensionCheck = Callable[[str, str | None], None]
"""(method, model): raises InputError when prompt extension cannot work."""


@dataclass(frozen=True)
class PromptExtension:
    """The language model that extends the prompt."""

    method: str
    model: str | None
    target_lang: str


@dataclass(frozen=True)
class Run:
    """Everything generate.py needs. `notices` are lines the user should see before the work."""

    request: Request
    checkpoint: Checkpoint
    execution: Execution
    parallel: Parallel
    attention: Attention
    quantised: QuantisedDit | None
    output: Output
    image: Path | None
    extension: PromptExtension | None
    decode_latents: Path | None
    settings: dict[str, Any]
    notices: tuple[str, ...]


def resolve(flags: Mapping[str, Any], make_demo: DemoMaker, check_extension: ExtensionCheck) -> Run:
    """Layer the given flags over records, checkpoint and presets, and check all of it.

    flags: checked values as `flags.parse` returns them. make_demo is called only when no checkpoint
    is given and the demo has not been made yet.
    """
    world = env.world_size()
    values = {**env.aliases(), **recorded(flags), **flags}
    execution = _fields(Execution, values)
    task = values.get("task", "t2v-A14B")
    preset = PRESETS[ALIASES.get(task, task)]
    topology = None
    if world == 1:  # the head count does not matter to one process
        topology, _ = parallel.resolve(values, world, preset.num_heads, preset.guide_scale)
    image_size = _check_image(values, preset)
    extension = _extension(values, check_extension)
    if values.get("save_file"):
        check_writable(Path(values["save_file"]))
    folder, demo = checkpoint_folder(values, preset)
    if demo and not folder.is_dir():
        request = request_from(values, preset, image_size)  # refuse before making the demo
        attending = attention_for(values, request, execution, topology, None)
        quantised_for(values, None, execution, attending)
        make_demo(preset.task, folder)
    checkpoint = describe(folder)
    if task == "t2v-14B" and checkpoint.experts.keys() == {"dit"}:
        preset = PRESETS["t2v-14B"]
    check_task(checkpoint, preset)
    needed = ("vae",) if "decode_latents" in values else ("vae", "text_encoder", "tokenizer")
    for part in needed:
        checkpoint.require(part)
    defaults = generation_config(folder)
    values = {**defaults, **values}
    request = request_from(values, preset, image_size)
    topology, chosen = _parallel(values, world, checkpoint, request)
    attending = attention_for(values, request, execution, topology, checkpoint.head_dim)
    output = Output(
        Path(values.get("save_file") or generated_name(task, request)),
        values.get("fps", preset.fps),
        values.get("save_latents", False),
    )
    return Run(
        request=request,
        checkpoint=checkpoint,
        execution=execution,
        parallel=topology,
        attention=attending,
        quantised=quantised_for(values, checkpoint, execution, attending),
        output=output,
        image=Path(values["image"]) if "image" in values else None,
        extension=extension,
        decode_latents=_latents_file(values, preset),
        settings=record(values, request, execution, attending, output, folder),
        notices=(*_notices(request, folder, demo, defaults.get("size")), *chosen),
    )


def _parallel(
    values: Mapping[str, Any], world: int, checkpoint: Checkpoint, request: Request
) -> tuple[Parallel, tuple[str, ...]]:
    if world > 1 and "decode_latents" in values:
        raise InputError(
            f"--decode_latents runs on one process, but {world} were started; "
            "start it as `python generate.py --decode_latents ...`."
        )
    return parallel.resolve(values, world, checkpoint.heads, request.guide_scale)


def attention_for(
    values: Mapping[str, Any],
    request: Request,
    execution: Execution,
    topology: Parallel | None,
    head_dim: int | None,
) -> Attention:
    """How the request's self-attention is computed. topology, head_dim: None if not yet known."""
    if "decode_latents" in values:
        return Attention()  # there is none
    return attention_flags.resolve(
        values,
        execution,
        steps=request.sample_steps,
        tokens=prod(request.grid),
        parallel=topology,
        head_dim=head_dim,
    )


def quantised_for(
    values: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    execution: Execution,
    attending: Attention,
) -> QuantisedDit | None:
    """What --quant_dit_path holds for the checkpoint's networks."""
    if "quant_dit_path" not in values or "decode_latents" in values:
        return None
    if checkpoint is None:
        raise InputError("--quant_dit_path takes the rest from a checkpoint; add its --ckpt_dir.")
    return quantised.resolve(
        Path(values["quant_dit_path"]),
        checkpoint,
        device=execution.device,
        dit_fsdp=values.get("dit_fsdp", False),
        fa_quant=attending.fa_quant,
    )


def _fields(kind: type[Execution], values: Mapping[str, Any]) -> Execution:
    return kind(**{k: values[k] for k in kind.__dataclass_fields__ if k in values})


def _check_image(values: Mapping[str, Any], preset: Preset) -> tuple[int, int] | None:
    if "decode_latents" in values:
        return None
    if "image" not in values:
        if preset.kind == "i2v":
            raise InputError(f"Task {preset.task} starts from an image; give one with --image.")
        return None
    if preset.kind == "t2v":
        raise InputError(
            f"Task {preset.task} takes no --image; use i2v-A14B or ti2v-5B, or drop the image."
        )
    return check_image(Path(values["image"]))


def _extension(values: Mapping[str, Any], check: ExtensionCheck) -> PromptExtension | None:
    if not values.get("use_prompt_extend", False):
        return None
    method, model = (
        values.get("prompt_extend_method", "local_qwen"),
        values.get("prompt_extend_model"),
    )
    check(method, model)
    return PromptExtension(method, model, values.get("prompt_extend_target_lang", "zh"))


def request_from(
    values: Mapping[str, Any], preset: Preset, image_size: tuple[int, int] | None
) -> Request:
    """The video for checked settings; what they leave open comes from the preset."""
    width, height = preset.size.split("*")
    seed = values.get("base_seed", -1)
    return Request(
        preset=preset,
        prompt=values.get("prompt", EXAMPLE_PROMPTS[preset.kind]),
        negative_prompt=values.get("negative_prompt") or NEGATIVE_PROMPT,
        image_size=image_size,
        size=values.get("size", (int(width), int(height))),
        frame_num=values.get("frame_num", preset.frame_num),
        sample_steps=values.get("sample_steps", preset.sample_steps),
        sample_shift=values.get("sample_shift", preset.sample_shift),
        sample_solver=values.get("sample_solver", "unipc"),
        guide_scale=values.get("sample_guide_scale", preset.guide_scale),
        boundary=preset.boundary,
        seed=seed if seed >= 0 else random.SystemRandom().randrange(2**63),
        noise_device=values.get("noise_device", "cpu"),
    )


def _latents_file(values: Mapping[str, Any], preset: Preset) -> Path | None:
    if "decode_latents" not in values:
        return None
    path = Path(values["decode_latents"])
    check_latents(path, preset)
    return path


def _notices(
    request: Request, folder: Path, demo: bool, own_size: tuple[int, int] | None
) -> list[str]:
    """Lines worth reading before the work. own_size: what the checkpoint itself asks for."""
    lines = []
    preset = request.preset
    if demo:
        lines.append(demo_notice(folder, preset))
    size = "*".join(map(str, request.size))
    if size not in preset.trained_sizes and request.size != own_size:
        trained = ", ".join(preset.trained_sizes)
        lines.append(f"{size} is not a size {preset.task} was trained on ({trained}).")
    return lines


_PATHS = ("image", "quant_dit_path")


def record(
    values: Mapping[str, Any],
    request: Request,
    execution: Execution,
    attention: Attention,
    output: Output,
    folder: Path,
) -> dict[str, Any]:
    """All settings under their flag names, enough to repeat the run."""
    resolved = {
        **attention.record(),
        **values,
        "task": values.get("task", request.preset.task),
        "ckpt_dir": str(folder.absolute()),
        **{name: str(Path(values[name]).absolute()) for name in _PATHS if name in values},
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "size": request.size,
        "frame_num": request.frame_num,
        "sample_steps": request.sample_steps,
        "sample_shift": request.sample_shift,
        "sample_solver": request.sample_solver,
        "sample_guide_scale": request.guide_scale,
        "base_seed": request.seed,
        "noise_device": request.noise_device,
        "fps": output.fps,
        "save_file": str(output.save_file.absolute()),
        **asdict(execution),
    }
    return {
        name: resolved[name] for name, flag in FLAGS.items() if flag.record and name in resolved
    }


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
_DEMOS = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained, in the repository
_WHILE_DECODING = (
    "decode_latents",
    "ckpt_dir",
    "save_file",
    "fps",
    "device",
    "vae_tiling",
    "offload_model",
)


def recorded(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the earlier run that --from_json repeats or --decode_latents continues."""
    if "from_json" in flags and "decode_latents" in flags:
        raise InputError("--from_json and --decode_latents exclude each other; give one of them.")
    if "from_json" in flags:
        path = Path(flags["from_json"])
        settings = read_json(path).get("settings")
        if isinstance(settings, dict):  # the repeat gets a name of its own: nothing is overwritten
            settings = {key: value for key, value in settings.items() if key != "save_file"}
    elif "decode_latents" in flags:
        for name in flags:
            if name not in _WHILE_DECODING:
                raise InputError(
                    f"--{name} has no effect with --decode_latents, which only decodes; drop it."
                )
        path = Path(flags["decode_latents"])
        _latents(path)
        settings = safetensors_metadata(path, "settings")
    else:
        return {}
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name} is not part of a record; remove it.")
    return read(settings, f"{path}: {{}}")


def _latents(path: Path) -> tuple[int, ...]:
    found = safetensors_header(path).get("latents")
    if found is None or len(found.shape) != 4 or 0 in found.shape:
        raise InputError(f"{path} holds no latents of generate.py; give a .latents.safetensors.")
    return found.shape


def check_latents(path: Path, preset: Preset) -> None:
    """The latents must be those of the task's VAE."""
    channels = _latents(path)[0]
    if channels != preset.latent_channels:
        raise InputError(
            f"{path} has {channels} channels, the {preset.vae} VAE of this task decodes "
            f"{preset.latent_channels}; give the --ckpt_dir the latents were made with."
        )


def checkpoint_folder(values: Mapping[str, Any], preset: Preset) -> tuple[Path, bool]:
    """The checkpoint folder, and whether it is the demo's."""
    if "ckpt_dir" in values:
        return Path(os.path.expanduser(values["ckpt_dir"])), False
    official = Path(preset.folder)
    if official.is_dir():
        return official, False
    trained = _DEMOS / preset.task
    return trained if trained.is_dir() else env.cache_dir() / f"demo-{preset.task}-v1", True


def demo_notice(folder: Path, preset: Preset) -> str:
    """What to expect of the demo checkpoint in `folder`."""
    if folder.parent == _DEMOS:
        expect = f"It draws plain shapes that move; {_DEMOS / 'README.md'} lists its words."
    else:
        expect = "Its weights are random, so the video is noise; it shows that everything runs."
    return f"No --ckpt_dir and no ./{preset.folder}: using the demo checkpoint {folder}. {expect}"


def generation_config(folder: Path) -> dict[str, Any]:
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
