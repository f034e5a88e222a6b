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

_ACTION_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_THINK_TAG = re.compile(r"<think>.*?</think>", re.DOTALL)


def chat_prompt(role: Sequence[str], context: PromptContext, how_to_answer: str = HOW_TO_ANSWER) -> str:
    """One user message: `role` (lines on who the agent is and how its world works), task, the last turns, the current
    observation, admissible actions, and how to answer."""
    lines = [*role, f"Your task: {context.task}", "", f"Actions taken so far: {context.turn}."]
    if context.history:
        lines.append("Your most recent turns, oldest first:")
        first = context.turn - len(context.history) + 1
        lines.extend(
            f"Turn {first + i}. Observation: {observation} Action: {action}"
            for i, (observation, action) in enumerate(context.history)
        )
    lines.append(f"Turn {context.turn + 1}, now. Observation: {context.observation}")
    if context.admissible_actions:
        lines.append(f"Actions you can choose from: {', '.join(context.admissible_actions)}.")
    return "\n".join([*lines, "", how_to_answer])


def chat_reply(context: PromptContext, how_to_answer: str = HOW_TO_ANSWER) -> str:
    """What answers an action in a conversation."""
    lines = [f"Observation: {context.observation}"]
    if context.admissible_actions:
        lines.append(f"Actions you can choose from: {', '.join(context.admissible_actions)}.")
    return "\n".join([*lines, how_to_answer])


def project_tags(response: str) -> tuple[str, bool]:
    """The lower-cased text of the first action tag; well formed when that is not empty and there was a thought in its
    tags. Without an action tag the response's last TAIL_CHARACTERS characters stand in for the action."""
    text = response.lower()
    tag = _ACTION_TAG.search(text)
    if tag is None:
        return " ".join(text.split())[-TAIL_CHARACTERS:], False
    action = " ".join(tag.group(1).split())
    return action, bool(action) and _THINK_TAG.search(text) is not None


def tagged(action: str) -> str:
    """A response that `project_tags` turns into the given action."""
    return f"<think></think><action>{action}</action>"
