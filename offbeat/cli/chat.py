"""A conversation with a policy in the terminal. Answers are shown while they are made.

Ctrl-C stops an answer, and the generator with it, but not the conversation.
"""

import sys
from contextlib import closing, suppress

from rich.text import Text

from offbeat.cli import text
from offbeat.cli.session import Session
from offbeat.contracts.chat import ChatMessage
from offbeat.contracts.completions import ChatCompletionChunk
from offbeat.errors import OffbeatError

HINT = "Ctrl-C stops an answer, /reset forgets the conversation, /quit or Ctrl-D ends it."


class Conversation:
    """What was said so far, and with whom."""

    def __init__(
        self, session: Session, model: str, temperature: float | None, max_tokens: int | None
    ) -> None:
        self._session = session
        self._model = model
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._messages: list[ChatMessage] = []

    def reset(self) -> None:
        """Forget what was said."""
        self._messages.clear()

    def ask(self, question: str) -> None:
        """Show the answer while it is made; what was shown is kept, also of a broken one."""
        # A terminal may hand over bytes that are no text.
        question = question.encode(errors="replace").decode()
        self._messages.append(ChatMessage(role="user", content=question))
        said: list[str] = []
        chunks = self._session.client.chat(
            self._model,
            self._messages,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
        )
        try:
            with closing(chunks):
                for chunk in chunks:
                    self._show(chunk, said)
        finally:
            if any(said):
                self._messages.append(ChatMessage(role="assistant", content="".join(said)))
            else:
                self._messages.pop()

    def _show(self, chunk: ChatCompletionChunk, said: list[str]) -> None:
        session = self._session
        for choice in chunk.choices:
            said.append(choice.delta.content or "")
            if not session.as_json:
                session.out.print(Text(text.safe(said[-1])), end="", soft_wrap=True)
        if chunk.usage is not None:
            answer = {"model": chunk.model, "answer": "".join(said), "usage": chunk.usage}
            session.stream(answer, Text())
            session.note(f"{chunk.model}, {chunk.usage.completion_tokens} tokens")


def converse(session: Session, conversation: Conversation) -> None:
    """Take questions until there are no more."""
    with suppress(ImportError):
        import readline  # noqa: F401 - it gives `input` its arrow keys and history
    session.note(HINT)
    while (question := _question()) is not None:
        if question == "/quit":
            return
        if question == "/reset":
            conversation.reset()
            session.note("Forgotten.")
        elif question.startswith("/"):
            session.note(HINT)
        elif question:
            _ask(session, conversation, question)


def _ask(session: Session, conversation: Conversation, question: str) -> None:
    try:
        conversation.ask(question)
    except KeyboardInterrupt:
        session.err.print(Text("\nstopped", "dim"))
    except OffbeatError as error:
        session.err.print(Text.assemble(("error: ", "red"), text.safe(error.detail)))


def _question() -> str | None:
    """The next line; None at the end. Ctrl-C gives up a line that is being written."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        return ""
    except EOFError:
        return None
