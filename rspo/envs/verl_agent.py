"""The prompt style of verl-agent, the code base of GiGPO that the paper's numbers come from.

A model reads the same facts in the same order there, in words of our own here: who it is, the task, the last turns, the
current observation, the admissible actions in quotes, one a line, and how to answer. Responses are read as there. So
numbers can be compared with those of other work on that code base.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .base import PromptContext
from .wording import HOW_TO_ANSWER

VERL_AGENT = "verl-agent"
MAX_PROMPT = 13_000
"""Characters of a prompt; a longer one is told without the last turns."""

_CHINESE = re.compile("[\u4e00-\u9fff]")


@dataclass(frozen=True)
class VerlAgentStyle:
    """An environment's prompts and responses in this style.

    role: first line of a prompt: who the agent is.
    tail: characters at the end of a response without action tags that are sent as the action.
    """

    role: str
    tail: int

    def prompt(self, context: PromptContext) -> str:
        """One user message. The task is left out where the observation says it, and past turns together with the number
        of steps where there are none or the message would have more than MAX_PROMPT characters."""
        lines = [self.role]
        if context.task not in context.observation:
            lines.append(f"Your task: {context.task}")
        seen = "You observe"
        if context.history:
            lines.append(
                f"Steps taken so far: {context.turn}. The last {len(context.history)} observations, and your action at"
                " each:"
            )
            first = context.turn - len(context.history) + 1
            lines += [
                f"[Observation {first + i}: '{observation}', Action {first + i}: '{action}']"
                for i, (observation, action) in enumerate(context.history)
            ]
            seen = f"Now, at step {context.turn + 1}, you observe"
        text = "\n".join([*lines, f"{seen}: {context.observation}", *_actions(context), "", HOW_TO_ANSWER])
        if context.history and len(text) > MAX_PROMPT:
            return self.prompt(replace(context, history=()))
        return text

    def reply(self, context: PromptContext) -> str:
        """What answers an action in a conversation."""
        return "\n".join([f"You observe: {context.observation}", *_actions(context), "", HOW_TO_ANSWER])

    def project(self, response: str) -> tuple[str, bool]:
        """The text from the first opening to the first closing action tag, in lower case, else the response's tail; and
        whether action tags (in any case) and think tags (in lower case) were there and no Chinese letter was. What
        stands in the tags has no part in that."""
        text = response.lower()
        opening, closing = text.find("<action>"), text.find("</action>")
        if opening < 0 or closing < 0:
            return text[-self.tail :], False
        action = text[opening + len("<action>") : closing].strip()
        has_thought = "<think>" in response and "</think>" in response
        return action, has_thought and _CHINESE.search(response) is None


def _actions(context: PromptContext) -> list[str]:
    """The admissible actions in quotes, one a line; nothing where there are none."""
    if not context.admissible_actions:
        return []
    return ["Your admissible actions now:", *(f"'{action}'" for action in context.admissible_actions)]
