"""Damaged and hostile files of a checkpoint load, or are refused in a sentence, fast and small."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2

from tests.cli.test_fuzz import RAW, damage_bytes
from tests.gguf_files import make_gguf_folders, write_vocabulary
from tests.pipelines import resolve_plan
from tests.unit.test_marks import quantise_state
from tools.quantize_dit import quantize_checkpoint
from wan.checkpoint.formats.headers import read_file_headers
from wan.checkpoint.layout import WAV2VEC2_FOLDER, inspect_checkpoint
from wan.checkpoint.load import ModelSpec, open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.resolve import resolve_loras
from wan.checkpoint.quant.w8a8_export import read_quantized_dit
from wan.media.audio import Audio
from wan.modules.audio_encoder import check_audio_encoder, extract_audio_features
from wan.modules.t5 import choose_text_encoder_dtypes, load_tokenizer, read_text_encoder_spec
from wan.modules.vae.video_vae import read_vae_spec
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.tasks.base import build_dit
from wan.testing.random_checkpoint import AUDIO_DIM, make_checkpoint

TASK = "t2v-1.3B"
SIZES = {"num_layers": 1, "dim": 64, "ffn_dim": 96, "num_heads": 2}
WEIGHTS = "diffusion_pytorch_model.safetensors"
LAYER = "blocks.0.self_attn.q"
VOCABULARY = {
    "tokens": ["<pad>", "</s>", "<unk>", "a", "b", "\u2581"],
    "scores": [0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
    "token_type": [3, 3, 2, 1, 1, 1],
}
MAX_SECONDS = 2.0  # of the process
MAX_GROWTH = 64  # MB of resident memory
HOSTILE = (0, 1, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, (1 << 63) - 1, (1 << 64) - 1)
Damage = Callable[[bytes, random.Random], bytes]
CPU = torch.device("cpu")


class Target(NamedTuple):
    """A file to damage, how, and what reads it."""

    file: Path
    damage: Damage
    load: Callable[[], object]


def damage_value(value: Any, draw: random.Random) -> Any:
    """Changes one to three places of a JSON value."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        node = value
        while isinstance(node, dict | list) and node:
            keys = [*node] if isinstance(node, dict) else range(len(node))
            key: Any = draw.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.7:
                node = node[key]
                continue
            change = draw.random()
            if change < 0.15:
                del node[key]
            elif change < 0.3 and isinstance(node, dict):
                node[str(draw.choice(RAW))] = node.pop(key)
            elif change < 0.45:
                node[key] = copy.deepcopy(node[draw.choice(keys)])
            elif change < 0.6 and isinstance(node[key], int):
                node[key] = node[key] * draw.choice((-1, 0, 2)) + draw.choice((-1, 0, 1, 1 << 62))
            else:
                node[key] = copy.deepcopy(draw.choice((*RAW, *HOSTILE)))
            break
    return value


