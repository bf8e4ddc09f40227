"""Identifies the networks in a checkpoint folder from names, JSON files and weight file headers.

It supports official and `*-Diffusers` folders, and collections of weight files: ComfyUI's, GGUF,
single DiTs with or without a config.json, in one folder or in ComfyUI's subfolders. No weight is
read, and torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wan.checkpoint.causal_student import is_causal_student
from wan.checkpoint.config import (
    DIFFUSERS_FOLDERS,
    KINDS,
    NETWORK_KEYS,
    PIPELINE_INDEX,
    DitConfig,
    PipelineIndex,
    detect_kind,
    get_control_layers,
    make_reference_dit_config,
    read_dit_config,
)
from wan.checkpoint.discovery import WeightFile, WeightFinder, inspect_weights
from wan.checkpoint.formats.embedded_tokenizer import has_embedded_tokenizer
from wan.checkpoint.formats.headers import (
    check_file_complete,
    has_diffusers_weights,
    is_folder,
    list_shards,
    read_folder_headers,
    read_weight_headers,
)
from wan.checkpoint.formats.tensor_info import WEIGHT_FILES, TensorInfo
from wan.checkpoint.names.dit_shapes import convert_dit_tensors
from wan.checkpoint.names.expert_names import detect_experts
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers, rename_dit_to_official
from wan.checkpoint.names.network_names import COMPONENTS, VACE_MODULE, list_tensors
from wan.checkpoint.quant.metadata import collect_network_tensors
from wan.checkpoint.vace_modules import (
    add_t2v_presets,
    add_vace_module,
    find_vace_modules,
)
from wan.settings.command import NetworkFiles
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS, TASKS_OF_KIND, Preset
from wan.settings.values import join_with_or
from wan.utils.files import check_link, has_file, has_folder

NO_FILES = NetworkFiles()
EXPERT_FOLDERS = {"high_noise": "high_noise_model", "low_noise": "low_noise_model"}
_STEMS = {  # official files end with .pth or .safetensors
    "text_encoder": "models_t5_umt5-xxl-enc-bf16",
    "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14",
}
WAV2VEC2_FOLDER = "wav2vec2-large-xlsr-53-english"
_EXPECTED_FILES = {
    "vae": "Wan2.1_VAE.pth, Wan2.2_VAE.pth, vae/ or another file with its weights",
    "text_encoder": f"{_STEMS['text_encoder']}.pth, text_encoder/ or another file with its weights",
    "image_encoder": f"{_STEMS['image_encoder']}.pth, image_encoder/ or clip_vision/",
    "tokenizer": "google/umt5-xxl/, tokenizer/ or a text encoder file that contains it",
    "audio_encoder": f"the folder {WAV2VEC2_FOLDER}",
}
_FLAG_HINTS = {name: f", or give one with `{name}`" for name in ("text_encoder", "vae")}
_GIVE_BOTH_EXPERTS = (
    "it is one of two experts: give both with `dit_high_noise` and `dit_low_noise`, or rename it"
)
SPARSE_LINEAR = ".proj_l."  # TurboDiffusion's projections; dense attention does not use them


@dataclass(frozen=True)
class DitFiles:
    """The configuration and the tensors of one DiT.

    Attributes:
        tensors: By official name.
        sparse_linear: The DiT was trained with sparse-linear attention; `tensors` omits its
            projections.
    """

    folder: Path
    config: DitConfig
    tensors: dict[str, TensorInfo]
    sparse_linear: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder. Missing components are None; `require` raises for them.

    Attributes:
        folder: None for a checkpoint without files (`make_reference_checkpoint`).
        folder_format: "official" or "diffusers".
        kind: Kind of the tasks that the networks fit.
        experts: By name: "high_noise" and "low_noise", or "dit".
        boundary: `boundary_ratio` of model_index.json: from this fraction of the training timesteps
            up, the high-noise expert is used. None: the task's default.
    """

    folder: Path | None
    folder_format: str
    kind: str
    experts: dict[str, DitFiles]
    vae: Path | None = None
    text_encoder: Path | None = None
    image_encoder: Path | None = None
    tokenizer: Path | None = None
    audio_encoder: Path | None = None
    boundary: float | None = None

    @property
    def config(self) -> DitConfig:
        """The configuration of the DiT, which is the same for both experts."""
        return next(iter(self.experts.values())).config

    @property
    def num_heads(self) -> int:
        """The number of attention heads."""
        return self.config["num_heads"]

    @property
    def head_dim(self) -> int:
        """The channels per attention head."""
        return self.config["dim"] // self.num_heads

    def list_files(self) -> list[Path]:
        """Returns all files that affect the networks' results, sorted."""
        infos = [info for dit in self.experts.values() for info in dit.tensors.values()]
        paths = [item.file for info in infos for item in (info, *info.chunks)]
        for item in (self.vae, self.text_encoder, self.image_encoder):
            if item is not None:
                paths += list_shards(item) if item.is_file() else _list_component_files(item)
        if self.boundary is not None and self.folder is not None:
            paths.append(self.folder / PIPELINE_INDEX)
        for folder in (self.audio_encoder, self.tokenizer):
            if folder is not None:
                paths += [folder] if folder.is_file() else _list_component_files(folder)
        return sorted(set(paths))

    @property
    def num_clip_vision_images(self) -> int:
        """The number of images whose CLIP embeddings condition the DiT: 0, 1 or 2."""
        return 0 if not self.config["image_dim"] else 2 if self.config["image_positions"] else 1

    @property
    def num_control_blocks(self) -> int:
        """The number of control blocks, each of which adds a hint to a block."""
        return len(get_control_layers(self.config))

    def require(self, component: str) -> Path:
        """Returns the path of a component: "vae", "text_encoder", "tokenizer", ...

        Raises:
            InputError: The folder does not contain it.
        """
        path: Path | None = getattr(self, component)
        if path is None:
            why = f"has no {component.replace('_', ' ')}; expected {_EXPECTED_FILES[component]}"
            remedy = f"download the missing files of the checkpoint{_FLAG_HINTS.get(component, '')}"
            raise InputError(f"{self.folder}", None, why, remedy)
        return path


