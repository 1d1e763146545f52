import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from renderers import real_tokenizers
from renderers.languages import chat, chatml
from stovetop import hub
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.model_families import (
    ModelAttributes,
    get_model_attributes,
    recommended_renderer_name,
    tokenizer_source,
)
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.tokenizer import get_tokenizer
from stovetop.tokenizing import Tokenizer

RECOMMENDED = {
    "meta-llama/Llama-3.2-1B": "role_colon",
    "meta-llama/Llama-3.1-70B": "role_colon",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3",
    "Qwen/Qwen3-0.6B-Base": "role_colon",
    "Qwen/Qwen3-30B-A3B-Base": "role_colon",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-235B-A22B": "qwen3",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3_instruct",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3_instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_instruct",
    "Qwen/Qwen3-VL-8B-Thinking": "qwen3_vl",
    "deepseek-ai/DeepSeek-V3": "chat_template",
    "deepseek-ai/DeepSeek-V3-0324": "chat_template",
    "deepseek-ai/DeepSeek-V3-Base": "role_colon",
    "deepseek-ai/DeepSeek-V3.1": "deepseekv3_disable_thinking",
    "deepseek-ai/DeepSeek-V3.1-Terminus": "deepseekv3_disable_thinking",
    "deepseek-ai/DeepSeek-V3.1-Base": "role_colon",
    "moonshotai/Kimi-K2-Base": "role_colon",
    "moonshotai/Kimi-K2-Instruct": "chat_template",
    "moonshotai/Kimi-K2-Instruct-0905": "chat_template",
    "moonshotai/Kimi-K2-Thinking": "kimi_k2",
    "Qwen/Qwen3.5-9B": "chat_template",
    "Qwen/Qwen3.5-9B-Base": "role_colon",
    "Qwen/Qwen3.5-397B-A17B": "chat_template",
    "Qwen/Qwen3.6-35B-A3B": "chat_template",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "chat_template",
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": "chat_template",
    "openai/gpt-oss-20b": "gpt_oss_no_sysprompt",
    "openai/gpt-oss-120b": "gpt_oss_no_sysprompt",
}


@pytest.mark.parametrize("model_name", RECOMMENDED)
def test_a_model_of_a_known_family_is_spoken_to_in_its_familys_language(model_name: str) -> None:
    assert recommended_renderer_name(chatml(), model_name) == RECOMMENDED[model_name]
    assert set(get_model_attributes(model_name).recommended_renderers) <= set(supported_renderers())


@pytest.mark.parametrize("model_name", ["Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "my/own"])
def test_any_other_model_is_spoken_to_in_its_own_template(model_name: str) -> None:
    assert recommended_renderer_name(chatml(), model_name) == "chat_template"
    assert recommended_renderer_name(chatml()) == "chat_template"


def test_an_unknown_model_without_a_template_is_refused_and_told_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"role_colon for a base model.*package\.module:Name.*'my/own'"):
        recommended_renderer_name(chatml(None), "my/own")
    assert recommended_renderer_name(chatml(None)) == "role_colon"


@pytest.mark.parametrize(
    ("model_name", "attributes"),
    [
        ("meta-llama/Llama-3.2-1B", ModelAttributes("meta-llama", "3.2", "1B", False, False, ("role_colon",))),
        (
            "Qwen/Qwen3-30B-A3B",
            ModelAttributes("Qwen", "3", "30B-A3B", True, False, ("qwen3", "qwen3_disable_thinking")),
        ),
        ("Qwen/Qwen3.6-35B-A3B", ModelAttributes("Qwen", "3.6", "35B-A3B", True, True, ("chat_template",))),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            ModelAttributes("nvidia", "3", "30B-A3B", True, False, ("chat_template",)),
        ),
        (
            "Qwen/Qwen3-VL-235B-A22B-Instruct",
            ModelAttributes("Qwen", "3", "235B-A22B", True, True, ("qwen3_vl_instruct",)),
        ),
        (
            "deepseek-ai/DeepSeek-V3.1-Terminus",
            ModelAttributes("deepseek-ai", "3.1", "", True, False, ("deepseekv3_disable_thinking", "deepseekv3")),
        ),
        ("moonshotai/Kimi-K2-Thinking", ModelAttributes("moonshotai", "K2", "", True, False, ("kimi_k2",))),
    ],
)
def test_what_a_name_says_of_its_model(model_name: str, attributes: ModelAttributes) -> None:
    assert get_model_attributes(model_name) == attributes


@pytest.mark.parametrize(
    ("model_name", "tokenizer", "template", "written"),
    [
        (
            "deepseek-ai/DeepSeek-V3-0324",
            real_tokenizers.deepseek,
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
            "<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
            "<｜begin▁of▁sentence｜><｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜>",
        ),
        pytest.param(
            "moonshotai/Kimi-K2-Instruct",
            real_tokenizers.kimi_k2,
            "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
            "<|im_user|>user<|im_middle|>U<|im_end|><|im_assistant|>assistant<|im_middle|>A<|im_end|>",
            marks=pytest.mark.slow,  # to make its tokenizer takes two seconds
        ),
    ],
)
def test_a_model_older_than_thinking_is_shown_none(
    model_name: str, tokenizer: Callable[[], Tokenizer], template: str, written: str
) -> None:
    """Its siblings' renderers would write an empty block of it."""
    old: Any = copy.copy(tokenizer())
    old.chat_template = template
    renderer = get_renderer(recommended_renderer_name(old, model_name), old)
    example = renderer.build_supervised_example(chat("U", "A"))
    assert old.decode(example.model_input.to_ints()) == written


def test_every_strength_of_reasoning_of_gpt_oss_has_its_renderer() -> None:
    attributes = get_model_attributes("openai/gpt-oss-120b")
    assert (attributes.version, attributes.size) == ("oss", "120b")
    assert len(attributes.recommended_renderers) == 4


def test_a_folder_named_as_on_the_hub_will_do() -> None:
    assert get_model_attributes("/models/Qwen/Qwen3-8B/") == get_model_attributes("Qwen/Qwen3-8B")


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'Qwen/Qwen3-8B'.*names its renderer"):
        get_model_attributes("Qwen/Qwen4-8B")


@pytest.mark.parametrize(
    ("model_name", "repository", "revision", "runs_code"),
    [
        ("meta-llama/Llama-3.1-8B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer", "main", False),
        ("meta-llama/Meta-Llama-3-70B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer", "main", False),
        (
            "moonshotai/Kimi-K2-Thinking",
            "moonshotai/Kimi-K2-Thinking",
            "612681931a8c906ddb349f8ad0f582cb552189cd",
            True,
        ),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "main", False),
    ],
)
def test_a_tokenizer_is_asked_of_the_right_repository(
    model_name: str, repository: str, revision: str, runs_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, **options: Any) -> object:
        raise OSError(f"{name} at {options['revision']}, code: {options['trust_remote_code']}")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)  # tests have no network
    with pytest.raises(UnknownName, match=f"{repository} at {revision}, code: {runs_code}"):
        get_tokenizer(model_name)
    assert tokenizer_source(model_name).repository == repository
