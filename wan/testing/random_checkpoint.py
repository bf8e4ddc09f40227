"""Writes complete checkpoint folders with tiny, randomly initialized networks.

They are for runs without a checkpoint, tests and examples. File names, tensor names and the number
of heads are those of the published folders (official, or `*-Diffusers`); the other sizes differ.
The videos are noise, but the activations have a standard deviation near 1, so that a complete run
can be checked. A seed gives the same tensors in both layouts and the same bytes in every run, and
all values are exact in bfloat16.
"""

from __future__ import annotations

import inspect
import json
import math
import string
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from wan.checkpoint.layout import WAV2VEC2_FOLDER, make_reference_checkpoint
from wan.checkpoint.load import build_on_meta_device
from wan.checkpoint.names import keymaps
from wan.modules.t5 import Umt5Encoder
from wan.modules.vae.network import Autoencoder
from wan.modules.vae.video_vae import LATENT_STATISTICS
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS, Preset
from wan.settings.sound import AUDIO_LAYERS, WAV2VEC_CONVOLUTIONS
from wan.tasks.base import build_dit, get_task
from wan.utils.files import write_folder

NamedTensors = OrderedDict[str, Tensor]
"""Tensors under official names."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # their ids are 0, 1, 2, as in T5
CLIP_DIM = 160  # two heads of CLIP's size
TEXT_SIZES = {"d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": 3, "num_heads": 8}
VAE_BASE, VAE_DECODER_BASE = 8, (8, 10)  # channels; of the decoder: VAE 2.1, VAE 2.2
VAE_22: dict[str, Any] = {  # arguments of diffusers' AutoencoderKLWan for the VAE 2.2
    "latents_mean": LATENT_STATISTICS[48][0],
    "latents_std": LATENT_STATISTICS[48][1],
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
AUDIO_DIM = 32
AUDIO_ENCODER_SIZES: dict[str, Any] = {  # a wav2vec2 with as many layers as the published one
    "hidden_size": AUDIO_DIM,
    "intermediate_size": 2 * AUDIO_DIM,
    "num_hidden_layers": AUDIO_LAYERS - 1,
    "num_attention_heads": 4,
    "conv_dim": (AUDIO_DIM,) * len(WAV2VEC_CONVOLUTIONS),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "conv_bias": True,
    "vocab_size": 33,
}

_FEATURE_SIZES = {"text_dim": TEXT_SIZES["d_model"], "image_dim": CLIP_DIM, "audio_dim": AUDIO_DIM}
_CONFIG_KEYS = (  # official keys of a DiT's config.json that cannot be read from the weights
    *("dim", "eps", "ffn_dim", "freq_dim", "in_dim", "model_type", "num_heads", "num_layers"),
    *("out_dim", "text_len"),
)


def make_checkpoint(
    task: str,
    out: Path,
    *,
    layout: str = "official",
    seed: int = 0,
    dtype: str = "bf16",
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Writes the checkpoint folder `out` and returns it.

    Args:
        task: A key of `PRESETS`.
        out: A folder that is absent or empty.
        layout: A key of `WRITERS`.
        seed: Seed of all random values.
        dtype: Dtype of the DiTs' files, a key of `DTYPES`.
        sizes: Arguments of the DiTs' constructor to change, such as "num_layers".

    Raises:
        InputError: A key is unknown, or `out` is not empty.
    """
    for value, choices in ((task, PRESETS), (layout, WRITERS), (dtype, DTYPES)):
        if value not in choices:
            remedy = f"choose one of {', '.join(choices)}"
            raise InputError(repr(value), None, "is unknown here", remedy)
    preset = PRESETS[task]
    if layout == "diffusers" and get_task(preset.kind).diffusers_classes is None:
        raise InputError(repr(layout), None, f"is no layout of {task}", "choose official")
    with write_folder(out) as unfinished:
        networks = RandomNetworks(preset, seed, DTYPES[dtype], sizes or {})
        WRITERS[layout](unfinished, networks)
        write_json(unfinished / "generation_config.json", preset.tiny_settings)
    return out


