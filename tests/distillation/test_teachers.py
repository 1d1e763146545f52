import asyncio

import pytest

from engine import tiny
from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.distillation.teachers import TeacherConfig, check_same_language, create_teachers
from stovetop.errors import InvalidRequest


class OtherTemplate(ByteTokenizer):
    """The same tokens, and another chat template."""

    chat_template = ByteTokenizer.chat_template.replace("<|im_start|>{{", "<|im_start|>the {{")

    def apply_chat_template(self, conversation, **options):
        text = super().apply_chat_template(conversation, **options)
        return text.replace("<|im_start|>", "<|im_start|>the ")


def test_each_config_has_its_teacher_and_equal_ones_share_it(tmp_path):
    one, other = TeacherConfig(base_model="any/one"), TeacherConfig(base_model="any/other")
    with recording.open_service(tmp_path) as service:
        teachers = asyncio.run(
            create_teachers(
                service, [one, other, one], renderer_name="chat_template", student_tokenizer=ByteTokenizer()
            )
        )
        assert [teacher.get_base_model() for teacher in teachers] == ["any/one", "any/other", "any/one"]
    assert teachers[0] is teachers[2]


def test_a_teacher_may_be_a_saved_checkpoint(tmp_path):
    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/one").result()
        path = trainer.save_weights_for_sampler("taught").result().path
        config = TeacherConfig(base_model="any/one", load_checkpoint_path=path)
        [teacher] = asyncio.run(
            create_teachers(service, [config], renderer_name="chat_template", student_tokenizer=ByteTokenizer())
        )
        loaded = [call.arguments for call in service.calls if call.verb == "create_sampling_client"]
        assert loaded == [{"model_path": path, "base_model": None}]
        assert teacher.get_base_model() == "any/one"


def test_a_teacher_with_other_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="choose a model of the same family: 'any/llama'"):
        check_same_language("chat_template", ByteTokenizer(), tiny.tokenizer(), "any/llama")


def test_a_teacher_that_writes_chats_otherwise_is_refused():
    check_same_language("role_colon", ByteTokenizer(), OtherTemplate(), "any/other")
    with pytest.raises(InvalidRequest, match="writes a chat for this teacher in another way"):
        check_same_language("chat_template", ByteTokenizer(), OtherTemplate(), "any/other")
