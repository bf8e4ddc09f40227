"""Compares LoRA files of all kinds that PEFT and LyCORIS write with the libraries' own merge.

    python benchmarks/adapter_kinds.py --json docs/results/adapter_kinds.json

Each kind in PEFT's registry, and each algorithm of LyCORIS, adapts some layers of a tiny network,
gets random factors, and is saved by its library. PEFT loads and merges the file; of LyCORIS, whose
merges scale LoHa and LoKr twice, the outputs of the layers show the weights. Both are compared with
the weights that `--lora` merges. The program prints a row for each kind: the largest difference of
a weight, relative to its largest change, or the sentence that refuses the file. Kinds of PEFT for
the prompts of language models are not among them. The exit code is 1 if a difference is above 1e-6.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import CPU, results_file, write_json
from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.checkpoint.keymaps import rename_dit_to_diffusers
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora import resolve_loras
from wan.checkpoint.merge_lora import merge_loras
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.testing.random_checkpoint import make_checkpoint

RECORD = Path(__file__).parents[1] / "docs" / "results" / "adapter_kinds.json"
TOLERANCE = 1e-6  # of the largest change
PEFT_FILE = "adapter_model.safetensors"
TARGETS = ["to_q", "to_v", "ffn.net.2"]
PEFT_OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 48},
    "IA3": {"feedforward_modules": ["ffn.net.2"]},
    "ROAD": {"group_size": 32},
    "VBLORA": {"vector_length": 48},
}
"""Options of PEFT without which a kind does not fit the tiny network."""
PEFT_VARIANTS: dict[str, dict[str, Any]] = {
    "rsLoRA": {"use_rslora": True},
    "patterns": {"rank_pattern": {"to_q": 3}, "alpha_pattern": {"to_v": 5}},
    "DoRA": {"use_dora": True},
    "bias": {"lora_bias": True},
    "biases": {"bias": "all"},
    "saved modules": {"modules_to_save": ["proj_out"]},
    **{
        f"init {name}": {"init_lora_weights": name}
        for name in ("gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora")
    },
    "QALoRA": {"use_qalora": True, "qalora_group_size": 8},
    "KaSA": {"kasa_config": "KasaConfig"},
}
"""Variants of PEFT's LORA."""
LYCORIS_VARIANTS: dict[str, dict[str, Any]] = {
    "locon, cores": {"algo": "locon", "use_tucker": True},
    "locon, DoRA": {"algo": "locon", "dora_wd": True},
    "loha, cores": {"algo": "loha", "use_tucker": True},
    "loha, DoRA": {"algo": "loha", "dora_wd": True},
    "lokr, factorised": {"algo": "lokr", "factor": 8, "decompose_both": True},
    "lokr, whole": {"algo": "lokr", "full_matrix": True},
    "lokr, DoRA": {"algo": "lokr", "dora_wd": True},
}
"""Variants of algorithms of LyCORIS."""


class Row(NamedTuple):
    """The outcome of one kind.

    Attributes:
        error: The largest difference, relative to the largest change; None if it is not merged.
        text: The sentence of the refusal, or why the library made no file.
    """

    library: str
    kind: str
    error: float | None
    text: str = ""


class Bench:
    """A tiny checkpoint, and a folder for files of adapters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sizes = {"num_layers": 2}
        checkpoint = make_checkpoint("t2v-1.3B", folder / "x", layout="diffusers", sizes=sizes)
        self.checkpoint = inspect_checkpoint(checkpoint)

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return self.load_network().state_dict()

    def load_network(self) -> Any:
        from diffusers import WanTransformer3DModel

        path = self.checkpoint.folder
        assert path is not None
        network = WanTransformer3DModel.from_pretrained(path / "transformer")
        return network.double()

    def compare(self, library: str, kind: str, file: Path, merge: Callable[[], Any]) -> Row:
        """Merges a file as `--lora` does, and compares all weights with the library's."""
        try:
            loras = resolve_loras(Loras((str(file),)), self.checkpoint)["dit"]
        except InputError as refusal:
            return Row(library, kind, None, str(refusal).replace(f"{file} ", ""))
        sources = merge_loras(open_sources(self.checkpoint.experts["dit"].tensors), loras)
        expected, errors = merge(), []
        for name, source in sources.items():
            stored = self.weights[rename_dit_to_diffusers(name)]
            exact = expected.get(rename_dit_to_diffusers(name), stored)
            change = (exact - stored).abs().max()
            actual = source.read(slice(None)).double().reshape(exact.shape)
            if change == 0:
                errors.append(0.0 if torch.equal(actual, stored.reshape(exact.shape)) else 1.0)
            else:
                errors.append(float((actual - exact).abs().max() / change))
        return Row(library, kind, max(errors))


