"""Structured logs: one JSON object or one console line per record, with the ids of request and trace, never with the prompt."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Any

from services.common.trace_context import trace_id_of, traceparent_var

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "request_id",
    "color_message",
}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD}


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "") or request_id_var.get())


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts, level, service, logger, msg, request_id, trace_id, then the record's `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        body: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if request_id := _request_id(record):
            body["request_id"] = request_id
        if traceparent := traceparent_var.get():
            body["trace_id"] = trace_id_of(traceparent)
        body.update(_extras(record))
        if record.exc_info:
            body["exc"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """`12:00:00.000 INFO  gateway | message key=value`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        parts = [f"{clock} {record.levelname:<7} {self._service} | {record.getMessage()}"]
        if request_id := _request_id(record):
            parts.append(f"request_id={request_id}")
        parts.extend(f"{k}={v}" for k, v in _extras(record).items())
        line = " ".join(parts)
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure_logging(service: str, *, level: str = "info", json_lines: bool = False) -> None:
    """Sends every logger to standard error in one format.

    Args:
        service: shown in every record, e.g. ``gpu_worker``.
        level: debug, info, warning or error.
        json_lines: JSON instead of console lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if json_lines else ConsoleFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = True
    # A line for each request, of which we have our own, or whose address carries a signature (the hub's downloads).
    for name in ("uvicorn.access", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
