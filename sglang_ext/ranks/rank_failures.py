"""Errors of the forward pass where ranks share a model: all of them give up the step, or the server ends.

A rank that fails alone cannot give up: the others wait for it in a collective, which nothing can end, and
which its next pass would meet in place of its own. Ranks that fail at the same place have launched the same
collectives, so that the next pass finds them in step. So a rank that fails votes, in a group of its own. If
the others do not fail at the same place within `WAIT_S`, its error is raised, and SGLang ends the server."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from torch import distributed

from sglang_ext.versions import tp_group

WAIT_S = 5.0  # the server ends within ten seconds
log = logging.getLogger(__name__)


class FailureVote:
    """The vote of the ranks of a model; a single rank always agrees with itself."""

    def __init__(self, model_runner: Any) -> None:
        """All ranks must make theirs at the same time."""
        self._runner = model_runner
        self._votes: Any = None
        group = tp_group(model_runner)
        if group is not None and group.world_size > 1:
            self._votes = distributed.new_group(
                distributed.get_process_group_ranks(group.cpu_group),
                timeout=timedelta(seconds=WAIT_S),
                backend="gloo",
                use_local_synchronization=True,
            )

    def alike(self, error: Exception) -> bool:
        """Return whether every rank has failed at the same place. Waits `WAIT_S` for the others."""
        if self._votes is None:
            return True
        places: list[str] = [""] * self._votes.size()
        try:
            distributed.all_gather_object(places, self._place(error), group=self._votes)
        except RuntimeError as missing:
            log.error("other processes of the model did not fail within %g s: %s", WAIT_S, missing)
        else:
            if len(set(places)) == 1:
                return True
            log.error("the processes of the model failed at different places: %s", places)
        log.error("the server ends: processes that wait for each other can do nothing else")
        return False

    def _place(self, error: Exception) -> str:
        """Name the kind of error and the instruction of each frame, with the module whose method it is: every
        layer runs the same lines."""
        modules = {id(module): name for name, module in self._runner.model.named_modules()}
        steps, at = [type(error).__name__], error.__traceback__
        while at is not None:
            code, frame = at.tb_frame.f_code, at.tb_frame
            module = modules.get(id(frame.f_locals.get("self")), "-")
            steps.append(f"{module} {code.co_name}:{at.tb_lineno}:{at.tb_lasti}")
            at = at.tb_next
        return " > ".join(steps)
