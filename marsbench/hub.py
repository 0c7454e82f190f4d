"""The Hugging Face hub: if it is silent, that is found out once, in seconds, and its libraries look in caches only."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from threading import Thread
from typing import Any

ANSWERS_WITHIN_S = 4.0
REMEMBERED_S = 60.0  # how long an answer, or none, is taken for the hub's state
VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")  # the user's own word


def out_of_reach() -> bool:
    """Whether the hub does not answer; never asked where a variable says whether to work without it."""
    if any(name in os.environ for name in VARIABLES):
        return False
    return not _answers(int(time.monotonic() / REMEMBERED_S))


@contextmanager
def from_cache_if_out_of_reach() -> Iterator[None]:
    """Have the hub's libraries look in their caches only, for the time of a `with` block, where the hub is silent."""
    if not out_of_reach():
        yield
        return
    import datasets.config
    import huggingface_hub.constants

    switches: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    with ExitStack() as back:
        for switch in switches:
            back.callback(setattr, switch, "HF_HUB_OFFLINE", switch.HF_HUB_OFFLINE)
            switch.HF_HUB_OFFLINE = True
        yield


@lru_cache(maxsize=1)
def _answers(minute: int) -> bool:
    """Whether the hub answers at all, whatever it says, through the user's proxy and at the user's endpoint."""
    from huggingface_hub import constants, get_session

    limit = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or ANSWERS_WITHIN_S)
    answered = []

    def ask() -> None:
        with suppress(Exception):  # of any kind: no name, no route, no answer in time
            get_session().head(constants.ENDPOINT, timeout=limit)
            answered.append(True)

    # A thread, because no time limit of a request holds for the look-up of the host's name.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limit)
    return bool(answered)
