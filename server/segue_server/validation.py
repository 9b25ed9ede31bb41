"""Is a request within the declared limits? Collects every violation, so that a caller can mend them all at once."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from segue_server.errors import FieldInvalid, FieldViolation
from segue_server.requests import (
    AppendRequest,
    ChatTurn,
    ContextPolicy,
    CreateSessionRequest,
    ForkSessionRequest,
    GenerateRequest,
    Input,
    ListSessionsRequest,
    MoveCacheRequest,
    OutputOptions,
    ReadTokensRequest,
    RewindSessionRequest,
    SamplingParams,
    ScoreTokensRequest,
    SessionSettings,
    StopConditions,
    TextInput,
    TokenInput,
    WatchSessionsRequest,
)
from segue_server.sessions import new_session_id
from segue_server.views import Limits

SESSION_ID = re.compile(r"[a-z0-9][a-z0-9-]{2,62}")
MAX_LABELS = 16
MAX_LABEL_CHARS = 256
MAX_NAME_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
MAX_FORKS = 64
MAX_INT64 = (1 << 63) - 1


def fork_ids(request: ForkSessionRequest) -> list[str]:
    """The ids of the children; new ones where the caller named none."""
    base = request.new_session_id
    if request.count is None:
        return [base or new_session_id()]
    base = base or new_session_id()
    return [f"{base}-{number}" for number in range(request.count)]


class Checker:
    """Gathers violations; `done` raises them together."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        self.limits = limits
        self.vocab_size = vocab_size
        self.violations: list[FieldViolation] = []

    def done(self) -> None:
        """Raises FieldInvalid with everything that was found."""
        if self.violations:
            raise FieldInvalid(self.violations)

    def refuse(self, field: str, description: str) -> None:
        self.violations.append(FieldViolation(field, description))

    def within(
        self, field: str, value: float | None, low: float, high: float, *, above: bool = False, below: bool = False
    ) -> None:
        """`value` is unset, or in [low, high]; with `above` / `below` that end is excluded. NaN never is."""
        if value is None:
            return
        fits_low = value > low if above else value >= low
        fits_high = value < high if below else value <= high
        if not (fits_low and fits_high):
            interval = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
            self.refuse(field, f"must be in {interval}, got {value:g}")

    # Requests

    def create_session(self, request: CreateSessionRequest, served_dtype: str) -> None:
        if request.session_id:
            self.session_id("session_id", request.session_id)
        self.request_id(request.request_id)
        self.labels(request.display_name, request.labels)
        self.settings(request.settings, served_dtype)
        self.input("prefix", request.prefix)

    def generate(self, request: GenerateRequest) -> None:
        if request.session_id:
            self.session_id("session_id", request.session_id)
        self.request_id(request.request_id)
        self.within("expected_position", request.expected_position, 0, MAX_INT64)
        self.input("input", request.input)
        self.sampling("sampling", request.sampling)
        self.stop("stop", request.stop)
        self.output("output", request.output)
        self.within("priority", request.priority, -100, 100)
        self.within("queue_timeout", request.queue_timeout, 0, math.inf)

    def append(self, request: AppendRequest) -> None:
        self.session_id("session_id", request.session_id)
        self.request_id(request.request_id)
        self.within("expected_position", request.expected_position, 0, MAX_INT64)
        self.input("input", request.input)
        self.output("output", request.output)

    def fork(self, request: ForkSessionRequest, served_dtype: str) -> None:
        self.session_id("session_id", request.session_id)
        self.request_id(request.request_id)
        self.within("position", request.position, 0, MAX_INT64)
        self.within("count", request.count, 1, MAX_FORKS)
        for child in fork_ids(request)[:1]:
            self.session_id("new_session_id", child)
        self.settings(request.settings, served_dtype)

    def rewind(self, request: RewindSessionRequest) -> None:
        self.session_id("session_id", request.session_id)
        self.within("position", request.position, 0, MAX_INT64)
        self.within("turn", request.turn, -1, MAX_INT64)
        if (request.position is None) == (request.turn is None):
            self.refuse("to", "exactly one of position and turn must be given")

    def read_tokens(self, request: ReadTokensRequest) -> None:
        self.session_id("session_id", request.session_id)
        self.within("start_position", request.start_position, 0, MAX_INT64)
        self.within("end_position", request.end_position, request.start_position, MAX_INT64)

    def watch(self, request: WatchSessionsRequest) -> None:
        if request.session_id:
            self.session_id("session_id", request.session_id)
        self.within("after_sequence", request.after_sequence, 0, MAX_INT64)

    def score(self, request: ScoreTokensRequest) -> None:
        self.session_id("session_id", request.session_id)
        self.token_ids("token_ids", request.token_ids)
        self._not_empty("token_ids", request.token_ids)
        self.within("top_logprobs", request.top_logprobs, 0, self.limits.max_top_logprobs)

    def move_cache(self, request: MoveCacheRequest) -> None:
        self.session_id("session_id", request.session_id)
        self.within("from_position", request.from_position, 0, MAX_INT64)

    def list_sessions(self, request: ListSessionsRequest) -> None:
        if request.page_size < 0:
            self.refuse("page_size", f"must not be negative, got {request.page_size}")

    # Parts

    def labels(self, display_name: str, labels: Mapping[str, str]) -> None:
        self._short("display_name", display_name, MAX_NAME_CHARS)
        if len(labels) > MAX_LABELS:
            self.refuse("labels", f"at most {MAX_LABELS} labels, got {len(labels)}")
        for key, value in list(labels.items())[:MAX_LABELS]:
            self._short(f"labels[{key[:40]!r}]", key + value, MAX_LABEL_CHARS)

    def session_id(self, field: str, value: str) -> None:
        if not SESSION_ID.fullmatch(value):
            self.refuse(field, f"must match {SESSION_ID.pattern}, got {value[:80]!r}")

    def request_id(self, value: str) -> None:
        self._short("request_id", value, MAX_REQUEST_ID_CHARS)

    def input(self, field: str, given: Input) -> None:
        match given:
            case TokenInput(ids):
                self.token_ids(f"{field}.token_ids", ids)
                self._not_empty(f"{field}.token_ids", ids)
            case TextInput(text):
                self._not_empty(f"{field}.text", text)
            case ChatTurn(messages):
                self._not_empty(f"{field}.chat.messages", messages)
                for number, message in enumerate(messages):
                    if not message.role:
                        self.refuse(f"{field}.chat.messages[{number}].role", "must not be empty")
            case None:
                pass

    def token_ids(self, field: str, ids: Iterable[int]) -> None:
        """Names the first id out of the vocabulary; a hostile request could hold a million."""
        for number, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                self.refuse(f"{field}[{number}]", f"must be in [0, {self.vocab_size}), got {token}")
                return

    def sampling(self, field: str, given: SamplingParams) -> None:
        self.within(f"{field}.temperature", given.temperature, 0, 2)
        self.within(f"{field}.top_p", given.top_p, 0, 1, above=True)
        self.within(f"{field}.top_k", given.top_k, 1, MAX_INT64)
        self.within(f"{field}.min_p", given.min_p, 0, 1, below=True)
        self.within(f"{field}.repetition_penalty", given.repetition_penalty, 0, 100, above=True)
        self.within(f"{field}.frequency_penalty", given.frequency_penalty, -2, 2)
        self.within(f"{field}.presence_penalty", given.presence_penalty, -2, 2)
        self.within(f"{field}.penalty_last_tokens", given.penalty_last_tokens, 0, MAX_INT64)
        self._logit_bias(f"{field}.logit_bias", given)

    def _logit_bias(self, field: str, given: SamplingParams) -> None:
        bias = given.logit_bias or {}
        if len(bias) > self.limits.max_logit_bias_count:
            self.refuse(field, f"at most {self.limits.max_logit_bias_count} entries, got {len(bias)}")
            return
        self.token_ids(field, bias)
        for token, value in bias.items():
            self.within(f"{field}[{token}]", value, -1000, 1000)

    def stop(self, field: str, given: StopConditions) -> None:
        self.within(f"{field}.max_tokens", given.max_tokens, 1, MAX_INT64)
        self.within(f"{field}.min_tokens", given.min_tokens, 0, MAX_INT64)
        if given.min_tokens and given.max_tokens and given.min_tokens > given.max_tokens > 0:
            self.refuse(f"{field}.min_tokens", f"must not be above max_tokens, {given.max_tokens}")
        self.within(f"{field}.time_limit", given.time_limit, 0, math.inf, above=True)
        self.token_ids(f"{field}.stop_token_ids", given.stop_token_ids or ())
        self._stop_sequences(f"{field}.stop_sequences", given.stop_sequences or ())

    def _stop_sequences(self, field: str, sequences: Sequence[str]) -> None:
        if len(sequences) > self.limits.max_stop_sequences:
            self.refuse(field, f"at most {self.limits.max_stop_sequences} sequences, got {len(sequences)}")
            return
        for number, sequence in enumerate(sequences):
            self._not_empty(f"{field}[{number}]", sequence)
            self._short(f"{field}[{number}]", sequence, self.limits.max_stop_sequence_chars)

    def output(self, field: str, given: OutputOptions) -> None:
        self.within(f"{field}.top_logprobs", given.top_logprobs, 0, self.limits.max_top_logprobs)
        self.within(f"{field}.max_tokens_per_event", given.max_tokens_per_event, 1, 1024)
        self.within(f"{field}.max_event_delay", given.max_event_delay, 0, 10)
        self.within(f"{field}.heartbeat_interval", given.heartbeat_interval, 0, 3600)

    def settings(self, given: SessionSettings, served_dtype: str) -> None:
        field = "settings"
        self.within(f"{field}.ttl", given.ttl, 0, math.inf, above=True)
        self.within(f"{field}.max_context_tokens", given.max_context_tokens, 1, MAX_INT64)
        self.within(f"{field}.priority", given.priority, -100, 100)
        self.within(f"{field}.keep_tokens", given.keep_tokens, 0, MAX_INT64)
        if given.kv_dtype not in (None, served_dtype):
            self.refuse(f"{field}.kv_dtype", f"this server keeps KV in {served_dtype}, got {given.kv_dtype}")
        if given.context_policy is ContextPolicy.SLIDE and given.max_context_tokens is not None:
            below = given.max_context_tokens - 1
            self.within(f"{field}.keep_tokens", given.keep_tokens, 0, below, below=True)
        self.sampling(f"{field}.default_sampling", given.default_sampling)
        self.stop(f"{field}.default_stop", given.default_stop)

    def _not_empty(self, field: str, value: Sequence[object]) -> None:
        if not len(value):
            self.refuse(field, "must not be empty")

    def _short(self, field: str, value: str, most: int) -> None:
        if len(value) > most:
            self.refuse(field, f"at most {most} characters, got {len(value)}")
