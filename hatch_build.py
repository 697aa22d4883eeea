"""Compiles the modules that have a file of types beside them while the package is built, where Cython and a C compiler can.

Without them the package is whole all the same and runs those modules as they stand, far more slowly.  The environment variable
``GPUMEMNET_COMPILE`` says ``0`` to build without, and ``1`` to fail rather than do without.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "gpumemnet"
DIRECTIVES = {
    "annotation_typing": False,  # the types are those of the .pxd files
    "boundscheck": False,  # what the modules hand out looks at all lengths once
    "cdivision": True,
    "initializedcheck": False,
    "wraparound": False,
}
# A product and a sum in one rounding would give other last digits than Python.
FLAGS = [] if sys.platform == "win32" else ["-O2", "-g0", "-ffp-contract=off"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


class CompileHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there at build time alone
    """Adds the compiled modules to a wheel; for an editable installation it puts them beside their sources instead."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        package = Path(self.root) / PACKAGE
        names = sorted(path.stem for path in package.glob("*.pxd"))
        wanted = os.environ.get("GPUMEMNET_COMPILE", "")
        self.scratch = tempfile.TemporaryDirectory()
        libraries: list[Path] = []
        if wanted != "0":
            try:
                libraries = compile_modules(package, names, Path(self.scratch.name))
                if version == "editable":
                    put_beside(package, libraries)
            except Exception as error:  # compilers fail in many ways, and none of them is a reason not to install
                if wanted == "1":
                    raise
                self.app.display_warning(f"{', '.join(names)} not compiled, hence slower: {type(error).__name__}: {error}")
                libraries = []
        if version == "editable":
            remove_others(package, libraries)
        else:
            build_data["force_include"] |= {str(library): f"{PACKAGE}/{library.name}" for library in libraries}
        if libraries:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is there."""
        self.scratch.cleanup()


def compile_modules(package: Path, names: list[str], scratch: Path) -> list[Path]:
    """The compiled modules called ``names``, somewhere in ``scratch``.

    Each says in ``SOURCE_SHA256`` what it was made of, so that a test can tell one that is older than its text.
    """
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    copies = scratch / PACKAGE
    copies.mkdir()
    for name in names:
        text, types = ((package / f"{name}{ending}").read_bytes() for ending in (".py", ".pxd"))
        digest = hashlib.sha256(text + types).hexdigest()
        (copies / f"{name}.py").write_bytes(text + f'\nSOURCE_SHA256 = "{digest}"\n'.encode())
        (copies / f"{name}.pxd").write_bytes(types)
    before = Path.cwd()
    os.chdir(scratch)
    try:
        modules = cythonize(
            [Extension(f"{PACKAGE}.{name}", [f"{PACKAGE}/{name}.py"], extra_compile_args=FLAGS) for name in names],
            compiler_directives=DIRECTIVES,
            language_level=3,
            quiet=True,
        )
        distribution = Distribution({"name": PACKAGE, "packages": [], "ext_modules": modules})
        command = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp = "compiled", "objects"
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    return [scratch / "compiled" / PACKAGE / f"{name}{SUFFIX}" for name in names]


def put_beside(package: Path, libraries: list[Path]) -> None:
    """Put the libraries into the source folder."""
    for library in libraries:
        # Replaced as a whole: a running process keeps the one that it has loaded.
        fresh = Path(tempfile.mkdtemp(prefix=".compiled-", dir=package))
        try:
            Path(shutil.copy(library, fresh)).replace(package / library.name)
        finally:
            shutil.rmtree(fresh)


def remove_others(package: Path, libraries: list[Path]) -> None:
    """Remove every other library of this Python from the source folder: it would be loaded in place of the text."""
    for path in package.glob(f"*{SUFFIX}"):
        if path.name not in {library.name for library in libraries}:
            path.unlink()
