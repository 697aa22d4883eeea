"""The whole comparison, from files to figures, and as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from research.packing.amounts import EXCLUSIVE, ORACLE, Amounts
from research.packing.cards import Policy
from research.packing.figures import Figures, figures, needed_gib_hours
from research.packing.inventory import Inventory
from research.packing.notes import notes, seen_by
from research.packing.reading import Trace
from research.packing.simulation import simulate
from research.packing.workload import Workload

if TYPE_CHECKING:
    from gpumemnet.predict.bundle import Bundle

FORMAT: Final = "gpumemnet-packing"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one trace on one inventory.

    Attributes:
        jobs: how many jobs there were.
        inventory: the cards, in words.
        is_synthetic: whether jobs, arrivals or durations were drawn.
        slowdown: of the policy.
        needed_gib_hours: memory that the jobs really need, times how long they run.
        figures: a line for each estimator.
        notes: what a reader has to know.
        document: all of it for programs.
    """

    jobs: int
    inventory: str
    is_synthetic: bool
    slowdown: float
    needed_gib_hours: float
    figures: tuple[Figures, ...]
    notes: tuple[str, ...]
    document: dict[str, Any]

    def of(self, key: str) -> Figures | None:
        """The line of one estimator; of several with that key the first."""
        return next((one for one in self.figures if one.key == key), None)


def report(
    trace: Trace,
    jobs: Workload,
    cards: Inventory,
    policy: Policy,
    found: Sequence[Amounts],
    bundles: Sequence[Bundle],
) -> Report:
    """Simulate the workload once with each of the estimators ``found``."""
    lines = tuple(figures(simulate(jobs, one, cards, policy), jobs, one) for one in found)
    sentences = tuple(notes(trace, jobs, cards, policy, found, bundles))
    needed = needed_gib_hours(jobs, cards)
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "jobs": len(jobs.row_of),
        "rows": len(trace.rows),
        "files": [{"path": path, "sha256": sha256} for path, sha256 in trace.sha256_of.items()],
        "left_out": dict(trace.left_out),
        "seen_by": seen_by(trace, bundles),
        "gpus": [
            {"gpu": kind.gpu, "mig": kind.mig, "available_mib": kind.available_mib, "count": count}
            for kind, count in zip(cards.kinds, cards.counts, strict=True)
        ],
        "policy": asdict(policy),
        "needed_gib_hours": round(needed, 3),
        "estimators": [_line(line, one) for line, one in zip(lines, found, strict=True)],
        "notes": list(sentences),
    }
    return Report(
        jobs=len(jobs.row_of),
        inventory=str(cards),
        is_synthetic=bool(jobs.synthetic),
        slowdown=policy.slowdown,
        needed_gib_hours=needed,
        figures=lines,
        notes=sentences,
        document=document,
    )


def _line(line: Figures, amounts: Amounts) -> dict[str, Any]:
    values = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(line).items()
    }
    if amounts.key not in (EXCLUSIVE, ORACLE):
        values |= {"rows_unanswered": amounts.unanswered, "rows_too_large": amounts.too_large}
    if amounts.answered_by:
        values["answered_by"] = dict(amounts.answered_by)
    return values
