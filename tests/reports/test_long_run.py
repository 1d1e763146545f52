"""The report of a run of 100,000 steps: small, and there in seconds."""

import json
import math
import time
from pathlib import Path

import pytest

from reports.made_runs import make_run
from stovetop.reports.contents import contents_of
from stovetop.reports.page import page_of
from stovetop.run_folder import EVENTS_FILE, METRICS_FILE

NUM_STEPS, NUM_METRICS = 100_000, 30
MOST_BYTES, MOST_S = 10_000_000, 10.0


@pytest.mark.slow
def test_a_hundred_thousand_steps_are_a_small_page_in_under_ten_seconds(tmp_path: Path) -> None:
    """A quarter of a minute to write the rows. The time is that of the processor, whatever else the machine does."""
    path = make_run(tmp_path / "run", 4, num_steps=4)
    with (path / METRICS_FILE).open("w") as rows, (path / EVENTS_FILE).open("a") as events:
        for step in range(NUM_STEPS):
            values = [math.sin(step * (index + 1)) + index + step / NUM_STEPS for index in range(NUM_METRICS)]
            names = [f"{'env/all' if index % 2 else 'optim'}/metric_{index}" for index in range(NUM_METRICS)]
            rows.write(json.dumps({"step": step, **dict(zip(names, values, strict=True)), "time/step": 0.5}) + "\n")
            for name in ("stage.start", "stage.stop"):
                event = {"time": step / 2, "name": name, "step": step, "labels": {"stage": "train"}}
                events.write(json.dumps(event) + "\n")
    began_s = time.process_time()
    found = contents_of(path)
    page = page_of([found], path / "report.html")
    assert time.process_time() - began_s < MOST_S
    assert len(page) < MOST_BYTES
    assert found.num_rows == NUM_STEPS
    assert page.count('<figure class="plot">') == NUM_METRICS
    assert "Steps 99994 to 99999" in page
