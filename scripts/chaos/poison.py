"""A reward that kills every generator that scores a certain prompt.

A reward runs in a child of the generator, under the same user, so it can kill its parent. From
outside that looks like an engine that crashes on the prompt.
"""

import os
import signal
from collections.abc import Sequence

POISON = "poison"
REWARD_PATH = f"{__name__}:score_or_kill"


def score_or_kill(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """The length of each completion, unless the poison prompt is among theirs."""
    if POISON in prompts:
        os.kill(os.getppid(), signal.SIGKILL)
    return [float(len(completion)) for completion in completions]
