"""Which base models an embedded service has, under which names, and where each of them is."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stovetop.arguments import is_path
from stovetop.checks import take
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.model_store import Download, canonical_name, check_findable, find_model, is_findable, known_models
from stovetop.rules import Text

_NAME = Text("the name of a base model, a string", is_path)


class LocalModels:
    """See `opened_base.BaseModels`. `places` says by name where the models are, and so which there are; with None, each
    that is on this machine is one, and each that `download` brings."""

    def __init__(self, places: Mapping[str, str | Path] | None, download: Download | None) -> None:
        self._places = None if places is None else {name: str(place) for name, place in places.items()}
        self._download = download
        for name, place in (self._places or {}).items():
            take(_NAME, name, "models: each key")
            if not is_findable(place, download):
                raise InvalidRequest(f"models[{name!r}] must be a folder with config.json or a .gguf file: {place!r}")

    def name_of(self, base_model: str) -> str:
        if self._places is None:
            check_findable(base_model, self._download)
            return canonical_name(base_model)
        if base_model in self._places:
            return base_model
        found = find_model(base_model)  # a state may name the same model by its place
        for name, place in self._places.items():
            if found is not None and found == find_model(place):
                return name
        raise UnknownName("base_model", base_model, self._places)

    def names(self) -> list[str]:
        return known_models() if self._places is None else list(self._places)

    def place_of(self, name: str) -> str:
        """What `model_store.require_model` finds the model by."""
        return name if self._places is None else self._places[name]

    @contextmanager
    def naming(self, name: str) -> Generator[None]:
        """What is refused within is told by the model's name, where it is not the place: that is no business of its
        clients."""
        try:
            yield
        except InvalidRequest as error:
            if self._places is None:
                raise
            message = str(error)
            for place in {str(find_model(self._places[name])), self._places[name]}:
                message = message.replace(place, repr(name))
            raise InvalidRequest(message) from error
