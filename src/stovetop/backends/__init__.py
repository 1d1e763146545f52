"""Providers of the protocols in `client.py`: one file or folder each.

local.py       the engine in this process               recording.py   a deterministic fake that learns
in_process.py  the clients that these two share          remote.py      a server, through the official SDK (to come)
"""
