"""The same draws on every node of a pull: each claims them out of its own catalog, up to the same position."""

from __future__ import annotations

from dataclasses import replace

from cachetool.cache import parts as share
from cachetool.cluster.crew import Member
from cachetool.cluster.engine import NodeLost
from cachetool.cluster.placement import Work
from cachetool.proc.task import Task

__all__ = ["Replicate"]


class Replicate(Work):
    """The same draws on every node."""

    replicate = True
    _added = 0
    """Positions beyond those that were to be drawn at first."""

    def plan(self) -> None:
        """As far as the farthest node came, and the samples that are asked for: all come to there."""
        source, known = self._source, self._crew.known()
        far = max((row for row, _ in known), key=lambda row: row.turn, default=source)
        if far.turn > source.turn:
            source = replace(source, turn=far.turn, cuts=far.cuts, past=far.past)
        done = [drawn if row.turn == source.turn else 0 for row, drawn in known]
        done += [0] * (len(self._crew.members) - len(known))
        wanted = self._settled.wanted
        if wanted is not None and min(done) >= source.units:
            past = (*source.past, (source.turn, source.units, source.cuts))
            source, done = replace(source, turn=source.turn + 1, cuts=(), past=past), [0]
        if wanted is not None:
            self._upto = min(source.units, max(done) + wanted)
        with self._cache.catalog.write() as connection:
            share.follow(connection, source)
        self._source = source
        left = sum((self._upto or source.units) - each for each in done)
        self._target = None if self._settled.options.follow else left * self._settled.per_unit

    def idle(self) -> list[Member]:
        """Those who did not begin yet."""
        return [member for member in self._crew.members if member.ready is not None and not member.begun]

    def left(self, member: Member) -> int:
        """What it lacks."""
        return int((member.ready or {})["left"])

    def more(self) -> bool:
        """Whether a node that came is still about to begin, or archives had fewer samples than was thought."""
        members, wanted = self._crew.members, self._settled.options.samples
        if any(member.ready is None for member in members):
            return True
        if wanted is None or self._upto is None or any(member.full for member in members):
            return False
        # To who was farthest all that came is what was asked for; others caught up as well.
        first = min((m for m in members if not m.late), key=self.left, default=members[0])
        by = (wanted - first.tally.samples) * (self.left(first) + self._added) // max(1, first.tally.samples)
        by = min(max(1, by), self._source.units - self._upto)
        if first.tally.samples >= wanted or by == 0:
            return False
        self._upto, self._added = self._upto + by, self._added + by
        engine = self._crew.engine
        arguments = {member.node.id: {"root": member.root, "job": (member.ready or {})["job"]} for member in members}
        runs = [
            engine.start(member.node, Task("cachetool.cluster.node:extend", {**arguments[member.node.id], "by": by}))
            for member in members
        ]
        while not all(run.ended for run in runs):
            engine.wait()
        for error in [run.error for run in runs if run.error is not None]:
            if not isinstance(error, NodeLost):  # that is found by what else runs there
                raise error
        for member in members:
            member.begun = False
        return True

    def drawn(self) -> tuple[int, bool]:
        """What came to each node, at least."""
        full = any(member.full for member in self._crew.members)
        complete = not full and (self._upto is None or self._upto >= self._source.units)
        return min(member.tally.samples for member in self._crew.members), complete
