"""No secret and no terminal control code is shown."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachetool.stores import canonical, redact, scrub
from cachetool.stores.redact import SECRET_VARIABLES

CANARY = "Canary0123456789"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3://KEY:SECRET@bucket/a", "s3://bucket/a"),
        ("https://user:pass@host:8443/a?X-Amz-Signature=abc#part", "https://host:8443/a"),
        ("https://user:p@ss@host/a", "https://host/a"),
        ("https://host?sig=abc", "https://host"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
        ("abfss://container:secret@account/a", "abfss://account/a"),
        ("s3://KEY:SEC/RET@bucket/a", "s3://bucket/a"),
        ("s3://KEY:12/RET@bucket/a", "s3://bucket/a"),
        ("http://user:pa/ss@host/a", "http://host/a"),
        ("http://user:pa#ss@host:80/a", "http://host:80/a"),
        ("http://user:12?ss@host/a", "http://host/a"),
        ("sftp://user:/ss@host/a", "sftp://host/a"),
        ("https://user:pa/ss@host/a?t=b@c", "https://host/a"),
        ("github://org:repo/data@v1/x.npy", "github://org:repo/data@v1/x.npy"),
        ("zip://a.csv::https://host/b@c.zip", "zip://a.csv::https://host/b@c.zip"),
        ("http://host:8080/a@b/c", "http://host:8080/a@b/c"),
        ("http://[::1]/a@b", "http://[::1]/a@b"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("s3://bucket/a@b:c", "s3://bucket/a@b:c"),
        ("https://host/a@b?c@d", "https://host/a@b"),
        ("/a folder/with?odd#names", "/a folder/with?odd#names"),
        ("simplecache::s3://KEY:SECRET@bucket/a", "simplecache::s3://bucket/a"),
        ("file:///a?b#c", "file:///a?b#c"),
        ("s3://bucket/run#1/a", "s3://bucket/run#1/a"),
        ("hf://datasets/o/n/run#1", "hf://datasets/o/n/run#1"),
        ("s3://KEY:SE#CR/ET@bucket/run#1/a", "s3://bucket/run#1/a"),
        ("s3://a#b:SEC/RET@bucket/run", "s3://a"),
        ("s3://@:SECRET?SECRET@bucket/a", "s3://bucket/a"),
        ("https://u:p@host:8080?user=me@corp.com&token=SECRET", "https://host:8080"),
        ("https://u@x:pw?user=me@corp&token=SECRET", "https://***"),
        ("wasbs://container@account/a", "wasbs://container@account/a"),
        ("wasbs://container:secret@account/a", "wasbs://account/a"),
        ("github://org:repo@main/data", "github://main/data"),
        ("s3://bucket/\x1b[31mred\n", "s3://bucket/\\x1b[31mred\\n"),
        ("relative/\u202etxt", "relative/\\u202etxt"),
    ],
)
def test_a_url_is_shown_without_user_info_query_and_control_codes(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://u:{CANARY}@host/a failed",
        f"GET https://host/a?X-Amz-Credential={CANARY}&X-Amz-Date=1 failed",
        f"GET https://acc.blob.core.windows.net/c?sv=1&sig={CANARY}%3D failed",
        f"Authorization: AWS4-HMAC-SHA256 Credential=a/b, Signature={CANARY}",
        f"authorization Bearer {CANARY}",
        f'token="{CANARY} and more"',
        f"aws_secret_access_key = {CANARY}",
        f"AccountKey={CANARY};EndpointSuffix=x",
        f"<AWSAccessKeyId>x</AWSAccessKeyId> password: {CANARY}",
    ],
)
def test_a_message_is_quoted_without_text_that_looks_like_a_secret(text: str) -> None:
    assert CANARY not in scrub(text)
    assert "***" in scrub(text) or "host/a" in scrub(text) or "windows.net/c" in scrub(text)


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_values_of_credential_variables_are_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "wh/at+ever=")

    assert scrub("it said wh/at+ever= or wh%2Fat%2Bever%3D or wh/at%2Bever%3D.") == "it said *** or *** or ***."


@given(st.text())
def test_shown_text_can_be_printed(text: str) -> None:
    assert redact(text).isprintable()
    assert scrub(text).isprintable()


@example("s3", "0?", "#")
@given(
    st.sampled_from(["s3", "http", "https", "sftp", "gs"]),
    st.text(st.characters(exclude_characters="/", exclude_categories=["C"]), max_size=20),
    st.sampled_from(["", "/", "?", "#", "@", "%2F"]),
)
def test_user_info_is_never_shown(scheme: str, user: str, between: str) -> None:
    shown = redact(f"{scheme}://{user}:{CANARY}{between}{CANARY}@host/path?x={CANARY}")

    assert CANARY not in shown


SIGNED = "sv=2024-11-04&se=2026-01-01&sr=c&sp=rl&sig="


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://h/d?sr=1", "https://h/d?sr=2", False),
        ("https://h/d?expires=1", "https://h/d", False),
        ("https://h/d?sp=a&token=1", "https://h/d?sp=b&token=1", False),
        ("https://h/d?policy=a&sig=1", "https://h/d?policy=b&sig=1", False),
        ("https://h/d?a=1&a=2", "https://h/d?a=2&a=1", False),
        ("https://h/d?b=1&a=2", "https://h/d?a=2&b=1", True),
        (f"https://h/d?{SIGNED}a", f"https://h/d/?{SIGNED.replace('2026', '2027')}b", True),
        ("https://h/d?Expires=1&Signature=a&v=1", "https://h/d?Expires=2&Signature=b&v=1", True),
        ("https://h/d?Policy=1&Signature=a&Key-Pair-Id=K", "https://h/d?Policy=2&Signature=b&Key-Pair-Id=L", True),
        ("https://h/d?X-Amz-Date=1&X-Amz-Signature=a", "https://h/d?X-Amz-Date=2&X-Amz-Signature=b", True),
        ("https://h/d?token=1", "https://h/d", False),
        ("https://h/d#1", "https://h/d#2", True),
        ("https://u:p@h/d", "https://h/d", True),
        ("s3://b/run#1/", "s3://b/run#2/", False),
        ("s3://b/run#1/", "s3://b/run#1", True),
        ("memory://run#1", "memory://run#2", False),
        ("wasbs://c1@acc/d", "wasbs://c2@acc/d", False),
        ("adl://c1@acc/d", "adl://c2@acc/d", False),
        ("github://org:repo1@main/d", "github://org:repo2@main/d", False),
        ("git://repo:path@ref1/d", "git://repo:path@ref2/d", False),
        ("git://repo1:ref@d", "git://repo2:ref@d", False),
        (f"https://h/d?{SIGNED}a", "https://h/d", False),
    ],
)
def test_a_url_with_another_signature_is_the_same_source(one: str, other: str, *, same: bool) -> None:
    assert (canonical(one) == canonical(other)) is same


@pytest.mark.parametrize("query", ["token=1", "X-Amz-Date=1&X-Amz-Signature=a", SIGNED])
def test_the_shown_form_of_a_signed_url_is_not_the_same_source(query: str) -> None:
    """A repair knows only the shown form."""
    url = f"https://h/d/?{query}"

    assert canonical(redact(url)) != canonical(url)
