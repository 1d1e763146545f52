"""What a RestClient says of the runs whose checkpoints lie on this machine."""

import asyncio
import shutil
from pathlib import Path

import pytest

import stovetop as tinker
from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import CheckpointError, CheckpointNotFound, InvalidRequest, TornCheckpoint


def open_run(folder: Path, **metadata: str) -> TrainingClient:
    service = tinker.ServiceClient("recording", storage=folder, user_metadata={"who": "me"}, project_id="p")
    return service.create_lora_training_client("any/model", rank=4, user_metadata=metadata).result()


def test_what_a_killed_service_was_saving_is_cleared_by_the_next_one_on_its_storage(tmp_path: Path) -> None:
    with tinker.ServiceClient("recording", storage=tmp_path) as service:
        client = service.create_lora_training_client("any/model").result()
        paths = [Path(client.save_state(name).result().path) for name in ("whole", "replaced")]
        paths.append(Path(client.save_weights_for_sampler("whole").result().path))
    for path in paths:
        shutil.copytree(path, path.with_name(".torn.writing-12345678"), dirs_exist_ok=True)
    paths[1].rename(paths[1].with_name(".replaced.replaced-12345678"))
    with tinker.ServiceClient("recording", storage=tmp_path) as service:
        assert sorted(path for path in tmp_path.glob("checkpoints/*/*/*")) == sorted(paths)
        for path in paths:
            service.create_sampling_client(str(path)).result()


def test_a_run_is_known_from_its_creation_on_and_after_its_process(tmp_path: Path) -> None:
    with tinker.ServiceClient("recording", storage=tmp_path, user_metadata={"who": "me"}) as service:
        client = service.create_lora_training_client("any/model", rank=4, user_metadata={"renderer_name": "r"}).result()
        live = service.create_rest_client().get_training_run(client.model_id).result()
        state = client.save_state("000001", ttl_seconds=60).result().path
        weights = client.save_weights_for_sampler("000001").result().path
    assert (live.base_model, live.lora_rank, live.last_checkpoint) == ("any/model", 4, None)
    later = tinker.RestClient(base_url="recording", storage=tmp_path)
    for path in (state, weights):
        run = later.get_training_run_by_tinker_path(path).result()
        assert run.training_run_id == client.model_id
        assert run.user_metadata == live.user_metadata == {"who": "me", "renderer_name": "r"}
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.tinker_path == state
        assert run.last_sampler_checkpoint is not None
        assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/000001"
        assert run.last_sampler_checkpoint.expires_at is None
    kept_s = run.last_checkpoint.expires_at - run.last_checkpoint.time if run.last_checkpoint.expires_at else None
    assert kept_s is not None
    assert kept_s.total_seconds() == 60
    assert later.get_training_run(client.model_id).result().training_run_id == client.model_id


@pytest.mark.parametrize("save", ["save_state", "save_weights_for_sampler"])
def test_a_copy_that_lies_elsewhere_names_the_run_that_saved_it(tmp_path: Path, save: str) -> None:
    client = open_run(tmp_path / "ours", renderer_name="r")
    copied = shutil.copytree(getattr(client, save)("s").result().path, tmp_path / "moved" / "best")
    run = tinker.RestClient(base_url="recording").get_training_run_by_tinker_path(str(copied)).result()
    assert (run.training_run_id, run.base_model) == (client.model_id, "any/model")
    assert run.user_metadata == {"who": "me", "renderer_name": "r"}
    last = run.last_checkpoint if save == "save_state" else run.last_sampler_checkpoint
    assert last is not None
    assert last.tinker_path == str(copied)


def test_the_methods_of_older_sdks_are_coroutines(tmp_path: Path) -> None:
    client = open_run(tmp_path)
    state = client.save_state("s").result().path
    rest = tinker.RestClient(base_url="recording", storage=tmp_path)

    async def ask() -> str:
        assert (await rest.get_training_run_by_tinker_path(state)).training_run_id == client.model_id
        return (await rest.get_training_run_by_tinker_path_async(state)).training_run_id  # pyright: ignore

    assert asyncio.run(ask()) == client.model_id


