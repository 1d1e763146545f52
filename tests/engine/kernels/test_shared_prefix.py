"""Samples of one prompt share its keys and values."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import tiny
from engine.model.test_attention import mistral
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.kernels.arithmetic import Arithmetic, Fast, RowExact
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.shared_prefix import SharedPrefixes
from stovetop.engine.kernels.sight import How, Seen, Sight
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling import batch
from stovetop.types import ModelInput, SamplingParams

HEADS, GROUPS, SIZE = 6, 2, 16
HOW = How(0.3)


def sample(prompt: list[int], n: int, weights: AdapterWeights | None = None, **params: Any) -> ops.Sample:
    settings = SamplingParams(**{"max_tokens": 6, "seed": 1, "stop": []} | params)
    return ops.Sample(tiny.named(weights), ModelInput.from_ints(prompt), n, settings, False, 0)


def prompt_cache(seed: int, length: int) -> tuple[KVCache, Tensor, Tensor]:
    """A cache of one layer with random keys and values, (G, L, D) each."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(GROUPS, length, SIZE, generator=generator) for _ in range(2))
    cache = KVCache(1)
    cache.reserve(1, length)
    cache.write_run(0, 0, 0, key, value)
    return cache, key, value


@pytest.mark.parametrize("arithmetic", [Fast(), RowExact()], ids=["fast", "exact"])
@pytest.mark.parametrize("users", [[0, 0, 1, 0, 1], [0, None, 1, 1, None], [1, 1, 1, 0, 0]])
@torch.no_grad()
def test_attention_after_a_shared_prefix_is_attention_over_all_keys(
    arithmetic: Arithmetic, users: list[int | None]
) -> None:
    """Prefixes of two lengths, used by some of the rows, which have keys of their own besides."""
    generator = torch.Generator().manual_seed(0)
    prompts = [prompt_cache(1, 64), prompt_cache(2, 128)]
    store = SharedPrefixes(1)
    prefixes = [None if user is None else store.join(prompts[user][0], prompts[user][1].shape[1]) for user in users]
    query, own_key, own_value = (
        torch.randn(len(users), heads, length, SIZE, generator=generator)
        for heads, length in ((HEADS, 1), (GROUPS, 64), (GROUPS, 64))
    )
    position = torch.tensor([3, 9, 0, 40, 63])[:, None]
    prefix_pass = store.of(prefixes, torch.device("cpu"))
    assert prefix_pass is not None
    own = Seen(own_key, own_value, Sight(position))
    ours = arithmetic.attention_after_prefix(query, own, prefix_pass.read(0), prefix_pass.shared, HOW)
    for row, user in enumerate(users):
        key, value = own_key[row], own_value[row]
        if user is not None:
            key, value = torch.cat([prompts[user][1], key], 1), torch.cat([prompts[user][2], value], 1)
        place = position[row : row + 1] + key.shape[1] - 64
        alone = arithmetic.attention(query[row : row + 1], Seen(key[None], value[None], Sight(place)), HOW)
        if isinstance(arithmetic, RowExact):
            assert torch.equal(ours[row], alone[0])
        else:
            torch.testing.assert_close(ours[row], alone[0])


def test_prefixes_come_and_go_in_any_order_and_keep_their_contents() -> None:
    rng = random.Random(0)
    prompts = [prompt_cache(seed, 64 + 10 * seed) for seed in range(5)]
    store, users = SharedPrefixes(1), []
    for _ in range(200):
        if users and rng.random() < 0.5:
            store.leave(users.pop(rng.randrange(len(users))))
        else:
            cache, key, _ = prompts[rng.randrange(5)]
            users.append(store.join(cache, key.shape[1]))
        rows = store.of(users, torch.device("cpu"))
        assert (rows is None) == (not users)
        if rows is None:
            assert store.num_tokens() == 0
            continue
        key_PGLD, value_PGLD, _ = rows.read(0)
        assert len(key_PGLD) == len({id(prefix) for prefix in users})
        for row, prefix in enumerate(users):
            _, key, value = next(prompt for prompt in prompts if prompt[0] is prefix.source())
            slot = int(rows.shared.groups.place_N[row]) // rows.shared.groups.rows_KM.shape[1]
            assert torch.equal(key_PGLD[slot, :, : key.shape[1]], key)
            assert torch.equal(value_PGLD[slot, :, : key.shape[1]], value)


