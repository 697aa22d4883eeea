"""The registry: always complete, with killed and with parallel writers; champion and
rollback."""

import json
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpumemnet.atomic_files import STAGING_PREFIX, locked
from gpumemnet.errors import BundleError, RegistryBusyError, RegistryError, UnknownReleaseError
from gpumemnet.predict.bundle import MODEL_FILE, shipped_bundles
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.releases import SHIPPED, Registry, release_digest
from tests.registries import add_release, other_bundle, problems, shipped
from tests.sites import gpumemnet


def releases(*arguments: object) -> subprocess.CompletedProcess[str]:
    return gpumemnet("releases", *arguments)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def test_without_files_the_shipped_release_is_champion(registry: Registry) -> None:
    assert (registry.aliases().champion, registry.aliases().previous) == (SHIPPED, None)
    assert [release.name for release in registry.releases()] == [SHIPPED]
    assert [bundle.sha256 for bundle in registry.load(SHIPPED)] == [
        bundle.sha256 for bundle in shipped_bundles()
    ]
    assert problems(registry) == []
    assert not registry.folder.exists()


@pytest.mark.parametrize(
    "command",
    ["list", "rollback", "promote shipped"],
)
def test_a_misspelt_folder_is_said_and_not_made(tmp_path: Path, command: str) -> None:
    for folder in (
        tmp_path / "misspelt",
        tmp_path,
    ):  # a folder that does not exist, and one without a registry
        done = releases(*command.split(), "--registry", folder)
        assert done.returncode == 2, done.stdout
        assert f"there is no registry in {folder}" in done.stderr
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_release_takes_its_parents_bundles_but_those_it_replaces(
    registry: Registry, tmp_path: Path
) -> None:
    sha256 = add_release(registry, tmp_path, "r1")
    lineage = {"data": "0" * 64, "seeds": [1, 2]}
    mlp = other_bundle(tmp_path / "mlp", "2", "transformer")
    second = registry.create_release(
        "r2", [mlp.source], parent="r1", lineage=lineage, note="better MLPs"
    )
    replaced = {shipped().sha256, shipped("transformer").sha256}
    kept = {bundle.sha256 for bundle in shipped_bundles()} - replaced
    assert set(second.bundles) == kept | {sha256, mlp.sha256}
    assert registry.release("r2") == second
    assert (second.parent, second.lineage, second.note) == ("r1", lineage, "better MLPs")
    assert [release.name for release in registry.releases()] == [SHIPPED, "r1", "r2"]
    assert {bundle.card.version for bundle in Predictor(registry.load("r2")).bundles} == {"2", "r1"}
    # the bundles of the package that it keeps are its own: an upgrade of the package does not
    # change it
    assert all(
        Path(bundle.source).is_relative_to(registry.folder) for bundle in registry.load("r2")
    )
    assert (
        release_digest(registry.load("r2"))
        == release_digest(registry.load("r2")[::-1])
        != release_digest(registry.load("r1"))
    )


def test_adding_a_bundle_twice_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    sha256 = add_release(registry, tmp_path, "r1")
    folder = registry.folder / "bundles" / sha256
    before = folder.stat().st_mtime_ns
    registry.create_release("r2", [tmp_path / "r1"])
    assert folder.stat().st_mtime_ns == before
    assert [path.stat().st_mode & 0o222 for path in folder.iterdir()] == [0, 0, 0]


def test_champions_and_the_way_back(registry: Registry, tmp_path: Path) -> None:
    for name in ("r1", "r2", "r3"):
        add_release(registry, tmp_path, name)
    aliases = registry.set_champion("r1", by="ada", reason="better on CNNs")
    assert (aliases.champion, aliases.previous) == ("r1", SHIPPED)
    assert aliases == registry.aliases()
    registry.set_champion("r2", by="ada", reason="")
    assert registry.set_champion("r2", by="bob", reason="again") == registry.aliases()
    assert [change.champion for change in registry.aliases().history] == [SHIPPED, "r1", "r2"]
    # undone twice: not back to what was undone first
    assert registry.rollback(by="ada", reason="too high").champion == "r1"
    assert registry.rollback(by="ada", reason="too high as well").champion == SHIPPED
    with pytest.raises(RegistryError, match="no champion before 'shipped'"):
        registry.rollback(by="ada", reason="")
    registry.set_champion("r3", by="ada", reason="")
    assert registry.aliases().previous == SHIPPED
    assert registry.aliases().history[-2].reason == "too high as well"
    assert [change.is_rollback for change in registry.aliases().history] == [False] * 3 + [
        True
    ] * 2 + [False]


