"""Structured logs that read like sentences: text for people, JSON lines for machines.

Bind `run`, `job` and `version` with `structlog.contextvars.bound_contextvars`; they then stand in
every line.
"""

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from offbeat.settings import LogSettings

NOISY_LOGGERS = (
    "httpx",
    "httpcore",
    "botocore",
    "urllib3",
    "celery",
    "kombu",
    "alembic",
    "uvicorn",
)


def configure_logs(settings: LogSettings, service: str) -> None:
    """Send structlog and the standard library through one renderer, to standard error."""

    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {"service": service, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level]
        ),
        cache_logger_on_first_use=True,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=48)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
