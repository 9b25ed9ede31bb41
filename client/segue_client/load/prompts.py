"""The words and token ids of prompts that are made up.

Equal names give equal prompts within one run and other ones in the next: a server keeps KV of what it has seen, and a
run must not profit from the one before.
"""

from __future__ import annotations

from random import Random

from segue_client.load.workload import Prompt

# Short, frequent words are one token with the space before them in nearly every English vocabulary.
_WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body back parent face others level office door
health person art war history party result change morning reason research girl guy moment air teacher force
education""".split()  # noqa: SIM905  as many quotes would hide the words


class PromptMaker:
    """Makes prompts for one run.

    Args:
        salt: of the run.
        vocabulary: token ids are 0..vocabulary-1.
        words_per_token: how many words of the list above make a token of the model.
    """

    def __init__(self, salt: str, vocabulary: int = 0, words_per_token: float = 1.0) -> None:
        self._salt = salt
        self._ids = range(vocabulary)
        self.words_per_token = words_per_token

    def tokens(self, prompt: Prompt) -> list[int]:
        """Random token ids, exactly as many as wanted."""
        return self._rng(prompt).choices(self._ids, k=prompt.tokens)

    def text(self, prompt: Prompt) -> str:
        """The data set's text, or random words that make about as many tokens as wanted."""
        if prompt.text is not None:
            return prompt.text
        return " ".join(self._rng(prompt).choices(_WORDS, k=max(1, round(prompt.tokens * self.words_per_token))))

    def _rng(self, prompt: Prompt) -> Random:
        return Random(f"{self._salt}/{prompt.name}")  # noqa: S311  no secret