def _list_component_files(folder: Path) -> list[Path]:
    """Returns the weight, config and vocabulary files of a transformers or diffusers folder."""
    suffixes = (*WEIGHT_FILES, ".json", ".model", ".txt")
    return [path for suffix in suffixes for path in folder.glob(f"*{suffix}")]


def make_reference_checkpoint(preset: Preset, network_files: NetworkFiles = NO_FILES) -> Checkpoint:
    """Returns a checkpoint without a folder that has the configuration of a task's published DiTs.

    Args:
        network_files: Files of other networks than DiTs, which are checked.
    """
    files = DitFiles(Path(preset.folder), make_reference_dit_config(preset), {})
    explicit_paths = {name: getattr(network_files, name, None) for name in ("vae", *_STEMS)}
    components: dict[str, Any] = {
        name: _check_explicit_component(name, path, preset)
        for name, path in explicit_paths.items()
        if path is not None
    }
    experts = dict.fromkeys(preset.experts, files)
    return Checkpoint(None, "official", preset.kind, experts, **components)


def check_checkpoint_folder(folder: Path, remedy: str = "give the folder of a checkpoint") -> None:
    """Raises InputError if a checkpoint folder does not exist."""
    if is_folder(folder):
        return
    why = "is a file" if folder.exists() else "does not exist"
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and str(folder)[0] != "."
    if is_hub_name and not folder.exists():
        why = "is not a folder"
        remedy = "download the checkpoint first, if it is a model hub's name, and give its folder"
    raise InputError("`ckpt_dir`", folder, why, remedy)


