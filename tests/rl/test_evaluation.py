import asyncio
from pathlib import Path

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.problem_env import ProblemDataset, answer_builders

RENDERER = ChatTemplateRenderer(ByteTokenizer())
ROWS = [{"question": f"Spell {letter}", "answer": letter} for letter in "abc"]


def test_every_problem_is_asked_once_for_all_its_environments_and_the_metrics_bear_the_name_of_the_test(tmp_path: Path):
    evaluator = RLTestSetEvaluator(answer_builders(ROWS, RENDERER, 2), max_tokens=3, temperature=0.5, seed=1)
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        metrics = asyncio.run(evaluator(client))
        samples = [call.arguments for call in service.calls if call.verb == "sample"]
        assert asyncio.run(evaluator(client)) == metrics
    assert [sample["num_samples"] for sample in samples] == [2, 2, 2]
    params = [sample["sampling_params"] for sample in samples]
    assert {(of_one.max_tokens, of_one.temperature) for of_one in params} == {(3, 0.5)}
    assert metrics["test/env/all/total_episodes"] == 6
    assert 0 <= metrics["test/env/all/correct"] == metrics["test/env/all/reward/total"] <= 1
    assert all(name.startswith("test/env/all/") for name in metrics)


def test_all_batches_of_a_test_set_are_played(tmp_path: Path):
    problems = ProblemDataset(answer_builders(ROWS, RENDERER, 1), groups_per_batch=1)
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        metrics = asyncio.run(RLTestSetEvaluator(problems, max_tokens=3)(client))
        asked = {call.arguments["prompt"] for call in service.calls if call.verb == "sample"}
    assert metrics["test/env/all/total_episodes"] == len(asked) == 3


def test_two_evaluators_of_one_run_are_told_apart_by_name_and_tags_by_dataset(tmp_path: Path):
    builders = [
        *answer_builders(ROWS[:1], RENDERER, 1, dataset_name="first"),
        *answer_builders(ROWS[1:], RENDERER, 1, dataset_name="rest"),
    ]
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        metrics = asyncio.run(RLTestSetEvaluator(builders, max_tokens=2, name="held_out")(client))
    assert metrics["held_out/env/first/total_episodes"] == 1
    assert metrics["held_out/env/rest/total_episodes"] == 2
