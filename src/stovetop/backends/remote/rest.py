# pyright: basic
"""What was saved at a server, as the SDK's RestClient tells. What saves of this service that were accepted before will
change is asked when they are done."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import tinker

from stovetop.arguments import AccessScope, AtLeastNone, FolderName, StatePath
from stovetop.backends.older_names import with_older_names
from stovetop.backends.remote import values
from stovetop.backends.remote.connection import Connection
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.saves import OwnSaves, require_path
from stovetop.backends.remote.turns import Turn, Turns
from stovetop.checks import checked
from stovetop.client import RestClient
from stovetop.errors import CheckpointNotFound, RunNotFound, StovetopError
from stovetop.futures import APIFuture
from stovetop.tinker_paths import SCHEME
from stovetop.types import (
    CheckpointsListResponse,
    GetServerCapabilitiesResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)


@with_older_names("rest")
class RemoteRestClient(RestClient):
    """See `client.RestClient`. Made by `over`, since calling a RestClient opens the provider that is named."""

    _connection: Connection
    _saves: OwnSaves
    _require_open: Callable[[str], None]

    @classmethod
    def over(cls, connection: Connection, saves: OwnSaves, require_open: Callable[[str], None]) -> Self:
        """Of what lies at the server; `saves` are on their way there."""
        rest = object.__new__(cls)
        rest._connection = connection
        rest._saves = saves
        rest._require_open = require_open
        return rest

    @checked
    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        return self._ask(
            "get_training_run",
            lambda rest: rest.get_training_run(training_run_id, access_scope),
            values.run_of,
            RunNotFound,
            self._saves.pending(f"{SCHEME}{training_run_id}"),
        )

    @checked
    def get_training_run_by_tinker_path(
        self, tinker_path: StatePath, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        require_path(tinker_path)
        return self._ask(
            "get_training_run_by_tinker_path",
            lambda rest: rest.get_training_run_by_tinker_path(tinker_path, access_scope),
            values.run_of,
            CheckpointNotFound,
            self._saves.pending(tinker_path.rsplit("/", 2)[0]),
        )

    @checked
    def get_weights_info_by_tinker_path(self, tinker_path: StatePath) -> APIFuture[WeightsInfoResponse]:
        require_path(tinker_path)
        return self._ask(
            "get_weights_info_by_tinker_path",
            lambda rest: rest.get_weights_info_by_tinker_path(tinker_path),
            values.weights_info_of,
            CheckpointNotFound,
            self._saves.pending(tinker_path),
        )

    @checked
    def list_training_runs(
        self,
        limit: AtLeastNone = 20,
        offset: AtLeastNone = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        return self._ask(
            "list_training_runs",
            lambda rest: rest.list_training_runs(limit, offset, access_scope, project_id),
            values.runs_of,
            after=self._saves.pending(SCHEME.removesuffix("/")),
        )

    @checked
    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        return self._ask(
            "list_checkpoints",
            lambda rest: rest.list_checkpoints(training_run_id),
            values.checkpoints_of,
            RunNotFound,
            self._saves.pending(f"{SCHEME}{training_run_id}"),
        )

    @checked
    def list_user_checkpoints(
        self, limit: AtLeastNone = 100, offset: AtLeastNone = 0
    ) -> APIFuture[CheckpointsListResponse]:
        return self._ask(
            "list_user_checkpoints",
            lambda rest: rest.list_user_checkpoints(limit, offset),
            values.checkpoints_of,
            after=self._saves.pending(SCHEME.removesuffix("/")),
        )

    @checked
    def delete_checkpoint(self, training_run_id: FolderName, checkpoint_id: FolderName) -> APIFuture[None]:
        return self._delete(
            "delete_checkpoint",
            f"{SCHEME}{training_run_id}/{checkpoint_id}",
            lambda rest: rest.delete_checkpoint(training_run_id, checkpoint_id),
        )

    @checked
    def delete_checkpoint_from_tinker_path(self, tinker_path: StatePath) -> APIFuture[None]:
        require_path(tinker_path)
        return self._delete(
            "delete_checkpoint_from_tinker_path",
            tinker_path,
            lambda rest: rest.delete_checkpoint_from_tinker_path(tinker_path),
        )

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        return self._ask("get_server_capabilities", lambda rest: rest.get_server_capabilities(), values.capabilities_of)

    def _delete(self, verb: str, path: str, ask: Callable[[tinker.RestClient], Any]) -> APIFuture[None]:
        def deleted(_: object) -> None:
            self._saves.forget(path)

        return self._ask(verb, ask, deleted, CheckpointNotFound, self._saves.pending(path))

    def _ask(
        self,
        verb: str,
        ask: Callable[[tinker.RestClient], Any],
        make: Callable[[Any], Any],
        missing: type[StovetopError] | None = None,
        after: "Sequence[Future[Any]]" = (),
    ) -> APIFuture[Any]:
        self._require_open(verb)
        future = self._connection.pending("rest")
        fail = partial(error_of, what=verb) if missing is None else partial(error_of, what=verb, missing=missing)

        def begin() -> None:
            self._connection.bring(ask(self._connection.rest()), future, make, fail)

        Turns().put(Turn(begin, lambda error: future.set_exception(fail(error)), after))
        return APIFuture(future)
