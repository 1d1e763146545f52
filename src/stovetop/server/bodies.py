"""The JSON bodies that clients send, as values: types, ranges and unknown choices are refused here, what a model can do
is refused later, by its client.

A field that is not known is passed over, as a newer SDK may send one; a known field with a choice that we do not have
is refused by name, so that nothing is computed that was not asked for.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from stovetop.arguments import AccessScope
from stovetop.errors import InvalidRequest

SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 365 * 86_400  # an hour to ten years
LONGEST_PAGE = 1000  # entries of a list at once

Seq = Annotated[int, Field(ge=0, lt=2**63)]
TrainingSeq = Annotated[int, Field(ge=1, lt=2**63)]  # 0 is the request that made the model
Ttl = Annotated[int, Field(ge=SHORTEST_TTL_S, le=LONGEST_TTL_S)]
Id = Annotated[str, Field(min_length=1, max_length=512)]


NoteT = TypeVar("NoteT")
LONGEST_NOTE = 2**16  # characters of what users say of a thing: it stays in memory. A bound, not a tuned number


def _short(value: NoteT) -> NoteT:
    """It is bounded, and goes back to clients as JSON, which has no NaN."""
    num_characters = len(json.dumps(value, allow_nan=False, ensure_ascii=False))
    if num_characters > LONGEST_NOTE:
        raise ValueError(f"there may be {LONGEST_NOTE} characters at most, as JSON, and there are {num_characters}")
    return value


Metadata = Annotated[dict[str, JsonValue], AfterValidator(_short)]
Labels = Annotated[dict[str, str], AfterValidator(_short)]
Tags = Annotated[list[str], AfterValidator(_short)]
Note = Annotated[str, Field(max_length=LONGEST_NOTE)]

Of = TypeVar("Of", bound="Body")


class Body(BaseModel):
    """JSON types are taken as they are: no string becomes a number, and no number is NaN."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )


def read_body(kind: type[Of], data: bytes) -> Of:
    """Refuses what does not fit, naming each field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _unreadable(error) from None
    except RecursionError:
        raise InvalidRequest("this request cannot be read: it is nested too deeply") from None


def read_query(kind: type[Of], query: Mapping[str, str]) -> Of:
    """The same for what stands behind the path, where every value is text."""
    try:
        return kind.model_validate_strings(dict(query))
    except ValidationError as error:
        raise _unreadable(error) from None


def _unreadable(error: ValidationError) -> InvalidRequest:
    problems = "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'the body'}: {each['msg']}" for each in error.errors()[:4]
    )
    return InvalidRequest(f"this request cannot be read: {problems}")


# ---- sessions ------------------------------------------------------------------------------------------------------


class CreateSession(Body):
    tags: Tags = []
    user_metadata: Metadata | None = None
    sdk_version: Note = ""
    project_id: Note | None = None
    display_name: Note | None = None


class Heartbeat(Body):
    session_id: Id


FinishType = Literal["success", "errored", "interrupted"]


class FinishReason(Body):
    type: FinishType


class FinishSession(Body):
    reason: FinishReason
    detail: Note | None = None


# ---- training ------------------------------------------------------------------------------------------------------


class AdamOptimizer(Body):
    """Another optimizer is refused by name."""

    type: Literal["adamw"] = "adamw"


class Lora(Body):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: Id
    model_seq_id: Seq
    base_model: Id
    lora_config: Lora | None = None
    optimizer_config: AdamOptimizer | None = None
    user_metadata: Metadata | None = None


class ModelQuery(Body):
    model_id: Id


class Adam(Body):
    type: Literal["adamw"] = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: Id
    seq_id: TrainingSeq
    adam_params: Adam | None = None
    optimizer_params: Adam | None = None  # the same, as newer clients may name it; dimuon is refused by its type

    @model_validator(mode="after")
    def _has_one(self) -> "OptimStep":
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise ValueError("needs adam_params or optimizer_params, and not both")
        return self

    @property
    def params(self) -> Adam:
        """The one that was given."""
        params = self.adam_params or self.optimizer_params
        assert params is not None, "one of both is checked to be there"
        return params


class SaveWeights(Body):
    model_id: Id
    seq_id: TrainingSeq
    path: str
    overwrite: bool = False
    ttl_seconds: Ttl | None = None
    user_metadata: Labels | None = None


class SaveWeightsForSampler(Body):
    """With a path, a checkpoint; without one, a sampling session of weights that are frozen in memory."""

    model_id: Id
    seq_id: TrainingSeq
    path: str | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Labels | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "SaveWeightsForSampler":
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("needs a path, or a sampling_session_seq_id, and not both")
        return self


class SaveWeightsExternal(Body):
    """As files that other programs read: the folder of PEFT."""

    model_id: Id
    seq_id: TrainingSeq
    path: str
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[str], Field(max_length=0)] | None = None  # not offered


class LoadWeights(Body):
    """Into a model that is there (model_id and seq_id), or as a new one (session_id and model_seq_id)."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: TrainingSeq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Id | None = None
    optimizer_config: AdamOptimizer | None = None
    user_metadata: Metadata | None = None
    weights_access_token: None = None  # there are no other accounts here

    @model_validator(mode="after")
    def _names_one(self) -> "LoadWeights":
        into, new = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if not ((None not in into and new == (None, None)) or (None not in new and into == (None, None))):
            raise ValueError("needs model_id and seq_id, or session_id and model_seq_id, and not both")
        return self


