"""A complete Wan checkpoint folder with tiny random networks, for tests and first tries.

    python tools/make_tiny_checkpoint.py --task t2v-A14B --out tiny

Files and names are those of the published folders (official, or `*-Diffusers`); only the sizes
differ. The networks make noise, but noise with sane statistics, so a whole run can be checked. One
seed means the same tensors in both layouts and the same bytes in every run.

As published, the DiT of t2v-1.3B is one file and the others are sharded; the DiT is stored as
`dtype`, the text encoder as bfloat16, the VAE as float32. All values are exact in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diffusers
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.tiny_networks import DTYPES, RECIPES, Networks, Recipe, State, diffusers_dit
from wan import keymaps
from wan.settings.errors import InputError

QUICK_RUN = {"size": "128*128", "frame_num": 9, "sample_steps": 4}


def make_checkpoint(
    task: str, out: Path, *, layout: str = "official", seed: int = 0, dtype: str = "bf16"
) -> Path:
    """Write the checkpoint folder `out` and return it.

    Raises InputError for an unknown task, layout or dtype, and if `out` already holds something.
    """
    for value, known in ((task, RECIPES), (layout, WRITERS), (dtype, DTYPES)):
        if value not in known:
            raise InputError(f"{value!r} is unknown here; choose one of {', '.join(known)}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; name another folder or remove it.")
    # Under its final name there is a complete folder or none.
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        WRITERS[layout](partial, Networks(RECIPES[task], seed, DTYPES[dtype]))
        write_json(partial / "generation_config.json", QUICK_RUN)
        partial.rename(out)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(partial)
        raise
    return out


def _write_official(folder: Path, networks: Networks) -> None:
    recipe, states = networks.recipe, networks.dit_states
    names = ["."] if len(states) == 1 else ["high_noise_model", "low_noise_model"]
    for name, state in zip(names, states, strict=True):
        (folder / name).mkdir(exist_ok=True)
        write_json(folder / name / "config.json", recipe.config)
        _save_dit(folder / name, state, shards=2 if recipe.sharded else 1)
    if len(states) == 2:
        write_json(folder / "configuration.json", {"framework": "Pytorch"})
    torch.save(networks.vae_state, folder / f"Wan{networks.vae_version}_VAE.pth")
    torch.save(networks.text_state, folder / "models_t5_umt5-xxl-enc-bf16.pth")
    write_tokenizer(folder / "google" / "umt5-xxl", networks.tokenizer)


def _save_dit(folder: Path, state: State, shards: int) -> None:
    """Safetensors files of about equal size, and an index where they are several."""
    stem, total, offset = "diffusion_pytorch_model", _nbytes(state), 0
    weight_map = {}
    for name, tensor in state.items():
        shard = f"-{offset * shards // total + 1:05}-of-{shards:05}" if shards > 1 else ""
        weight_map[name] = f"{stem}{shard}.safetensors"
        offset += tensor.nbytes
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in state.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def _write_diffusers(folder: Path, networks: Networks) -> None:
    """Weights and configurations by the libraries' own save_pretrained: the files are theirs."""
    recipe, states = networks.recipe, networks.dit_states
    names = ["transformer", "transformer_2"][: len(states)]  # high noise, low noise
    for name, state in zip(names, states, strict=True):
        tensors = _renamed(state, keymaps.dit_diffusers_name)
        _save_pretrained(folder / name, diffusers_dit(recipe), tensors, recipe.sharded)
    tensors = _renamed(networks.vae_state, keymaps.vae_diffusers_name)
    _save_pretrained(folder / "vae", networks.vae, tensors, sharded=False)
    tensors = _renamed(networks.text_state, keymaps.t5_transformers_name)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]  # tied, and saved once
    _save_pretrained(folder / "text_encoder", networks.text_encoder, tensors, sharded=True)
    write_tokenizer(folder / "tokenizer", networks.tokenizer)
    scheduler: Any = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=recipe.flow_shift
    )
    scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / "model_index.json", _model_index(recipe))


def _renamed(state: State, rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    return {rename(name): tensor for name, tensor in state.items()}


def _save_pretrained(
    folder: Path, module: Any, tensors: dict[str, torch.Tensor], sharded: bool
) -> None:
    module.load_state_dict(tensors, assign=True)
    total, largest = _nbytes(tensors), max(tensor.nbytes for tensor in tensors.values())
    # Files are filled up to the limit: this one gives two, whatever the order of the tensors.
    module.save_pretrained(folder, max_shard_size=total // 2 + largest if sharded else total)


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _model_index(recipe: Recipe) -> dict[str, Any]:
    dit, absent = ["diffusers", "WanTransformer3DModel"], [None, None]
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": recipe.boundary,
        "expand_timesteps": recipe.model_type == "ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": dit,
        "transformer_2": absent if recipe.boundary is None else dit,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if recipe.model_type == "i2v":
        index["_class_name"] = "WanImageToVideoPipeline"
        index |= {"image_encoder": absent, "image_processor": absent}
    return index


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """By hand, because transformers 5 would name a tokenizer class that transformers 4 lacks."""
    folder.mkdir(parents=True)
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **special}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


WRITERS = {"official": _write_official, "diffusers": _write_diffusers}


def main(argv: list[str] | None = None) -> int:
    """0, or 2 with one sentence on stderr where the request is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", required=True, choices=RECIPES)
    parser.add_argument("--out", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--layout", default="official", choices=WRITERS)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the DiT's tensors")
    try:
        print(make_checkpoint(**vars(parser.parse_args(argv))))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
