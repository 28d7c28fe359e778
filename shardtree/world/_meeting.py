"""Where simulated ranks meet: the one object that their threads share.

A rank that comes says what it calls and sleeps. Whoever comes last, or makes a pair of a sender and a receiver, hands
the results out and wakes those concerned. When no rank runs any more and nobody can be woken, the ranks called
different things, which is found at once and not by waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn

from ..errors import WorldError, error_text


class Stopped(BaseException):
    """Tells a simulated rank that the others are gone. No ``except Exception`` should hold it up."""


@dataclass(frozen=True, slots=True)
class _Call:
    what: str  # as it reads in an error; ranks that meet have equal ones
    brought: Any
    sends_to: int = -1  # -1: to nobody in particular
    receives_from: int = -1


class Meeting:
    """Ranks that wait for each other."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.error: WorldError | None = None
        self.told: set[int] = set()  # the ranks that were stopped, so that what they raise is no news
        self._stopped = False
        self._ended: set[int] = set()
        self._waiting: dict[int, _Call] = {}
        self._results: dict[int, Any] = {}
        self._lock = Lock()
        # A rank sleeps by taking its own bell, which is taken already; to release it is to wake the rank.
        self._bells = [Lock() for _ in range(size)]
        for bell in self._bells:
            bell.acquire()

    def collect(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return what every rank brought, by rank, once all of them call the same thing."""
        brought: list[Any] = self._wait(rank, _Call(what, value))
        return brought

    def send(self, rank: int, to: int, value: Any) -> None:
        """Return once rank ``to`` has received the value."""
        self._wait(rank, _Call(f"send(to={to})", value, sends_to=to))

    def recv(self, rank: int, source: int) -> Any:
        """Return what rank ``source`` sends next."""
        return self._wait(rank, _Call(f"recv(source={source})", None, receives_from=source))

    def end(self, rank: int) -> None:
        """Let the others know that a rank has returned."""
        with self._lock:
            self._ended.add(rank)
            self._stop_if_stuck()

    def stop(self) -> None:
        """Make every rank that waits here, or comes here from now on, raise `Stopped`."""
        with self._lock:
            self._stop(None)

    def _wait(self, rank: int, call: _Call) -> Any:
        with self._lock:
            if self._stopped:
                self._tell(rank)
            self._waiting[rank] = call
            if not self._complete(rank, call):
                self._stop_if_stuck()
        if not self._bells[rank].acquire(timeout=self.timeout):
            self._give_up(rank)
            self._bells[rank].acquire()
        if rank not in self._results:
            self._tell(rank)
        return self._results.pop(rank)

    def _tell(self, rank: int) -> NoReturn:
        self.told.add(rank)
        raise Stopped

    def _complete(self, rank: int, call: _Call) -> bool:
        """Hand out results if the call that just came is what others waited for."""
        peer = max(call.sends_to, call.receives_from)
        if peer >= 0:
            return self._pair(rank, call, peer)
        if len(self._waiting) < self.size or any(other.what != call.what for other in self._waiting.values()):
            return False
        brought = [self._waiting[rank].brought for rank in range(self.size)]
        self._hand_out(dict.fromkeys(range(self.size), brought))
        return True

    def _pair(self, rank: int, call: _Call, peer: int) -> bool:
        """Hand a message over if its sender and its receiver are both here."""
        other = self._waiting.get(peer)
        if other is None or (other.receives_from if call.sends_to >= 0 else other.sends_to) != rank:
            return False
        # The receiver brought None, which is what the sender gets.
        self._hand_out({rank: other.brought, peer: call.brought})
        return True

    def _hand_out(self, results: dict[int, Any]) -> None:
        self._results.update(results)
        for rank in results:
            del self._waiting[rank]
            self._bells[rank].release()

    def _stop_if_stuck(self) -> None:
        if self._waiting and not self._stopped and len(self._waiting) + len(self._ended) == self.size:
            what = "the ranks called different things, and would wait for each other forever"
            self._stop(WorldError(error_text(what, offenders=self._calls())))

    def _give_up(self, rank: int) -> None:
        with self._lock:
            if rank in self._waiting:
                what = f"rank {rank} waited {self.timeout:g} seconds"
                self._stop(WorldError(error_text(what, offenders=self._calls())))

    def _stop(self, error: WorldError | None) -> None:
        self._stopped = True
        self.error = self.error or error
        for rank in self._waiting:
            self._bells[rank].release()
        self._waiting.clear()

    def _calls(self) -> list[str]:
        def state(rank: int) -> str:
            return self._waiting[rank].what if rank in self._waiting else "returned" if rank in self._ended else "runs"

        return [f"rank {rank}: {state(rank)}" for rank in range(self.size)]
