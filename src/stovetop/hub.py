"""Whether the Hugging Face hub answers. Its own client asks again for half a minute where there is no network; here one
question with a time limit comes first, so that a name that is only there is refused at once.

The hub's own settings apply: HF_HUB_OFFLINE, HF_ENDPOINT, proxies.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ANSWERS_WITHIN_S = 1.5  # a hub that takes longer for a request without content is of no use for a download


_SWITCH = threading.RLock()  # protects the libraries' switch, so that two models that load at once leave it as it was


def why_unreachable() -> str | None:
    """Why the hub cannot be asked for anything now, in words; None when it answers, whatever it says."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    problems: list[str] = ["it did not answer in time"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWERS_WITHIN_S)
            problems.clear()
        except Exception as error:  # whatever it is, and the library below has changed, it is the answer
            problems[:] = [str(error) or type(error).__name__]

    # A thread, for looking up the name of a host has no time limit of its own. It ends with the process.
    thread = threading.Thread(target=ask, daemon=True, name="is the hub there")
    thread.start()
    thread.join(ANSWERS_WITHIN_S + 0.5)
    return f"{constants.ENDPOINT} cannot be reached: {problems[0]}" if problems else None


@contextmanager
def asking(unless_here: str | Path | None = None) -> Generator[str | None]:
    """Within, the hub's libraries use what is in their caches and ask for nothing if the hub cannot be reached; gives
    the reason then. Nothing is different, and nothing asked, where `unless_here` is a folder of this machine."""
    if unless_here is not None and Path(unless_here).is_dir():
        yield None
        return
    from huggingface_hub import constants

    with _SWITCH:
        problem = why_unreachable()
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = problem is not None  # their own switch, which has no narrower form for all of them
        try:
            yield problem
        finally:
            constants.HF_HUB_OFFLINE = before
