"""Logs of a service: structlog and the standard library through one renderer, to stderr.

Knows formats and levels, and keeps what callers chose (request ids) from breaking lines. Does not
know what is logged; answers and tokens never are, prompts only with `--log-prompts`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

Logger = structlog.stdlib.BoundLogger
# Rendered by structlog itself, over several lines on purpose.
_MULTILINE = frozenset({"exc_info", "exception", "stack", "stack_info", "_record"})


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to `stream`, or to what sys.stderr is at the time: it may be replaced meanwhile."""

    def __init__(self, stream: TextIO | None) -> None:
        logging.Handler.__init__(self)
        self._fixed = stream

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return self._fixed or sys.stderr


def configure(format: str = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """Sets up logging for the process. `format` is auto, json or console; auto asks the stream."""
    terminal = (stream or sys.stderr).isatty()
    console = format == "console" or (format == "auto" and terminal)
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables: those would carry prompts and tokens into the log.
    rendering: list[Any] = (
        [
            _escape_controls,
            structlog.dev.ConsoleRenderer(
                colors=terminal, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
        if console
        else [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = _Handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [*(old for old in root.handlers if not isinstance(old, _Handler)), handler]
    root.setLevel(number)


def printable(text: str) -> str:
    """`text` with everything that could move a cursor, end a line or turn its direction escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _escape_controls(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """For the console; JSON escapes by itself. Values that are no text are shown by their repr,
    which escapes too."""
    for key, value in event.items():
        if isinstance(value, str) and key not in _MULTILINE:
            event[key] = printable(value)
    return event


def get_logger(name: str, **context: object) -> Logger:
    """A logger with `context` on every line: log.info("session ended", session=7)."""
    logger: Logger = structlog.stdlib.get_logger(name, **context)
    return logger
