"""The paths that the Tinker protocol gives to checkpoints: tinker://MODEL/KIND/NAME."""

SCHEME = "tinker://"


def path_of(model_id: str, kind: str, name: str) -> str:
    """Of a checkpoint of this training client. `kind` is weights, sampler_weights or external_weights."""
    return f"{SCHEME}{model_id}/{kind}/{name}"
