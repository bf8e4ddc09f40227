"""The official classes of prompt extension."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from wan.app.prompt_extend import NoAnswerError, make_question, query_model
from wan.device import select_device
from wan.media.images import convert_to_image
from wan.settings.command import PromptExtension
from wan.settings.errors import InputError
from wan.settings.values import choice


@dataclass
class PromptOutput:
    """The answer of an expander.

    Attributes:
        status: Whether the language model has answered.
        prompt: The extended prompt, or after a failure the original one.
        message: The extended prompt, or the reason of the failure.
    """

    status: bool
    prompt: str
    seed: int
    system_prompt: str
    message: str

    def add_custom_field(self, key: str, value: Any) -> None:
        setattr(self, key, value)


class PromptExpander:
    """Extends prompts by a language model, with the texts of `wan.app.prompt_extend`.

    A local model is loaded for a call and released after it.

    Args:
        model_name: Name or folder of the language model; None: that of the method.
        task: No effect; the system text depends on whether there is an image.
        is_vl: No effect; a model with vision is used if there is an image.
        device: Index of the accelerator of a local model.
    """

    method: ClassVar[str]

    def __init__(
        self,
        model_name: str | None = None,
        task: str | None = None,
        is_vl: bool = False,
        device: int | str = 0,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("api_key", None) is not None:
            raise NotImplementedError("Set the variable DASH_API_KEY instead of giving api_key.")
        self.model_name, self.task, self.is_vl, self.device = model_name, task, is_vl, device

    def __call__(
        self,
        prompt: str,
        system_prompt: str | None = None,
        tar_lang: str = "zh",
        image: Any = None,
        seed: int = -1,
    ) -> PromptOutput:
        """Extends a prompt.

        Args:
            system_prompt: Instructions for the language model; None: those of this package.
            tar_lang: "zh" or "en".
            image: A PIL image, a file, or an array; None: no image.
            seed: Negative: random.
        """
        seed = random.randint(0, sys.maxsize) if seed < 0 else seed
        try:
            lang = str(choice("zh", "en")("tar_lang", tar_lang))
            settings = PromptExtension(True, self.method, self.model_name, lang)
            picture = None if image is None else convert_to_image(image)
            question = make_question(prompt, picture, lang, system_prompt)
            index = self.device if isinstance(self.device, int) else 0
            device = str(select_device("auto", index).torch_device)
            text = query_model(settings, question, seed, device)
        except (NoAnswerError, InputError) as error:
            return PromptOutput(False, prompt, seed, system_prompt or "", str(error))
        return PromptOutput(True, text, seed, question.system, text)


class DashScopePromptExpander(PromptExpander):
    """Calls the service of DASH_API_URL, by default Alibaba's, with the key of DASH_API_KEY."""

    method = "dashscope"


class QwenPromptExpander(PromptExpander):
    """Runs a Qwen model of transformers on this machine."""

    method = "local_qwen"
