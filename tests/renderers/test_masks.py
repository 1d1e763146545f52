"""What each mode trains of one chat, for every renderer: the whole text, and where training begins and ends."""

import re

import pytest

from renderers.families import FAMILIES
from renderers.languages import chat, mask
from stovetop.errors import InvalidRequest
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.messages import Message

CHAT = chat("U1", "A1", "U2", "A2", system="S")
DATE = "2025-08-05"

# By index, the messages whose outputs each mode trains.
TRAINED = {
    TrainOnWhat.LAST_ASSISTANT_MESSAGE: [4],
    TrainOnWhat.LAST_ASSISTANT_TURN: [4],
    TrainOnWhat.ALL_ASSISTANT_MESSAGES: [2, 4],
    TrainOnWhat.ALL_MESSAGES: [0, 1, 2, 3, 4],
    TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: [0, 1, 3],
    TrainOnWhat.CUSTOMIZED: [1, 4],
}


def written(system: str, user: str, assistant: str, *, last: str = "", between: str = "", behind: str = "") -> str:
    """The chat, its outputs in «», of how a family writes a message of each role."""
    turns = [system, user, assistant, user, last or assistant]
    texts = [turn.replace("*", str(message["content"])) for turn, message in zip(turns, CHAT, strict=True)]
    return between.join(texts) + behind


def chatml(last: str = "") -> str:
    system, user, assistant = (f"<|im_start|>{role}\n«*<|im_end|>»" for role in ("system", "user", "assistant"))
    return written(system, user, assistant, last=last, between="\n", behind="\n")


def gpt_oss(effort: str | None) -> str:
    system = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        f"Knowledge cutoff: 2024-06\nCurrent date: {DATE}\n\nReasoning: {effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    )
    return ("" if effort is None else system) + written(
        "<|start|>developer<|message|># Instructions\n\n«*\n\n<|end|>»",
        "<|start|>user<|message|>«*<|end|>»",
        "<|start|>assistant«<|channel|>final<|message|>*<|end|>»",
        last="<|start|>assistant«<|channel|>final<|message|>*<|return|>»",
    )


DEEPSEEK = "<｜begin▁of▁sentence｜>" + written(
    "«*»", "<｜User｜>«*»", "<｜Assistant｜></think>«*<｜end▁of▁sentence｜>»"
)
LLAMA3 = "<|begin_of_text|>" + written(
    *(f"<|start_header_id|>{role}<|end_header_id|>\n\n«*<|eot_id|>»" for role in ("system", "user", "assistant"))
)
WRITTEN = {
    "role_colon": "<|bos|>"
    + written("System:« *\n\n»", "User:« *\n\n»", "Assistant:« *\n\n»", last="Assistant:« *\n\nUser:»"),
    "chat_template": chatml(),
    "llama3": LLAMA3,
    "qwen3": chatml(last="<|im_start|>assistant\n«<think>\n\n</think>\n\n*<|im_end|>»"),
    "qwen3_disable_thinking": chatml(last="<|im_start|>assistant\n<think>\n\n</think>\n\n«*<|im_end|>»"),
    "qwen3_instruct": chatml(),
    "qwen3_vl": chatml(),
    "qwen3_vl_instruct": chatml(),
    "deepseekv3": DEEPSEEK,
    "deepseekv3_disable_thinking": DEEPSEEK,
    "kimi_k2": written(
        "<|im_system|>system<|im_middle|>«*<|im_end|>»",
        "<|im_user|>user<|im_middle|>«*<|im_end|>»",
        "<|im_assistant|>assistant<|im_middle|>«<think></think>*<|im_end|>»",
    ),
    "gpt_oss_no_sysprompt": gpt_oss(None),
    "gpt_oss_low_reasoning": gpt_oss("low"),
    "gpt_oss_medium_reasoning": gpt_oss("medium"),
    "gpt_oss_high_reasoning": gpt_oss("high"),
}


def renderer_of(name: str) -> Renderer:
    family = FAMILIES[name]
    options = {"date": DATE} if "reasoning" in name else {}
    return get_renderer(name, family.tokenizer(), family.image_processor(), **options)


@pytest.mark.parametrize("mode", TRAINED)
@pytest.mark.parametrize("name", supported_renderers())
def test_each_mode_trains_what_its_messages_say_and_nothing_else(name: str, mode: TrainOnWhat) -> None:
    renderer = renderer_of(name)
    customized = mode is TrainOnWhat.CUSTOMIZED
    messages: list[Message] = [
        {**message, "trainable": index in TRAINED[mode]} if customized else message
        for index, message in enumerate(CHAT)
    ]
    before, *outputs = re.split("[«»]", WRITTEN[name])
    for index in TRAINED[mode]:
        outputs[2 * index] = f"¦{outputs[2 * index]}¦"
    assert mask(renderer, renderer.build_supervised_example(messages, mode)) == before + "".join(outputs)


@pytest.mark.parametrize("name", supported_renderers())
def test_all_tokens_are_trained_but_begin_of_text(name: str) -> None:
    renderer = renderer_of(name)
    example = renderer.build_supervised_example(CHAT, TrainOnWhat.ALL_TOKENS)
    begins_with_bos = example.model_input.to_ints()[0] == renderer.tokenizer.bos_token_id
    assert renderer.tokenizer.decode(example.model_input.to_ints()) == re.sub("[«»]", "", WRITTEN[name])
    assert example.weights.tolist() == [float(not begins_with_bos)] + [1.0] * (example.model_input.length - 1)


@pytest.mark.parametrize("name", supported_renderers())
def test_an_example_without_a_token_to_train_on_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"all_assistant_messages leaves no token .* roles are: user"):
        renderer_of(name).build_supervised_example(chat("only a question"), TrainOnWhat.ALL_ASSISTANT_MESSAGES)
