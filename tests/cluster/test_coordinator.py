"""Who hands out the draws of several nodes, asked by nodes that are played here, in one process.

Whatever is asked twice, forgotten or told late: no draw is on two living nodes, and none is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir, SourceRow, draws, open_cache, placing
from cachetool.cache import parts as share
from cachetool.cluster import node as node_tasks
from cachetool.cluster.agent import Server
from cachetool.cluster.coordinator import Coordinator
from cachetool.core.errors import CacheToolError, Interrupted
from cachetool.core.names import Id
from cachetool.core.schema import Field, Schema
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from tests.loaders.processes import until

SOURCE = Id("5" * 16)

UNITS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    for number in range(UNITS):
        np.save(folder / f"{number:03d}.x.npy", np.zeros(4))
    return folder


class Whole:
    """The catalog of the whole, the coordinator of one pull, and what each node has in its shards."""

    def __init__(self, root: Path, folder: Path, wanted: int | None = None) -> None:
        self.root, self.url = root, str(folder)
        self.cache = open_cache(root / "driver")
        listing = root / "listing"
        list_source(self.url, listing)
        source = open_source(self.url, listing)
        self.row = SourceRow(SOURCE, source.url, {}, source.identity, "default", UNITS, UNITS, 5, 0, 0)
        self.cache.declare("default", Schema((Field("x", "float64", (4,)),)))
        self.cache.add_source(self.row, listing)
        self.shards: dict[str, dict[str, dict[str, Any]]] = {}
        self.words: dict[str, str] = {}
        """By which each node is known since it began."""
        self.tokens: dict[int, str] = {}
        """By which each claim was asked for."""
        self.count = 0
        self.begin(wanted)

    def begin(self, wanted: int | None = None) -> None:
        """A pull, which has the same catalog as the one before."""
        with self.cache.catalog.write() as connection:
            self.cache.holder.register(connection)
            self.job, _ = draws.open_job(
                connection, SOURCE, holder=self.cache.holder.id, wanted=wanted, seed=None, next_pass=wanted is not None
            )
        self.die()

    def end(self) -> None:
        with self.cache.catalog.write() as connection:
            placing.release(connection, self.job)
            draws_left = connection.execute("DELETE FROM jobs").rowcount
        assert draws_left == 1

    def die(self) -> None:
        """The coordinator is killed, and made again from the same arguments."""
        self.arguments: dict[str, Any] = {
            "root": str(self.cache.root), "url": self.url, "options": SourceOptions().to_json(), "job": self.job,
            "source": SOURCE, "holder": self.cache.holder.id, "most": 10, "follow": False,
        }  # fmt: skip
        self.coordinator = Coordinator(**self.arguments)

    def enter(self, node: str, cache: int | None = None) -> list[str]:
        """A node begins, and gives up what it is told to."""
        self.count += 1
        self.words[node] = str(self.count)
        cache = ord(node) if cache is None else cache
        self.coordinator.answer(node, {"what": "enter", "cache": cache, "word": self.words[node]})
        mine = self.shards.setdefault(node, {})
        here = self.now()
        told = self.coordinator.answer(node, {"what": "tell", "shards": list(mine.values()), "source": here.to_json()})
        for shard in told["gone"]:
            del mine[shard]
        return list(told["gone"])

    def now(self) -> SourceRow:
        found = self.cache.source(SOURCE)
        assert found is not None
        return found

    def claim(self, node: str, token: str = "") -> dict[str, Any] | None:
        self.count += 1
        asked = {"what": "claim", "token": token or str(self.count), "word": self.words[node]}
        claim: dict[str, Any] | None = self.coordinator.answer(node, asked).get("claim")
        if claim is not None:
            self.tokens[claim["id"]] = asked["token"]
        return claim

    def commit(self, node: str, claim: dict[str, Any]) -> dict[str, Any]:
        """The node commits a claim; what it has to tell of that."""
        self.count += 1
        shard, ranges, size = f"{node}{self.count}", [(claim["start"], claim["stop"])], claim["stop"] - claim["start"]
        self.shards[node][shard] = {
            "shard": shard, "pass_number": claim["pass_number"], "draws": ranges, "samples": size,
            "payload": 0, "job": self.job,
        }  # fmt: skip
        done = {"upto": claim["stop"], "ranges": ranges, "draws": size, "skipped": 0, "vanished": 0, "fetched": 1}
        token = self.tokens[claim["id"]]
        return {"what": "finish", "claim": claim, "token": token, "shard": shard, "samples": size, **done}

    def draw(self, node: str) -> bool:
        if (claim := self.claim(node)) is None:
            return False
        self.coordinator.answer(node, self.commit(node, claim))
        return True

    def at_once(self, server: Server, questions: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The answers to questions that come while the server is at another."""
        busy, others_there, real = threading.Event(), threading.Event(), server._answers

        def answers(asked: Any) -> Any:
            server._answers = real  # type: ignore[method-assign]
            busy.set()
            others_there.wait()
            return [{}]

        server._answers = answers  # type: ignore[method-assign]
        with ThreadPoolExecutor(1 + len(questions)) as pool:
            pool.submit(server.answer, "a", {})
            busy.wait()
            asked = [pool.submit(server.answer, node, message) for node, message in questions]
            until(lambda: server._asked.qsize() == len(questions))
            others_there.set()
            return [each.result() for each in asked]

    def transactions(self) -> int:
        """How many changed the catalog: the file change counter, https://www.sqlite.org/fileformat2.html."""
        with open(self.cache.layout.catalog, "rb") as file:
            return int.from_bytes(file.read(28)[24:])

    def lose(self, node: str) -> None:
        with self.cache.catalog.write() as connection:
            placing.lose(connection, node, SOURCE)

    def positions(self, *nodes: str) -> list[int]:
        """What of the pass these nodes have, double ones twice."""
        found = [part for node in nodes for each in self.shards[node].values() for part in each["draws"]]
        return sorted(at for start, stop in found for at in range(start, stop))


