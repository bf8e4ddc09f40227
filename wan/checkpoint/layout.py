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

from wan.checkpoint.config import (
    CONTROL,
    FACE,
    KINDS,
    SOUND,
    DitConfig,
    control_layers,
    dit_config,
    kind_of,
    published_config,
)
from wan.checkpoint.expert_names import find_experts
from wan.checkpoint.files import (
    FLOATS,
    OTHER_PARTS,
    WEIGHT_FILES,
    TensorInfo,
    check_complete,
    file_tensors,
    folder_tensors,
    has_network,
    is_folder,
    list_shards,
    read_json,
)
from wan.checkpoint.keymaps import dit_diffusers_name, dit_official_name
from wan.checkpoint.marks import network_tensors
from wan.checkpoint.search import PARTS, Found, Search, look
from wan.checkpoint.vocabulary import has_vocabulary
from wan.settings.command import NetworkFiles
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS, Preset
from wan.settings.values import shown

NO_FILES = NetworkFiles()
_LATENTS = {"t2v": 16, "i2v": 16, "ti2v": 48, "s2v": 16, "animate": 16, "vace": 16}
EXPERT_FOLDERS = {"high_noise": "high_noise_model", "low_noise": "low_noise_model"}
_DIFFUSERS_FOLDERS = {"high_noise": "transformer", "low_noise": "transformer_2"}
_STEMS = {  # official files end with .pth or .safetensors
    "text_encoder": "models_t5_umt5-xxl-enc-bf16",
    "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14",
}
SOUND_ENCODER = "wav2vec2-large-xlsr-53-english"
_EXPECTED = {
    "vae": "Wan2.1_VAE.pth, Wan2.2_VAE.pth, vae/ or another file of it",
    "text_encoder": f"{_STEMS['text_encoder']}.pth, text_encoder/ or another file of it",
    "image_encoder": f"{_STEMS['image_encoder']}.pth, image_encoder/ or clip_vision/",
    "tokenizer": "google/umt5-xxl/, tokenizer/ or a text encoder file that contains it",
    "sound_encoder": f"the folder {SOUND_ENCODER}",
}
PIPELINE_INDEX = "model_index.json"
_FLAGS = {"text_encoder": ", or give one with `text_encoder`", "vae": ", or give one with `vae`"}


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
        layout: "official" or "diffusers".
        kind: "t2v", "i2v", "ti2v", "s2v", "animate" or "vace".
        experts: By name: "high_noise" and "low_noise", or "dit".
        boundary: `boundary_ratio` of model_index.json: from this fraction of the training timesteps
            up, the high-noise expert is used. None: the task's default.
    """

    folder: Path | None
    layout: str
    kind: str
    experts: dict[str, DitFiles]
    vae: Path | None = None
    text_encoder: Path | None = None
    image_encoder: Path | None = None
    tokenizer: Path | None = None
    sound_encoder: Path | None = None
    boundary: float | None = None

    @property
    def config(self) -> DitConfig:
        """The configuration of the DiT, which is the same for both experts."""
        return next(iter(self.experts.values())).config

    @property
    def heads(self) -> int:
        """The number of attention heads."""
        return self.config["num_heads"]

    @property
    def head_dim(self) -> int:
        """The channels per attention head."""
        return self.config["dim"] // self.heads

    def files(self) -> list[Path]:
        """Returns all files that affect the networks' results, sorted."""
        infos = [info for dit in self.experts.values() for info in dit.tensors.values()]
        found = [part.file for info in infos for part in (info, *info.parts)]
        for part in (self.vae, self.text_encoder, self.image_encoder):
            if part is not None:
                found += list_shards(part) if part.is_file() else _files_in(part)
        if self.boundary is not None and self.folder is not None:
            found.append(self.folder / PIPELINE_INDEX)
        for folder in (self.sound_encoder, self.tokenizer):
            if folder is not None:
                found += [folder] if folder.is_file() else _files_in(folder)
        return sorted(set(found))

    @property
    def images(self) -> int:
        """The number of images that condition the DiT: 0, 1 or 2."""
        return 0 if not self.config["image_dim"] else 2 if self.config["image_positions"] else 1

    @property
    def control_blocks(self) -> int:
        """The number of VACE control blocks; 0 for other networks."""
        return len(control_layers(self.config))

    def require(self, part: str) -> Path:
        """Returns the path of a component: "vae", "text_encoder", "tokenizer", ...

        Raises:
            InputError: The folder does not contain it.
        """
        path: Path | None = getattr(self, part)
        if path is None:
            why = f"has no {part.replace('_', ' ')}; expected {_EXPECTED[part]}"
            remedy = f"download the missing files of the checkpoint{_FLAGS.get(part, '')}"
            raise InputError(f"{self.folder}", None, why, remedy)
        return path


