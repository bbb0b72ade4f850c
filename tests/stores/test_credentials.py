"""Credentials come from the environment and the clouds' own files. A missing one is a clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cachetool.core.errors import AccessDenied, UsageError
from cachetool.stores.credentials import azure_options, gcs_options, s3_options

URL = "s3://bucket"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Return an environment with only a home folder."""
    (tmp_path / ".aws").mkdir()
    return {"HOME": str(tmp_path)}


def aws_files(home: dict[str, str], *, credentials: str = "", config: str = "") -> None:
    folder = Path(home["HOME"]) / ".aws"
    (folder / "credentials").write_text(credentials)
    (folder / "config").write_text(config)


def test_keys_in_the_environment_have_priority(home: dict[str, str]) -> None:
    aws_files(home, credentials="[default]\naws_access_key_id = file\naws_secret_access_key = file\n")
    env = {**home, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token"}

    assert s3_options(URL, env) == {
        "region": "us-east-1",
        "access_key_id": "id",
        "secret_access_key": "secret",
        "session_token": "token",
    }


def test_a_profile_of_the_shared_files_sets_keys_region_and_endpoint(home: dict[str, str]) -> None:
    aws_files(
        home,
        credentials="[default]\naws_access_key_id=no\n[lab]\naws_access_key_id=id\naws_secret_access_key = a%b=c/d\n",
        config="[profile lab]\nregion = eu-west-3\nendpoint_url = http://127.0.0.1:9000/\ns3 =\n  max_queue_size = 5\n",
    )

    assert s3_options(URL, {**home, "AWS_PROFILE": "lab"}) == {
        "region": "eu-west-3",
        "endpoint": "http://127.0.0.1:9000",
        "virtual_hosted_style_request": False,
        "access_key_id": "id",
        "secret_access_key": "a%b=c/d",
    }


def test_the_default_profile_needs_no_name_and_the_files_may_be_in_another_folder(
    home: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "keys.ini").write_text(
        "[default]\naws_access_key_id=id\naws_secret_access_key=secret\naws_session_token=token\n"
    )
    (tmp_path / "config.ini").write_text("[default]\nregion=eu-north-1\n")
    env = {
        **home,
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys.ini"),
        "AWS_CONFIG_FILE": str(tmp_path / "config.ini"),
    }

    found = s3_options(URL, env)

    assert (found["access_key_id"], found["session_token"], found["region"]) == ("id", "token", "eu-north-1")


def test_a_token_in_the_environment_is_not_mixed_with_keys_of_a_file(home: dict[str, str]) -> None:
    aws_files(home, credentials="[default]\naws_access_key_id=id\naws_secret_access_key=secret\n")

    with pytest.raises(AccessDenied, match="unset it") as caught:
        s3_options(URL, {**home, "AWS_SESSION_TOKEN": "CANARY"})

    assert "CANARY" not in str(caught.value)


def test_the_environment_overrides_region_and_endpoint_of_the_profile(home: dict[str, str]) -> None:
    aws_files(home, config="[default]\nregion = eu-west-3\nendpoint_url = http://file\n")
    env = {
        **home,
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ENDPOINT_URL_S3": "https://env",
        "AWS_DEFAULT_REGION": "sa-east-1",
    }

    assert s3_options(URL, env) == {
        "region": "sa-east-1",
        "endpoint": "https://env",
        "virtual_hosted_style_request": False,
        "skip_signature": True,
    }


SERVICES = """
[profile lab]
aws_access_key_id = id
aws_secret_access_key = CANARY
services = here
endpoint_url = https://profile
[services here]
dynamodb =
  endpoint_url = https://dynamodb
s3 =
  addressing_style = path
  endpoint_url = https://services
[profile plain]
aws_access_key_id = plain
aws_secret_access_key = CANARY
endpoint_url = https://profile
[profile quiet]
aws_access_key_id = quiet
aws_secret_access_key = CANARY
ignore_configured_endpoint_urls = true
endpoint_url = https://profile
[profile half]
aws_access_key_id = half
aws_secret_access_key = CANARY
services = none
[profile other]
aws_access_key_id = other
aws_secret_access_key = CANARY
services = other
endpoint_url = https://profile
[services other]
dynamodb =
  endpoint_url = https://dynamodb
"""


@pytest.mark.parametrize(
    ("env", "endpoint"),
    [
        ({"AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "https://all", "AWS_ENDPOINT_URL_S3": "https://s3"}, "https://s3"),
        ({"AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "https://all"}, "https://all"),
        ({"AWS_PROFILE": "lab"}, "https://services"),
        ({"AWS_DEFAULT_PROFILE": "lab"}, "https://services"),
        ({"AWS_PROFILE": "plain", "AWS_DEFAULT_PROFILE": "lab"}, "https://profile"),
        ({"AWS_PROFILE": "other"}, "https://profile"),
        ({"AWS_PROFILE": "lab", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, None),
        ({"AWS_PROFILE": "quiet"}, None),
    ],
)
def test_endpoints_have_the_priority_of_the_aws_tools(
    home: dict[str, str], env: dict[str, str], endpoint: str | None
) -> None:
    aws_files(home, config=SERVICES)

    options = s3_options(URL, {**home, **env})

    assert options.get("endpoint") == endpoint
    assert options["access_key_id"] == (
        "plain"
        if "plain" in env.values()
        else {"other": "other", "quiet": "quiet"}.get(env.get("AWS_PROFILE", ""), "id")
    )


def test_an_ignored_endpoint_of_the_environment_is_overridden(home: dict[str, str]) -> None:
    """The client reads that variable as well."""
    aws_files(home, config=SERVICES)
    env = {**home, "AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "eu-west-1"}

    options = s3_options(URL, {**env, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"})

    assert options["endpoint"] == "https://s3.eu-west-1.amazonaws.com"


def test_missing_services_sections_are_named(home: dict[str, str]) -> None:
    aws_files(home, config=SERVICES)

    with pytest.raises(AccessDenied, match=r"profile 'half' names the services 'none'.*\[services none\]"):
        s3_options(URL, {**home, "AWS_PROFILE": "half"})
    # Both remedies work: the section, or the endpoint in the environment.
    aws_files(home, config=f"{SERVICES}[services none]\ns3 =\n  endpoint_url = https://now\n")
    assert s3_options(URL, {**home, "AWS_PROFILE": "half"})["endpoint"] == "https://now"


@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_the_variable_that_names_an_unknown_profile_is_named(home: dict[str, str], variable: str) -> None:
    aws_files(home, config=SERVICES)

    with pytest.raises(AccessDenied, match=rf"no profile 'nope' \({variable}\)") as caught:
        s3_options(URL, {**home, variable: "nope"})
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://user:CANARY@host", "user:CANARY", "http://a b:CANARY"])
@pytest.mark.parametrize("where", ["services", "profile"])
def test_an_invalid_endpoint_of_a_file_is_named_but_not_quoted(home: dict[str, str], url: str, where: str) -> None:
    aws_files(
        home,
        config=SERVICES.replace(f"https://{where}", url).replace(
            "services = here", "" if where == "profile" else "services = here"
        ),
    )

    with pytest.raises(UsageError, match=r"endpoint_url of (s3 in \[services here\]|profile 'lab')") as caught:
        s3_options(URL, {**home, "AWS_PROFILE": "lab"})
    assert "CANARY" not in str(caught.value)


def test_missing_credentials_are_an_error_that_names_the_variables(home: dict[str, str]) -> None:
    with pytest.raises(AccessDenied, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        s3_options(URL, home)

    assert URL in str(caught.value)
    assert str(caught.value).count("\n") <= 1


@pytest.mark.parametrize(
    "given",
    [
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1/credentials"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token"},
        {"AWS_EC2_METADATA_DISABLED": "false"},
    ],
)
def test_the_client_reads_keys_only_from_places_in_the_environment(home: dict[str, str], given: dict[str, str]) -> None:
    assert s3_options(URL, {**home, **given}) == {"region": "us-east-1"}


@pytest.mark.parametrize("set_one", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_an_incomplete_pair_of_keys_names_the_missing_one(home: dict[str, str], set_one: str) -> None:
    other = ({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} - {set_one}).pop()

    with pytest.raises(AccessDenied, match=f"{other} is not set"):
        s3_options(URL, {**home, set_one: "x"})


def test_an_unknown_profile_is_named(home: dict[str, str]) -> None:
    with pytest.raises(AccessDenied, match="no profile 'nope'"):
        s3_options(URL, {**home, "AWS_PROFILE": "nope"})


def test_a_profile_of_single_sign_on_advises_how_to_get_keys(home: dict[str, str]) -> None:
    aws_files(home, config="[profile work]\nsso_session = corp\nsso_account_id = 1\n")

    with pytest.raises(AccessDenied, match="export-credentials --profile work"):
        s3_options(URL, {**home, "AWS_PROFILE": "work"})


@pytest.mark.parametrize("text", ["aws_secret_access_key = CANARY\n", "[default\nCANARY", "[default]\nCANARY CANARY\n"])
def test_a_damaged_file_is_named_but_never_quoted(home: dict[str, str], text: str) -> None:
    aws_files(home, credentials=text)

    with pytest.raises(AccessDenied, match="credentials") as caught:
        s3_options(URL, home)

    assert "CANARY" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_invalid_endpoint_is_refused_without_its_user_info(home: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL") as caught:
        s3_options(URL, {**home, "AWS_ENDPOINT_URL": "ftp://user:CANARY@host"})

    assert "CANARY" not in str(caught.value)


def test_gcs_accepts_a_key_file_the_gcloud_login_or_nothing_for_public_data(
    home: dict[str, str], tmp_path: Path
) -> None:
    key = tmp_path / "key.json"
    key.write_text("{}")
    login = tmp_path / ".config" / "gcloud" / "application_default_credentials.json"

    assert gcs_options(URL, {**home, "GOOGLE_APPLICATION_CREDENTIALS": str(key)}) == {
        "application_credentials": str(key)
    }
    assert gcs_options(URL, {**home, "GOOGLE_SKIP_SIGNATURE": "1"}) == {"skip_signature": True}
    assert gcs_options(URL, {**home, "STORAGE_EMULATOR_HOST": "127.0.0.1:9", "GOOGLE_SKIP_SIGNATURE": "1"}) == {
        "base_url": "http://127.0.0.1:9",
        "skip_signature": True,
    }
    with pytest.raises(AccessDenied, match="GOOGLE_APPLICATION_CREDENTIALS"):
        gcs_options(URL, home)
    login.parent.mkdir(parents=True)
    login.write_text("{}")
    assert gcs_options(URL, home) == {"application_credentials": str(login)}


def test_gcs_names_a_missing_key_file(home: dict[str, str]) -> None:
    with pytest.raises(AccessDenied, match="not a file"):
        gcs_options(URL, {**home, "GOOGLE_APPLICATION_CREDENTIALS": "/nowhere.json"})


@pytest.mark.parametrize(
    ("options", "variable", "value"),
    [
        (gcs_options, "GOOGLE_BASE_URL", "ftp://host"),
        (gcs_options, "STORAGE_EMULATOR_HOST", "ftp://host"),
        (gcs_options, "GOOGLE_SERVICE_ACCOUNT", "/nowhere.json"),
        (gcs_options, "GOOGLE_SERVICE_ACCOUNT_PATH", "/nowhere.json"),
        (azure_options, "AZURE_STORAGE_ENDPOINT", "ftp://host"),
        (azure_options, "AZURE_ENDPOINT", "ftp://host"),
        (azure_options, "AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;BlobEndpoint=ftp://host"),
    ],
)
def test_the_variable_that_is_wrong_is_named(
    home: dict[str, str], options: Callable[..., object], variable: str, value: str
) -> None:
    with pytest.raises((UsageError, AccessDenied), match=rf"\b{variable}\b"):
        options(URL, env={**home, "AZURE_STORAGE_ACCOUNT_NAME": "a", variable: value})


def test_azure_accepts_a_key_a_token_or_a_connection_string(home: dict[str, str]) -> None:
    account = {**home, "AZURE_STORAGE_ACCOUNT_NAME": "acc"}
    text = "DefaultEndpointsProtocol=http;AccountName=dev;AccountKey=a+b/c==;BlobEndpoint=http://127.0.0.1:10000/dev;"

    assert azure_options(URL, env={**account, "AZURE_STORAGE_ACCOUNT_KEY": "k"}) == {
        "account_name": "acc",
        "account_key": "k",
    }
    assert azure_options(URL, "other", {**account, "AZURE_STORAGE_SAS_TOKEN": "s"})["account_name"] == "other"
    assert azure_options(URL, env={**home, "AZURE_STORAGE_CONNECTION_STRING": text}) == {
        "account_name": "dev",
        "account_key": "a+b/c==",
        "endpoint": "http://127.0.0.1:10000/dev",
    }


def test_azure_names_a_missing_account_or_credential(home: dict[str, str]) -> None:
    with pytest.raises(AccessDenied, match="no storage account"):
        azure_options(URL, env=home)
    with pytest.raises(AccessDenied, match="no credentials"):
        azure_options(URL, "acc", home)
