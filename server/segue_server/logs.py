"""How the log is written: lines for people, or one JSON object a line. Modules use `logging` and know nothing of it."""

import logging
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog
from structlog.processors import JSONRenderer, LogfmtRenderer, TimeStamper, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name

Record = MutableMapping[str, Any]
Format = Literal["console", "json"]

_FIELDS = LogfmtRenderer(bool_as_flag=False)


def set_up(level: str, form: Format) -> None:
    """Everything of `level` and above goes to standard error, what Python warns of included."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)


def formatter(form: Format) -> logging.Formatter:
    stamp = TimeStamper("iso", utc=True) if form == "json" else TimeStamper("%Y-%m-%d %H:%M:%S", utc=False)
    shared: list[structlog.typing.Processor] = [add_log_level, add_logger_name, stamp, ExtraAdder(), format_exc_info]
    render: structlog.typing.Processor = JSONRenderer(ensure_ascii=False) if form == "json" else _line
    return ProcessorFormatter(foreign_pre_chain=shared, processors=[ProcessorFormatter.remove_processors_meta, render])


def _line(logger: Any, method: str, record: Record) -> str:
    """time LEVEL logger: message key=value ..., and a traceback on lines of its own."""
    time, level, name, event = (record.pop(key) for key in ("timestamp", "level", "logger", "event"))
    trace = record.pop("exception", "")
    told = {key: value for key, value in record.items() if value is not None}
    fields = " " + str(_FIELDS(logger, method, told)) if told else ""
    return f"{time} {level.upper()} {name}: {event}{fields}" + (f"\n{trace}" if trace else "")
