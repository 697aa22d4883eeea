"""Writes the report of a retraining in Markdown, from its data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file

from .gate import MEASURES

_HEADINGS: Final = ("part", "jobs", *MEASURES)


def write_report(path: Path, document: dict[str, Any]) -> Path:
    """Write the Markdown of ``document`` to ``path``, unless the file has it already."""
    content = markdown(document).encode()
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)
    return path


def markdown(document: dict[str, Any]) -> str:
    """The report."""
    better = [track["track"] for track in document["tracks"] if track["promote"]]
    lines = ["# Retraining", ""]
    lines.append(
        f"Champion: {document['champion']}. {'Better: ' + ', '.join(better) if better else 'No candidate is better'}."
    )
    lines.append(
        f"Run {document['run'][:12]}, seed {document['seed']}, commit {document['code']['commit'] or 'unknown'}."
    )
    lines += ["", "## Files", "", "| file | sha256 | rows | used |", "| --- | --- | ---: | ---: |"]
    lines += [
        f"| {file['name']} | {file['sha256'][:12]} | {file['rows']:,} | {file['used']:,} |"
        for file in document["files"]
    ]
    if document["refused"] or document["left_out"]:
        lines += ["", "Not used:", ""]
        lines += [
            f"* {refused['file']}: {refused['rows']:,} rows: {refused['reason']}"
            for refused in document["refused"]
        ]
        lines += [f"* {sentence}" for sentence in document["left_out"]]
    for track in document["tracks"]:
        lines += _track(track)
    lines += [
        "",
        "Each measure: the champion's mean loss → the candidate's; in brackets the p-value of the",
    ]
    lines += [
        "improvement. Error in log-bytes, waste as a share of the memory, the others as shares of the jobs.",
        "",
    ]
    return "\n".join(lines)


def _track(track: dict[str, Any]) -> list[str]:
    rows = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in track["rows"].items() if count
    )
    lines = ["", f"## {track['track']}, {track['encoder']}", ""]
    lines.append(
        f"{track['gpu']}, read by {track['label_source']}: {rows or 'no'} rows. {'Better.' if track['promote'] else 'Not taken.'}"
    )
    lines += ["", *(f"* {reason}" for reason in track["reasons"])]
    verdict = track["verdict"]
    if verdict and verdict["parts"]:
        lines += [
            "",
            f"| {' | '.join(_HEADINGS)} |",
            f"| --- | {' | '.join(['---:'] * (len(_HEADINGS) - 1))} |",
        ]
        for part in verdict["parts"]:
            cells = [f"{part['name']}{'' if part['decides'] else ' (guard)'}", f"{part['rows']:,}"]
            for measure in MEASURES:
                found = part["measures"][measure]
                cells.append(
                    f"{found['champion']:.2%} → {found['candidate']:.2%} ({found['p_not_better']:.3f})"
                )
            lines.append(f"| {' | '.join(cells)} |")
    return lines
