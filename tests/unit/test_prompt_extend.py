"""Prompt extension: refusals, a fake dashscope service, and tiny local models that really run."""

from __future__ import annotations

import base64
import gc
import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from wan import prompt_extend
from wan.prompt_extend import PromptExtendError, check_available, extend_prompt
from wan.settings.errors import InputError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}\
{% endif %}{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2}


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= c <= "\u9fff" for c in text)


def ask(prompt: str, **changes: Any) -> str:
    defaults: dict[str, Any] = {
        "task_kind": "t2v",
        "image": None,
        "method": "dashscope",
        "model": None,
        "target_lang": "en",
        "seed": 7,
        "device": "cpu",
    }
    return extend_prompt(prompt, **(defaults | changes))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Texts of the warnings so far; wan.log.setup, called by another test, stops propagation."""
    monkeypatch.setattr(logging.getLogger("wan"), "propagate", True)
    return caplog.messages


# The service --------------------------------------------------------------------------------------


class Service:
    """Stands for dashscope: hands out `replies` in turn (the last one for ever), keeps the calls."""

    def __init__(self, module: ModuleType) -> None:
        self.replies: list[Any] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: type[Exception] = module.common.error.DashScopeException
        module.Generation = SimpleNamespace(call=self._call("text"))
        module.MultiModalConversation = SimpleNamespace(call=self._call("vision"))

    def _call(self, kind: str) -> Callable[..., Any]:
        def call(model: str, **options: Any) -> Any:
            self.calls.append((kind, {"model": model, **options}))
            reply = self.replies[min(len(self.calls), len(self.replies)) - 1]
            if isinstance(reply, Exception):
                raise reply
            return reply

        return call


def answer(content: Any) -> SimpleNamespace:
    choice = SimpleNamespace(message=SimpleNamespace(content=content))
    return SimpleNamespace(status_code=200, output=SimpleNamespace(choices=[choice]))


def failure(status: int = 429) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, code="Throttling", message="too many", output=None)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    modules = {name: ModuleType(name) for name in ("", ".common", ".common.error")}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(f"dashscope{name}", None)
        monkeypatch.setitem(sys.modules, f"dashscope{name}", module)
    modules[""].common, modules[".common"].error = modules[".common"], modules[".common.error"]
    modules[".common.error"].DashScopeException = type("DashScopeException", (Exception,), {})
    monkeypatch.setenv("DASH_API_KEY", "sk-test")
    monkeypatch.delenv("DASH_API_URL", raising=False)
    monkeypatch.setattr(prompt_extend, "_PAUSE_S", 0.0)
    return Service(modules[""])


def test_a_text_request_and_its_answer(service: Service, warnings: list[str]) -> None:
    service.replies = [answer("  A cat, in full.\n")]
    assert ask("a cat in {braces}", seed=2**62 + 5) == "A cat, in full."
    [(kind, sent)] = service.calls
    system, user = sent.pop("messages")
    assert kind == "text"
    assert sent.pop("request_timeout") * 4 < 600, "NCCL's patience on the ranks that wait"
    assert sent == {"model": "qwen-plus", "seed": 5, "result_format": "message"} | {
        "api_key": "sk-test"
    }
    assert (system["role"], user["role"]) == ("system", "user")
    # Never the prompt alone: the client uploads a text that names a local file.
    assert user["content"].endswith("a cat in {braces}") and user["content"][0] != "a"
    assert warnings == []


def test_the_address_of_the_service(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.replies = [answer("text")]
    monkeypatch.setenv("DASH_API_URL", "https://example.test/api/v1")
    ask("a cat", model="qwen-max")
    assert service.calls[0][1]["base_address"] == "https://example.test/api/v1"
    assert service.calls[0][1]["model"] == "qwen-max"


@pytest.mark.parametrize("first", ["status", "client", "network", "empty", "malformed"])
def test_a_failed_try_is_repeated(service: Service, warnings: list[str], first: str) -> None:
    bad = {
        "status": failure(),
        "client": service.error("bad key"),
        "network": ConnectionError("no route"),
        "empty": answer("  "),
        "malformed": answer(None),
    }
    service.replies = [bad[first], answer("at last")]
    assert ask("a cat") == "at last"
    assert len(service.calls) == 2
    assert warnings == []


def test_pauses_grow(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(prompt_extend, "_PAUSE_S", 1.0)
    monkeypatch.setattr(prompt_extend.time, "sleep", pauses.append)
    service.replies = [failure()]
    ask("a cat")
    assert pauses == [0, 1, 2, 3]


def test_four_failures_give_the_original_prompt_and_a_warning(
    service: Service, warnings: list[str]
) -> None:
    service.replies = [failure(500), failure(500), failure(500), failure(429), answer("too late")]
    assert ask(" a cat ") == " a cat "
    assert len(service.calls) == 4
    assert warnings == [
        "Prompt extension failed, the original prompt is used: dashscope model 'qwen-plus' failed "
        "4 times, at last status 429, Throttling: too many."
    ]


def test_our_own_mistakes_are_not_swallowed(service: Service) -> None:
    service.replies = [AssertionError("a bug")]
    with pytest.raises(AssertionError):
        ask("a cat")


def test_a_picture_goes_to_the_vision_model(service: Service) -> None:
    service.replies = [answer([{"text": "A red "}, {"text": "cat."}])]
    picture = Image.new("RGBA", (2000, 1000), (255, 0, 0, 255))
    assert ask("a cat", task_kind="i2v", image=picture) == "A red cat."
    [(kind, sent)] = service.calls
    assert (kind, sent["model"]) == ("vision", "qwen-vl-max")
    system, user = sent["messages"]
    assert [list(part) for part in system["content"]] == [["text"]]
    assert [list(part) for part in user["content"]] == [["image"], ["text"]]
    assert user["content"][1]["text"].endswith("a cat")
    head, data = user["content"][0]["image"].split(",")
    assert head == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (image.mode, image.getpixel((5, 5))) == ("RGB", (255, 0, 0))
    assert 0.99 * 512 * 512 < image.width * image.height <= 512 * 512
    assert image.width / image.height == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("size", [(40, 30), (512, 512), (513, 512), (300_000, 1)])
def test_only_large_pictures_shrink(service: Service, size: tuple[int, int]) -> None:
    service.replies = [answer("text")]
    ask("a cat", task_kind="ti2v", image=Image.new("L", size))
    data = service.calls[0][1]["messages"][1]["content"][0]["image"].split(",")[1]
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    if size[0] * size[1] <= 512 * 512:
        assert image.size == size
    else:
        assert image.width < size[0] and 1 <= image.width * image.height <= 512 * 512


# What is asked ------------------------------------------------------------------------------------


def system_text(service: Service, prompt: str, lang: str, kind: str, picture: bool) -> str:
    service.replies, service.calls = [answer("text")], []
    ask(prompt, task_kind=kind, image=Image.new("RGB", (8, 8)) if picture else None)
    ask(
        prompt,
        task_kind=kind,
        image=Image.new("RGB", (8, 8)) if picture else None,
        target_lang=lang,
    )
    content = service.calls[-1][1]["messages"][0]["content"]
    return content if isinstance(content, str) else content[0]["text"]


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_the_system_text_fits_task_and_picture(service: Service, lang: str) -> None:
    def text(kind: str, picture: bool, prompt: str = "a cat") -> str:
        return system_text(service, prompt, lang, kind, picture)

    t2v, i2v, describe = text("t2v", False), text("i2v", True), text("i2v", True, " ")
    assert len({t2v, i2v, describe}) == 3
    assert text("ti2v", False) == t2v
    assert text("ti2v", True) == i2v
    assert text("t2v", True) == t2v
    assert text("ti2v", True, "") == text("t2v", True, "") == describe


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
@pytest.mark.parametrize("prompt", ["a cat", "一只猫", ""])
def test_texts_are_in_the_target_language(service: Service, kind: str, prompt: str) -> None:
    zh = system_text(service, prompt, "zh", kind, picture=True)
    assert "汉字" in zh and "60到120" in zh
    assert "".join(part["text"] for part in service.calls[-1][1]["messages"][1]["content"][1:])
    en = system_text(service, prompt, "en", kind, picture=True)
    assert not is_chinese(en) and "60 to 120 words" in en and "in English" in en
    user = service.calls[-1][1]["messages"][1]["content"][1]["text"]
    assert prompt in user and len(user) > len(prompt)


# Refusals -----------------------------------------------------------------------------------------


def test_the_module_loads_without_the_heavy_libraries() -> None:
    code = (
        "import sys; from wan.prompt_extend import check_available as c; c('local_qwen', None); "
        "bad = {'torch', 'transformers', 'PIL', 'dashscope'} & set(sys.modules); assert not bad, bad"
    )
    root = Path(prompt_extend.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_the_refusal_is_shown_as_a_sentence() -> None:
    assert issubclass(PromptExtendError, InputError)


def test_unknown_method() -> None:
    with pytest.raises(PromptExtendError, match=r"method 'gpt'; choose .* local_qwen, dashscope\."):
        check_available("gpt", None)


@pytest.mark.parametrize(
    ("method", "package"), [("dashscope", "dashscope"), ("local_qwen", "transformers")]
)
def test_missing_package(monkeypatch: pytest.MonkeyPatch, method: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PromptExtendError, match=f"the package {package}, which is not installed"):
        check_available(method, None)


@pytest.mark.usefixtures("service")
def test_dashscope_key_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    check_available("dashscope", None)
    monkeypatch.setenv("DASH_API_URL", "example.test")
    with pytest.raises(PromptExtendError, match="DASH_API_URL is 'example.test'; give an address"):
        check_available("dashscope", None)
    monkeypatch.delenv("DASH_API_KEY")
    with pytest.raises(PromptExtendError, match="needs an API key; set .* DASH_API_KEY"):
        check_available("dashscope", None)


def test_model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for absent in ("./nowhere", "~/nowhere", str(tmp_path / "nowhere"), "../nowhere"):
        with pytest.raises(PromptExtendError, match="nowhere' does not exist; .* Qwen2.5_14B"):
            check_available("local_qwen", absent)
    present = ("./model", "~/model", "model", str(tmp_path / "model"))
    for folder in present:
        with pytest.raises(PromptExtendError, match="model' has no config.json; give the folder"):
            check_available("local_qwen", folder)
    (tmp_path / "model" / "config.json").write_text("{}")
    for fine in (*present, None, "Qwen2.5_3B", "Qwen/Qwen2.5-1.5B-Instruct"):
        check_available("local_qwen", fine)
    with pytest.raises(PromptExtendError, match="model is empty"):
        check_available("local_qwen", " ")


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_kind": "s2v"}, "task kind .* 's2v'; choose one of t2v, i2v, ti2v"),
        ({"target_lang": "fr"}, "target language .* 'fr'; choose one of zh, en"),
        ({"task_kind": "i2v"}, "i2v got no image; give one with --image"),
        ({"prompt": " "}, "empty prompt and no image; give a --prompt"),
        ({"method": "gpt"}, "method 'gpt'"),
    ],
)
def test_questions_that_cannot_be_asked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptExtendError, match=message):
        ask(**({"prompt": "a cat"} | changes))


# Local models -------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """Bytes and the special tokens of Qwen's chat format."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens={"image_token": "<|image_pad|>"},
    )


