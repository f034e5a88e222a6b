"""A progress bar for episodes that are being played, and transformers' own bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

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


@contextmanager
def transformers_bars(shown: bool) -> Iterator[None]:
    """While the block runs, the bars that transformers draws over models being loaded and saved are left out, unless
    they are to be shown. Those of downloads go with them."""
    if shown or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    were_without = are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
        if were_without:
            disable_progress_bars()
