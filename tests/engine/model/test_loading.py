"""Files of a base model: whole and fitting, or refused by the model's name before anything is computed."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import tiny
from stovetop.engine.model.loading import fingerprint, load_model
from stovetop.errors import InvalidRequest
from test_fetch import SHAPES, write_gguf

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[3, 5] = value
    return changed


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda found: found.pop(Q_PROJ), rf"lacks: {Q_PROJ}"),
    "missing head": (lambda found: found.pop("lm_head.weight"), r"lacks: lm_head\.weight"),
    "left over": (lambda found: found.update(extra=torch.ones(2)), r"gives no place: extra"),
    "renamed": (lambda found: found.update({"q": found.pop(Q_PROJ)}), rf"lacks: {Q_PROJ}; .*no place: q"),
    "of another shape": (
        lambda found: found.update({Q_PROJ: found[Q_PROJ][:32].clone()}),
        rf"another shape .*{Q_PROJ} is \(32, 64\), not \(64, 64\)",
    ),
    "NaN": (lambda found: found.update({Q_PROJ: with_value(found[Q_PROJ], float("nan"))}), rf"NaN .* in {Q_PROJ}"),
    "infinite": (
        lambda found: found.update({Q_PROJ: with_value(found[Q_PROJ], float("-inf"))}),
        rf"infinity in {Q_PROJ}",
    ),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_not_what_the_config_says_are_named(folder: Path, kind: str) -> None:
    change, told = TENSORS[kind]
    change_tensors(folder, change)
    with pytest.raises(InvalidRequest, match=rf"'mine'.*{told}"):
        load_model(folder, "mine")


def test_numbers_whose_sum_overflows_are_finite(folder: Path) -> None:
    change_tensors(folder, lambda found: found["model.embed_tokens.weight"][500].fill_(3e37))
    load_model(folder, "mine", deterministic=False)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_hidden_layers": 3}, r"lacks: model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"no place: model\.layers\.1\."),
        ({"num_key_value_heads": 4}, r"another shape .*k_proj\.weight is \(32, 64\), not \(64, 64\)"),
        ({"vocab_size": 600}, r"another shape .*embed_tokens"),
        ({"attention_bias": True}, r"lacks: model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be at least 8 .*: 1"),
        ({"model_type": "nothing"}, "cannot read config.json"),
        ({"hidden_size": "wide"}, r"cannot read config\.json"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(folder: Path, values: dict[str, Any], told: str) -> None:
    change_config(folder, **values)
    with pytest.raises(InvalidRequest, match=rf"'mine'.*{told}"):
        load_model(folder, "mine")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: cut_off(folder / WEIGHTS), r"model\.safetensors is damaged or cut off"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), r"model\.safetensors is damaged or cut off"),
        (lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
        (lambda folder: cut_off(folder / "config.json"), r"config\.json is not readable JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), r"config\.json must hold an object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), r"config\.json is not readable JSON"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is not readable JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), r"cannot read config\.json"),
        (lambda folder: cut_off(folder / "tokenizer.json"), "tokenizer's files"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), r"adapter_config\.json beside"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_models_name_and_the_file(
    folder: Path, damage: Callable[[Path], Any], told: str
) -> None:
    damage(folder)
    with pytest.raises(InvalidRequest, match=rf"'mine'.*{told}"):
        load_model(folder, "mine")


def test_a_shard_that_is_missing_is_refused(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path, max_shard_size="60KB")
    whole = fingerprint(tmp_path)
    load_model(tmp_path, "mine", deterministic=False)
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    assert fingerprint(tmp_path) != whole
    with pytest.raises(InvalidRequest, match="'mine'"):
        load_model(tmp_path, "mine")


def save_in_bin(folder: Path, seed: int) -> Path:
    model = tiny.llama(seed)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_weights_in_bin_files_tell_models_apart(tmp_path: Path) -> None:
    one, same, other = (save_in_bin(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert load_model(one, "one", deterministic=False).fingerprint == fingerprint(same) != fingerprint(other)


def test_bin_files_are_checked_as_the_others_are(tmp_path: Path) -> None:
    folder = save_in_bin(tmp_path / "model", 0)
    tensors = torch.load(folder / "pytorch_model.bin")
    torch.save({name: tensor for name, tensor in tensors.items() if name != Q_PROJ}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match=rf"'mine' lacks: {Q_PROJ}"):
        load_model(folder, "mine")
    cut_off(folder / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match=r"'mine': transformers cannot read pytorch_model\.bin"):
        load_model(folder, "mine")


def test_weights_whose_file_the_config_names_tell_models_apart(tmp_path: Path) -> None:
    marks = set()
    for seed in range(2):
        folder = tiny.save_model(tmp_path / str(seed), tiny.llama(seed))
        (folder / "sub").mkdir()
        (folder / WEIGHTS).rename(folder / "sub" / "mine.safetensors")
        change_config(folder, transformers_weights="sub/mine.safetensors")
        marks.add(load_model(folder, "mine", deterministic=False).fingerprint)
    assert len(marks) == 2


def test_a_head_tied_to_the_embedding_and_frequencies_of_old_files_are_no_fault(tmp_path: Path) -> None:
    tied = tiny.save_model(tmp_path, tiny.llama(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tied / WEIGHTS)
    change_tensors(tied, lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_model(tied, "mine", deterministic=False)


@pytest.mark.parametrize("damage", [cut_off, lambda path: path.write_bytes(b"GGUF")])
def test_a_gguf_file_that_is_cut_off_is_refused_by_the_models_name(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    write_gguf(tmp_path / "model.gguf")
    damage(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequest, match="'mine': transformers cannot read"):
        load_model(tmp_path / "model.gguf", "mine")


def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_the_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SHAPES, "blk.0.attn_q.weight")
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequest, match=r"'mine' lacks: model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_model(tmp_path / "model.gguf", "mine")


@pytest.mark.slow
def test_models_that_load_at_once_leave_the_library_as_it_was(tmp_path: Path) -> None:
    """While it makes a model the library turns off, for the whole process, what others rely on."""
    from transformers import PreTrainedModel

    def globals_of_the_library() -> list[object]:
        return [torch.get_default_dtype(), PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.linspace]

    folders = [tiny.save_model(tmp_path / str(seed), tiny.llama(seed)) for seed in range(2)]
    before, alone = globals_of_the_library(), [load_model(folder, "m").fingerprint for folder in folders]
    with ThreadPoolExecutor(4) as pool:
        loaded = list(
            pool.map(lambda n: load_model(folders[n % 2], "m", dtype=["float32", "bfloat16"][n // 2]), range(4))
        )
    assert globals_of_the_library() == before
    assert [model.fingerprint for model in loaded] == alone * 2
