"""Workflows as values: `stage` (what a stage is), `nodes` (conditions, the loop, stations), `workflow` (the whole, its
edits), `check` (what can be known before it runs), `run` (the runner, and the row of metrics), `phases` (several in a
row)."""

from stovetop.kitchen.nodes import Loop, Position, Positions, Station, When
from stovetop.kitchen.phases import Finished, Phase, run_phases
from stovetop.kitchen.run import Row
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.stage import Stage, stage
from stovetop.kitchen.workflow import Workflow

__all__ = [
    "Finished",
    "Loop",
    "Phase",
    "Position",
    "Positions",
    "Row",
    "RunConfig",
    "Stage",
    "Station",
    "When",
    "Workflow",
    "run_phases",
    "stage",
]