class RandomNetworks:
    """The random tensors of a task, its tokenizer, and the library modules of the tensors.

    All tensors are drawn from one generator, in this order: the DiTs (high noise first), the VAE,
    the text encoder, CLIP's vision tower (with its last block, which Wan does not use) and the
    audio encoder.
    """

    def __init__(
        self, task: Preset, seed: int, dtype: torch.dtype, sizes: Mapping[str, int]
    ) -> None:
        self.task, self.tokenizer = task, train_tokenizer()
        dim = task.num_heads * task.tiny_head_dim
        published: dict[str, Any] = {**make_reference_checkpoint(task).config}
        num_layers = sizes.get("num_layers", task.tiny_num_layers)
        ends = tuple(sorted({0, num_layers - 1}))
        self.config: dict[str, Any] = {
            **published,
            "dim": dim,
            "ffn_dim": 2 * dim,
            "num_layers": num_layers,
            **{name: size for name, size in _FEATURE_SIZES.items() if published.get(name)},
            **{name: ends for name, x in task.network_config.items() if isinstance(x, tuple)},
            **sizes,
        }
        self.text_sizes = {"vocab_size": self.tokenizer.get_vocab_size(), **TEXT_SIZES}
        is_22 = task.vae == "2.2"
        # The initial weights are replaced.
        self.dit = build_on_meta_device(lambda: build_dit(self.config))
        vae = build_on_meta_device(lambda: Autoencoder(task.vae, VAE_BASE, VAE_DECODER_BASE[is_22]))
        text_encoder = build_on_meta_device(lambda: Umt5Encoder(**self.text_sizes))
        rng = torch.Generator().manual_seed(seed)
        self.dit_states = [_draw_tensors(self.dit, str, rng, dtype) for _ in task.experts]
        vae_name = partial(keymaps.rename_vae_to_official, residual=is_22)
        self.vae_state = _draw_tensors(vae, vae_name, rng, torch.float32)
        self.text_state = _draw_tensors(
            text_encoder, keymaps.rename_t5_to_official, rng, torch.bfloat16
        )
        self.clip_state: NamedTensors = OrderedDict()
        if task.num_clip_vision_images:
            self.clip = build_on_meta_device(_build_clip)
            self.clip_state = _draw_tensors(self.clip, str, rng, torch.float16)
        self.audio_encoder_state: NamedTensors = OrderedDict()
        if task.needs_audio_encoder:
            self.audio_encoder = build_on_meta_device(_build_audio_encoder)
            self.audio_encoder_state = _draw_tensors(self.audio_encoder, str, rng, torch.float32)

    def list_constants(self) -> list[tuple[str, Tensor]]:
        """Lists the buffers that official files contain."""
        state = self.dit.state_dict()
        names = sorted(state.keys() - self.dit_states[0].keys())
        return [(name, state[name].contiguous()) for name in names]


def _build_clip() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=CLIP_DIM,
        intermediate_size=2 * CLIP_DIM,
        num_hidden_layers=3,
        num_attention_heads=2,
        patch_size=14,
        image_size=224,
        hidden_act="gelu",
    )
    return CLIPVisionModel(config)


def _build_audio_encoder() -> Any:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    return Wav2Vec2Model(Wav2Vec2Config(**AUDIO_ENCODER_SIZES))


def _draw_tensors(
    module: Any, official_name: Callable[[str], str], generator: torch.Generator, dtype: torch.dtype
) -> NamedTensors:
    """Draws the tensors of a module, in the order of their official names.

    They are always rounded to bfloat16, so that the files' dtype changes no value.
    """
    shapes = {official_name(name): p.shape for name, p in module.named_parameters()}
    state: NamedTensors = OrderedDict()
    for name, shape in sorted(shapes.items()):
        mean, std = _choose_distribution(name, shape)
        noise = torch.randn(shape, generator=generator)
        state[name] = (mean + std * noise).bfloat16().to(dtype)
    return state


def _choose_distribution(name: str, shape: torch.Size) -> tuple[float, float]:
    """Chooses a mean and a standard deviation that keep activations near 1."""
    if name.endswith("gamma") or (name.endswith("weight") and len(shape) == 1):
        return 1.0, 0.1  # scale of a norm
    if name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("modulation"):
        return 0.0, 0.3
    if name.startswith("motion_encoder."):  # it scales its weights in the forward
        return 0.0, 1.0
    if name == "token_embedding.weight":
        return 0.0, 1.0
    return 0.0, math.prod(shape[1:]) ** -0.5