def _files_in(folder: Path) -> list[Path]:
    """Returns the weight, config and vocabulary files of a transformers or diffusers folder."""
    patterns = ("*.safetensors", "*.bin", "*.json", "*.model", "*.txt")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def published(preset: Preset) -> Checkpoint:
    """Returns a checkpoint without files that has the configuration of a task's published DiTs."""
    files = DitFiles(Path(preset.folder), published_config(preset), {})
    return Checkpoint(None, "official", preset.kind, dict.fromkeys(preset.experts, files))


def describe(
    folder: Path,
    chosen: NetworkFiles = NO_FILES,
    presets: tuple[Preset, ...] = tuple(PRESETS.values()),
) -> Checkpoint:
    """Identifies the networks of a checkpoint folder.

    Args:
        network_files: Files and folders of single networks that replace the folder's.
        presets: The tasks whose networks are wanted; DiTs of other tasks are ignored.

    Raises:
        InputError: The folder is no checkpoint, is damaged, or holds several matching networks.
    """
    if not is_folder(folder):
        why = "does not exist"
        remedy = "give the folder of a checkpoint, or leave it out to try the demo"
        if folder.exists():
            why = "is a file"
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not str(folder).startswith("."):
            why = "is not a folder"
            remedy = (
                "download the checkpoint first, if it is a model hub's name, and give its folder"
            )
        raise InputError("`ckpt_dir`", folder, why, remedy)
    search, index = Search(folder), _PipelineIndex.read(folder)
    diffusers = any((folder / name).is_dir() for name in _DIFFUSERS_FOLDERS.values())
    experts = _chosen_experts(chosen, presets)
    if not experts.keys() >= {"dit"} and not experts.keys() >= {*EXPERT_FOLDERS}:
        found = _find_experts(search, folder, index if diffusers else None, presets, experts)
        experts = {**found, **experts}
    first, *others = experts.values()
    if any(files.config != first.config for files in others):
        why = "mixes networks of different tasks or sizes"
        raise InputError(f"{folder}", None, why, "download it again")
    kind = _kind(first)
    parts: dict[str, Path | None] = {}
    stems = {"vae": "Wan2.2_VAE" if kind == "ti2v" else "Wan2.1_VAE", **_STEMS}
    for part, stem in stems.items():
        if part == "image_encoder" and not first.config["image_dim"]:
            parts[part] = None
        elif (path := getattr(chosen, part, None)) is not None:
            parts[part] = _chosen(part, path, kind)
        else:
            known = _library_part(folder / part) if diffusers else _file(folder, stem)
            parts[part] = known or _found(search, part, kind)
    return Checkpoint(
        folder=folder,
        layout="diffusers" if diffusers else "official",
        kind=kind,
        experts=experts,
        tokenizer=_tokenizer(folder, parts["text_encoder"]),
        sound_encoder=_sound_encoder(folder) if kind == "s2v" else None,
        boundary=index.boundary if len(experts) == 2 else None,
        **parts,
    )


@dataclass(frozen=True)
class _PipelineIndex:
    """The contents of a Diffusers folder's model_index.json.

    Attributes:
        boundary: The `boundary_ratio`; None if it is absent or null.
        is_single: The `boundary_ratio` is null, so `transformer` runs all steps.
        components: Names of the pipeline's components.
    """

    boundary: float | None = None
    is_single: bool = False
    named: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> _PipelineIndex:
        """Reads a folder's model_index.json if it exists; InputError if it is damaged."""
        path = folder / PIPELINE_INDEX
        if not path.is_file():
            return cls()
        stated = read_json(path)
        boundary = stated.get("boundary_ratio")
        number = isinstance(boundary, int | float) and not isinstance(boundary, bool)
        if boundary is not None and not (number and 0 < boundary < 1):
            why = f"is {shown(boundary)}, but must be a number between 0 and 1, or null"
            raise InputError(
                f"{path}: boundary_ratio", None, why, "download model_index.json again"
            )
        parts = {part: stated[part] for part in _PIPELINE_PARTS if part in stated}
        for part, value in parts.items():
            if value is not None and not (isinstance(value, list) and len(value) == 2):
                why = f"is {shown(value)}, but must be a library and a class"
                raise InputError(f"{path}: {part}", None, why, "download model_index.json again")
        return cls(
            None if boundary is None else float(boundary),
            "boundary_ratio" in stated and boundary is None,
            frozenset(part for part, value in parts.items() if value not in (None, [None, None])),
        )


