"""Prompt extension: refusals, a fake service, and tiny local models that really run."""

from __future__ import annotations

import base64
import gc
import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.refusals import check_refusals, get_refusal
from wan.app import prompt_extend
from wan.app.prompt_extend import check_prompt_extension, rewrite_prompt
from wan.settings.command import PromptExtension
from wan.settings.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")
RED, BLUE = (Image.new("RGB", (64, 48), colour) for colour in ("red", "blue"))
FALLBACK_WARNING = "Prompt extension failed, the original prompt is used: "


def rewrite(
    prompt: str, *, method: str = "dashscope", model: Any = None, lang: str = "en", **changes: Any
) -> str:
    defaults: dict[str, Any] = {"image": None, "seed": 7, "device": "cpu"}
    settings = PromptExtension(True, method, model and str(model), lang)
    return rewrite_prompt(settings, prompt, **(defaults | changes))


def rewrite_locally(prompt: str, model: Any, **changes: Any) -> str:
    return rewrite(prompt, method="local_qwen", model=model, **changes)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Has `messages`. `set_up_logging` of an earlier test has stopped the propagation."""
    monkeypatch.setattr(logging.getLogger("wan"), "propagate", True)
    return caplog


class Service:
    """A server of chat completions on this machine: its replies in turn, and the requests."""

    def __init__(self) -> None:
        self.replies: list[Any] = [answer("text")] * 20
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Message] = []
        self.pauses: list[float] = []

    def make_handler(service) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                service.headers.append(self.headers)
                service.requests.append({"path": self.path, **json.loads(content)})
                status, text = service.replies[len(service.requests) - 1]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        return Handler

    def messages(self) -> tuple[Any, Any]:
        """System and user content of the latest call."""
        system, user = self.requests[-1]["messages"]
        assert (system["role"], user["role"]) == ("system", "user")
        return system["content"], user["content"]


def answer(content: Any) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"content": content}}]})


BUSY = 429, '{"error": "too many"}'


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    fake = Service()
    server = HTTPServer(("127.0.0.1", 0), fake.make_handler())
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("DASH_API_KEY", "sk-test")
    monkeypatch.setenv("DASH_API_URL", f"http://127.0.0.1:{server.server_port}/v1/")
    monkeypatch.setattr(prompt_extend.time, "sleep", fake.pauses.append)
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_text_question(service: Service, log: Any) -> None:
    service.replies = [answer("  A cat, in full.\n")]
    assert rewrite(" a {cat} ", seed=2**62 + 2**31 + 5) == "A cat, in full."
    [request] = service.requests
    assert service.messages()[1] == "Request: a {cat}"
    assert service.headers[0]["Authorization"] == "Bearer sk-test"
    del request["messages"]
    assert request == {"path": "/v1/chat/completions", "model": "qwen-plus", "seed": 5}
    assert not log.messages


def test_an_image_question(service: Service) -> None:
    service.replies = [answer("A red cat.")]
    assert rewrite("a cat", image=Image.new("RGBA", (2000, 1000), (255, 0, 0, 255))) == "A red cat."
    assert service.requests[0]["model"] == "qwen-vl-max"
    _, [image, text_part] = service.messages()
    assert text_part == {"type": "text", "text": "Request: a cat"}
    head, data = image["image_url"]["url"].split(",")
    assert (image["type"], head) == ("image_url", "data:image/png;base64")
    sent = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (sent.size, sent.mode, sent.getpixel((9, 9))) == ((724, 362), "RGB", (255, 0, 0))


def test_only_large_images_shrink(service: Service) -> None:
    for size in ((40, 30), (512, 512), (513, 512), (300_000, 1), (1, 300_000)):
        rewrite("a cat", image=Image.new("L", size))
        data = service.messages()[1][0]["image_url"]["url"].split(",")[1]
        sent = Image.open(io.BytesIO(base64.b64decode(data))).size
        fits = size[0] * size[1] <= 512 * 512
        assert sent == size if fits else 0.99 * 512 * 512 < sent[0] * sent[1] <= 512 * 512, size


def test_a_failed_try_is_repeated(service: Service, log: Any) -> None:
    failures = (BUSY, (200, "no JSON"), (200, "{}"), (200, "[]"), answer(" "), answer(None))
    for failure in failures:
        service.replies, service.requests[:] = [failure, answer("at last")], []
        assert rewrite("a cat", model="qwen-max") == "at last", failure
        assert [request["model"] for request in service.requests] == ["qwen-max"] * 2
        assert not log.messages


def test_four_failures_give_the_original_prompt_and_a_warning(service: Service, log: Any) -> None:
    service.replies = [(200, ""), BUSY, BUSY, BUSY, answer("too late")]
    assert rewrite(" a cat ") == " a cat "
    assert service.pauses == [0, 1, 2, 3]
    (message,) = log.messages
    assert message.startswith(f"{FALLBACK_WARNING}model 'qwen-plus' of http://127.0.0.1:")
    assert message.endswith("failed 4 times, at last HTTPError: HTTP Error 429: Too Many Requests.")


def test_the_address_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The official code's addresses are those of Alibaba's own protocol."""
    addresses: list[str] = []

    def record_address(request: Any, timeout: float) -> None:
        addresses.append(request.full_url)
        assert timeout * 4 < 600, "NCCL's patience on the ranks that wait"
        raise OSError

    monkeypatch.setattr(prompt_extend, "urlopen", record_address)
    monkeypatch.setattr(prompt_extend.time, "sleep", lambda _: None)
    monkeypatch.setenv("DASH_API_KEY", "sk-test")
    for url in ("", "https://dashscope-intl.aliyuncs.com/api/v1", "http://localhost:8000/v1"):
        monkeypatch.setenv("DASH_API_URL", url)
        rewrite("a cat")
    assert addresses[::4] == [
        "https://dashscope.aliyuncs.com/compatible-mode/v1/chat/completions",
        "https://dashscope-intl.aliyuncs.com/compatible-mode/v1/chat/completions",
        "http://localhost:8000/v1/chat/completions",
    ]


