"""A bucket whose keys expire, and the credentials file with its current keys."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.servers import Scripted

_STATUS = {"401": 401, "403": 403, "AccessDenied": 403, "InvalidAccessKeyId": 403}


class Keys:
    """A credentials file of AWS."""

    SECRET, TOKEN = "CANARYsecret", "CANARYtoken"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {
            "AWS_SHARED_CREDENTIALS_FILE": str(path),
            "AWS_CONFIG_FILE": str(path.parent / "no-config"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "us-east-1",
        }
        self.write("OLD")

    @classmethod
    def text(cls, key: str) -> str:
        """Return the text of a file with these keys."""
        secrets = f"aws_secret_access_key={cls.SECRET}\naws_session_token={cls.TOKEN}"
        return f"[default]\naws_access_key_id={key}\n{secrets}\n"

    def write(self, key: str) -> None:
        """Replace the keys."""
        new = self.path.with_name("new")
        new.write_text(self.text(key))
        os.replace(new, self.path)


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the name of the key that signed a request."""
    given = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
    found = re.search(r"Credential=(\w+)/", given)
    return found.group(1) if found else None


def number_of(path: str) -> int | None:
    """Return the object that a request is for; None for a listing."""
    found = re.search(r"/(\d{5})\.cls", path)
    return int(found.group(1)) if found else None


def answer_s3(
    handler: Scripted,
    count: int,
    *,
    accepts: Callable[[str | None], bool],
    refuse: str = "ExpiredToken",
    page: int = 1000,
) -> bool:
    """Answer for a bucket with ``d/00000.cls`` and so on, whose values are their numbers. Return True if the key was
    accepted.
    """
    if not accepts(key_of(handler.headers)):
        body = b"" if refuse.isdigit() else f"<Error><Code>{refuse}</Code><Message>CANARY</Message></Error>".encode()
        handler.answer(_STATUS.get(refuse, 400), body)
        return False
    number = number_of(handler.path)
    if number is None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
        after = query.get("start-after", [""])[0]
        start = int(query.get("continuation-token", ["0"])[0]) or (
            int(re.findall(r"\d+", after)[0]) + 1 if after else 0
        )
        stop = min(count, start + page)
        each = "".join(
            f"<Contents><Key>d/{i:05d}.cls</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;e{i}&quot;</ETag><Size>{len(str(i))}</Size></Contents>"
            for i in range(start, stop)
        )
        more = f"<NextContinuationToken>{stop}</NextContinuationToken>" if stop < count else ""
        handler.answer(
            200,
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>'
            f"<KeyCount>{stop - start}</KeyCount><IsTruncated>{str(stop < count).lower()}</IsTruncated>"
            f"{more}{each}</ListBucketResult>".encode(),
        )
        return True
    body = str(number).encode()
    headers = {"ETag": f'"e{number}"', "Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    if handler.headers.get("Range"):
        handler.answer(206, body, Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}", **headers)
    else:
        handler.answer(200, body, **headers)
    return True
