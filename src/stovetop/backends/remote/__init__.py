"""A server as a backend, through the official SDK: hosted Tinker, `stovetop serve`, or any other that speaks its
protocol.

service      makes the clients, and closes         training, sampling, rest   the clients
models       what a server says of its models, so that what they cannot do is refused before it is sent
connection   the SDK's side: the session, and the thread in which its results become ours
reaching     whether anybody answers there
turns        the calls of one client, in order     custom_loss                a user's loss, between two of them
gradients    what is known of those at the server, and how they are dropped
saves        what this service has saved           values, refusals           the SDK's values and errors as ours
tokenizers   those of a server's models, which this machine reads

What the SDK deprecates is not used. Text is sent, images are not.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

from stovetop.arguments import Storage, UserMetadata
from stovetop.checks import checked_as
from stovetop.errors import InvalidRequest
from stovetop.extras import require_extra
from stovetop.rules import Function
from stovetop.tokenizing import Tokenizer

if TYPE_CHECKING:
    from stovetop.backends.remote.service import RemoteServiceClient

HOSTED = "tinker"  # the base_url of the service that the SDK knows
FindTokenizer = Callable[[str], Tokenizer]


@checked_as("ServiceClient")
def open_service(
    base_url: str,
    *,
    api_key: str | None = None,
    storage: Storage | None = None,
    user_metadata: UserMetadata | None = None,
    project_id: str | None = None,
    display_name: str | None = None,
    default_headers_overrides: Mapping[str, str] | None = None,
    tokenizer: Annotated[FindTokenizer, Function(1, "(name of a base model) -> its tokenizer")] | None = None,
) -> "RemoteServiceClient":
    """A service of this server; it is connected to when something is first asked of it.

    base_url    "tinker": where the SDK connects to by itself; or the address of a server
    api_key     None: the SDK's own (TINKER_API_KEY, or what `tinker auth login` stored); a server on this machine that
                asks for none gets tml-local
    tokenizer   by the name of a base model; None: of the model if it is on this machine, else as the SDK finds it
    storage     of no meaning here, and accepted, since recipes say it to every provider: a server saves on its own disk
    """
    if "stovetop.as_tinker" in sys.modules:
        raise InvalidRequest(
            "stovetop.as_tinker gives this package to all that import tinker, so the SDK, which asks servers, cannot "
            f"be imported; run the program without it: {base_url!r}"
        )
    require_extra("tinker", "tinker", why=f"to use {base_url},")
    from stovetop.backends.remote.connection import Connection
    from stovetop.backends.remote.service import RemoteServiceClient

    connection = Connection(
        None if base_url == HOSTED else base_url.rstrip("/"),
        api_key,
        user_metadata=user_metadata,
        project_id=project_id,
        display_name=display_name,
        headers=default_headers_overrides,
    )
    return RemoteServiceClient.over(connection, dict(user_metadata or {}), tokenizer)
