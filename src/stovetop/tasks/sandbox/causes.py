"""Why no sandbox can be made on a machine, where that is known, and what to do about it."""

from pathlib import Path
from typing import NamedTuple


def ways_to_get_one() -> str:
    return (
        "To get a sandbox, on Linux: install bubblewrap with the system's packages (apt install bubblewrap), or pip "
        "install 'stovetop[sandbox]'. Elsewhere: work in a Linux container or virtual machine, or pass a sandbox of "
        "your own (stovetop.tasks.sandbox.Sandbox, one method)"
    )


class _Cause(NamedTuple):
    setting: str  # a file of the system
    value: str
    says: str


_SETTINGS = (
    _Cause(
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor keeps programs from making user namespaces here, as Ubuntu does from 23.10 on. Allow it for "
        "bubblewrap: apt install bubblewrap apparmor-profiles, then copy bwrap-userns-restrict from "
        "/usr/share/apparmor/extra-profiles to /etc/apparmor.d and run apparmor_parser -r on it (it names "
        "/usr/bin/bwrap, the system's). Or allow it for all programs: sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    _Cause(
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "user namespaces are for root alone here. Allow them: sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    _Cause(
        "/proc/sys/user/max_user_namespaces",
        "0",
        "user namespaces are switched off here. Allow them: sysctl -w user.max_user_namespaces=10000",
    ),
)
_CONTAINER = (
    "If this is a container, which keeps programs from making namespaces unless it is told otherwise, start it with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined "
    "(Docker, Podman), or work outside of it"
)
_OLD_KERNEL = "threads and processes of a sandbox are counted apart from Linux 5.14 on: use a newer kernel"


def known_cause(message: str, root: Path = Path("/")) -> str:
    """What to do about a failure of bubblewrap. `root` is where the system's files are."""
    if "thread" in message or "Resource temporarily unavailable" in message:
        return _OLD_KERNEL
    for cause in _SETTINGS:
        path = root / cause.setting.lstrip("/")
        if path.is_file() and path.read_text().strip() == cause.value:
            return cause.says
    refusals = ("Read-only file system", "Operation not permitted", "Permission denied", "No permissions")
    if any(words in message for words in refusals):
        return _CONTAINER
    return "The cause is not a known one: see docs/graders.md"
