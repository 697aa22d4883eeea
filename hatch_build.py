"""Compiles the modules that have a file of types beside them while the package is built, where Cython and a C compiler can.

Without them the package is whole all the same and runs those modules as they stand, far more slowly.  The environment variable
``GPUMEMNET_COMPILE`` says ``0`` to build without, and ``1`` to fail rather than do without.
"""

from __future__ import annotations

import os
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


class CompileHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there at build time alone
    """Puts each compiled module beside its source, where an editable installation finds it as well."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        package = Path(self.root) / PACKAGE
        names = sorted(path.stem for path in package.glob("*.pxd"))
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        libraries = [package / f"{name}{suffix}" for name in names]
        wanted = os.environ.get("GPUMEMNET_COMPILE", "")
        if wanted != "0":
            try:
                compile_modules(Path(self.root), names, suffix)
            except Exception as error:  # compilers fail in many ways, and none of them is a reason not to install
                if wanted == "1":
                    raise
                self.app.display_warning(f"{', '.join(names)} not compiled, hence slower: {type(error).__name__}: {error}")
            else:
                build_data["artifacts"] += [f"/{PACKAGE}/{library.name}" for library in libraries]
                build_data["pure_python"] = False
                build_data["infer_tag"] = True
                return
        for library in libraries:  # an older one would be loaded in place of the text
            library.unlink(missing_ok=True)


def compile_modules(root: Path, names: list[str], suffix: str) -> None:
    """Compile the modules called ``names`` of :data:`PACKAGE` below ``root``; all of them or none."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(root)
        try:
            modules = cythonize(
                [Extension(f"{PACKAGE}.{name}", [f"{PACKAGE}/{name}.py"], extra_compile_args=FLAGS) for name in names],
                build_dir=scratch,
                compiler_directives=DIRECTIVES,
                force=True,
                language_level=3,
                quiet=True,
            )
            distribution = Distribution({"name": PACKAGE, "packages": [], "ext_modules": modules})
            command = distribution.get_command_obj("build_ext")
            command.build_lib, command.build_temp = scratch, scratch
            command.ensure_finalized()
            command.run()
        finally:
            os.chdir(before)
        for name in names:
            # Replaced as a whole: a running process keeps the one that it has loaded.
            library = root / PACKAGE / f"{name}{suffix}"
            fresh = library.with_name(f".{library.name}")
            fresh.write_bytes((Path(scratch) / PACKAGE / library.name).read_bytes())
            fresh.replace(library)
