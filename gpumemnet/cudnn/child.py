"""The child process that loads cuDNN: ``python -m gpumemnet.cudnn.child LIBRARY``.

It writes one line with the version of the library.  Then it answers each line on its standard
input, a JSON object with a ``device`` and a ``question``, with one line: plans, or an ``error``.
It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpumemnet.cudnn.backend import Backend, BackendError
from gpumemnet.cudnn.driver_stand_in import load_driver_stand_in
from gpumemnet.cudnn.plans import plans_to_dict, question_from_dict


def main(library: str) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what cuDNN prints must not mix with the answers
    try:
        load_driver_stand_in()
        backend = Backend(Path(library))
    except OSError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return
    answers.write(json.dumps({"version": backend.version}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = plans_to_dict(
                backend.plans(request["device"], question_from_dict(request["question"]))
            )
        except BackendError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
