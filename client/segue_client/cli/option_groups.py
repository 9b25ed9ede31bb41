"""Commands whose options are declared once, in dataclasses that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer from a function of option groups.

    Every parameter of the function is a dataclass; each of its fields becomes an option, with the field's annotation
    (`Annotated[int, typer.Option(...)]`) and default. Two groups of one command must not share a field's name.

    Example:
        >>> @app.command()
        ... @grouped
        ... def run(target: TargetOptions, span: SpanOptions) -> None: ...
    """
    groups: dict[str, type[Any]] = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}
    parameters = [parameter for group in groups.values() for parameter in _parameters(group)]

    @wraps(command)
    def flat(**options: object) -> None:
        command(
            **{
                name: group(**{field.name: options[field.name] for field in fields(group)})
                for name, group in groups.items()
            }
        )

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
