"""Reads the documents: their code blocks, tables, links and the commands that they show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "evaluation" not in path.parts
)
"""The documents that people write; reports that commands write are left out."""

_MARKED = re.compile(
    r"^<!-- (\w[\w ]*): (.+?) -->\n+(?:```\w*\n(.*?)^```|((?:\|[^\n]*\n)+))",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Marked:
    """A block or table of a page behind a comment ``<!-- kind: argument -->``."""

    page: str
    kind: str
    argument: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its lines without frames and spaces, those that stand for omitted ones left out."""
        return [
            plain
            for line in self.text.splitlines()
            if (plain := without_frame(line)) and plain != "…"
        ]


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def marked(kind: str) -> list[Marked]:
    """All blocks and tables of that kind, in all documents."""
    found = [
        Marked(page, name, argument, block or table)
        for page in PAGES
        for name, argument, block, table in _MARKED.findall(text_of(page))
    ]
    return [each for each in found if each.kind == kind]


def without_frame(line: str) -> str:
    """A line of a table or of output as its words alone, so that frames and widths do not
    matter."""
    return " ".join(re.sub(r"[│┃|█▏▎▍▌▋▊▉]|[-:─━═┏┓┗┛┡┩╇┳┴└┘]{3,}", " ", line).split())


def shell_commands(page: str) -> Iterator[list[str]]:
    """Every call of ``gpumemnet`` in the page's shell blocks, and in its inline code where options
    follow, as words."""
    text = text_of(page)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if line.count("'") % 2 == 0 else []
            while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("then", "do", "-")):
                words = words[1:]
            if words and words[0].rsplit("/", 1)[-1] == "gpumemnet":
                yield words[1:]
    for inline in re.findall(r"`gpumemnet ([^`\n]+)`", text):
        yield inline.split()
