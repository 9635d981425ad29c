"""Brokers, and topics of rows with one number."""

from __future__ import annotations

import json

import pytest

from trainer.data.sources.topics.followed_topic import FollowedTopic
from trainer.spec import Follow
from trainer.spec.messages import Messages

MESSAGES = Messages(columns={"a": "int64"})


def values(*numbers):
    return [json.dumps({"a": number}).encode() for number in numbers]


@pytest.fixture
def notes():
    return []


@pytest.fixture
def following(tmp_path, notes):
    opened = []

    def make(uri, journal=tmp_path / "segments.jsonl", messages=MESSAGES, **settings):
        journal = journal or tmp_path / f"own-{len(opened)}.jsonl"
        opened.append(FollowedTopic(uri, messages, Follow(poll_seconds=0.05, **settings), journal, notes.append))
        return opened[-1]

    yield make
    for one in opened:
        one._kafka.close()
