"""Files of a pipeline are recognised by their content, or refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import torch
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from transformers import T5Tokenizer

from tests import gguf_files
from tests.checkpoint_files import hold_same_networks, load_tensors, save_tensors
from tests.lora_files import PAIR
from tests.pipelines import build_quick_pipeline
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.formats.embedded_tokenizer import read_embedded_tokenizer
from wan.checkpoint.layout import Checkpoint, inspect_checkpoint
from wan.checkpoint.names.keymaps import rename_t5_to_transformers
from wan.modules import t5 as text
from wan.planner import report
from wan.planner.measure import Planner
from wan.settings.presets import PRESETS
from wan.testing import random_checkpoint

TEXT = "umt5_xxl_fp16.safetensors"
VAES = {"Wan2.1_VAE": "wan_2.1_vae.safetensors", "Wan2.2_VAE": "wan2.2_vae.safetensors"}
PARSERS = [r"(?<=safetensors file) \(.*\)(?=;)"]
SAMPLE_TEXTS = [
    *("A cat walks", "Übergröße, naïve café!", "  two  spaces ", "数猫", "</s> x"),
    "fi ligature ﬁ ½ ① ™",
]


def make_comfyui_tree(source: Path, root: Path, dits: str = "diffusion_models") -> Path:
    """An official folder's networks where ComfyUI has them, under names as they are published."""
    for network in [path for path in source.glob("*_model") if path.is_dir()] or [source]:
        name = {"high_noise_model": "t2v_high_noise_14B", "low_noise_model": "t2v_low_noise_14B"}
        file = f"wan2.2_{name.get(network.name, 'ti2v_5B')}_fp16.safetensors"
        save_tensors(load_tensors(network), root / dits / file)
    encoder = load_tensors(next(source.glob("models_t5*")))
    named = {rename_t5_to_transformers(name): tensor for name, tensor in encoder.items()}
    save_tensors(named, root / "text_encoders" / TEXT)
    for stem, name in VAES.items():
        for file in source.glob(f"{stem}.*"):
            save_tensors(load_tensors(file), root / "vae" / name)
    shutil.copytree(source / "google", root / "google")
    config = next(source.rglob("config.json"))
    shutil.copy(config, root / dits)  # the head size of tiny networks is not the published one
    return root


def add_other_models(root: Path, source: Path) -> None:
    """Adds files of other models: another task's, an image model's, a LoRA, and no weights."""
    folder_5b = root / "diffusion_models" / "5B"
    save_tensors(load_tensors(source), folder_5b / "wan2.2_ti2v_5B_fp16.safetensors")
    shutil.copy(source / "config.json", folder_5b)
    save_tensors(load_tensors(next(source.glob("Wan2.2_VAE.*"))), root / "vae" / VAES["Wan2.2_VAE"])
    save_tensors(
        {"double_blocks.0.weight": torch.zeros(2)}, root / "diffusion_models" / "flux.safetensors"
    )
    flat = {f"encoder.{x}": torch.zeros(2, 2, 1, 1) for x in ("conv_in.weight", "conv1.weight")}
    save_tensors(
        {**flat, "post_quant_conv.weight": torch.zeros(16, 16, 1, 1)},
        root / "vae" / "ae.safetensors",
    )
    save_tensors({"a.lora_down.weight": torch.zeros(2, 2)}, root / "loras" / "style.safetensors")
    (root / "diffusion_models" / "put_models_here").touch()