def damage_json(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return damage_bytes(content, draw)
    if draw.random() < 0.1:
        return draw.choice(
            (b"", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 9999, b"\xff\xfe{}", b"{}")
        )
    text = json.dumps(damage_value(json.loads(content), draw))
    return text.encode(errors="surrogatepass")


def damage_header(content: bytes, draw: random.Random) -> bytes:
    """Damages the header of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    if draw.random() < 0.15:
        return damage_numbers(content, draw)
    header = damage_json(header, draw)
    header += b" " * draw.choice((0, -len(header) % 8))
    size = draw.choice((len(header),) * 9 + (draw.choice(HOSTILE),))
    return size.to_bytes(8, "little") + header + data


def damage_numbers(content: bytes, draw: random.Random) -> bytes:
    """Replaces 4 or 8 bytes by hostile integers, near the begin mostly."""
    damaged = bytearray(damage_bytes(content, draw) if draw.random() < 0.3 else content)
    for _ in range(draw.choice((1, 1, 3))):
        limit = draw.choice((min(64, len(damaged)), min(4096, len(damaged)), len(damaged)))
        offset, width = draw.randrange(limit + 1), draw.choice((4, 8))
        number = draw.choice(HOSTILE) % (1 << 8 * width)
        damaged[offset : offset + width] = number.to_bytes(width, "little")
    return bytes(damaged)


def load_dits(folder: Path) -> None:
    for files in inspect_checkpoint(folder).experts.values():
        make = partial(build_dit, files.config)
        spec = ModelSpec("DiT", make, files.tensors, files.folder)
        spec.load(device=CPU, dtype_of=lambda *_: torch.float32)


def load_lora(file: Path, folder: Path) -> None:
    checkpoint = inspect_checkpoint(folder)
    loras = resolve_loras(Loras(lora=(str(file),)), checkpoint)["dit"]
    tensors = checkpoint.experts["dit"].tensors
    sources = merge_loras(open_sources(tensors), loras)
    for name in {name for adapter in loras for name in adapter.deltas}:
        sources[name].read(slice(None))


def load_export(export_folder: Path, folder: Path) -> None:
    options: Any = {"device": "cpu", "fa_quant": None}
    checkpoint = inspect_checkpoint(folder)
    for export in read_quantized_dit(export_folder, checkpoint, **options).experts.values():
        for layer in export.linears.values():
            for source in open_sources(layer.tensors).values():
                source.read(slice(None))


def write_lora(folder: Path) -> Path:
    """A LoRA, a LoHa and a LoKr of three layers, with PEFT's adapter_config.json."""
    ones, dim = torch.ones, SIZES["dim"]
    tensors = {f"{LAYER}.lora_A.weight": ones(2, dim), f"{LAYER}.lora_B.weight": ones(dim, 2)}
    tensors |= {f"{LAYER}.alpha": torch.tensor(2.0), f"{LAYER}.dora_scale": ones(dim, 1)}
    layer = "blocks.0.self_attn.k"
    tensors |= {f"{layer}.hada_w{i}_a": ones(dim, 2) for i in (1, 2)}
    tensors |= {f"{layer}.hada_w{i}_b": ones(2, dim) for i in (1, 2)}
    layer = "blocks.0.self_attn.v"
    tensors |= {f"{layer}.lokr_w1": ones(4, 4), f"{layer}.lokr_w2": ones(dim // 4, dim // 4)}
    tensors["blocks.0.self_attn.o.diff_b"] = ones(dim)
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4})}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"q": 3}}
    config |= {"rank_pattern": {"q": 2}, "bias": "none", "modules_to_save": ["head"]}
    config |= {"init_lora_weights": True, "use_rslora": False, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata)
    return folder / "adapter_model.safetensors"


def write_sentencepiece(path: Path) -> Path:
    """A text encoder's file with a small SentencePiece model."""
    proto = sentencepiece_model_pb2.ModelProto()
    for number, piece in enumerate(("<pad>", "</s>", "<unk>", "a", "b", "\u2581", "\u2581a")):
        kind = {"<unk>": 2}.get(piece, 3 if number < 2 else 1)
        proto.pieces.add(piece=piece, score=-float(number), type=kind)
    proto.trainer_spec.model_type = 1
    model = torch.tensor(list(proto.SerializeToString()), dtype=torch.uint8)
    save_file({"spiece_model": model, "shared.weight": torch.zeros(7, 4)}, path)
    return path


def make_fp8_folder(source: Path, folder: Path) -> Path:
    """The checkpoint in ComfyUI's FP8, with a mark for each layer, and one for all of them."""
    shutil.copytree(source, folder)
    stored, _ = quantise_state(load_file(source / WEIGHTS), "float8")
    formats = {"layers": {LAYER: {"format": "float8_e4m3fn"}}}
    save_file(stored, folder / WEIGHTS, {"_quantization_metadata": json.dumps(formats)})
    return folder


