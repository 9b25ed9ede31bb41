"""What rows of logits are asked for, the way the kernels take it, and what comes back."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from segue_model.arrays import Logits
from segue_model.runner.native.library import Draw, Drawn, Refusal
from segue_model.sampling import Outcome, Sampled, SampleRequest, SamplingError, logprob_of
from segue_model.softmax import Ids, log_total

_NAMES: Final = {
    Refusal.LOGITS: "logit",
    Refusal.ADJUSTED: "logit after bias, penalties and bans",
    Refusal.BIAS: "logit_bias",
    Refusal.HISTORY: "history",
    Refusal.BANNED: "banned",
}


class FlatDraws:
    """A draw for each row, and the memory that the C structures point to."""

    def __init__(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> None:
        """rows: as sampling.check_rows wants them."""
        self._rows = [np.ascontiguousarray(row, np.float32) for row in rows]
        self._requests = requests
        self._held: list[npt.NDArray[np.generic]] = []
        self._best: dict[int, Ids] = {}
        self.vocab = self._rows[0].size
        self.draws = (Draw * len(rows))(*(self._draw(number) for number in range(len(rows))))

    def outcomes(self, drawn: Iterable[Drawn]) -> list[Outcome]:
        """The kernels' answers, in the order of the rows."""
        return [self._outcome(number, each) for number, each in enumerate(drawn)]

    def _draw(self, number: int) -> Draw:
        request = self._requests[number]
        sampling = request.sampling
        history = request.history if sampling.penalises else ()
        return Draw(
            self._rows[number].ctypes.data,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.seed,
            request.position,
            min(sampling.top_k or self.vocab, self.vocab),
            self._hold(sampling.logit_bias, np.int64),
            self._hold(sampling.logit_bias.values(), np.float64),
            self._hold(history, np.int64),
            self._hold(request.banned, np.int64),
            len(sampling.logit_bias),
            len(history),
            len(request.banned),
            *self._wanted(number, request.top_logprobs),
        )

    def _hold(self, values: Collection[float], dtype: type[np.generic]) -> int | None:
        """The address of an array of the values; None when there are none."""
        if not values:
            return None
        self._held.append(np.fromiter(values, dtype, len(values)))
        return self._held[-1].ctypes.data

    def _wanted(self, number: int, top_logprobs: int | None) -> tuple[int, int | None]:
        """How many best tokens are wanted, and the address they go to."""
        if not top_logprobs:
            return (-1 if top_logprobs is None else 0), None
        self._best[number] = np.empty(min(top_logprobs, self.vocab), np.int64)
        return self._best[number].size, self._best[number].ctypes.data

    def _outcome(self, number: int, drawn: Drawn) -> Outcome:
        token, peak = drawn.token, drawn.peak
        if drawn.refusal:
            return self._refusal(Refusal(drawn.refusal), token, peak)
        if self._requests[number].top_logprobs is None:
            return Sampled(token, None)
        best = self._best[number].tolist() if number in self._best else ()
        return Sampled(token, logprob_of(self._rows[number], token, log_total(peak, drawn.mass), best))

    def _refusal(self, refusal: Refusal, token: int, value: float) -> SamplingError:
        if refusal in (Refusal.LOGITS, Refusal.ADJUSTED):
            return SamplingError.no_best(_NAMES[refusal], value, token)
        return SamplingError.unknown_token(_NAMES[refusal], token, self.vocab)
