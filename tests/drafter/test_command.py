"""The command draftwire-drafter as a process: serves until told to stop, says why it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from drafter.peer import peer, settled, write_checkpoint


def start(*flags: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "drafter_service", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def test_the_command_serves_lanes_until_sigterm_and_leaves_cleanly(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    process = start("--listen", "127.0.0.1:0", "--checkpoint", str(tmp_path), "--cache-rows", "512")
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            word, address = line.split()
            if word == "serving":
                break

        async def main() -> None:
            async with peer(address, model) as lane:
                await lane.shake_hands()
                assert len((await lane.open((1, 9))).proposals) == 1
            info = await settled(address, sessions=0, lanes=0)
            assert info.free_cache_rows == info.total_cache_rows == 512

        asyncio.run(main())
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=60)
        assert process.returncode == 0, logged
        assert "lane ended" in logged
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_work_is_said_in_one_line_with_exit_status_2(tmp_path: Path) -> None:
    process = start("--listen", "127.0.0.1:0", "--checkpoint", str(tmp_path))
    _, logged = process.communicate(timeout=120)
    assert process.returncode == 2
    last = logged.strip().splitlines()[-1]
    assert last.startswith("draftwire-drafter: --checkpoint")
    assert "config.json" in last
    assert "Traceback" not in logged