def inspect_checkpoint(
    folder: Path,
    network_files: NetworkFiles = NO_FILES,
    presets: tuple[Preset, ...] = tuple(PRESETS.values()),
) -> Checkpoint:
    """Identifies the networks of a checkpoint folder.

    Args:
        network_files: Files and folders of single networks that replace the folder's.
        presets: The tasks whose networks are wanted; DiTs of other tasks are ignored.

    Raises:
        InputError: The folder is no checkpoint, is damaged, or holds several matching networks.
    """
    check_checkpoint_folder(folder)
    finder, index = WeightFinder(folder), PipelineIndex.read(folder)
    diffusers = any(has_folder(folder / name) for name in DIFFUSERS_FOLDERS.values())
    experts, vace_modules = _read_explicit_experts(network_files, presets)
    if "dit" not in experts and not experts.keys() >= {*EXPERT_FOLDERS}:
        base_presets = add_t2v_presets(presets) if vace_modules else presets
        dits = _read_folder_experts(finder, index if diffusers else None, base_presets, experts)
        experts = {**dits, **experts}
    tensors = {name: files.tensors for name, files in experts.items()}
    vace_modules = vace_modules or find_vace_modules(finder, tensors, presets)
    experts |= {x: _add_control_blocks(experts, x, path) for x, path in vace_modules.items()}
    first_dit, *other_dits = experts.values()
    if any(files.config != first_dit.config for files in other_dits):
        why = "mixes networks of different tasks or sizes"
        raise InputError(f"{folder}", None, why, "give two experts of one task")
    kind = _detect_network_kind(first_dit)
    preset = PRESETS[TASKS_OF_KIND[kind][0]]  # the tasks of a kind need the same components
    components = _find_components(finder, diffusers, preset, first_dit.config, network_files)
    if is_causal_student(first_dit.config, first_dit.tensors, presets):
        config: DitConfig = {**first_dit.config, "model_type": "causal"}
        kind, experts = "causal", {"dit": replace(first_dit, config=config)}
    return Checkpoint(
        folder=folder,
        folder_format="diffusers" if diffusers else "official",
        kind=kind,
        experts=experts,
        tokenizer=_find_tokenizer(folder, components["text_encoder"]),
        audio_encoder=_find_audio_encoder(folder) if preset.needs_audio_encoder else None,
        boundary=index.boundary if len(experts) == 2 else None,
        **components,
    )


def _add_control_blocks(experts: dict[str, DitFiles], expert: str, path: Path) -> DitFiles:
    """Adds the control blocks of a file to an expert."""
    if expert not in experts:
        why, setting = f"is for the {expert} expert, which is missing", f"dit_{expert}"
        raise InputError(f"`{setting}`", path, why, "give a folder that has it")
    files = experts[expert]
    config, tensors = add_vace_module(path, files.folder, files.config, files.tensors)
    return replace(files, config=config, tensors=tensors)


def _read_explicit_experts(
    network_files: NetworkFiles, presets: tuple[Preset, ...]
) -> tuple[dict[str, DitFiles], dict[str, Path]]:
    """Reads the DiTs that were given as single files or folders (`dit`, `dit_high_noise`, ...).

    Returns the DiTs, and the files of VACE's control blocks alone.
    """
    high_noise, low_noise = network_files.dit_high_noise, network_files.dit_low_noise
    if network_files.dit is not None and (high_noise or low_noise):
        why = "is a task's only network, and cannot be given with one of two experts"
        remedy = "give `dit_high_noise` and `dit_low_noise`"
        raise InputError("`dit`", network_files.dit, why, remedy)
    if high_noise is not None and high_noise == low_noise and not _holds_expert(high_noise):
        why = "is given for both experts"
        raise InputError("`dit_high_noise`", high_noise, why, "give two files")
    dits: dict[str, DitFiles] = {}
    vace_modules: dict[str, Path] = {}
    for setting in ("dit", "dit_high_noise", "dit_low_noise"):
        path: Path | None = getattr(network_files, setting)
        if path is None:
            continue
        expert, flag = setting.removeprefix("dit_"), f"`{setting}`"
        if not any(expert in preset.experts for preset in presets):
            why = f"does not fit {' or '.join(preset.task for preset in presets)}, which has "
            if expert == "dit":
                remedy = "use `dit_high_noise` and `dit_low_noise`"
                raise InputError(flag, path, f"{why}two experts", remedy)
            raise InputError(flag, path, f"{why}one network", "use `dit`")
        if path.exists() and VACE_MODULE in inspect_weights(path):
            _check_expert_in_name(flag, path, expert)
            vace_modules[expert] = path
            continue
        _check_component_file(flag, path, "dit")
        stored_expert = expert if _holds_expert(path, expert) else None
        if stored_expert is None:
            _check_expert_in_name(flag, path, expert)
        folder, file = (path, None) if path.is_dir() else (path.parent, path)
        dits[expert] = read_dit_files(folder, file, stored_expert)
    return dits, vace_modules


def _holds_expert(path: Path, expert: str = "high_noise") -> bool:
    """Returns whether a file or folder holds two DiTs under names of experts."""
    check_link(path)
    networks = inspect_weights(path).get("dit", ()) if path.exists() else ()
    return any(network.stored_expert == expert for network in networks)