def test_system_texts(service: Service) -> None:
    """One for each purpose, in the language of the answer; the service refuses an empty text."""
    purposes = []
    for lang, (image, prompt) in product(
        ("zh", "en"), ((None, "a cat"), (RED, "a cat"), (RED, " "))
    ):
        rewrite(prompt, image=image, lang=lang)
        system, user = service.messages()
        text = system
        assert any("\u4e00" <= c <= "\u9fff" for c in text) == (lang == "zh")
        assert bool(re.search("[a-z]{3}", text)) == (lang == "en")
        assert image is None or user[1]["text"].strip()
        purposes.append(text.splitlines()[0])
    assert len({*purposes}) == 6


def get_extension_refusal(method: str, model: str | None) -> str:
    return get_refusal(lambda: check_prompt_extension(PromptExtension(True, method, model)))


def test_unavailable_methods(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    check_prompt_extension(PromptExtension(True, "dashscope"))
    monkeypatch.setenv("DASH_API_URL", "example.test")
    messages = {"no address": get_extension_refusal("dashscope", None)}
    monkeypatch.delenv("DASH_API_KEY")
    messages["no key"] = get_extension_refusal("dashscope", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    messages["no transformers"] = get_extension_refusal("local_qwen", None)
    messages["no prompt"] = get_refusal(lambda: rewrite(" "))
    check_refusals("prompt extension: not available", messages)
    assert not service.requests


def test_model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    folders = {"relative": ".", "of the user": "~", "absolute": str(tmp_path), "above": ".."}
    messages = {
        name: get_extension_refusal("local_qwen", f"{folder}/nowhere")
        for name, folder in folders.items()
    }
    present = [f"{folder}/model" for name, folder in folders.items() if name != "above"]
    for folder in (*present, "model"):
        assert "model' has no config.json; give the folder" in get_extension_refusal(
            "local_qwen", folder
        )
    for method in ("local_qwen", "dashscope"):
        messages[f"no name for {method}"] = get_extension_refusal(method, " ")
    check_refusals("prompt extension: folders", messages)
    (tmp_path / "model" / "config.json").touch()
    for folder in (*present, "model"):
        check_prompt_extension(PromptExtension(True, "local_qwen", folder))


# Local models: real transformers models and tokenizers, tiny and random.

TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2}


def make_tokenizer() -> Any:
    """The bytes and the special tokens of Qwen's chat format."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )


def save_model(kind: Any, config: Any, processor: Any, folder: Path, **generation: Any) -> Path:
    """Saves a random model that samples, as the Qwen Instruct models do."""
    torch.manual_seed(0)
    model = kind(config).bfloat16()
    for matrix in (p for p in model.parameters() if p.dim() > 1):
        matrix.data *= 6  # large enough for every input to show in the answer
    tokenizer = getattr(processor, "tokenizer", processor)
    generation = {"suppress_tokens": tokenizer.all_special_ids} | generation  # never ends early
    generation |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = tf.GenerationConfig(do_sample=True, **generation)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_text_model(folder: Path, **generation: Any) -> Path:
    tokenizer = make_tokenizer()
    config = tf.Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **SIZES)
    return save_model(tf.Qwen2ForCausalLM, config, tokenizer, folder, **generation)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture
def vision_model(tmp_path: Path) -> Path:
    """LLaVA, because the processor of Qwen2.5-VL needs torchvision."""
    tokenizer, size = make_tokenizer(), {"height": 28, "width": 28}
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(image_size=28, patch_size=14, **SIZES),
        text_config=tf.Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **SIZES),
        image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_feature_layer=-1,
    )
    processor = tf.LlavaProcessor(
        image_processor=tf.CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
        chat_template=TEMPLATE,
    )
    return save_model(tf.LlavaForConditionalGeneration, config, processor, tmp_path)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs and outputs of each generate(), which makes few tokens in these tests."""
    calls = []
    original = tf.GenerationMixin.generate

    def generate(self: Any, *, max_new_tokens: int, **inputs: Any) -> Any:
        self.__dict__["me"] = self  # a cycle, as hooks may make them
        out = original(self, max_new_tokens=8, **inputs)
        start = inputs["input_ids"].shape[1]
        assert torch.equal(out[:, :start], inputs["input_ids"])
        run = {"limit": max_new_tokens, "new": out[0, start:], "dtype": self.dtype, **inputs}
        calls.append(SimpleNamespace(**run))
        return out

    monkeypatch.setattr(tf.GenerationMixin, "generate", generate)
    return calls


@pytest.mark.usefixtures("runs")
def test_local_seeds_and_memory(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(text_model.parent))
    torch.manual_seed(3)
    rng_state = torch.get_rng_state()
    gc.disable()  # only the collection asked for counts
    try:
        texts = [rewrite_locally("a cat", f"~/{text_model.name}", seed=seed) for seed in (1, 1, 2)]
        alive = [x for x in gc.get_objects() if type(x) is tf.Qwen2ForCausalLM]
    finally:
        gc.enable()
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), rng_state), "the caller's random state changed"
    assert not alive


