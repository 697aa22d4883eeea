"""Arguments of a user's own function, as the command line takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe


def factory_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from ``name=value`` texts; a value is JSON, or else the text that it is.

    Raises:
        InvalidRequestError: when a text has another form or a name comes twice.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidRequestError(f"must look like depth=12, not {describe(text)}", "arg")
        if name in arguments:
            raise InvalidRequestError(f"'{name}' is given twice", "arg")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments
