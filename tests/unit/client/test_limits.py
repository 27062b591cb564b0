"""Pauses: who sees them, how long they last, and how senders leave them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading

import pytest

from tinsmith.client import limits
from tinsmith.client.limits import RAMP_SENDS, RAMP_STEP_S, Budget, Limiter, shared_limiter
from tinsmith.client.settings import Secret
from tinsmith.errors import ValidationError


class FakeTime:
    """A clock that moves when somebody sleeps, and wakes sleepers in the order of their times."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        done = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + delay_s, done))
        await done

    async def advance_to(self, until: float) -> None:
        """Let time pass, waking each sleeper at its own time."""
        await settle()
        while self._sleepers and min(at for at, _ in self._sleepers) <= until:
            at, done = min(self._sleepers, key=lambda sleeper: sleeper[0])
            self._sleepers.remove((at, done))
            self.now = max(self.now, at)
            if not done.done():
                done.set_result(None)
            await settle()
        self.now = max(self.now, until)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def limiter(time: FakeTime) -> Limiter:
    return Limiter(clock=time.clock, sleep=time.sleep)


def test_nothing_waits_without_a_pause(limiter: Limiter, time: FakeTime) -> None:
    left_at = asyncio.run(limiter.wait())

    assert left_at == time.now
    assert limiter.pause().state == "open"


def test_s3_one_429_holds_back_every_sender_until_its_end(limiter: Limiter, time: FakeTime) -> None:
    async def scenario() -> list[float]:
        limiter.rate_limited(5.0)
        senders = [asyncio.create_task(limiter.wait()) for _ in range(50)]
        await time.advance_to(1004.99)
        assert not any(sender.done() for sender in senders)
        await time.advance_to(1010.0)
        return [sender.result() for sender in senders]

    left_at = asyncio.run(scenario())

    assert min(left_at) >= 1005.0


def test_s3_another_key_is_not_delayed_at_all(time: FakeTime) -> None:
    one, other = (Limiter(clock=time.clock, sleep=time.sleep) for _ in range(2))
    one.rate_limited(60.0)

    left_at = asyncio.run(other.wait())

    assert left_at == time.now


def test_s4_the_latest_of_all_deadlines_counts(limiter: Limiter, time: FakeTime) -> None:
    limiter.rate_limited(9.0, "long")
    limiter.rate_limited(2.0, "short")

    pause = limiter.pause()

    assert (pause.state, pause.until, pause.reason) == ("rate_limited", time.now + 9.0, "long")


def test_consecutive_429s_without_a_delay_pause_longer_and_longer(
    limiter: Limiter, time: FakeTime
) -> None:
    def refused() -> float:
        limiter.rate_limited(0.0, sent_at=time.now)
        pause_s = limiter.pause().until - time.now
        time.now += pause_s + 0.001
        return pause_s

    pauses = [refused() for _ in range(13)]
    limiter.sample_taken()
    after_progress = refused()

    assert 0.003 < pauses[0] < 0.007
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses[:10]))
    assert 7.0 < pauses[-1] < 13.0
    assert 0.003 < after_progress < 0.007


def test_concurrent_429s_count_once(limiter: Limiter, time: FakeTime) -> None:
    for _ in range(400):
        limiter.rate_limited(0.0, sent_at=time.now - 0.1)

    assert limiter.refusals == 1
    assert limiter.pause().until - time.now < 0.01


def test_s4_a_result_does_not_end_a_429(limiter: Limiter, time: FakeTime) -> None:
    limiter.rate_limited(5.0)

    limiter.queue_active(asked_at=time.now + 1.0)

    assert limiter.pause().state == "rate_limited"


def test_s4_a_waiter_checks_the_pause_again_when_it_wakes(limiter: Limiter, time: FakeTime) -> None:
    async def scenario() -> float:
        limiter.rate_limited(1.0)
        sender = asyncio.create_task(limiter.wait())
        await time.advance_to(1000.5)
        limiter.rate_limited(3.0)
        await time.advance_to(1003.4)
        assert not sender.done()
        await time.advance_to(1004.0)
        return sender.result()

    assert asyncio.run(scenario()) >= 1003.5


