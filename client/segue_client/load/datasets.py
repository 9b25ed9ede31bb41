"""Files of conversations and traces, one JSON object a line.

Conversations, as ShareGPT writes them or as chat messages:

    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello! How can I help?"}]}
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello! How can I help?"}]}

Traces, with seconds, or with milliseconds under the names that Mooncake's traces have:

    {"timestamp": 0.25, "prompt_tokens": 512, "output_tokens": 64}
    {"timestamp": 250, "input_length": 512, "output_length": 64}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from segue_client.load.distributions import SpecError

CHARACTERS_PER_TOKEN = 4  # of English; only for how long the answers of a data set are
_USER, _ASSISTANT = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"}

Exchange = tuple[str, int]  # what the user says, and tokens of the answer


def read_conversations(path: Path) -> Sequence[Sequence[Exchange]]:
    """The conversations of a file that hold at least one message of a user and its answer.

    Raises:
        SpecError: the file cannot be read, or a line is none of the forms above.
    """
    found = [exchanges for line, row in _rows(path) if (exchanges := _exchanges(line, row))]
    if not found:
        raise SpecError(f"{path} holds no conversation with a user's message and an answer")
    return found


def read_trace(path: Path) -> tuple[Sequence[float], Sequence[tuple[int, int]]]:
    """Moments, from the first one, and lengths of prompt and answer, in the order of time.

    Raises:
        SpecError: the file cannot be read, or a line is none of the forms above.
    """
    rows = sorted(_arrival(line, row) for line, row in _rows(path))
    if not rows:
        raise SpecError(f"{path} is empty")
    first = rows[0][0]
    return [moment - first for moment, _, _ in rows], [(prompt, output) for _, prompt, output in rows]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Each line's place, for messages, and its object."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _object(f"{path}:{number}", line)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8") from None


def _object(place: str, line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpecError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise SpecError(f"{place} is not a JSON object")
    return row


def _exchanges(place: str, row: dict[str, object]) -> list[Exchange]:
    messages = row.get("conversations", row.get("messages"))
    if not isinstance(messages, list):
        raise SpecError(f"{place}: there is no list under conversations or messages")
    exchanges: list[Exchange] = []
    asked: str | None = None
    for role, content in (_message(place, message) for message in messages):
        if role in _USER:
            asked = content
        elif role in _ASSISTANT and asked:
            exchanges.append((asked, max(1, len(content) // CHARACTERS_PER_TOKEN)))
            asked = None
    return exchanges


def _message(place: str, message: object) -> tuple[str, str]:
    if isinstance(message, dict):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return role, content
    raise SpecError(f"{place}: a message needs role and content (or from and value), both texts")


def _arrival(place: str, row: dict[str, object]) -> tuple[float, int, int]:
    mooncake = "input_length" in row
    names = ("timestamp", "input_length", "output_length") if mooncake else _OWN_NAMES
    moment, prompt, output = (_number(place, row, name) for name in names)
    return moment / 1000 if mooncake else moment, max(1, int(prompt)), max(1, int(output))


_OWN_NAMES = ("timestamp", "prompt_tokens", "output_tokens")


def _number(place: str, row: dict[str, object], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise SpecError(f"{place}: {name} is {value!r}; it must be a number, 0 or more")
    return float(value)
