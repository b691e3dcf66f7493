"""A slow network: a proxy on loopback that lets through so many bytes per second.

    python -m benchmarks.weights.slow_link HOST:PORT BITS_PER_S

Prints the port that it listens on. All connections share one token bucket, and only what comes from the server is
slowed down. `SlowLink` is the other end.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

_PIECE_BYTES = 64 * 1024
_BURST_S = 0.01


class Bucket:
    """Tokens for bytes; `take` waits until they are there."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()

    async def take(self, count: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _BURST_S) + count / self._bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class SlowLink:
    """The proxy in a process of its own.

    Args:
        address: ``host:port`` that it leads to.
        bits_per_s: Its rate.
    """

    def __init__(self, address: str, bits_per_s: float) -> None:
        command = [sys.executable, "-m", "benchmarks.weights.slow_link", address, str(bits_per_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self.address = f"127.0.0.1:{int(self._stdout.readline())}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()


async def serve(address: str, bits_per_s: float) -> None:
    host, _, port = address.rpartition(":")
    bucket = Bucket(bits_per_s / 8)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pass(reader, to_server, None), _pass(from_server, writer, bucket))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: Bucket | None) -> None:
    try:
        while piece := await reader.read(_PIECE_BYTES):
            if bucket is not None:
                await bucket.take(len(piece))
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass  # the other side sees its own connection end
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2])))
