"""Prompt extension: a language model adds the detail that a short prompt leaves out.

"dashscope" asks Alibaba's service and falls back to the original prompt, with a warning, when it
does not answer. "local_qwen" runs a transformers model on this machine and refuses when it cannot.
torch, transformers and dashscope are imported where used, so that this module loads at once.
"""

from __future__ import annotations

import base64
import gc
import io
import os
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.cli.prompt_texts import Question, ask, messages
from wan.log import logger
from wan.settings.command import PromptExtension
from wan.settings.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image


LOCAL_MODELS = {
    "QwenVL2.5_3B": "Qwen/Qwen2.5-VL-3B-Instruct",
    "QwenVL2.5_7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen2.5_3B": "Qwen/Qwen2.5-3B-Instruct",
    "Qwen2.5_7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen2.5_14B": "Qwen/Qwen2.5-14B-Instruct",
}

_MAX_NEW_TOKENS = 512
_TRIES = 4
_PAUSE_S = 1.0  # times the number of failed tries: an overloaded service needs time
_TIMEOUT_S = 60  # of one try; the other ranks wait as long as --dist_timeout, 30 minutes


class _NoAnswerError(Exception):
    """The model was asked in the right way but gave no text."""


def check(settings: PromptExtension, has_image: bool) -> None:
    """Refuses, without importing anything heavy, what is bound to fail later.

    Says which model will be fetched, where one has to be.

    Raises:
        InputError: For a package that is not installed, a missing DASH_API_KEY, a malformed
            DASH_API_URL, a model folder that is missing or has no config.json, and a model hub
            that does not answer.
    """
    method, model = settings.prompt_extend_method, settings.prompt_extend_model
    if model is not None and not model.strip():
        raise InputError("`prompt_extend_model` is empty; name a model or drop the flag.")
    package = "dashscope" if method == "dashscope" else "transformers"
    if find_spec(package) is None:
        raise InputError(
            f"Prompt extension with {method} needs the package {package}, which is not "
            f"installed; run 'pip install {package}' or choose another `prompt_extend_method`."
        )
    if method == "dashscope":
        _dash_access()
        return
    if model is not None and model not in LOCAL_MODELS:
        _check_folder(model)
    _check_hub(_local_model(model, has_image))


def extended(
    settings: PromptExtension,
    prompt: str,
    task_kind: str,
    image: Image | None,
    seed: int,
    device: str,
) -> str:
    """The prompt rewritten.

    Args:
        settings: The language model.
        prompt: The short one.
        task_kind: "t2v", "i2v" (needs an image) or "ti2v".
        image: Of any size and mode; calls for a vision model.
        seed: The same seed gives the same text with local_qwen; the global random state is
            left alone.
        device: Where a local model runs.

    Returns:
        The model's text, stripped; the prompt itself, with a warning, where it gives none.

    Raises:
        InputError: For a missing image or prompt, and for a local model that cannot be used.
    """
    model = settings.prompt_extend_model
    question = ask(prompt, task_kind, image, settings.prompt_extend_target_lang)
    try:
        if settings.prompt_extend_method == "dashscope":
            return _ask_dashscope(question, model, seed)
        return _ask_local(question, model, seed, device)
    except _NoAnswerError as failure:
        logger.warning("Prompt extension failed, the original prompt is used: %s.", failure)
        return prompt


def _check_folder(model: str) -> None:
    """A folder can be checked at once; what may be a hub id only when it is loaded."""
    folder = Path(os.path.expanduser(model))
    if not folder.exists() and model.startswith((".", "/", "~")):
        raise InputError(
            f"The prompt extension model folder {model!r} does not exist; give an existing folder, "
            f"a hub id or one of {', '.join(LOCAL_MODELS)} with `prompt_extend_model`."
        )
    if folder.exists() and not (folder / "config.json").is_file():
        raise InputError(
            f"The prompt extension model {model!r} has no config.json; "
            "give the folder of a transformers model with `prompt_extend_model`."
        )


def _local_model(model: str | None, has_image: bool) -> str:
    """The folder or the hub's name of a local model."""
    name = model or ("QwenVL2.5_7B" if has_image else "Qwen2.5_14B")
    return LOCAL_MODELS.get(name, os.path.expanduser(name))


def _check_hub(source: str) -> None:
    """A model that has to be fetched; the hub's own clients would try for half a minute."""
    import huggingface_hub

    if Path(source).exists():
        return
    try:
        if huggingface_hub.try_to_load_from_cache(source, "config.json"):
            return
        logger.info("Prompt extension fetches %s from the model hub.", source)
        huggingface_hub.HfApi().model_info(source, timeout=10)
    except Exception as error:  # no name of the hub's, no network, ...: it cannot be had
        raise InputError(
            f"The prompt extension model {source} is not on this machine, and the model hub does "
            "not give it; give the local folder of an Instruct model with `prompt_extend_model`."
        ) from error


