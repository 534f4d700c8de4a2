"""The child process: rewards that hang, crash and lie cost their own scores and nothing else.

The functions that the child runs stand first in this file.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.contracts.run_spec import ExactMatchReward, PythonReward, RegexReward, RewardSection
from offbeat.rewards.scorer import RewardScorer
from offbeat.rewards.scores import RewardFailure, RewardSample, SampleScore

DEADLINE_S = 30.0


def hang(**_: object) -> list[float]:
    while True:
        pass


def die(**_: object) -> list[float]:
    os._exit(7)


def die_quietly(**_: object) -> list[float]:
    os._exit(0)


def leave(**_: object) -> list[float]:
    sys.exit("bye")


class OwnError(Exception):
    """An error that only the child can build."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail(**_: object) -> list[float]:
    raise OwnError("no ", "score")


def devour(**_: object) -> list[float]:
    return list(bytearray(9 * 2**30))


def mixed(completions: list[str], **_: object) -> list[float | None]:
    return [float("nan") if text == "nan" else None if text == "?" else 1.0 for text in completions]


def loads_torch(completions: list[str], **_: object) -> list[bool]:
    return ["torch" in sys.modules] * len(completions)


def shout(completions: list[str], **_: object) -> list[float]:
    print("noise")  # noqa: T201 - that nobody hears it is what is tested
    os.write(1, b"more noise")
    return [1.0] * len(completions)


def process_id(completions: list[str], **_: object) -> list[float]:
    return [float(os.getpid())] * len(completions)


def killed_once(marker: list[str], **_: object) -> list[float]:
    if not os.path.exists(marker[0]):
        Path(marker[0]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(marker)


# ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    with RewardScorer() as scorer:
        scorer.warm_up()
        yield scorer


def python(function: str, *, timeout_s: float = 30.0) -> PythonReward:
    return PythonReward(
        type="python", name=function, path=f"{__name__}:{function}", timeout_s=timeout_s
    )


EXACT = ExactMatchReward(type="exact_match", weight=0.5)


def samples(*completions: str) -> list[RewardSample]:
    return [
        RewardSample(
            completion=completion, completion_ids=(), columns={"prompt": "p", "answer": "yes"}
        )
        for completion in completions
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (python("hang", timeout_s=0.3), "was not done after 0.3 s"),
        (python("die"), "ended its process 2 times, with exit code 7"),
        (python("die_quietly", timeout_s=0.3), "was not done after 0.3 s"),
        (python("leave"), "SystemExit: bye (test_rewards_scorer.py:"),
        (python("fail"), f"{__name__}.OwnError: no score (test_rewards_scorer.py:"),
        (python("devour"), "MemoryError (test_rewards_scorer.py:"),
        (
            RegexReward(type="regex", name="evil", pattern="(a+)+$", timeout_s=0.3),
            "was not done after 0.3 s",
        ),
        (PythonReward(type="python", name="lost", path="no.such:fn"), "cannot import 'no.such'"),
    ],
)
def test_a_part_that_breaks_scores_nothing_and_the_others_go_on(
    scorer: RewardScorer, part: RewardSection, message: str
) -> None:
    long = "a" * 40 + "!"
    batch = scorer.score([part, EXACT], samples("yes", long))
    assert batch.scores == (
        SampleScore(reward=0.5, rewards={part.label: None, "exact_match": 1.0}),
        SampleScore(reward=0.0, rewards={part.label: None, "exact_match": 0.0}),
    )
    [failure] = batch.failures
    assert failure.part == part.label
    assert message in failure.message


def test_x6_a_thread_scores_within_the_limit_and_without_signals(scorer: RewardScorer) -> None:
    evil = RegexReward(type="regex", name="evil", pattern="(a+)+$", timeout_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(scorer.score, [evil, EXACT], samples("a" * 40 + "!", "yes")).result()
    assert [score.reward for score in batch.scores] == [0.0, 0.5]
    assert [failure.message for failure in batch.failures] == ["was not done after 0.3 s"]


def test_a_part_alone_that_breaks_leaves_no_reward(scorer: RewardScorer) -> None:
    batch = scorer.score([python("fail")], samples("yes"))
    assert batch.scores == (SampleScore(reward=None, rewards={"fail": None}),)


def test_none_is_no_failure_and_nan_is_one_for_its_sample(scorer: RewardScorer) -> None:
    batch = scorer.score([python("mixed")], samples("a", "?", "nan"))
    assert [score.reward for score in batch.scores] == [1.0, None, None]
    assert batch.failures == (
        RewardFailure(
            part="mixed",
            message="1 of 3 samples not scored; sample 2: nan is not finite: return None for no "
            "score",
        ),
    )


def test_nothing_to_score_is_no_scores(scorer: RewardScorer) -> None:
    assert scorer.score([EXACT], []).scores == ()


def test_the_child_is_light_quiet_and_stays(
    scorer: RewardScorer, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [python("loads_torch"), python("shout"), python("process_id")]
    first, again = (scorer.score(parts, samples("a")).scores[0].rewards for _ in range(2))
    assert first == again
    assert (first["loads_torch"], first["shout"]) == (0.0, 1.0)
    assert first["process_id"] not in (None, float(os.getpid()))
    assert capfd.readouterr().out == ""


def test_a_child_that_is_killed_from_outside_changes_no_score(
    scorer: RewardScorer, tmp_path: Path
) -> None:
    old = scorer.score([python("process_id")], samples("a")).scores[0].reward
    assert old is not None
    os.kill(int(old), signal.SIGKILL)
    [sample] = samples("a")
    sample = replace(sample, columns={**sample.columns, "marker": str(tmp_path / "marker")})
    batch = scorer.score([python("killed_once")], [sample])
    assert batch.scores == (SampleScore(reward=1.0, rewards={"killed_once": 1.0}),)
    assert batch.failures == ()
    assert (tmp_path / "marker").exists()


def test_what_is_wrong_with_parts_is_told_before_they_score(scorer: RewardScorer) -> None:
    lost = PythonReward(type="python", path="no.such:fn")
    failures = scorer.check([EXACT, lost, RegexReward(type="regex", pattern="[")])
    assert [failure.part for failure in failures] == ["python", "regex"]
    assert "cannot import 'no.such' on this generator" in failures[0].message
    assert "the pattern '[' is not a regular expression" in failures[1].message


def test_a_module_in_the_folder_of_the_start_is_found_and_an_interrupt_ends_the_child(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "import os, pathlib, time\n"
        "def slow(completions, **_):\n"
        "    pathlib.Path('child').write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "service").mkdir()
    # A shell has what it starts in the background ignore interrupts, and a test run is started so.
    (tmp_path / "service" / "__main__.py").write_text(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from offbeat.contracts.run_spec import PythonReward\n"
        "from offbeat.rewards.scorer import RewardScorer\n"
        "from offbeat.rewards.scores import RewardSample\n"
        "part = PythonReward(type='python', path='my_rewards:slow')\n"
        "sample = RewardSample(completion='', completion_ids=(), columns={'prompt': ''})\n"
        "with RewardScorer() as scorer:\n"
        "    scorer.score([part], [sample])\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-m", "service"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = int((tmp_path / "child").read_text())
    os.killpg(parent.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    parent.wait(timeout=DEADLINE_S)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