@pytest.fixture(scope="module")
def tree(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's tree of t2v-A14B, which also holds models of other tasks. Do not write into it."""
    root = make_comfyui_tree(tiny("t2v-A14B"), tmp_path_factory.mktemp("models"))
    add_other_models(root, tiny("ti2v-5B"))
    return root


A14B = (PRESETS["t2v-A14B"],)


def test_comfyuis_tree(tree: Path, pair_of_experts: Checkpoint) -> None:
    """The tree also holds models of other tasks."""
    assert hold_same_networks(inspect_checkpoint(tree, presets=A14B), pair_of_experts)


def test_files_of_any_layout_in_one_folder(tiny: Any, tmp_path: Path) -> None:
    """GGUF experts, diffusers' text encoder and an official VAE, under names of our own."""
    source = tiny("t2v-A14B")
    files, plain = gguf_files.make_gguf_folders(source, "Q8_0", tmp_path)
    root = tmp_path / "mixed"
    root.mkdir()
    for path, name in zip(sorted(files.rglob("*.gguf")), ("a-HIGH", "b-low"), strict=True):
        shutil.copy(path, root / f"{name}.gguf")
    encoder = load_tensors(tiny("t2v-A14B", "diffusers") / "text_encoder")
    save_tensors(encoder, root / "some text.safetensors")
    save_tensors(load_tensors(next(source.glob("Wan2.*_VAE.*"))), root / "c.safetensors")
    shutil.copytree(source / "google", root / "google")
    shutil.copy(files / "config.json", root)
    checkpoint = inspect_checkpoint(root, presets=A14B)
    assert hold_same_networks(checkpoint, inspect_checkpoint(plain))
    assert checkpoint.tokenizer == root / "google" / "umt5-xxl"


def test_files_that_are_chosen(
    tree: Path, pair_of_experts: Checkpoint, tiny: Any, tmp_path: Path
) -> None:
    """One expert, the text encoder and the VAE from elsewhere; a file or a folder."""
    broken = Path(shutil.copytree(tiny("t2v-A14B"), tmp_path / "broken"))
    for path in (*broken.glob("*_VAE*"), *broken.glob("models_t5*")):
        path.unlink()
    shutil.rmtree(broken / "low_noise_model")
    flags = ["--task", "t2v-A14B", "--text_encoder", str(tree / "text_encoders" / TEXT)]
    flags += ["--vae", str(tiny("t2v-A14B", "diffusers") / "vae")]
    flags += ["--dit_low_noise", str(next(tree.rglob("*low_noise*")))]
    run, _ = build_quick_pipeline(broken, *flags)
    assert hold_same_networks(run.setup.checkpoint, pair_of_experts)


def test_a_lora_in_comfyuis_folder(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the current folder counts before one of the same name there."""
    root = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    file = save_tensors(dict(PAIR), root / "loras" / "a.safetensors")
    flags = ("--task", "t2v-1.3B", "--lora", "a.safetensors=0.5")
    for path in (file, tmp_path / "a.safetensors"):
        save_tensors(dict(PAIR), path)
        (lora,) = build_quick_pipeline(root, *flags)[0].setup.loras["dit"]
        assert (lora.path, lora.strength) == (path, 0.5)


def test_a_plan_lists_every_file(tiny: Any, tmp_path: Path) -> None:
    files, _ = gguf_files.make_gguf_folders(tiny("t2v-A14B"), "Q8_0", tmp_path)
    run, _ = build_quick_pipeline(files, "--task", "t2v-A14B", "--precision", "bf16")
    lines = list(report.describe_checkpoint_files(Planner(run.setup, run.params)))
    names = ["DiT high_noise", "DiT low_noise", "text encoder", "tokenizer", "VAE"]
    assert [line.strip().partition(":")[0] for line in lines] == names
    assert "HighNoise/Wan2.2-HighNoise-Q8_0.gguf (" in lines[0] and "Q8_0 1.47 MB" in lines[0]
    assert lines[0].endswith("; Q8_0 stays until it is used, the rest becomes bf16")
    assert lines[3] == "  tokenizer: google/umt5-xxl"
    assert lines[4].startswith("  VAE: Wan2.1_VAE.") and lines[4].endswith("becomes fp32")


Change = Callable[[Path, dict[str, Any]], Any]


def duplicate(name: str) -> Change:
    def copy(root: Path, _: Any) -> None:
        path = next(root.rglob(name))
        shutil.copy(path, path.with_name(f"copy of {path.name}"))

    return copy


def delete(*names: str) -> Change:
    def remove(root: Path, _: Any) -> None:
        for name in names:
            for path in root.rglob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def choose(flag: str, name: str) -> Change:
    """`name` is a file in the tree."""
    return lambda root, chosen: chosen.update({flag: next(root.rglob(name), root / name)})


def truncate_file(name: str, size: int) -> Change:
    def truncate(root: Path, _: Any) -> None:
        path = next(root.rglob(name))
        content = path.read_bytes()[:size]
        path.unlink()  # others may have links to it
        path.write_bytes(content)

    return truncate


HIGH, LOW = "*high_noise*", "*low_noise*"
WRONG: dict[str, Change] = {
    "two high-noise experts": duplicate(HIGH),
    "two low-noise experts": duplicate(LOW),
    "two text encoders": duplicate("umt5*.safetensors"),
    "two VAEs": duplicate("wan_2.1*"),
    "no low-noise expert": delete(LOW),
    "no high-noise expert": delete(HIGH),
    "no DiT at all": delete("diffusion_models"),
    "only another task's DiT": delete(HIGH, LOW),
    "no text encoder": delete("umt5*.safetensors"),
    "no VAE": delete("wan_2.1*"),
    "no tokenizer": delete("google"),
    "a LoRA as an expert": choose("dit_high_noise", "style*"),
    "a VAE as the text encoder": choose("text_encoder", "wan_2.1*"),
    "another VAE": choose("vae", "wan2.2_vae*"),
    "another task's expert": choose("dit_high_noise", "*ti2v*"),
    "an image model": choose("dit_low_noise", "flux*"),
    "one DiT for a task of two": choose("dit", HIGH),
    "the same file twice": lambda root, words: [choose(flag, HIGH)(root, words) for flag in FLAGS],
    "no such file": choose("vae", "no.safetensors"),
    "no weights": choose("vae", "put_models_here"),
    "a truncated expert": truncate_file(HIGH, 5000),
    "a truncated chosen one": lambda root, words: [
        do(root, words) for do in (truncate_file(HIGH, 9), choose("dit_high_noise", HIGH))
    ],
    "a truncated text encoder": truncate_file("umt5*.safetensors", 0),
}
FLAGS = ("dit_high_noise", "dit_low_noise")


@pytest.mark.parametrize("swapped", [False, True])
def test_a_files_name_says_its_expert_before_its_folders(
    swapped: bool, tree: Path, tmp_path: Path
) -> None:
    """Each expert in a folder that is named after it, or after the other one."""
    root = tmp_path / "models"
    root.mkdir()
    for path in tree.iterdir():
        (root / path.name).symlink_to(path)
    (root / "diffusion_models").unlink()
    for expert, pattern in (("high_noise", HIGH), ("low_noise", LOW)):
        (file,) = (tree / "diffusion_models").glob(pattern)
        other = "low_noise" if expert == "high_noise" else "high_noise"
        inside = root / "diffusion_models" / (other if swapped else expert)
        inside.mkdir(parents=True)
        (inside / file.name).symlink_to(file)
        shutil.copy(tree / "diffusion_models" / "config.json", inside)
    experts = inspect_checkpoint(root).experts
    files = {name: {x.file.name for x in dit.tensors.values()} for name, dit in experts.items()}
    for name, (file_name,) in files.items():
        assert name in file_name


def test_wrong_mixtures(tree: Path, tmp_path: Path) -> None:
    messages = {}
    for name, change in WRONG.items():
        root, chosen = tmp_path / name, dict[str, Any]()
        shutil.copytree(tree, root, copy_function=os.link)
        change(root, chosen)
        argv = [word for flag, path in chosen.items() for word in (f"--{flag}", str(path))]
        messages[name] = get_refusal(build_quick_pipeline, root, "--task", "t2v-A14B", *argv)
    check_refusals("search: mixtures", messages, hide=PARSERS)


def test_damaged_files_of_other_models_are_left_alone(tree: Path, tmp_path: Path) -> None:
    """Such as a download that was ended; what this task needs is there."""
    root = Path(shutil.copytree(tree, tmp_path / "models"))
    for name in ("flux*", VAES["Wan2.2_VAE"]):
        truncate_file(name, 9)(root, {})
    run, _ = build_quick_pipeline(root, "--task", "t2v-A14B")
    assert run.setup.checkpoint.vae == root / "vae" / VAES["Wan2.1_VAE"]


# The tokenizer in a text encoder's file.


@pytest.fixture(scope="module")
def spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model with T5's special tokens, as the published one has them."""
    folder = tmp_path_factory.mktemp("spiece")
    lines = (
        (Path(random_checkpoint.__file__).with_name("tokenizer_text.txt")).read_text().splitlines()
    )
    (folder / "lines.txt").write_text("\n".join([*lines, *SAMPLE_TEXTS]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=400,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        user_defined_symbols=["<extra_id_0>", "<extra_id_1>"],
    )
    return folder / "spiece.model"


def write_safetensors(model: bytes, tiny: Any, folder: Path) -> Path:
    encoder = load_tensors(tiny("t2v-A14B", "diffusers") / "text_encoder")
    encoder["spiece_model"] = torch.tensor(list(model), dtype=torch.uint8)
    return save_tensors(encoder, folder / TEXT)


def write_gguf(spiece: Path, path: Path) -> Path:
    model = sentencepiece.SentencePieceProcessor(str(spiece))
    proto = sentencepiece_model_pb2.ModelProto.FromString(spiece.read_bytes())
    values = {
        "tokens": [model.id_to_piece(i) for i in range(len(model))],
        "scores": [model.get_score(i) for i in range(len(model))],
        "token_type": [piece.type for piece in proto.pieces],
        "precompiled_charsmap": proto.normalizer_spec.precompiled_charsmap,
    }
    return gguf_files.write_vocabulary(path, values)


@pytest.mark.parametrize("form", ["safetensors", "gguf", "spiece.model"])
def test_a_sentencepiece_tokenizer(form: str, spiece: Path, tiny: Any, tmp_path: Path) -> None:
    """In the text encoder's file, or alone: the ids of SentencePiece itself and of transformers."""
    file = spiece.parent if form == "spiece.model" else write_gguf(spiece, tmp_path / "umt5.gguf")
    if form == "safetensors":
        file = write_safetensors(spiece.read_bytes(), tiny, tmp_path)
    tokenizer = text.load_tokenizer(file)
    reference, other = sentencepiece.SentencePieceProcessor(str(spiece)), T5Tokenizer
    converted = other.from_pretrained(spiece.parent, extra_ids=2)
    for sample in SAMPLE_TEXTS:
        ids = tokenizer.encode(sample).ids
        assert ids == converted(sample).input_ids, sample
        if "</s>" not in sample:  # which is the end to transformers alone
            assert ids == [*reference.encode(sample), 1], sample


def test_a_tree_without_a_tokenizers_folder(spiece: Path, tiny: Any, tmp_path: Path) -> None:
    root = make_comfyui_tree(tiny("t2v-A14B"), tmp_path / "models")
    file = write_safetensors(spiece.read_bytes(), tiny, root / "text_encoders")
    assert inspect_checkpoint(root).tokenizer == root / "google" / "umt5-xxl"
    shutil.rmtree(root / "google")
    assert inspect_checkpoint(root).tokenizer == file


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message, by the format's documentation."""
    if isinstance(value, bytes):
        return bytes([number << 3 | 2, len(value)]) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3, value])


def piece(text: bytes | float = b"a", score: float | bytes = 0.0, kind: int | bytes = 1) -> bytes:
    return field(1, field(1, text) + field(2, score) + field(3, kind))


FIRST = b"".join(piece(name) for name in (b"<pad>", b"</s>", b"<unk>"))
ODD: dict[str, bytes] = {
    "a piece that is a number": field(1, 5),
    "a text that is a number": piece(text=1.0),
    "a text that is no text": piece(text=b"\xff"),
    "a score of bytes": piece(score=b"1"),
    "a score that is no number": piece(score=float("nan")),
    "a type of bytes": piece(kind=b"1"),
    "settings that are a number": field(2, 7),
    "another kind of model": field(2, field(3, 2)),
    "rules that are a number": field(3, 7),
    "rules of a number": field(3, field(2, 7)),
}


STRANGE: list[dict[str, Any]] = [
    {"tokens": 5},
    {"tokens": "abc"},
    {"tokens": [1, 2, 3]},
    {"scores": ["a", "b", "c"]},
    {"scores": 1.0},
    {"scores": [1, 2, 3]},
    {"token_type": ["a", "b", "c"]},
    {"token_type": [1]},
    {"precompiled_charsmap": [0.5]},
    {"precompiled_charsmap": "abc"},
    {"precompiled_charsmap": 7},
]


def test_damaged_tokenizers_are_refused(spiece: Path, tiny: Any, tmp_path: Path) -> None:
    """Cut off, and with fields of other kinds, in both formats."""
    messages = {}
    for size in (0, 1, 7, 100, 3000):
        path = write_safetensors(spiece.read_bytes()[:size], tiny, tmp_path)
        messages[f"{size} bytes"] = get_refusal(text.load_tokenizer, path)
    path = tmp_path / "x.safetensors"
    for name, piece_ in ODD.items():
        save_file({"spiece_model": torch.tensor(list(FIRST + piece_), dtype=torch.uint8)}, path)
        messages[name] = get_refusal(read_embedded_tokenizer, path)
    defaults: dict[str, Any] = {"tokens": ["<pad>", "</s>", "<unk>"], "scores": [0.0, 0.0, 0.0]}
    defaults["token_type"] = [3, 3, 2]
    assert not get_refusal(
        read_embedded_tokenizer, gguf_files.write_vocabulary(tmp_path / "x.gguf", defaults)
    )
    for changed in STRANGE:
        path = gguf_files.write_vocabulary(tmp_path / "x.gguf", defaults | changed)
        messages[str(changed)] = get_refusal(read_embedded_tokenizer, path)
    sentence = re.compile(r"\S+ holds a damaged tokenizer( \(.+\))?; download it again\.")
    of_python = re.compile(r"'\w+' object|attribute|argument|unpack|codec|\bindex\b|requires|Error")
    assert not [message for message in messages.values() if of_python.search(message)]
    assert not {
        name: message for name, message in messages.items() if not sentence.fullmatch(message)
    }


def test_a_panic_of_the_tokenizers_library_is_a_refusal(tiny: Any, tmp_path: Path) -> None:
    """Its template names a token that it does not have."""
    folder = Path(shutil.copytree(tiny("t2v-1.3B") / "google" / "umt5-xxl", tmp_path / "x"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["post_processor"]["special_tokens"] = {}
    file.write_text(json.dumps(tokenizer))
    assert "no usable tokenizer" in get_refusal(text.load_tokenizer, folder)


@pytest.mark.parametrize("kind", ["UINT8", "INT8", "INT32"])
def test_rules_of_a_tokenizer_in_gguf_are_bytes_with_or_without_a_sign(
    kind: str, tmp_path: Path
) -> None:
    rules = bytes(range(256))
    values = [value - 256 if kind == "INT8" and value > 127 else value for value in rules]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "t5encoder")
    writer.add_token_list(["<pad>", "</s>", "<unk>"])
    writer.add_token_scores([0.0, 0.0, 0.0])
    array, number = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind]
    writer.add_key_value("tokenizer.ggml.precompiled_charsmap", values, array, sub_type=number)
    gguf_files.finish_gguf(writer)
    assert read_embedded_tokenizer(tmp_path / "x.gguf").precompiled_charsmap == rules
