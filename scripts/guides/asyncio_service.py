r"""An asyncio service: one AsyncClient for the whole event loop, used by all its tasks at once.

    python scripts/guides/asyncio_service.py readings.db --port 8080
    printf 'a1 oven 180.5\na2 oven 181\n' | nc 127.0.0.1 8080

Each line is a name for the reading, a sensor and a value. It is answered with its number once it is stored, or with
an error. The service owns its worker, and ends on SIGTERM or Ctrl-C. Whoever has no answer then sends the line
again: its name is the request key, so that it is stored once.
"""

import argparse
import asyncio
import signal

import storage_worker as sw

CREATE = "create table if not exists readings(id integer primary key, sensor text, value real)"
INSERT = "insert into readings(sensor, value) values (?, ?) returning id"

STORING_SECONDS_MAX = 2.0
LINE_BYTES_MAX = 1_000


class Service:
    """Stores what its connections send."""

    def __init__(self, client: sw.AsyncClient) -> None:
        self._client = client
        self._conversations: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin with a new connection."""
        task = asyncio.create_task(self._converse(reader, writer))
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)

    async def end(self) -> None:
        """Leave all connections. A write that is cancelled happens wholly or not at all."""
        for task in self._conversations:
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(await self._store(line) + b"\n")
                await writer.drain()
        except ValueError:
            writer.write(b"error: the line is too long\n")
        finally:
            writer.close()

    async def _store(self, line: bytes) -> bytes:
        try:
            name, sensor, value = line.decode().split()
            reading = (sensor, float(value))
        except ValueError:
            return b"error: a line is a name, a sensor and a number"
        try:
            # While this task waits all others go on, and what they write is committed together.
            stored = await self._client.execute(
                INSERT, reading, timeout=STORING_SECONDS_MAX, request_key=name
            )
            return b"%d" % stored.scalar()
        except sw.StorageError as error:
            # Overload, a passed deadline, a lost worker: the sender is told, and the service goes on.
            return f"error: {error.code}, {error.outcome}".encode()


async def serve(database: str, port: int) -> None:
    """Serve until a signal says that it is enough."""
    enough = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, enough.set)
    # Starting and stopping a worker blocks: here nothing else runs yet, or any more.
    with sw.StorageWorker(database) as worker:
        async with await worker.connect_async() as client:
            await client.execute(CREATE)
            service = Service(client)
            server = await asyncio.start_server(service.accept, "127.0.0.1", port, limit=LINE_BYTES_MAX)
            print("listening on port", server.sockets[0].getsockname()[1], flush=True)
            await enough.wait()
            server.close()
            await service.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stores readings.")
    parser.add_argument("database")
    parser.add_argument("--port", type=int, default=8080, help="0 for any that is free")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.database, arguments.port))
