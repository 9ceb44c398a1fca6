"""The ``[telemetry]`` table of a recipe: what is recorded, exported and watched while a run goes on."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range, is_host

PORT_ATTEMPTS = (
    33  # the one that was asked for and the 32 after it: agents of other jobs, and of this one, on the same machine
)


class AlertsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[telemetry.alerts]`` table. A limit of 0 turns its rule off. Each alert goes into the events and the log;
    ``command`` and ``webhook`` get it besides."""

    idle_min: float = 10.0  # a GPU at 0 % for so many minutes, once training has begun
    utilization: float = 0.7  # GPUs busy for less than this share of the time in training, over five minutes
    slowdown: float = 0.3  # steps slower than the run's own median by this share, over five minutes
    memory: float = 0.97  # of a GPU's memory
    straggler: float = 0.1  # a GPU or rank slower than the median of the others by this share, over five minutes
    hang_min: float = 5.0  # no step for so many minutes, and for ten median steps
    throttle_min: float = 2.0  # a GPU held down by heat or hardware for so many minutes in ten
    xid: bool = True  # the driver reported an error of a GPU
    training: bool = True  # what the training itself warns of: norms, spikes, steps that are not finite
    command: list[str] = []  # a program and its arguments, run without a shell; the alert is JSON on its input
    webhook: str = ""  # a URL that gets the alert as JSON, by POST
    webhook_env: str = ""  # the environment variable of the job that holds it, so that it is written nowhere
    webhook_file: str = ""  # or the file, whose first line it is

    def __post_init__(self) -> None:
        for name in ("idle_min", "throttle_min", "hang_min"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (off) or more")
        for name in ("utilization", "slowdown", "memory", "straggler"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        if self.command and not self.command[0]:
            raise ValueError(f"command = {self.command!r}: begins with an empty name")
        if self.webhook and not is_http_url(self.webhook):
            raise ValueError(f"webhook = {self.webhook!r}: must be a URL, as https://host/path")
        if self.webhook_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.webhook_env):
            # Not quoted: who mistakes it for the value would find that in every log.
            raise ValueError("webhook_env: must be the name of an environment variable, not its value")
        if self.webhook_file and not PurePosixPath(self.webhook_file).is_absolute():
            raise ValueError(
                f"webhook_file = {self.webhook_file!r}: must be an absolute path, which every node of the job sees"
            )
        sources = [name for name in ("webhook", "webhook_env", "webhook_file") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given: keep one of them")

    @property
    def has_webhook(self) -> bool:
        return bool(self.webhook or self.webhook_env or self.webhook_file)

    def redacted(self) -> AlertsSpec:
        """Without what may be a secret, as valid as before: the arguments of the command, all but the webhook's
        host."""
        parts = urlsplit(self.webhook)
        host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/..."
        command = [*self.command[:1], *(["..."] if len(self.command) > 1 else [])]
        return msgspec.structs.replace(self, webhook=host if self.webhook else "", command=command)


class ExporterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[telemetry.prometheus]`` table: a page in Prometheus's text format that each agent serves, or a file."""

    port: int = 0  # 0: off; of several agents on one machine each takes the next free one
    address: str = "127.0.0.1"
    textfile: str = ""  # a folder that node_exporter's textfile collector reads

    def __post_init__(self) -> None:
        check_range("port", self.port, 0, 65536 - PORT_ATTEMPTS)
        if self.port and not self.address:
            raise ValueError('address = "": name one; "0.0.0.0" lets everybody in the network read')
        if self.address and not is_host(self.address):
            raise ValueError(f"address = {self.address!r}: must be a host's name or an IP address, without a port")
        if self.textfile and not PurePosixPath(self.textfile).is_absolute():
            raise ValueError(
                f"textfile = {self.textfile!r}: must be an absolute path, as every node has its own folder"
            )


class TelemetrySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[telemetry]`` table."""

    enabled: bool = True
    interval_s: float = 1.0  # between samples
    flush_s: float = 10.0  # between writes: so much is lost when a node dies
    comment: bool = True  # a line of figures in the Slurm job's comment, for squeue and sacct
    alerts: AlertsSpec = AlertsSpec()
    prometheus: ExporterSpec = ExporterSpec()

    def __post_init__(self) -> None:
        check_positive("interval_s", self.interval_s)
        check_range("interval_s", self.interval_s, 0.1, 60.0)  # GPM has nothing new below 0.1 s
        check_range("flush_s", self.flush_s, self.interval_s, 600.0)


def is_http_url(text: str) -> bool:
    """Of a web server, as an HTTP client takes it: what is not ASCII, and spaces, are to be encoded."""
    if not all("!" <= c <= "~" for c in text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # a port that is no number or too great, a bracket too few
        return False
