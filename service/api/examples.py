"""Example jobs and requests: the OpenAPI description shows them, and every model must predict them
before it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Document = Mapping[str, Any]

EXAMPLES: Final[Mapping[str, Mapping[str, Document]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
"""Name of an operation with a body → bodies by name."""
EXAMPLE_JOBS: Final = EXAMPLES["jobs"]
"""One small job of every family."""
