"""Compiles the closed form while the package is built, where Cython and a C compiler can.

Without them the package is whole all the same and runs the module as it stands, a hundred times as slowly.  The environment
variable ``GPUMEMNET_COMPILE`` says ``0`` to build without, and ``1`` to fail rather than do without.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULE = Path("gpumemnet") / "closed_form.py"
DIRECTIVES = {
    "annotation_typing": False,  # the types are those of closed_form.pxd
    "boundscheck": False,  # fill_columns looks at all lengths once
    "cdivision": True,
    "initializedcheck": False,
    "wraparound": False,
}
# A product and a sum in one rounding would give other last digits than Python.
FLAGS = [] if sys.platform == "win32" else ["-O2", "-g0", "-ffp-contract=off"]


class CompileHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there at build time alone
    """Puts the compiled module beside its source, where an editable installation finds it as well."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        wanted = os.environ.get("GPUMEMNET_COMPILE", "")
        library = MODULE.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
        if wanted == "0":
            (Path(self.root) / library).unlink(missing_ok=True)
            return
        try:
            compile_module(Path(self.root), library)
        except Exception as error:  # compilers fail in many ways, and none of them is a reason not to install
            if wanted == "1":
                raise
            (Path(self.root) / library).unlink(missing_ok=True)
            self.app.display_warning(f"{MODULE} is not compiled, and slower for it: {type(error).__name__}: {error}")
            return
        build_data["artifacts"].append(f"/{library.as_posix()}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_module(root: Path, library: Path) -> None:
    """Compile :data:`MODULE` below ``root`` to ``library``."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    name = ".".join(MODULE.with_suffix("").parts)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(root)
        try:
            modules = cythonize(
                [Extension(name, [str(MODULE)], extra_compile_args=FLAGS)],
                build_dir=scratch,
                compiler_directives=DIRECTIVES,
                force=True,
                language_level=3,
                quiet=True,
            )
            distribution = Distribution({"name": "gpumemnet", "packages": [], "ext_modules": modules})
            command = distribution.get_command_obj("build_ext")
            command.build_lib, command.build_temp = scratch, scratch
            command.ensure_finalized()
            command.run()
        finally:
            os.chdir(before)
        # Replaced as a whole: a running process keeps the one that it has loaded.
        fresh = root / library.with_name(f".{library.name}")
        fresh.write_bytes((Path(scratch) / library).read_bytes())
        fresh.replace(root / library)
