"""A client's process that is stopped by a signal for longer than its server waits for silent ones, and continued."""

import json
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from running import running
from test_killed import trained

from processes import started
from stovetop.backends import recording
from stovetop.server.sweeping import sweep

CLIENT = """
import json, sys
sys.path[:0] = {path!r}
from test_killed import trained
print("here", flush=True)
seen = trained({url!r}, lambda step: print(step, flush=True))
print(json.dumps(seen), flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_stopped_for_longer_than_the_server_waits_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_service = partial(recording.open_service, models=["tiny"])
    with running(tmp_path / "undisturbed", open_service) as undisturbed:
        expected = trained(undisturbed.url, lambda step: None)
    with running(tmp_path / "stopped", open_service) as server:
        path = [str(Path(__file__).parents[2] / folder) for folder in ("tests/server", "tests", "benchmarks")]
        code = CLIENT.format(path=path, url=server.url)
        with started("-c", code) as (process, _):
            assert process.stdout is not None
            while int(process.stdout.readline()) < 5:  # at which a save is under way too
                pass
            process.send_signal(signal.SIGSTOP)
            (program,) = server.parts.programs.owned("local")
            monkeypatch.setattr("stovetop.server.sweeping.QUIET_S", 0.5)
            give_up_s = time.monotonic() + 30
            while program.is_in_memory:
                assert time.monotonic() < give_up_s, "the silent client's model stays in memory"
                time.sleep(0.05)
                sweep(server.parts, time.time())
            monkeypatch.undo()
            process.send_signal(signal.SIGCONT)
            *_, last = process.stdout
            assert json.loads(last) == json.loads(json.dumps(expected))
