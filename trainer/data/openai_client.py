"""One chat completion from any server that speaks OpenAI's protocol, retried until it counts or cannot.

Called by `trainer.data.server_completions`, from several threads at once. Every attempt has its own
connection and one deadline over everything, slow bodies included; busy and broken answers (408, 425, 429,
5xx, cut connections, answers that are no completion) are tried again after a jittered wait, for at least as
long as `Retry-After` says and never longer than `LONGEST_WAIT_S`. Redirects are not followed and the key is
kept out of every message. Must not know files or tokenizers.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import re
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import ConfigError

_LOG = logging.getLogger(__name__)
_NUMBER = re.compile(r"[+-]?\d{1,9}(\.\d+)?")

LONGEST_WAIT_S = 120.0
"""Between two attempts, whatever the server asks for."""
FIRST_WAIT_S = 1.0
"""Before the second attempt; doubled from then on."""
LARGEST_ANSWER_BYTES = 64 << 20
RETRIED = frozenset({408, 425, 429})
"""Besides all 5xx."""
UNUSABLE = frozenset({401, 402, 403, 404, 405})
"""No request of this command can succeed."""
ADVICE = {
    401: "check OPENAI_API_KEY",
    403: "check OPENAI_API_KEY",
    404: "check --base-url and --model",
}
QUOTED_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said; `message` is the assistant's, as `prepare` reads it."""

    message: dict[str, Any]
    finish_reason: str
    tokens: int


class PromptRefusedError(Exception):
    """The server will not answer this prompt (for example: it is too long); others may go on."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class NoAnswerError(Exception):
    """All attempts failed; the text tells how the last one did."""


class _TryAgainError(Exception):
    def __init__(self, text: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where chat completions are asked for."""

    is_tls: bool
    host: str
    port: int | None
    path: str


def parse_base_url(text: str) -> Endpoint:
    """Split `--base-url`.

    Raises:
        ConfigError: no http(s) address, or one that carries a password or a query.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--base-url is no address: {error}") from error
    if parts.username or parts.password:
        raise ConfigError("--base-url must not carry a user or password: put the key into OPENAI_API_KEY")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--base-url must look like http://host:port/v1: {text}")
    return Endpoint(
        parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/") + "/chat/completions"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatClient:
    """Asks one server for greedy completions.

    Attributes:
        endpoint: the server.
        model: name that the server knows the target by.
        max_new_tokens: most tokens per completion.
        attempt_s: deadline of one attempt, from connecting to the last byte.
        max_tries: attempts per prompt.
        api_key: sent as bearer token; never shown.
        stop: set by the caller to end all waiting.
    """

    endpoint: Endpoint
    model: str
    max_new_tokens: int
    attempt_s: float
    max_tries: int
    api_key: str | None = field(default=None, repr=False)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("OPENAI_API_KEY holds characters that no header can carry: set it again")

    def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        thinking: bool | None = None,
    ) -> Answer:
        """Ask for one completion.

        Raises:
            ConfigError: no request can succeed (wrong key, model or address).
            PromptRefusedError: this one cannot.
            NoAnswerError: all attempts failed, or `stop` was set.
        """
        body = self._body(messages, tools, thinking)
        last = "stopped"
        for attempt in range(self.max_tries):
            try:
                return self._attempt(body)
            except _TryAgainError as error:
                last = str(error)
                is_last = attempt + 1 == self.max_tries
                if is_last or self.stop.wait(self._wait_s(attempt, error.retry_after_s)):
                    break
        raise NoAnswerError(last)

    def _body(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, thinking: bool | None
    ) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_new_tokens,
            "temperature": 0,
            "stream": False,
        }
        if tools:
            body["tools"] = list(tools)
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return json.dumps(body).encode()

    def _wait_s(self, attempt: int, retry_after_s: float) -> float:
        backoff_s = min(FIRST_WAIT_S * float(2.0**attempt), LONGEST_WAIT_S)
        # Jitter keeps requests that failed together from returning together.
        jitter_s = random.uniform(0.5, 1.0) * backoff_s  # noqa: S311 - not for secrets
        if retry_after_s <= 0:
            return jitter_s
        return min(retry_after_s + jitter_s * 0.1, LONGEST_WAIT_S)

    def _attempt(self, body: bytes) -> Answer:
        status, headers, content = self._exchange(body)
        if status == 200:
            return _parse_answer(content)
        text = self._quoted(content)
        if status in RETRIED or status >= 500:
            raise _TryAgainError(f"HTTP {status}: {text}", retry_after_s=_retry_after_s(headers))
        if status in UNUSABLE or status < 400:
            advice = ADVICE.get(status, "check --base-url")
            raise ConfigError(f"the server refuses every request: HTTP {status}: {text}; {advice}")
        raise PromptRefusedError(status, text)

    def _exchange(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        connection = self._connection()
        ran_out = threading.Event()
        timer: threading.Timer | None = None
        try:
            connection.connect()
            line = connection.sock

            def cut() -> None:
                ran_out.set()
                _shut(line)

            # A timeout on the socket bounds one read; only this bounds a server that dribbles.
            timer = threading.Timer(self.attempt_s, cut)
            timer.daemon = True
            timer.start()
            connection.request("POST", self.endpoint.path, body, self._headers())
            response = connection.getresponse()
            content = response.read(LARGEST_ANSWER_BYTES)
            if ran_out.is_set():
                raise _TryAgainError(f"no whole answer within {self.attempt_s:g} s")
            return response.status, dict(response.headers.items()), content
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(f"the server's certificate is not trusted: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            if ran_out.is_set() or isinstance(error, TimeoutError):
                raise _TryAgainError(f"no whole answer within {self.attempt_s:g} s") from error
            raise _TryAgainError(f"connection failed: {error or type(error).__name__}") from error
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        place = self.endpoint
        if place.is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                place.host, place.port, timeout=self.attempt_s, context=context
            )
        return http.client.HTTPConnection(place.host, place.port, timeout=self.attempt_s)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def _quoted(self, content: bytes) -> str:
        """The beginning of a server's text on one line, without the key that some servers repeat."""
        text = " ".join(content.decode(errors="replace").split())
        if self.api_key:
            text = text.replace(self.api_key, "***")
        return text[:QUOTED_CHARACTERS] or "(no text)"


def _parse_answer(content: bytes) -> Answer:
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        said = choice["message"]
        text, reason = said.get("content"), choice.get("finish_reason")
        usage = body.get("usage") or {}
        tokens = usage.get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _TryAgainError(f"the answer is no chat completion: {type(error).__name__}") from error
    message: dict[str, Any] = {"role": "assistant", "content": text if isinstance(text, str) else ""}
    thought = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    return Answer(message, str(reason or "stop"), tokens if isinstance(tokens, int) else 0)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait, as a number or a date; 0 leaves it to the client's own delay."""
    value = next((text for name, text in headers.items() if name.lower() == "retry-after"), "").strip()
    if _NUMBER.fullmatch(value):
        return max(0.0, float(value))
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        if value:
            _LOG.warning("retry-after of the server cannot be read, the own delay applies: %r", value)
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _shut(line: socket.socket | None) -> None:
    """Wake whoever reads from this connection."""
    if line is None:
        return
    try:
        # Not the method of a TLS socket: that one takes the cipher away from under the reader.
        socket.socket.shutdown(line, socket.SHUT_RDWR)
    except OSError:
        return  # already closed: nobody reads any more
