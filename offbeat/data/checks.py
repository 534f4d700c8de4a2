"""What `POST /v1/runs` can refuse without reading any data or loading a model.

Everything else is found by the `prepare` job, which reads every row.
"""

from offbeat.contracts.data_sources import DataSection, InlineData, ReasoningGymData
from offbeat.data import gym
from offbeat.data.inline import inline_rows
from offbeat.data.rows import RowReader, checked_row
from offbeat.data.split import split_rows


def check_spec_data(section: DataSection, read: RowReader = checked_row) -> None:
    """Raise `InvalidDataError` for an unknown reasoning-gym task or setting, or a wrong inline row.

    Tasks are not checked where reasoning-gym is not installed.
    """
    if isinstance(section, InlineData):
        split_rows(section, inline_rows(section, read))
    elif isinstance(section, ReasoningGymData) and gym.is_installed():
        gym.check_tasks(section.tasks)