def test_s4_a_pause_during_the_ramp_holds_those_still_waiting(
    limiter: Limiter, time: FakeTime
) -> None:
    async def scenario() -> list[float]:
        limiter.rate_limited(1.0)
        senders = [asyncio.create_task(limiter.wait()) for _ in range(100)]
        await time.advance_to(1001.05)
        limiter.rate_limited(10.0)
        await time.advance_to(1030.0)
        return [sender.result() for sender in senders]

    left_at = asyncio.run(scenario())

    early = [at for at in left_at if at < 1001.06]
    assert 0 < len(early) <= RAMP_SENDS
    assert all(at >= 1011.05 for at in left_at if at not in early)


def test_s4_four_hundred_waiters_ramp_up_instead_of_stampeding(
    limiter: Limiter, time: FakeTime
) -> None:
    async def scenario() -> list[float]:
        limiter.rate_limited(2.0)
        senders = [asyncio.create_task(limiter.wait()) for _ in range(400)]
        await time.advance_to(1010.0)
        return sorted(sender.result() for sender in senders)

    left_at = asyncio.run(scenario())

    first_step = [at for at in left_at if at < 1002.0 + RAMP_STEP_S]
    assert len(first_step) == RAMP_SENDS
    assert left_at[-1] < 1002.0 + 10 * RAMP_STEP_S


