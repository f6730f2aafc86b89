"""Replace values of JSON and TOML texts by others that a parser accepts and passes on to a reader.
"""

import copy
import functools
import json
import math
import random
import tomllib
from typing import Any

_PREFIX = 2  # bytes before a request's header: its length

# Values of every type, at and beyond the limits of readers' integers.
_STRANGE: tuple[Any, ...] = (
    0, 1, -1, 2, 5, 127, 128, 32768, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -2**63,
    10**30, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e18, 1e308, math.inf, -math.inf, math.nan,
    True, False, "", " ", "a", "3", "1/7", "-1", "nan", "1e999", "1e-99999999", "9" * 50,
    "{}", "{0.x}", "{}{}", "%s", "../x", "/", "\0", "\u0660", "\ud7ff", "x" * 300, [], [[]],
    [0], [1, 2, 3], ["a", 1], [-1], [2**63], [math.inf], [None], [{}], {},
    {"name": 1}, {"a": {}}, None)


def exchange(good: bytes, rng: random.Random) -> bytes | None:
    """Return the text with one to three values replaced, left out or doubled; None if `good` is
    neither JSON nor TOML."""
    parsed = _parse(good)
    if parsed is None:
        return None
    language, value, rest = parsed
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        _exchange_one(value, rng)
    if language == "toml":
        return "".join(f"{json.dumps(k)} = {_toml(v)}\n" for k, v in value.items()
                       if v is not None).encode(errors="replace")
    text = json.dumps(value).encode()
    if language == "json":
        return text
    # A request that is JSON alone, or a header before numbers.
    return min(len(text), 0xffff).to_bytes(_PREFIX, "little") + text + rest


@functools.lru_cache(maxsize=64)
def _parse(good: bytes) -> tuple[str, dict[str, Any], bytes] | None:
    """Return the language, the parsed object, and the bytes that follow a request's header."""
    length = int.from_bytes(good[:_PREFIX], "little")
    for language, text, rest in (
            ("json", good, b""),
            ("request", good[_PREFIX:_PREFIX + length], good[_PREFIX + length:])):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return language, value, rest
    try:
        return "toml", tomllib.loads(good.decode()), b""
    except (ValueError, RecursionError):
        return None


def _exchange_one(value: dict[str, Any], rng: random.Random) -> None:
    holders: list[dict[str, Any] | list[Any]] = []

    def find(holder: Any) -> None:
        if isinstance(holder, dict | list):
            if holder:
                holders.append(holder)
            for x in list(holder.values()) if isinstance(holder, dict) else holder:
                find(x)

    find(value)
    if not holders:
        return
    holder = rng.choice(holders)
    keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key, kind = rng.choice(keys), rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:  # of another place
        other = rng.choice(holders)
        holder[key] = copy.deepcopy(rng.choice(
            list(other.values()) if isinstance(other, dict) else other))
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == 2 and isinstance(holder, dict):
        holder[str(rng.choice(_STRANGE))] = holder[key]
    else:
        holder[key] = copy.deepcopy(rng.choice(_STRANGE))


def _toml(value: Any) -> str:
    """Format a value in TOML on one line; None, which TOML lacks, becomes an empty string."""
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return '""' if value is None else str(value)
