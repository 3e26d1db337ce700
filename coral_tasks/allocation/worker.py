"""The child of a supervised solve: ``python -m coral_tasks.allocation.worker REQUEST ANSWERS``.

Owns the exchange with its parent: reads a pickled request from the file REQUEST, which only the parent can have
written (a private folder), and sends plans and the answer on the file descriptor ANSWERS. Ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from coral_tasks.allocation.solve import solve_counts
from coral_tasks.allocation.supervise import SolveRequest
from coral_tasks.domain.errors import CoralError


def main(arguments: Sequence[str]) -> int:
    """Solve what the file states."""
    path, answers = Path(arguments[0]), Connection(int(arguments[1]), readable=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = pickle.loads(path.read_bytes())  # noqa: S301 - written by the parent into a folder of its own
    answers.send(_answer(request, answers))
    answers.close()
    return 0


def _answer(request: SolveRequest, answers: Connection) -> object:
    try:
        return solve_counts(
            request.problem,
            time_limit_s=request.time_limit_s,
            gap=request.gap,
            previous=request.previous,
            on_plan=answers.send,
        )
    except CoralError as error:
        return error


def _end_with_parent() -> None:
    """The parent holds the other end of standard input and writes nothing: it closes when the parent ends."""
    sys.stdin.buffer.read(1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
