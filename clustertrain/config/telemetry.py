"""The ``[telemetry]`` table: recording, export and alerts during a run."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range, is_host

# The requested port and the 32 after it: several agents, of this and other jobs, may run on one machine.
PORT_ATTEMPTS = 33


class AlertsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[telemetry.alerts]`` table. A limit of 0 turns its rule off.

    Each alert is written to the events and the log, and sent to ``command`` and ``webhook`` if they are set.
    """

    idle_min: float = 10.0
    """Minutes at 0 % utilization before a GPU is reported idle, once training has started."""
    utilization: float = 0.7
    """Share of the training time during which GPUs are busy, over five minutes, below which to alert."""
    slowdown: float = 0.3
    """Relative excess of the step time over the run's median, over five minutes, above which to alert."""
    memory: float = 0.97
    """Share of a GPU's memory in use above which to alert."""
    straggler: float = 0.1
    """Relative deficit of a GPU or rank against the median of the others, over five minutes, above which to alert."""
    hang_min: float = 5.0
    """Minutes without a step before the run is reported hung; at least ten median steps must have passed too."""
    throttle_min: float = 2.0
    """Minutes out of the last ten during which heat or hardware slowed a GPU before it is reported."""
    xid: bool = True
    """Alert on GPU errors that the driver reports."""
    training: bool = True
    """Forward the warnings of ``[stability]``: norms, spikes, NaN and Inf."""
    command: list[str] = []
    """Program and arguments to run for each alert, without a shell. The alert arrives as JSON on standard input."""
    webhook: str = ""
    """URL that receives each alert as JSON by POST."""
    webhook_env: str = ""
    """Name of an environment variable of the job that contains the webhook's URL. The run then does not store the URL.
    """
    webhook_file: str = ""
    """Absolute path, visible to all nodes, of a file whose first line is the webhook's URL."""

    def __post_init__(self) -> None:
        for name in ("idle_min", "throttle_min", "hang_min"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (off) or more")
        for name in ("utilization", "slowdown", "memory", "straggler"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        if self.command and not self.command[0]:
            raise ValueError(f"command = {self.command!r}: the program's name is empty")
        if self.webhook and not is_http_url(self.webhook):
            raise ValueError(f"webhook = {self.webhook!r}: must be a URL, for example https://host/path")
        if self.webhook_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.webhook_env):
            # The value is not quoted: if it is the URL by mistake, it would appear in every log.
            raise ValueError("webhook_env: must be the name of an environment variable, not its value")
        if self.webhook_file and not PurePosixPath(self.webhook_file).is_absolute():
            raise ValueError(
                f"webhook_file = {self.webhook_file!r}: must be an absolute path that every node of the job sees"
            )
        sources = [name for name in ("webhook", "webhook_env", "webhook_file") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are mutually exclusive: keep one")

    @property
    def has_webhook(self) -> bool:
        return bool(self.webhook or self.webhook_env or self.webhook_file)

    def redacted(self) -> AlertsSpec:
        """Return a valid copy without possible secrets: the command's arguments and the webhook's path."""
        parts = urlsplit(self.webhook)
        host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/..."
        command = [*self.command[:1], *(["..."] if len(self.command) > 1 else [])]
        return msgspec.structs.replace(self, webhook=host if self.webhook else "", command=command)


class ExporterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[telemetry.prometheus]`` table: metrics in Prometheus's text format, served by each agent or in a file."""

    port: int = 0
    """First port to serve on; each agent on a machine takes the next free one. 0: off."""
    address: str = "127.0.0.1"
    """Address to listen on. Unused without ``port``."""
    textfile: str = ""
    """Absolute path of a folder that node_exporter's textfile collector reads. Empty: none."""

    def __post_init__(self) -> None:
        check_range("port", self.port, 0, 65536 - PORT_ATTEMPTS)
        if self.port and not self.address:
            raise ValueError('address = "": must not be empty; "0.0.0.0" exposes the metrics to the whole network')
        if self.address and not is_host(self.address):
            raise ValueError(f"address = {self.address!r}: must be a host name or an IP address without a port")
        if self.textfile and not PurePosixPath(self.textfile).is_absolute():
            raise ValueError(f"textfile = {self.textfile!r}: must be an absolute path, because each node resolves it")


class TelemetrySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[telemetry]`` table. Other keys are unused with ``enabled = false``."""

    enabled: bool = True
    """Record telemetry."""
    interval_s: float = 1.0
    """Seconds between samples."""
    flush_s: float = 10.0
    """Seconds between writes; a dying node loses at most this much. At least ``interval_s``."""
    alerts: AlertsSpec = AlertsSpec()
    """Alert rules and where alerts are sent."""
    prometheus: ExporterSpec = ExporterSpec()
    """Export to Prometheus."""

    def __post_init__(self) -> None:
        check_positive("interval_s", self.interval_s)
        check_range("interval_s", self.interval_s, 0.1, 60.0)  # GPM has nothing new below 0.1 s
        check_range("flush_s", self.flush_s, self.interval_s, 600.0)


def is_http_url(text: str) -> bool:
    """Return whether ``text`` is an HTTP URL in which spaces and non-ASCII characters are encoded."""
    if not all("!" <= c <= "~" for c in text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # an invalid port or an unbalanced bracket
        return False
