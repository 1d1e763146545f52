"""What the arguments of verbs may be. Providers annotate theirs with these; `checks.checked` holds calls to them."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stovetop.calls import Listener
from stovetop.rules import AnyOf, Function, Instance, Text, Whole
from stovetop.types import AdamParams, Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    import torch

    CustomLossFn = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]
else:
    CustomLossFn = Annotated[
        Callable[..., Any], Function(2, "of two arguments that is not async, (data, logprobs) -> (loss, metrics)")
    ]

UserMetadata = dict[str, str]
CloseStatus = Literal["success", "errored", "interrupted"]
AccessScope = Literal["owned", "accessible"]

Prompt = Annotated[ModelInput, Instance((ModelInput,), "ModelInput.from_ints(tokens) makes one")]
NumSamples = Annotated[int, Whole(1, 65_536, hint="for more, make several calls")]
HowToSample = Annotated[SamplingParams, Instance((SamplingParams,), "SamplingParams(max_tokens=100)")]
HowToStep = Annotated[AdamParams, Instance((AdamParams,), "AdamParams(learning_rate=1e-4)")]
Ttl = Annotated[int, Whole(1)]  # seconds
AtLeastNone = Annotated[int, Whole(0)]

MAX_NAME = 200  # letters: with what is put around it while it is written, a name stays below the 255 of a file system


def _name(of: str, also: str = "") -> Text:
    signs = "".join(f"{sign!r}, " for sign in also)
    return Text(
        f"a {of}: letters, digits, {signs}'.', '_' and '-', at most {MAX_NAME}, the first a letter or digit",
        lambda name: re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9.{also}_-]{{,{MAX_NAME - 1}}}", name) is not None,
    )


CheckpointName = Annotated[str, _name("checkpoint name")]
ModelId = Annotated[str, _name("name of a client", ":")]  # as in session:train:0


def is_local(base_url: str | None) -> bool:
    """Whether a `base_url` names the engine in this process."""
    return base_url in (None, "local")


def is_path(text: str) -> bool:
    """Whether a file system could have something of this name."""
    pieces = text.encode().split(b"/")
    return text != "" and "\0" not in text and len(text) < 4096 and all(len(piece) <= 255 for piece in pieces)


_PATH = Text("the path of a checkpoint, as a string: what save_state or save_weights_for_sampler returned", is_path)
StatePath = Annotated[str, _PATH]
FolderName = Annotated[str, Text("the name of a folder", is_path)]
BaseModel = Annotated[str, Text("a model's name or the path of its folder, as a string", is_path)]
Storage = Annotated[str | Path, AnyOf((Text("the path of a folder", is_path), Instance((Path,))))]
OnCall = Annotated[Listener, Function(1, "(call) -> None, which is told of each call that is answered")]
Preload = bool | Sequence[str]  # the names of base models; True: all that were named
