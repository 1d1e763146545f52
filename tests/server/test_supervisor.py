"""The parent of a server: it starts it again when it ends by itself, tells it why, and takes it along when it dies."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from stovetop.server.ports import listen
from stovetop.server.supervisor import Supervisor, out_of_memory_kills, was_orphaned

# Writes what it was told, serves if asked to, then ends as asked.
SERVER = """
import os, socket, sys, time
pair, was_killed, told, ends = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4].split()
with open(told, 'a') as file:
    file.write(was_killed)
number = len(open(told).read()) - 1
what = ends[min(number, len(ends) - 1)]
if what not in ('unfit', 'kill-early'):
    socket.socket(fileno=os.dup(pair)).send(b'.')
if what == 'wait':
    time.sleep(30)
if what in ('kill', 'kill-early', 'crash'):
    os.kill(os.getpid(), 6 if what == 'crash' else 9)
os._exit(1 if what == 'unfit' else int(what))
"""


class Told:
    """A supervisor of servers that end in these ways, one after the other."""

    def __init__(self, folder: Path, ends: str, first_pause_s: float = 0.01) -> None:
        self.file = folder / "told"
        self.listening = listen("127.0.0.1", 0)

        def command(port: int, pair: int, was_killed: bool) -> Sequence[str]:
            return [sys.executable, "-S", "-c", SERVER, str(pair), str(int(was_killed)), str(self.file), ends]

        self.supervisor = Supervisor(command, self.listening, first_pause_s)

    def run(self) -> int:
        with self.listening:
            return self.supervisor.run()

    @property
    def was_killed(self) -> str:
        """Of each server: 1 or 0."""
        return self.file.read_text()


def test_a_server_that_ends_by_itself_is_started_again_and_one_that_stops_is_not(tmp_path: Path) -> None:
    told = Told(tmp_path, "70 crash 0")
    assert told.run() == 0
    assert told.was_killed == "000"


def test_the_next_server_is_told_of_a_kill_from_outside_and_not_of_a_crash(tmp_path: Path) -> None:
    before = out_of_memory_kills()
    told = Told(tmp_path, "kill crash 70 0")
    assert told.run() == 0
    assert told.was_killed == ("0100" if out_of_memory_kills() == before else "0000")


def test_a_server_that_could_never_serve_is_not_started_again(tmp_path: Path) -> None:
    told = Told(tmp_path, "unfit")
    assert told.run() == 1
    assert told.was_killed == "0"


def test_a_server_that_is_killed_before_it_could_serve_is_started_again(tmp_path: Path) -> None:
    told = Told(tmp_path, "kill-early 0")
    assert told.run() == 0
    assert told.was_killed[0] == "0"
    assert len(told.was_killed) == 2


def test_one_that_has_served_is_started_again_though_it_cannot_at_once(tmp_path: Path) -> None:
    told = Told(tmp_path, "70 unfit 0")
    assert told.run() == 0
    assert told.was_killed == "000"


def test_a_signal_is_passed_on_and_ends_the_pause(tmp_path: Path) -> None:
    told = Told(tmp_path, "wait")
    threading.Timer(0.3, told.supervisor.stop).start()
    assert told.run() == 128 + signal.SIGTERM
    pausing = Told(tmp_path, "70", first_pause_s=60)
    threading.Timer(0.3, pausing.supervisor.stop).start()
    begun_s = time.monotonic()
    pausing.run()
    assert time.monotonic() - begun_s < 10


def test_a_connection_that_comes_while_no_server_is_there_waits_for_the_next_one(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()) as waiting:
        waiting.sendall(b"?")
        taken, _ = listening.accept()
        with taken:
            assert taken.recv(1) == b"?"


ORPHAN = """
import os, socket, sys, time
from pathlib import Path
from stovetop.server.supervisor import Lifeline
lifeline = Lifeline(int(sys.argv[1]), Path(sys.argv[2]), os._exit)
lifeline.serves()
time.sleep(30)
"""


def test_a_server_ends_when_its_parent_does_however_that_died(tmp_path: Path) -> None:
    ours, its = socket.socketpair()
    with its:
        server = subprocess.Popen(
            [sys.executable, "-c", ORPHAN, str(its.fileno()), str(tmp_path)], pass_fds=[its.fileno()]
        )
    with server, ours:
        assert ours.recv(1, socket.MSG_PEEK) == b"."  # it stays unread, as by a parent that waits
        ours.close()  # as the system does for a process that is dead
        assert server.wait(10) == 70
    assert was_orphaned(tmp_path)
    assert not was_orphaned(tmp_path)
