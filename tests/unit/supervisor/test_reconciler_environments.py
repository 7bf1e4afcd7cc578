"""Where packages come from, and what a failed install means."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from supervisor.domain.errors import CommandFailedError, DeployError
from supervisor.domain.layout import Layout
from supervisor.reconciler.environments import EnvironmentBuilder, EnvironmentPlan, explain_uv_failure
from supervisor.transport.base import CommandResult

NOT_THERE = "Because torch was not found in the provided package locations"


class ScriptedNode:
    """Plays a node: our small programs succeed, the installer answers as the test says."""

    def __init__(self, answer: Callable[[Sequence[str]], tuple[int, str]]) -> None:
        self.answer = answer
        self.installs: list[list[str]] = []
        self.actions: list[str] = []

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", **_: Any) -> CommandResult:
        if argv[0] == "python3":
            marker, request = argv[3], json.loads(argv[4])
            self.actions.append(request["action"])
            result = {"is_complete": False, "found": {"uv": True}, "removed": True}
            reply = marker + json.dumps({"ok": True, "result": result})
            return CommandResult(argv=tuple(argv), exit_code=0, stdout=reply.encode(), stderr=b"")
        words = [word for word in argv[1:] if word not in ("--no-config", "--no-progress")]
        self.installs.append(words)
        code, text = self.answer(words)
        return CommandResult(argv=tuple(argv), exit_code=code, stdout=b"", stderr=text.encode())

    async def put(self, *_args: Any, **_options: Any) -> str:
        return ""


def make_plan(**changes: Any) -> EnvironmentPlan:
    fields: dict[str, Any] = {
        "digest": "d" * 8,
        "lock_text": "click==8 --hash=sha256:00\n",
        "torch_requirement": None,
        "python": "python3",
        "find_links": None,
        "torch_index_url": None,
    }
    return EnvironmentPlan(**{**fields, **changes})


async def build(plan: EnvironmentPlan, answer: Callable[[Sequence[str]], tuple[int, str]]) -> ScriptedNode:
    node = ScriptedNode(answer)
    builder = EnvironmentBuilder(node, Layout("/srv/d"), python="python3", report=lambda *_: None)  # type: ignore[arg-type]
    await builder.build(plan)
    return node


def fine(_words: Sequence[str]) -> tuple[int, str]:
    return 0, ""


def torch_calls(node: ScriptedNode) -> list[list[str]]:
    return [words for words in node.installs if "torch==2.13.0" in words]


async def test_a_lock_is_installed_with_hashes_and_without_resolving() -> None:
    node = await build(make_plan(), fine)

    venv, install = node.installs
    assert venv[0] == "venv"
    assert "--no-python-downloads" in venv
    assert {"--require-hashes", "--no-deps"} <= set(install)
    assert node.actions[0] == "begin_environment"


async def test_torch_comes_from_the_nodes_index_with_its_dependencies() -> None:
    plan = make_plan(torch_requirement="torch==2.13.0", torch_index_url="index", find_links="/wheels")

    (words,) = torch_calls(await build(plan, fine))

    assert words[words.index("--index-url") + 1] == "index"
    assert "--no-deps" not in words


async def test_torch_comes_from_the_nodes_folder_and_from_nowhere_else() -> None:
    (words,) = torch_calls(
        await build(make_plan(torch_requirement="torch==2.13.0", find_links="/wheels"), fine)
    )

    assert "--no-index" in words
    assert words[words.index("--find-links") + 1] == "/wheels"


async def test_torch_that_is_not_in_the_folder_comes_from_the_default_index() -> None:
    def answer(words: Sequence[str]) -> tuple[int, str]:
        return (1, NOT_THERE) if "torch==2.13.0" in words and "--no-index" in words else (0, "")

    first, alone, last = torch_calls(
        await build(make_plan(torch_requirement="torch==2.13.0", find_links="/wheels"), answer)
    )

    assert "--no-index" in first
    assert "--no-index" in alone
    assert "--no-index" not in last
    assert "--find-links" not in last


async def test_a_folder_with_torch_alone_is_enough_and_one_with_its_libraries_gives_them_too() -> None:
    def answer(words: Sequence[str]) -> tuple[int, str]:
        return (1, NOT_THERE) if "torch==2.13.0" in words and "--no-deps" not in words else (0, "")

    plan = make_plan(torch_requirement="torch==2.13.0", find_links="/wheels")
    with_libraries, alone = torch_calls(await build(plan, answer))

    assert "--no-deps" not in with_libraries
    assert {"--no-deps", "--no-index"} <= set(alone)


async def test_an_authority_that_only_the_node_knows_is_looked_up_in_the_nodes_store() -> None:
    def answer(words: Sequence[str]) -> tuple[int, str]:
        is_strange = words[0] == "pip" and "--system-certs" not in words
        return (2, "cause: invalid peer certificate: UnknownIssuer") if is_strange else (0, "")

    first, second = (await build(make_plan(), answer)).installs[1:]

    assert "--system-certs" not in first
    assert [*first, "--system-certs"] == second


async def test_a_failed_install_is_explained_and_its_remains_removed() -> None:
    node = ScriptedNode(lambda words: (2, "error: No space left on device") if words[0] == "pip" else (0, ""))
    builder = EnvironmentBuilder(node, Layout("/srv/d"), python="python3", report=lambda *_: None)  # type: ignore[arg-type]

    with pytest.raises(DeployError) as caught:
        await builder.build(make_plan())

    assert caught.value.reason == "NoSpace"
    assert node.actions[-1] == "discard_environment"


async def test_an_installer_that_cannot_run_names_the_way_out() -> None:
    class Foreign(ScriptedNode):
        async def run(self, argv: Sequence[str], *, stdin: bytes = b"", **options: Any) -> CommandResult:
            if argv[0] != "python3":
                raise CommandFailedError("exec format error")
            return await super().run(argv, stdin=stdin, **options)

    builder = EnvironmentBuilder(Foreign(fine), Layout("/srv/d"), python="python3", report=lambda *_: None)  # type: ignore[arg-type]

    with pytest.raises(DeployError) as caught:
        await builder.build(make_plan())

    assert caught.value.reason == "InstallerUnsupported"
    assert "external interpreter" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("Hash mismatch for `toylib==1.0`", 1, "HashMismatch"),
        ("cause: dns error", 2, "NoNetwork"),
        ("Failed to fetch: http", 2, "NoNetwork"),
        ("error: No interpreter found at path `/x`", 2, "NoPython"),
        ("there is no version of toylib==2.0", 1, "PackageNotFound"),
        ("all requirements must have a hash, but none were provided", 2, "LockNotHashed"),
        ("something new", 1, "InstallFailed"),
        ("", 127, "InstallerUnsupported"),
    ],
)
def test_the_installers_words_become_a_reason_and_a_remedy(text: str, code: int, reason: str) -> None:
    result = CommandResult(argv=("uv",), exit_code=code, stdout=b"", stderr=text.encode())

    error = explain_uv_failure(["pip", "install"], result)

    assert error.reason == reason
    assert error.hint
    assert text in error.message
