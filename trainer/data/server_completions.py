"""Completes prompts by a server, several at once, each exactly once in the output.

Called by `generate --base-url`. Threads ask, the calling thread alone writes: a prompt is handed out once and
its row is written once, in the order in which answers come. A server that stays silent ends the command with
what is written; the same command goes on from there. Must not load a model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.completions import RowFile
from trainer.data.openai_client import Answer, ChatClient, NoAnswerError, PromptRefusedError
from trainer.data.prompts import Prompt
from trainer.errors import DataError, StalledError

log = logging.getLogger(__name__)

REPORT_S = 10.0
FEWEST_FAILURES = 8
"""Prompts that must fail one after another before a server counts as silent; some prompts just fail."""
Outcome = Answer | Exception


@dataclass(slots=True)
class ServerReport:
    """What came of the prompts; `refused` counts HTTP statuses, `failed` prompts may be tried again."""

    written: int = 0
    cut_off: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""


def complete_by_server(
    client: ChatClient,
    prompts: Sequence[Prompt],
    rows: RowFile,
    *,
    concurrency: int,
    thinking: Callable[[Prompt], bool | None],
    build_row: Callable[[Prompt, Answer], dict[str, Any]],
    report: ServerReport,
) -> None:
    """Ask for every prompt and write each answer as it comes; `report` is kept up to date.

    Raises:
        ConfigError: the server refuses every request.
        StalledError: many prompts failed one after another, at least as many as there are threads.
    """
    waiting: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    answers: queue.SimpleQueue[tuple[Prompt, Outcome]] = queue.SimpleQueue()
    for number in range(min(concurrency, len(prompts))):
        threading.Thread(
            target=_ask, args=(client, waiting, answers, thinking), name=f"request-{number}", daemon=True
        ).start()
    started = reported = time.monotonic()
    in_a_row = 0
    try:
        for done in range(1, len(prompts) + 1):
            prompt, outcome = answers.get()
            in_a_row = in_a_row + 1 if isinstance(outcome, NoAnswerError) else 0
            _take(prompt, outcome, rows, build_row, report)
            report.wall_s = time.monotonic() - started
            if in_a_row >= max(concurrency, FEWEST_FAILURES) and done < len(prompts):
                raise StalledError(
                    f"the server does not answer, {in_a_row} prompts failed in a row: {report.last_failure}; "
                    "the same command goes on from here"
                )
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                rate = report.tokens / report.wall_s
                log.info("completed %d of %d prompts, %.1f tokens/s", report.written, len(prompts), rate)
    finally:
        client.stop.set()


def check_outcome(report: ServerReport, prompts: int) -> None:
    """Fail a command that left prompts without an answer.

    Raises:
        StalledError: some prompts failed and can be tried again.
        DataError: the server refused all prompts.
    """
    if report.failed:
        raise StalledError(
            f"{report.failed} of {prompts} prompts got no answer, the last: {report.last_failure}; "
            "the same command tries them again"
        )
    if prompts and report.refused and not report.written:
        raise DataError(f"the server refused all {prompts} prompts: {report.last_failure}")


def _ask(
    client: ChatClient,
    waiting: queue.SimpleQueue[Prompt],
    answers: queue.SimpleQueue[tuple[Prompt, Outcome]],
    thinking: Callable[[Prompt], bool | None],
) -> None:
    while not client.stop.is_set():
        try:
            prompt = waiting.get_nowait()
        except queue.Empty:
            return
        outcome: Outcome
        try:
            outcome = client.complete(prompt.messages, tools=prompt.tools, thinking=thinking(prompt))
        except Exception as error:  # noqa: BLE001 - thread boundary: the writing thread raises what it is
            outcome = error
        answers.put((prompt, outcome))
        if not isinstance(outcome, Answer | NoAnswerError | PromptRefusedError):
            client.stop.set()  # no request can succeed: not one more, however late the caller hears of it


def _take(
    prompt: Prompt,
    outcome: Outcome,
    rows: RowFile,
    build_row: Callable[[Prompt, Answer], dict[str, Any]],
    report: ServerReport,
) -> None:
    if isinstance(outcome, Answer):
        rows.write([build_row(prompt, outcome)])
        report.written += 1
        report.tokens += outcome.tokens
        report.cut_off += outcome.finish_reason == "length"
        return
    report.last_failure = str(outcome)
    if isinstance(outcome, NoAnswerError):
        report.failed += 1
        log.warning("prompt %s got no answer: %s", prompt.id, outcome)
    elif isinstance(outcome, PromptRefusedError):
        report.refused[f"HTTP {outcome.status}"] += 1
        log.warning("the server refuses prompt %s: %s", prompt.id, outcome)
    else:
        raise outcome
