"""How an episode becomes token ids to read: a prompt made anew each turn, or one growing conversation.

Both give the engine the very ids that training will see. A conversation is therefore continued from the ids that were
sampled, never from their text, which a tokenizer might cut differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ..envs.base import BatchedEnv, PromptContext
from .texts import Texts


class Layout(ABC):
    """Makes prompts for a batch of episodes.

    Args:
        texts: whose tokenizer and chat template are used; a policy, or one without its model.
        env: writes the texts.
    """

    def __init__(self, texts: Texts, env: BatchedEnv) -> None:
        self.texts = texts
        self.env = env

    @abstractmethod
    def prompts(
        self, contexts: Sequence[PromptContext], before: Sequence[tuple[np.ndarray, np.ndarray] | None]
    ) -> list[np.ndarray]:
        """Prompt ids int64 [P] of episodes.

        contexts: what each agent may see now.
        before: (prompt ids, response ids) of each episode's previous turn; None at its first.
        """


class PerTurn(Layout):
    """Each turn a prompt of its own: task, the last turns, the current observation."""

    def prompts(
        self, contexts: Sequence[PromptContext], before: Sequence[tuple[np.ndarray, np.ndarray] | None]
    ) -> list[np.ndarray]:
        broken = self.texts.control.broken_in_context
        return self.texts.encode([self.env.render_prompt(broken(context)) for context in contexts])


class Conversation(Layout):
    """The first prompt, then in turn the responses and the observations that followed."""

    def prompts(
        self, contexts: Sequence[PromptContext], before: Sequence[tuple[np.ndarray, np.ndarray] | None]
    ) -> list[np.ndarray]:
        contexts = [self.texts.control.broken_in_context(context) for context in contexts]
        opening = [context for context, turn in zip(contexts, before, strict=True) if turn is None]
        following = [context for context, turn in zip(contexts, before, strict=True) if turn is not None]
        openings = iter(self.texts.encode([self.env.render_opening(context) for context in opening]))
        replies = iter(self.texts.encode_replies([self.env.render_reply(context) for context in following]))
        prompts = []
        for turn in before:
            if turn is None:
                prompts.append(next(openings))
            else:
                prompt, response = turn
                prompts.append(np.concatenate([prompt, response, self._joined(response, next(replies))]))
        return prompts

    def _joined(self, response: np.ndarray, reply: np.ndarray) -> np.ndarray:
        """A reply begins with the end of the response before it, in some templates after white space; the model may
        have written that end already."""
        if not len(response) or int(response[-1]) not in self.texts.eos_token_ids:
            return reply
        ends = np.flatnonzero(reply == response[-1])
        if not len(ends) or self.texts.tokenizer.decode(reply[: ends[0]].tolist()).strip():
            return reply
        return reply[ends[0] + 1 :]


LAYOUTS = {"per_turn": PerTurn, "conversation": Conversation}


def make_layout(name: str, texts: Texts, env: BatchedEnv) -> Layout:
    """The configured layout."""
    return LAYOUTS[name](texts, env)