def make_targets(root: Path) -> dict[str, Target]:
    """Writes small files of all kinds; returns them by kind."""
    plain = make_checkpoint(TASK, root / TASK, sizes=SIZES)
    diffusers = make_checkpoint("t2v-A14B", root / "t2v-A14B", layout="diffusers", sizes=SIZES)
    s2v = make_checkpoint("s2v-14B", root / "s2v-14B", sizes=SIZES)
    fp8 = make_fp8_folder(plain, root / "fp8")
    gguf = make_gguf_folders(plain, "Q8_0", root / "q")[0]
    description = next(quantize_checkpoint(plain, root / "export").glob("*.json"))
    lora = write_lora(root)
    spiece = write_sentencepiece(root / "t5.safetensors")
    vocabulary = write_vocabulary(root / "t5.gguf", VOCABULARY)
    tokenizer, vae = plain / "google" / "umt5-xxl", plain / "Wan2.1_VAE.pth"
    text, audio = diffusers / "text_encoder", s2v / WAV2VEC2_FOLDER
    index = next((diffusers / "transformer").glob("*.index.json"))
    read_tokenizer = partial(load_tokenizer, tokenizer)
    read_export = partial(load_export, description.parent, plain)
    read_lora, text_dtypes = (
        partial(load_lora, lora, plain),
        choose_text_encoder_dtypes(torch.float32),
    )

    def read_text() -> None:
        read_text_encoder_spec(text).load(device=CPU, dtype_of=text_dtypes)

    def read_vae() -> None:
        read_vae_spec(vae).load(device=CPU, dtype_of=lambda *_: torch.float32)

    check_audio = partial(check_audio_encoder, audio, AUDIO_DIM)
    read_audio = partial(extract_audio_features, audio, Audio(audio, np.ones(4000, np.float32)))
    plan = partial(resolve_plan, "--task", "t2v-A14B", "--ckpt_dir", diffusers)
    rows: list[tuple[str, Path, Damage, Callable[[], object]]] = [
        ("DiT", plain / WEIGHTS, damage_header, partial(load_dits, plain)),
        ("DiT, FP8", fp8 / WEIGHTS, damage_header, partial(load_dits, fp8)),
        ("DiT, GGUF", next(gguf.glob("*.gguf")), damage_numbers, partial(load_dits, gguf)),
        ("config.json", s2v / "config.json", damage_json, partial(load_dits, s2v)),
        ("index of shards", index, damage_json, partial(load_dits, diffusers)),
        ("model_index.json", diffusers / "model_index.json", damage_json, plan),
        ("VAE, pickled", vae, damage_numbers, read_vae),
        ("text encoder", min(text.glob("*.safetensors")), damage_header, read_text),
        ("tokenizer.json", tokenizer / "tokenizer.json", damage_json, read_tokenizer),
        ("SentencePiece", spiece, damage_numbers, partial(load_tokenizer, spiece)),
        ("vocabulary, GGUF", vocabulary, damage_numbers, partial(load_tokenizer, vocabulary)),
        ("LoRA", lora, damage_header, read_lora),
        ("adapter_config.json", lora.with_name("adapter_config.json"), damage_json, read_lora),
        ("description", description, damage_json, read_export),
        ("export", next(description.parent.glob("*.safetensors")), damage_header, read_export),
        ("audio encoder's config.json", audio / "config.json", damage_json, check_audio),
        ("audio encoder", audio / "model.safetensors", damage_header, read_audio),
    ]
    targets = {kind: Target(file, damage, load) for kind, file, damage, load in rows}
    for target in targets.values():
        target.load()
    return targets


def test_a_tensor_past_the_end_of_its_archive(tmp_path: Path) -> None:
    """The directory of the archive claims that the tensor is as large as the file."""
    path = tmp_path / "x.pt"
    torch.save({"x": torch.zeros(8)}, path)
    content = bytearray(path.read_bytes())
    name = content.rindex(b"x/data/0")
    content[name - 26 : name - 18] = 2 * len(content).to_bytes(4, "little")  # both sizes
    path.write_bytes(content)
    with pytest.raises(InputError, match="truncated"):
        read_file_headers(path)


def write_bytes(path: Path, content: bytes) -> None:
    path.unlink()  # it may be mapped
    path.write_bytes(content)


def read_memory(key: str) -> float:
    """Returns an entry of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def try_damaged(targets: Mapping[str, Target], contents: Mapping[str, bytes], seed: int) -> str:
    """Damages one file, reads it, and restores it; returns the kind and the outcome."""
    draw = random.Random(seed)
    kind = draw.choice([*targets])
    target = targets[kind]
    write_bytes(target.file, target.damage(contents[kind], draw))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    memory, begin = read_memory("VmRSS"), time.process_time()
    try:
        target.load()
        outcome = "loaded"
    except InputError as error:
        text = str(error)
        is_sentence = text.endswith((".", "?", "!")) and "\n" not in text and len(text) < 3000
        outcome = "refused" if is_sentence else f"no sentence: {text[:500]!r}"
    except BaseException as error:  # a panic of a library is no Exception
        outcome = f"{type(error).__name__}: {str(error)[:300]!r}"
    seconds, growth = time.process_time() - begin, read_memory("VmHWM") - memory
    if outcome in ("loaded", "refused") and seconds > MAX_SECONDS:
        outcome = f"slow: {seconds:.1f} s, {outcome}"
    if outcome in ("loaded", "refused") and growth > MAX_GROWTH:
        outcome = f"large: {growth:.0f} MB, {outcome}"
    write_bytes(target.file, contents[kind])
    return f"{kind}\t{outcome}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_damaged_files(tmp_path: Path) -> None:
    targets = make_targets(tmp_path)
    contents = {kind: target.file.read_bytes() for kind, target in targets.items()}
    outcomes = Counter(try_damaged(targets, contents, seed) for seed in range(1000))
    assert {outcome.split("\t")[1] for outcome in outcomes} == {"loaded", "refused"}, outcomes
    assert all(outcomes[f"{kind}\trefused"] for kind in targets), outcomes