@pytest.fixture
def whole(tmp_path: Path, folder: Path) -> Whole:
    return Whole(tmp_path, folder)


def test_a_claim_that_is_asked_for_twice_is_one_claim_though_the_coordinator_died_between(whole: Whole) -> None:
    whole.enter("a")
    first = whole.claim("a", "word")
    whole.die()

    def positions(claim: dict[str, Any] | None) -> list[Any]:
        assert claim is not None
        return [claim[name] for name in ("id", "pass_number", "start", "stop")]

    assert positions(whole.claim("a", "word")) == positions(first)
    assert positions(whole.claim("a", "other")) != positions(first)


def asked(whole: Whole, node: str, token: str) -> tuple[str, dict[str, Any]]:
    return node, {"what": "claim", "token": token, "word": whole.words.get(node, "")}


def test_what_is_asked_at_once_is_written_at_once_and_an_error_is_that_of_one_question(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    claim = whole.claim("b")
    assert claim is not None
    server = Server("cachetool.cluster.coordinator:Coordinator", whole.arguments)
    questions = [*(asked(whole, "a", f"a{at}") for at in range(3)), asked(whole, "z", "z"), asked(whole, "b", "b0")]
    before = whole.transactions()
    answers = whole.at_once(server, [*questions, ("b", whole.commit("b", claim))])

    assert whole.transactions() == before + 1
    assert answers[3]["error"] == "CatalogError"
    assert "given up" in answers[3]["message"]
    assert answers[5] == {"skipped": 0, "drawn": 10}
    held = [answers[at]["claim"] for at in (0, 1, 2, 4)]
    assert sorted(each["start"] for each in held) == [10, 20, 30, 40]
    for node, each, token in zip("aaab", held, ("a0", "a1", "a2", "b0"), strict=True):
        whole.tokens[each["id"]] = token
        assert "error" not in server.answer(node, whole.commit(node, each))
    while whole.draw("a"):
        pass
    assert whole.positions("a", "b") == list(range(UNITS))


def test_answers_that_could_not_be_written_are_given_to_nobody(whole: Whole) -> None:
    whole.enter("a")
    server = Server("cachetool.cluster.coordinator:Coordinator", whole.arguments)
    assert "claim" in server.answer(*asked(whole, "a", "first"))
    together = server._served.together

    @contextmanager
    def full() -> Iterator[None]:
        with together():
            yield
            raise cachetool.CapacityError("no room on the disk")

    server._served.together = full
    refused = whole.at_once(server, [asked(whole, "a", "second"), asked(whole, "a", "third")])
    assert [each["error"] for each in refused] == ["CapacityError", "CapacityError"]
    claim = server.answer(*asked(whole, "a", "fourth"))["claim"]  # by one that was made anew
    assert (claim["start"], claim["stop"]) == (10, 20)


def test_a_commit_that_is_told_twice_counts_once(whole: Whole) -> None:
    whole.enter("a")
    claim = whole.claim("a")
    assert claim is not None
    said = whole.commit("a", claim)
    whole.coordinator.answer("a", said)
    whole.die()
    whole.coordinator.answer("a", said)

    now = whole.now()
    with whole.cache.catalog.read() as connection:
        assert draws.positions_done(connection, now) == 10
        assert connection.execute("SELECT committed FROM jobs").fetchone()[0] == 10


def test_what_a_lost_node_had_and_was_on_goes_to_others(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    assert whole.draw("a")
    assert whole.draw("b")
    late = whole.claim("b")
    whole.lose("b")
    while whole.draw("a"):
        pass

    assert whole.positions("a") == list(range(UNITS))
    with pytest.raises(CacheToolError, match="given up"):
        whole.claim("b")
    assert late is not None
    with pytest.raises(CacheToolError, match="taken from it"):
        whole.coordinator.answer("b", whole.commit("b", late))


def test_a_node_that_comes_back_keeps_what_nobody_drew_and_gives_up_what_others_have(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    for _ in range(3):
        assert whole.draw("b")
    whole.lose("b")
    assert whole.draw("a")  # one of the three again
    gone = whole.enter("b")
    while whole.draw("a"):
        pass

    assert len(gone) == 1
    assert whole.positions("a", "b") == list(range(UNITS))


def test_a_commit_that_nobody_was_told_of_is_taken_in_when_the_node_begins_again(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    claim = whole.claim("b")
    assert claim is not None
    whole.commit("b", claim)  # killed before it was told
    whole.end()
    whole.begin()
    whole.enter("b")
    whole.enter("a")
    while whole.draw("a"):
        pass

    assert whole.positions("a", "b") == list(range(UNITS))


def test_a_pull_by_number_counts_what_living_nodes_have(tmp_path: Path, folder: Path) -> None:
    whole = Whole(tmp_path, folder, wanted=40)
    whole.enter("a")
    whole.enter("b")
    while whole.draw("a") and whole.draw("b"):
        pass
    assert whole.positions("a", "b") == list(range(40))
    whole.lose("b")
    while whole.draw("a"):
        pass
    assert len(whole.positions("a")) == 40
    assert whole.enter("b"), "others have what it had"
    assert whole.enter("b") == [], "nothing more is asked of it"
    assert len(set(whole.positions("a", "b"))) == len(whole.positions("a", "b"))


def test_what_a_living_node_evicted_stays_done_for_this_pass_and_comes_in_the_next(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    while whole.draw("a") and whole.draw("b"):
        pass
    evicted = next(iter(whole.shards["b"]))
    lost = whole.shards["b"].pop(evicted)["draws"]
    whole.coordinator.answer("b", {"what": "gone", "shards": [evicted]})
    assert not whole.draw("a")
    whole.end()
    whole.begin(wanted=UNITS)
    assert whole.now().pass_number == 1
    whole.enter("a")
    whole.enter("b")
    source = open_source(whole.url, whole.cache.listing(SOURCE), units=UNITS)
    before = source.order(seed=5, pass_number=0)[np.arange(*lost[0])]
    fresh = []
    asked = {"what": "claim", "word": whole.words["a"]}
    while (answer := whole.coordinator.answer("a", asked | {"token": str(whole.count)})).get("claim"):
        claim, whole.count = answer["claim"], whole.count + 1
        at = np.arange(claim["start"], claim["stop"])
        there = np.isin(at, [n for a, b in answer["there"] for n in range(a, b)])
        fresh += source.order(seed=5, pass_number=1)[at[~there]].tolist()

    assert sorted(fresh) == sorted(before.tolist())


def test_a_catalog_that_was_lost_is_made_again_from_what_the_nodes_tell(whole: Whole, folder: Path) -> None:
    whole.enter("a")
    whole.enter("b")
    for _ in range(2):
        assert whole.draw("a")
        assert whole.draw("b")
    other = Whole(whole.root / "other", folder)
    other.count = 1000
    other.shards = {
        node: {id: {**each, "job": None} for id, each in mine.items()} for node, mine in whole.shards.items()
    }
    other.enter("a")
    other.enter("b")
    while other.draw("b"):
        pass

    assert other.positions("a", "b") == list(range(UNITS))


def test_a_node_with_another_cache_under_its_name_has_lost_what_it_had(whole: Whole) -> None:
    whole.enter("a")
    assert whole.draw("a")
    whole.shards["a"] = {}
    whole.enter("a", cache=77)
    while whole.draw("a"):
        pass

    assert whole.positions("a") == list(range(UNITS))


def test_pulls_of_two_sources_over_the_same_nodes_leave_each_other_alone(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    assert whole.draw("b")
    with whole.cache.catalog.write() as connection:
        for node in ("a", "b"):
            placing.enter(connection, node, ord(node), "another pull", "t", "word")
        placing.insert(connection, "b", "t", placing.Placed("other", 0, ((0, 3),), 3, 0, "another pull"), 3)
    assert whole.draw("a")

    whole.lose("b")
    with whole.cache.catalog.write() as connection:
        assert placing.placed_elsewhere(connection, "t", "a") == [(0, ((0, 3),))]
        placing.lose_others(connection, "t", ["a"])
        assert placing.placed_elsewhere(connection, "t", "a") == []
        assert [part for _, part in placing.placed_elsewhere(connection, SOURCE, "b")] == [((10, 20),)]
    whole.enter("b")
    while whole.draw("a"):
        pass
    assert whole.positions("a", "b") == list(range(UNITS))


def test_a_node_whose_cache_was_replaced_has_lost_what_it_had_of_every_source(whole: Whole) -> None:
    with whole.cache.catalog.write() as connection:
        placing.enter(connection, "b", ord("b"), "another pull", "t", "word")
        placing.insert(connection, "b", "t", placing.Placed("other", 0, ((0, 3),), 3, 0, "another pull"), 3)
    whole.enter("b", cache=77)
    with whole.cache.catalog.write() as connection:
        assert placing.placed_elsewhere(connection, "t", "a") == []


def test_draws_that_could_not_be_used_count_once_though_the_node_was_lost_and_came_back(whole: Whole) -> None:
    def counted() -> tuple[int, ...]:
        with whole.cache.catalog.read() as connection:
            job = connection.execute("SELECT committed, skipped FROM jobs").fetchone()
            return (*job, connection.execute("SELECT skipped FROM sources").fetchone()[0])

    whole.enter("a")
    whole.enter("b")
    claim = whole.claim("b")
    assert claim is not None
    told = whole.commit("b", claim) | {"draws": 8, "skipped": 2, "samples": 8}
    whole.shards["b"][told["shard"]]["samples"] = 8
    whole.coordinator.answer("b", told)
    assert counted() == (8, 2, 2)
    whole.lose("b")
    assert counted() == (0, 0, 0)
    assert whole.enter("b") == []
    assert counted() == (8, 2, 2)
    assert whole.enter("b") == []
    assert counted() == (8, 2, 2)


def test_what_a_lost_node_had_of_an_earlier_pass_is_no_reason_to_rest(whole: Whole) -> None:
    """--follow rests when nothing came or went in a pass."""

    def next_pass() -> bool:
        with whole.cache.catalog.write() as connection:
            draws.begin_next_pass(connection, SOURCE)
        while (claim := whole.claim("a")) is not None:  # all of it is there
            told = whole.commit("a", claim)
            del whole.shards["a"][told["shard"]]
            whole.coordinator.answer("a", told | {"shard": None, "draws": 0, "samples": 0, "ranges": []})
        with whole.cache.catalog.read() as connection:
            return draws.idle(connection, SOURCE)

    whole.enter("a")
    whole.enter("b")
    while whole.draw("a") and whole.draw("b"):
        pass
    assert next_pass()
    whole.lose("b")
    with whole.cache.catalog.read() as connection:
        assert not draws.idle(connection, SOURCE)
    with whole.cache.catalog.write() as connection:
        for shard in list(whole.shards["a"].values())[:1]:  # b comes back, and has what a has too
            whole.shards["b"]["double"] = shard | {"shard": "double"}
    assert next_pass()
    assert "double" in whole.enter("b")
    with whole.cache.catalog.read() as connection:
        assert not draws.idle(connection, SOURCE)


def test_what_a_node_began_before_it_was_cut_off_says_nothing_for_it_when_it_is_back(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    late = whole.claim("b")
    assert late is not None
    before, token = whole.words["b"], whole.tokens[late["id"]]
    whole.lose("b")
    whole.enter("b")
    claim = whole.claim("b")
    assert claim is not None
    assert claim["id"] == late["id"], "the claim that was open again"

    with pytest.raises(CacheToolError, match="given up"):
        whole.coordinator.answer("b", {"what": "claim", "token": "late", "word": before})
    told = whole.commit("b", late) | {"token": token}
    del whole.shards["b"][told["shard"]]  # its cache refused it
    with pytest.raises(CacheToolError, match="taken from it"):
        whole.coordinator.answer("b", told)
    whole.coordinator.answer("b", {"what": "back", "claims": [(late["id"], token)]})
    assert whole.draw("a")
    whole.coordinator.answer("b", whole.commit("b", claim))
    while whole.draw("a"):
        pass
    assert whole.positions("a", "b") == list(range(UNITS))


def test_a_claim_that_is_given_back_is_open_to_others(whole: Whole) -> None:
    whole.enter("a")
    whole.enter("b")
    claim = whole.claim("b")
    assert claim is not None
    whole.coordinator.answer("b", {"what": "back", "claims": [(claim["id"], whole.tokens[claim["id"]])]})
    while whole.draw("a"):
        pass
    assert whole.positions("a") == list(range(UNITS))


def test_two_nodes_with_one_cache_are_refused(whole: Whole) -> None:
    whole.enter("a")
    with pytest.raises(cachetool.UsageError, match="nodes a and b have one cache folder"):
        whole.enter("b", cache=ord("a"))


def test_a_cache_that_is_drawn_with_another_seed_is_refused(whole: Whole) -> None:
    whole.coordinator.answer("a", {"what": "enter", "cache": 1, "word": "x"})
    other = replace(whole.now(), seed=6)
    with pytest.raises(cachetool.UsageError, match=r"node a has .* with another seed"):
        whole.coordinator.answer("a", {"what": "tell", "shards": [], "source": other.to_json()})


def test_many_nodes_and_shards_fit_into_a_catalog_that_begins_small(whole: Whole) -> None:
    """Nothing is admitted into it, so that whoever writes raises its limit of pages."""
    with whole.cache.catalog.write() as connection:
        limit = connection.execute("SELECT pages FROM cache").fetchone()[0]
        for number in range(12_000):
            shard = placing.Placed(f"shard{number}", 0, ((number, number + 1),), 1, 0, None)
            placing.insert(connection, "a", SOURCE, shard, 1)
    with whole.cache.catalog.write() as connection:
        placing.lose(connection, "a")
        assert connection.execute("SELECT pages FROM cache").fetchone()[0] > limit


def test_what_a_node_tells_is_compared_by_name_once(whole: Whole) -> None:
    """Of a hundred thousand shards each with each would take a day."""
    compared = 0

    class Id(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    found = [placing.Placed(Id(f"shard{n}"), 0, ((n, n + 1),), 1, 0, None) for n in range(UNITS)]
    now = whole.now()
    with whole.cache.catalog.write() as connection:
        gone = placing.take_in(
            connection, now, "a", found, job=whole.job, doubled=lambda each: each.draws[0][0] % 2 == 0
        )  # fmt: skip
    assert gone == sorted(f"shard{n}" for n in range(0, UNITS, 2))
    assert compared < 10 * UNITS


def test_a_commit_of_a_pull_that_was_followed_by_another_is_refused(tmp_path: Path, folder: Path) -> None:
    """A driver that was killed may have children that still write: whoever comes after it has fenced them off."""
    with cachetool.open_cache(tmp_path / "node", max_size="10MB") as cache:
        cache.pull(str(folder), samples=1)
        row = cache.source(cache.catalog.rows("SELECT id FROM sources")[0]["id"])
        assert row is not None
        held = draws.Claim(1, 0, 30, 40, row)

        def join(job: str) -> str:
            with cache.catalog.write() as connection:
                cache.holder.register(connection)
                part, room = share.part_of(job), cachetool.cache.Room()
                share.join(connection, cache.layout, row, part, holder=cache.holder.id, room=room)
                return part

        def settle(job: str) -> None:
            with cache.catalog.write() as connection:
                share.settle(connection, job, held, 40, 30, samples=10, skipped=0, vanished=0, fetched=0)

        first = join("1")
        settle(first)
        second = join("2")
        with pytest.raises(cachetool.CatalogError, match="taken from it"):
            settle(first)
        settle(second)
        again = join("2")  # this node was cut off from the pull, and is back
        with pytest.raises(cachetool.CatalogError, match="taken from it"):
            settle(second)
        settle(again)
        with pytest.raises(cachetool.UsageError, match="several nodes"):
            cache.pull(str(folder), samples=1)
        assert isinstance(cache, CacheDir)


def test_a_node_is_looked_at_every_second_however_long_an_answer_takes(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was evicted while the coordinator was made again must not be told minutes later."""
    clock, slept = [0.0], []

    class Slow:
        def send(self, message: dict[str, Any]) -> None:
            assert "fill" in message

        def ask(self, message: dict[str, Any]) -> dict[str, Any]:
            assert message["what"] == "gone"
            clock[0] += 60
            return {}

    with cachetool.open_cache(tmp_path / "node", max_size="10MB") as cache:
        assert isinstance(cache, CacheDir)
        cache.pull(str(folder), samples=20)
        source = cache.catalog.rows("SELECT id FROM sources")[0]["id"]
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            job, _ = draws.open_job(connection, source, holder=cache.holder.id, wanted=None, seed=None)

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 1:
                node_tasks._evict(cache, [row["id"] for row in cache.catalog.rows("SELECT id FROM shards")])
            else:
                raise Interrupted("stopped")

        monkeypatch.setattr(node_tasks, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        node_tasks._watch(Slow(), cache, source, job, report_evicted=True)
    assert clock[0] == 60
    assert slept == [1.0, 1.0]
