"""Takes chat turns beside the jobs of the queue: a person waits for an answer, a batch does not.

A turn runs as any job does, lease and heartbeats included; only its message comes another way. One
that is lost with this process is not taken up again: the listener is told, and asks once more.
"""

import threading

import structlog

from offbeat.chat_channel import ChatSpeaker
from offbeat.errors import UnavailableError
from offbeat.worker import JobRunner

log = structlog.get_logger(__name__)

CHATS_AT_ONCE = 4
"""Turns answered at a time; each takes the engine as much as one more sample of a batch."""
TAKE_WAIT_S = 2.0
"""How soon the lane notices that it is to stop."""
RETRY_PAUSE_S = 1.0
STOP_TIMEOUT_S = 10.0
"""How long an answer under way may go on while the process ends."""


class ChatLane:
    """Some threads that take turns from the pool's list and run them."""

    def __init__(self, runner: JobRunner, speaker: ChatSpeaker, pool: str) -> None:
        self._runner = runner
        self._speaker = speaker
        self._pool = pool
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, name=f"chat-{number}", daemon=True)
            for number in range(CHATS_AT_ONCE)
        ]

    def start(self) -> None:
        """Begin to take turns."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take no more turns; wait a little for answers under way."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)

    def _loop(self) -> None:
        while not self._stopping.is_set() and not self._runner.leaving:
            try:
                message = self._speaker.take(self._pool, TAKE_WAIT_S)
            except UnavailableError as error:
                log.debug("No chat turns can be taken.", error=error.detail)
                self._stopping.wait(RETRY_PAUSE_S)
                continue
            if message is not None:
                self._runner.run(message)
