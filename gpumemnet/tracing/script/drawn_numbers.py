"""Numbers that a script draws while it trains, such as the size of a crop, a length, or whether a
branch is taken this time.

Few steps are traced, and the largest number that a long training draws is in none of them. So each
place that draws gets the largest of many draws in the first step that asks there after the first
ones. It gets the smallest in the next step that asks, what comes in two more, and so on. Places have
their turns together, such as for the sides of a picture, and then one after the other, as one may
choose what the next draws from. Only its first draw of a step is meant: where many are added up, they
do not all become large. What a data set draws is looked at with its samples
(:mod:`~gpumemnet.tracing.script.longest_batch`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final

import numpy as np

from gpumemnet.torch_private.names import Function, value_of
from gpumemnet.torch_private.script import unseen
from gpumemnet.tracing.script.counters import Progress, makes_sample
from gpumemnet.tracing.script.longest_batch import (
    LARGEST,
    random_states,
    set_random_states,
    time_to_read,
)

_FUNCTIONS: Final = (
    "random:random random:uniform random:randint random:randrange random:choice random:gauss "
    "numpy.random:random numpy.random:rand numpy.random:uniform numpy.random:randint "
    "numpy.random:choice numpy.random:beta numpy.random:normal"
)
_TURNS: Final = 4
"""Steps after which a place gets the largest again."""


def extreme_draws(progress: Progress) -> Function:
    """Return what calls a function that draws numbers, and returns the largest or smallest of many
    draws, or one of them.

    Args:
        progress: how far the script has come.
    """
    asked = defaultdict[Hashable, list[int]](list)
    """Place → the steps at which it has drawn."""

    def drawn_by(draw: Function, *args: Any, **named: Any) -> Any:
        drawn = draw(*args, **named)
        if not progress.has_stepped:
            return drawn
        frame, step = sys._getframe(2), progress.trained()[0]
        steps = asked[place := (frame.f_code, frame.f_lasti)]
        if steps[-1:] == [step]:
            return drawn
        steps.append(step)
        turn = len(steps) - (len(steps) // _TURNS % 2 and [*asked].index(place))
        choose = None if makes_sample() else {1: max, 2: min}.get(turn % _TURNS)
        if choose is None:
            return drawn
        states = random_states()
        with unseen(), suppress(Exception):  # something may be drawn that is no number
            if np.asarray(drawn).size <= LARGEST:
                has_time = time_to_read(0.1)  # many probabilities take long
                others = (draw(*args, **named) for _ in range(1000) if has_time())
                drawn = choose(others, key=lambda each: np.asarray(each).sum(), default=drawn)
        set_random_states(states)
        return drawn

    return drawn_by


def replaced_draws(drawn_by: Function) -> list[tuple[str, Function]]:
    """Return the functions that draw numbers, with what takes their place."""

    def around(draw: Function) -> Function:
        return lambda *args, **named: drawn_by(draw, *args, **named)

    return [(name, around(value_of(name))) for name in _FUNCTIONS.split()]
