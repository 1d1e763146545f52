"""What the programs of all models work with."""

from dataclasses import dataclass
from itertools import count

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.server.checkpoints import Checkpoints
from stovetop.server.folders import Folders
from stovetop.server.journal import Journal
from stovetop.server.limits import Limits
from stovetop.server.requests import Requests
from stovetop.server.samplers import Samplers


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One of each."""

    service: InProcessServiceClient
    journal: Journal
    requests: Requests
    samplers: Samplers
    checkpoints: Checkpoints
    folders: Folders
    limits: Limits
    numbers: "count[int]"  # of requests, over all models
