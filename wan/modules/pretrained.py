"""Reads and writes a network's folder under the names of diffusers: config.json and safetensors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from wan.checkpoint.formats.tensor_source import materialize_tensors
from wan.checkpoint.layout import read_dit_files
from wan.checkpoint.load import ModelSpec
from wan.settings.errors import InputError
from wan.utils.files import write_folder

_CONFIG_KEYS = (
    *("model_type", "text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "out_dim"),
    *("num_heads", "num_layers", "eps"),
)


class PretrainedNetwork(nn.Module):
    """Base class of the networks that the official code reads with diffusers."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        torch_dtype: torch.dtype | None = None,
        **components: Any,
    ) -> Self:
        """Reads a network of this class on the CPU; its parameters need no gradients.

        Args:
            pretrained_model_name_or_path: A folder, official or of diffusers; nothing is
                downloaded.
            subfolder: A folder in it, such as "high_noise_model".
            torch_dtype: Dtype of the weights; None: float32.
            components: Other keywords of the constructor.

        Raises:
            InputError: A ValueError: the folder holds no such network.
        """
        folder = Path(pretrained_model_name_or_path) / (subfolder or "")
        if not folder.is_dir():
            why = "is no folder; names of the Hugging Face hub are not looked up"
            raise InputError(str(folder), None, why, "download the weights with `hf download`")
        files = read_dit_files(folder)
        spec = ModelSpec("DiT", partial(cls, **files.config, **components), files.tensors, folder)
        dtype = torch.float32 if torch_dtype is None else torch_dtype
        network = spec.load(device=torch.device("cpu"), dtype_of=lambda *_: dtype)
        return materialize_tensors(network)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes config.json and diffusion_pytorch_model.safetensors to a new folder.

        Raises:
            NotImplementedError: The class is none of the text, image and 5B networks.
            InputError: A ValueError: the folder exists and is not empty.
        """
        from safetensors.torch import save_file

        if type(self).__name__ != "WanModel":
            raise NotImplementedError(
                f"save_pretrained writes only WanModel, no {type(self).__name__}; use "
                "safetensors.torch.save_file with its state_dict."
            )
        config = {key: getattr(self, key) for key in _CONFIG_KEYS}
        config |= {"_class_name": "WanModel", "_diffusers_version": "0.33.0"}
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with write_folder(Path(save_directory)) as temporary:
            (temporary / "config.json").write_text(json.dumps(config, indent=2))
            file = temporary / "diffusion_pytorch_model.safetensors"
            save_file(state, file, metadata={"format": "pt"})