_PIPELINE_PARTS = (
    *_DIFFUSERS_FOLDERS.values(),
    "vae",
    "text_encoder",
    "tokenizer",
    "image_encoder",
)


def _chosen_experts(chosen: NetworkFiles, presets: tuple[Preset, ...]) -> dict[str, DitFiles]:
    """Reads the DiTs that were given as single files or folders (`dit`, `dit_high_noise`, ...)."""
    given = {"dit": chosen.dit, "high_noise": chosen.dit_high_noise}
    given |= {"low_noise": chosen.dit_low_noise}
    if chosen.dit is not None and (chosen.dit_high_noise or chosen.dit_low_noise):
        why = "is a task's only network, and cannot be given with one of two experts"
        raise InputError("`dit`", chosen.dit, why, "give `dit_high_noise` and `dit_low_noise`")
    if chosen.dit_high_noise is not None and chosen.dit_high_noise == chosen.dit_low_noise:
        why = "is given for both experts"
        raise InputError("`dit_high_noise`", chosen.dit_high_noise, why, "give two files")
    found: dict[str, DitFiles] = {}
    for expert, path in given.items():
        if path is None:
            continue
        flag = "`dit`" if expert == "dit" else f"`dit_{expert}`"
        if not any(expert in preset.experts for preset in presets):
            of = "two experts" if expert == "dit" else "one network"
            remedy = "use `dit_high_noise` and `dit_low_noise`" if expert == "dit" else "use `dit`"
            tasks = " or ".join(preset.task for preset in presets)
            raise InputError(flag, path, f"does not fit {tasks}, which has {of}", remedy)
        _check_part(flag, path, "dit")
        _check_name(flag, path, expert)
        found[expert] = _dit_files(path) if path.is_dir() else _dit_files(path.parent, path)
    return found


def _check_name(flag: str, path: Path, expert: str) -> None:
    """Refuses an explicit file for another expert, by its name, or one of two experts as `dit`."""
    mark = find_experts([path])[path]
    if mark is None or mark.expert == expert or not (mark.noise or mark.in_name):
        return
    if expert == "dit":
        if mark.noise:
            raise InputError(flag, path, f"is named as the {mark.expert} expert", _HALF)
        return
    remedy = f"give it with `dit_{mark.expert}`, or rename it"
    raise InputError(flag, path, f"is named as the {mark.expert} expert", remedy)


_HALF = "it is one of two experts: give both to a task that has two, or rename it"


def _check_part(flag: str, path: Path, part: str) -> Found | None:
    """Refuses an explicit file or folder that holds another network.

    Returns:
        The weight file; None for a `.pth`, which only torch can read.
    """
    if not path.exists():
        raise InputError(flag, path, "does not exist", "give a weight file or its folder")
    if path.is_file() and path.suffix == ".pth" and part != "dit":
        check_complete(path)
        return None
    if path.is_file() and path.suffix not in WEIGHT_FILES:
        remedy = f"give one of {', '.join(WEIGHT_FILES)}"
        if path.suffix == ".pth":
            remedy = "convert it with tools/convert_checkpoint.py"
        raise InputError(flag, path, "is not in a supported weight format", remedy)
    found = look(path)
    if found.part != part:
        holds = PARTS[found.part] if found.part else "none of Wan's networks"
        raise InputError(flag, path, f"holds {holds}", f"give {PARTS[part]}")
    return found


def _chosen(part: str, path: Path, kind: str) -> Path:
    """Checks an explicit text encoder, image encoder or VAE and returns its path."""
    found = _check_part(f"`{part}`", path, part)
    if found is not None and part == "vae" and found.channels != _LATENTS[kind]:
        why = f"has {found.channels} latent channels, and the networks of {kind} have "
        raise InputError("`vae`", path, f"{why}{_LATENTS[kind]}", "give the VAE of this task")
    return path


def _found(search: Search, part: str, kind: str) -> Path | None:
    """Searches the folder for a component."""
    among = search.all(part)
    if part == "vae":
        among = [one for one in among if one.channels == _LATENTS[kind]]
    one = search.one(part, among, part)
    return None if one is None else one.path


def _tokenizer(folder: Path, text_encoder: Path | None) -> Path | None:
    """Returns the tokenizer's folder, or the text encoder file if it contains the tokenizer."""
    beside = [] if text_encoder is None else [text_encoder.parent]
    for base in (folder, *beside):
        for name in ("google/umt5-xxl", "tokenizer"):
            if (base / name).is_dir():
                return base / name
    return text_encoder if text_encoder is not None and has_vocabulary(text_encoder) else None


