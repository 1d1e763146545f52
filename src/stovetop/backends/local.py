"""The embedded backend: an engine in this process, on a CPU or one GPU. Nothing to start, nothing to sign up for."""

import logging
from pathlib import Path
from typing import Literal

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.client import UserMetadata
from stovetop.durable import LOCAL_DISK, Disk
from stovetop.engine import ops
from stovetop.errors import InvalidRequest
from stovetop.model_store import known_models, require_model

log = logging.getLogger(__name__)


def open_service(
    *,
    storage: str | Path | None = None,
    user_metadata: UserMetadata | None = None,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    threads: int | Literal["probe"] | None = None,
    max_tokens_per_pass: int = 4096,
    disk: Disk = LOCAL_DISK,
) -> InProcessServiceClient:
    """A service whose base models run here.

    `storage` is where states are saved (default ~/.stovetop). `dtype` is that of the base weights; adapters and
    optimizer are float32 in any case. `threads` is how many the engine computes with: "probe" takes two seconds to find
    the fastest number, None leaves the choice to torch; the setting is the process's.
    `max_tokens_per_pass` bounds the activations of a training pass: lower it when memory is short.
    """
    if max_tokens_per_pass < 1:
        raise InvalidRequest(f"max_tokens_per_pass must be positive: {max_tokens_per_pass}")

    def open_engine(base_model: str) -> ops.Engine:
        import torch

        from stovetop.engine.engine import Engine
        from stovetop.engine.model import load_model
        from stovetop.engine.threads import fastest_threads

        if threads == "probe":
            log.info("computing with %d threads", fastest_threads())
        elif threads is not None:
            torch.set_num_threads(threads)
        model = load_model(require_model(base_model), base_model, device=device, dtype=dtype)
        return Engine(model, max_tokens_per_pass=max_tokens_per_pass, disk=disk)

    folder = Path.home() / ".stovetop" if storage is None else Path(storage)
    return InProcessServiceClient(open_engine, folder, models=known_models, user_metadata=user_metadata)
