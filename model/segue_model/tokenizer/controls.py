"""Where a text could be taken for a control token, alone or together with what is put around it."""

from collections.abc import Iterable


class ControlTexts:
    """The control tokens of a vocabulary as text.

    Those of one character are left out: they are matched as characters too, and cannot be broken.
    """

    __slots__ = ("_heads", "_longest", "_tails", "_texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(text for text in texts if len(text) > 1)
        self._longest = max(map(len, self._texts), default=0)
        self._heads = {text[:cut] for text in self._texts for cut in range(1, len(text))}
        self._tails = {text[cut:] for text in self._texts for cut in range(1, len(text))}

    def guarded(self, text: str, guard: str) -> str:
        """`text` with the character `guard` put in at each place where it is, or could become, a control token."""
        for place in sorted(self._inside(text) | self._at_edges(text), reverse=True):
            text = text[:place] + guard + text[place:]
        return text

    def _inside(self, text: str) -> set[int]:
        return {start + 1 for control in self._texts for start in _occurrences(control, text)}

    def _at_edges(self, text: str) -> set[int]:
        """Where the text ends with the beginning of a control token, or begins with the end of one.

        Templates strip blanks, so what counts as the edge is looked for with and without them.
        """
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        lengths = range(1, self._longest)
        ends = {stop for stop in (end, len(text)) if any(text[max(0, stop - n) : stop] in self._heads for n in lengths)}
        begins = {start for start in (0, begin) if any(text[start : start + n] in self._tails for n in lengths)}
        return ends | begins


def _occurrences(needle: str, text: str) -> list[int]:
    """Every start of `needle`, also of ones that overlap."""
    starts = []
    start = text.find(needle)
    while start >= 0:
        starts.append(start)
        start = text.find(needle, start + 1)
    return starts
