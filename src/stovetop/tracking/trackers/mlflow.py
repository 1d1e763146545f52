# pyright: basic
"""MLflow: the server that the config names, `mlflow:http://host:5000`, or that of MLFLOW_TRACKING_URI; else MLflow's
own database in the current folder."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stovetop.extras import import_extra
from stovetop.tracking.trackers import PROJECT, Place

_KEY = "stovetop.key"  # the tag by which a run is found again
_MAX_VALUE = 500  # characters of a parameter, which all servers take
_MAX_PARAMS = 100  # in one request


class MLflowTracker:
    """See `Tracker`."""

    def __init__(self, client: Any, run: Any, entities: Any) -> None:
        self._client = client
        self._run = run.info
        self._entities = entities

    def log_hparams(self, config: Mapping[str, float | str]) -> None:
        """A parameter cannot change there: of a run that goes on, the changed fields are tags."""
        known = self._client.get_run(self._run.run_id).data.params
        texts = {_allowed(name): str(value)[:_MAX_VALUE] for name, value in config.items()}
        new = [self._entities.Param(name, value) for name, value in texts.items() if name not in known]
        for first in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run.run_id, params=new[first : first + _MAX_PARAMS])
        for name, value in texts.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run.run_id, f"changed.{name}", value)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        values = [self._entities.Metric(_allowed(name), float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run.run_id, metrics=values)

    def log_long_text(self, title: str, text: str) -> None:
        self._client.log_text(self._run.run_id, text, f"texts/{_allowed(title).replace('/', '_')}.md")

    def log_file(self, path: Path) -> None:
        folder = path.parent.name if path.parent.name.startswith("iteration_") else None
        self._client.log_artifact(self._run.run_id, str(path), folder)

    def sync(self) -> None:
        pass  # each call returns when the server has it

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run.run_id, "FAILED" if failed else "FINISHED")

    def get_logger_url(self) -> str | None:
        uri = self._client.tracking_uri
        is_address = uri.startswith(("http://", "https://"))
        return f"{uri}/#/experiments/{self._run.experiment_id}/runs/{self._run.run_id}" if is_address else None


def open_mlflow(place: Place) -> MLflowTracker:
    mlflow = import_extra("mlflow", "mlflow")
    is_address = place.project is not None and "/" in place.project
    client = mlflow.MlflowClient(place.project if is_address else None)
    name = PROJECT if is_address or place.project is None else place.project
    experiment = client.get_experiment_by_name(name)
    experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
    found = client.search_runs([experiment_id], f"tags.`{_KEY}` = '{place.key}'")
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
    run = found[0] if found else client.create_run(experiment_id, run_name=place.name, tags={_KEY: place.key})
    return MLflowTracker(client, run, mlflow.entities)


def _allowed(name: str) -> str:
    """Of the characters that MLflow takes in names."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)
