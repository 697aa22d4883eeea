"""A child that speaks the protocol of :func:`gpumemnet.cudnn.library.answer_questions` without cuDNN: its plans are the
batch size times a constant."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def answer_questions(library: str) -> None:
    """Answer until the input ends, and append each question to the file ``library``."""
    if "missing" in library:
        print(
            json.dumps({"error": "libcublasLt.so.12: cannot open shared object file"}), flush=True
        )
        return
    print(json.dumps({"version": 90100 if "old" in library else 92800}), flush=True)
    for line in sys.stdin:
        with Path(library).open("a", encoding="utf-8") as log:
            log.write(line)
        question = json.loads(line)["question"]
        batch = question["image"][0]
        if batch == 13:
            os._exit(1)
        if batch == 14:
            print(json.dumps({"error": "CUDNN_STATUS_BAD_PARAM"}), flush=True)
            continue
        first, second, third = (
            {"engine": engine, "workspace_bytes": each * batch, "notes": notes}
            for engine, each, notes in (
                (1, 10_000_000, ["down_converts_inputs"]),
                (2, 1_000_000, ["tensor_core"]),
                (3, 5_000_000, []),
            )
        )
        print(json.dumps({"heuristic": [first, second], "fallback": [third]}), flush=True)


def ends_at_once(library: str) -> None:
    """Answer nothing."""
