"""What a model's program is made of: one value a verb, and how each is written into the journal and read again.

These are not the clients' bodies (`bodies.py`): here a seed is drawn, a path is the folder that it stood for, and a
body that could be read and not be used is a `Refused` in its place of the program. So a verb does the same whenever it
is done.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from pydantic import JsonValue

from stovetop.errors import InvalidRequest
from stovetop.server.bodies import Adam, Body, read_body
from stovetop.server.codec import Envelope, ForwardBackward, read_envelope, read_forward_backward

SavedKind = Literal["weights", "sampler_weights", "external_weights"]  # as tinker:// paths have it


class Make(Body):
    """A new adapter."""

    base_model: str
    rank: int
    seed: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    user_metadata: dict[str, JsonValue]


class MakeFrom(Body):
    """A new adapter from what was saved: `path` is the client's word for `folder`."""

    path: str
    folder: str
    with_optimizer: bool
    base_model: str | None
    user_metadata: dict[str, JsonValue]


class Step(Body):
    """An optimizer step."""

    params: Adam


class Save(Body):
    """A checkpoint of this name: with the optimizer, to sample from, or, the same, to be downloaded."""

    name: str
    kind: SavedKind
    overwrite: bool
    ttl_seconds: int | None
    user_metadata: dict[str, str]

    @property
    def with_optimizer(self) -> bool:
        return self.kind == "weights"


class Freeze(Body):
    """The weights at this point, as the sampling session of this id."""

    sampler_id: str


class Load(Body):
    """Takes over what was saved."""

    path: str
    folder: str
    with_optimizer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A forward_backward, or a forward, whose body cannot be used, and why."""

    reason: str
    forward_only: bool = False


Verb = Make | MakeFrom | ForwardBackward | Refused | Step | Save | Freeze | Load

_BODIES: dict[str, type[Body]] = {
    "make": Make,
    "make_from": MakeFrom,
    "step": Step,
    "save": Save,
    "freeze": Freeze,
    "load": Load,
}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A verb, as it is kept and as it is done. Two calls of one model's place are the same where `identity` is."""

    seq: int
    kind: str
    body: bytes
    identity: bytes  # what the client sent, but for what it draws anew when it sends a request again
    verb: Verb


def call_of(envelope: Envelope) -> Call:
    """The call of a forward_backward."""
    body = envelope.canonical()
    return Call(envelope.seq_id, "forward_backward", body, body, _usable(envelope))


def call(seq: int, verb: Verb, identity: bytes) -> Call:
    """The call of any other verb."""
    match verb:
        case Make():
            kind = "make"
        case MakeFrom():
            kind = "make_from"
        case Step():
            kind = "step"
        case Save():
            kind = "save"
        case Freeze():
            kind = "freeze"
        case Load():
            kind = "load"
        case ForwardBackward() | Refused():
            raise AssertionError("a forward_backward is kept as the client wrote it: call_of")
        case _:
            assert_never(verb)
    return Call(seq, kind, verb.model_dump_json().encode(), identity, verb)


def read_verb(kind: str, body: bytes) -> Verb:
    """A verb that was kept."""
    if kind == "forward_backward":
        return _usable(read_envelope(body))
    verb = read_body(_BODIES[kind], body)
    assert isinstance(verb, Verb), "the table has verbs only"
    return verb


def _usable(envelope: Envelope) -> ForwardBackward | Refused:
    try:
        return read_forward_backward(envelope)
    except InvalidRequest as error:
        return Refused(str(error), envelope.message.forward_only)


def learns(verb: Verb) -> bool:
    """Whether it leaves a gradient, or spoils the one that is there: behind it, a model's weights and moments are not
    all that it is."""
    return isinstance(verb, Refused | ForwardBackward) and not verb.forward_only


def rests(verb: Verb) -> bool:
    """Whether no gradient is left behind it, whatever was before."""
    return isinstance(verb, Make | MakeFrom | Step | Load)


def num_tokens_of(verb: Verb) -> int:
    """That it computes."""
    return sum(datum.model_input.length for datum in verb.data) if isinstance(verb, ForwardBackward) else 0


def name_of(verb: Verb) -> str:
    """What clients call it."""
    match verb:
        case Make():
            return "create_model"
        case MakeFrom() | Load():
            return "load_weights"
        case ForwardBackward(forward_only=True):
            return "forward"
        case ForwardBackward() | Refused():
            return "forward_backward"
        case Step():
            return "optim_step"
        case Save(kind="weights"):
            return "save_weights"
        case Save(kind="external_weights"):
            return "save_weights_external"
        case Save() | Freeze():
            return "save_weights_for_sampler"
        case _:
            assert_never(verb)