# ---- sampling ------------------------------------------------------------------------------------------------------


class CreateSamplingSession(Body):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Id | None = None
    model_path: Id | None = None

    @model_validator(mode="after")
    def _names_one(self) -> "CreateSamplingSession":
        if (self.base_model is None) == (self.model_path is None):
            raise ValueError("needs a base_model, or a model_path, and not both")
        return self


class TextChunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class Prompt(Body):
    chunks: list[TextChunk]


MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024  # of one request: they are looked for after each token. Bounds, not tuned


def _few_stops(stop: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
    texts = [stop] if isinstance(stop, str) else [each for each in stop or () if isinstance(each, str)]
    num_characters = sum(map(len, texts))
    if len(texts) > MAX_STOPS or num_characters > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"there may be {MAX_STOPS} stop strings at most, with {MAX_STOP_CHARACTERS} characters together, and there "
            f"are {len(texts)} with {num_characters}"
        )
    return stop


FewStops = AfterValidator(_few_stops)


class Sampling(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | list[int] | None, FewStops] = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class PromptTargets(Body):
    """Token ids to be scored at the positions of a prompt: all cells of a matrix, or those that are listed."""

    data: list[int]
    dtype: Literal["int64"]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**27)]], Field(min_length=2, max_length=2)]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    @model_validator(mode="after")
    def _has_both(self) -> "PromptTargets":
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("needs sparse_crow_indices and sparse_col_indices, or neither")
        return self


def _without_stability(asked: bool | None) -> None:
    """Samplers are asked for it before a policy is trained with this loss, so that no rollout is paid for in vain."""
    if asked:
        raise ValueError(
            "only the loss 'stable_reinforce' reads it, which has no public definition; pass loss_fn="
            "'importance_sampling', 'ppo' or 'cispo'"
        )


class Sample(Body):
    sampling_session_id: Id
    seq_id: Seq
    prompt: Prompt
    sampling_params: Sampling
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: PromptTargets | None = None
    # Not offered: anything but their neutral values is refused.
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Annotated[bool | None, AfterValidator(_without_stability)] = None


# ---- lists and checkpoints -----------------------------------------------------------------------------------------


class Listed(Body):
    """Which part of a list is asked for. `accessible` is what is owned: what others have published is not listed."""

    limit: Annotated[int, Field(ge=0, le=LONGEST_PAGE)] = 100
    offset: Annotated[int, Field(ge=0, lt=2**63)] = 0
    access_scope: AccessScope = "owned"


class ListedRuns(Listed):
    limit: Annotated[int, Field(ge=0, le=LONGEST_PAGE)] = 20
    project_id: str | None = None


class SearchOwner(Body):
    """`accessible` is what is owned, as in lists; other owners cannot be named."""

    type: Literal["own", "accessible"] = "own"


class StatusQuery(Body):
    """No session of this server is cancelled or failed: those match none."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[FinishType], Field(min_length=1)] | None = None  # of a client that has finished; None: any


class SearchCursor(Body):
    last_created_at: AwareDatetime
    last_session_id: Id


class SearchSessions(Body):
    """What is given must hold; of session_id and display_name, one of both."""

    session_id: Id | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: SearchOwner = SearchOwner()
    statuses: Annotated[list[StatusQuery], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class AssignProject(Body):
    project_id: Id


class SetTtl(Body):
    ttl_seconds: Ttl | None  # from now on; None: for ever


class WeightsInfo(Body):
    tinker_path: Id


class CopyWeights(Body):
    """Into a run of its own, of a project, or of a session."""

    source_path: Id
    destination_project_id: str | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: None = None  # there are no other accounts here

    @model_validator(mode="after")
    def _names_one(self) -> "CopyWeights":
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("needs session_id and model_seq_id, or neither")
        if (self.session_id is None) == (self.destination_project_id is None):
            raise ValueError("needs destination_project_id, or session_id and model_seq_id, and not both")
        return self


class Download(Body):
    """What a signed link says: see `downloads.py`."""

    path: Id
    n: Seq
    file: str = ""
    expires: Seq
    signature: str


# ---- futures -------------------------------------------------------------------------------------------------------


class RetrieveFuture(Body):
    request_id: Id
    allow_metadata_only: bool = False


class SamplesOf(Body):
    """One client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Seq = 0


class RetrieveFutures(Body):
    target: SamplesOf
    prev_cursor: Seq = 0
    timeout: Annotated[float, Field(ge=0)] | None = None  # seconds
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = []


class JoinSamplingSession(Body):
    sampling_session_id: Id


TrainingBody = OptimStep | SaveWeights | SaveWeightsForSampler | SaveWeightsExternal | LoadWeights
