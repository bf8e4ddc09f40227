"""Reads the header of a LoRA file as weight deltas of a network's parameters; no torch.

A file with a tensor that fits no parameter is refused: ignoring the tensor would silently change
the video.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from wan.checkpoint.formats.headers import (
    list_shards,
    read_file_headers,
    read_scalars,
)
from wan.checkpoint.formats.tensor_info import (
    FLOATS,
    FP8,
    PICKLE_SUFFIXES,
    SAFETENSORS_SUFFIXES,
    TensorInfo,
)
from wan.checkpoint.lora.deltas import LowRankMatrix, Matrix, StoredMatrix, WeightDelta
from wan.checkpoint.lora.names import (
    HIGH_NOISE_PREFIX,
    LOW_NOISE_PREFIX,
    PREFIXES,
    Suffix,
    flatten_name,
    is_image_layer,
    is_low_noise,
    map_layer_spellings,
    map_parameter_spellings,
    split_suffix,
)
from wan.checkpoint.lora.peft_settings import PeftSettings, read_peft_settings
from wan.checkpoint.names.prefixes import find_shared_prefix, strip_prefixes
from wan.settings.errors import InputError
from wan.settings.values import format_value, list_names
from wan.utils.files import has_file

_SUFFIXES = (*SAFETENSORS_SUFFIXES, *PICKLE_SUFFIXES)
MAX_ABS = 1e6  # of a strength or an alpha; larger ones may overflow
_MODULE_WORDS = re.compile(r"[._](processor|base_layer|modules_to_save\.[^.]+)[._]")
_IMAGE_INPUT = "img_emb."  # parameters of networks that read CLIP's embeddings of an image
_PAIR_ROLES = {"up", "down", "base_up", "base_down"}
_CONVERT = "convert its names to those of docs/few_step.md"
_GIVE_KNOWN_KIND = (
    "give a LoRA, LoHa, LoKr, GLoRA or DoRA with names of docs/few_step.md, or merge it into the "
    "checkpoint with the program it was made with"
)
_MISFIT = "it was made for another model, or is damaged"


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file and its strength, given as `FILE=STRENGTH`."""

    path: Path
    strength: float = 1.0


@dataclass(frozen=True)
class Lora:
    """A file and its weight deltas for one network.

    Attributes:
        deltas: By parameter name.
        tag: The expert tag in the file's name that selected the network; "" if a flag did.
        unused_names: Tensors for the image input of other networks, which this one lacks.
    """

    path: Path
    strength: float
    deltas: dict[str, tuple[WeightDelta, ...]]
    tag: str = ""
    unused_names: tuple[str, ...] = ()


class _LoraLayer(NamedTuple):
    """A layer's tensors in a file.

    Attributes:
        module_names: The layer's name in the file without some or all of its prefixes.
        tensors: By role (`names`); a parameter that replaces the network's has its name.
    """

    module_names: list[str]
    tensors: dict[str, TensorInfo]