def _sound_encoder(folder: Path) -> Path | None:
    """Returns the folder of wav2vec2: its published name or any that begins with "wav2vec2"."""
    found = [folder / SOUND_ENCODER, *sorted(folder.glob("wav2vec2*"))]
    return next((path for path in found if (path / "config.json").is_file()), None)


def check_task(checkpoint: Checkpoint, preset: Preset) -> None:
    """Refuses a checkpoint whose networks are not those of the task."""

    def networks(kind: str, names: Collection[str]) -> str:
        return f"{'two experts' if len(names) == 2 else 'one network'} for {kind}"

    if (checkpoint.kind, {*checkpoint.experts}) != (preset.kind, {*preset.experts}):
        held = networks(checkpoint.kind, checkpoint.experts)
        folder = checkpoint.folder
        if (
            folder is not None
            and "dit" in checkpoint.experts
            and (folder / "transformer_2").is_dir()
        ):
            held = f"{held} (boundary_ratio is null in {PIPELINE_INDEX})"
        needed = networks(preset.kind, preset.experts)
    elif checkpoint.images != preset.images:
        held = f"a network for {checkpoint.images} input images"
        needed = f"one for {preset.images}"
    else:
        return
    why = f"holds {held}, but task {preset.task} needs {needed}"
    remedy = f"give `ckpt_dir` a {preset.folder} folder or choose another `task`"
    raise InputError(f"{checkpoint.folder}", None, why, remedy)


def _file(folder: Path, stem: str) -> Path | None:
    files = (folder / (stem + suffix) for suffix in (".pth", ".safetensors"))
    return next((check_complete(file) for file in files if file.is_file()), None)


def _library_part(folder: Path) -> Path | None:
    """Returns a folder of diffusers or transformers if it contains complete weights."""
    return folder if folder.is_dir() and folder_tensors(folder) else None


def _find_experts(
    search: Search,
    folder: Path,
    index: _PipelineIndex | None,
    presets: tuple[Preset, ...],
    chosen: Collection[str],
) -> dict[str, DitFiles]:
    """Reads the DiTs of a folder, except for the experts that are given explicitly.

    Args:
        index: None unless the folder is in the layout of diffusers.
        presets: As in `inspect_checkpoint`.
        explicit_experts: Experts that are not read from the folder.
    """
    names = EXPERT_FOLDERS if index is None else _DIFFUSERS_FOLDERS
    folders = {expert: folder / sub for expert, sub in names.items() if (folder / sub).is_dir()}
    if index is not None and not chosen and "high_noise" in folders:
        named = "transformer_2" in index.named
        is_whole = len(folders) == 2 or not (named or index.boundary is not None)
        if is_whole and (index.is_single or len(folders) == 1):
            return {"dit": _dit_files(folders["high_noise"])}
    if folders and len(folders.keys() | {*chosen}) == 1:
        missing = folder / names[({"high_noise", "low_noise"} - folders.keys()).pop()]
        remedy = "download the other expert too"
        raise InputError(f"{missing}", None, "is missing", remedy)
    if folders:
        rest = {expert: path for expert, path in folders.items() if expert not in chosen}
        return {expert: _dit_files(path) for expert, path in rest.items()}
    if has_network(folder):
        return {"dit": _dit_files(folder)}
    return _searched_experts(search, folder, presets, chosen) or {"dit": _dit_files(folder)}


def _searched_experts(
    search: Search, folder: Path, presets: tuple[Preset, ...], chosen: Collection[str]
) -> dict[str, DitFiles]:
    """Reads the DiTs that are in the folder as files of any name; {} if there are none."""
    every = search.all("dit")
    fitting = [one for one in every if any(_fits(one, preset) for preset in presets)] or every

    def files(one: Found) -> DitFiles:
        own = (one.path.parent / "config.json").is_file()
        return _dit_files(one.path.parent if own else folder, one.path)

    pair = {}
    for expert in EXPERT_FOLDERS:
        among = [one for one in fitting if one.expert == expert]
        if expert not in chosen and any(len(preset.experts) == 2 for preset in presets):
            pair[expert] = search.one("dit", among, f"dit_{expert}")
    missing = [expert for expert, one in pair.items() if one is None]
    if (pair and len(missing) < len(pair)) or (pair and chosen):
        if missing:
            words = missing[0].replace("_", "-")
            why = f"holds no {words} expert ({', '.join(p.name for p in _paths(fitting))})"
            remedy = f"download it, or give one with `dit_{missing[0]}`"
            raise InputError(f"{folder}", None, why, remedy)
        return {expert: files(one) for expert, one in pair.items() if one is not None}
    single = [one for one in fitting if one.expert is None] or fitting
    dims = {preset.dim for preset in presets}
    if len(single) > 1 and len(presets) < len(PRESETS):
        own = [one for one in single if (*one.shape("patch_embedding.weight"), 0)[0] in dims]
        single = own or single
    found = search.one("dit", single, "dit")
    if found is not None and found.mark is not None and found.mark.noise:
        raise InputError(f"{found.path}", None, f"is named as the {found.expert} expert", _HALF)
    return {} if found is None else {"dit": files(found)}


