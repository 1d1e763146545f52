"""What a run shows and stores: `events` (the one stream), `sinks` (its readers on disk), `console` (its reader on a
terminal), `configs` (a config as JSON), `plots`, `display` (examples in colour), `timing`, `waiting`
(what a run waits for when it stands still)."""
