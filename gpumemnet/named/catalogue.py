"""Finds the configuration of a model by its name.

``catalogue.json`` holds the sizes of popular models, ``networks.json`` the operators of those that
are no language models; ``python -m research catalogue`` makes both, from a table of
configurations and from these libraries, and checks each total of parameters.  Any other model comes from a
``config.json``: of a local folder, of ``huggingface_hub``'s cache, or of the hub.  Weights are never
read.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gpumemnet.atomic_files import Document, shipped_json, stated_json
from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.named.operators import Config

UNCHECKED: Final = "unchecked"
_CONFIG: Final = "config.json"
_CONNECT_SECONDS: Final = 3.0
_LIBRARIES: Final = ("timm/", "torchvision/")
_NETWORKS: Final = "named/networks.json"
_EXTRACTED: Final = ("layers", "diffusers", "swin", "segformer", "detr", "wav2vec2")
"""Families of which the operators were extracted."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its sizes.

    Attributes:
        name: as the catalogue or the user writes it.
        config: its ``config.json``, as far as memory depends on it.
        source: where the configuration comes from.
        parameters: total of the catalogue; ``None`` for a model from elsewhere.
        checked: whether the total is ``published``, ``recalled`` from memory or ``unchecked``.
        extracted: its operators, as ``networks.json`` has them; ``None`` for a model that the
            configuration describes.
    """

    name: str
    config: Config
    source: str
    parameters: int | None = None
    checked: str = UNCHECKED
    extracted: Document | None = None

    @property
    def longest(self) -> int | None:
        """The longest sequence that it was made for."""
        longest = self.config.get("max_position_embeddings")
        return longest if isinstance(longest, int) and longest > 0 else None


_document: Final = partial(shipped_json, "named/catalogue.json")


@cache
def _by_key() -> dict[str, str]:
    """Name in lower case, with and without its maker → name in the catalogue."""
    document = _document()
    found: dict[str, str] = {}
    names = [*((name, name) for name in document["models"]), *document["aliases"].items()]
    for name, model in names:
        found.setdefault(name.casefold().rpartition("/")[2], model)
    # The trained part of a diffusion pipeline stands behind a colon.
    parts = {name.casefold().partition(":")[0]: model for name, model in names}
    return found | parts | {name.casefold(): model for name, model in names}


def model_names() -> tuple[str, ...]:
    """All names that the catalogue knows, aliases included."""
    document = _document()
    return (*document["models"], *document["aliases"], *_image_networks())


def search_names(text: str, most: int) -> list[NamedModel]:
    """Models of the catalogue whose names hold every word of a text, those that begin with it
    first."""
    words = text.casefold().split()

    def rank(name: str) -> tuple[bool, bool]:
        lower = name.casefold()
        starts = [part.startswith(words[0]) for part in (lower, lower.rpartition("/")[2])]
        return (not any(starts), "/" not in name)

    found = [name for name in model_names() if all(word in name.casefold() for word in words)]
    found = sorted(found, key=rank) if words else found
    return [*filter(None, map(find_in_catalogue, found[:most]))]


def find_in_catalogue(name: str) -> NamedModel | None:
    """The model of this name in the catalogue, if any: reads no other file, and asks no hub."""
    if name.startswith(_LIBRARIES):
        network = name.partition(".")[0]  # timm's weights have a tag
        entry = _image_networks().get(network)
        if entry is not None:
            return _entry_model(name, network, entry, "the catalogue, extracted from the library")
    return _as_original(name, _by_key().get(name.casefold()))


def _as_original(name: str, original: str | None) -> NamedModel | None:
    if original is None:
        return None
    source = "the catalogue" if original == name else f"the catalogue, as {original}"
    return _entry_model(name, original, _document()["models"][original], source)


def _entry_model(name: str, original: str, entry: Document, source: str) -> NamedModel:
    config = entry["config"]
    is_extracted = config["model_type"] in _EXTRACTED
    extracted = shipped_json(_NETWORKS)[original]["network"] if is_extracted else None
    return NamedModel(name, config, source, entry["parameters"], entry["checked"], extracted)


@cache
def _image_networks() -> Document:
    networks = shipped_json(_NETWORKS)
    return {name: entry for name, entry in networks.items() if name.startswith(_LIBRARIES)}


def find_model(name: str) -> NamedModel:
    """Finds a model.

    Args:
        name: a name of the catalogue, a hub id, a local folder, or the path of a ``config.json``.

    Raises:
        InvalidRequestError: nothing is known of the model.
    """
    path = Path(name)
    if name.endswith(".json") or path.is_dir():
        return _from_file(path / _CONFIG if path.is_dir() else path, name)
    found = find_in_catalogue(name)
    if found is not None:
        return found
    if "/" in name and not name.startswith(_LIBRARIES):
        cached = _hub_config(name)
        if cached is not None:
            return _from_file(cached, name)
        # a copy, as of unsloth and NousResearch
        copied = name.casefold().rpartition("/")[2].removesuffix("-bnb-4bit")
        found = _as_original(name, _by_key().get(copied.removesuffix("-unsloth")))
        if found is not None:
            return found
    remedy = "give the path of its config.json, or install huggingface_hub and let it reach the hub"
    raise unknown_model(name, remedy)


def unknown_model(name: str, remedy: str) -> InvalidRequestError:
    """The error for a model that nothing is known of: what may have been meant, else what to do."""
    hint = did_you_mean(name, model_names(), remedy, similarity=0.75, key=str.casefold)
    return InvalidRequestError(f"no model {name!r} is known: {hint}", "model")


def _from_file(path: Path, name: str) -> NamedModel:
    config = stated_json(path, "model")
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{path} is no config.json of a model", "model")
    return NamedModel(name, config, str(path))


def _hub_config(name: str) -> Path | None:
    """The ``config.json`` of a hub id: from the cache, else from the hub."""
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, _CONFIG)
        if isinstance(cached, str):
            return Path(cached)
        host = urlsplit(constants.ENDPOINT).netloc
        # Without a network the hub's client tries for half a minute.
        with socket.create_connection((host.partition(":")[0], 443), _CONNECT_SECONDS):
            return Path(hf_hub_download(name, _CONFIG))
    except (OSError, ValueError):  # no network, no such model, or a name that the hub refuses
        return None
