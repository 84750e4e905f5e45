"""A drafter and a verifier for tests: the real services, on a tiny model.

Knows which settings make them small and quick to start. They are processes of their own, so they
use no lock, loop or memory of the test's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from draftwire_client.processes import ServiceProcess, require_services, scratch_folder

TINY = "random:tiny"
_SHARED = {"--threads": "1", "--drain-grace-s": "1", "--log-format": "json"}
# Always the drafter's block, so that what is accepted shows; and no time spent on measuring steps.
_STEADY = {"--speculation": "fixed", "--profile-s": "0"}
_RANDOM = {"--random-weights-seed": "0"}


class LocalPair:
    """The pair on this machine, serving from construction on; use it in `with`, or `close` it.

        with LocalPair() as pair, Client.connect(pair.target) as client:
            assert client.generate("abc", temperature=0, max_tokens=8).usage.completion_tokens == 8

    Nothing is downloaded. The same request gives the same tokens every time; what they say is of
    no meaning. Starting takes some seconds (torch is imported), so share one pair among tests.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        verifiers: int = 1,
        drafters: int = 1,
        verifier_options: Sequence[str] = (),
        drafter_options: Sequence[str] = (),
        log_level: str = "warning",
        start_timeout_s: float = 120.0,
    ) -> None:
        """`seed` of the tiny model; options are flags of `draftwire-verifier` and
        `draftwire-drafter`, which hold where the pair has others by itself.

        Raises FailedPrecondition naming the extra if the services are not installed, Unavailable
        with the end of the log if one does not start.
        """
        require_services()
        self._folder = scratch_folder()
        self._model = f"{TINY}:{seed}"
        self._level = log_level
        self._timeout = start_timeout_s
        self._drafter_options = tuple(drafter_options)
        self._drafters: list[ServiceProcess] = []
        self._verifiers: list[ServiceProcess] = []
        self.target = ""
        """The address for `connect`; several verifiers are a list."""
        try:
            self._start(verifiers, drafters, verifier_options)
        except BaseException:
            self.close()
            raise

    def _start(self, verifiers: int, drafters: int, options: Sequence[str]) -> None:
        # At once: the verifier waits for its drafters by itself.
        self._drafters = [self._drafter(index) for index in range(drafters)]
        flags = {"--model": self._model, "--listen": "127.0.0.1:0", "--log-level": self._level}
        flags |= _SHARED | _STEADY
        if drafters:
            flags["--drafters"] = ",".join(self._socket(index) for index in range(drafters))
        self._verifiers = [
            ServiceProcess(
                "verifier_service", _merged(flags, options), self._log(f"verifier-{index}")
            )
            for index in range(verifiers)
        ]
        for drafter in self._drafters:
            drafter.serving(self._timeout)
        self.target = ",".join(verifier.serving(self._timeout) for verifier in self._verifiers)

    def kill_drafter(self, index: int = 0) -> None:
        """End a drafter at once, as a crash would: no request may fail of it."""
        self._drafters[index].kill()

    def start_drafter(self, index: int = 0) -> None:
        """Start a drafter again where it was; returns when it serves."""
        self._drafters[index].kill()
        self._drafters[index] = self._drafter(index)
        self._drafters[index].serving(self._timeout)

    def log(self) -> str:
        """What the services have logged so far."""
        found = sorted(Path(self._folder.name).glob("*.log"))
        return "".join(path.read_text(errors="replace") for path in found)

    def close(self) -> None:
        """End all services."""
        for process in (*self._verifiers, *self._drafters):
            process.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drafter(self, index: int) -> ServiceProcess:
        flags = {"--target": self._model, "--listen": self._socket(index)}
        flags |= _SHARED | _RANDOM | {"--log-level": self._level}
        return ServiceProcess(
            "drafter_service",
            _merged(flags, self._drafter_options),
            self._log(f"drafter-{index}"),
        )

    def _socket(self, index: int) -> str:
        return f"unix:{self._folder.name}/drafter-{index}.sock"

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"


def _merged(flags: Mapping[str, str], options: Sequence[str]) -> list[str]:
    """Arguments of a command that takes each flag once: `options`, and `flags` not among them."""
    given = {word.partition("=")[0].replace("_", "-") for word in options}
    words = [word for flag, value in flags.items() if flag not in given for word in (flag, value)]
    return [*words, *options]
