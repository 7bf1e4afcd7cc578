"""SSH: the only package that talks to paramiko.

`connect` opens and authenticates connections and translates errors, `channels` holds open channels,
`transport` puts both behind the `Transport` protocol.
"""

from supervisor.transport.ssh.channels import SshChannel
from supervisor.transport.ssh.connect import SshTarget, fingerprint, parse_host_key, scan_host_key, translate
from supervisor.transport.ssh.transport import CHANNELS_PER_CONNECTION, SshTransport

__all__ = [
    "CHANNELS_PER_CONNECTION",
    "SshChannel",
    "SshTarget",
    "SshTransport",
    "fingerprint",
    "parse_host_key",
    "scan_host_key",
    "translate",
]