def randomise(parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Adds random values to trained parameters; a DoRA's magnitudes change by up to a third."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
            is_magnitude = "magnitude" in name or "dora_scale" in name
            changed = parameter.data * (1 + noise * 2 / 3) if is_magnitude else None
            parameter.data = parameter.data + noise if changed is None else changed


def iter_peft_rows(bench: Bench) -> Iterator[Row]:
    """Yields a row for each kind of PEFT's registry that adapts layers."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kinds = {kind.value: make_config for kind, make_config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    for kind, make_config in kinds.items():
        fields = {field.name for field in dataclasses.fields(make_config)}
        if issubclass(make_config, peft.PromptLearningConfig) or kind == "ADAPTION_PROMPT":
            continue
        targets = {"target_modules": TARGETS} if "target_modules" in fields else {}
        yield compare_peft(bench, kind, make_config, {**targets, **PEFT_OPTIONS.get(kind, {})})
    for variant, options in PEFT_VARIANTS.items():
        values = {
            key: getattr(peft, value)() if key.endswith("_config") else value
            for key, value in options.items()
        }
        yield compare_peft(
            bench, f"LORA, {variant}", peft.LoraConfig, {"target_modules": TARGETS, **values}
        )


def compare_peft(bench: Bench, kind: str, make_config: Any, options: dict[str, Any]) -> Row:
    from peft import PeftModel, get_peft_model

    folder = bench.folder / kind
    try:
        model: Any = get_peft_model(bench.load_network().float(), make_config(**options))
        randomise(model.named_parameters())
        model.double().save_pretrained(folder)
    except Exception as error:  # each kind refuses what it cannot adapt in its own way
        return Row("PEFT", kind, None, f"PEFT makes no file ({type(error).__name__}: {error})")

    def merge() -> Any:
        loaded: Any = PeftModel.from_pretrained(bench.load_network(), folder)
        return loaded.double().merge_and_unload().state_dict()

    return bench.compare("PEFT", kind, folder / PEFT_FILE, merge)


def iter_lycoris_rows(bench: Bench) -> Iterator[Row]:
    """Yields a row for each algorithm of LyCORIS."""
    from lycoris.wrapper import network_module_dict

    kinds = {algorithm: {"algo": algorithm} for algorithm in network_module_dict}
    for kind, options in {**kinds, **LYCORIS_VARIANTS}.items():
        yield compare_lycoris(bench, kind, options)


def compare_lycoris(bench: Bench, kind: str, options: dict[str, Any]) -> Row:
    from lycoris import create_lycoris
    from lycoris.logging import logger

    logger.setLevel("ERROR")
    file, target = bench.folder / f"{kind}.safetensors", bench.load_network()
    rank = 24 if kind == "boft" else 4  # BOFT needs one that fits the network
    network = create_lycoris(target, linear_dim=rank, linear_alpha=2, **options)
    network.apply_to()
    randomise(network.double().eval().named_parameters())
    network.save_weights(str(file), torch.float64, {})
    for adapter in network.loras if kind == "dylora" else ():  # its forward draws a rank
        adapter.restore()
        weight = adapter.org_module[0].weight.data
        change = torch.cat([*adapter.up_list], 1) @ torch.cat([*adapter.down_list])
        weight += change.view(weight.shape) * adapter.scale
    return bench.compare("LyCORIS", kind, file, lambda: read_forward_state(target))


@torch.no_grad()
def read_forward_state(network: nn.Module) -> dict[str, Tensor]:
    """Returns the weights and biases of layers as their outputs show them."""
    state = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            inputs = torch.eye(layer.in_features, dtype=torch.float64)
            shape: tuple[int, ...] = (layer.out_features, layer.in_features)
        elif isinstance(layer, nn.Conv3d):
            size = (layer.in_channels, *layer.kernel_size)
            inputs = torch.eye(prod(size), dtype=torch.float64).view(-1, *size)
            shape = (layer.out_channels, *size)
        else:
            continue
        outputs = layer(torch.cat([inputs, torch.zeros_like(inputs[:1])])).flatten(1)
        state[f"{name}.bias"] = outputs[-1]
        state[f"{name}.weight"] = (outputs[:-1] - outputs[-1]).T.reshape(shape)
    return state


def list_rows() -> list[Row]:
    """Returns the rows of both libraries."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(action="ignore"):
        bench = Bench(Path(name))
        return [*iter_peft_rows(bench), *iter_lycoris_rows(bench)]


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=results_file, help="write the rows to this file")
    arguments = parser.parse_args()
    rows = list_rows()
    for row in rows:
        outcome = row.text if row.error is None else f"equal ({row.error:.0e})"
        print(f"{row.library} {row.kind}: {outcome}")
        write_json(arguments.json, CPU, [row._asdict() for row in rows])
    return int(any(row.error is not None and row.error > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(run_program(main))
