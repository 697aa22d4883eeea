"""Limits of the comparison: what was drawn at random, what was left out, and what a model has
learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumemnet.predict.bundle import Bundle
from research.packing.amounts import LIMIT, REQUEST, TRACED_LIMIT, TRACED_REQUEST, Amounts
from research.packing.cards import Policy
from research.packing.inventory import Inventory
from research.packing.reading import Trace
from research.packing.workload import Workload


def notes(
    trace: Trace,
    jobs: Workload,
    cards: Inventory,
    policy: Policy,
    found: Sequence[Amounts],
    bundles: Sequence[Bundle],
) -> list[str]:
    """Sentences, the most important first."""
    return [
        *_seen(trace, found, bundles),
        *(f"synthetic: {sentence}" for sentence in jobs.synthetic),
        *_truth(trace, jobs, cards),
        *_queue(policy),
    ]


def seen_by(trace: Trace, bundles: Sequence[Bundle]) -> dict[str, list[str]]:
    """Files of the trace that are, byte for byte, what a model learned from; each with the models'
    names."""
    models: dict[str, list[str]] = {}
    for path, sha256 in trace.sha256_of.items():
        names = [
            bundle.card.name
            for bundle in bundles
            if bundle.card.document["training_data"].get("sha256") == sha256
        ]
        if names:
            models[path] = names
    return models


def _seen(trace: Trace, found: Sequence[Amounts], bundles: Sequence[Bundle]) -> Iterator[str]:
    ours = [
        outcome
        for outcome in found
        if outcome.key in (LIMIT, REQUEST, TRACED_LIMIT, TRACED_REQUEST)
    ]
    if not ours:
        return
    answered = {name for outcome in ours for name, _ in outcome.answered_by}
    for path, names in seen_by(trace, bundles).items():
        if answered & set(names):
            yield f"{', '.join(names)} learned from {path}: gpumemnet looks better here than on jobs that are new to it"
    first = next((outcome for outcome in ours if outcome.key in (LIMIT, REQUEST)), ours[0])
    yield "answered by " + ", ".join(
        f"{name} ({count:,} rows)" for name, count in first.answered_by
    )
    if any(outcome.key in (TRACED_LIMIT, TRACED_REQUEST) for outcome in ours):
        yield (
            "bounds of traced jobs were calibrated on the published MLP, CNN and transformer readings: judge what goes with a "
            "trace on other rows"
        )


def _truth(trace: Trace, jobs: Workload, cards: Inventory) -> Iterator[str]:
    for reason, count in trace.left_out.items():
        yield f"left out: {count:,} rows {reason}"
    too_large = int((jobs.peak_mib > cards.largest_mib).sum())
    if too_large:
        yield f"not run: {too_large:,} jobs need more than the {cards.largest_mib:,} MiB of the largest card"
    traced = sum(row.is_traced for row in trace.rows)
    if traced:
        yield f"the true peak of {traced:,} of {len(trace.rows):,} rows is a trace's answer, not a measurement"
    own = {kind.gpu for kind in cards.kinds}
    other = sorted({row.gpu for row in trace.rows if row.gpu is not None and row.gpu not in own})
    if other:
        yield f"peaks read on {', '.join(other)} stand for the same jobs on the cards simulated, whose CUDA context may differ"


def _queue(policy: Policy) -> Iterator[str]:
    order = "no job overtakes another"
    if policy.backfill:
        order = f"up to {policy.backfill} jobs behind one that does not fit may go first"
    most = f", at most {policy.most_per_card} jobs a card" if policy.most_per_card else ""
    yield f"{policy.fit} fit, first come first served, {order}{most}"
    yield "the job that was placed last runs out of memory, and runs again on a card of its own"
    if policy.slowdown:
        yield f"neighbours: with k jobs on a card each runs 1 + {policy.slowdown:g} · (k − 1) times as long"
    else:
        yield "neighbours do not slow each other down here: waits and hours show what memory allows, not what compute does"