def _check_expert_in_name(flag: str, path: Path, expert: str) -> None:
    """Refuses a file that is named as another expert.

    For `dit`, a file that is named as one of two experts is refused.
    """
    tag = detect_experts([path])[path]
    if tag is None or tag.expert == expert or not (tag.has_noise or tag.in_file_name):
        return
    if expert == "dit":
        if tag.has_noise:
            raise InputError(flag, path, f"is named as the {tag.expert} expert", _GIVE_BOTH_EXPERTS)
        return
    remedy = f"give it with `dit_{tag.expert}`, or rename it"
    raise InputError(flag, path, f"is named as the {tag.expert} expert", remedy)


def _check_component_file(flag: str, path: Path, component: str) -> WeightFile:
    """Returns the network in an explicit file or folder; InputError if it holds another one."""
    check_link(path)
    if not path.exists():
        raise InputError(flag, path, "does not exist", "give a weight file or its folder")
    if path.is_file() and path.suffix not in WEIGHT_FILES:
        remedy = f"give one of {', '.join(WEIGHT_FILES)}"
        raise InputError(flag, path, "is not in a supported weight format", remedy)
    networks = inspect_weights(path)
    if component not in networks:
        content = " and ".join(COMPONENTS[name] for name in COMPONENTS if name in networks)
        remedy = f"give {COMPONENTS[component]}"
        if not content:
            infos = [*read_weight_headers(path).values()]
            content = f"no whole Wan network ({list_tensors(infos)})" if infos else "no weights"
        raise InputError(flag, path, f"holds {content}", remedy)
    return networks[component][0]


def _check_explicit_component(component: str, path: Path, preset: Preset) -> Path:
    """Checks an explicit text encoder, image encoder or VAE and returns its path."""
    channels = _check_component_file(f"`{component}`", path, component).channels
    expected = preset.latent_channels
    if component == "vae" and channels != expected:
        why = f"has {channels} latent channels, and the networks of {preset.kind} have {expected}"
        raise InputError("`vae`", path, why, "give the VAE of this task")
    return path


def _find_components(
    finder: WeightFinder,
    diffusers: bool,
    preset: Preset,
    config: DitConfig,
    network_files: NetworkFiles,
) -> dict[str, Path | None]:
    """Finds text encoder, VAE and, for a DiT that needs it, image encoder: explicit or of a folder.

    Args:
        diffusers: Whether the folder is in the layout of diffusers.
        config: The configuration of the DiT.
    """
    stems = {"vae": f"Wan{preset.vae}_VAE", **_STEMS}
    if not config["image_dim"]:
        del stems["image_encoder"]
    components: dict[str, Path | None] = {}
    for component, stem in stems.items():
        if (path := getattr(network_files, component, None)) is not None:
            components[component] = _check_explicit_component(component, path, preset)
            continue
        standard_path = (
            _find_diffusers_component(finder.folder / component)
            if diffusers
            else _find_official_file(finder.folder, stem)
        )
        components[component] = standard_path or _find_by_content(finder, component, preset)
    return components


def _find_by_content(finder: WeightFinder, component: str, preset: Preset) -> Path | None:
    """Searches the folder for a component in a file of any name."""
    candidates = finder.find_all(component)
    if component == "vae":
        candidates = [file for file in candidates if file.channels == preset.latent_channels]
    file = finder.pick_one(component, candidates, component)
    return None if file is None else file.path


def _find_tokenizer(folder: Path, text_encoder: Path | None) -> Path | None:
    """Returns the tokenizer's folder, or the text encoder file if it contains the tokenizer."""
    encoder_folders = [] if text_encoder is None else [text_encoder.parent]
    for parent in (folder, *encoder_folders):
        for name in ("google/umt5-xxl", "umt5-xxl", "tokenizer"):
            if has_folder(parent / name):
                _check_links(parent / name)
                return parent / name
    is_embedded = text_encoder is not None and has_embedded_tokenizer(text_encoder)
    return text_encoder if is_embedded else None


def _find_audio_encoder(folder: Path) -> Path | None:
    """Returns the folder of wav2vec2: its published name or any that begins with "wav2vec2"."""
    folders = [folder / WAV2VEC2_FOLDER, *sorted(folder.glob("wav2vec2*"))]
    audio_encoder = next((path for path in folders if has_file(path / "config.json")), None)
    if audio_encoder is not None:
        _check_links(audio_encoder)
    return audio_encoder