def train_tokenizer() -> Tokenizer:
    """Trains a tokenizer of 1000 tokens with the special tokens and the space symbol of T5.

    It is BPE, not T5's Unigram, whose trainer gives a different vocabulary in every process.
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


def _write_official(folder: Path, networks: RandomNetworks) -> None:
    """Writes the official layout: the DiT of t2v-1.3B is one file, other DiTs are sharded."""
    task, states = networks.task, networks.dit_states
    if task.kind == "animate2":
        _write_animate2(folder, networks)
        return
    names = ["."] if len(states) == 1 else ["high_noise_model", "low_noise_model"]
    for name, state in zip(names, states, strict=True):
        (folder / name).mkdir(exist_ok=True)
        _write_dit_config(folder / name, networks)
        complete_state = OrderedDict([*state.items(), *networks.list_constants()])
        _save_dit(folder / name, complete_state, shards=2 if task.sharded else 1)
    if len(states) == 2:
        write_json(folder / "configuration.json", {"framework": "Pytorch"})
    if networks.audio_encoder_state:
        path = folder / WAV2VEC2_FOLDER
        _save_pretrained(path, networks.audio_encoder, networks.audio_encoder_state, sharded=False)
    _write_components(folder, networks, f"Wan{task.vae}_VAE.pth")
    write_tokenizer(folder / "google" / "umt5-xxl", networks.tokenizer)


def _write_animate2(folder: Path, networks: RandomNetworks) -> None:
    """Writes Animate-2's official layout, in whose files the tensors of blocks are nested."""
    dit_folder, component_folder = folder / "wan_animate_2", folder / "videomodel" / "Wan-AI"
    dit_folder.mkdir()
    component_folder.mkdir(parents=True)
    _write_dit_config(dit_folder, networks)
    (state,) = networks.dit_states
    nested = {keymaps.nest_animate2_block(name): tensor for name, tensor in state.items()}
    save_file(nested, dit_folder / "wan_animate_2_bf16.safetensors", metadata={"format": "pt"})
    _write_components(component_folder, networks, "vae.pth")
    write_tokenizer(component_folder / "umt5-xxl", networks.tokenizer)


def _write_dit_config(folder: Path, networks: RandomNetworks) -> None:
    task = networks.task
    config = {
        "_class_name": get_task(task.kind).network.partition(":")[2],
        "_diffusers_version": "0.33.0",
        **{key: networks.config[key] for key in _CONFIG_KEYS},
        **task.config_json,
        **{key: networks.config[key] for key in task.network_config},
    }
    entries = {key: value for key, value in config.items() if value is not None}
    write_json(folder / "config.json", entries)


def _write_components(folder: Path, networks: RandomNetworks, vae_name: str) -> None:
    """Writes the VAE, the text encoder and CLIP as official files."""
    torch.save(networks.vae_state, folder / vae_name)
    torch.save(networks.text_state, folder / "models_t5_umt5-xxl-enc-bf16.pth")
    if networks.clip_state:
        name = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
        torch.save(_rename_clip_tensors(networks.clip_state), folder / name)


