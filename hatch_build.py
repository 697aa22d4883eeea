"""What building the package adds: compiled modules, and the long description.

Every module with a ``.pxd`` file beside it is compiled, where Cython and a C compiler are there.
Without them the package works too, but those modules run as Python, far more slowly.  The
environment variable ``GPUMEMNET_COMPILE`` says ``0`` to build without them, and ``1`` to fail when
they cannot be built.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "gpumemnet"
DIRECTIVES = {
    "annotation_typing": False,  # the types are those of the .pxd files
    "auto_pickle": False,  # nobody stores the records
    "boundscheck": False,  # what the modules hand out looks at all lengths once
    "cdivision": True,
    "initializedcheck": False,
    "wraparound": False,
}
# A product and a sum in one rounding would give other last digits than Python.
FLAGS = [] if sys.platform == "win32" else ["-O2", "-g0", "-ffp-contract=off"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
RECORD = f"compiled_from{SUFFIX}.json"
"""In the source folder: library → SHA-256 of what it was compiled from;
:mod:`gpumemnet.compiled` reads it."""


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]  # hatchling is there at build time alone
    """Makes README.md the long description, without pictures and links whose target lies in the
    repository."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called before the project's metadata are read."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)", "", text)
        text = re.sub(r'<img [^>]*src="(?!https?:)[^>]*>', "", text)
        text = re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class CompileHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there at build time alone
    """Adds the compiled modules to a wheel; for an editable installation it puts them beside their
    sources instead."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        package = Path(self.root) / PACKAGE
        names = sorted(
            path.relative_to(package).with_suffix("").as_posix() for path in package.rglob("*.pxd")
        )
        wanted = os.environ.get("GPUMEMNET_COMPILE", "")
        self.scratch = tempfile.TemporaryDirectory()
        libraries: dict[str, Path] = {}
        if wanted != "0":
            try:
                digests = {f"{name}{SUFFIX}": source_digest(package, name) for name in names}
                libraries = compile_modules(package, names, Path(self.scratch.name))
                if version == "editable":
                    put_beside(package, libraries)
                    (package / RECORD).write_text(json.dumps(digests, indent=2) + "\n", "utf-8")
            except (
                Exception
            ) as error:  # compilers fail in many ways, and none of them is a reason not to install
                if wanted == "1":
                    raise
                reason = f"{type(error).__name__}: {error}"
                self.app.display_warning(
                    f"{', '.join(names)} could not be compiled, so predictions take longer: {reason}"
                )
                libraries = {}
        if version == "editable":
            remove_others(package, libraries)
        else:
            build_data["force_include"] |= {
                str(library): f"{PACKAGE}/{place}" for place, library in libraries.items()
            }
        if libraries:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is there."""
        self.scratch.cleanup()


def source_digest(package: Path, name: str) -> str:
    """SHA-256 of the text of a module and of its types."""
    return hashlib.sha256(
        b"".join((package / f"{name}{ending}").read_bytes() for ending in (".py", ".pxd"))
    ).hexdigest()


def compile_modules(package: Path, names: list[str], scratch: Path) -> dict[str, Path]:
    """The compiled modules of ``names`` (``folder/module``): their place in the package, and the
    file somewhere in ``scratch``.

    Each says in ``SOURCE_SHA256`` what it was made of, so that a test can tell one that is older
    than its text.
    """
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    copies = scratch / PACKAGE
    for name in names:
        text = (package / f"{name}.py").read_bytes()
        folder = (copies / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        for package_folder in {copies, folder}:
            (package_folder / "__init__.py").touch()  # Cython finds a package's types by it
        digest = source_digest(package, name)
        (copies / f"{name}.py").write_bytes(text + f'\nSOURCE_SHA256 = "{digest}"\n'.encode())
        shutil.copy(package / f"{name}.pxd", copies / f"{name}.pxd")
    before = Path.cwd()
    os.chdir(scratch)
    try:
        modules = cythonize(
            [
                Extension(
                    f"{PACKAGE}.{name.replace('/', '.')}",
                    [f"{PACKAGE}/{name}.py"],
                    extra_compile_args=FLAGS,
                )
                for name in names
            ],
            compiler_directives=DIRECTIVES,
            language_level=3,
            quiet=True,
        )
        distribution = Distribution({"name": PACKAGE, "packages": [], "ext_modules": modules})
        command = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp = "compiled", "objects"
        command.ensure_finalized()
        command.parallel = True  # the C compiler takes most of the time
        command.run()
    finally:
        os.chdir(before)
    return {f"{name}{SUFFIX}": scratch / "compiled" / PACKAGE / f"{name}{SUFFIX}" for name in names}


def put_beside(package: Path, libraries: dict[str, Path]) -> None:
    """Put each library beside its source."""
    for place, library in libraries.items():
        # Replaced as a whole: a running process keeps the one that it has loaded.
        fresh = Path(tempfile.mkdtemp(prefix=".compiled-", dir=package))
        try:
            Path(shutil.copy(library, fresh)).replace(package / place)
        finally:
            shutil.rmtree(fresh)


def remove_others(package: Path, libraries: dict[str, Path]) -> None:
    """Remove every other library of this Python from the source folder: it would be loaded in place
    of the text."""
    if not libraries:
        (package / RECORD).unlink(missing_ok=True)
    for path in package.rglob(f"*{SUFFIX}"):
        if path.relative_to(package).as_posix() not in libraries:
            path.unlink()
