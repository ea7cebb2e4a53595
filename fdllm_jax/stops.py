"""The search for stop strings in the texts of a batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fdllm_jax.exchange import Report
from fdllm_jax.job import Job, text_of
from fdllm_jax.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """What finds them. It is asked at every look, with the device at rest: so it reads only what is new.

    ends: of each token id, whether a stop string can end in it, [vocab_size]. reach: tokens that can hold what comes
    before: a byte each, and a character cut in half.
    """

    tokenizer: Tokenizer
    ends: np.ndarray
    reach: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, jobs: Iterable[Job]) -> "Stops | None":
        """The search for the stop strings of all jobs; None if they have none."""
        stops = {stop for job in jobs for stop in job.settings.stop}
        if not stops:
            return None
        ends = tokenizer.holding({stop.encode()[-1] for stop in stops})
        ends |= any(stop.endswith("\ufffd") for stop in stops)  # bytes that are no character are decoded to it
        return cls(tokenizer=tokenizer, ends=ends, reach=4 + max(len(stop.encode()) for stop in stops))

    def found(self, seen: Report, running: Mapping[int, Job], before: np.ndarray, now: np.ndarray) -> list[int]:
        """The live slots in whose text one stands, known up to position `now`; none did when it was up to `before`."""
        slots = np.flatnonzero(seen.live & (now > before))
        counts = (now - before)[slots]
        slot_of = np.repeat(slots, counts)
        position_of = np.arange(len(slot_of)) + np.repeat(now[slots] - counts.cumsum(), counts)
        suspects = np.unique(slot_of[self.ends[seen.tokens[slot_of, position_of]]]).tolist()
        return [i for i in suspects if self._stands(seen, i, running[i], int(before[i]), int(now[i]))]

    def _stands(self, seen: Report, slot: int, job: Job, before: int, now: int) -> bool:
        """Whether one stands in what is new, and in the text if this ends before or begins with half a character."""
        tokens = seen.tokens[slot, len(job.prompt) : now].tolist()
        news = self.tokenizer.decode(tokens[max(0, before - len(job.prompt) - self.reach) :])
        found = [stop for stop in job.settings.stop if stop in news]
        if not found or ("\ufffd" not in news and not any(eos in tokens for eos in self.tokenizer.eos_ids)):
            return bool(found)
        text = text_of(self.tokenizer, seen, slot, job)[1]
        return any(stop in text for stop in job.settings.stop)
