"""What rows of logits are asked for, the way the kernels take it, and what comes back."""

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from segue_model.arrays import Logits
from segue_model.runner.native.library import DRAW, Drawn, Refusal
from segue_model.sampling import Outcome, Sampled, SampleRequest, SamplingError, logprob_of
from segue_model.softmax import Ids, log_total

_NO_LISTS: Final = (0, 0, 0, 0, 0, 0, 0)
_NAMES: Final = {
    Refusal.LOGITS: "logit",
    Refusal.ADJUSTED: "logit after bias, penalties and bans",
    Refusal.BIAS: "logit_bias",
    Refusal.HISTORY: "history",
    Refusal.BANNED: "banned",
}


class FlatDraws:
    """A draw for each row, and the memory that it points to."""

    def __init__(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> None:
        """rows: as sampling.check_rows wants them, and at least one."""
        self._rows = [_addressable(row) for row in rows]
        self._requests = requests
        self._held: list[npt.NDArray[np.generic]] = []
        self._best: dict[int, Ids] = {}
        self.vocab = rows[0].size
        self.packed = b"".join(map(self._pack, range(len(rows))))

    def outcomes(self, drawn: Iterable[Drawn]) -> list[Outcome]:
        """The kernels' answers, in the order of the rows."""
        return [self._outcome(number, *each) for number, each in enumerate(drawn)]

    def _pack(self, number: int) -> bytes:
        request = self._requests[number]
        sampling = request.sampling
        plain = not (sampling.logit_bias or request.banned or sampling.penalises)
        return DRAW.pack(
            ctypes.addressof(ctypes.c_float.from_buffer(self._rows[number].data)),
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.seed,
            request.position,
            min(sampling.top_k or self.vocab, self.vocab),
            *(_NO_LISTS if plain else self._lists(request)),
            *((-1, 0) if request.top_logprobs is None else self._wanted(number, request.top_logprobs)),
        )

    def _lists(self, request: SampleRequest) -> tuple[int, int, int, int, int, int, int]:
        """The addresses of bias ids, biases, history and banned ids; how many of each."""
        bias, banned = request.sampling.logit_bias, request.banned
        history = request.history if request.sampling.penalises else ()
        return (
            self._address_of(bias, np.int64),
            self._address_of(bias.values(), np.float64),
            self._address_of(history, np.int64),
            self._address_of(banned, np.int64),
            len(bias),
            len(history),
            len(banned),
        )

    def _address_of(self, values: Collection[float], dtype: type[np.generic]) -> int:
        self._held.append(np.fromiter(values, dtype, len(values)))
        return self._held[-1].ctypes.data

    def _wanted(self, number: int, top_logprobs: int) -> tuple[int, int]:
        """How many best tokens are wanted, and where to."""
        self._best[number] = np.empty(min(top_logprobs, self.vocab), np.int64)
        return self._best[number].size, self._best[number].ctypes.data

    def _outcome(self, number: int, token: int, mass: int, peak: float, refusal: int) -> Outcome:
        if refusal:
            return self._refusal(Refusal(refusal), token, peak)
        if number not in self._best:
            return Sampled(token, None)
        best = self._best[number].tolist()
        return Sampled(token, logprob_of(self._rows[number], token, log_total(peak, mass), best))

    def _refusal(self, refusal: Refusal, token: int, value: float) -> SamplingError:
        if refusal in (Refusal.LOGITS, Refusal.ADJUSTED):
            return SamplingError.no_best(_NAMES[refusal], value, token)
        return SamplingError.unknown_token(_NAMES[refusal], token, self.vocab)


def _addressable(row: Logits) -> Logits:
    """The row as it is, or copied where its memory cannot be pointed to: ctypes points to what may be written."""
    contiguous = np.ascontiguousarray(row, np.float32)
    return contiguous if contiguous.flags.writeable else contiguous.copy()
