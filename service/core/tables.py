"""The database's tables (SQLAlchemy Core).

``service/core/migrations`` creates them; a test checks that both agree.
"""

from __future__ import annotations

import datetime
import secrets
import time
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import AfterValidator, AwareDatetime, BeforeValidator

from service.core.tenants import DEFAULT_TENANT

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcTime(sa.types.TypeDecorator[datetime.datetime]):
    """A point in time: timezone-aware datetimes in and out, UTC in the database (SQLite keeps no zone)."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime.datetime | None, dialect: Any) -> datetime.datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without zone is ambiguous"
        value = value.astimezone(datetime.UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime.datetime | None, dialect: Any) -> datetime.datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value.astimezone(datetime.UTC)


def _in_utc(at: datetime.datetime) -> datetime.datetime:
    try:
        return at.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError(f"{at.isoformat()} lies outside the years 1 to 9999 in UTC") from None


def _as_text(sent: Any) -> Any:
    """Refuse a value that is not written as a time: pydantic takes numbers, in queries too, for seconds since 1970."""
    if not isinstance(sent, str) or sent.replace(".", "").lstrip("+-").isdecimal():
        raise ValueError("write a time as in RFC 3339, such as 2026-01-31T09:00:00Z")
    return sent


Instant = Annotated[
    AwareDatetime, BeforeValidator(_as_text, json_schema_input_type=AwareDatetime), AfterValidator(_in_utc)
]
"""A time with a time zone, sent by users; times that :class:`UtcTime` cannot represent are refused."""


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """Return ``prefix`` + 9 characters of time in ms + 10 random ones: sorts by creation, safe in paths and URLs."""
    value = (int(time.time() * 1000) << 50) | secrets.randbits(50)
    characters = []
    for _ in range(19):
        characters.append(_ALPHABET[value & 31])
        value >>= 5
    return f"{prefix}_{''.join(reversed(characters))}"


def _tenant(**options: Any) -> sa.Column[str]:
    return sa.Column("tenant", sa.String(63), nullable=False, server_default=DEFAULT_TENANT, **options)


api_key = sa.Table(
    "api_key",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    _tenant(),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("prefix", sa.String(16), nullable=False, unique=True),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("expires_at", UtcTime),
    sa.Column("revoked_at", UtcTime),
    sa.Column("rotated_at", UtcTime),
    sa.Column("old_prefix", sa.String(16)),  # of the previous secret, which is valid until old_until
    sa.Column("old_hash", sa.String(64)),
    sa.Column("old_until", UtcTime),
    sa.Index(None, "old_prefix", unique=True),
)

session = sa.Table(
    "session",
    metadata,
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.ForeignKey("api_key.id", ondelete="CASCADE"), nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("expires_at", UtcTime, nullable=False),
)

dataset = sa.Table(
    "dataset",
    metadata,
    _tenant(primary_key=True),
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
)

job = sa.Table(
    "job",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    _tenant(),
    sa.Column("name", sa.String(63), nullable=False, index=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("reason", sa.Text),  # reason for which the job waits
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("dataset_spec", sa.JSON, nullable=False),
    sa.Column("schedule_id", sa.String(64), index=True),
    sa.Column("schedule", sa.String(63)),  # name of the schedule, kept if the schedule is deleted
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("started_at", UtcTime),
    sa.Column("finished_at", UtcTime),
    sa.Column("not_before", UtcTime),  # backoff after an infrastructure failure
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("attempts", sa.JSON),  # workers of each attempt, with reason (service.jobs.job_records.with_attempt)
    sa.Column("failures", sa.Integer, nullable=False),  # infrastructure failures since submission or retry
    sa.Column("home_id", sa.String(64), index=True),  # the EVENKEEL_HOME whose runner runs the job
    sa.Column("lease", sa.String(64)),  # token of this attempt, also in its run.json; needed to publish
    sa.Column("launched_at", UtcTime),  # launch of this attempt; null between claim and launch
    sa.Column("released", sa.Boolean, nullable=False),  # true if no process of the job is left
    sa.Column("parent_version", sa.String(64)),
    sa.Column("events_offset", sa.BigInteger, nullable=False),  # bytes of events.jsonl that are in this database
    sa.Column("heartbeat_at", UtcTime),
    sa.Column("preparation", sa.JSON),  # its progress; null unless data are being prepared
    sa.Column("progress", sa.JSON),
    sa.Column("publication", sa.JSON),
    sa.Column("error", sa.JSON),
    sa.Column("needs", sa.JSON),  # cores, memory, GPUs of its host (service.jobs.admission); null until predicted
    sa.Column("lineage", sa.JSON),  # inputs of the run, as the run reports them
    sa.Column("traceparent", sa.String(55)),  # of the request that submitted the job (W3C Trace Context)
    sa.Index(None, "tenant", "id"),
)

job_label = sa.Table(
    "job_label",
    metadata,
    sa.Column("job_id", sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("key", sa.String(63), primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
    sa.Index(None, "key", "value"),
)

job_metric = sa.Table(
    "job_metric",
    metadata,
    sa.Column("job_id", sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True),
    sa.Column("split", sa.String(16), primary_key=True),
    sa.Column("values", sa.JSON, nullable=False),
)

job_event = sa.Table(
    "job_event",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("job_id", sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    sa.Column("type", sa.String(16), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index(None, "job_id", "id"),
    sqlite_autoincrement=True,
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("body_hash", sa.String(64), nullable=False),
    # of the request that reserved the key; another request may take over
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("job_id", sa.String(64)),  # the job that the request created or changed
    sa.Column("answer", sa.JSON),  # response without a job; both are null while the request is in flight
    sa.Column("created_at", UtcTime, nullable=False),
)

schedule = sa.Table(
    "schedule",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    _tenant(),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("cron", sa.String(255), nullable=False),
    sa.Column("timezone", sa.String(64), nullable=False),
    sa.Column("job", sa.JSON, nullable=False),
    sa.Column("catchup", sa.String(8), nullable=False),
    sa.Column("misfire_grace_seconds", sa.Float, nullable=False),
    sa.Column("overlap", sa.String(8), nullable=False),
    sa.Column("paused", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("next_fire_at", UtcTime, index=True),
    sa.UniqueConstraint("tenant", "name"),
)

firing = sa.Table(
    "firing",
    metadata,
    sa.Column("schedule_id", sa.ForeignKey("schedule.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("fire_at_utc", UtcTime, primary_key=True),
    sa.Column("kind", sa.String(8), nullable=False),  # cron | trigger
    sa.Column("outcome", sa.String(8), nullable=False),  # started | skipped | missed | failed
    sa.Column("firing_date", sa.String(10), nullable=False),
    sa.Column("job_id", sa.String(64)),
    sa.Column("reason", sa.Text),
    sa.Column("created_at", UtcTime, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("at", UtcTime, nullable=False, index=True),
    sa.Column("tenant", sa.String(63), nullable=False),  # owner of the object
    sa.Column("key_id", sa.String(64), nullable=False),
    sa.Column("key_name", sa.String(63), nullable=False),
    sa.Column("action", sa.String(128), nullable=False),  # method and route
    sa.Column("object", sa.String(255), nullable=False),  # path of the object that was created or changed
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("address", sa.String(64), nullable=False),
    sa.Index(None, "tenant", "id"),
)

webhook = sa.Table(
    "webhook",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(63), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("events", sa.JSON, nullable=False),
    sa.Column("secret", sa.String(64), nullable=False),  # not hashed: it signs every delivery
    sa.Column("paused", sa.Boolean, nullable=False),
    sa.Column("reason", sa.Text),  # reason for which the service paused the webhook
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Index(None, "tenant", "id"),
)

webhook_delivery = sa.Table(
    "webhook_delivery",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("webhook_id", sa.ForeignKey("webhook.id", ondelete="CASCADE"), nullable=False),
    sa.Column("event", sa.String(32), nullable=False),
    sa.Column("payload", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("next_at", UtcTime, index=True),  # null: delivered, or given up
    sa.Column("delivered_at", UtcTime),
    sa.Column("status", sa.Integer),  # HTTP status of the last response
    sa.Column("error", sa.Text),
    sa.Index(None, "webhook_id", "id"),
)

sweep = sa.Table(
    "sweep",
    metadata,
    sa.Column("name", sa.String(80), primary_key=True),
    sa.Column("began_at", UtcTime, nullable=False),
)
