"""Errors of storages speak of what the caller named, in words: no temporary names, no XML."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtree.errors import StorageError
from shardtree.storage import LocalStorage
from shardtree.stores._object_errors import request_failure

XML = (
    'Generic S3 error: Client error with status 404 Not Found: <?xml version="1.0" encoding="UTF-8"?>\n'
    "<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message>"
    "<BucketName>rnus</BucketName><RequestId>656c76696e6727</RequestId><HostId>Uuag1LuByRx9e6j5Onimru9pO4ZVKnJ2Qz7/C</HostId>"
    "</Error>"
)


def test_a_bucket_that_is_not_there_is_said_in_words() -> None:
    text = str(request_failure("cannot read 's3://rnus/metadata.json'", FileNotFoundError(XML), {}))
    assert "404 Not Found: NoSuchBucket: The specified bucket does not exist\n" in text
    assert "The bucket does not exist: correct its name in the URL" in text
    assert "<" not in text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error> after 3 retries", "SlowDown: Reduce"),
        ("400: <Error>\n<Code>AuthorizationHeaderMalformed</Code>", "400: AuthorizationHeaderMalformed"),
        ("503: <Error/>", "503: an answer in XML"),
        ("no <Errors> at all", "no <Errors> at all"),
    ],
)
def test_other_answers_are_too(answer: str, words: str) -> None:
    assert words in str(request_failure("cannot read", OSError(answer), {}))


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        LocalStorage(str(tmp_path / "nowhere")).replace("report.html", b"text", durable=True)
    assert f"cannot write '{tmp_path}/nowhere/report.html'" in str(caught.value)
    assert ".new" not in str(caught.value)
