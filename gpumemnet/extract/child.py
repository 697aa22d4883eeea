"""The child process of an extraction: ``python -m gpumemnet.extract.child``."""

from __future__ import annotations

from typing import Any

from gpumemnet.extract.options import ExtractOptions
from gpumemnet.extract.result import extraction_to_dict
from gpumemnet.extract.source import build, source_code
from gpumemnet.sandbox.child import serve


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    code = source_code(request)
    from gpumemnet.extract.extraction import extract_from

    built, inputs = build(request, code, keep_values=True)
    return extraction_to_dict(
        extract_from(built.model, inputs, ExtractOptions(**request["options"]))
    )


if __name__ == "__main__":
    serve(_answer)
