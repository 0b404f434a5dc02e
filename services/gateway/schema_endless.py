"""Schemas that hold together and refer to themselves: a grammar engine intersects them level by level and comes to no end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from services.gateway.schema_places import Path, children, target

_NAMES = ("$defs", "definitions")  # what stands there says nothing until somebody refers to it
# Keywords that speak of a value's parts: only schemas with one of them have anything to intersect below.
_PARTS = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems")
_MOST_STEPS = 200_000  # some tenths of a second
Schema = dict[str, Any]
Pair = tuple[int, int]


class _TooManyError(Exception):
    """More than `_MOST_STEPS`."""


def endless_together(root: Schema) -> Path | None:
    """The place of a schema that holds two others together whose intersection has no end; None when there is none.

    Two such schemas may be the same one twice. Alternatives count as if each could be the one that is taken, and what takes more steps than
    200,000 to follow counts as endless: what is refused wrongly is a schema that refers to itself in many ways at once.

    Args:
        root: a valid schema.
    """
    places, nodes = _reachable(root)
    intersections = _Intersections(root, nodes, _leading_to_themselves(root, nodes))
    for at, schema in nodes.items():
        try:
            if any(map(intersections.comes_back, intersections.own_pairs(schema))):
                return places[at]
        except _TooManyError:
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


def _groups(root: Schema, schema: Schema) -> list[list[Schema]]:
    """What holds beside a schema's own keywords: one list each for the reference, for every branch of allOf, and for alternatives."""
    found = _target(root, schema)
    groups = [[found[1]]] if found is not None else []
    groups += [[inner] for inner in schema.get("allOf") or ()]
    groups += [list(schema[name]) for name in ("anyOf", "oneOf") if schema.get(name)]
    return [[inner for inner in group if isinstance(inner, dict)] for group in groups]


class _Intersections:
    """Follows pairs of schemas that hold together to those of their parts.

    Args:
        root: the document.
        nodes: its schemas by their identity.
        endless: those that lead to themselves; no others need be followed.
    """

    def __init__(self, root: Schema, nodes: dict[int, Schema], endless: set[int]) -> None:
        self._root = root
        self._nodes = nodes
        self._endless = endless
        self._held: dict[int, list[int]] = {}
        self._done: set[Pair] = set()  # pairs that are known to end
        self._steps = 0

    def own_pairs(self, schema: Schema) -> Iterator[Pair]:
        """Pairs that one schema holds together: of its reference, of branches, of its own keywords."""
        groups = [group for group in _groups(self._root, schema) if any(id(inner) in self._endless for inner in group)]
        own = [id(schema)] if self._has_parts(schema) else []
        if len(groups) + len(own) < 2:
            return
        held = [[at for inner in group for at in self._holding(inner)] for group in groups] + [own]
        for i, ones in enumerate(held):
            for others in held[i + 1 :]:
                for one in ones:
                    for other in others:
                        yield one, other

    def comes_back(self, first: Pair) -> bool:
        """True when intersecting a pair leads to a pair that is being intersected already.

        Raises:
            _TooManyError: it takes too long to tell.
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
                    self._done.add(left)
                continue
            self._step()
            pair = (min(pair), max(pair))
            if pair in on_way:
                return True
            if pair not in self._done:
                way.append(pair)
                on_way.add(pair)
                open_pairs.append(self._inner_pairs(pair))
        return False

    def _inner_pairs(self, pair: Pair) -> Iterator[Pair]:
        """Pairs that hold together for a part of a value that satisfies both schemas."""
        one, other = (self._nodes[at] for at in pair)
        for left, right in itertools.chain(_members(one, other), _elements(one, other)):
            self._step()
            if id(left) in self._endless and id(right) in self._endless:
                for at in self._holding(left):
                    for beside in self._holding(right):
                        yield at, beside

    def _holding(self, schema: Schema) -> list[int]:
        """The endless schemas with parts that a value of this one may have to satisfy: itself, what it refers to, its branches."""
        if id(schema) not in self._held:
            seen: set[int] = set()
            found: list[int] = []
            waiting = [schema]
            while waiting:
                one = waiting.pop()
                self._step()
                if id(one) not in seen and id(one) in self._endless:
                    seen.add(id(one))
                    found += [id(one)] if self._has_parts(one) else []
                    waiting += [inner for group in _groups(self._root, one) for inner in group]
            self._held[id(schema)] = found
        return self._held[id(schema)]

    def _has_parts(self, schema: Schema) -> bool:
        return id(schema) in self._endless and any(name in schema for name in _PARTS)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooManyError


def _members(one: Schema, other: Schema) -> Iterator[tuple[Any, Any]]:
    """Schemas of one property: of a name that both have, or that one has and the other's patterns or remaining properties may take."""
    mine, theirs = one.get("properties") or {}, other.get("properties") or {}
    wide_mine, wide_theirs = _wide(one), _wide(other)
    yield from ((mine[name], theirs[name]) for name in mine if name in theirs)
    yield from ((inner, wide) for wide in wide_theirs for inner in mine.values())
    yield from ((wide, inner) for wide in wide_mine for inner in theirs.values())
    yield from itertools.product(wide_mine, wide_theirs)


def _wide(schema: Schema) -> list[Any]:
    return [
        inner
        for inner in (*(schema.get("patternProperties") or {}).values(), schema.get("additionalProperties"))
        if isinstance(inner, dict)
    ]


def _elements(one: Schema, other: Schema) -> Iterator[tuple[Any, Any]]:
    """Schemas of one element: of the same index, or of any."""
    (first, rest), (their_first, their_rest) = _listed(one), _listed(other)
    yield from zip(first, their_first, strict=False)
    yield from ((inner, their_rest) for inner in first[len(their_first) :])
    yield from ((rest, inner) for inner in their_first[len(first) :])
    yield rest, their_rest


def _listed(schema: Schema) -> tuple[list[Any], Any]:
    """Schemas of the first elements, and of all others."""
    items = schema.get("items")
    if isinstance(items, list):  # before draft 2020-12
        return items, schema.get("additionalItems")
    return list(schema.get("prefixItems") or ()), items
