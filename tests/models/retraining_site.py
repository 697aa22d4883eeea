"""A site that retrains: its registry, its work folder, and runs of the command on them, whole or
cut short by a fault."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpumemnet.errors import BundleError
from gpumemnet.predict.bundle import load_bundle
from gpumemnet.site.releases import Registry
from tests.models.retraining import EPOCHS
from tests.registries import problems

ROOT = Path(__file__).parents[2]


class Forks:
    """The process of :mod:`tests.models.retraining_forks`, which makes base dataset and champion in
    ``folder`` first."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.models.retraining_forks", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._line() == "ready"

    def run(self, arguments: list[str], fault: str | None) -> tuple[int, str, str]:
        """Exit status, which is negative for a signal; what was said; the step at which it was
        killed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([arguments, fault]) + "\n")
        self._process.stdin.flush()
        status, said, step = json.loads(self._line())
        return status, said, step

    def close(self) -> None:
        self._process.communicate(timeout=300)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True)
class Site:
    """A base dataset, the champion that learned from it, and a folder to work in."""

    forks: Forks
    base: Path
    registry: Registry
    work: Path

    def arguments(self, *more: str | Path, base: bool = True) -> list[str]:
        known = ("--dataset", self.base) if base else ()
        given = (
            "--without-committed",
            *known,
            "--epochs",
            EPOCHS,
            "--registry",
            self.registry.folder,
            "--work",
            self.work,
        )
        return ["retrain", *map(str, (*given, *more))]

    def run(
        self, *more: str | Path, fault: str | None = None, base: bool = True
    ) -> tuple[int, str]:
        """Exit status and what was said."""
        return self.forks.run(self.arguments(*more, base=base), fault)[:2]

    def moved(self, folder: Path, registry: Path) -> Site:
        """The same with copies of the work folder, and of a registry."""
        shutil.copytree(self.work, folder / "work")
        return Site(
            self.forks,
            self.base,
            Registry(shutil.copytree(registry, folder / "registry")),
            folder / "work",
        )

    @property
    def champion(self) -> str:
        return self.registry.aliases().champion

    def problems(self) -> list[str]:
        """What is wrong with the registry, and folders under the name of a bundle that hold
        none."""
        found = problems(self.registry)
        for folder in (*self.work.glob("candidates/[!.]*"), *self.work.glob("stand-ins/[!.]*")):
            try:
                load_bundle(folder)
            except BundleError as error:
                found.append(str(error))
        return found


@dataclass(frozen=True)
class Fault:
    """What came of a run with a fault."""

    kind: str
    status: int
    said: str
    step: str
    champion: str
    problems: list[str]


@dataclass(frozen=True)
class Promotion:
    """A site whose observations have given a new champion, and the registry as it was before.

    Attributes:
        site: the site.
        export: its observations.
        release: the new champion.
        registry_before: folder.
        faults: the runs that it took.
    """

    site: Site
    export: Path
    release: str
    registry_before: Path
    faults: list[Fault]

    def before(self, folder: Path) -> Site:
        """The site with the old champion; every step is done but those in the registry."""
        return self.site.moved(folder, self.registry_before)

    def after(self, folder: Path) -> Site:
        """A copy of the site."""
        return self.site.moved(folder, self.site.registry.folder)

    def candidate(self, site: Site) -> Path:
        """The folder of the candidate that was promoted."""
        report = site.work / "runs" / self.release.removeprefix("retrain-") / "report.json"
        [candidate] = json.loads(report.read_text("utf-8"))["candidates"]
        return site.work / str(candidate["folder"])


def faulty_runs(site: Site, kinds: tuple[str, ...], *more: str | Path) -> list[Fault]:
    """Runs with a fault at the next step, one of each kind, until nothing is left to do."""
    found: list[Fault] = []
    while not found or found[-1].status in (1, -signal.SIGKILL):
        kind = kinds[len(found) % len(kinds)]
        status, said, step = site.forks.run(site.arguments(*more), kind)
        found.append(Fault(kind, status, said, step, site.champion, site.problems()))
        assert len(found) < 100, found[-1]
    return found
