"""Complete checkpoint folders with tiny, randomly initialised networks, for tests and first tries.

Files and names are as in the published folders (official, or `*-Diffusers`); only the sizes
differ. The networks make noise, but noise with sane statistics, so a whole run can be checked. One
seed means the same tensors in both layouts and the same bytes in every run. As published, the DiT
of t2v-1.3B is one file and the others are sharded; the text encoder is stored as bfloat16, the VAE
as float32. All values are exact in bfloat16.
"""

from __future__ import annotations

import json
import math
import string
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from wan.checkpoint import keymaps
from wan.checkpoint.files import whole_folder
from wan.modules.model import WanModel
from wan.pipeline.vae import STATISTICS
from wan.settings.errors import InputError

State = OrderedDict[str, Tensor]
"""Tensors under official names."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # their ids are 0, 1, 2, as in T5
CLIP_DIM = 160  # two heads of CLIP's size
TEXT_SIZES = {"d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": 3, "num_heads": 8}
_VAE_22: dict[str, Any] = {  # diffusers' arguments that make its autoencoder the 2.2 one
    "latents_mean": STATISTICS[48][0],
    "latents_std": STATISTICS[48][1],
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
QUICK_RUN = {"size": "128*128", "frame_num": 9, "sample_steps": 4}


@dataclass(frozen=True)
class Recipe:
    """What distinguishes the tasks. The head counts are the real ones, the head sizes are not."""

    model_type: str
    num_heads: int
    head_dim: int
    in_dim: int
    out_dim: int
    flow_shift: float = 3.0  # of the published diffusers scheduler; not the official default
    boundary: float | None = None  # given where there are two experts
    sharded: bool = True
    images: int = 0  # that CLIP looks at

    @property
    def image_sizes(self) -> dict[str, Any]:
        """Arguments of the network that the official config.json leaves to the weights."""
        if not self.images:
            return {}
        positions = 2 * CLIP_TOKENS if self.images == 2 else 0
        return {"image_dim": CLIP_DIM, "image_positions": positions}

    @property
    def config(self) -> dict[str, Any]:
        """The DiT's config.json: the official keys, without text_dim or patch_size."""
        dim = self.num_heads * self.head_dim
        return {
            "_class_name": "WanModel",
            "_diffusers_version": "0.33.0",
            "dim": dim,
            "eps": 1e-6,
            "ffn_dim": 2 * dim,
            "freq_dim": 256,
            "in_dim": self.in_dim,
            "model_type": self.model_type,
            "num_heads": self.num_heads,
            "num_layers": 2,
            "out_dim": self.out_dim,
            "text_len": 512,
        }


CLIP_TOKENS = 257
CLIP_NAMES = (  # transformers' and the official part of a name
    ("embeddings.class_embedding", "cls_embedding"),
    ("embeddings.position_embedding.weight", "pos_embedding"),
    ("embeddings.patch_embedding", "patch_embedding"),
    ("pre_layrnorm", "pre_norm"),
    ("post_layernorm", "post_norm"),
    ("encoder.layers", "transformer"),
    ("layer_norm", "norm"),
    ("self_attn.out_proj", "attn.proj"),
    ("mlp.fc1", "mlp.0"),
    ("mlp.fc2", "mlp.2"),
)
RECIPES = {
    "t2v-A14B": Recipe("t2v", 40, 6, 16, 16, boundary=0.875),
    "i2v-A14B": Recipe("i2v", 40, 6, 36, 16, boundary=0.9),
    "ti2v-5B": Recipe("ti2v", 24, 8, 48, 48, flow_shift=5.0),
    "t2v-1.3B": Recipe("t2v", 12, 8, 16, 16, sharded=False),
    "i2v-14B": Recipe("i2v", 40, 6, 36, 16, images=1),
    "flf2v-14B": Recipe("flf2v", 40, 6, 36, 16, images=2),
}


def make_checkpoint(
    task: str, out: Path, *, layout: str = "official", seed: int = 0, dtype: str = "bf16"
) -> Path:
    """Write the checkpoint folder `out` and return it.

    Raises InputError for an unknown task, layout or dtype, and if `out` already holds something.
    """
    for value, known in ((task, RECIPES), (layout, WRITERS), (dtype, DTYPES)):
        if value not in known:
            remedy = f"choose one of {', '.join(known)}"
            raise InputError(repr(value), None, "is unknown here", remedy)
    with whole_folder(out) as unfinished:
        WRITERS[layout](unfinished, Networks(RECIPES[task], seed, DTYPES[dtype]))
        write_json(unfinished / "generation_config.json", QUICK_RUN)
    return out


class Networks:
    """A recipe's tensors and tokenizer, and the library modules that the tensors belong to.

    All tensors come from one generator: the DiTs (high noise first), the VAE, the text encoder.
    """

    def __init__(self, recipe: Recipe, seed: int, dtype: torch.dtype) -> None:
        self.recipe, self.tokenizer = recipe, train_tokenizer()
        vae: Any = {"z_dim": 16} if recipe.out_dim == 16 else {"decoder_base_dim": 10, **_VAE_22}
        words = self.tokenizer.get_vocab_size()
        with torch.device("meta"):  # no memory and no time for weights that are replaced
            self.vae = diffusers.AutoencoderKLWan(base_dim=8, **vae)
            config: Any = UMT5Config(vocab_size=words, feed_forward_proj="gated-gelu", **TEXT_SIZES)
            self.text_encoder: Any = UMT5EncoderModel(config)
            official = {key: value for key, value in recipe.config.items() if key[0] != "_"}
            dit = WanModel(**official, **recipe.image_sizes, text_dim=TEXT_SIZES["d_model"])
            self.clip: Any = _clip()
        random = torch.Generator().manual_seed(seed)
        experts = 1 if recipe.boundary is None else 2
        self.dit_states = [_draw(dit, str, random, dtype) for _ in range(experts)]
        self.vae_state = _draw(self.vae, self._vae_name, random, torch.float32)
        self.text_state = _draw(self.text_encoder, keymaps.t5_official_name, random, torch.bfloat16)
        self.clip_state: State = OrderedDict()
        if recipe.images:
            self.clip_state = _draw(self.clip, str, random, torch.float16)

    @property
    def vae_version(self) -> str:
        return "2.2" if self.vae.config.is_residual else "2.1"

    def _vae_name(self, name: str) -> str:
        return keymaps.vae_official_name(name, self.vae.config.is_residual)


