"""What those who run a server see: the page, the metrics, the log."""

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from running import MODELS, Running, datum, made, running, train
from tinker import RequestFailedError, ServiceClient, types

from browser import opened
from stovetop.server.activity import HISTORY_S, RATE_S, Activity, Done, Ended
from stovetop.server.app import Doors, make_app
from stovetop.server.keys import Keys, add_key
from stovetop.server.page import ago, size

NO_LOSS: Any = "<img src=x onerror=alert(1)>"
NASTY = "tml-<script>alert('x')</script>"  # an owner, where a key is its owner's name


class Read(HTMLParser):
    """The rows of tables as texts, and what stands under each id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.tags: list[str] = []
        self.links: list[str] = []
        self._table = self._id = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        found = dict(attrs).get("id") or ""
        self._id = found if tag == "b" else ""
        if tag == "table":
            self._table = found
            self.tables[found] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._id = ""
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] = data
        elif self._table and self.tables[self._table] and self.tables[self._table][-1]:
            self.tables[self._table][-1][-1] += data.strip()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two tenants, of which one is dead: it was not heard of for ten minutes."""
    with (
        running(tmp_path_factory.mktemp("busy"), owner_of=str) as server,
        server.sdk() as sdk,
        ServiceClient(base_url=server.url, api_key=NASTY) as dead,
    ):
        for each in (sdk, dead):
            train(made(each))
        client = made(dead)
        client.save_state("x").result()
        with pytest.raises(RequestFailedError):
            client.forward_backward([datum()], NO_LOSS).result()
        yield server


