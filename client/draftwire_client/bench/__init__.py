"""The load tester, `draftwire bench`.

Pure: `arrivals` (when), `datasets` and `texts` (what), `arms` and `plan` (which request is whose),
`measure` (what one request took), `stats`, `summary`, `compare`, `counters`, `limits` (what it all
means), `svg`, `charts`, `page`, `table` (how it looks). Thin shell: `runner` (one event loop),
`workers` (several), `faults`, `energy`, `watch` (the outside world), `live`, `session` (a whole
run), `cli`.
"""
