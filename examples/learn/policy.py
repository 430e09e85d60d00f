"""The policy: a table of preferences, one row for each state, learnt from groups of episodes.

It knows nothing of the task: a state is what the agent told, an action one of some commands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

#: What the agent told: the names of the files that hold something.
State = tuple[str, ...]


@dataclass
class Episode:
    """What was done in one sandbox, and what came of it.

    Attributes:
        steps: each state, and the number of the action that was chosen in it.
        reward: 1.0 when the task was solved, else 0.0.
    """

    steps: list[tuple[State, int]] = field(default_factory=list)
    reward: float = 0.0


class TabularPolicy:
    """Softmax over preferences; an unknown state prefers nothing, so its first choice is by chance.

    Args:
        actions: how many there are.
        learning_rate: how far one group moves the preferences; with 0 it stays as it is: random.
    """

    def __init__(self, actions: int, learning_rate: float) -> None:
        self.actions = actions
        self.learning_rate = learning_rate
        self._preferences: dict[State, list[float]] = {}

    def probabilities(self, state: State) -> list[float]:
        """Return how likely each action is in ``state``."""
        preferences = self._preferences.get(state, [0.0] * self.actions)
        highest = max(preferences)
        weights = [math.exp(preference - highest) for preference in preferences]
        return [weight / sum(weights) for weight in weights]

    def choose(self, state: State, chance: random.Random) -> int:
        """Draw an action."""
        return chance.choices(range(self.actions), self.probabilities(state))[0]

    def learn(self, group: Sequence[Episode]) -> None:
        """Make what went better than the group's mean likelier, and the rest less so.

        The policy gradient of REINFORCE with the advantages of GRPO: the reward less the group's
        mean, over its standard deviation. A group of which all or none succeeded teaches nothing.
        """
        mean = sum(episode.reward for episode in group) / len(group)
        variance = sum((episode.reward - mean) ** 2 for episode in group) / len(group)
        if variance == 0.0:
            return
        steps: dict[State, list[float]] = {}
        for episode in group:
            advantage = (episode.reward - mean) / math.sqrt(variance) / len(group)
            for state, chosen in episode.steps:
                row = steps.setdefault(state, [0.0] * self.actions)
                for action, probability in enumerate(self.probabilities(state)):
                    row[action] += advantage * ((action == chosen) - probability)
        for state, row in steps.items():
            preferences = self._preferences.setdefault(state, [0.0] * self.actions)
            for action, step in enumerate(row):
                preferences[action] += self.learning_rate * step
