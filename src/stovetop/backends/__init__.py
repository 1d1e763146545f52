"""Providers of the protocols in `client.py`: one file or folder each, and the one that a `base_url` names.

local.py       the engine in this process               recording/     a deterministic fake that learns
remote.py      a server, through the official SDK (to come)

The other files are the service and the clients that local and recording share.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from stovetop.checks import checked_as
from stovetop.client import ServiceClient, Storage, UserMetadata
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.rules import Text
from stovetop.sdk_differences import require_neutral


@checked_as("ServiceClient")
def open_service(
    base_url: Annotated[str, Text("a string; pass user_metadata=... by name")] | None,
    *,
    api_key: str | None,
    user_metadata: UserMetadata | None,
    project_id: str | None,
    display_name: str | None,
    default_headers_overrides: Mapping[str, str] | None,
    storage: Storage | None,
    options: Mapping[str, Any],
) -> ServiceClient:
    """See `client.ServiceClient`, whose parameters these are; `options` are those of the provider."""
    require_neutral(default_headers_overrides=default_headers_overrides)
    provider = _provider(base_url)
    known = inspect.signature(provider).parameters
    for name in options:
        if name not in known:
            others = inspect.signature(ServiceClient).parameters.keys() - {"engine"}
            raise UnknownName("keyword of ServiceClient", name, {*known, *others})
    return provider(
        storage=storage, user_metadata=user_metadata, project_id=project_id, display_name=display_name, **options
    )


def check_base_url(base_url: str | None) -> None:
    """Refuses what no provider is found by. Nothing is opened or imported."""
    match base_url:
        case None | "local" | "recording":
            pass
        case _ if base_url == "tinker" or base_url.startswith(("http://", "https://")):
            raise InvalidRequest(
                "this version has no client for remote services; pass base_url='local' to train in this process, or "
                f"use the official SDK (import tinker) for: {base_url!r}"
            )
        case _:
            raise UnknownName("base_url", base_url, ["local", "recording"], hint="None is 'local'")


def _provider(base_url: str | None) -> Callable[..., ServiceClient]:
    check_base_url(base_url)
    if base_url == "recording":
        from stovetop.backends import recording

        return recording.open_service
    from stovetop.backends import local

    return local.open_service
