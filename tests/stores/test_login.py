"""Credentials that expire: they are read again from their place when they are refused or close to their end."""

from __future__ import annotations

import base64
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachetool.core.errors import AccessDenied
from cachetool.stores import Limits, Object, open_store
from cachetool.stores import login as module
from cachetool.stores.credentials import marks
from tests.servers import Http, Scripted, folder_server, hub_server, scripted_server
from tests.temporary_keys import Keys, answer_s3, key_of

ITEM = Object("00001.cls", 1, "e1")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Create a credentials file with the keys ``OLD``."""
    found = Keys(tmp_path / "keys")
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    return found


def server(
    monkeypatch: pytest.MonkeyPatch, accepts: Callable[[str | None], bool], refuse: str = "ExpiredToken"
) -> Http:
    """Serve a bucket of 20 objects, two per page, for the accepted keys, until the end of the test."""
    context = scripted_server(lambda handler: answer_s3(handler, 20, accepts=accepts, refuse=refuse, page=2))
    found = context.__enter__()
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
    _open.append(context)
    return found


_open: list[object] = []


@pytest.fixture(autouse=True)
def closed() -> object:
    """Close servers at the end of their test."""
    yield
    while _open:
        _open.pop().__exit__(None, None, None)  # type: ignore[attr-defined]


def keys_used(http: Http) -> list[str | None]:
    return [key_of(headers) for _, headers in http.requests]


@pytest.mark.parametrize(
    "refuse",
    [
        "ExpiredToken",
        "InvalidAccessKeyId",
        "TokenRefreshRequired",
        "RequestExpired",
        "ExpiredTokenException",
        "401",
        "403",
    ],
)
def test_a_refused_request_is_repeated_with_the_current_keys_of_the_file(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, refuse: str
) -> None:
    valid = {"OLD"}
    http = server(monkeypatch, lambda key: key in valid, refuse)
    store = open_store("s3://b/d/")
    assert bytes(store.get(ITEM)) == b"1"
    keys.write("NEW")
    valid.symmetric_difference_update({"OLD", "NEW"})

    assert bytes(store.get(ITEM)) == b"1"
    assert bytes(store.get_range(ITEM, 0, 1)) == b"1"
    assert keys_used(http) == ["OLD", "OLD", "NEW", "NEW"]


def test_keys_that_expire_during_a_listing_lose_and_duplicate_no_object(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = itertools.count()

    def accepts(key: str | None) -> bool:
        if (number := next(asked)) == 4:
            keys.write("NEW")
        return key == ("OLD" if number < 4 else "NEW")

    http = server(monkeypatch, accepts)
    listed = [item.key for page in open_store("s3://b/d/").list() for item in page]

    assert listed == [f"{number:05d}.cls" for number in range(20)]
    assert keys_used(http)[3:6] == ["OLD", "OLD", "NEW"]


def test_the_client_waits_for_an_empty_or_incomplete_credentials_file(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = {"OLD"}
    server(monkeypatch, lambda key: key in valid)
    store = open_store("s3://b/d/")
    states = iter(["[default]\naws_access_key_id=NE", "[default]\naws_acc", Keys.text("NEW")])
    clock = SimpleNamespace(
        sleep=lambda _: keys.path.write_text(next(states)), monotonic=time.monotonic, time=time.time
    )
    monkeypatch.setattr(module, "time", clock)  # other threads sleep as well
    keys.path.write_text("")
    valid.symmetric_difference_update({"OLD", "NEW"})

    assert bytes(store.get(ITEM)) == b"1"
    assert next(states, None) is None


def test_a_refusal_despite_new_keys_ends_in_one_line_without_secrets(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = server(monkeypatch, lambda key: False, "AccessDenied")
    store = open_store("s3://b/d/")
    with pytest.raises(AccessDenied, match=r"'00001\.cls': access denied \(403 AccessDenied\)") as caught:
        store.get(ITEM)
    assert len(http.requests) == 1, "the same keys are not tried twice"

    keys.write("NEW")
    with pytest.raises(AccessDenied) as again:
        store.get(ITEM)
    assert keys_used(http) == ["OLD", "OLD", "NEW"]
    for error in (caught, again):
        assert "\n" not in str(error.value)
        assert not any(secret in str(error.value) for secret in ("OLD", "NEW", Keys.SECRET, Keys.TOKEN))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Create a ``credential_process`` that prints the keys K1, K2, .... Return the file that counts its runs."""

    def made(expires: str = "") -> Path:
        runs, script = tmp_path / "runs", tmp_path / "give keys.py"
        script.write_text(
            f"import json, sys\nfile = open({str(runs)!r}, 'a+'); file.write('x'); file.flush(); file.seek(0)\n"
            f"sys.stderr.write('CANARY')\nend = {expires!r}\n"
            "print(json.dumps({'Version': 1, 'AccessKeyId': f'K{len(file.read())}', 'SecretAccessKey': 'CANARY',"
            " 'SessionToken': 'CANARY', **({'Expiration': end} if end else {})}))\n"
        )
        config = tmp_path / "config"
        config.write_text(f"[default]\ncredential_process = \"{sys.executable}\" '{script}'\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        return runs

    return made


def test_a_credential_process_is_run_again_when_its_keys_expire(
    program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs, used = program(), dict[str | None, int]()

    def accepts(key: str | None) -> bool:
        used[key] = used.get(key, 0) + 1
        return used[key] <= 5

    server(monkeypatch, accepts)
    store = open_store("s3://b/d/")
    assert [bytes(store.get(ITEM)) for _ in range(17)] == [b"1"] * 17
    assert runs.read_text() == "xxxx"
    assert "CANARY" not in "".join(capfd.readouterr())


def test_a_credential_process_whose_keys_are_always_refused_is_an_error(
    program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = program()
    http = server(monkeypatch, lambda key: False)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    with pytest.raises(AccessDenied, match="expired") as caught:
        open_store("s3://b/d/").get(ITEM)
    assert len(runs.read_text()) == len(http.requests) == module.RENEWALS + 1
    assert "CANARY" not in str(caught.value)


def test_keys_are_read_again_before_they_expire_and_not_at_every_request(
    program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with a wrong clock prints keys that seem to have expired long ago. They are still accepted."""
    runs = program("2001-02-03T04:05:06Z")
    http = server(monkeypatch, lambda key: True)
    store = open_store("s3://b/d/")
    for _ in range(20):
        store.get(ITEM)
    assert runs.read_text() == "x"
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.EVERY)
    for _ in range(20):
        store.get(ITEM)
    assert runs.read_text() == "xx"
    assert keys_used(http) == ["K1"] * 20 + ["K2"] * 20


def test_a_failing_credential_process_is_named_but_not_quoted(
    program: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program()
    for script, said in (("print('CANARY'); raise SystemExit(3)", "code 3"), ("print('CANARY')", "did not print keys")):
        (tmp_path / "give keys.py").write_text(script)
        with pytest.raises(AccessDenied, match=said) as caught:
            open_store("s3://b/d/")
        assert "CANARY" not in str(caught.value)
    (tmp_path / "config").write_text("[default]\ncredential_process = /no/such/program CANARY\n")
    with pytest.raises(AccessDenied, match=r"'/no/such/program'.* cannot be run: No such file") as caught:
        open_store("s3://b/d/")
    assert "CANARY" not in str(caught.value)


def test_a_renewed_hub_token_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(b"hello")
    token = tmp_path / "token"
    token.write_text("OLD")
    monkeypatch.setenv("HF_TOKEN_PATH", str(token))
    with hub_server(tmp_path / "data", token="NEW") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        store = open_store("hf://datasets/owner/name")
        with pytest.raises(AccessDenied, match="refuses") as caught:
            list(store.list())
        assert "OLD" not in str(caught.value)
        token.write_text("NEW\n")
        (item,) = (item for page in store.list() for item in page)
        assert bytes(store.get(item)) == b"hello"


def test_a_changed_password_is_read_from_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    wanted = ["old"]

    def script(handler: Scripted) -> None:
        basic = base64.b64encode(f"me:{wanted[0]}".encode()).decode()
        good = handler.headers.get("Authorization") == f"Basic {basic}"
        handler.answer(200 if good else 401, b"hello" if good else b"")

    netrc.write_text("machine 127.0.0.1 login me password old\n")
    before = marks()
    with scripted_server(script) as http:
        store = open_store(f"{http.url}/d/")
        assert bytes(store.get(Object("a", 5))) == b"hello"
        wanted[0] = "new1"
        with pytest.raises(AccessDenied, match="401"):
            store.get(Object("a", 5))
        netrc.write_text("machine 127.0.0.1 login me password new1\n")
        assert bytes(store.get(Object("a", 5))) == b"hello"
    assert marks() != before


def test_a_server_that_needs_no_password_gets_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    with folder_server(tmp_path) as http:
        assert bytes(open_store(f"{http.url}/").get(Object("a", 5))) == b"hello"
    assert all("Authorization" not in headers for _, headers in http.requests)


def test_a_renewed_azure_signature_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(handler: Scripted) -> None:
        if "sig=NEW" in handler.path:
            handler.answer(200, b"hello", ETag='"abc"', Last_Modified="Fri, 21 Nov 2025 00:34:00 GMT")
        else:
            handler.answer(403, b"<Error><Code>AuthenticationFailed</Code><Message>sig=OLD</Message></Error>")

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sig=OLD")
    with scripted_server(script) as http:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{http.url}/acc")
        store = open_store("az://c/p")
        with pytest.raises(AccessDenied, match="AuthenticationFailed") as caught:
            store.get(Object("a", 5, "abc"))
        assert "sig" not in str(caught.value)
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sig=NEW")
        assert bytes(store.get(Object("a", 5, "abc"))) == b"hello"


def test_a_replaced_google_service_account_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    pem = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

    def write(name: str) -> None:
        account = {"type": "service_account", "client_email": name, "private_key": pem.decode(), "private_key_id": name}
        path.write_text(json.dumps(account))

    def script(handler: Scripted) -> None:
        claims = handler.headers.get("Authorization", "").partition(".")[2].partition(".")[0]
        issuer = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iss"] if claims else ""
        if issuer == "new@lab":
            handler.answer(200, b"hello", ETag='"abc"', Last_Modified="Fri, 21 Nov 2025 00:34:00 GMT")
        else:
            handler.answer(401, b"<Error><Code>AuthenticationRequired</Code></Error>")

    path = tmp_path / "account.json"
    write("old@lab")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with scripted_server(script) as http:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", http.url)
        store = open_store("gs://b/p", limits=Limits(retry=1.0))
        with pytest.raises(AccessDenied, match="401"):
            store.get(Object("a", 5, "abc"))
        write("new@lab")
        assert bytes(store.get(Object("a", 5, "abc"))) == b"hello"
