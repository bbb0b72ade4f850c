"""The leases of several datasets, for mixtures: their views one after another, as one view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cachetool.cache.history import Delivered
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.text import shown
from cachetool.loaders.mixture import Mixture
from cachetool.loaders.snapshots.follow import CacheSubscription, Leases, Subscription
from cachetool.loaders.view import View

__all__ = ["MixedSubscription"]


class MixedSubscription:
    """The :class:`~cachetool.loaders.snapshots.follow.Leases` of the datasets of a mixture.

    ``fields``: the fields that the datasets must have in common; None for all.
    """

    def __init__(self, members: Sequence[Subscription], mixture: Mixture, fields: Sequence[str] | None) -> None:
        self._members, self._mixture, self._fields = members, mixture, fields
        self._views: tuple[View, ...] = ()
        """The views of which the newest view is made."""
        self._view: View | None = None

    def newest(
        self, *, epoch: int | None = None, peek: bool = False, sparing: bool = False, anew: bool = False,
        reads: Sequence[float] = (),
    ) -> View:  # fmt: skip
        """See :class:`Leases`."""
        fractions = reads or [1.0] * len(self._members)
        return self._of(
            [
                one.newest(epoch=epoch, peek=peek, sparing=sparing, anew=anew, reads=(fraction,))
                for one, fraction in zip(self._members, fractions, strict=True)
            ]
        )

    @property
    def spared(self) -> bool:
        """See :class:`Leases`."""
        return any(one.spared for one in self._members)

    def moved(self, view: View) -> bool:
        """See :class:`Leases`."""
        return view is not self._view or any(map(_moved, self._members, self._views))

    def share(self, other: Leases) -> None:
        """See :class:`Leases`."""
        if isinstance(other, MixedSubscription):
            for mine, theirs in zip(self._members, other._members, strict=True):
                mine.share(theirs)
            self._views, self._view = other._views, other._view

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """See :class:`Leases`. The times of the epoch are noted once in each cache."""
        told = set[object]()
        for one in self._members:
            root = one.root if isinstance(one, CacheSubscription) else one
            one.served(None if root in told else delivered, last=last)
            told.add(root)

    def under_way(self, delivered: Delivered, *, epoch: int) -> None:
        """See :class:`Leases`. The times are noted once, for the first dataset of a cache."""
        for one in self._members:
            if isinstance(one, CacheSubscription):
                one.under_way(delivered, epoch=epoch)
                return

    def release(self, *, unread: bool = False) -> None:
        """See :class:`Leases`."""
        _each([lambda one=one: one.release(unread=unread) for one in self._members])  # type: ignore[misc]

    def close(self) -> None:
        """See :class:`Leases`."""
        _each([one.close for one in self._members])

    def _of(self, views: Sequence[View]) -> View:
        # The same object for the same views, because feeders then have its shards open already.
        if self._view is None or any(new is not old for new, old in zip(views, self._views, strict=True)):
            self._views, self._view = tuple(views), joined(views, self._mixture, self._fields)
        return self._view


def _moved(member: Subscription, view: View) -> bool:
    return member.moved(view)


def _each(calls: Sequence[Callable[[], None]]) -> None:
    """Make all these calls, also if some fail. Raise the first error."""
    errors = []
    for call in calls:
        try:
            call()
        # Leases of other caches must end although one catalog is lost.
        except Exception as error:  # noqa: BLE001
            errors.append(error)
    if errors:
        raise errors[0]


def joined(views: Sequence[View], mixture: Mixture, fields: Sequence[str] | None) -> View:
    """Return the samples of the views of a mixture's datasets, one dataset after another.

    Raises :class:`UsageError` if they differ in ``fields``, and if only some hold one node's share of their source.
    """
    names = [member.name for member in mixture.members]
    if len({view.in_parts for view in views}) > 1:
        alone = next(name for name, view in zip(names, views, strict=True) if view.in_parts)
        raise UsageError(
            f"dataset {shown(alone)} holds the part of this node, and others of the mixture do not; pull all of them"
            " with --part, or none"
        )
    # Files of several folders may have the same name.
    parts = tuple(
        part if part.digest else part._replace(id=f"{part.where}/{part.file}") for view in views for part in view.parts
    )
    return View(
        sum(view.version for view in views),
        ", ".join(view.dataset for view in views if view.dataset),
        _common([view.schema for view in views], names, fields),
        parts,
        views[0].in_parts,
        tuple(len(view.parts) for view in views),
        tuple(view.schema for view in views),
    )


def _noted(field: Field, fields: Sequence[Field]) -> Field:
    """Return the field with the notes that all datasets have."""
    dims = field.dims if all(one.dims == field.dims for one in fields) else ()
    packing = field.packing if all(one.packing == field.packing for one in fields) else {"differ": True}
    return replace(field, dims=dims, packing=packing)


def _common(schemas: Sequence[Schema], names: Sequence[str], fields: Sequence[str] | None) -> Schema:
    """Return the fields that all schemas have, in the order of the first."""
    first = schemas[0]
    common = []
    for field in first:
        for name, schema in zip(names[1:], schemas[1:], strict=True):
            if field.name not in schema:
                why = f"{shown(name)} has none; it has {', '.join(schema.names)}"
            elif schema[field.name] != field:
                why = f"{shown(name)} has {schema[field.name].describe()}"
            else:
                continue
            if fields is None or field.name in fields:
                raise UsageError(
                    f"the datasets of the mixture differ in field {shown(field.name)}: {shown(names[0])} has"
                    f" {field.describe()}, {why}; name the fields that all have with fields="
                )
            break
        else:
            common.append(_noted(field, [schema[field.name] for schema in schemas]))
    for name, schema in zip(names[1:], schemas[1:], strict=True):
        for other in schema:
            if other.name not in first and (fields is None or other.name in fields):
                raise UsageError(
                    f"the datasets of the mixture differ in field {shown(other.name)}: {shown(name)} has"
                    f" {other.describe()}, {shown(names[0])} has none; name the fields that all have with fields="
                )
    if not common:
        raise UsageError(f"the datasets {', '.join(map(shown, names))} have no field in common")
    return Schema(tuple(common))
