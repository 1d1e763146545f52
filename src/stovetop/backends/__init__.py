"""Providers of the protocols in `client.py`: one file or folder each, and the one that a `base_url` names.

local.py       the engine in this process               recording/     a deterministic fake that learns
remote/        a server, through the official SDK

The other files are the service and the clients that local and recording share.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from stovetop.arguments import Storage, UserMetadata, is_local
from stovetop.checks import checked_as
from stovetop.client import ServiceClient
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
    open_provider, settings = _provider(base_url, api_key, default_headers_overrides)
    known = inspect.signature(open_provider).parameters
    for name in options:
        if name not in known:
            others = inspect.signature(ServiceClient).parameters.keys() - {"engine"}
            raise UnknownName("keyword of ServiceClient", name, {*known, *others})
    labels = {"user_metadata": user_metadata, "project_id": project_id, "display_name": display_name}
    return open_provider(storage=storage, **labels, **settings, **options)


def check_base_url(base_url: str | None) -> None:
    """Refuses what no provider is found by. Nothing is opened, imported or asked."""
    if base_url is None or is_local(base_url) or base_url == "recording" or is_remote(base_url):
        return
    if base_url.startswith(("http:", "https:")):
        raise InvalidRequest(f"base_url must be an address such as http://127.0.0.1:8765: {base_url!r}")
    hint = "None is 'local'; a server has an address, http://..."
    raise UnknownName("base_url", base_url, ["local", "recording", "tinker"], hint=hint)


def is_remote(base_url: str | None) -> bool:
    """Whether it is the address of a server, or the hosted service."""
    if base_url is None or base_url == "tinker":
        return base_url is not None
    try:
        address = urlsplit(base_url)
        return address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:  # no address has such a host or port
        return False


def _provider(
    base_url: str | None, api_key: str | None, headers: Mapping[str, str] | None
) -> tuple[Callable[..., ServiceClient], dict[str, Any]]:
    """What opens it, and what of the settings it takes beside those that all have."""
    check_base_url(base_url)
    if is_remote(base_url):
        from stovetop.backends import remote

        return remote.open_service, {"base_url": base_url, "api_key": api_key, "default_headers_overrides": headers}
    require_neutral(default_headers_overrides=headers)
    if base_url == "recording":
        from stovetop.backends import recording

        return recording.open_service, {}
    from stovetop.backends import local

    return local.open_service, {}