def test_what_cannot_be_is_refused_in_a_sentence(registry: Registry, tmp_path: Path) -> None:
    add_release(registry, tmp_path, "r1")
    mine = [tmp_path / "r1"]
    for refusing, says in (
        (lambda: registry.create_release("r1", mine), "already"),
        (lambda: registry.create_release(SHIPPED, mine), "belongs to the bundles of the package"),
        (lambda: registry.create_release("r2", []), "at least one bundle"),
        (lambda: registry.create_release("r2", mine * 2), "the same encoder"),
        (lambda: registry.create_release("r2", [tmp_path / "no"]), "no such bundle folder"),
        (lambda: registry.create_release("r2", mine, parent="none"), "no release 'none'"),
        (lambda: registry.create_release("r2", mine, lineage={"a": float("nan")}), "JSON object"),
        (lambda: registry.set_champion("none", by="", reason=""), "no release 'none'"),
        (lambda: registry.set_champion("r1", by="", reason="\ud800"), "JSON object"),
    ):
        with pytest.raises(BundleError, match=says):
            refusing()
    with pytest.raises(UnknownReleaseError):
        registry.release("none")
    clash = other_bundle(tmp_path / "clash", "1", name="transformer", encoder="mlp")
    with pytest.raises(BundleError):
        registry.create_release("r2", [clash.source])
    assert [release.name for release in registry.releases()] == [SHIPPED, "r1"]
    assert registry.aliases().champion == SHIPPED


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", ".", "", "A", "a\0", "a" * 65])
def test_no_name_leads_out_of_the_folder(registry: Registry, name: str) -> None:
    with pytest.raises(RegistryError, match="cannot be the name of a release"):
        registry.release(name)


def test_an_altered_bundle_is_found(registry: Registry, tmp_path: Path) -> None:
    sha256 = add_release(registry, tmp_path, "r1")
    model = registry.folder / "bundles" / sha256 / MODEL_FILE
    content = bytearray(model.read_bytes())
    content[100] ^= 1
    model.chmod(0o644)
    model.write_bytes(content)
    with pytest.raises(BundleError, match="checksum differs"):
        registry.load("r1")
    with pytest.raises(BundleError, match="checksum differs"):
        registry.set_champion("r1", by="", reason="")
    assert [sha256 in problem for problem in problems(registry)] == [True, True]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "null",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "champion": "../x", "history": []}',
        '{"format": 1, "champion": 1, "history": []}',
        '{"format": 1, "champion": "r1", "history": [{}]}',
    ],
)
def test_damaged_files_are_named(registry: Registry, tmp_path: Path, content: str) -> None:
    add_release(registry, tmp_path, "r1")
    registry.aliases_file.write_text(content)
    (registry.folder / "releases" / "r2.json").write_text(content)
    with pytest.raises(RegistryError, match=r"aliases.json: "):
        registry.aliases()
    with pytest.raises(RegistryError, match=r"r2.json: "):
        registry.release("r2")
    assert [
        name in problem
        for name, problem in zip(("aliases.json", "r2.json"), problems(registry), strict=True)
    ] == [True] * 2


