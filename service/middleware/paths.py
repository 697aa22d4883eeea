"""The rules of a path: its name in logs and metrics, and the scope that its key needs.

Names come from a fixed list, so that clients cannot add names to the metrics.  An unlisted path
needs a key: a new route is closed until it is opened here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ANY_KEY: Final = "any"
"""For paths that need a key with any scope."""


@dataclass(frozen=True, slots=True, eq=False)
class PathRule:
    """The rules of one path or of several.

    Attributes:
        name: the path, its variable parts in braces.
        scope: the required scope of the key; :data:`ANY_KEY`; or ``None`` when no key is required.
        is_limited: whether the rate and concurrency limits apply; never for health and metrics.
    """

    name: str
    scope: str | None = None
    is_limited: bool = True


_RULES: Final = (
    PathRule("/healthz", is_limited=False),
    PathRule("/readyz", is_limited=False),
    PathRule("/metrics", is_limited=False),
    PathRule("/"),
    PathRule("/docs"),
    PathRule("/openapi.json"),
    *(
        PathRule(path, "predict")
        for path in ("/v1/predict", "/v1/predict/batch", "/v1/batch-sizes", "/v1/smallest-gpu")
    ),
    *(PathRule(path, "predict") for path in ("/v1/gpus", "/v1/models")),
    *(PathRule(path, "observe") for path in ("/v1/observations", "/v1/observations/summary")),
    PathRule("/v1/admin/models", "admin"),
    *(
        PathRule(f"/v1/admin/models/{action}", "admin")
        for action in ("champion", "challenger", "rollback")
    ),
)
_EXACT: Final = {rule.name: rule for rule in _RULES}
_BELOW: Final = (
    ("/page/", PathRule("/page/{file}")),
    ("/docs/", PathRule("/docs/{file}")),
    ("/v1/observations", PathRule("/v1/observations/{rest}", "observe")),
    ("/v1/admin", PathRule("/v1/admin/{rest}", "admin")),
    ("/v1/", PathRule("/v1/{rest}", "predict")),
)
_OTHER: Final = PathRule("{other}", ANY_KEY)


def rule_of(path: str) -> PathRule:
    """The rules of ``path``, as the server has decoded it."""
    rule = _EXACT.get(path)
    if rule is not None:
        return rule
    for start, rule in _BELOW:
        if path.startswith(start):
            return rule
    return _OTHER
