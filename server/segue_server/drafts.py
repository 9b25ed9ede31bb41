"""Prompt lookup: guess what a sequence says next from what it has said before (Saxena 2023, "Prompt Lookup Decoding").

A pass over the model reads every weight, for one token or for eight. So the guesses run as further rows of the pass
that computes the last token; tokens are then drawn row by row, for as long as what is drawn is what was guessed. The
logits of a batch-invariant runner do not depend on the rows beside them, so the answer is the same bits without it.
"""

from array import array
from dataclasses import dataclass
from typing import Final

GRAM: Final = 3  # tokens that must have occurred before; two are found more often, and seldom go on the same way
ROWS: Final = 8  # of a pass, drafts included: on a CPU more of them cost what they bring
LONGEST: Final = ROWS - 1
LONGEST_REST: Final = 31  # passes


def lookup(tokens: "array[int]", count: int) -> "array[int]":
    """Up to `count` tokens that followed the last earlier occurrence of the last GRAM tokens; none if there is none."""
    size, text = tokens.itemsize, tokens.tobytes()
    gram = text[-GRAM * size :]
    at = text.rfind(gram, 0, len(text) - size)
    while at > 0 and at % size:  # found across the borders of tokens
        at = text.rfind(gram, 0, at + len(gram) - 1)
    after = at // size + GRAM if at >= 0 else len(tokens)
    return tokens[after : after + count]


@dataclass(slots=True)
class Pace:
    """How many tokens to guess in a turn: more after drafts that came true, longer and longer pauses after others."""

    width: int = 2
    misses: int = 0  # in a row
    rest: int = 0  # passes without a guess

    def ask(self) -> int:
        if not self.rest:
            return self.width
        self.rest -= 1
        return 0

    def learn(self, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` tokens, at least one, came true."""
        if accepted:
            self.misses = 0
            self.width = min(2 * self.width, LONGEST) if accepted == drafted else max(2, accepted)
        else:
            self.misses += 1
            self.width, self.rest = 2, min(2**self.misses - 1, LONGEST_REST)
