"""Quantizes the weights of a checkpoint's DiT for mindiesd and --quant_dit_path.

    python tools/quantize_dit.py --ckpt_dir Wan2.2-T2V-A14B --out Wan2.2-T2V-A14B-W8A8

W8A8_DYNAMIC: the linear layers of the blocks get int8 weights with one scale per output channel
(largest magnitude / 127, symmetric); inputs are quantized per token when the network runs. All
other tensors stay FLOAT and are read from the checkpoint. With --fa fp8 the self-attentions also
get the entries and rotations of FP8 attention. With generate.py's LoRA flags, weights are quantized
after merging. Two experts make two folders. Tensors are read, quantized and written one at a time.
Files have mode 0640, because mindiesd reads no others.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import SafetensorError
from torch import Tensor

from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.checkpoint.formats.safetensors_stream import stream_safetensors
from wan.checkpoint.formats.tensor_source import TensorSource
from wan.checkpoint.layout import Checkpoint, DitFiles, inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.resolve import Lora, resolve_loras
from wan.checkpoint.quant.w8a8_export import (
    DESCRIPTION_FILES,
    FOLDERS,
    FP8_DYNAMIC,
    MAX_FILE_MODE,
    W8A8_DYNAMIC,
)
from wan.kernels.fp8 import make_hadamard_rotation
from wan.kernels.int8_linear import quantize_per_token
from wan.settings.command import Loras
from wan.settings.errors import COMMAND_LINE_NAMING, InputError
from wan.settings.fields import list_options
from wan.settings.layers import read_layer
from wan.utils.files import write_folder
from wan.utils.log import set_up_logging

LINEAR = re.compile(r"(blocks\.\d+\.(?:(?:self|cross)_attn\.[qkvo]|ffn\.[02]))\.weight")
SELF_ATTENTION = re.compile(r"(blocks\.\d+\.self_attn)\.q\.weight")

Shape = tuple[int, ...]
Make = Callable[[], Iterator[tuple[str, Tensor]]]


def quantize_checkpoint(ckpt_dir: Path, out: Path, *, fa: str | None = None, **loras: Any) -> Path:
    """Writes the folder `out` and returns it.

    Args:
        fa: None, or "fp8" for FP8 attention.
        loras: LoRA settings by the flags' names.

    Raises:
        InputError: A LoRA changes weights that are not quantized, `ckpt_dir` is no checkpoint or
            unreadable, `out` is the current folder, a link or not empty, or with `fa` the head size
            is no power of two.
        OSError: `out` cannot be written.
    """
    with _refuse_unreadable(ckpt_dir):
        checkpoint = inspect_checkpoint(ckpt_dir)
    loras_by_network = _read_loras(
        {name: value for name, value in loras.items() if value is not None}, checkpoint
    )
    with write_folder(out) as unfinished:
        for name, dit in checkpoint.experts.items():
            rotation = _make_rotation(dit) if fa else None
            _write_export(
                unfinished / FOLDERS[name], dit, name, rotation, loras_by_network.get(name, ())
            )
    return out


def _read_loras(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, tuple[Lora, ...]]:
    """Reads each network's LoRAs; refuses a LoRA that changes weights outside the export."""
    layer = read_layer(settings, "the command line", COMMAND_LINE_NAMING)
    loras = resolve_loras(Loras(**layer.values), checkpoint)
    for network_lora in (
        network_lora for network_loras in loras.values() for network_lora in network_loras
    ):
        unquantized = [
            name
            for name in network_lora.deltas
            if not LINEAR.fullmatch(name.replace(".bias", ".weight"))
        ]
        if unquantized:
            raise InputError(
                f"LoRA {network_lora.path} changes {unquantized[0]}, which is not quantised and is "
                "read from the checkpoint; merge the LoRA into the checkpoint first."
            )
    return loras


