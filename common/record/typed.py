"""Dataclasses from JSON."""

from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints


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
