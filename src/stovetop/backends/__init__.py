"""Providers of the protocols in `client.py`: one file or folder each.

local.py       the engine in this process               recording.py   a deterministic fake that learns
remote.py      a server, through the official SDK (to come)

in_process.py, engine_thread.py and older_names.py are the clients that local and recording share; bigram.py,
byte_tokenizer.py and failing_disk.py belong to recording.
"""
