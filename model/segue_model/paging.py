"""The size of a page: shared by the runner, which owns the bytes, and the server, which owns the numbers."""

PAGE_TOKENS = 16  # positions in a page; a page holds K and V of all layers for them
