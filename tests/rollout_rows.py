"""Rollouts as rows, made up: for tests of their files, of their pages and of what shows them."""

import zlib
from typing import Any

import numpy as np

from stovetop.tracking.rollout_rows import Kind, RolloutRow


def row(answer: str = "four", /, *, step: int = 0, group: int = 0, member: int = 0, **values: Any) -> RolloutRow:
    """A question and an answer of one token a word, trained on."""
    pieces = ["what", " is", " 2+2?", *(f" {word}" for word in answer.split(" "))]
    num_tokens = len(pieces) - 3
    chat = [{"role": "user", "content": "what is 2+2?"}, {"role": "assistant", "content": answer}]
    given: dict[str, Any] = {
        "split": "train",
        "step": step,
        "group_idx": group,
        "traj_idx": member,
        "prompt": f"{group:012d}",
        "tags": ["sums"],
        "policy_step": step,
        "reward": 1.0,
        "final_reward": 0.25,
        "advantage": 0.5,
        "stop_reason": "completed",
        "num_turns": 1,
        "num_prompt_tokens": 3,
        "num_tokens": num_tokens,
        "metrics": {"correct": 1.0},
        "prompt_text": "what is 2+2?",
        "answer": f" {answer}",
        "chat": chat,
        "turns": [turn(num_observed=3, num_sampled=num_tokens)],
        "notes": [],
        "pieces": pieces,
        "kinds": [int(Kind.OBSERVED)] * 3 + [int(Kind.TRAINED)] * num_tokens,
        "token_ids": [zlib.crc32(piece.encode()) % 50_000 for piece in pieces],
        "logprobs": [-0.5] * num_tokens,
        "trained_logprobs": [-0.51] * num_tokens,
        "advantages": [0.5] * num_tokens,
    }
    return RolloutRow(**{**given, **values})


def turn(reward: float = 0.75, **values: Any) -> dict[str, Any]:
    given = {"num_observed": 3, "num_sampled": 2, "reward": reward, "metrics": {}, "logs": {}, "stop_reason": "stop"}
    return {**given, "trainable": True, **values}


def long_rows(num_groups: int, group_size: int, num_tokens: int) -> list[RolloutRow]:
    """Answers of many tokens: words of a vocabulary of ordinary size, in ordinary shares, with noise for logprobs."""
    draws = np.random.default_rng(0)
    lengths = draws.integers(1, 7, 20_000)  # with their spaces 4.5 bytes a token
    words = ["".join(map(chr, draws.integers(97, 123, length))) for length in lengths]
    rows: list[RolloutRow] = []
    for group in range(num_groups):
        for member in range(group_size):
            numbers = (draws.zipf(1.2, num_tokens) - 1) % len(words)
            logprobs = -draws.exponential(0.6, num_tokens)
            trained = logprobs + draws.normal(0, 2e-3, num_tokens)
            rows.append(
                row(
                    " ".join(words[number] for number in numbers),
                    group=group,
                    member=member,
                    reward=float(draws.normal()),
                    logprobs=[round(float(value), 6) for value in logprobs],
                    trained_logprobs=[round(float(value), 6) for value in trained],
                )
            )
    return rows
