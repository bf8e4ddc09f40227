"""The demo's tokenizer and UMT5 encoder, and the training of the latter.

    python -m tools.demo.text --state STATE

The encoder learns to predict at every word of a caption the attributes of the shape that the word
belongs to: colour, shape, size and motion; at the last token, the attributes of all shapes.
Legend: B captions, T tokens, C text channels, K answers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from tools.demo.scenes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZES,
    VERBS,
    Scene,
    make_caption,
    make_random_scene,
)
from tools.demo.training import Training, get_device, load_averaged_weights
from wan.app.flag_parser import Parser
from wan.app.programs import run_program

TEXT_DIM, TEXT_LEN, LAYERS = 64, 32, 2
_SPECIAL = ("<pad>", "</s>", "<unk>")  # their ids are 0, 1, 2, as in T5
_ATTRIBUTES = {"colour": COLOURS, "shape": SHAPES, "size": tuple(SIZES), "motion": MOTIONS}
_ANSWERS = {f"{n}.{key}": values for n in (0, 1) for key, values in _ATTRIBUTES.items()}
_ANSWERS |= {"background": BACKGROUNDS, "own": MOTIONS}
_NONE = -100  # ignored by cross_entropy


def list_words() -> list[str]:
    """Lists all words of the captions."""
    verbs = " ".join(verb for wordings in VERBS.values() for verb in wordings)
    other_words = " ".join(
        (*COLOURS, *SHAPES, *BACKGROUNDS, *SIZES, "a an the and on with background")
    )
    return sorted(set(f"{verbs} {other_words}".split()))


def make_tokenizer() -> Tokenizer:
    """Makes a tokenizer: a token per word, T5's special tokens and mark of spaces, else <unk>."""
    names = [*_SPECIAL, *(f"▁{word}" for word in list_words())]
    word_tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>")
    )
    word_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(".", ""), normalizers.Replace(",", "")]
    )
    word_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    word_tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    word_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return word_tokenizer


def make_encoder() -> Any:
    """Makes an untrained UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    config: Any = UMT5Config(
        vocab_size=len(list_words()) + len(_SPECIAL),
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=128,
        num_layers=LAYERS,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return UMT5EncoderModel(config)


def load_encoder_weights(state: Path) -> dict[str, Tensor]:
    """Loads the trained encoder's weights, rounded to bfloat16 as in the export."""
    return {
        name.removeprefix("encoder."): tensor.bfloat16().float()
        for name, tensor in load_averaged_weights(state / "text.pt").items()
        if name.startswith("encoder.")
    }


def load_trained_encoder(state: Path) -> Any:
    """Loads the trained encoder in eval mode."""
    model, weights = make_encoder(), load_encoder_weights(state)
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"]  # tied weights
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


class AnswerReader(nn.Module):
    """The encoder with one linear layer for all answers, used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_encoder()
        self.answers = nn.Linear(TEXT_DIM, sum(len(values) for values in _ANSWERS.values()))

    def forward(self, ids_BT: Tensor) -> Tensor:
        states = self.encoder(ids_BT, (ids_BT != 0).long()).last_hidden_state
        answers: Tensor = self.answers(states)
        return answers


def tokenize_texts(texts: list[str]) -> Tensor:
    """Tokenizes texts to ids, int64 [B, T], zero-padded to TEXT_LEN."""
    encoded = make_tokenizer().encode_batch(texts)
    rows = [(e.ids[:TEXT_LEN] + [0] * TEXT_LEN)[:TEXT_LEN] for e in encoded]
    return torch.tensor(rows)


def make_targets(text: str, scene: Scene) -> np.ndarray[Any, Any]:
    """Makes a caption's targets, int64 [TEXT_LEN, answers]; _NONE where no answer is expected."""
    answers = np.full((TEXT_LEN, len(_ANSWERS)), _NONE)
    caption_words = text.split()
    column = {name: i for i, name in enumerate(_ANSWERS)}
    border = caption_words.index("and") if "and" in caption_words else len(caption_words)
    for number, actor in enumerate(scene.actors):
        positions = range(border + 1, len(caption_words)) if number else range(border)
        for key, values in _ATTRIBUTES.items():
            if key == "size" and not re.search(
                r"small|large", _join_words(caption_words, positions)
            ):
                continue
            answer = values.index(getattr(actor, key))
            answers[[*positions, len(caption_words)], column[f"{number}.{key}"]] = answer
        answers[list(positions), column["own"]] = MOTIONS.index(actor.motion)
    if "background" in caption_words:
        answers[: len(caption_words) + 1, column["background"]] = BACKGROUNDS.index(
            scene.background
        )
    return answers


def _join_words(caption_words: list[str], positions: range) -> str:
    return " ".join(caption_words[i] for i in positions)


def make_caption_batch(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Makes token ids [B,T] and targets [B,T,answers] of a training step."""
    random = np.random.default_rng([3, step])
    scenes = [make_random_scene(2, step * count + n) for n in range(count)]
    texts = [make_caption(scene, random) for scene in scenes]
    wanted = np.stack([make_targets(t, s) for t, s in zip(texts, scenes, strict=True)])
    return tokenize_texts(texts), torch.from_numpy(wanted)


def compute_answer_loss(reader: nn.Module, ids_BT: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """Computes the mean cross-entropy of the expected answers, and the share of correct ones."""
    parts = reader(ids_BT).split([len(values) for values in _ANSWERS.values()], dim=-1)
    losses, right, num_answers = [], 0, 0
    for part, answer in zip(parts, wanted.unbind(-1), strict=True):
        losses.append(F.cross_entropy(part.flatten(0, 1), answer.flatten(), ignore_index=_NONE))
        right += int((part.argmax(-1) == answer)[answer != _NONE].sum())
        num_answers += int((answer != _NONE).sum())
    return torch.stack(losses).mean(), right / num_answers


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder for states and data")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    training = Training(AnswerReader(), options.state / "text.pt", steps=1000, peak=3e-3)
    while not training.is_finished:
        ids, wanted = make_caption_batch(training.step, 64)
        loss, right = compute_answer_loss(
            training.network, ids.to(get_device()), wanted.to(get_device())
        )
        training.update(loss, right=right)


if __name__ == "__main__":
    sys.exit(run_program(main))