def _clip() -> Any:
    """CLIP's vision tower with its last block, which Wan leaves out."""
    sizes = {"hidden_size": CLIP_DIM, "intermediate_size": 2 * CLIP_DIM, "num_hidden_layers": 3}
    config: Any = CLIPVisionConfig(
        **sizes, num_attention_heads=2, patch_size=14, image_size=224, hidden_act="gelu"
    )
    return CLIPVisionModel(config)


def _draw(
    module: Any, official_name: Callable[[str], str], random: torch.Generator, dtype: torch.dtype
) -> State:
    """Random tensors for a module, in the order of their official names.

    Rounded to bfloat16 whatever the dtype, so that the dtype of the files changes no value.
    """
    shapes = {official_name(name): p.shape for name, p in module.named_parameters()}
    state: State = OrderedDict()
    for name, shape in sorted(shapes.items()):
        centre, spread = _distribution(name, shape)
        noise = torch.randn(shape, generator=random)
        state[name] = (centre + spread * noise).bfloat16().to(dtype)
    return state


def _distribution(name: str, shape: torch.Size) -> tuple[float, float]:
    """Mean and deviation that keep activations near 1."""
    if name.endswith("gamma") or (name.endswith("weight") and len(shape) == 1):
        return 1.0, 0.1  # the gain of a norm
    if name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("modulation"):
        return 0.0, 0.3
    if name == "token_embedding.weight":
        return 0.0, 1.0
    return 0.0, math.prod(shape[1:]) ** -0.5


def train_tokenizer() -> Tokenizer:
    """A tokenizer of 1000 tokens with T5's special tokens and T5's mark for spaces.

    BPE, not T5's Unigram: the Unigram trainer gives another vocabulary in every process.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=list(string.ascii_letters + string.digits + string.punctuation),
        show_progress=False,
    )
    text = Path(__file__).with_name("tokenizer_text.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


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
    if networks.clip_state:
        name = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
        torch.save(_official_clip(networks.clip_state), folder / name)
    write_tokenizer(folder / "google" / "umt5-xxl", networks.tokenizer)


def _official_clip(state: State) -> State:
    """Under the official names, with a text tower and what else Wan does not use."""
    found: State = OrderedDict()
    for name, tensor in state.items():
        name = name.removeprefix("vision_model.")
        for theirs, official in CLIP_NAMES:
            name = name.replace(theirs, official)
        if name.endswith(("cls_embedding", "pos_embedding")):
            tensor = tensor.reshape(1, -1, CLIP_DIM)
        if any(f".{part}_proj." in name for part in "qkv"):
            continue
        found[f"visual.{name}"] = tensor
    for name in state:
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            layer, end = name.split("layers.")[1].split(".")[0], name.rpartition(".")[2]
            found[f"visual.transformer.{layer}.attn.to_qkv.{end}"] = torch.cat(parts)
    found["visual.head"] = torch.zeros(CLIP_DIM, 8)
    found["textual.token_embedding.weight"] = torch.zeros(4, 4)
    found["log_scale"] = torch.zeros(())
    return found


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
        _save_pretrained(folder / name, _diffusers_dit(recipe), tensors, recipe.sharded)
    tensors = _renamed(networks.vae_state, keymaps.vae_diffusers_name)
    _save_pretrained(folder / "vae", networks.vae, tensors, sharded=False)
    tensors = _renamed(networks.text_state, keymaps.t5_transformers_name)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]  # tied, and saved once
    _save_pretrained(folder / "text_encoder", networks.text_encoder, tensors, sharded=True)
    write_tokenizer(folder / "tokenizer", networks.tokenizer)
    if networks.clip_state:
        _save_pretrained(
            folder / "image_encoder", networks.clip, networks.clip_state, sharded=False
        )
    scheduler: Any = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=recipe.flow_shift
    )
    scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / "model_index.json", _model_index(recipe))


def _renamed(state: State, rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    return {rename(name): tensor for name, tensor in state.items()}


def _diffusers_dit(recipe: Recipe) -> Any:
    with torch.device("meta"):
        return diffusers.WanTransformer3DModel(
            num_attention_heads=recipe.num_heads,
            attention_head_dim=recipe.head_dim,
            in_channels=recipe.in_dim,
            out_channels=recipe.out_dim,
            text_dim=TEXT_SIZES["d_model"],
            ffn_dim=recipe.config["ffn_dim"],
            num_layers=recipe.config["num_layers"],
            image_dim=CLIP_DIM if recipe.images else None,
            added_kv_proj_dim=recipe.config["dim"] if recipe.images else None,
            pos_embed_seq_len=recipe.image_sizes.get("image_positions") or None,
        )


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
    if recipe.model_type in ("i2v", "flf2v"):
        index["_class_name"] = "WanImageToVideoPipeline"
        clip = ["transformers", "CLIPVisionModel"] if recipe.images else absent
        index |= {"image_encoder": clip, "image_processor": absent}
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
