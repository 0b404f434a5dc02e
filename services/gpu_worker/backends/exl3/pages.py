"""Pages of the key-value cache: which stream and which kept state holds which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAGE_TOKENS = 256


class PagesExhausted(RuntimeError):
    """No page is free."""


class PageTable:
    """Hands out pages, and counts who holds each. A stream's pages are listed in the order of its tokens.

    Streams may share pages that are full, and so are only read: those of a kept state that they continue.

    Args:
        num_pages: pages of the cache.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}: at least 1 is needed")
        self.num_pages = num_pages
        # The lowest page first: a half-filled cache stays in one piece.
        self._free = list(range(num_pages - 1, -1, -1))
        self._streams = [0] * num_pages
        self._kept = [0] * num_pages
        self.num_kept = 0  # pages that kept states alone hold

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """Pages that no stream holds."""
        return len(self._free) + self.num_kept

    def grow(self, pages: list[int], num_tokens: int) -> None:
        """Appends pages until `pages` hold `num_tokens` tokens.

        Raises:
            PagesExhausted: too few are free; nothing was taken.
        """
        missing = pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            raise PagesExhausted(f"{missing} cache pages are needed, {len(self._free)} of {self.num_pages} are free")
        new = [self._free.pop() for _ in range(missing)]
        self._count(new, streams=1)
        pages.extend(new)

    def share(self, pages: Sequence[int]) -> list[int]:
        """The same pages for one more stream."""
        self._count(pages, streams=1)
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Takes a stream's pages back and empties the list."""
        self._count(reversed(pages), streams=-1)
        pages.clear()

    def keep(self, pages: Sequence[int]) -> None:
        """A kept state holds these pages, which a stream has."""
        self._count(pages, kept=1)

    def let_go(self, pages: Sequence[int]) -> None:
        """A kept state holds them no more."""
        self._count(reversed(pages), kept=-1)

    def only_kept(self, page: int) -> bool:
        """True when a single kept state holds the page, and no stream."""
        return self._kept[page] == 1 and self._streams[page] == 0

    def _count(self, pages: Iterable[int], *, streams: int = 0, kept: int = 0) -> None:
        for page in pages:
            self.num_kept -= self._kept_alone(page)
            self._streams[page] += streams
            self._kept[page] += kept
            self.num_kept += self._kept_alone(page)
            if not self._streams[page] and not self._kept[page]:
                self._free.append(page)

    def _kept_alone(self, page: int) -> bool:
        return self._kept[page] > 0 and self._streams[page] == 0


def pages_for(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)
