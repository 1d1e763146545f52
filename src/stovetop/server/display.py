"""What a server shows while it runs: one line of what is going on."""

from dataclasses import dataclass

from stovetop.server.recovery import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What a server does at a moment."""

    at_s: float  # monotonic
    num_clients: int  # sessions that are alive
    num_steps: int  # since the start, as the tokens
    num_tokens: int
    num_queued: int  # requests that are not done
    num_queued_tokens: int


def look(parts: Parts, at_s: float) -> Now:
    """Now."""
    done, load = parts.activity.done, parts.limits.load
    return Now(
        at_s=at_s,
        num_clients=parts.sessions.num_alive(),
        num_steps=done.num_steps,
        num_tokens=done.num_tokens,
        num_queued=load.num_requests,
        num_queued_tokens=load.num_tokens,
    )


def line(before: Now, now: Now) -> str:
    """What is going on, with the speed between these two moments."""
    seconds = max(1e-3, now.at_s - before.at_s)
    tokens_per_s = (now.num_tokens - before.num_tokens) / seconds
    return (
        f"clients {now.num_clients} · steps {now.num_steps:,} · tokens/s {tokens_per_s:,.0f} · "
        f"queue {now.num_queued:,} requests, {now.num_queued_tokens:,} tokens"
    )