class LoraReader:
    """Reads the header of one LoRA file, for one network of a checkpoint."""

    def __init__(
        self, lora_file: LoraFile, parameters: Mapping[str, TensorInfo], expert: str
    ) -> None:
        self.path, self.strength, self.expert = lora_file.path, lora_file.strength, expert
        if not has_file(self.path):
            raise self.make_error("does not exist or is no file", "give a .safetensors file")
        if self.path.suffix not in _SUFFIXES:
            raise self.make_error(f"is none of {', '.join(_SUFFIXES)}", "convert it")
        if len(list_shards(self.path)) > 1:
            raise self.make_error("is one of several shards", "give a LoRA in one file")
        self.tensors = read_file_headers(self.path)
        self.parameter_shapes = {name: info.shape for name, info in parameters.items()}
        self.has_low_noise_tensors = any(map(is_low_noise, self.tensors))
        self.unused_names: tuple[str, ...] = ()

    def make_error(self, why: str, remedy: str) -> InputError:
        return InputError("LoRA", self.path, why, remedy)

    def read(self) -> Lora:
        """Returns the file's weight deltas for the network."""
        is_low_noise_prefix = self.has_low_noise_tensors and self.expert == "low_noise"
        prefix = LOW_NOISE_PREFIX if is_low_noise_prefix else HIGH_NOISE_PREFIX
        layers = self.group_by_layer()
        alphas = {name: layer.tensors.pop("alpha", None) for name, layer in layers.items()}
        alpha_infos = {name: info for name, info in alphas.items() if info is not None}
        for info in alpha_infos.values():
            if prod(info.shape) != 1:
                why = f"holds {info.name}, which is no single number"
                raise self.make_error(why, "it is damaged")
        scalars = read_scalars(self.path, alpha_infos.values())
        settings = read_peft_settings(self.path, prefix)
        self.check_whole_parameters(layers, settings)
        deltas: dict[str, list[WeightDelta]] = {}
        for name, layer in layers.items():
            layer_settings = settings
            if name in alpha_infos:  # counts before PEFT's, as LyCORIS divides it
                alpha = scalars[alpha_infos[name].name]
                layer_settings = replace(settings, rank=None, rank_pattern={})
                if not layer.tensors.keys() - {"bias"}:
                    why = f"has {alpha_infos[name].name}, but no LoRA for this layer"
                    raise self.make_error(why, "it is damaged")
            else:
                alpha = settings.find_alpha(layer.module_names)
            for parameter, delta in self.iter_deltas(name, layer, alpha, layer_settings):
                deltas.setdefault(parameter, []).append(delta)
        all_deltas = {name: tuple(x) for name, x in deltas.items()}
        return Lora(self.path, self.strength, all_deltas, unused_names=self.unused_names)

    def select_names(self) -> list[str]:
        """Returns the names of this network's tensors, and sets `unused_names`."""
        if self.has_low_noise_tensors and self.expert == "dit":
            remedy = "this checkpoint has one network"
            raise self.make_error(f"is for two experts ({LOW_NOISE_PREFIX}...)", remedy)
        names = [*self.tensors]
        if self.has_low_noise_tensors:
            is_low = self.expert == "low_noise"
            names = [name for name in names if is_low_noise(name) == is_low]
        if not names:
            remedy = "give another one"
            if self.expert != "dit":
                remedy = "give it for the other expert, or give another file"
            raise self.make_error(f"holds nothing for the {self.expert} network", remedy)
        if any(name.startswith(_IMAGE_INPUT) for name in self.parameter_shapes):
            return names
        self.unused_names = tuple(filter(is_image_layer, names))
        if len(self.unused_names) == len(names):
            why = f"changes only the image input of other networks ({list_names(names)})"
            raise self.make_error(f"{why}, which this one lacks", "leave it out")
        return [name for name in names if not is_image_layer(name)]

    def group_by_layer(self) -> dict[str, _LoraLayer]:
        """Groups the file's tensors by official layer name, then by role."""
        names = self.select_names()
        suffixes = {name: split_suffix(name) or Suffix(name, "", "") for name in names}
        adapters = {suffix.adapter for suffix in suffixes.values() if suffix.adapter}
        if len(adapters) > 1:
            why = f"holds {len(adapters)} adapters ({list_names(sorted(adapters))})"
            raise self.make_error(why, "save each in its own file")
        layers: dict[str, _LoraLayer] = {}
        for name, (layer, role, module_names) in self.resolve_names(suffixes).items():
            info, entry = self.tensors[name], layers.setdefault(layer, _LoraLayer(module_names, {}))
            first_info = entry.tensors.setdefault(role, info)
            if first_info is not info:
                why = f"changes {layer} twice ({first_info.name} and {name})"
                raise self.make_error(why, "remove one")
        return layers

    def resolve_names(
        self, suffixes: Mapping[str, Suffix]
    ) -> dict[str, tuple[str, str, list[str]]]:
        """Returns (official layer, role, module names without prefixes) of each tensor.

        Raises:
            InputError: A suffix, a prefix or a layer is not known.
        """
        layers = map_layer_spellings(self.parameter_shapes)
        parameters = map_parameter_spellings(self.parameter_shapes)
        stems = {name: _remove_module_words(suffix.stem) for name, suffix in suffixes.items()}

        def is_known(stem: str) -> bool:
            return flatten_name(stem) in layers or flatten_name(stem) in parameters

        stripped = {name: strip_prefixes(stem, is_known, PREFIXES) for name, stem in stems.items()}
        unknown = [name for name, stages in stripped.items() if not is_known(stages[-1])]
        if unknown:
            shared = find_shared_prefix(stems.values(), is_known, PREFIXES)
            if shared is None or not all(suffixes[name].role for name in unknown):
                raise self.make_name_error(unknown, suffixes)
            stripped = {
                name: strip_prefixes(stem.removeprefix(shared), is_known, PREFIXES)
                for name, stem in stems.items()
            }
        resolved = {}
        for name, stages in stripped.items():
            stem, role = flatten_name(stages[-1]), suffixes[name].role
            if role and stem in layers:
                layer = layers[stem]
            elif stem in parameters and role in ("", "difference of weight"):
                layer, _, parameter = parameters[stem].rpartition(".")
                role = f"{'difference of' if role else 'whole'} {parameter}"
            else:
                raise self.make_name_error([name], suffixes)
            resolved[name] = layer, role, stages
        return resolved

    def make_name_error(self, names: Sequence[str], suffixes: Mapping[str, Suffix]) -> InputError:
        """Returns the refusal of tensors of unknown kinds, or of layers that the network lacks."""
        if unknown_kinds := [name for name in names if not suffixes[name].role]:
            why = f"holds tensors of no known kind of LoRA ({list_names(unknown_kinds)})"
            return self.make_error(why, _GIVE_KNOWN_KIND)
        why = f"changes layers that the {self.expert} network of this checkpoint does not have"
        why = f"{why} ({list_names(names)})"
        return self.make_error(why, f"give a LoRA of this network, or {_CONVERT}")

    def check_whole_parameters(
        self, layers: Mapping[str, _LoraLayer], settings: PeftSettings
    ) -> None:
        """Refuses whole parameters that PEFT's settings do not name."""
        stored = {
            info.name: (layer.module_names[-1], role)
            for layer in layers.values()
            for role, info in layer.tensors.items()
            if role.startswith("whole ")
        }
        unnamed = [x for x, (module, _) in stored.items() if not settings.trains(module)]
        if len(stored) == len(self.tensors):
            why = f"holds {list_names(stored)}: full weights, not differences"
            raise self.make_error(why, "give such a file as a checkpoint (`ckpt_dir`)")
        if unnamed:
            why = f"holds {list_names(unnamed)}: full weights beside differences, which no "
            why += "adapter_config.json names (modules_to_save, bias)"
            remedy = "put the adapter_config.json of this file beside it, or remove these tensors"
            raise self.make_error(why, remedy)

    def iter_deltas(
        self, name: str, layer: _LoraLayer, alpha: Any, settings: PeftSettings
    ) -> Iterator[tuple[str, WeightDelta]]:
        """Yields (parameter name, weight delta) for a layer.

        Args:
            name: Official name.
            alpha: The matrices are scaled by alpha / rank; None: by 1.
        """
        tensors = layer.tensors
        for info in tensors.values():
            if info.dtype not in (*FLOATS, *FP8):
                remedy = f"give it in one of {', '.join((*FLOATS, *FP8))}"
                raise self.make_error(f"holds {info.name}, which is stored as {info.dtype}", remedy)
        scale, deltas = 1.0, self.make_deltas(tensors)
        for delta in deltas:
            self.check_shape(delta, f"{name}.weight")
            rank = _find_rank(delta) or settings.find_rank(layer.module_names)
            if rank is not None:
                scale = self.compute_scale(name, rank, alpha, settings.use_rslora)
            delta = replace(delta, scale=scale * self.strength)
            if "magnitude" in tensors:
                delta = self.add_magnitude(delta, tensors["magnitude"], name, scale)
            yield f"{name}.weight", delta
        orphan = tensors.get("bias") or tensors.get("magnitude")
        if orphan is not None and not deltas:
            raise self.make_error(f"has {orphan.name}, but no LoRA for this layer", "it is damaged")
        for role, info in tensors.items():
            if not role.startswith(("bias", "difference of ", "whole ")):
                continue
            parameter = f"{name}.{role.rpartition(' ')[2]}"
            shape = self.parameter_shapes.get(parameter)
            if info.shape != shape:
                expected = "absent in this network" if shape is None else list(shape)
                why = f"holds {info.name} {list(info.shape)}, which does not fit {parameter}"
                raise self.make_error(f"{why} ({expected})", _MISFIT)
            factor = scale if role == "bias" else 1.0
            full = WeightDelta(factor * self.strength, (StoredMatrix(info),))
            yield parameter, replace(full, operation="replace") if "whole" in role else full

    def make_deltas(self, tensors: Mapping[str, TensorInfo]) -> list[WeightDelta]:
        """Returns a layer's LoRA, LoHa, LoKr or GLoRA, unscaled; [] if it has none.

        Raises:
            InputError: The layer has two of them, or a part of one.
        """
        names = {
            role[:4] if role[:4] in ("lokr", "hada") else "pair": info.name
            for role, info in tensors.items()
            if role in _PAIR_ROLES or role.startswith(("lokr", "hada"))
        }
        if len(names) > 1:
            why = f"has {' and '.join(names.values())}, LoRAs of two kinds for one layer"
            raise self.make_error(why, "keep one of them")
        if any(role.startswith("lokr") for role in tensors):
            w1 = self.make_matrix(tensors, "lokr_w1", "lokr_w1_a", "lokr_w1_b")
            w2 = self.make_matrix(tensors, "lokr_w2", "lokr_w2_a", "lokr_w2_b")
            return [WeightDelta(1.0, (w1, w2), "kronecker")]
        if any(role.startswith("hada") for role in tensors):
            factors = [
                self.make_matrix(tensors, "", f"hada_w{i}_a", f"hada_w{i}_b") for i in (1, 2)
            ]
            return [WeightDelta(1.0, tuple(factors), "hadamard")]
        deltas = []
        if tensors.keys() & _PAIR_ROLES:
            deltas.append(WeightDelta(1.0, (self.make_matrix(tensors, "", "up", "down"),)))
        if tensors.keys() & {"base_up", "base_down"}:
            matrix = self.make_matrix(tensors, "", "base_up", "base_down")
            deltas.append(WeightDelta(1.0, (matrix,), "multiply"))
            if "magnitude" in tensors:
                why = f"holds {tensors['magnitude'].name} of a GLoRA, which has none"
                raise self.make_error(why, "it is damaged")
        return deltas

    def make_matrix(
        self, tensors: Mapping[str, TensorInfo], full: str, up: str, down: str
    ) -> Matrix:
        """Returns a matrix from the tensors of these roles.

        Raises:
            InputError: A tensor is missing, or the matrix is given twice.
        """
        if full in tensors:
            if up in tensors or down in tensors:
                why = f"has {tensors[full].name}, and factors of it"
                raise self.make_error(why, "it is damaged")
            return StoredMatrix(tensors[full])
        if up not in tensors or down not in tensors:
            first = next(iter(tensors.values())).name
            half = tensors.get(up) or tensors.get(down)
            name = first if half is None else half.name
            raise self.make_error(f"has {name}, but not the other factor", "it is damaged")
        return LowRankMatrix(tensors[up], tensors[down])

    def check_shape(self, delta: WeightDelta, name: str) -> None:
        """Refuses matrices that do not fit the parameter."""
        shape = self.parameter_shapes.get(name, ())
        expected = (shape[0], prod(shape[1:])) if shape else None
        if delta.operation == "multiply" and len(shape) > 1:
            expected = shape[1], shape[1]
        if expected is None or delta.shape != expected:
            tensors = " and ".join(f"{info.name} {list(info.shape)}" for info in delta.infos)
            why = f"holds {tensors}, which do not fit {name} {list(shape)}"
            raise self.make_error(why, _MISFIT)

    def compute_scale(self, layer: str, rank: int, alpha: Any, use_rslora: bool) -> float:
        """Returns alpha / rank, or alpha / sqrt(rank) of PEFT's rsLoRA.

        LyCORIS stores an alpha of its rsLoRA that is to be divided by the rank.
        """
        alpha = rank if alpha is None else alpha
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not abs(alpha) <= MAX_ABS:
            why = f"has alpha {format_value(alpha)} for {layer}"
            raise self.make_error(why, "it is damaged")
        return float(alpha / (math.sqrt(rank) if use_rslora else rank))

    def add_magnitude(
        self, delta: WeightDelta, magnitude: TensorInfo, layer: str, scale: float
    ) -> WeightDelta:
        """Returns the DoRA of a delta. Its strength scales the change of the weight as a whole."""
        rows, *_ = self.parameter_shapes[f"{layer}.weight"]
        is_peft = "lora_magnitude_vector" in magnitude.name
        if prod(magnitude.shape) != rows or not (is_peft or magnitude.shape[0] == rows):
            why = f"holds {magnitude.name} {list(magnitude.shape)}, which are no norms of the rows"
            raise self.make_error(f"{why} of {layer}.weight", _MISFIT)
        return replace(delta, scale=scale, magnitude=magnitude, strength=self.strength)


def _find_rank(delta: WeightDelta) -> int | None:
    """Returns the rank by which alpha is divided; None for two whole matrices of LoKr."""
    ranks = [matrix.rank for matrix in delta.matrices if isinstance(matrix, LowRankMatrix)]
    return ranks[0] if ranks else None


def _remove_module_words(stem: str) -> str:
    """Removes the words that wrappers of diffusers and PEFT add within a name."""
    return _MODULE_WORDS.sub(".", f"{stem}.")[:-1]
