"""The embedded backend: an engine in this process, on a CPU or one GPU. Nothing to start, nothing to sign up for."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from stovetop.arguments import Preload, Storage, UserMetadata
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.local_models import LocalModels
from stovetop.backends.opened_base import to_preload
from stovetop.backends.queues import USUAL_BOUNDS, QueueBounds
from stovetop.backends.saved_runs import RunLabels
from stovetop.checks import checked_as
from stovetop.durable import LOCAL_DISK, Disk
from stovetop.engine import ops
from stovetop.errors import CheckpointError, InvalidRequest
from stovetop.model_store import Download, hub_download, require_model
from stovetop.rules import Anything, Function, Text, Whole

if TYPE_CHECKING:
    from stovetop.engine.files.merge import MergeReport

log = logging.getLogger(__name__)

Untried = Literal["captured_decoding", "ragged_attention"]
Device = Annotated[str, Text("'cpu', 'cuda' or 'cuda:0', 'cuda:1' ...", re.compile(r"cpu|cuda(:\d+)?").fullmatch)]


@checked_as("ServiceClient")
def open_service(
    *,
    storage: Storage | None = None,
    user_metadata: UserMetadata | None = None,
    project_id: str | None = None,
    display_name: str | None = None,
    device: Device = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    deterministic: bool | None = None,
    threads: Annotated[int, Whole(1, 1024)] | Literal["probe"] | None = None,
    max_tokens_per_pass: Annotated[int, Whole(1)] = 4096,
    micro_batch_invariant: bool = False,
    recompute: bool | None = None,
    max_adapter_bytes: Annotated[int, Whole(0, hint="leave it out for half of what is available")] | None = None,
    max_kv_bytes: Annotated[int, Whole(1, hint="leave it out for 0.3 of what is available")] | None = None,
    untried: Sequence[Untried] = (),
    max_queued_calls: Annotated[int, Whole(1)] = USUAL_BOUNDS.max_calls,
    max_queued_tokens: Annotated[int, Whole(1)] = USUAL_BOUNDS.max_tokens,
    models: Mapping[str, Storage] | None = None,
    preload: Preload = False,
    disk: Annotated[Disk, Anything()] = LOCAL_DISK,
    download: Annotated[Download, Function(1, "(name) -> path of a folder")] | None = hub_download,
) -> InProcessServiceClient:
    """A service whose base models run here.

    storage                where states are saved (default ~/.stovetop)
    user_metadata, project_id, display_name
                           go into every checkpoint
    dtype                  of the base weights; adapters and optimizer are float32 in any case
    deterministic          sampler and trainer agree to the bit, whatever runs beside them: on the CPU, checked when the
                           model is loaded. None: in float32, where it holds; True: in bfloat16 too, which takes longer
                           then, and refused where it does not hold
    threads                how many the engine computes with. None: as many as torch takes; "probe": the fastest number,
                           which takes two seconds to find; either on a CPU fewer while other programs keep threads
                           waiting. The setting is the process's
    max_tokens_per_pass    bounds the activations of a training pass: lower it when memory is short
    micro_batch_invariant  one datum a pass, so that gradients have the same bits however data are split over calls;
                           slower for short sequences
    recompute              activations are computed again on the way back instead of kept: less memory, one more forward
                           pass. None: if a full pass would take more than half of the memory that is available
    max_adapter_bytes      that adapters and their optimizers may take before idle ones are moved out of the way: to
                           files in `storage`, or from a GPU to the memory of the host. None: half of what is available
    max_kv_bytes           that keys and values of prompts and samples may take. Samples claim it as they grow; if it
                           runs out, some wait, or leave and go on later, with the same results. A sample without
                           max_tokens ends where the context or this memory ends; a request that would not even fit
                           alone is refused. None: 0.3 of what is available
    max_queued_calls, max_queued_tokens
                           that may wait of one client, tokens to be computed and drawn: one call more is refused with
                           QueueFull
    untried                parts of the engine that have run on no device yet and are off otherwise, by name: see
                           `engine/untried/`. Both are for device="cuda"
    models                 the base models there are, {name: where it is}, a folder or what else a base_model may be.
                           Clients know them by these names alone, which stand in states and messages. None: whatever
                           lies on this machine, or comes by `download`
    preload                the names of models that begin to load now, in the background; True: all of `models`
    download               brings a model, named owner/model, that is not on this machine; None: such a name is refused

    On a CPU the GNU C library is told to keep freed memory, up to 1 GiB, for the next pass. This too is the process's.
    """

    def open_engine(base_model: str) -> ops.Engine:
        import torch

        from stovetop.engine.engine import Engine
        from stovetop.engine.machine import SHARED, keep_freed_memory
        from stovetop.engine.model.loading import load_model
        from stovetop.engine.threads import Threads, fastest_threads

        pack_kernel = record_decoding = None
        if "ragged_attention" in untried:
            from stovetop.engine.untried.ragged_attention import by_ragged_kernel as pack_kernel
        if "captured_decoding" in untried:
            from stovetop.engine.untried.captured import on_cuda as record_decoding
        if device == "cpu":
            keep_freed_memory()
        with SHARED.changed():  # another model may be loading, which tries it on several numbers of threads
            if threads == "probe":
                log.info("computing with %d threads", fastest_threads())
            elif threads is not None:
                torch.set_num_threads(threads)
        with offered.naming(base_model):
            model = load_model(
                require_model(offered.place_of(base_model), download),
                base_model,
                device=device,
                dtype=dtype,
                deterministic=deterministic,
                pack_kernel=pack_kernel,
            )
        return Engine(
            model,
            max_tokens_per_pass=max_tokens_per_pass,
            micro_batch_invariant=micro_batch_invariant,
            recompute=recompute,
            max_adapter_bytes=max_adapter_bytes,
            max_kv_bytes=max_kv_bytes,
            idle_folder=folder,
            disk=disk,
            record_decoding=record_decoding,
            threads=None if isinstance(threads, int) or device != "cpu" else Threads(torch.get_num_threads()),
        )

    if untried and device == "cpu":
        raise InvalidRequest(f"untried must be empty with device='cpu': all of it is for CUDA; leave it out: {untried}")
    offered = LocalModels(models, download)
    labels = RunLabels(user_metadata or {}, display_name, project_id)
    folder = Path.home() / ".stovetop" if storage is None else Path(storage)
    return InProcessServiceClient.over(
        open_engine,
        folder,
        models=offered,
        labels=labels,
        preload=to_preload(preload, models),
        bounds=QueueBounds(max_queued_calls, max_queued_tokens),
    )


def export_merged(
    checkpoint: str, folder: str, *, base_model: str | None = None, dtype: str | None = None
) -> "MergeReport":
    """Writes the base model with the adapter at `checkpoint` merged into it, a folder that transformers loads.

    `base_model` says where the base lies, if not under the name in the checkpoint. `dtype` None stores each weight as
    the base does. Everything that cannot be merged is refused before anything is written.
    """
    import torch

    from stovetop.engine.files.adapter_files import check_head, read_adapter
    from stovetop.engine.files.merge import stored_head, write_merged
    from stovetop.engine.model.loading import fingerprint
    from stovetop.saved_states import base_model_of, describe

    state = describe(Path(checkpoint))
    base = require_model(base_model or base_model_of(Path(checkpoint)))
    if not base.is_dir():
        raise InvalidRequest(
            f"a merged model is written beside the base's own files, which must be safetensors: {base}"
        )
    if state.fingerprint not in (None, fingerprint(base)):
        raise CheckpointError(f"this adapter was trained on {state.base_model!r}, which is not what lies here: {base}")
    saved = read_adapter(Path(checkpoint), with_optimizer=False, device=torch.device("cpu"))
    head_VE = stored_head(base)
    if head_VE is not None:
        check_head(saved.frozen_head_VE, head_VE, Path(checkpoint))
    return write_merged(base, saved.weights, Path(folder), dtype=dtype)
