"""A published evaluation harness, lm-evaluation-harness, pointed at the OpenAI endpoint. Not among the tests, for what
it needs is in no extra: .ci/run installs that in a folder of its own and runs this file.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from running import KEY, running

from engine import tiny
from stovetop.backends import local
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.types import ModelInput

ROWS = '{"question": "Two and two", "choices": [" four", " five"], "answer": 0}\n'
MULTIPLE_CHOICE = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}} is",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
}
GENERATED = {
    "task": "said",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "four",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0.0},
}


def test_lm_evaluation_harness_scores_choices_and_draws_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    files = {"test": str(tmp_path / "rows.jsonl")}
    data = {"dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")}}
    folder = str(tiny.save_model(tmp_path / "model", tiny.llama(0)))

    def open_service(storage: Path) -> InProcessServiceClient:
        return local.open_service(
            storage=storage, models={"tiny": folder}, preload=True, threads=1, deterministic=True, download=None
        )

    with running(tmp_path / "server", open_service) as server:
        scored = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="tiny",
            tokenizer=folder,
            tokenizer_backend="huggingface",
            max_length=200,
        )
        chats = LocalChatCompletion(base_url=f"{server.url}/v1/chat/completions", model="tiny", tokenizer_backend=None)
        choices = evaluated(lm_eval, scored, {**MULTIPLE_CHOICE, **data})
        said = evaluated(lm_eval, chats, {**GENERATED, **data}, apply_chat_template=True)
    (row,) = choices["samples"]["sums"]
    told = [answer[0][0] if isinstance(answer[0], (list, tuple)) else answer[0] for answer in row["resps"]]
    assert told == pytest.approx(expected(folder), abs=1e-4)
    (generated,) = said["samples"]["said"]
    assert isinstance(generated["resps"][0][0], str)


def evaluated(lm_eval: Any, model: Any, task: dict[str, Any], **options: Any) -> dict[str, Any]:
    known = lm_eval.tasks.TaskManager(include_defaults=False)  # thousands of files
    return lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=known, bootstrap_iters=0, **options)


def expected(folder: str) -> list[float]:
    """What the engine says of the two choices, asked in process."""
    with local.open_service(models={"tiny": folder}, threads=1, deterministic=True, download=None) as service:
        client = service.create_sampling_client(base_model="tiny").result()
        tokenizer, sums = client.get_tokenizer(), list[float]()
        for choice in (" four", " five"):
            before, whole = (tokenizer.encode(text) for text in ("Two and two is", f"Two and two is{choice}"))
            logprobs = client.compute_logprobs(ModelInput.from_ints(whole)).result()
            sums.append(math.fsum(each or 0.0 for each in logprobs[len(before) :]))
    return sums
