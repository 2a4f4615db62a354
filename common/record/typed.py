"""What a command's complete runs found, as dataclasses in a JSON file."""

import json
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from common.record.grid import Grid
from common.record.record import write_json

Run = dict[str, Any]  # common.record.provenance, and what a command adds to it


class BrokenRecord(ValueError):
    """A record's file is not one that this version has written."""


@dataclass
class Tables:
    """What a run printed."""

    run: Run
    grids: list[Grid]


def read(kind: Any, path: Path) -> Any:
    """The file's content as this type; an empty one if there is no file yet.

    Raises:
        BrokenRecord: it has something else, such as the marks of a merge; which file, and what was found.
    """
    if not path.exists():
        return from_json(kind, {})
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"an object was expected; got {type(content).__name__}")
        return from_json(kind, content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else error
        raise BrokenRecord(
            f"{path} is no record of this version, {what}: restore it, or remove it and measure anew"
        ) from error


def write(path: Path, found: Any) -> None:
    """Write a dataclass, or dataclasses by name; of timings without their samples.

    A table has some hundred times: with the samples of each the file would be several times as large.
    """
    write_json(
        path, {k: _plain(v) for k, v in found.items()} if isinstance(found, dict) else _plain(found)
    )


def from_json(kind: Any, found: Any) -> Any:
    """A value of this type from what ``dataclasses.asdict`` and JSON made of it.

    Args:
        kind: a dataclass, a ``dict`` with strings as keys, a ``list``, ``tuple[X, ...]`` or ``X | None`` of such
            types. A value of any other type is taken as it is.
        found: what ``json.loads`` returned.

    Raises:
        KeyError: a field that the dataclass does not have.
    """
    if found is None:
        return None
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: from_json(types[name], value) for name, value in found.items()})
    inner = get_args(kind)
    if get_origin(kind) is dict:
        return {key: from_json(inner[1], value) for key, value in found.items()}
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(from_json(inner[0], value) for value in found)
    return from_json(inner[0], found) if inner[1:] == (type(None),) else found


def _plain(found: Any) -> Any:
    def kept(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in fields if name != "samples_ms"}

    return asdict(found, dict_factory=kept)
