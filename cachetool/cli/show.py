"""``cachetool show``: the contents of one shard or one sample."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.core.errors import UsageError
from cachetool.core.units import format_size

if TYPE_CHECKING:
    from cachetool.cache import Shard
    from cachetool.core.schema import Field

__all__ = ["show"]

_SHOWN_BYTES = 32


def show(
    shard: Annotated[
        str,
        typer.Argument(
            metavar="SHARD[:INDEX]", help="Id of a shard, or its first characters; with :INDEX, one of its samples."
        ),
    ],
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the fields of a shard, or the values of one sample.

    \b
    Examples:
      cachetool show 01jd3
      cachetool show 01jd3:0 --json
    """
    # Imported here, so that `cachetool show --help` does not load NumPy and the catalog.
    from cachetool.api import find_shard, open_cache, read_sample

    out = Output(as_json=as_json, quiet=quiet)
    prefix, colon, number = shard.partition(":")
    index = _index(number) if colon else None
    with open_cache(cache, create=False, notify=out.note) as opened:
        target = find_shard(opened, prefix)
        values = None if index is None else read_sample(opened, target.id, index)
    if values is None:
        _show_shard(out, target)
    elif as_json:
        fields = {field.name: _json_value(values[field.name]) for field in target.schema}
        out.document({"id": target.id, "dataset": target.dataset, "index": index, "fields": fields}, indent=None)
    else:
        out.table(
            ["field", "type", "value"],
            [(field.name, field.describe(), _abbreviated(field, values[field.name])) for field in target.schema],
        )


def _index(text: str) -> int:
    """Return the number of a sample. Raises :class:`UsageError` for anything else."""
    # isdigit alone accepts digits of other scripts and superscripts, which int() may refuse.
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{text!r} is not the number of a sample; write it like SHARD:0")
    return int(text)


def _show_shard(out: Output, shard: Shard) -> None:
    if out.as_json:
        out.document(
            {
                "id": shard.id,
                "dataset": shard.dataset,
                "format": shard.format,
                "samples": shard.samples,
                "bytes": shard.bytes,
                "payload": shard.payload,
                "path": str(shard.path),
                "schema": shard.schema.to_json(),
            }
        )
        return
    out.line(f"shard {shard.id} of dataset {shard.dataset!r}: {count(shard.samples, 'sample')} as {shard.format}")
    out.line(f"{format_size(shard.bytes)} on disk, {format_size(shard.payload)} of values, in {shard.data}")
    out.table(["field", "type", ">bytes a sample"], [_field_row(field) for field in shard.schema])


def _field_row(field: Field) -> tuple[str, str, str]:
    return field.name, field.describe(), format_size(field.nbytes) if field.kind == "fixed" else "varies"


def _json_value(value: Any) -> Any:
    """Return a value for JSON: arrays as nested lists, bytes as base64, numbers that are not finite as text."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, str):
        return value
    if value.dtype.kind == "c":
        return {"real": _numbers(value.real), "imag": _numbers(value.imag)}
    # Times are shown as the integers that are stored: JSON has no times, and Python's datetime has no nanoseconds.
    if value.dtype.kind in "mM":
        return value.astype("int64").tolist()
    return _numbers(value) if value.dtype.kind == "f" else value.tolist()


def _numbers(value: Any) -> Any:
    """Return floats for JSON, with text for NaN and the infinities."""
    import numpy as np

    if np.isfinite(value).all():
        return value.tolist()
    # JSON has no word for NaN and the infinities. Text, so that no reader takes one of the three for another, as with
    # null.
    out = np.asarray(value).astype(object)
    for mask, text in ((np.isnan(value), "NaN"), (np.isposinf(value), "Infinity"), (np.isneginf(value), "-Infinity")):
        out[mask] = text
    return out.tolist()


def _abbreviated(field: Field, value: Any) -> str:
    """Return a short text of a value for the table."""
    if isinstance(value, bytes):
        shown = value[:_SHOWN_BYTES].hex(" ")
        return f"{len(value)} bytes: {shown}{' ...' if len(value) > _SHOWN_BYTES else ''}"
    if isinstance(value, str):
        return value
    import numpy as np

    array = np.asarray(value)
    if array.ndim == 0:
        return str(array)
    text = np.array2string(array.reshape(-1), threshold=8, edgeitems=4, precision=4, max_line_width=200)
    return f"{count(array.size, 'value')}: {text}" if field.kind == "fixed" else f"{array.shape}: {text}"
