"""What a model that thinks and answers in tags is told, and how its answer is read; shared by the environments.

A prompt has the structure of the paper's code base (role, task, turns taken, the last turns, the current observation,
admissible actions, how to answer) in words of our own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .base import PromptContext

PROMPT_STYLES = ("compact", "chat")
HOW_TO_ANSWER = (
    "First reason step by step about what to do next, inside <think> </think>. "
    "Then give exactly one of the actions above, inside <action> </action>."
)
TAIL_CHARACTERS = 30
"""How much of a response without an action tag is sent as the action: enough for the log to show what was meant."""

_QUOTED = re.compile(r"""(['"`])(.*)\1""")
_ACTION_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_THINK_TAG = re.compile(r"<think>.*?</think>", re.DOTALL)


def chat_prompt(
    role: Sequence[str], context: PromptContext, how_to_answer: str = HOW_TO_ANSWER, more_actions: str = ""
) -> str:
    """One user message: `role` (lines on who the agent is and how its world works), task, the last turns, the current
    observation, admissible actions with `more_actions` (a line on those left out), and how to answer."""
    lines = [*role, f"Your task: {context.task}", "", f"Actions taken so far: {context.turn}."]
    if context.history:
        lines.append("Your most recent turns, oldest first:")
        first = context.turn - len(context.history) + 1
        lines.extend(
            f"Turn {first + i}. Observation: {observation} Action: {action}"
            for i, (observation, action) in enumerate(context.history)
        )
    lines.append(f"Turn {context.turn + 1}, now. Observation: {context.observation}")
    lines += _offered(context.admissible_actions)
    lines += [more_actions] if more_actions else []
    return "\n".join([*lines, "", how_to_answer])


def chat_reply(context: PromptContext, how_to_answer: str = HOW_TO_ANSWER) -> str:
    """What answers an action in a conversation."""
    lines = [f"Observation: {context.observation}", *_offered(context.admissible_actions)]
    return "\n".join([*lines, how_to_answer])


def _offered(actions: Sequence[str]) -> list[str]:
    """A line each, in quotes: a model that reads them in a sentence copies its commas and full stops."""
    return ["Actions you can choose from:", *(f"'{action}'" for action in actions)] if actions else []


def bare_action(text: str) -> str:
    """An action as the environment knows it, lower-cased: without the quotes and full stops that models put around."""
    action = " ".join(text.lower().split())
    while True:
        inside = action.rstrip(". ")
        quoted = _QUOTED.fullmatch(inside)
        inside = quoted.group(2).strip() if quoted else inside
        if inside == action:
            return action
        action = inside


def project_tags(response: str) -> tuple[str, bool]:
    """The text of the first action tag as `bare_action` gives it; well formed when that is not empty and there was a
    thought in its tags. Without an action tag the last TAIL_CHARACTERS characters stand in for the action."""
    text = response.lower()
    tag = _ACTION_TAG.search(text)
    if tag is None:
        return " ".join(text.split())[-TAIL_CHARACTERS:], False
    action = bare_action(tag.group(1))
    return action, bool(action) and _THINK_TAG.search(text) is not None


def tagged(action: str) -> str:
    """A response that `project_tags` turns into the given action."""
    return f"<think></think><action>{action}</action>"
