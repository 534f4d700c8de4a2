"""What a user's or the system's action does to the status of a run: a pure function."""

from collections.abc import Mapping

from offbeat.contracts.runs import RunStatus
from offbeat.errors import ConflictError
from services.orchestrator.run_state import RunAction

_Q, _R, _P = RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.PAUSED
_S, _F, _C = RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED

TRANSITIONS: Mapping[tuple[RunStatus, RunAction], RunStatus] = {
    (_Q, RunAction.START): _R,
    (_Q, RunAction.PAUSE): _P,
    (_Q, RunAction.CANCEL): _C,
    (_Q, RunAction.FAIL): _F,
    (_R, RunAction.PAUSE): _P,
    (_R, RunAction.CANCEL): _C,
    (_R, RunAction.SUCCEED): _S,
    (_R, RunAction.FAIL): _F,
    (_P, RunAction.RESUME): _R,
    (_P, RunAction.CANCEL): _C,
    (_P, RunAction.FAIL): _F,
    (_F, RunAction.RETRY): _R,
    (_C, RunAction.RETRY): _R,
    # Repeating what is already so is no mistake: a client may not have seen the first answer.
    (_P, RunAction.PAUSE): _P,
    (_R, RunAction.RESUME): _R,
    (_R, RunAction.RETRY): _R,
    (_C, RunAction.CANCEL): _C,
}


def next_status(status: RunStatus, action: RunAction) -> RunStatus:
    """The status after the action; `ConflictError` names the actions that are possible."""
    try:
        return TRANSITIONS[status, action]
    except KeyError:
        possible = sorted(a for s, a in TRANSITIONS if s is status and a in USER_ACTIONS)
        hint = f"it can be: {', '.join(possible)}" if possible else "it cannot be changed any more"
        raise ConflictError(f"a run that is {status} cannot {action}; {hint}") from None


USER_ACTIONS = (RunAction.PAUSE, RunAction.RESUME, RunAction.CANCEL, RunAction.RETRY)