def save(model: Any, processor: Any, folder: Path, **generation: Any) -> Path:
    """A random model that samples, as the Qwen Instruct models do."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = tf.GenerationConfig(do_sample=True, **ids, **generation)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_text_model(folder: Path, **generation: Any) -> Path:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = tf.Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **SIZES)
    return save(tf.Qwen2ForCausalLM(config), tokenizer, folder, **generation)


def make_vision_model(folder: Path) -> Path:
    """LLaVA: a vision model whose processor needs no torchvision."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(image_size=28, patch_size=14, **SIZES),
        text_config=tf.Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **SIZES),
        image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_feature_layer=-1,
    )
    size = {"height": 28, "width": 28}
    processor = tf.LlavaProcessor(
        image_processor=tf.CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
        chat_template=TEMPLATE,
    )
    return save(tf.LlavaForConditionalGeneration(config), processor, folder)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_vision_model(tmp_path_factory.mktemp("vision")))


def test_local_same_seed_same_text(text_model: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    texts = [ask("a cat", method="local_qwen", model=text_model, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text and text == text.strip() for text in texts)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers changed"


def test_vision(vision_model: str) -> None:
    red = Image.new("RGB", (64, 64), "red")
    print(ask("a cat", method="local_qwen", model=vision_model, image=red))
