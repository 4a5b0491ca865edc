"""Which pages of a pool are in use and by whom, and which hold a text that may be asked for again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from itertools import count

from whimbrel.base.errors import ConfigError, RequestError

__all__ = ["BlockTable", "BlockManager"]

SCRATCH = 0
"""The page that padding is written to; nobody owns it."""

NO_TEXT = 0
"""The prefix of every text."""


class BlockManager(ABC):
    """Blocks with owners. A page without owners is free, but may go on holding a known text until its room is needed.

    A full page is known by the prefix before it and its own tokens, chained: the key of a page is the number of the
    prefix that ends before it, and its tokens. The keys live in a dict, which compares them after their hashes, so no
    collision can pass one text for another.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size = {block_size} must be at least 1")
        if num_blocks < 2:
            raise ConfigError(f"num_blocks = {num_blocks} must be at least 2: the first takes padding")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._owners = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, SCRATCH, -1))
        self._remembered: dict[int, None] = {}  # free pages of known texts, least recently used first
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (prefix, tokens) -> (prefix, page)
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._numbers = count(NO_TEXT + 1)

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds."""

    @abstractmethod
    def clear(self, page: int) -> None:
        """Fill a page with zeros."""

    @property
    def available(self) -> int:
        """How many pages can be allocated, those that still hold a known text included."""
        return len(self._empty) + len(self._remembered)

    def owners(self, page: int) -> int:
        """How many times a page has been allocated or retained, less its releases."""
        return self._owners[page]

    def allocate(self, pages: int) -> list[int]:
        """Free pages, now owned once each; those of known texts go last, the least recently used first."""
        if pages > self.available:
            raise RequestError(f"{pages} pages asked for but {self.available} are free: release some first")
        taken = []
        for _ in range(pages):
            page = self._empty.pop() if self._empty else self._forget(next(iter(self._remembered)))
            self._owners[page] = 1
            taken.append(page)
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Own pages once more; also free ones that hold a known text."""
        for page in pages:
            self._remembered.pop(page, None)
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Own pages once less. The last of a text is the first to be forgotten: it is of no use without the others."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._keys:
                    self._remembered[page] = None
                else:
                    self._empty.append(page)

    def discard(self, pages: Sequence[int]) -> None:
        """Release pages whose numbers are not finite: nobody may find them, or read a trace of them."""
        for page in pages:
            if self._owners[page] == 1:
                if page in self._keys:
                    del self._known[self._keys.pop(page)]
                self.clear(page)
        self.release(pages)

    def match(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """BlockManager that hold the beginning of `tokens`, at most `most` of them, now retained; and their prefix."""
        pages, prefix, size = [], NO_TEXT, self.block_size
        for start in range(0, most - size + 1, size):
            found = self._known.get((prefix, tuple(tokens[start : start + size])))
            if found is None:
                break
            prefix, page = found
            pages.append(page)
        self.retain(pages)
        return pages, prefix

    def remember(self, prefix: int, tokens: tuple[int, ...], page: int) -> int:
        """Know a full page by the prefix before it and its tokens; the prefix that ends with it.

        Where another page holds the same text already, that one stays the known one.
        """
        key = prefix, tokens
        if key not in self._known:
            self._known[key] = next(self._numbers), page
            self._keys[page] = key
        return self._known[key][0]

    def _forget(self, page: int) -> int:
        del self._remembered[page]
        del self._known[self._keys.pop(page)]
        return page


class BlockTable:
    """The pages of one row, in the order of its text."""

    __slots__ = ("_known", "_pool", "_prefix", "pages", "stored")

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool
        self.pages = array("i")
        self.stored = 0
        """Tokens whose keys and values lie in the pages."""
        self._known, self._prefix = 0, NO_TEXT

    def match(self, tokens: Sequence[int], most: int) -> None:
        """Of an empty holding: begin with pages that hold the beginning of `tokens` already, up to `most` tokens."""
        pages, self._prefix = self._pool.match(tokens, most)
        self.pages.extend(pages)
        self._known = len(pages)
        self.stored = len(pages) * self._pool.block_size

    def blocks_needed(self, tokens: int) -> int:
        """Free pages that `reserve(tokens)` will take."""
        missing = -(-(self.stored + tokens) // self._pool.block_size) - len(self.pages)
        return max(missing, 0) + (tokens > 0 and self._shares_its_end())

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` more, in pages that no other row writes to."""
        fresh = self._pool.allocate(self.blocks_needed(tokens))
        if tokens > 0 and self._shares_its_end():
            index = self.stored // self._pool.block_size
            shared, self.pages[index] = self.pages[index], fresh.pop()
            self._pool.copy(shared, self.pages[index])
            self._pool.release([shared])
        self.pages.extend(fresh)

    def advance(self, tokens: Sequence[int], stored: int, *, remember: bool = True) -> None:
        """Note that the first `stored` of `tokens` are in the pages now, and let others find those that became full."""
        self.stored = stored
        size = self._pool.block_size
        while remember and (self._known + 1) * size <= stored:
            own = tuple(tokens[self._known * size : (self._known + 1) * size])
            self._prefix = self._pool.remember(self._prefix, own, self.pages[self._known])
            self._known += 1

    def fork(self) -> BlockTable:
        """Another holding of the same text; a page is copied when one of them is about to write to it."""
        twin = BlockTable(self._pool)
        twin.pages = self.pages[: -(-self.stored // self._pool.block_size)]
        twin.stored, twin._known, twin._prefix = self.stored, self._known, self._prefix
        self._pool.retain(twin.pages)
        return twin

    def release(self, *, broken: bool = False) -> None:
        """Hold nothing; what is `broken` is of no use to others."""
        (self._pool.discard if broken else self._pool.release)(self.pages)
        self.pages = array("i")
        self.stored, self._known, self._prefix = 0, 0, NO_TEXT

    def _shares_its_end(self) -> bool:
        index, filled = divmod(self.stored, self._pool.block_size)
        return filled > 0 and self._pool.owners(self.pages[index]) > 1
