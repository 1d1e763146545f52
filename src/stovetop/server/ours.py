"""What this server says of itself and the protocol has no word for: what its models can read, so that a client refuses
what they cannot before it is sent, and what of a request it understands beyond the protocol."""

from dataclasses import replace

from stovetop.server.protocol import TINKER, Answer, Asked, Served, as_json
from stovetop.server.recovery import Parts


async def models(parts: Parts, _asked: Asked) -> Answer:
    described = parts.service.descriptions()
    return as_json(
        {
            "reads_temperature": True,  # in the config of a loss
            "spoils": True,  # losses.SPOIL
            "models": [
                {
                    "name": name,
                    "vocab_size": model.limits.vocab_size,
                    "context_length": model.limits.context_length,
                    "longest_sequence": model.limits.longest_sequence,
                    "fingerprint": model.fingerprint,
                    "untrainable": dict(model.untrainable),
                }
                for name, model in described.items()
            ],
        }
    )


OURS = [Served("GET", "models", models, dialect=replace(TINKER, prefix="/stovetop/v1/"))]
