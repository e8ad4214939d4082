"""The host's view of one answer: tokens to text, stop strings across token boundaries, and what of the text may be shown already."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are no whole character


class Answer:
    """The tokens and the text of one row, growing dispatch by dispatch.

    Attributes:
        token_ids: the tokens so far, the stop token included; cut behind the token that completes a stop string.
        stopped: whether a stop string has ended the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]):
        """`decode` turns all tokens of an answer into its text; `stop` are the stop strings."""
        self._decode = decode
        self._stop = tuple(stop)
        self._shown = 0
        self.token_ids: list[int] = []
        self.stopped = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a dispatch. Where one completes a stop string, it is the last one kept and `stopped` is set."""
        start = len(self.token_ids)
        self.token_ids.extend(tokens)
        if not self._stop or self._cut(self._decode(self.token_ids)) is None:
            return
        for end in range(start + 1, len(self.token_ids) + 1):
            if self._cut(self._decode(self.token_ids[:end])) is not None:
                del self.token_ids[end:]
                self.stopped = True
                return

    def text(self) -> str:
        """The text of the tokens so far, cut before the first stop string."""
        text = self._decode(self.token_ids)
        return text[: self._cut(text)]

    def new_text(self, last: bool) -> str:
        """Text not returned before that later tokens cannot change: no half character, no possible start of a stop string.

        With `last` the rest of the text, whatever it is.
        """
        text = self.text()
        end = len(text) if last else self._settled(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _cut(self, text: str) -> int | None:
        """Where the first stop string begins, or None."""
        return min((at for at in map(text.find, self._stop) if at >= 0), default=None)

    def _settled(self, text: str) -> int:
        """Length of the part of `text` that will stay as it is."""
        whole = text.rstrip(REPLACEMENT)
        for held in range(max(map(len, self._stop), default=1) - 1, 0, -1):
            ending = whole[-held:]
            if len(ending) == held and any(stop.startswith(ending) for stop in self._stop):
                return len(whole) - held
        return len(whole)