def test_a_second_writer_waits_and_says_so_in_the_end(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_release(registry, tmp_path, "r1")
    monkeypatch.setattr("gpumemnet.site.releases.LOCK_SECONDS", 0.1)
    impatient = Registry(registry.folder)
    with locked(registry.folder / ".lock", 1, TimeoutError()):
        with pytest.raises(RegistryBusyError, match="another process"):
            impatient.set_champion("r1", by="", reason="")
        assert impatient.aliases().champion == SHIPPED  # readers do not wait
    impatient.set_champion("r1", by="", reason="")


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("a file")
    with pytest.raises(RegistryError, match="registry"):
        Registry(tmp_path / "registry").set_champion(SHIPPED, by="", reason="")


def test_many_writers_lose_nothing(registry: Registry, tmp_path: Path) -> None:
    bundles = [other_bundle(tmp_path / f"b{number}", f"v{number}") for number in range(4)]

    def write(number: int) -> None:
        own = Registry(registry.folder)
        own.create_release(f"r{number}", [bundles[number % 4].source])
        own.set_champion(f"r{number}", by=str(number), reason="")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(8)))
    assert {release.name for release in registry.releases()} == {
        SHIPPED,
        *(f"r{number}" for number in range(8)),
    }
    history = registry.aliases().history
    assert sorted(change.champion for change in history) == sorted(
        [SHIPPED, *(f"r{number}" for number in range(8))]
    )
    assert history[-1].champion == registry.aliases().champion
    assert problems(registry) == []


WRITER = """
    import sys
    from gpumemnet.site.releases import Registry
    registry = Registry(sys.argv[1])
    for number in range(1000):
        if number == 1:  # a slow machine has seen champions come, too
            print("begins", flush=True)
        for source in sys.argv[3:]:
            name = f"{sys.argv[2]}-{number}-{source[-1]}"
            registry.create_release(name, [source], note="x" * 500)
            registry.set_champion(name, by="writer", reason="")
"""


def test_a_killed_writer_leaves_a_registry_that_answers(registry: Registry, tmp_path: Path) -> None:
    """``kill -9`` at random moments, while a reader reads: no state in between can be seen, and the
    next writer goes on."""
    sources = [other_bundle(tmp_path / f"b{number}", f"v{number}").source for number in range(2)]
    chance = random.Random(6)
    failures: list[str] = []
    done = threading.Event()
    reads = 0

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            try:
                registry.release(registry.aliases().champion)
                reads += 1
            except Exception as error:
                failures.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    left = 0
    try:
        for attempt in range(2):
            command = [
                sys.executable,
                "-c",
                textwrap.dedent(WRITER),
                str(registry.folder),
                f"w{attempt}",
                *sources,
            ]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"begins\n"
                time.sleep(chance.uniform(0.0, 0.5))
                assert writer.poll() is None, writer.communicate()
                writer.send_signal(signal.SIGKILL)
            left += len(list(registry.folder.rglob(STAGING_PREFIX + "*")))
            assert problems(registry) == []
            Predictor(registry.load(registry.aliases().champion))
    finally:
        done.set()
        reader.join()
    assert failures == []
    assert reads > 10
    registry.set_champion(SHIPPED, by="", reason="")
    assert list(registry.folder.rglob(STAGING_PREFIX + "*")) == []
    assert len(registry.aliases().history) > 2


def test_the_command_line(registry: Registry, tmp_path: Path) -> None:
    source = other_bundle(tmp_path / "mine", "2").source
    place = ("--registry", registry.folder)
    done = releases("add", "r1", source, *place)
    assert (done.returncode, done.stdout) == (
        0,
        f"release r1: {len(shipped_bundles())} bundles\n",
    ), done.stderr
    assert releases("promote", "r1", *place, "--reason", "tested").stdout == "champion r1\n"
    listed = releases("list", *place).stdout
    assert all(words in listed for words in ("champion", "r1", "tested"))
    document = json.loads(releases("list", *place, "--json").stdout)
    assert document["aliases"]["history"][-1]["reason"] == "tested"
    assert releases("rollback", *place).stdout == "champion shipped\n"
    assert releases("list", *place).returncode == 0
    for refused in (
        ("rollback",),
        ("promote", "r9"),
        ("add", "../r", source),
        ("add", "r2", registry.folder),
    ):
        done = releases(*refused, *place)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("error: ")
    assert releases("list", *place).returncode == 0
    (registry.folder / "releases" / "r1.json").write_text("{}")
    assert releases("list", *place).returncode == 2