def _rename_clip_tensors(state: NamedTensors) -> NamedTensors:
    """Renames CLIP's tensors, and adds the unused tensors of an official file (text tower)."""
    tensors: NamedTensors = OrderedDict()
    for name, tensor in state.items():
        official = keymaps.rename_clip_to_official(name.replace("q_proj", "to_qkv"))
        if name.endswith(("class_embedding", "position_embedding.weight")):
            tensor = tensor.reshape(1, -1, CLIP_DIM)
        if ".q_proj." in name:
            tensor = torch.cat([state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
        if ".k_proj." not in name and ".v_proj." not in name:
            tensors[official] = tensor
    tensors["visual.head"] = torch.zeros(CLIP_DIM, 8)
    tensors["textual.token_embedding.weight"] = torch.zeros(4, 4)
    tensors["log_scale"] = torch.zeros(())
    return tensors


def _save_dit(folder: Path, state: NamedTensors, shards: int) -> None:
    """Writes safetensors files of about equal size, with an index if there are several."""
    stem, total, offset = "diffusion_pytorch_model", _sum_nbytes(state), 0
    weight_map = {}
    for name, tensor in state.items():
        shard = f"-{offset * shards // total + 1:05}-of-{shards:05}" if shards > 1 else ""
        weight_map[name] = f"{stem}{shard}.safetensors"
        offset += tensor.nbytes
    for file in set(weight_map.values()):
        shard_tensors = {name: tensor for name, tensor in state.items() if weight_map[name] == file}
        save_file(shard_tensors, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def _write_diffusers(folder: Path, networks: RandomNetworks) -> None:
    """Writes the layout of diffusers with `save_pretrained` of diffusers and transformers."""
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    task, states = networks.task, networks.dit_states
    names = ["transformer", "transformer_2"][: len(states)]  # high noise, low noise
    classes = get_task(task.kind).diffusers_classes
    assert classes is not None, "refused by make_checkpoint"
    pipeline, network = classes
    is_modular = "Modular" in pipeline  # its network has the official arguments and names
    for name, state in zip(names, states, strict=True):
        with torch.device("meta"):
            dit = (_build_animate2_dit if is_modular else _build_diffusers_dit)(networks, network)
        converted = convert_to_diffusers(state, is_modular)
        _save_pretrained(folder / name, dit, converted, task.sharded)
    tensors = {keymaps.rename_vae_to_diffusers(key): x for key, x in networks.vae_state.items()}
    sizes: Any = {"z_dim": 16}
    if task.vae == "2.2":
        sizes = {"decoder_base_dim": VAE_DECODER_BASE[1], **VAE_22}
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan(base_dim=VAE_BASE, **sizes)
        config: Any = UMT5Config(**networks.text_sizes, feed_forward_proj="gated-gelu")
        text_encoder: Any = UMT5EncoderModel(config)
    _save_pretrained(folder / "vae", vae, tensors, sharded=False)
    tensors = {keymaps.rename_t5_to_transformers(key): x for key, x in networks.text_state.items()}
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]  # tied weights, saved once
    _save_pretrained(folder / "text_encoder", text_encoder, tensors, sharded=True)
    write_tokenizer(folder / "tokenizer", networks.tokenizer)
    if task.num_clip_vision_images:
        state = networks.clip_state
        _save_pretrained(folder / "image_encoder", networks.clip, state, sharded=False)
    scheduler: Any = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=task.diffusers_shift
    )
    scheduler.save_pretrained(folder / "scheduler")
    class_entry, no_class = ["diffusers", network], [None, None]
    clip = ["transformers", "CLIPVisionModel"]
    index = {
        "_class_name": pipeline,
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": task.boundary,
        "expand_timesteps": task.vae == "2.2",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": class_entry,
        "transformer_2": no_class if task.boundary is None else class_entry,
        "vae": ["diffusers", "AutoencoderKLWan"],
        "image_encoder": clip if task.num_clip_vision_images else no_class,
        "image_processor": no_class,
    }
    if is_modular:
        modular = {"_blocks_class_name": "WanAnimate2Blocks", "_class_name": pipeline}
        write_json(folder / "modular_model_index.json", modular)
        return
    arguments = inspect.signature(getattr(diffusers, pipeline)).parameters
    entries = {key: x for key, x in index.items() if key.startswith("_") or key in arguments}
    write_json(folder / "model_index.json", entries)


def _build_diffusers_dit(networks: RandomNetworks, class_name: str) -> Any:
    """Builds the DiT of diffusers with the sizes of a task."""
    import diffusers

    task, config = networks.task, networks.config
    network_config = {
        key.replace("in_dim", "in_channels"): [*value] if isinstance(value, tuple) else value
        for key, value in config.items()
        if key in task.network_config
    }
    return getattr(diffusers, class_name)(
        num_attention_heads=config["num_heads"],
        attention_head_dim=config["dim"] // config["num_heads"],
        in_channels=config["in_dim"],
        out_channels=config["out_dim"],
        text_dim=config["text_dim"],
        ffn_dim=config["ffn_dim"],
        num_layers=config["num_layers"],
        image_dim=config["image_dim"] or None,
        added_kv_proj_dim=config["dim"] if task.num_clip_vision_images else None,
        pos_embed_seq_len=config["image_positions"] or None,
        **network_config,
    )


def _build_animate2_dit(networks: RandomNetworks, class_name: str) -> Any:
    """Builds Animate-2's DiT of diffusers, whose arguments have the official names."""
    import diffusers

    network_class, config = getattr(diffusers, class_name), networks.config
    arguments = config.keys() & inspect.signature(network_class).parameters.keys()
    dit = network_class(**{key: config[key] for key in arguments})
    # The class has no argument for the channels of CLIP features.
    dit.img_emb = type(dit.img_emb)(config["image_dim"], config["dim"])
    return dit


def convert_to_diffusers(
    state: Mapping[str, Tensor], is_animate2: bool = False
) -> dict[str, Tensor]:
    """Converts a DiT's tensors to the names and shapes of diffusers."""
    if is_animate2:
        return {keymaps.rename_animate2_to_diffusers(name): x for name, x in state.items()}
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".linear1_kv." in name:
            for projection, rows in zip("kv", tensor.chunk(2), strict=True):
                renamed = keymaps.rename_dit_to_diffusers(name.replace("_kv.", f"_{projection}."))
                converted[renamed] = rows.contiguous()
        else:
            flat = name.startswith("motion_encoder.") and name.endswith(".bias")
            converted[keymaps.rename_dit_to_diffusers(name)] = tensor.flatten() if flat else tensor
    return converted


def _save_pretrained(
    folder: Path, module: Any, tensors: Mapping[str, Tensor], sharded: bool
) -> None:
    module.load_state_dict(tensors, assign=True)
    total, largest = _sum_nbytes(tensors), max(tensor.nbytes for tensor in tensors.values())
    # Files are filled up to the limit: this limit gives two files for any order of the tensors.
    module.save_pretrained(folder, max_shard_size=total // 2 + largest if sharded else total)


def _sum_nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a tokenizer folder; transformers 5 would write a class that transformers 4 lacks."""
    folder.mkdir(parents=True)
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **special}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


WRITERS = {"official": _write_official, "diffusers": _write_diffusers}
