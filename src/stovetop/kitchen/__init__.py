"""Workflows as values: `stage` (what a stage is), `nodes` (conditions, the loop, stations), `workflow` (the whole, its
edits), `check` (what can be known before it runs), `run` (the runner, and the row of metrics)."""

from stovetop.kitchen.nodes import Loop, Position, Positions, Station, When
from stovetop.kitchen.run import Row
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.stage import Stage, stage
from stovetop.kitchen.workflow import Workflow

__all__ = ["Loop", "Position", "Positions", "Row", "RunConfig", "Stage", "Station", "When", "Workflow", "stage"]
