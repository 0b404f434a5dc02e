"""Schemas that hold together and refer to themselves: a grammar engine intersects them level by level and comes to no end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.gateway.schema_places import Path, children, target

_NAMES = ("$defs", "definitions")  # what stands there says nothing until somebody refers to it
_MAX_PAIRS = 20_000
Schema = dict[str, Any]
Pair = tuple[int, int]


def endless_together(root: Schema) -> Path | None:
    """The place of a schema that holds two others together whose intersection has no end; None when there is none.

    Two such schemas may be the same one twice. Alternatives count as if each could be the one that is taken, and more pairs than 20,000
    as endless: what is refused wrongly is a schema that refers to itself in many ways at once.

    Args:
        root: a valid schema.
    """
    places, nodes = _reachable(root)
    endless = _leading_to_themselves(root, nodes)
    together = {at: _holding(root, nodes[at], endless) for at in endless}
    done: set[Pair] = set()
    for at in endless:
        for pair in _own_pairs(root, nodes[at], together):
            if _comes_back(pair, nodes, together, done) or len(done) > _MAX_PAIRS:
                return places[at]
    return None


def _reachable(root: Schema) -> tuple[dict[int, Path], dict[int, Schema]]:
    """Places and schemas, by their identity, of everything that a value or a part of it may have to satisfy."""
    places: dict[int, Path] = {}
    nodes: dict[int, Schema] = {}
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in nodes:
            continue
        places[id(schema)], nodes[id(schema)] = place, schema
        waiting += [((*place, *step), inner) for step, inner in children(schema) if step[0] not in _NAMES]
        if (found := _target(root, schema)) is not None:
            waiting.append(found)
    return places, nodes


def _target(root: Schema, schema: Schema) -> tuple[Path, Any] | None:
    return target(root, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None


def _next(root: Schema, schema: Schema) -> Iterator[Schema]:
    """The schemas inside a schema, and the one that it refers to."""
    found = _target(root, schema)
    for inner in [*(inner for step, inner in children(schema) if step[0] not in _NAMES), *([found[1]] if found is not None else [])]:
        if isinstance(inner, dict):
            yield inner


def _leading_to_themselves(root: Schema, nodes: dict[int, Schema]) -> set[int]:
    """Those from which a way leads into a cycle: what is left when schemas without a way on are taken away, again and again."""
    ways = {at: [id(inner) for inner in _next(root, schema)] for at, schema in nodes.items()}
    back: dict[int, list[int]] = {at: [] for at in nodes}
    for at, following in ways.items():
        for one in following:
            back[one].append(at)
    open_ways = {at: len(following) for at, following in ways.items()}
    ended = [at for at, count in open_ways.items() if count == 0]
    left = set(nodes)
    while ended:
        at = ended.pop()
        left.discard(at)
        for before in back[at]:
            open_ways[before] -= 1
            if open_ways[before] == 0:
                ended.append(before)
    return left


def _holding(root: Schema, schema: Schema, endless: set[int]) -> list[int]:
    """The endless schemas that a value of this one may have to satisfy: itself, what it refers to, its branches."""
    found: dict[int, None] = {}
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if id(one) in found or id(one) not in endless:
            continue
        found[id(one)] = None
        waiting += [inner for group in _groups(root, one) for inner in group]
    return list(found)


def _groups(root: Schema, schema: Schema) -> list[list[Schema]]:
    """What holds beside a schema's own keywords: one list each for the reference, for every branch of allOf, and for alternatives."""
    found = _target(root, schema)
    groups = [[found[1]]] if found is not None else []
    groups += [[inner] for inner in schema.get("allOf") or ()]
    groups += [list(schema[name]) for name in ("anyOf", "oneOf") if schema.get(name)]
    return [[inner for inner in group if isinstance(inner, dict)] for group in groups]


def _own_pairs(root: Schema, schema: Schema, together: dict[int, list[int]]) -> Iterator[Pair]:
    """Pairs of endless schemas that one schema holds together."""
    groups = [[at for inner in group for at in together.get(id(inner), ())] for group in _groups(root, schema)]
    groups.append([id(schema)])
    for i, ones in enumerate(groups):
        for others in groups[i + 1 :]:
            yield from ((one, other) for one in ones for other in others)


def _comes_back(first: Pair, nodes: dict[int, Schema], together: dict[int, list[int]], done: set[Pair]) -> bool:
    """True when intersecting a pair leads to a pair that is being intersected already, or when there are too many.

    Args:
        done: pairs that are known to end; more are added.
    """
    way: list[Pair] = []
    on_way: set[Pair] = set()
    open_pairs: list[Iterator[Pair]] = [iter((first,))]
    while open_pairs:
        pair = next(open_pairs[-1], None)
        if pair is None:
            open_pairs.pop()
            if way:
                left = way.pop()
                on_way.discard(left)
                done.add(left)
            continue
        pair = (min(pair), max(pair))
        if pair in on_way:
            return True
        if pair in done:
            continue
        if len(done) + len(way) > _MAX_PAIRS:
            return True
        way.append(pair)
        on_way.add(pair)
        open_pairs.append(_inner_pairs(nodes[pair[0]], nodes[pair[1]], together))
    return False


def _inner_pairs(one: Schema, other: Schema, together: dict[int, list[int]]) -> Iterator[Pair]:
    """Pairs that hold together for a part of a value that satisfies both schemas."""
    for left, right in [*_members(one, other), *_elements(one, other)]:
        for at in together.get(id(left), ()):
            yield from ((at, beside) for beside in together.get(id(right), ()))


def _members(one: Schema, other: Schema) -> list[tuple[Any, Any]]:
    """Schemas of one property: of a name that both have, or that one has and the other's patterns or remaining properties may take."""
    mine, theirs = one.get("properties") or {}, other.get("properties") or {}
    wide_mine, wide_theirs = _wide(one), _wide(other)
    pairs = [(mine[name], theirs[name]) for name in mine if name in theirs]
    pairs += [(inner, wide) for name, inner in mine.items() for wide in wide_theirs]
    pairs += [(wide, inner) for name, inner in theirs.items() for wide in wide_mine]
    return pairs + [(left, right) for left in wide_mine for right in wide_theirs]


def _wide(schema: Schema) -> list[Any]:
    return [*(schema.get("patternProperties") or {}).values(), schema.get("additionalProperties")]


def _elements(one: Schema, other: Schema) -> list[tuple[Any, Any]]:
    """Schemas of one element: of the same index, or of any."""
    (first, rest), (their_first, their_rest) = _listed(one), _listed(other)
    pairs = [(a, b) for a, b in zip(first, their_first, strict=False)]
    pairs += [(inner, their_rest) for inner in first[len(their_first) :]] + [(rest, inner) for inner in their_first[len(first) :]]
    return [*pairs, (rest, their_rest)]


def _listed(schema: Schema) -> tuple[list[Any], Any]:
    """Schemas of the first elements, and of all others."""
    items = schema.get("items")
    if isinstance(items, list):  # before draft 2020-12
        return items, schema.get("additionalItems")
    return list(schema.get("prefixItems") or ()), items
