"""The messages of the protocol, against the SDK's own."""

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from tinker.proto import tinker_public_pb2

from stovetop.server import wire

# What the SDK sends as JSON, so that we have no message for it.
NOT_OURS = {"SamplingParams", "StopStrings", "StopTokens"}


def test_every_message_has_the_fields_of_the_sdks_with_their_numbers_and_types() -> None:
    theirs = FileDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.CopyToProto(theirs)
    assert messages(wire.FILE) == {name: fields for name, fields in messages(theirs).items() if name not in NOT_OURS}
    assert enums(wire.FILE) == enums(theirs)


def test_what_the_sdk_writes_we_read_and_write_again_byte_for_byte() -> None:
    theirs = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo", forward_only=True)
    theirs.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    theirs.data.add().model_input.add().encoded_text.tokens = b"\1\0\0\0"
    ours = wire.ForwardBackwardRequest.FromString(theirs.SerializeToString())
    assert ours.data[0].model_input[0].WhichOneof("chunk") == "encoded_text"
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


def test_an_optional_field_knows_whether_it_was_set() -> None:
    assert not wire.SampleResponse().HasField("prompt_logprobs")
    assert wire.SampleResponse(prompt_logprobs=b"").HasField("prompt_logprobs")


def test_a_line_that_is_no_declaration_is_not_passed_over() -> None:
    with pytest.raises(AssertionError, match="string a = b"):
        wire.described("message M {\n  string a = b;\n}")


def messages(file: FileDescriptorProto) -> dict[str, list[tuple[Any, ...]]]:
    return {
        message.name: [
            *(seen(field, [each.name for each in message.oneof_decl]) for field in message.field),
            *(seen(field, []) for entry in message.nested_type for field in entry.field),
        ]
        for message in file.message_type
    }


def seen(field: FieldDescriptorProto, oneofs: list[str]) -> tuple[Any, ...]:
    of = oneofs[field.oneof_index] if field.HasField("oneof_index") else None
    type_name = field.type_name.removeprefix(f".{wire.PACKAGE}").removeprefix(".tinker_public")
    return field.number, field.name, field.type, field.label, type_name, of, field.proto3_optional


def enums(file: FileDescriptorProto) -> dict[str, list[tuple[str, int]]]:
    return {enum.name: [(value.name, value.number) for value in enum.value] for enum in file.enum_type}