def _check_links(folder: Path) -> None:
    """Refuses a component's folder with a link to nothing, which libraries may pass over."""
    for path in sorted(folder.iterdir()):
        check_link(path)


def check_task(checkpoint: Checkpoint, preset: Preset) -> None:
    """Refuses a checkpoint whose networks are not those of the task."""

    def describe_networks(kind: str, names: Collection[str]) -> str:
        return f"{'two experts' if len(names) == 2 else 'one network'} for {kind}"

    if (checkpoint.kind, {*checkpoint.experts}) != (preset.kind, {*preset.experts}):
        actual = describe_networks(checkpoint.kind, checkpoint.experts)
        folder = checkpoint.folder
        has_second = folder is not None and (folder / "transformer_2").is_dir()
        if has_second and "dit" in checkpoint.experts:
            actual = f"{actual} (boundary_ratio is null in {PIPELINE_INDEX})"
        expected = describe_networks(preset.kind, preset.experts)
    elif checkpoint.config["in_dim"] != preset.in_dim:
        actual = f"a network of {checkpoint.config['in_dim']} input channels"
        expected = f"one of {preset.in_dim}"
    elif checkpoint.num_clip_vision_images != preset.num_clip_vision_images:
        actual = f"a network for {checkpoint.num_clip_vision_images} CLIP-encoded image(s)"
        expected = f"one for {preset.num_clip_vision_images}"
    else:
        return
    why = f"holds {actual}, but task {preset.task} needs {expected}"
    remedy = f"give `ckpt_dir` a {preset.folder} folder or choose another `task`"
    raise InputError(f"{checkpoint.folder}", None, why, remedy)


def _find_official_file(folder: Path, stem: str) -> Path | None:
    files = (folder / (stem + suffix) for suffix in (".pth", ".safetensors"))
    return next((check_file_complete(file) for file in files if has_file(file)), None)


def _find_diffusers_component(folder: Path) -> Path | None:
    """Returns a folder in the layout of diffusers or transformers if its weights are complete."""
    if not has_folder(folder):
        return None
    _check_links(folder)
    return folder if read_folder_headers(folder) else None


def _read_folder_experts(
    finder: WeightFinder,
    index: PipelineIndex | None,
    presets: tuple[Preset, ...],
    explicit_experts: Collection[str],
) -> dict[str, DitFiles]:
    """Reads the DiTs of a folder, except for the experts that are given explicitly.

    Args:
        index: None unless the folder is in the layout of diffusers.
        presets: As in `inspect_checkpoint`.
        explicit_experts: Experts that are not read from the folder.
    """
    folder = finder.folder
    names = EXPERT_FOLDERS if index is None else DIFFUSERS_FOLDERS
    folders = {expert: folder / name for expert, name in names.items() if has_folder(folder / name)}
    if not folders:
        has_weights = has_diffusers_weights(folder)
        dits = {} if has_weights else _read_expert_files(finder, presets, explicit_experts)
        return dits or {"dit": read_dit_files(folder)}
    if index is not None and not explicit_experts and "high_noise" in folders:
        has_second = "transformer_2" in index.components or index.boundary is not None
        is_single = index.has_null_boundary if len(folders) == 2 else not has_second
        if is_single:
            return {"dit": read_dit_files(folders["high_noise"])}
    if len(folders.keys() | {*explicit_experts}) == 1:
        missing = folder / names[({"high_noise", "low_noise"} - folders.keys()).pop()]
        raise InputError(f"{missing}", None, "is missing", "download the other expert too")
    return {
        expert: read_dit_files(path)
        for expert, path in folders.items()
        if expert not in explicit_experts
    }


def _read_expert_files(
    finder: WeightFinder, presets: tuple[Preset, ...], explicit_experts: Collection[str]
) -> dict[str, DitFiles]:
    """Reads the DiTs that are in the folder as files of any name; {} if there are none."""
    weight_files = finder.find_all("dit")
    matching = [file for file in weight_files if _fits_presets(file, presets)] or weight_files
    picked = _pick_expert_files(finder, matching, presets, explicit_experts)
    if not picked and (single := _pick_single_file(finder, matching, presets)) is not None:
        picked = {"dit": replace(single, stored_expert=None)}
    dits = {}
    for expert, file in picked.items():
        has_config = has_file(file.path.parent / "config.json")
        config_folder = file.path.parent if has_config else finder.folder
        dits[expert] = read_dit_files(config_folder, file.path, file.stored_expert)
    return dits


