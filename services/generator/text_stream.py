"""From token ids to text as they come: whole characters only, and nothing of a stop string.

A token may hold half of a character, and the next one may finish a stop string, so text that could
still change or be cut off is held back until it cannot.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 16
"""Tokens decoded before new ones, so that spaces and split characters come out as in the whole."""
BROKEN_CHARS_MAX = 3
"""A character of UTF-8 has at most four bytes, so so many signs may stand for an unfinished one."""
BROKEN = "\ufffd"


class TextStream:
    """The text of one completion. What was given out never changes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """What can be shown once these tokens have come too."""
        start = max(0, len(self._ids) - CONTEXT_TOKENS)
        before = _settled(self._decode(start))
        self._ids += ids
        return self._pass_on(_settled(self._decode(start))[len(before) :])

    def finish(self) -> str:
        """The rest, once no more tokens come."""
        start = max(0, len(self._ids) - CONTEXT_TOKENS)
        text = self._decode(start)
        shown = self._pass_on(text[len(_settled(text)) :])
        return shown if self._stopped else shown + self._held

    def _decode(self, start: int) -> str:
        text = self._tokenizer.decode(
            self._ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _pass_on(self, text: str) -> str:
        """What is neither in a stop string nor perhaps the beginning of one."""
        if self._stopped:
            return ""
        text = self._held + text
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self._stopped = bool(ends)
        shown = min(ends) if ends else len(text) - _begun(text, self._stop)
        self._held = text[shown:]
        return text[:shown]


def _settled(text: str) -> str:
    """The text without the signs at its end that further tokens may turn into a character."""
    whole = text.rstrip(BROKEN)
    return text[: max(len(whole), len(text) - BROKEN_CHARS_MAX)]


def _begun(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    ends = (text[-length:] for length in range(longest, 0, -1))
    return next((len(end) for end in ends if any(s.startswith(end) for s in stop)), 0)