def test_weights_tell_what_client_they_are_for(tmp_path: Path) -> None:
    service = tinker.ServiceClient("recording", storage=tmp_path)
    client = service.create_lora_training_client("any/model", rank=4, train_mlp=False).result()
    info = service.create_rest_client().get_weights_info_by_tinker_path(client.save_state("s").result().path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("any/model", True, 4)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (False, True, True)


def test_checkpoints_are_listed_the_latest_first_and_in_parts(tmp_path: Path) -> None:
    first, second = open_run(tmp_path), open_run(tmp_path)
    for name, client in (("a", first), ("b", second), ("c", first)):
        client.save_state(name).result()
    rest = tinker.RestClient(base_url="recording", storage=tmp_path)
    of_first = rest.list_checkpoints(first.model_id).result().checkpoints
    assert [checkpoint.checkpoint_id for checkpoint in of_first] == ["weights/c", "weights/a"]
    part = rest.list_user_checkpoints(limit=1, offset=1).result()
    assert [checkpoint.checkpoint_id for checkpoint in part.checkpoints] == ["weights/b"]
    assert part.cursor == tinker.types.Cursor(offset=1, limit=1, total_count=3)
    runs = rest.list_training_runs().result().training_runs
    assert [run.training_run_id for run in runs] == [first.model_id, second.model_id]
    assert rest.list_training_runs(project_id="p").result().training_runs == runs
    assert rest.list_training_runs(project_id="other").result().training_runs == []
    with pytest.raises(InvalidRequest, match="limit must be an integer of at least 0: -1"):
        rest.list_user_checkpoints(limit=-1)


def test_a_checkpoint_is_deleted_where_the_service_saves_and_nowhere_else(tmp_path: Path) -> None:
    client, elsewhere = open_run(tmp_path / "ours"), open_run(tmp_path / "theirs")
    kept, gone = client.save_state("kept").result().path, client.save_state("gone").result().path
    other = elsewhere.save_state("s").result().path
    rest = tinker.RestClient(base_url="recording", storage=tmp_path / "ours")
    rest.delete_checkpoint_from_tinker_path(gone).result()
    assert not Path(gone).exists()
    for path in (other, str(Path(kept).parent), str(tmp_path), f"{kept}/../../.."):
        with pytest.raises(InvalidRequest, match="only checkpoints of this service are deleted"):
            rest.delete_checkpoint_from_tinker_path(path)
    with pytest.raises(InvalidRequest, match="only checkpoints of this service"):
        rest.delete_checkpoint(client.model_id, "../../..")
    with pytest.raises(CheckpointNotFound):
        rest.delete_checkpoint(client.model_id, "weights/gone")
    assert Path(kept).is_dir()
    assert Path(other).is_dir()
    rest.delete_checkpoint(client.model_id, "weights/kept").result()
    assert not Path(kept).exists()


def test_what_is_not_there_or_not_ours_is_refused_so_that_a_loop_can_catch_it(
    tmp_path: Path, service: ServiceClient
) -> None:
    rest = service.create_rest_client()
    client = service.create_lora_training_client("any/model").result()
    path = Path(client.save_state("s").result().path)
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run_by_tinker_path(str(tmp_path / "nothing"))
    with pytest.raises((tinker.TinkerError, ValueError), match="'no-such-run'"):
        rest.get_training_run("no-such-run")
    with pytest.raises((tinker.TinkerError, ValueError)):
        rest.get_training_run("..")
    with pytest.raises(InvalidRequest, match="access_scope must be 'owned' or 'accessible'"):
        rest.get_training_run(client.model_id, access_scope="all")  # pyright: ignore
    foreign = tmp_path / "adapter"
    shutil.copytree(path, foreign)
    (foreign / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="was not saved by a training client"):
        rest.get_training_run_by_tinker_path(str(foreign))
    (path / "manifest.json").write_text("{}")
    with pytest.raises(TornCheckpoint):
        rest.get_training_run_by_tinker_path(str(path))
    whole = client.save_state("whole").result().path
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [whole]


def test_the_path_of_a_checkpoint_names_its_run(tmp_path: Path) -> None:
    client = open_run(tmp_path)
    path = client.save_weights_for_sampler("final").result().path
    parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.training_run_id == client.model_id
    assert (parsed.checkpoint_type, parsed.checkpoint_id) == ("sampler", "sampler_weights/final")
    same = tinker.ParsedCheckpointTinkerPath.from_tinker_path("tinker://run:train:0/weights/000020")
    assert (same.training_run_id, same.checkpoint_type) == ("run:train:0", "training")
    with pytest.raises(ValueError, match="ends in <run>/weights/<name>"):
        tinker.ParsedCheckpointTinkerPath.from_tinker_path("checkpoints/final")


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 300, "a\0b", "a/b", "/etc"])
def test_a_name_that_no_run_can_have_is_not_found(service: ServiceClient, name: str) -> None:
    rest = service.create_rest_client()
    for ask in (rest.get_training_run, rest.list_checkpoints):
        with pytest.raises(tinker.NotFoundError, match="no run of this name"):
            ask(name)
