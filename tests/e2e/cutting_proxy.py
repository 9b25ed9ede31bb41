"""A TCP proxy on loopback that cuts connections, in the middle of a frame if it comes to that."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

How = Literal["reset", "close", "vanish"]


@dataclass(frozen=True)
class Cut:
    """The end of one connection, once so many bytes of the server's have come through.

    reset: both sides get an RST. close: both sides get a FIN. vanish: the client gets an RST, and the server is not
    told: its connection stays open, and nobody reads what it writes there.
    """

    after_bytes: int
    how: How


def random_cuts(dice: random.Random, count: int, most_bytes: int) -> list[Cut]:
    """`count` cuts at random places of any kind."""
    kinds: Sequence[How] = ("reset", "close", "vanish")
    return [Cut(dice.randrange(most_bytes), dice.choice(kinds)) for _ in range(count)]


class CuttingProxy:
    """Lines to one server, on an event loop and a thread of their own."""

    def __init__(self, target: str) -> None:
        self.cuts = 0  # made so far
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()

    def line(self, cuts: Sequence[Cut]) -> str:
        """An address that leads to the server. Its first connections end as `cuts` say, in turn; later ones do not."""
        return asyncio.run_coroutine_threadsafe(self._listen(list(cuts)), self._loop).result(10)

    def lead_to(self, target: str) -> None:
        """From now on new connections lead to another server."""
        self._target = target

    async def _listen(self, cuts: list[Cut]) -> str:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            cut = cuts.pop(0) if cuts else None
            task = asyncio.ensure_future(self._connect(reader, writer, cut))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: Cut | None) -> None:
        """One connection, from its beginning to its end."""
        host, port = self._target.rsplit(":", 1)
        there, back = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, back}
        up = asyncio.ensure_future(_copy(reader, back))
        down = asyncio.ensure_future(_copy(there, writer, cut.after_bytes if cut else None))
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        how: How = "close"
        if cut and down.done() and down.result() >= cut.after_bytes:
            how = cut.how
            self.cuts += 1
        for side in (writer,) if how == "vanish" else (writer, back):
            if how != "close":
                _reset(side)
            side.close()
        for task in (up, down):
            task.cancel()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None = None) -> int:
    """Bytes copied until the end, or until there are `most`."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while most is None or count < most:
            data = await reader.read(65536)
            if not data:
                break
            data = data if most is None else data[: most - count]
            count += len(data)
            writer.write(data)
            await writer.drain()
    return count


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST: what has not arrived is lost."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
