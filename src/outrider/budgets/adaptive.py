"""How much to draft: a cost model of this machine, the drafter's record, and the depth that pays best.

A round that is asked to draft to depth D commits E(D) = 1 + sum_{d<=D} reach(d) tokens, reach(d) being the share of
rounds, of those asked for depth d or more, that accepted depth d; it costs t(D) = verify(n) + draft(D) + the rest. Rows
that may not draft give one token each in any case. The engine takes the D with the highest E(D) / t(D); D = 0 is plain
decoding. (Not products of hit rates: a tree without its unlikely nodes tests deep ones only where they are likely.)

A tree is cut where it pays best: of the nodes in the order of their values, over all rows, it keeps the first n that
make (rows + trust * sum of values) / seconds(n) highest (`Budget.price`). Values never rise and every further node
costs time, so no other set of nodes is better. Confidences are fitted to what was accepted (`calibration.py`); `trust`
is what remains: tokens accepted for each that the values promised. The drafter goes deeper only while its best node is
worth a step (`Budget.reach`), and feeds no node that is sure to be cut (`Budget.floor`).

Texts differ more than the rounds of one text do: of what was accepted there is a quick record and a slow one (two of
these, for sampled texts and for others), and a row that begins is met with the slow one's shares, as strongly as PRIOR
rows would be. All this is a forecast, and it is held to what came of it by an account of the time that rounds with
drafts took beyond what plain ones would have taken for the same tokens: one for batches of like sizes (those that share
the nearest power of two), or each new size would be tried anew. Rounds that may draft pay off TRIES of their time,
divided by the cube root of the rows in batches. Where
the forecast is against drafts, one is tried when nothing is owed; where it is for them, HOLD plain rounds may be owed,
or more while the last drafts did bring more than plain rounds. So drafts that do not pay cost TRIES of the time in the
long run, and HOLD rounds once. A new text begins without debts, unless drafts usually lost in the texts before it: then
it takes their debt over. What a batch size costs that was not met yet is taken from the others, by the nodes of
all rows.

Where more is owed than the next rounds pay off, they rest, eight at a time: nothing is worked out, and they pay in one
sum. What their passes took is measured all the same: where the machine has become slower, a draft must not be blamed
for it. A new row, or another number of rows, ends a rest.

Where the first passes over drafts were disturbed by other work, every later draft would be cut to nothing, and what
passes cost would not be learnt again. So a try against the forecast is not cut after EMPTY drafts without a node.

A drafter may read a text only when it is asked for a draft, so the first draft after a while takes longer. Such a time
teaches nothing of drafts. Where the forecast is for drafts it is charged up to half of what may be owed; but where it
is longer than what drafts should save in the rest of new texts, they get a mere try. What a try reads has an account of
its own, paid when nothing else is owed; a text in place of a single one takes GIVEN rounds off it.

Depths and nodes look at past rounds only, so they may be used under every rule. Price, reach and floor look at the
draft itself, which only `coupled` allows; the engine clears them under the other rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

from ..core.price import Price
from ..core.types import Budget, Rows
from .budgeter import Report
from .curve import Curve, nearest, of_batch
from .record import MANY, PRIOR, USUAL, Brought, Pause, Usual

DECAY = 0.98  # forgetting of hit rates, per round
TRIES = 0.02  # of the time may be lost to drafts that do not pay; over the cube root of the rows in batches
HOLD = 8.0  # plain rounds of one row that may be owed where drafts should pay: by chance they bring less
OWED = 1.5  # times as much is owed at most while drafts do pay, so that they are soon tried again when they stop to
EXPLORE = 12  # every so many rounds another depth is tried, so that no estimate grows stale
FIRST = (16, 4)  # nodes and depth of a draft when nothing is known
FIRST_ROWS = 32  # and the nodes of all rows together: a try must not cost a batch many rounds
SUMMED = 0  # in place of batch rows: passes that compute no padding
MOST = 96  # drafted nodes of all rows together that such a pass is priced for
STALE = 8  # rounds worked out for which a forecast is kept: it costs as much as a short draft. At most so many rest
SURE = 100  # rounds that teach before forecasts are kept
EMPTY = 2  # drafts in a row without a node: the next try is not cut, or what passes cost would not be learnt again
GIVEN = 2.0  # plain rounds that reading a new text for a try may take; what takes longer is paid for before the next
READING = 128.0  # plain rounds of reading that may be owed at most: a single slow moment must not end all tries
LATE = 8  # rounds without drafts after which a drafter has more to read than usual
LEARN = 6  # first rounds that measure, one of them without a draft: a single round is no measurement
NOTHING = Budget(1, 0)


@dataclass
class AdaptiveBudget:
    """Chooses the depth that pays best on this machine, down to none. One instance serves a target and a drafter."""

    nodes: int = 32
    depth: int = 8
    verify: dict[int, Curve] = field(default_factory=dict)  # batch rows -> seconds by nodes; SUMMED -> by those of all
    draft: dict[int, Curve] = field(default_factory=dict)  # batch rows -> seconds by depth asked for
    step: Curve = field(default_factory=lambda: Curve(prior_slope=0.5))  # seconds by depth drafted
    size: dict[int, Curve] = field(default_factory=dict)  # batch rows -> a row's nodes by depth asked for
    seen: dict[int, int] = field(default_factory=dict)  # batch rows -> rounds
    brought: dict[int, Brought] = field(default_factory=dict)  # power of two nearest to batch rows -> by drafts of late
    usual: dict[bool, Usual] = field(default_factory=lambda: {False: Usual()})  # sampled? -> over texts
    sampled: bool = False  # are they, or were some of them when the last one began?
    rest: float = 0.0
    drift: float = 1.0  # how long plain passes take on average, over what the curves say, which is a low quantile
    hits: list[float] = field(default_factory=list)  # [d]: rows that accepted depth d + 1, decayed
    asked: list[float] = field(default_factory=list)  # [d]: rows that were asked for it, decayed
    promised: float = 0.0  # tokens, decayed
    kept: float = 0.0  # of those, accepted
    debt: dict[int, float] = field(default_factory=dict)  # the same -> seconds lost to drafts, beyond what may be
    paying: bool = False  # do the rounds of late say that drafts pay?
    trying: bool = False  # is this round drafted against the forecast?
    idle: int = 0  # rounds since the last draft
    empty: int = 0  # drafts in a row that had no node
    uncut: bool = False  # is this round's draft not cut to what pays?
    behind: bool = False  # has text come since then that a drafter reads first? Its time is not a draft's
    fresh: bool = False  # and were all rows new?
    reading: float = 0.0  # seconds that reading a new text took, of late
    unread: dict[int, float] = field(default_factory=dict)  # as `debt`: seconds that tries read, not paid for yet
    rounds: int = 0
    quiet: int = 0  # rounds to come that rest
    resting: bool = False  # is this round one of them?
    pause: Pause = field(default_factory=Pause)  # those that have not paid yet
    _held: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False, compare=False)  # forecasts

    def choose(self, rows: Rows) -> Budget:
        """The budget of the next round; nothing is drafted where that is sooner."""
        self.uncut = False
        self.resting = self.quiet > 0 and len(rows) == self.pause.rows and 0 not in rows.serial
        if self.resting:
            self.quiet -= 1
            return NOTHING
        self.quiet = 0
        if self.pause.rounds:
            self._wake()
        useful = max(rows.remaining) - 1
        if useful < 1 or self.nodes < 2 or self.depth < 1:
            return NOTHING
        self.behind = self.behind or self.idle >= LATE
        b, drafting = len(rows), sum(left > 1 for left in rows.remaining)
        if new := sum(serial == 0 for serial in rows.serial):
            self._begin(b, new / b, rows.hot)
        seen = self.seen.get(b, 0)
        if seen < LEARN and max(self.seen.values(), default=0) < LEARN:
            self.uncut = True
            return NOTHING if seen == 1 else Budget(self._few(b), min(self.depth, FIRST[1], useful))
        best, rate, draft = self._best(b, drafting)
        brought, plain = self.brought.get(nearest(b), Brought()), self._plain(b)
        if best and self.fresh and self.reading > useful * max(0.0, b / plain - 1 / rate):
            best = 0  # what is left of these texts does not earn their reading
        self.paying = best > 0 and 1 < brought.rate < float("inf")
        owed = self.debt.get(nearest(b), 0.0) - (self._hold(b) if best else 0.0)
        if self.behind and best == 0:
            owed += self.unread.get(nearest(b), 0.0)
        if not self.paying and owed > 0:
            if self.rounds >= SURE:
                self.quiet, self.pause = min(STALE, int(owed * plain / b ** (1 / 3) / TRIES)), Pause(b, self._pass(b))
            return NOTHING
        self.trying = best == 0
        if best == 0:
            best = draft
            if self.empty >= EMPTY:
                self.uncut = True
                return Budget(self._few(b), min(best, useful))
        elif self.rounds % EXPLORE == 0:
            best = (0, min(self.depth, best + 1), max(1, best - 1))[self.rounds // EXPLORE % 3]
            if best == 0:
                return NOTHING
        rate = min(rate, max(brought.rate, 1.0) * plain / b)  # what is, not what was forecast
        # One depth more costs the drafter a step: worth it where the chance to arrive there buys back its time.
        reach = min(0.5, rate * b / drafting * self.step.slope(1) / self.trust)
        price = self.price(b, best)
        floor = min(0.25, 0.5 * rate * (b if price.summed else 1) * price.slope / self.trust)
        return Budget(self.nodes, min(best, useful), floor=floor, reach=reach, price=price, rate=rate)

    def _begin(self, rows: int, share: float, sampled: bool) -> None:
        """This share of the rows is new: what was learnt of the rows before them says less."""
        self.behind, self.fresh, self.sampled = True, share == 1 or self.fresh, sampled
        if sampled not in self.usual:
            self.usual[sampled] = self.usual[not sampled].faded()
        usual = self.usual[sampled]
        for d, (hits, asked) in enumerate(zip(usual.hits, usual.asked, strict=True)):
            rate = (1 - share) * self.hits[d] / self.asked[d] + share * hits / asked
            self.asked[d] += share * (min(PRIOR, asked) - self.asked[d])
            self.hits[d] = rate * self.asked[d]
        like = nearest(rows)
        self.brought.setdefault(like, Brought()).forget(share)
        if usual.brought.get(like, Brought()).rate >= 1:
            self.debt[like] = (1 - share**2) * self.debt.get(like, 0.0)
        if share == 1 and self.verify:
            self.unread[like] = max(0.0, self.unread.get(like, 0.0) - GIVEN * rows / self._plain(rows))
        self._held.clear()

    def _wake(self) -> None:
        """Take in what a rest's rounds took: they pay, and tell how fast the machine is by now."""
        pause, self.pause = self.pause, Pause()
        self._pay(pause.rows, pause.seconds)
        self._drifted(pause.passes / pause.rounds / max(1e-9, pause.usual), pause.rounds)
        self._held.pop(("plain", pause.rows), None)

    def _drifted(self, ratio: float, rounds: int = 1) -> None:
        """So many plain passes took this much longer than the curves say, on average."""
        self.drift += (1 - 0.9**rounds) * (min(2.0, ratio) - self.drift)

    def _few(self, rows: int) -> int:
        """Nodes of a draft that is not cut to what pays."""
        return min(self.nodes, FIRST[0], max(2, FIRST_ROWS // rows))

    def _plain(self, rows: int) -> float:
        """Tokens a second without drafts."""
        if (found := self._held.get(("plain", rows))) is None:
            found = self._held["plain", rows] = rows / max(1e-9, self.drift * self._pass(rows) + self.rest)
        return float(found)

    def _hold(self, rows: int) -> float:
        """Seconds that may be owed while drafts should pay: fewer rounds of more rows, which leave less to chance."""
        return HOLD * rows**0.5 / self._plain(rows)

    def learn(self, report: Report) -> None:
        """Take in what a round cost and gave."""
        b, drafting = report.rows, report.rows if report.drafting is None else report.drafting
        if not drafting:
            return
        seconds, tokens = report.draft_seconds + report.verify_seconds + report.rest_seconds, b + sum(report.accepted)
        self.idle += report.depth == 0
        if self.resting and not report.depth:
            self.pause.add(report.verify_seconds, seconds)
            return
        self.rounds += 1
        if self.rounds < SURE or self.rounds % STALE == 0 or (report.depth and self.idle >= STALE):
            self._held.clear()
        self.seen[b] = self.seen.get(b, 0) + 1
        if self.seen[b] > 1:  # the first round of a kind warms up
            self._time(report)
        self._pay(b, seconds)
        if report.depth == 0:
            return
        self.empty = 0 if (report.total or b * report.nodes) > b else self.empty + 1
        like = nearest(b)
        read, self.behind = self._read(report) if self.behind else 0.0, False
        for d, asked in enumerate(self.asked):  # what is long ago counts for less, and for PRIOR rows at least
            kept = max(DECAY**self.idle, min(1.0, PRIOR / asked))
            self.asked[d], self.hits[d] = kept * asked, kept * self.hits[d]
        self.idle = 0
        for d, accepted in enumerate(report.accepted):
            if d >= len(self.asked):
                # A depth never seen is believed to go on as the one above it does.
                self.hits.append(PRIOR * self.reaches(d + 1)[d])
                self.asked.append(PRIOR)
                for usual in self.usual.values():
                    usual.hits.append(self.hits[d])
                    usual.asked.append(self.asked[d])
            self.asked[d] = DECAY * self.asked[d] + drafting
            self.hits[d] = DECAY * self.hits[d] + accepted
        usual = self.usual[self.sampled]
        usual.learn(report.accepted, drafting)
        if report.promised:
            self.promised = DECAY * self.promised + report.promised
            self.kept = DECAY * self.kept + sum(report.accepted)
        if self.seen[b] > 1 and max(self.seen.values()) > LEARN:  # those before were measurements
            plain = tokens / self._plain(b)
            self.brought.setdefault(like, Brought()).learn(plain, seconds - read, b)
            worst = min(seconds - read, HOLD * plain)  # what takes longer was a disturbance
            usual.brought.setdefault(like, Brought(kept=USUAL, enough=MANY)).learn(plain, worst, b)
            charged = 0.0 if self.trying else min(read, 0.5 * self._hold(b))
            self.reading += 0.3 * (read - self.reading) if self.fresh else 0.0
            self.unread[like] = min(self.unread[like] + self.trying * read, READING * b / self._plain(b))
            self._charge(b, seconds - read + charged - plain, min(report.depth, self.depth))
        self.fresh = False

    def _pay(self, rows: int, seconds: float) -> None:
        """Rounds of so many seconds pay off what drafts lost, and then what tries read."""
        like, paid = nearest(rows), TRIES / rows ** (1 / 3) * seconds
        self.debt[like] = max(0.0, (owed := self.debt.get(like, 0.0)) - paid)
        self.unread[like] = max(0.0, self.unread.get(like, 0.0) - max(0.0, paid - owed))

    def _read(self, report: Report) -> float:
        """Seconds by which a draft took longer than usual, because text had to be read first."""
        return max(0.0, report.draft_seconds - self._drafts(report.rows)(report.depth))

    def _charge(self, rows: int, lost: float, depth: int) -> None:
        """Seconds that a round with drafts lost; more than twice what such rounds take was a disturbance."""
        if lost > (some := HOLD * rows / self._plain(rows)):
            lost = min(lost, max(some, 2 * self.seconds(rows)[depth]))
        like, owed = nearest(rows), max(0.0, self.debt.get(nearest(rows), 0.0) + lost)
        self.debt[like] = min(owed, max(lost, OWED * self._hold(rows))) if self.paying else owed

    def _time(self, report: Report) -> None:
        b = report.rows
        place, nodes = (SUMMED, report.total) if report.total else (b, report.nodes)
        curve = self.verify.setdefault(place, Curve())
        curve.learn(nodes, report.verify_seconds)
        if not report.depth:
            self._drifted(report.verify_seconds / max(1e-9, curve(nodes)))
        self.rest += (report.rest_seconds - self.rest) / min(self.rounds, 50)
        if report.depth:
            curve = self.draft.setdefault(b, Curve(prior_slope=0.5, mean=True))
            (curve.doubt if self.behind else curve.learn)(report.depth, report.draft_seconds)
            if not self.uncut:
                sizes = self.size.setdefault(b, Curve(prior_slope=1.0, mean=True))
                sizes.learn(report.depth, report.total / b if report.total else float(report.nodes))
        if report.drafted:
            (self.step.doubt if self.behind else self.step.learn)(report.drafted, report.draft_seconds)

    @property
    def trust(self) -> float:
        """Accepted tokens for each that the values of the drafted nodes promised."""
        return min(4.0, max(0.25, (PRIOR + self.kept) / (PRIOR + self.promised)))

    def _passes(self, rows: int, sizes: Sequence[int]) -> list[float]:
        """Seconds of passes over so many nodes of every row."""
        if SUMMED in self.verify:
            return self.verify[SUMMED].table([rows * n for n in sizes])
        return of_batch(self.verify, rows, self.nodes).table(sizes)

    def _pass(self, rows: int) -> float:
        """Seconds of a pass without drafts."""
        return self._passes(rows, (1,))[0]

    def _drafts(self, rows: int) -> Curve:
        """Seconds of a draft by depth; of a batch that never drafted, as in the one that is nearest in size."""
        like = min(self.draft, key=lambda b: abs(b - rows), default=rows)
        return self.draft.get(like, Curve())

    def price(self, rows: int, depth: int) -> Price:
        """Seconds of a round of this depth by its nodes."""
        if (price := self._held.get(("price", rows, depth))) is not None:
            return cast("Price", price)
        fixed, summed = self._drafts(rows)(depth) + self.rest, SUMMED in self.verify
        if summed:
            found = self.verify[SUMMED].table(range(rows, rows + min(MOST, rows * (self.nodes - 1)) + 1))
        else:
            found = self._passes(rows, range(1, self.nodes + 1))
        made = Price(tuple([seconds + fixed for seconds in found]), self.trust, summed)
        self._held["price", rows, depth] = made
        return made

    def reaches(self, depth: int) -> list[float]:
        """[d]: the share of rounds that accept depth d + 1; beyond what was seen it falls as it did at the end."""
        found = [h / a for h, a in zip(self.hits[:depth], self.asked, strict=False)]
        last, above = found[-1] if found else 0.7, found[-2] if len(found) > 1 else 1.0
        fall = min(0.9, last / above) if above > 0 else 0.0
        while len(found) < depth:
            last = last * fall if found else last
            found.append(last)
        return found

    def seconds(self, rows: int) -> list[float]:
        """[depth]: what a round costs, depth 0 being no draft."""
        depths = range(1, self.depth + 1)
        like = min(self.size, key=lambda b: abs(b - rows), default=rows)  # or as many in all
        sizes = [1, *(max(2, 1 + round((n - 1) * like / rows)) for n in self.size.get(like, Curve()).table(depths))]
        drafts = [0.0, *self._drafts(rows).table(depths)]
        passes = self._passes(rows, sizes)
        return [verify + draft + self.rest for verify, draft in zip(passes, drafts, strict=True)]

    def _best(self, rows: int, drafting: int) -> tuple[int, float, int]:
        """The depth with the most tokens per second and row (a draft must win by 2 %), that rate, and the best draft's
        depth."""
        if (found := self._held.get(("best", rows, drafting))) is None:
            reaches = (drafting / rows * reach for reach in self.reaches(self.depth))
            tokens = accumulate(reaches, initial=1.0)
            rates = [t / max(s, 1e-9) for t, s in zip(tokens, self.seconds(rows), strict=True)]
            draft = max(range(1, len(rates)), key=rates.__getitem__)
            best = draft if rates[draft] > 1.02 * rates[0] else 0
            found = self._held["best", rows, drafting] = best, rates[best], draft
        return cast("tuple[int, float, int]", found)