def _make_rotation(dit: DitFiles) -> Tensor:
    """Makes mindiesd's rotation of queries and keys, in the dtype of its product."""
    try:
        return make_hadamard_rotation(
            dit.config["dim"] // dit.config["num_heads"], dtype=torch.bfloat16
        )
    except ValueError as error:
        raise InputError(f"{dit.folder}: {error}; leave --fa out.") from error


def _write_export(
    folder: Path, dit: DitFiles, label: str, rotation: Tensor | None, loras: Sequence[Lora]
) -> None:
    folder.mkdir(exist_ok=True)
    with _refuse_unreadable(dit.folder):
        sources = merge_loras(open_sources(dit.tensors), loras)
    entries: dict[str, str] = {"model_quant_type": W8A8_DYNAMIC, "version": "1.0.0"}
    entries |= dict.fromkeys(sorted(sources), "FLOAT")
    form: dict[str, tuple[torch.dtype, Shape]] = {}
    makers: list[Make] = []
    for name, source in sorted(sources.items()):  # the same bytes from every layout
        if linear := LINEAR.fullmatch(name):
            bias = sources.get(f"{linear[1]}.bias")
            form[name] = torch.int8, source.shape
            form[f"{name}_scale"] = torch.float32, (source.shape[0], 1)
            if bias is not None:
                form[f"{linear[1]}.bias"] = torch.float32, bias.shape
            makers.append(partial(_quantize_linear, name, source, bias))
        if rotation is not None and (attention := SELF_ATTENTION.fullmatch(name)):
            entries[f"{attention[1]}.quant_type"] = FP8_DYNAMIC
            for part in ("q_rot", "k_rot"):
                form[f"{attention[1]}.{part}"] = rotation.dtype, tuple(rotation.shape)
            makers.append(partial(_list_rotations, attention[1], rotation))
    entries |= {name: FP8_DYNAMIC if name.endswith("_rot") else W8A8_DYNAMIC for name in form}
    weights = folder / f"quant_model_weight_{W8A8_DYNAMIC.lower()}.safetensors"
    tensors = (tensor for make in makers for tensor in make())
    stream_safetensors(weights, form, tensors, f"quantizing {label}")
    description = folder / next(iter(DESCRIPTION_FILES))
    description.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    for path in (weights, description):
        path.chmod(MAX_FILE_MODE)


@contextmanager
def _refuse_unreadable(folder: Path) -> Iterator[None]:
    """Turns errors of reading into refusals; errors of writing stay OSError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{folder} cannot be read ({error}); check that the checkpoint exists and is complete."
        ) from error


def _quantize_linear(
    name: str, source: TensorSource, bias: TensorSource | None
) -> Iterator[tuple[str, Tensor]]:
    payload_OI, scale_O1 = quantize_per_token(source.read(slice(None)))
    yield name, payload_OI
    yield f"{name}_scale", scale_O1
    if bias is not None:
        yield name.removesuffix("weight") + "bias", bias.read(slice(None)).float()


def _list_rotations(layer: str, rotation: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{layer}.q_rot", rotation
    yield f"{layer}.k_rot", rotation


def _parse_folder(raw: str) -> Path:
    if not raw.strip():
        raise argparse.ArgumentTypeError("is empty")
    return Path(raw)


def main(argv: list[str] | None = None) -> int:
    """Quantizes a checkpoint; returns 0, 2 if the request is refused or 130 if interrupted."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ckpt_dir", required=True, type=_parse_folder, help="a checkpoint folder")
    parser.add_argument("--out", required=True, type=_parse_folder, help="a new or empty folder")
    parser.add_argument("--fa", choices=["fp8"], help="also export FP8 attention")
    for name in list_options(Loras):
        action = {"lora_dir": "store", "use_relighting_lora": "store_true"}.get(name, "append")
        parser.add_argument(f"--{name}", action=action, default=None, help="as in generate.py")
    set_up_logging()
    try:
        print(quantize_checkpoint(**vars(parser.parse_args(argv))))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error}; give --out a folder that can be written.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; nothing was written.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that unfinished files are removed
    sys.exit(run_program(main))