def _paths(found: Collection[Found]) -> list[Path]:
    return sorted(one.path for one in found)[:3]


def _fits(found: Found, preset: Preset) -> bool:
    """Returns whether a DiT has the kind and the image input of the task."""
    theirs = {SOUND: SOUND, FACE: dit_diffusers_name(FACE), CONTROL: CONTROL}
    special = [name for name in theirs if found.shape(name, theirs[name])]
    kind = kind_of(special, found.channels)
    images = bool(found.shape("img_emb.proj.1.weight", "image_embedder.ff.net.0.proj.weight"))
    return kind == preset.kind and images == bool(preset.images)


def _dit_files(folder: Path, file: Path | None = None) -> DitFiles:
    """Reads the configuration and tensors of a folder's DiT, or of one file in it."""
    found = folder_tensors(folder) if file is None else file_tensors(file)
    if found is None:
        why = "holds no video network (DiT)"
        remedy = (
            "expected diffusion_pytorch_model.safetensors, its shards with an index, or the "
            "folders high_noise_model/ and low_noise_model/"
        )
        pickled = [path.name for path in folder.glob("*.pth") if not OTHER_PARTS.search(path.name)]
        if pickled:
            why = f"holds {pickled[0]}, but a video network is read from safetensors only"
            remedy = "convert it with tools/convert_checkpoint.py"
        raise InputError(f"{folder}", None, why, remedy)
    tensors = network_tensors(found, dit_official_name)
    tensors = _official({name: i for name, i in tensors.items() if not _CONSTANT(name)})
    dense = {name: info for name, info in tensors.items() if SPARSE_LINEAR not in name}
    return DitFiles(folder, dit_config(folder, dense), dense, len(dense) < len(tensors))


def _official(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Converts Animate's tensors from the diffusers layout to the official names and shapes."""
    for name in [name for name in tensors if ".linear1_k." in name]:
        keys, values = tensors.pop(name), tensors.pop(name.replace("_k.", "_v."), None)
        if values is None or values.shape != keys.shape:
            why = "lacks the values of these keys, or has others"
            raise InputError(f"{keys.file}: {keys.name}", None, why, "download it again")
        tensors[name.replace("_k.", "_kv.")] = TensorInfo(
            keys.file,
            keys.name,
            keys.dtype if keys.dtype == values.dtype in FLOATS else "F32",
            (2 * keys.shape[0], *keys.shape[1:]),
            keys.nbytes + values.nbytes,
            parts=(keys, values),
        )
    for name, info in tensors.items():
        if _CONVOLVED(name) and len(info.shape) == 1:
            tensors[name] = replace(info, shape=(1, *info.shape, 1, 1))
    return tensors


def _kind(files: DitFiles) -> str:
    in_dim = files.config["in_dim"]
    if in_dim not in KINDS:
        why = f"is a Wan network that is not supported ({in_dim} input channels)"
        raise InputError(f"{files.folder}", None, why, "t2v (16), i2v (36) and ti2v (48) are")
    for part, (shows, remedy) in _UNSUPPORTED.items():
        name = next((name for name in files.tensors if part in name), None)
        if name is not None:
            why = f"has {name}, {shows}, which is not supported"
            raise InputError(f"{files.folder}", None, why, remedy)
    return kind_of(files.tensors, in_dim) or KINDS[in_dim]


_UNSUPPORTED = {
    "gate_compress": ("of video sparse attention", "get the FullAttn model"),
    ".weight_scale": ("of a quantised linear layer", "see `quant_dit_path`"),
    "time_embedding_r": ("of a second timestep (MeanFlow)", "get another model"),
}
"""Part of a tensor's name -> (unsupported feature, remedy)."""
_CONSTANT = re.compile(r"motion_encoder\..*\.kernel$").match  # a constant, the same in every file
_CONVOLVED = re.compile(r"motion_encoder\.enc\.net_app\..*\.bias$").match
SPARSE_LINEAR = ".proj_l."  # TurboDiffusion's projections; dense attention does not use them
