"""Messages: format, columns and security settings of a topic that holds a dataset's rows. Torch-free."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from trainer.spec.base import Column, Spec

ColumnType = Annotated[
    str, StringConstraints(pattern=r"^(int64|float64|string|bool|timestamp|list<(int64|float64|string)>)$")
]
"""Type of a column's values: ``timestamp`` is ISO 8601 in JSON."""
Variable = Annotated[str, StringConstraints(pattern=r"^EVENKEEL_KAFKA_[A-Z0-9_]{1,200}$")]
"""Name of an environment variable that a spec may read. The prefix keeps specs from sending other variables, which may
hold secrets, to brokers of their choice."""
_TOPIC = re.compile(r"^kafka://([\w.-]+:\d{1,5}(?:,[\w.-]+:\d{1,5})*)/([\w.-]{1,249})$", re.ASCII)


class Security(Spec):
    """Security settings of the connection to brokers. Fields name environment variables, which hold the secrets.

    ``username`` and ``password`` are those of SASL. ``ca``, ``certificate`` and ``key`` (with ``key_password``) are
    texts in PEM: the trusted authorities (default: the system's), and the identity of the run.
    """

    protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    username: Variable | None = None
    password: Variable | None = None
    ca: Variable | None = None
    certificate: Variable | None = None
    key: Variable | None = None
    key_password: Variable | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Names of environment variables by field, without the fields that are not set."""
        names = ("username", "password", "ca", "certificate", "key", "key_password")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Messages(Spec):
    """The rows in the messages of a topic, ``uri: kafka://HOST:PORT,HOST:PORT/TOPIC``.

    ``format``: ``json_lines``, one JSON object in each line of a message, or ``arrow``, a stream of Arrow's IPC format.
    ``columns``: the columns to read, with their types. A key that an object lacks is null.
    """

    format: Literal["json_lines", "arrow"] = "json_lines"
    columns: dict[Column, ColumnType] = Field(min_length=1, max_length=1000)
    security: Security = Security()


def brokers_and_topic(uri: str) -> tuple[str, str] | None:
    """Return (brokers, topic) of a uri ``kafka://BROKERS/TOPIC``; None for any other uri."""
    match = _TOPIC.match(uri)
    return None if match is None else (match[1], match[2])