def test_the_page_shows_models_tenants_work_and_failures(busy: Running) -> None:
    for row in busy.parts.sessions.owned(NASTY):
        busy.parts.sessions.last_seen_s[row.id] -= 600
    answer = httpx.get(busy.url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    read = Read(answer.text)
    assert [row[0] for row in read.tables["models"][1:]] == sorted(MODELS)
    tenants = {row[0]: row for row in read.tables["tenants"][1:]}
    assert set(tenants) == {"tml-test", NASTY}
    assert tenants["tml-test"][1] in ("at work", "idle")
    assert tenants[NASTY][1:3] == ["silent", "10 min"]
    assert tenants[NASTY][9] != "0 B"
    assert [row[1] for row in read.tables["adapters"][1:]].count(NASTY) == 2
    assert {row[1] for row in read.tables["steps"][1:]} == {"tml-test", NASTY}
    assert "unknown loss_fn '<img src=x onerror=alert(1)>'" in read.tables["failures"][-1][3]
    assert read.texts["in-memory"] == "3"
    assert int(read.texts["tokens-per-s"]) >= 0


def test_all_that_clients_have_named_is_escaped(busy: Running) -> None:
    answer = httpx.get(busy.url)
    assert "<script>alert" not in answer.text
    tags = Read(answer.text).tags
    assert tags.count("script") == 1
    assert "img" not in tags
    (nonce,) = set(re.findall(r"<(?:script|style) nonce=\"([\w-]+)\">", answer.text))
    policy = answer.headers["content-security-policy"]
    assert policy.count(f"'nonce-{nonce}'") == 2
    assert "unsafe" not in policy
    assert nonce not in httpx.get(busy.url).text


def test_the_page_asks_nothing_of_another_machine_and_changes_nothing(busy: Running) -> None:
    read = Read(text := httpx.get(busy.url).text)
    assert read.links == ["data:,"]  # no icon
    assert "url(" not in text
    assert "@import" not in text
    assert not {"form", "iframe", "object", "base"} & set(read.tags)
    assert httpx.post(busy.url).status_code == 405


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_the_metrics_are_read_by_parsers_of_both_formats(busy: Running, accept: str) -> None:
    answer = httpx.get(f"{busy.url}/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    text: Any = answer.text  # the parser of OpenMetrics has no types
    families: Iterable[Metric] = (
        openmetrics.text_string_to_metric_families(text) if "openmetrics" in accept else read_text(text)
    )
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    by_labels = {(name, *sorted(labels)): value for (name, *labels), value in samples.items()}
    assert by_labels["stovetop_models",] == 2
    assert by_labels["stovetop_steps_total", "tml-test"] == 1
    assert by_labels["stovetop_tokens_total", NASTY] == 6
    assert by_labels["stovetop_adapters", *sorted((NASTY, "memory"))] == 2
    assert by_labels["stovetop_requests_total", *sorted((NASTY, "forward_backward", "user"))] == 1
    assert by_labels["stovetop_request_seconds_count", "forward_backward"] == 3
    assert by_labels["stovetop_disk_free_bytes",] > 0
    assert by_labels["process_resident_memory_bytes",] > 2**20


def test_with_keys_both_want_an_operators(tmp_path: Path) -> None:
    alice, olga = add_key(tmp_path, "alice"), add_key(tmp_path, "olga", is_operator=True)
    keys = Keys(tmp_path)
    with running(tmp_path, owner_of=keys.owner_of, operator_of=keys.operator_of) as server, httpx.Client() as http:
        for path in ("/", "/metrics"):
            url = f"{server.url}{path}"
            for key in (None, alice, "tml-local"):
                answer = http.get(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
                assert answer.status_code == 401
                assert "stovetop serve keys add NAME --operator" in answer.text
            assert http.get(url, auth=("anyone", olga)).status_code == 200
            assert http.get(url, headers={"Authorization": f"bearer {olga}"}).status_code == 200
            assert http.get(url, headers={"X-API-Key": olga}).status_code == 200
            assert http.get(url, headers={"Authorization": "Basic !"}).status_code == 401
            assert http.get(url, auth=("anyone", alice)).status_code == 401
        assert http.get(server.url).headers["www-authenticate"].startswith("Basic ")
        assert server.http(olga).post("create_session", json={}).status_code == 200  # it is a tenant's key too


def test_a_browser_is_told_while_models_load(tmp_path: Path) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(Doors(), hosts=["test"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "the server is loading" in answer.text
    assert "setTimeout(look" in answer.text


@pytest.mark.slow
@pytest.mark.usefixtures("needs_browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_at_once_and_what_changes_later(tmp_path: Path, width: int) -> None:
    olga = add_key(tmp_path, "olga", is_operator=True)
    keys = Keys(tmp_path)

    async def look(server: Running) -> None:
        async with opened() as browser:
            await browser.open(server.url, width=width, key=olga)
            assert "Basic" in httpx.get(server.url).headers["www-authenticate"]
            assert await browser.value("document.querySelector('#steps') === null")
            with ServiceClient(base_url=server.url, api_key=olga) as sdk:
                await asyncio.to_thread(lambda: train(made(sdk)))
                await browser.until("document.querySelectorAll('#steps tbody tr').length == 1")
            assert await browser.value("document.documentElement.scrollWidth <= window.innerWidth")
            assert browser.complaints == []
            server.server.stop()
            await browser.until("document.body.classList.contains('is-lost')")
            assert await browser.value("getComputedStyle(document.querySelector('#lost')).display != 'none'")

    with running(tmp_path, owner_of=keys.owner_of, operator_of=keys.operator_of) as server:
        asyncio.run(look(server))


# ---- the log ---------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """Each line of requests, by its names."""
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("id=")]
    return [dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)) for line in told]


@pytest.mark.parametrize("asked_for", [False, True])
def test_each_request_is_a_line_of_the_log_and_prompts_are_there_when_they_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked_for: bool
) -> None:
    caplog.set_level(logging.INFO, "stovetop.server")
    prompt = "a secret\nid=x owner=y"
    with running(tmp_path, log_prompts=asked_for) as server, server.sdk() as sdk:
        train(client := made(sdk))
        sampler = client.save_weights_and_get_sampling_client().result()
        tokens = (
            server.parts.service.create_sampling_client(base_model=MODELS[0]).result().get_tokenizer().encode(prompt)
        )
        drawn = sampler.sample(types.ModelInput.from_ints(tokens), 1, types.SamplingParams(max_tokens=2)).result()
        with pytest.raises(RequestFailedError):
            client.forward_backward([datum()], NO_LOSS).result()
        with server.http() as http:
            http.get("samplers/%0Aid=x")
        chat = {"model": MODELS[0], "prompt": prompt, "max_tokens": 2}
        asked = httpx.post(f"{server.url}/v1/completions", json=chat, headers={"Authorization": "Bearer tml-x"})
        found = lines(caplog)
    verbs = {line["verb"]: line for line in found}
    step = verbs["optim_step"]
    assert (step["id"], step["owner"]) == (f"{client.model_id}:2", "local")
    assert int(step["ms"]) >= 0
    assert verbs["forward_backward"]["failed"] == "user"
    assert int(verbs["sample"]["tokens"]) == len(tokens) + len(drawn.sequences[0].tokens)
    assert verbs["completion"]["id"] == asked.json()["id"]
    assert verbs["GET:/api/v1/samplers/{sampler_id}"]["status"] == "404"
    assert not any("retrieve" in verb or "heartbeat" in verb for verb in verbs)
    told = [line.get("prompt", "") for line in found if line["verb"] in ("sample", "completion")]
    assert ["a secret\\nid=x owner=y" in each for each in told] == [asked_for] * 2
    assert asked_for or "secret" not in caplog.text
    assert NO_LOSS not in caplog.text


def test_speeds_are_means_of_the_last_seconds_and_the_history_forgets() -> None:
    now_s = 1000.0
    activity = Activity(now_s=lambda: now_s)

    def ends(owner: str, num_tokens: int, num_steps: int = 0) -> None:
        activity.ended(Ended(id="1", owner=owner, verb="v", seconds=0.2, num_steps=num_steps, num_tokens=num_tokens))

    ends("a", 300, 1)
    now_s += RATE_S - 1
    ends("b", 60)
    assert activity.tokens_per_s() == {"a": 10, "b": 2}
    now_s += 2
    assert activity.tokens_per_s() == {"b": 2}
    assert (sum(activity.history(60)), activity.done) == (360, Done(1, 360))
    now_s += HISTORY_S
    ends("b", 1)
    assert sum(activity.history(60)) == 1
    assert activity.by_owner() == {"a": Done(1, 300), "b": Done(0, 61)}
    assert [step.owner for step in activity.recent_steps()] == ["a"]


def test_sizes_and_times_are_short() -> None:
    assert [size(n) for n in (0, 999, 1500, 123_456_789, 2.5e12)] == ["0 B", "999 B", "1.5 kB", "123 MB", "2.5 TB"]
    assert [ago(s) for s in (3, 240, 7200, 500_000)] == ["3 s", "4 min", "2 h", "6 d"]