def _dash_access() -> dict[str, str]:
    """Arguments of a service call that say who is asking, and where."""
    key, url = os.environ.get("DASH_API_KEY", ""), os.environ.get("DASH_API_URL", "")
    if not key:
        raise InputError(
            "Prompt extension with dashscope needs an API key; set the environment variable "
            "DASH_API_KEY or use `prompt_extend_method=local_qwen`."
        )
    if url and not url.startswith(("http://", "https://")):
        raise InputError(
            f"DASH_API_URL is {url!r}; give an address that starts with https:// or unset it."
        )
    return {"api_key": key, "base_address": url} if url else {"api_key": key}


def _ask_dashscope(question: Question, model: str | None, seed: int) -> str:
    """Tries four times; _NoAnswerError with the last reason when none gave a text."""
    from dashscope.common.error import DashScopeException

    model = model or ("qwen-plus" if question.image is None else "qwen-vl-max")
    # The client's own errors, the network's (OSError), a reply that is no JSON (ValueError), and a
    # reply without the fields that the client or we look up (the others).
    failures = (DashScopeException, OSError, ValueError, TypeError, LookupError, AttributeError)
    reason = ""
    for failed in range(_TRIES):
        time.sleep(_PAUSE_S * failed)
        try:
            return _call_dashscope(question, model, seed)
        except _NoAnswerError as error:
            reason = str(error)
        except failures as error:
            reason = f"{type(error).__name__}: {error}"
    reason = textwrap.shorten(reason, 200)
    raise _NoAnswerError(f"dashscope model {model!r} failed {_TRIES} times, at last {reason}")


def _call_dashscope(question: Question, model: str, seed: int) -> str:
    import dashscope

    # Not every version of the service takes our seeds of up to 63 bits; 31 are always fine.
    options = {**_dash_access(), "seed": seed % 2**31, "request_timeout": _TIMEOUT_S}
    if question.image is None:
        chat = messages(question.system, question.user)
        reply = dashscope.Generation.call(model, messages=chat, result_format="message", **options)
    else:
        file = io.BytesIO()
        question.image.save(file, "PNG")  # at most 0.8 MB, far below the service's limit
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        chat = messages([{"text": question.system}], [{"image": uri}, {"text": question.user}])
        reply = dashscope.MultiModalConversation.call(model, messages=chat, **options)
    if reply.status_code != 200:
        raise _NoAnswerError(f"status {reply.status_code}, {reply.code}: {reply.message}")
    content = reply.output.choices[0].message.content
    # The vision service answers in parts, the text service with a plain string.
    return _nonempty(content if isinstance(content, str) else "".join(x["text"] for x in content))


def _nonempty(text: str) -> str:
    if not text.strip():
        raise _NoAnswerError("the answer is empty")
    return text.strip()


def _ask_local(question: Question, model: str | None, seed: int, device: str) -> str:
    """One answer; the model has left the memory of host and device when this returns."""
    import torch

    place = torch.device(device)
    source = _local_model(model, question.image is not None)
    text = _generate(question, source, seed, place)
    gc.collect()  # the model is unreachable now, but reference cycles keep it until collected
    if place.type != "cpu":
        torch.get_device_module(place).empty_cache()
    return _nonempty(text)


def _generate(question: Question, source: str, seed: int, place: Any) -> str:
    import torch

    model, processor, vision = _load(source, question.image is not None)
    inputs = processor.apply_chat_template(
        _chat(question, vision),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(place)
    model.to(place)
    others = [] if place.type == "cpu" else [place]
    with torch.random.fork_rng(others, device_type=place.type), torch.inference_mode():
        torch.manual_seed(seed)
        tokens = model.generate(**inputs, max_new_tokens=_MAX_NEW_TOKENS)
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    return str(processor.decode(answer, skip_special_tokens=True))


def _chat(question: Question, in_parts: bool) -> list[dict[str, Any]]:
    """Tokenizers take a plain string per message, processors a list of its parts."""
    if not in_parts:
        return messages(question.system, question.user)
    shown = [] if question.image is None else [{"type": "image", "image": question.image}]
    words = [{"type": "text", "text": question.user}]
    return messages([{"type": "text", "text": question.system}], [*shown, *words])


def _load(source: str, needs_vision: bool) -> tuple[Any, Any, bool]:
    """Model on the CPU, its processor (text model: tokenizer), and whether it can see.

    Raises InputError when a part cannot be loaded or is not fit for the question.
    """
    import transformers as tf
    from safetensors import SafetensorError

    try:
        vision = hasattr(tf.AutoConfig.from_pretrained(source), "vision_config")
        if needs_vision and not vision:
            raise ValueError("it is a text model, and there is an image")
        # Small parts first: what they lack shows before gigabytes are read.
        processor = (tf.AutoProcessor if vision else tf.AutoTokenizer).from_pretrained(source)
        if not getattr(processor, "chat_template", None):
            raise ValueError("it has no chat template, so it is no Instruct model")
        kind = tf.AutoModelForImageTextToText if vision else tf.AutoModelForCausalLM
        model = kind.from_pretrained(source, dtype="auto")
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        wanted = "a vision" if needs_vision else "an"
        remedy = f"give the local folder of {wanted} Instruct model with `prompt_extend_model`"
        if isinstance(error, ImportError):
            remedy = "install that package"
        reason = textwrap.shorten(str(error), 200)
        raise InputError(
            f"The prompt extension model {source!r} cannot be used ({reason}); {remedy}."
        ) from error
    return model, processor, vision