def test_s4_pauses_do_not_depend_on_the_wall_clock(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter.rate_limited(5.0)
    before = limiter.pause()

    monkeypatch.setattr("time.time", lambda: 0.0)

    assert limiter.pause() == before


def test_s8_a_paused_queue_holds_back_new_samples(limiter: Limiter, time: FakeTime) -> None:
    async def scenario() -> float:
        limiter.queue_paused(3.0, "no room")
        assert limiter.pause().reason == "no room"
        sender = asyncio.create_task(limiter.wait())
        await time.advance_to(1002.9)
        assert not sender.done()
        await time.advance_to(1004.0)
        return sender.result()

    assert asyncio.run(scenario()) >= 1003.0


def test_s8_an_active_queue_ends_the_pause_early(limiter: Limiter, time: FakeTime) -> None:
    async def scenario() -> float:
        limiter.queue_paused(None)
        sender = asyncio.create_task(limiter.wait())
        await time.advance_to(1000.2)
        limiter.queue_active(asked_at=1000.1)
        await settle()
        await time.advance_to(1000.3)
        return sender.result()

    assert asyncio.run(scenario()) < 1000.0 + limits.DEFAULT_QUEUE_PAUSE_S


def test_s8_the_reply_to_a_poll_sent_before_the_pause_does_not_end_it(
    limiter: Limiter, time: FakeTime
) -> None:
    asked_at = time.now - 0.5
    limiter.queue_paused(5.0)

    limiter.queue_active(asked_at)

    assert limiter.pause().state == "queue_paused"


def test_a_cancelled_waiter_leaves_nothing_behind(limiter: Limiter) -> None:
    async def scenario() -> int:
        limiter.rate_limited(60.0)
        sender = asyncio.create_task(limiter.wait())
        await settle()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        return len(limiter._waiters)

    assert asyncio.run(scenario()) == 0


def test_s5_a_pause_is_readable_from_any_thread(limiter: Limiter) -> None:
    limiter.rate_limited(30.0, "slow down")
    seen: list[str] = []

    reader = threading.Thread(target=lambda: seen.append(limiter.pause().reason))
    reader.start()
    reader.join()

    assert seen == ["slow down"]


def test_s9_the_same_base_url_and_key_share_a_limiter() -> None:
    one = shared_limiter("https://host/services/prod/", Secret("tml-a"))

    assert shared_limiter("https://HOST:443/services/prod", Secret("tml-a")) is one
    assert shared_limiter("https://host/services/prod", Secret("tml-b")) is not one
    assert shared_limiter("https://host/services/staging", Secret("tml-a")) is not one
    assert shared_limiter("http://host/services/prod", Secret("tml-a")) is not one
    assert shared_limiter("https://host:8443/services/prod", Secret("tml-a")) is not one


def test_s39_services_behind_two_sockets_share_no_limiter() -> None:
    """Behind a socket the address says only what a service is called, and many are called alike."""
    one = shared_limiter("http://local", Secret("tml-a"), "/run/one")

    assert shared_limiter("http://local", Secret("tml-a"), "/run/one") is one
    assert shared_limiter("http://local", Secret("tml-a"), "/run/two") is not one
    assert shared_limiter("http://local", Secret("tml-a")) is not one


def test_s9_no_key_is_stored_in_plain_text() -> None:
    kept = shared_limiter("https://host", Secret("tml-secret-key"))

    assert kept is not None
    assert "tml-secret-key" not in repr(list(limits._shared.limiters.items()))


@pytest.mark.usefixtures("eager_switching")
def test_s10_racing_threads_with_a_new_key_get_the_same_limiter() -> None:
    rounds, threads = 1000, 64
    held: list[set[int]] = [set() for _ in range(rounds)]
    kept: list[Limiter] = []
    barrier = threading.Barrier(threads)

    def race() -> None:
        barrier.wait()
        for number in range(rounds):
            limiter = shared_limiter("http://race", Secret(f"key-{number}"))
            kept.append(limiter)
            held[number].add(id(limiter))

    racers = [threading.Thread(target=race) for _ in range(threads)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    assert all(len(ids) == 1 for ids in held)


def test_s11_a_429_is_seen_through_every_handle_including_earlier_ones() -> None:
    early = shared_limiter("http://handles", Secret("key"))
    late = shared_limiter("http://handles", Secret("key"))

    late.rate_limited(30.0, "seen")

    assert early.pause().reason == "seen"


def test_s11_an_early_end_wakes_waiters_on_other_event_loops() -> None:
    limiter = Limiter()
    limiter.queue_paused(30.0)
    ready = threading.Barrier(3)

    def wait_on_own_loop() -> None:
        async def scenario() -> None:
            waiter = asyncio.create_task(limiter.wait())
            await asyncio.sleep(0.01)
            ready.wait()
            await asyncio.wait_for(waiter, timeout=60)

        asyncio.run(scenario())

    threads = [threading.Thread(target=wait_on_own_loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    limiter.queue_active(asked_at=limiter._clock())
    for thread in threads:
        thread.join(timeout=20)

    assert not any(thread.is_alive() for thread in threads)


def test_s2_a_limiter_that_no_client_uses_is_freed() -> None:
    gc.collect()
    before = len(limits._shared.limiters)

    for number in range(1000):
        shared_limiter("http://gone", Secret(f"key-{number}"))
    gc.collect()

    assert len(limits._shared.limiters) == before


def test_many_samples_may_be_sent_together_without_a_pause(limiter: Limiter) -> None:
    assert limiter.leave(400) == 400


def test_s4_no_sample_is_sent_during_a_pause_and_few_right_after_it(
    limiter: Limiter, time: FakeTime
) -> None:
    limiter.rate_limited(5.0)
    during = limiter.leave(400)

    time.now += 5.0
    at_its_end = limiter.leave(400)
    time.now += RAMP_STEP_S
    in_the_first_step = at_its_end + limiter.leave(400)
    time.now += RAMP_STEP_S
    in_the_second_step = limiter.leave(400)

    assert during == 0
    assert in_the_first_step <= RAMP_SENDS + 1
    assert RAMP_SENDS <= in_the_second_step <= 2 * RAMP_SENDS + 1
    time.now += 1000.0
    assert limiter.leave(10**6) == 10**6


def test_a_late_sample_is_sent_after_others_of_the_key(limiter: Limiter, time: FakeTime) -> None:
    """Whether it asks for leave or waits; while there was no pause it is not late."""

    async def story() -> None:
        assert limiter.leave(1, late_s=5.0) == 1
        limiter.rate_limited(10.0)
        late = asyncio.create_task(limiter.wait(late_s=0.1))
        asking = asyncio.create_task(limiter.wait_leave(late_s=0.1))
        await time.advance_to(1010.05)

        assert limiter.leave(1) == 1
        assert limiter.leave(1, late_s=0.1) == 0
        assert not late.done()

        await time.advance_to(1010.11)
        await late
        assert limiter.leave(1, late_s=0.1) == 1
        await asking

    asyncio.run(story())


def test_s4_unused_permits_are_available_to_others(limiter: Limiter, time: FakeTime) -> None:
    limiter.rate_limited(1.0)
    time.now += 1.0 + RAMP_STEP_S
    given = limiter.leave(400)

    limiter.unused(given - 2)

    assert limiter.leave(400) == given - 2


def test_a_waiter_wakes_when_it_gets_a_permit_or_the_pause_ends_early(
    limiter: Limiter, time: FakeTime
) -> None:
    async def story() -> None:
        limiter.rate_limited(2.0)
        waiting = asyncio.create_task(limiter.wait_leave())
        await time.advance_to(1001.9)
        assert not waiting.done()
        await time.advance_to(1002.0)
        assert waiting.done()
        assert limiter.leave(5) == 1

        limiter.queue_paused(60.0)
        held = asyncio.create_task(limiter.wait_leave())
        await settle()
        time.now += 1.0
        limiter.queue_active(asked_at=time.now)
        await settle()
        assert held.done()

    asyncio.run(story())


def test_each_pause_ends_with_a_new_ramp(limiter: Limiter, time: FakeTime) -> None:
    limiter.rate_limited(1.0)
    time.now += 2.0
    assert limiter.leave(500) == 500

    limiter.rate_limited(1.0)
    time.now += 1.0

    assert limiter.leave(500) == 1


def test_the_rejected_time_is_zero_before_a_429_and_after_an_accepted_sample(
    limiter: Limiter, time: FakeTime
) -> None:
    assert limiter.refused_s() == 0.0
    limiter.rate_limited(1.0)
    time.now += 5.0
    assert limiter.refused_s() == 5.0

    limiter.sample_taken()

    assert limiter.refused_s() == 0.0


def test_a_pause_set_while_an_older_poll_is_processed_is_kept(time: FakeTime) -> None:
    """Another thread's poll may tell of it at that very moment."""
    told: list[None] = []

    def clock() -> float:
        if told:
            told.clear()
            time.now += 1.0
            own.queue_paused(60.0, "again")
        return time.now

    own = Limiter(clock=clock, sleep=time.sleep)
    own.queue_paused(10.0, "first")
    time.now += 1.0
    told.append(None)

    own.queue_active(asked_at=time.now)

    assert own.pause().reason == "again"


def test_an_amount_that_fits_is_taken_immediately_and_given_back() -> None:
    async def scenario() -> tuple[int, int]:
        budget = Budget(10)
        async with budget.taken(4), budget.taken(6):
            inside = budget.used
        return inside, budget.used

    assert asyncio.run(scenario()) == (10, 0)


def test_waiters_are_served_in_arrival_order() -> None:
    served: list[int] = []

    async def take(budget: Budget, number: int, amount: int) -> None:
        async with budget.taken(amount):
            served.append(number)
            await asyncio.sleep(0)

    async def scenario() -> None:
        budget = Budget(3)
        await asyncio.gather(*(take(budget, n, 3 if n == 2 else 1) for n in range(6)))

    asyncio.run(scenario())

    assert served == [0, 1, 2, 3, 4, 5]


def test_the_budget_is_exceeded_only_by_a_single_oversized_item() -> None:
    seen: list[int] = []

    async def take(budget: Budget, amount: int) -> None:
        async with budget.taken(amount):
            seen.append(budget.used)
            await asyncio.sleep(0)

    async def scenario() -> None:
        budget = Budget(10)
        await asyncio.gather(*(take(budget, amount) for amount in (4, 4, 4, 25, 4, 4)))

    asyncio.run(scenario())

    assert max(amount for amount in seen if amount != 25) <= 10
    assert seen.count(25) == 1


def test_a_cancelled_waiter_takes_nothing_and_lets_others_pass() -> None:
    async def scenario() -> int:
        budget = Budget(1)
        async with budget.taken():
            waiting = [asyncio.create_task(_take(budget)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), timeout=60)
        return budget.used

    assert asyncio.run(scenario()) == 0


def test_a_waiter_cancelled_as_it_is_served_gives_its_amount_back() -> None:
    async def scenario() -> int:
        budget = Budget(1)
        holder = asyncio.Event()

        async def hold() -> None:
            async with budget.taken():
                await holder.wait()

        holding = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiting = asyncio.create_task(_take(budget))
        await asyncio.sleep(0)
        holder.set()
        await holding  # the share is handed to the waiter here
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(_take(budget), timeout=60)
        return budget.used

    assert asyncio.run(scenario()) == 0


def test_a_waiter_cancelled_just_before_it_is_served_is_skipped() -> None:
    async def scenario() -> list[type]:
        budget = Budget(1)
        await budget.take(1)
        waiting = [asyncio.create_task(_take(budget)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        budget.give_back(1)  # before the cancelled one has run
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert budget.used == 0
        return [type(end) for end in ends]

    assert asyncio.run(scenario()) == [asyncio.CancelledError, type(None)]


def test_a_budget_of_zero_is_rejected() -> None:
    with pytest.raises(ValidationError):
        Budget(0)


async def _take(budget: Budget) -> None:
    async with budget.taken():
        await asyncio.sleep(0)
