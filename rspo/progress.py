"""A progress bar for episodes that are being played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY = 2.0
"""Seconds before the bar appears: over sooner, nothing is waited for."""


@contextmanager
def episode_bar(phase: str, episodes: int, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar that goes when it is full, below a bar that is there already, on a terminal only.

    Gives what is to be called after each turn with the number of turns played and of episodes that still run.
    """
    disable = None if shown else True  # None: tqdm looks for a terminal
    with tqdm(total=episodes, desc=phase, unit="episode", leave=False, delay=DELAY, miniters=0, disable=disable) as bar:

        def on_turn(turn: int, running: int) -> None:
            bar.set_postfix(turn=turn, refresh=False)
            bar.update(episodes - running - bar.n)

        yield on_turn
