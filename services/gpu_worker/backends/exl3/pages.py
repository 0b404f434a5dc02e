"""Pages of the key-value cache: which stream holds which."""

from __future__ import annotations

PAGE_TOKENS = 256


class PagesExhausted(RuntimeError):
    """No page is free."""


class PageTable:
    """Hands out pages. A stream's pages are listed in the order of its tokens.

    Args:
        num_pages: pages of the cache.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}: at least 1 is needed")
        self.num_pages = num_pages
        # The lowest page first: a half-filled cache stays in one piece.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that no stream holds."""
        return len(self._free)

    def grow(self, pages: list[int], num_tokens: int) -> None:
        """Appends pages until `pages` hold `num_tokens` tokens.

        Raises:
            PagesExhausted: too few are free; nothing was taken.
        """
        missing = pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            raise PagesExhausted(f"{missing} cache pages are needed, {len(self._free)} of {self.num_pages} are free")
        pages.extend(self._free.pop() for _ in range(missing))

    def release(self, pages: list[int]) -> None:
        """Takes a stream's pages back and empties the list."""
        self._free.extend(reversed(pages))
        pages.clear()


def pages_for(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)
