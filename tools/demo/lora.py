"""LoRA training of the demo's experts: layers, command line, files.

The programs `distil`, `last_image`, `chain` and `vace` use it. Each has the stages data, training
of each expert, export and scores; a finished stage is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from tools.demo.outputs import LORA, LORA_MARK
from tools.demo.training import load_averaged_weights
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer, real
from wan.utils.files import check_output, write_output

EXPERTS = ("high_noise", "low_noise")
BATCH, TOKENS = 32, 48  # clips per step; tokens of 9 frames of 64 x 64
LAYERS = [f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"]
LAYERS += ["ffn.0", "ffn.2"]


class Lora(nn.Module):
    """A frozen linear layer with a trainable pair of matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def add_lora(model: Any, expert: str, rank: int) -> Any:
    """Adds a LoRA to every linear layer of an expert's blocks; freezes all other weights."""
    network = (model.high_noise_model if expert == "high_noise" else model.low_noise_model).float()
    network.requires_grad_(False)
    for block in network.blocks:
        for layer in LAYERS:
            block.set_submodule(layer, Lora(block.get_submodule(layer), rank))
    return network


def encode_prompts(model: Any, texts: list[str]) -> list[Tensor]:
    """Encodes each text to prompt embeddings."""
    encoder = model._pipeline.text_encoder.get()
    return [encoder(text) for text in texts]


def export_lora(state: Path, out: Path, trained: str) -> None:
    """Writes both files of a --lora_dir, in bfloat16, with the layer names of LightX2V."""
    for part in EXPERTS:
        check_output(out / f"{part}_model.safetensors", LORA, "--out")
    for part in EXPERTS:
        weights = load_averaged_weights(state / f"{trained}_{part}.pt")
        tensors = {
            f"diffusion_model.{name.removesuffix(f'.{end}.weight')}.lora_{end}.weight": tensor
            for name, tensor in weights.items()
            for end in ("down", "up")
            if name.endswith(f".{end}.weight")
        }
        with write_output(out / f"{part}_model.safetensors", LORA) as temporary:
            save_file(
                {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()},
                temporary,
                metadata=LORA_MARK,
            )


def run_training_program(
    description: str,
    name: str,
    prepare: Callable[[Path, int], None],
    train: Callable[[Path, str, int, float], None],
    score: Callable[[Path, int], None],
    steps: int,
    export: Callable[[Path, Path, str], None] = export_lora,
    argv: Sequence[str] | None = None,
) -> int:
    """Runs the command line of a training program and returns its exit code.

    Args:
        description: First line of the help.
        name: Name of the experts' state files, and of the default folder in outputs/.
        prepare: (state folder, number of clips): writes the training data.
        train: (state folder, expert, steps, peak learning rate): trains one expert.
        score: (--lora_dir, number of prompts): compares it with the plain checkpoint.
        steps: Default number of steps.
        export: (state folder, output folder, name): writes the result.
        argv: Arguments; None: those of this process.
    """
    parser = Parser(description=description)
    parser.add_argument(
        "--state", type=Path, default=Path("outputs", name), help="folder for states and data"
    )
    parser.add_argument(
        "--clips",
        type=make_argument_type(integer(1, 10_000_000)),
        help="make the data of this number of clips",
    )
    parser.add_argument("--expert", choices=EXPERTS, help="train the LoRA of this expert")
    parser.add_argument("--steps", type=make_argument_type(integer(1, 10_000_000)), default=steps)
    parser.add_argument(
        "--peak",
        type=make_argument_type(real(0, 100, exclude_min=True)),
        default=2e-3,
        help="peak learning rate",
    )
    parser.add_argument("--out", type=Path, help="write the --lora_dir")
    parser.add_argument("--score", type=Path, help="a --lora_dir to compare with none")
    parser.add_argument("--prompts", type=make_argument_type(integer(1, 10_000)), default=100)

    def work() -> None:
        options = parser.parse_args(argv)
        if options.score:
            score(options.score, options.prompts)
            return
        options.state.mkdir(parents=True, exist_ok=True)
        if options.clips:
            prepare(options.state, options.clips)
        if options.expert:
            train(options.state, options.expert, options.steps, options.peak)
        if options.out:
            export(options.state, options.out, name)

    return run_program(work)
