"""The arguments of `generate` of the official classes, as layers of settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.flags import (
    FLAGS,
    PYTHON_KEYWORDS,
    PYTHON_NAMING,
    is_python_setting,
    make_keyword_error,
)
from wan.settings.layers import Layer, read_layer
from wan.settings.values import Reader, integer

_REPLACEABLE = {"frame_num", "shift", "sample_solver", "sampling_steps", "guide_scale"}
"""Arguments whose defaults a recipe or a source video replaces."""
_OPTIONAL = (
    *("base_seed", "audio", "pose_video", "num_clip", "src_root_path", "src_video", "src_mask"),
    *("image", "last_image", "src_ref_images"),
)
"""Settings that are not given if they are None."""
_SIGNATURE = "the signature of generate"


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `generate`.

    Attributes:
        call: Those of the call.
        shared: Those of all calls of `generate_many`, without those in `call`.
        defaults: The defaults of the signature; None for arguments without one.
        flag_names: Argument -> flag, where the two differ.
    """

    call: Mapping[str, Any]
    shared: Mapping[str, Any]
    defaults: Mapping[str, Any]
    flag_names: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Returns the value of an argument; None if the signature does not have it."""
        return {**self.defaults, **self.shared, **self.call}.get(name)

    def read_layers(self) -> tuple[tuple[Layer, ...], Layer]:
        """Reads the settings of the call: the layers, and the layer of replaceable defaults.

        Raises:
            InputError: A keyword is unknown, or a value is not allowed.
        """
        arguments = {self._get_flag_name(name): name for name in self.defaults}
        user_arguments = {**self.shared, **self.call}
        for name in (name for name in user_arguments if name not in self.defaults):
            if not is_python_setting(name, "video"):
                raise make_keyword_error(name, "video")
            if name in arguments:
                raise InputError(f"{name} is called {arguments[name]} here; use that keyword.")
        signature = self._read(self.defaults, _SIGNATURE)
        replaceable = [*map(self._get_flag_name, _REPLACEABLE & self.defaults.keys())]
        layers = (
            self._read(self.call, "the call"),
            self._read(self.shared, "generate_many"),
            # An argument that is None replaces its default, too.
            signature.drop([*replaceable, *map(self._get_flag_name, user_arguments)]),
        )
        return layers, replace(signature.select(replaceable), kind="default")

    def _get_flag_name(self, argument: str) -> str:
        return self.flag_names.get(argument, _FLAG_OF_KEYWORD.get(argument, argument))

    def _read(self, arguments: Mapping[str, Any], source: str) -> Layer:
        raw: dict[str, Any] = {}
        for argument, value in arguments.items():
            name = self._get_flag_name(argument)
            may_be_none = name in _OPTIONAL or argument not in self.defaults
            is_empty = isinstance(value, str) and not value and name in _PROMPTS
            is_unset = is_empty or (value is None and (may_be_none or source == _SIGNATURE))
            if name in _READERS and not is_unset:
                raw[name] = value
        return read_layer(raw, source, PYTHON_NAMING, readers=_READERS)


def bind_arguments(
    generate: Callable[..., Any],
    call: Mapping[str, Any],
    shared: Mapping[str, Any],
    flag_names: Mapping[str, str],
) -> Arguments:
    """Returns the arguments of a call, given by name, of a `generate` with this signature."""
    parameters = inspect.signature(generate).parameters.values()
    defaults = {
        parameter.name: None if parameter.default is parameter.empty else parameter.default
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
    }
    shared = {name: value for name, value in shared.items() if name not in call}
    return Arguments(call, shared, defaults, flag_names)


def _read_image_in_memory(name: str, value: Any) -> Any:
    return value


def _read_reference_images(name: str, value: Any) -> Any:
    """Returns VACE's reference images, from one image, a list of images, or paths."""
    image_list = [*value] if isinstance(value, list | tuple) else [value]
    if image_list and all(isinstance(item, str | Path) for item in image_list):
        return FLAGS["src_ref_images"].reader(name, image_list)
    return tuple(image_list)


_FLAG_OF_KEYWORD = {keyword: flag for flag, keyword in PYTHON_KEYWORDS.items()}
_PROMPTS = ("prompt", "negative_prompt")
_READERS = {name: flag.reader for name, flag in FLAGS.items() if flag.python == "video"} | {
    "image": Reader(_read_image_in_memory),
    "last_image": Reader(_read_image_in_memory),
    "src_ref_images": Reader(_read_reference_images),
    "max_area": integer(1, 10**12),
}
"""Setting of a call -> its reader; images may be in memory."""