def _pick_expert_files(
    finder: WeightFinder,
    weight_files: Collection[WeightFile],
    presets: tuple[Preset, ...],
    explicit_experts: Collection[str],
) -> dict[str, WeightFile]:
    """Picks the file of each expert that is not given explicitly; {} if the folder has neither."""
    if not any(len(preset.experts) == 2 for preset in presets):
        return {}
    picked = {
        expert: finder.pick_one(
            "dit", [file for file in weight_files if file.expert == expert], f"dit_{expert}"
        )
        for expert in EXPERT_FOLDERS
        if expert not in explicit_experts
    }
    files = {expert: file for expert, file in picked.items() if file is not None}
    missing = next((expert for expert in picked if expert not in files), None)
    if missing is not None and (files or explicit_experts):
        listing = ", ".join(path.name for path in sorted(file.path for file in weight_files)[:3])
        why = f"holds no {missing.replace('_', '-')} expert ({listing})"
        remedy = f"download it, or give one with `dit_{missing}`"
        raise InputError(f"{finder.folder}", None, why, remedy)
    return files


def _pick_single_file(
    finder: WeightFinder, weight_files: Collection[WeightFile], presets: tuple[Preset, ...]
) -> WeightFile | None:
    """Picks the file of a task's only network; None if there is none."""
    without_expert = [file for file in weight_files if file.expert is None]
    candidates = [*{file.path: file for file in without_expert or weight_files}.values()]
    if len(candidates) > 1 and len(presets) < len(PRESETS):
        key, dims = "patch_embedding.weight", {(preset.dim,) for preset in presets}
        candidates = [file for file in candidates if file.find_shape(key)[:1] in dims] or candidates
    has_single = any("dit" in preset.experts for preset in presets)
    flag = "dit" if has_single else "dit_high_noise` and `dit_low_noise"
    file = finder.pick_one("dit", candidates, flag)
    if file is not None and file.tag is not None and file.tag.has_noise:
        why = f"is named as the {file.expert} expert"
        raise InputError(f"{file.path}", None, why, _GIVE_BOTH_EXPERTS)
    return file


def _fits_presets(weight_file: WeightFile, presets: tuple[Preset, ...]) -> bool:
    """Returns whether a DiT has the kind and the image input of one of the tasks."""
    present_keys = [
        name
        for name in NETWORK_KEYS.values()
        if weight_file.find_shape(name, rename_dit_to_diffusers(name))
    ]
    kind = detect_kind(present_keys, weight_file.channels, weight_file.tensors.values())
    image_key = "img_emb.proj.1.weight"
    takes_images = bool(weight_file.find_shape(image_key, rename_dit_to_diffusers(image_key)))
    inputs = {(preset.kind, bool(preset.num_clip_vision_images)) for preset in presets}
    return (kind, takes_images) in inputs


def read_dit_files(
    folder: Path, file: Path | None = None, stored_expert: str | None = None
) -> DitFiles:
    """Reads the configuration and tensors of a folder's DiT, or of one file in it.

    Args:
        stored_expert: `WeightFile.stored_expert`.
    """
    infos = read_weight_headers(file or folder)
    if not infos:
        why = "holds no video network (DiT)"
        remedy = (
            "expected diffusion_pytorch_model.safetensors, its shards with an index, or the "
            "folders high_noise_model/ and low_noise_model/"
        )
        raise InputError(f"{folder}", None, why, remedy)
    tensors = convert_dit_tensors(
        collect_network_tensors(infos, rename_dit_to_official, "dit", stored_expert)
    )
    dense = {name: info for name, info in tensors.items() if SPARSE_LINEAR not in name}
    return DitFiles(folder, read_dit_config(folder, dense), dense, len(dense) < len(tensors))


def _detect_network_kind(files: DitFiles) -> str:
    in_dim = files.config["in_dim"]
    if in_dim not in KINDS:
        why = f"is a Wan network that is not supported ({in_dim} input channels)"
        supported = join_with_or([f"{kind} ({channels})" for channels, kind in KINDS.items()])
        raise InputError(f"{files.folder}", None, why, f"use {supported}")
    return detect_kind(files.tensors, in_dim, files.tensors.values()) or KINDS[in_dim]
