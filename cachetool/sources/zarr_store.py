"""A remote Zarr as :mod:`cachetool.sources.zarr` walks it and as zarr reads it: objects by key, asked for over
:class:`cachetool.sources.byte_source.Ranges`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cachetool.sources.byte_source import Ranges

__all__ = ["RemoteFolder"]


class RemoteFolder:
    """See :class:`cachetool.sources.zarr.Folder`."""

    ahead: int | None = 0

    def __init__(self, ranges: Ranges, prefix: str, folders: Iterable[str]) -> None:
        """``folders``: all folders below the root that hold metadata, each ending in ``/``."""
        self._ranges, self.prefix, self._folders = ranges, prefix, tuple(folders)

    def metadata(self, name: str) -> bytes | None:
        """The bytes of a file of metadata."""
        return self._ranges.object(self.prefix + name)

    def folders(self) -> Iterator[tuple[str, bool]]:
        """Folders that hold metadata, or others that do."""
        start = len(self.prefix)
        names = {each[start:].partition("/")[0] for each in self._folders if each.startswith(self.prefix)}
        return ((name, False) for name in sorted(names - {""}))

    def below(self, name: str) -> RemoteFolder:
        """One of them."""
        return RemoteFolder(self._ranges, f"{self.prefix}{name}/", self._folders)

    def store(self) -> Store:
        """What zarr reads."""
        return _Store(self._ranges, self.prefix)


class _Store(Store):
    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, ranges: Ranges, prefix: str) -> None:
        super().__init__(read_only=True)
        self._ranges, self._prefix = ranges, prefix

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        import asyncio

        data = await asyncio.to_thread(self._read, self._prefix + key, byte_range)
        if data is not None and not data:  # zarr takes an empty shard for one of fill values
            raise ValueError(f"{key} is empty")
        return None if data is None else prototype.buffer.from_bytes(data)

    def _read(self, key: str, part: ByteRequest | None) -> bytes | None:
        if part is None:
            return self._ranges.object(key)
        size = self._ranges.size(key)
        if size is None:
            return None
        if isinstance(part, RangeByteRequest):
            start, stop = part.start, part.end
        elif isinstance(part, OffsetByteRequest):
            start, stop = part.offset, size
        else:
            assert isinstance(part, SuffixByteRequest)
            start, stop = max(0, size - part.suffix), size
        return self._ranges.part_of(key, start, min(stop, size) - start)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        return self._ranges.size(self._prefix + key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        raise PermissionError("this Zarr is only read")

    async def delete(self, key: str) -> None:
        raise PermissionError("this Zarr is only read")

    async def list(self) -> AsyncIterator[str]:
        for name in list[str]():
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for name in list[str]():
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in list[str]():
            yield name
