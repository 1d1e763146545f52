"""The reference of a policy: which frozen weights it is compared with. What these make of data is in
supervised.logprobs.
"""

from pathlib import Path
from typing import NamedTuple

from stovetop.checkpoints import Start, resume_or_create
from stovetop.client import SamplingClient, ServiceClient
from stovetop.errors import InvalidRequest
from stovetop.futures import ClientFuture
from stovetop.tokenizing import Tokenizer


def create_reference_client(
    service: ServiceClient, model_name: str, load_checkpoint_path: str | None = None
) -> ClientFuture[SamplingClient]:
    """A base model as it is, or a saved checkpoint of it."""
    if load_checkpoint_path is None:
        return service.create_sampling_client(base_model=model_name)
    return service.create_sampling_client(model_path=load_checkpoint_path)


class DPOClients(NamedTuple):
    """What a run of DPO works with."""

    start: Start  # the policy, and where its loop begins
    reference: SamplingClient


async def create_dpo_clients(
    service: ServiceClient,
    log_dir: str | Path,
    *,
    model_name: str,
    lora_rank: int = 32,
    seed: int | None = None,
    load_checkpoint_path: str | None = None,
    reference_model_name: str | None = None,
) -> DPOClients:
    """The policy of a run, new or resumed, and its reference: `reference_model_name` as it is, or else the weights that
    the policy began with. The reference is never made from the policy, so a resumed run has the one it always had."""
    start = await resume_or_create(
        service,
        log_dir,
        model_name=model_name,
        lora_rank=lora_rank,
        seed=seed,
        load_checkpoint_path=load_checkpoint_path,
    )
    if reference_model_name is None:
        return DPOClients(start, await create_reference_client(service, model_name, load_checkpoint_path))
    reference = await create_reference_client(service, reference_model_name)
    check_same_tokenizer(start.training_client.get_tokenizer(), reference.get_tokenizer(), reference_model_name)
    return DPOClients(start, reference)


_PROBE = "The 2nd naïve 雪 costs 1234.50 €\n\n\tif (x_1 != y)  {return 'ok';}"


def check_same_tokenizer(tokenizer: Tokenizer, other: Tokenizer, name: str) -> None:
    """Refuses a model, called `name`, whose token ids mean something else: its logprobs would be of another text."""
    same = (
        len(tokenizer) == len(other)
        and tokenizer.get_added_vocab() == other.get_added_vocab()
        and tokenizer.encode(_PROBE, add_special_tokens=False) == other.encode(_PROBE, add_special_tokens=False)
    )
    if not same:
        raise InvalidRequest(
            f"the tokenizer is not that of the model in training, so the same tokens are another text; choose a model "
            f"of the same family: {name!r}"
        )