def test_local_chat(text_model: Path, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    monkeypatch.setattr(tf.Qwen2ForCausalLM, "to", lambda _, device: devices.append(device))
    text = rewrite_locally("一只 cat", text_model, lang="zh", device="cpu:0")
    [run] = runs
    tokenizer = make_tokenizer()
    assert text == tokenizer.decode(run.new, skip_special_tokens=True).strip() != ""
    system, user, end = tokenizer.decode(run.input_ids[0]).split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n你把简短的需求改写成")
    assert user == "<|im_start|>user\n需求：一只 cat"
    assert end == "<|im_start|>assistant\n"
    assert (run.limit, run.dtype, devices) == (512, torch.bfloat16, [torch.device("cpu:0")])


def test_local_vision(vision_model: Path, runs: Any) -> None:
    for image in (RED, BLUE):
        assert rewrite_locally("a cat", vision_model, image=image)
    red, blue = (run.pixel_values[0, :, 9, 9] for run in runs)
    assert red.argmax() == 0 and blue.argmax() == 2, "the image reaches the model"
    user = make_tokenizer().decode(runs[0].input_ids[0]).split("<|im_end|>\n")[1]
    # 28*28 pixels in patches of 14*14 are 4 tokens.
    assert user == "<|im_start|>user\n" + 4 * "<|image_pad|>" + "Request: a cat"
    assert runs[0].limit == 512
    assert rewrite_locally("a cat", vision_model), "a vision model also takes a prompt alone"


def test_local_silence_gives_the_original_prompt(tmp_path: Path, log: Any) -> None:
    eos = make_tokenizer().eos_token_id
    other_ids = [i for i in range(len(make_tokenizer())) if i != eos]
    assert (
        rewrite_locally(" a cat", make_text_model(tmp_path, suppress_tokens=other_ids)) == " a cat"
    )
    assert log.messages == [FALLBACK_WARNING + "the answer is empty."]


SOURCES = {
    (None, False): "Qwen/Qwen2.5-14B-Instruct",
    (None, True): "Qwen/Qwen2.5-VL-7B-Instruct",
    ("QwenVL2.5_3B", False): "Qwen/Qwen2.5-VL-3B-Instruct",
    ("Qwen2.5_7B", False): "Qwen/Qwen2.5-7B-Instruct",
    ("me/my-model", False): "me/my-model",
}


def test_local_names_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> None:
        raise OSError(f"no network for {name}")

    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", no_network)
    for (model, has_image), source in SOURCES.items():
        check_prompt_extension(PromptExtension(True, "local_qwen", model))
        with pytest.raises(InputError, match=rf"\(no network for {source}\); give the local"):
            rewrite_locally("a cat", model, image=RED if has_image else None)


UNUSABLE: dict[str, tuple[str, bytes | None]] = {  # text of the message -> a file and its content
    "not a valid JSON": ("config.json", b"{"),
    "T5Config": ("config.json", b'{"model_type": "t5"}'),
    "no chat template": ("chat_template.jinja", None),
    "header": ("model.safetensors", b"12345678 no weights"),
}


def test_local_models_that_cannot_be_used(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = {
        "a text model, ": get_refusal(lambda: rewrite_locally("a cat", text_model, image=RED))
    }
    for expected_text, (file, content) in UNUSABLE.items():
        folder = Path(shutil.copytree(text_model, tmp_path / expected_text))
        (folder / file).unlink()
        if content is not None:
            (folder / file).write_bytes(content)
        messages[expected_text] = get_refusal(rewrite_locally, "a cat", folder)
    for expected_text, sentence in messages.items():
        assert re.search(f"cannot be used .*{expected_text}.*_extend_model", sentence), sentence

    def missing(_: str) -> None:
        raise ImportError("needs the\nTorchvision library")

    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(InputError, match=r"\(needs the Torchvision library\); install that"):
        rewrite_locally("a cat", text_model)
