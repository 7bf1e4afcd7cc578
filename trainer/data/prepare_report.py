"""What became of each row of a `prepare`: counts by reason, with the first few rows to look at.

Filled by `prepare`, saved with its progress and written as `report.json`. The tables of reasons here are the
ones that the guide on preparing data shows; a test compares them. Must not decide what is dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from trainer.data.chat import TURN_REASONS
from trainer.data.conversations import CHAT_REASONS
from trainer.data.sources import READ_REASONS, SourceRow

EXAMPLES_PER_REASON = 5
MOST_DOMAINS = 1000
"""Further domains are counted together: a column of texts must not fill the memory."""

DROP_REASONS = {
    **READ_REASONS,
    **CHAT_REASONS,
    "no_assistant_turn": "nothing that the assistant said",
    "empty_completion": "the last answer is blank",
    "duplicate": "the same chat came before (Unicode form, line ends and outer blanks aside)",
    "template_error": "the chat template refuses these messages",
    **TURN_REASONS,
    "too_long": "the prompt leaves no room for an answer within --max-seq-len",
    "no_anchor": "no answer of at least two tokens, so no block can start",
}
"""Why a row gives no sample. Of a chat in which no answer is usable, the first answer's reason counts."""

ALTER_REASONS = {
    "split": "the template rewrites history: the chat became several samples, each as the target reads it",
    "later_turns_cut": "longer than --max-seq-len: later turns are left out, the last kept answer is whole",
    "answer_cut": "the first answer does not fit --max-seq-len: cut inside, its end of turn is not taught",
    "trailing_messages": "messages behind the last answer are left out",
    "turns_unsupervised": "some answers are not trained on; `lost_turns` says why",
    "samples_lost": "some samples of a split chat are not usable; `lost_samples` says why",
    "respelled": "the template or the tokenizer spells an answer otherwise than it was said",
}
"""What was changed in a row that is kept; one row may have several."""


@dataclass(slots=True)
class PrepareReport:
    """Counts of one `prepare`; `rows` = `kept` + the sum of `dropped`."""

    rows: int = 0
    kept: int = 0
    train: int = 0
    """samples for training; a kept row gives one, or several where the template rewrites history"""
    held_out: int = 0
    from_completion_ids: int = 0
    """rows taken from recorded tokens; the others were tokenized from their text"""
    tokens: int = 0
    supervised_tokens: int = 0
    domains: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    altered: Counter[str] = field(default_factory=Counter)
    lost_turns: Counter[str] = field(default_factory=Counter)
    lost_samples: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def drop(self, reason: str, row: SourceRow) -> None:
        """Count a row that gives no sample."""
        self.dropped[reason] += 1
        self._show(reason, row)

    def alter(self, reason: str, row: SourceRow) -> None:
        """Count a kept row that is not taken as it stands."""
        self.altered[reason] += 1
        self._show(reason, row)

    def count_domain(self, domain: str | None) -> None:
        """Count a kept row under its domain."""
        name = domain or "(none)"
        self.domains[name if name in self.domains or len(self.domains) < MOST_DOMAINS else "(others)"] += 1

    def render(self) -> str:
        """One line for a log or an error."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.most_common())
        return f"{self.kept} of {self.rows} rows kept, dropped: {reasons or 'none'}"

    def as_dict(self) -> dict[str, Any]:
        """For `report.json`; each reason comes with what it means."""
        plain = {name: value for name, value in self.as_state().items() if name != "examples"}
        for table, meanings in (("dropped", DROP_REASONS), ("altered", ALTER_REASONS)):
            plain[table] = {
                reason: {"count": count, "meaning": meanings[reason], "examples": self.examples[reason]}
                for reason, count in sorted(plain[table].items())
            }
        return plain

    def as_state(self) -> dict[str, Any]:
        """Everything, to go on from."""
        return {
            item.name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for item in fields(self)
            for value in (getattr(self, item.name),)
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PrepareReport:
        """Take up what `as_state` gave."""
        report = cls()
        for name, value in state.items():
            setattr(report, name, Counter(value) if isinstance(getattr(report, name), Counter) else value)
        return report

    def _show(self, reason: str, row: SourceRow) -> None:
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES_PER_REASON:
            shown.append({"file": row.file, "row": row.number, "start": row.excerpt()})
