"""What a rollout worker tells the driver of an episode. Tokens stay in TransferQueue; these facts steer the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spear_agents.trajectory import Trajectory
from spear_training.algorithms import has_repetition


@dataclass(frozen=True)
class RowRecord:
    """One training row (a turn, or a whole conversation); its tokens lie in TransferQueue under ``key``."""

    key: str
    turn: int
    prompt_length: int
    response_length: int
    loss_tokens: int
    finished: bool
    """The last response of the row ended with a stop token or a stop string, not at the token limit."""
    void: bool
    """Some turn of the row holds no action."""
    repetitive: bool
    anchor: str
    step_reward: float
    """Native reward of the row's turns (GiGPO's step reward)."""


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode: which group it belongs to, how it ended, what it earned."""

    group: str
    sample: int
    task_id: str
    subtask: str
    terms: Mapping[str, float]
    won: bool
    score: float
    tool_calls: int
    stop: str
    fault: str | None
    turns: int
    well_formed_turns: int
    valid_actions: int
    rows: tuple[RowRecord, ...]

    @property
    def trajectory_id(self) -> str:
        """Unique within a step."""
        return f"{self.group}_{self.sample}"


def record_episode(trajectory: Trajectory, group: str, sample: int, *, find_repetition: bool) -> EpisodeRecord:
    """Summarise ``trajectory`` as member ``sample`` of ``group``; row keys are ``<group>_<sample>_<row>``."""
    turns = trajectory.turns
    rows = []
    for index, row in enumerate(trajectory.rows()):
        whole = trajectory.layout.value == "conversation"
        members = turns if whole else turns[row.turn_index : row.turn_index + 1]
        rows.append(
            RowRecord(
                key=f"{group}_{sample}_{index}",
                turn=row.turn_index,
                prompt_length=len(row.prompt_ids),
                response_length=len(row.response_ids),
                loss_tokens=sum(row.response_mask),
                finished=members[-1].finish.value != "length",
                void=any(not turn.action for turn in members),
                repetitive=find_repetition and any(has_repetition(turn.response_ids) for turn in members),
                anchor=str(members[0].anchor),
                step_reward=float(sum(turn.reward for turn in members)),
            )
        )
    return EpisodeRecord(
        group=group,
        sample=sample,
        task_id=trajectory.task_id,
        subtask=trajectory.subtask,
        terms=dict(trajectory.reward_terms),
        won=trajectory.won,
        score=trajectory.score,
        tool_calls=trajectory.tool_calls,
        stop=trajectory.stop.value,
        fault=trajectory.fault,
        turns=len(turns),
        well_formed_turns=sum(turn.format_ok for turn in turns),
        valid_actions=sum(turn.action_ok for turn in turns),
        rows=tuple(rows),
    )
