"""Teachers: sampling clients of models that read what the student reads. What is learnt from them is in on_policy,
where the student writes and the teacher scores, and in off_policy, where the teacher shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient, ServiceClient
from stovetop.errors import InvalidRequest
from stovetop.preference.reference import check_same_tokenizer, create_reference_client
from stovetop.renderers import RendererFactory, get_renderer
from stovetop.renderers.messages import Message
from stovetop.tokenizing import Tokenizer

_ANY: tuple[Message, ...] = (
    Message(role="user", content="What is 2 + 2?"),
    Message(role="assistant", content="4"),
    Message(role="user", content="And 3 + 3?"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """A base model as it is, or a saved checkpoint of it."""

    base_model: str
    load_checkpoint_path: str | None = None


async def create_teachers(
    service: ServiceClient,
    configs: Sequence[TeacherConfig],
    *,
    renderer_name: str | RendererFactory,
    student_tokenizer: Tokenizer,
) -> list[SamplingClient]:
    """One teacher for each config, in order. Equal configs share one. Each must speak the student's language: the same
    token ids, and the same tokens for a chat."""
    teachers: dict[TeacherConfig, SamplingClient] = {}
    for config in configs:
        if config not in teachers:
            client = await create_reference_client(service, config.base_model, config.load_checkpoint_path)
            check_same_language(renderer_name, student_tokenizer, client.get_tokenizer(), config.base_model)
            teachers[config] = client
    return [teachers[config] for config in configs]


def check_same_language(
    renderer_name: str | RendererFactory, student_tokenizer: Tokenizer, teacher_tokenizer: Tokenizer, teacher_name: str
) -> None:
    """Refuses a teacher to which the student's prompts would be another text, or a chat in another language."""
    check_same_tokenizer(student_tokenizer, teacher_tokenizer, teacher_name)
    student, teacher = (get_renderer(renderer_name, each) for each in (student_tokenizer, teacher_tokenizer))
    if student.build_generation_prompt(_ANY) != teacher.build_generation_prompt(_ANY):
        raise InvalidRequest(
            f"renderer {renderer_name!r} writes a chat for this teacher in another way than for the student; name the "
            f"renderer of their family, which writes the same for both: {teacher_name!r}"
        )
