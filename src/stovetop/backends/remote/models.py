"""The base models of a server, and what is known of them: names and contexts by the protocol; a server of ours says
more, so that what a local backend refuses is refused here too, before it is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stovetop.engine import ops
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.input_checks import ModelLimits
from stovetop.losses import Loss, LossConfig, temperature_of
from stovetop.model_store import canonical_name
from stovetop.types import GetServerCapabilitiesResponse

UNKNOWN = 2**31 - 1  # tokens, or ids: what the wire can carry, where a server does not say


@dataclass(frozen=True, slots=True)
class ServerModels:
    """What one server has said."""

    capabilities: GetServerCapabilitiesResponse
    described: Mapping[str, ops.Description] = field(default_factory=dict[str, ops.Description])  # by name
    reads_temperature: bool = False  # in the config of a loss
    spoils: bool = False  # losses.SPOIL

    @classmethod
    def of(cls, capabilities: GetServerCapabilitiesResponse, said: Mapping[str, Any] | None) -> "ServerModels":
        """`said` is what a server of ours says of itself, which others have not."""
        if said is None:
            return cls(capabilities)
        described = {model["name"]: _description(model) for model in said["models"]}
        return cls(capabilities, described, said["reads_temperature"], said["spoils"])

    def name_of(self, base_model: str) -> str:
        """The server's name of a base model, which may be given by its alias. Refuses one that it has not."""
        names = [model.model_name for model in self.capabilities.supported_models if model.model_name is not None]
        for name in (base_model, canonical_name(base_model)):
            if name in names:
                return name
        raise UnknownName("base_model", base_model, names, hint="These are the server's")

    def description(self, name: str) -> ops.Description:
        """What is known of a model of this name."""
        if name in self.described:
            return self.described[name]
        lengths = {model.model_name: model.max_context_length for model in self.capabilities.supported_models}
        limits = ModelLimits(name, vocab_size=UNKNOWN, context_length=lengths.get(name) or UNKNOWN)
        return ops.Description(limits, "", None)

    def sent_config(self, loss: Loss, config: LossConfig | None) -> dict[str, float] | None:
        """The config of a loss, as this server reads it."""
        sent = dict(config or {})
        if not self.reads_temperature and temperature_of(loss) != 1.0:
            raise InvalidRequest(
                "loss_fn_config: this server does not say that it reads the temperature of a loss, which the protocol "
                f"has not; sample and train at 1, or on a server of stovetop: {temperature_of(loss)}"
            )
        if not self.reads_temperature:
            sent.pop("temperature", None)
        return sent or None


def _description(said: Mapping[str, Any]) -> ops.Description:
    limits = ModelLimits(said["name"], said["vocab_size"], said["context_length"], said["longest_sequence"])
    return ops.Description(limits, said["fingerprint"], None, said["untrainable"])
