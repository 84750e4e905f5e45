"""Which files run: the interpreted ones where TRITON_INTERPRET=1, the compiled ones where it is not
set."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_sm90*.py"] if INTERPRETED else ["test_interpreted_*.py"]
