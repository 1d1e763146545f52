"""What a run shows and stores: `events` (the one stream), `sinks` (its readers on disk), `console` (its reader on a
terminal), `configs` (a config as JSON), `plots`, `timing`, `waiting` (what a run waits for when it stands still);
`logtree` (a log as a tree, which becomes a page), `chats` (a chat on a page), `page` (HTML that shows text as text)."""