@pytest.fixture(params=["exact", "fast"])
def base(request: pytest.FixtureRequest) -> BaseModel:
    if request.param == "exact":
        return tiny.base_model()
    return adopt(tiny.llama(), "tiny", fingerprint="tiny", deterministic=False)


def test_samples_that_share_their_prompt_give_what_each_gives_alone(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two prompts and two adapters, in requests of several samples and in many requests, of different lengths."""
    engine = Engine(base)
    weights = [None, tiny.trained_adapter(engine, 1).weights, tiny.trained_adapter(engine, 2).weights]
    prompts = [tiny.tokens(70, 1), tiny.tokens(131, 2)]
    asked = [
        sample(prompts[index % 2], 1 + index % 3, weights[index % 3], seed=index, max_tokens=2 + 5 * index % 17)
        for index in range(9)
    ]
    monkeypatch.setattr(batch, "MIN_PREFIX_TOKENS", 1000)
    alone = [tiny.run(Engine(base), op) for op in asked]
    monkeypatch.undo()
    tickets = [tiny.submit(engine, op) for op in asked]
    answers, most_shared = {}, 0
    while not engine.idle:
        answers |= {done.ticket: done.result for done in engine.step()}
        most_shared = max(most_shared, engine._sampler._batch.prefixes.num_tokens())  # pyright: ignore[reportPrivateUsage]
    assert most_shared > 0
    for ticket, expected in zip(tickets, alone, strict=True):
        for ours, theirs in zip(answers[ticket].sequences, expected.sequences, strict=True):
            assert ours.tokens == theirs.tokens
            if base.arithmetic.can_stack:
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            else:
                assert ours.logprobs == theirs.logprobs
    assert engine._sampler._batch.prefixes.num_tokens() == 0  # pyright: ignore[reportPrivateUsage]  what is kept is memory


def test_a_prompt_is_not_kept_twice_once_its_samples_have_started() -> None:
    engine = tiny.engine()
    tiny.submit(engine, sample(tiny.tokens(192, 1), 4, max_tokens=8))
    engine.step()
    running = engine._sampler._batch.running  # pyright: ignore[reportPrivateUsage]  memory is nowhere else to be seen
    assert len(running) == 4
    assert all(sequence.request.prompt.cache.num_positions == 0 for sequence in running)


def test_many_samples_of_a_long_prompt_fit_where_their_copies_would_not() -> None:
    engine = tiny.engine(max_kv_bytes=tiny.kv_bytes(192 + 192 + 16 * 64))
    tiny.submit(engine, sample(tiny.tokens(192, 1), 16, max_tokens=8))
    engine.step()
    assert len(engine._sampler._batch.running) == 16  # pyright: ignore[reportPrivateUsage]  16 · (192 + 8) would be 3,200


def test_layers_with_windows_share_nothing() -> None:
    """They see but the end of a prefix, which the shared product does not know."""
    base = adopt(mistral(), "windows", fingerprint="windows")
    assert not base.attends_plainly
    engine = Engine(base)
    tiny.submit(engine, sample(tiny.tokens(70, 1), 3))
    engine.step()
    assert engine._sampler._batch.prefixes.num_tokens() == 0  # pyright: ignore[reportPrivateUsage]  nothing else shows it


def test_a_twin_that_comes_later_shares_with_those_that_run(base: BaseModel) -> None:
    engine, prompt = Engine(base), tiny.tokens(70, 1)
    alone = [tiny.run(Engine(base), sample(prompt, n, seed=n)) for n in (2, 1)]
    first = tiny.submit(engine, sample(prompt, 2, seed=2))
    engine.step()
    engine.step()
    second = tiny.submit(engine, sample(prompt, 1, seed=1))
    answers: dict[ops.Ticket, Any] = {}
    engine.step()
    prefixes = engine._sampler._batch.prefixes._prefixes  # pyright: ignore[reportPrivateUsage]  nothing else shows it
    assert [prefix.num_users for prefix in prefixes] == [3]
    while not engine.idle:
        answers |= {done.ticket: done.result for done in engine.step()}
    for ticket, expected in zip((first, second), alone, strict=True):
        assert [s.tokens for s in answers[ticket].sequences] == [s.tokens for s in expected.sequences]


def test_after_a_pass_that_failed_nothing_is_shared_with_those_that_are_gone(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = Engine(base), tiny.tokens(70, 1)
    expected = [s.tokens for s in tiny.run(Engine(base), sample(prompt, 3)).sequences]
    tiny.submit(engine, sample(prompt, 3))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "draw", lambda *_: 1 / 0)
        (failed,) = engine.step()
    assert isinstance(failed.error, ZeroDivisionError)
    assert engine._sampler._batch.prefixes.num_tokens() == 0  # pyright: ignore[reportPrivateUsage]  what is kept is memory
    assert [s.tokens for s in tiny.run(engine, sample(prompt, 3)).sequences] == expected


def test_samples_share_only_as_far_as_their_groups_are_of_about_one_size() -> None:
    """A pass computes as many rows for each prefix as for the one with the most."""
    engine = tiny.engine()
    tiny.submit(engine, sample(tiny.tokens(70, 0), 100))
    for seed in range(1, 41):
        tiny.submit(engine, sample(tiny.tokens(70, seed), 2))
    while not engine.idle:
        engine.step()
        prefixes = engine._sampler._batch.prefixes._prefixes  # pyright: ignore[reportPrivateUsage]  it is a cost
        users = [prefix.num_users for prefix in prefixes]
        assert len(users) * max(users, default=0) <= 3 * 180 + 64


def test_prefixes_count_towards_the_bound_and_what_does_not_fit_waits() -> None:
    """Three prompts of 128 as prefixes, their samples, and two prompts that were computed for them."""
    limit = 3 * 128 + 10 * 64 + 2 * 128
    engine = tiny.engine(max_kv_bytes=tiny.kv_bytes(limit))
    tickets = [tiny.submit(engine, sample(tiny.tokens(128, seed), 4, max_tokens=8)) for seed in range(6)]
    answers: dict[ops.Ticket, Any] = {}
    most = 0
    while not engine.idle:
        answers |= {done.ticket: done.result for done in engine.step()}
        inside = engine._sampler  # pyright: ignore[reportPrivateUsage]  memory
        running, memory = inside._batch.running, inside._admission.memory  # pyright: ignore[reportPrivateUsage]
        assert memory.allocated <= limit
        most = max(most, len(running))
    assert most == 10  # of three prompts
    assert set(answers) == set(tickets)


def test_a_long_sequence_after_many_short_ones_does_not_make_room_for_many_long_ones() -> None:
    cache = KVCache(1, max_tokens=4096)
    cache.reserve(32, 64)
    cache.write(0, torch.arange(32), torch.zeros(32, dtype=torch.int64), *torch.ones(2, GROUPS, 32, SIZE))
    cache.reserve(2, 1024)
    cache.settle()
    key_SGLD, _ = cache.read(0, 2, 1024)
    assert (cache.num_slots, cache.num_positions) == (2, 1024)
    assert key_SGLD.shape[2] == 1024
    assert torch.equal(key_SGLD[:, :, 0], torch.ones(2, GROUPS, SIZE))


def test_room_that_does_not_fit_twice_is_not_moved_to_and_fro() -> None:
    cache = KVCache(1, max_tokens=2**18, doubling=True)
    for slots, positions in [(320, 640), (300, 513), (320, 640), (299, 514)]:
        cache.reserve(slots, positions)
        cache.write_run(0, 0, 0, torch.zeros(GROUPS, 1, SIZE), torch.zeros(GROUPS, 1, SIZE))
    assert cache.version == 1
