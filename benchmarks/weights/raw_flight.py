"""Arrow Flight with nothing around it: the reference for the transport that is built on it.

The server sends byte slices of the same arrays in messages of the same size over as many streams; there are no tokens,
versions, digests or retries. Its client throws away what it reads, or keeps the messages, or, as a client that wants
arrays must, copies them to where the arrays lie.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

SCHEMA = pa.schema([("bytes", pa.uint8())])


CACHED_BYTES = 1 << 28
"""More than caches hold: where all memory is cold, one place is as good as two."""


class RawServer(flight.FlightServerBase):
    """Serves arrays as bytes; a ticket says ``streams,stream,bytes per message``."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._buffers = [pa.py_buffer(array.reshape(-1).view(np.uint8)) for array in arrays.values()]

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        streams, stream, chunk_bytes = map(int, ticket.ticket.split(b","))
        share = -(-sum(buffer.size for buffer in self._buffers) // streams)
        batches = self._batches(stream * share, (stream + 1) * share, chunk_bytes)
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(SCHEMA, batches))

    def _batches(self, start: int, end: int, chunk_bytes: int):
        at = 0
        for buffer in self._buffers:
            low, high = max(start - at, 0), min(end - at, buffer.size)
            for offset in range(low, high, chunk_bytes):
                size = min(chunk_bytes, high - offset)
                column = pa.Array.from_buffers(pa.uint8(), size, [None, buffer.slice(offset, size)], null_count=0)
                yield pa.RecordBatch.from_arrays([column], schema=SCHEMA)
            at += buffer.size


class RawClient:
    """Connections to a `RawServer`, one for each stream."""

    def __init__(self, port: int, streams: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.places = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._connections = [
            flight.connect(f"grpc://127.0.0.1:{port}", generic_options=options) for _ in range(streams)
        ]

    def read(self, chunk_bytes: int, how: str, nbytes: int) -> int:
        """Reads all arrays once; the number of bytes.

        Args:
            chunk_bytes: Of a message.
            how: ``thrown away``, ``kept`` as messages, or ``into arrays``: places touched before, two in turn where
                arrays are small.
            nbytes: Of all arrays.
        """
        found: list[int] = [0] * len(self._connections)
        kept: list[pa.Table] = []
        if self.places[0].size != nbytes:
            self.places = [np.zeros(nbytes, np.uint8) for _ in range(2 if nbytes <= CACHED_BYTES else 1)]
        if how == "into arrays":
            self.places.reverse()
        place = self.places[0]
        share = -(-nbytes // len(self._connections))

        def run(stream: int) -> None:
            text = f"{len(self._connections)},{stream},{chunk_bytes}"
            reader = self._connections[stream].do_get(flight.Ticket(text.encode()))
            if how == "kept":
                kept.append(reader.read_all())
                found[stream] = kept[-1].num_rows
                return
            for chunk in reader:
                if how == "into arrays":
                    at = stream * share + found[stream]
                    received = np.frombuffer(chunk.data.column(0).buffers()[1], np.uint8, chunk.data.num_rows)
                    place[at : at + received.size] = received
                found[stream] += chunk.data.num_rows

        run_together(run, len(self._connections))
        return sum(found)


def run_together(work, count: int) -> None:
    threads: Sequence[threading.Thread] = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
